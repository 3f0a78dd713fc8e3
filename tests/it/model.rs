//! Any sequence of what guests write and what callers ask for ends where a model of it does: every
//! volume and every snapshot holds, byte for byte, what the model says.
//!
//! A few sequences run here; `make hunt` has more. What failed says its seed:
//!
//! ```text
//! QSD_CSI_SEED=123 QSD_CSI_ROUNDS=1 cargo test --test it model:: -- --nocapture
//! ```
//!
//! The seed decides what is done, not what the scheduler makes of it: a race may need some rounds.

mod device;
pub(crate) mod guest;
mod held;
mod image;
pub(crate) mod picture;
pub(crate) mod records;
mod sequence;

use sequence::Sequence;
use std::time::Instant;

/// The steps of a sequence.
const STEPS: usize = 40;

/// How many sequences there are, where nobody says.
const FEW: u64 = 3;

fn given(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |number| number.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

#[tokio::test(flavor = "multi_thread")]
async fn any_sequence_ends_where_the_model_does() {
    let (first, count) = (given("QSD_CSI_SEED", 1), given("QSD_CSI_ROUNDS", FEW));
    for seed in first..first + count {
        let begin = Instant::now();
        let mut sequence = Sequence::begin(seed).await;
        for _ in 0..STEPS {
            sequence.step().await;
        }
        let said = sequence.end().await;
        eprintln!("seed {seed}: {:.1} s; {said}", begin.elapsed().as_secs_f64());
    }
}
