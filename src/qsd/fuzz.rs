//! Fuzzing of what a daemon says on its monitor.

use super::{
    graph,
    monitor::{LONGEST_LINE, Waiting, hand_out},
};
use serde_json::Value;
use std::collections::BTreeMap;
use tokio::sync::oneshot;
use tokio_util::{
    bytes::BytesMut,
    codec::{Decoder as _, LinesCodec},
};

/// Commands that wait for an answer.
const CALLS: u64 = 4;

/// Any bytes, taken for what comes over the socket while some commands wait.
pub fn monitor(bytes: &[u8]) {
    let mut codec = LinesCodec::new_with_max_length(LONGEST_LINE);
    let mut input = BytesMut::from(bytes);
    let (mut waiting, mut answers) = (Waiting::new(), BTreeMap::new());
    for id in 1..=CALLS {
        let (reply, answer) = oneshot::channel();
        waiting.insert(id, reply);
        answers.insert(id, answer);
    }
    while let Ok(Some(line)) = codec.decode(&mut input) {
        let before = waiting.len();
        let is_qmp = hand_out(&line, &mut waiting).is_some();
        let mut answered = 0;
        answers.retain(|id, answer| match answer.try_recv() {
            Ok(outcome) => {
                answered += 1;
                assert!(line.contains(&id.to_string()), "{line} answers {id}");
                if let Ok(value) = outcome {
                    replies(&value);
                }
                false
            }
            Err(_) => waiting.contains_key(id),
        });
        assert!(answered <= 1 && before - waiting.len() <= 1, "{line}");
        assert!(!is_qmp || before - waiting.len() == answered, "{line}");
        if !is_qmp {
            return;
        }
    }
}

/// What is read of an answer.
fn replies(value: &Value) {
    let (stack, besides) = graph::layers_of(value);
    assert!(stack.iter().all(|name| !besides.contains(name)));
    _ = graph::has_image(value);
    _ = graph::size_of_top(value);
}
