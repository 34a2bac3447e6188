//! Waiting for a condition, not for time.

use std::thread;
use std::time::{Duration, Instant};

/// The default deadline of tests: far beyond what a loaded machine needs, so that the condition will never hold if it is reached.
pub const PATIENCE: Duration = Duration::from_mins(1);

const POLL: Duration = Duration::from_millis(2);

/// Blocks until `condition` holds.
///
/// # Panics
///
/// If it does not hold after `deadline`. `what` completes the sentence "timed out waiting until …".
#[track_caller]
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < deadline, "timed out after {deadline:?} waiting until {what}");
        thread::sleep(POLL);
    }
}

/// Waits until `condition` holds, without blocking the tokio runtime. The deadline is real time even if the clock of the runtime is
/// paused.
///
/// # Panics
///
/// If it does not hold after `deadline`.
pub async fn wait_until_async(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < deadline, "timed out after {deadline:?} waiting until {what}");
        tokio::time::sleep(POLL).await;
    }
}
