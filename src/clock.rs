//! The time of day: what people are told. Nothing else goes by it, for it may jump: what waits, waits
//! by a clock that only goes on (`Instant`), and the order of things is that of layers.

use std::time::{SystemTime, UNIX_EPOCH};

/// The file that a test has the time in, in seconds since 1970.
#[cfg(debug_assertions)]
const PRETENDED: &str = "QSD_CSI_CLOCK";

/// Now, by the clock of the machine. One that was not set may be before 1970, which no record and no
/// message can say.
pub(crate) fn now() -> SystemTime {
    pretended().unwrap_or_else(SystemTime::now).max(UNIX_EPOCH)
}

#[cfg(debug_assertions)]
fn pretended() -> Option<SystemTime> {
    let text = std::fs::read_to_string(std::env::var_os(PRETENDED)?).ok()?;
    let seconds: i64 = text.trim().parse().ok()?;
    let away = std::time::Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH.checked_sub(away) } else { UNIX_EPOCH.checked_add(away) }
}

/// A release build knows one clock.
#[cfg(not(debug_assertions))]
fn pretended() -> Option<SystemTime> {
    None
}
