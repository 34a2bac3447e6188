//! A limit of log lines that strangers can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time between two lines.
const INTERVAL: Duration = Duration::from_mins(1);

/// Lets one log line through in a minute. The events are counted elsewhere.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    last: Mutex<Option<Instant>>,
}

impl LogLimit {
    /// Whether a line may be logged now.
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
    fn one_line_a_minute_is_allowed() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let seconds = [0, 1, 59, 60, 61, 119, 200, 201];
        let allowed = seconds.map(|second| limit.allows(start + Duration::from_secs(second)));
        assert_eq!(allowed, [true, false, false, true, false, false, true, false]);
    }
}
