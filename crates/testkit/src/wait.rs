//! Waiting for a condition, not for time.

use std::thread;
use std::time::{Duration, Instant};

/// The default timeout of tests. Far longer than a loaded machine needs, so if it is reached, the condition never holds.
pub const PATIENCE: Duration = Duration::from_mins(1);

const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Blocks until `condition` holds.
///
/// # Panics
///
/// If it does not hold after `timeout`. `what` completes the sentence "timed out waiting until …".
#[track_caller]
pub fn wait_until(what: &str, timeout: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < timeout, "timed out after {timeout:?} waiting until {what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until `condition` holds, without blocking the tokio runtime. The timeout is real time even if the clock of the runtime is
/// paused.
///
/// # Panics
///
/// If it does not hold after `timeout`.
pub async fn wait_until_async(what: &str, timeout: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < timeout, "timed out after {timeout:?} waiting until {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
