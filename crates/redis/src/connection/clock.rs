//! Deadlines that do not overflow.

use std::time::Duration;

use tokio::time::Instant;

/// The longest time that is added to a clock: thirty years. Longer durations mean that there is no deadline.
const MAX_WAIT: Duration = Duration::from_hours(24 * 365 * 30);

/// Returns the deadline `duration` from now.
pub(crate) fn after(duration: Duration) -> Instant {
    later(Instant::now(), duration)
}

/// Returns the deadline `duration` after `from`.
pub(crate) fn later(from: Instant, duration: Duration) -> Instant {
    from + duration.min(MAX_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_duration_does_not_overflow() {
        assert!(after(Duration::MAX) > after(Duration::from_hours(24)));
    }
}
