//! Deadlines that no duration overflows.

use std::time::Duration;

use tokio::time::Instant;

/// Later than anything that is waited for: thirty years.
const NEVER: Duration = Duration::from_hours(24 * 365 * 30);

/// The moment after so long. Somebody who waits for ever says so with a duration that no clock can add.
pub(crate) fn after(duration: Duration) -> Instant {
    later(Instant::now(), duration)
}

/// The same from another moment on.
pub(crate) fn later(from: Instant, duration: Duration) -> Instant {
    from + duration.min(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_ever_is_a_moment_too() {
        assert!(after(Duration::MAX) > after(Duration::from_hours(24)));
    }
}
