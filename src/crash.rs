//! Named crash points: places where a test lets the process die between two durable steps.
//!
//! A debug build aborts at the point named by `QSD_CSI_CRASH_AT`; in a release build a point is
//! nothing at all.

/// The variable that arms a point.
#[cfg(debug_assertions)]
const ARMED: &str = "QSD_CSI_CRASH_AT";

/// Dies here, as by SIGKILL, when a test has armed `name`.
#[cfg(debug_assertions)]
pub(crate) fn point(name: &str) {
    if std::env::var_os(ARMED).is_some_and(|armed| armed == name) {
        std::process::abort();
    }
}

/// Nothing, in a release build.
#[cfg(not(debug_assertions))]
pub(crate) fn point(_name: &str) {}
