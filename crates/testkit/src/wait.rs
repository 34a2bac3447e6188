//! Waiting for a condition instead of for time.

use std::thread;
use std::time::{Duration, Instant};

/// The deadline to use when a test has no better one: far beyond what a loaded machine needs, so that reaching it means
/// that the thing will never happen.
pub const PATIENCE: Duration = Duration::from_mins(1);

const POLL: Duration = Duration::from_millis(2);

/// Blocks until `condition` holds.
///
/// # Panics
///
/// When it still does not hold after `deadline`; `what` completes the sentence "waited in vain until …".
#[track_caller]
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < deadline, "waited {deadline:?} in vain until {what}");
        thread::sleep(POLL);
    }
}

/// As [`wait_until`], without blocking the tokio runtime it is called on. The deadline is real time even when the
/// runtime's clock is paused.
///
/// # Panics
///
/// When the condition still does not hold after `deadline`.
pub async fn wait_until_async(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < deadline, "waited {deadline:?} in vain until {what}");
        tokio::time::sleep(POLL).await;
    }
}
