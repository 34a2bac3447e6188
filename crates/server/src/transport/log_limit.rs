//! A rate limit for log lines that unauthenticated clients can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two lines.
const INTERVAL: Duration = Duration::from_mins(1);

/// Allows one log line per minute. The events themselves are counted in metrics.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    last: Mutex<Option<Instant>>,
}

impl LogLimit {
    /// Returns whether a line may be logged now.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_allowed = last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL);
        if is_allowed {
            *last = Some(now);
        }
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_minute_is_allowed() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let seconds = [0, 1, 59, 60, 61, 119, 200, 201];
        let allowed = seconds.map(|second| limit.allows(start + Duration::from_secs(second)));
        assert_eq!(allowed, [true, false, false, true, false, false, true, false]);
    }
}
