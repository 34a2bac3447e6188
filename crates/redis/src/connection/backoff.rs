//! The delays between attempts to connect.

use std::time::Duration;

use crate::Options;

/// Counts the attempts to connect since a connection last stayed open for
/// [`backoff_reset_after`](Options::backoff_reset_after), and chooses the delays between them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// Returns the delay before the next attempt. The first attempt after a steady connection has none.
    pub(crate) fn next_delay(&mut self, options: &Options) -> Duration {
        let longest = options.min_backoff.saturating_mul(1 << self.attempts.saturating_sub(1).min(20));
        let longest = longest.min(options.max_backoff);
        let delay =
            if self.attempts == 0 { Duration::ZERO } else { longest.mul_f64(fastrand::f64().mul_add(0.5, 0.5)) };
        self.attempts = self.attempts.saturating_add(1);
        delay
    }

    /// Records that a connection was open for this time.
    pub(crate) fn record_open(&mut self, duration: Duration, options: &Options) {
        if duration >= options.backoff_reset_after {
            self.attempts = 0;
        }
    }
}
