//! The clock of a pool: the system clock, or a virtual one for simulations.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU64, Ordering::SeqCst};

/// Returns the instant after a duration. The duration is limited to a century, because the addition panics on overflow.
pub(crate) fn instant_after(now: Instant, duration: Duration) -> Instant {
    now + duration.min(Duration::from_hours(100 * 365 * 24))
}

#[derive(Debug)]
pub(crate) struct Clock {
    start: Instant,
    /// The virtual time since the start, which only [`Clock::advance`] changes. `None` for the system clock.
    virtual_nanos: Option<AtomicU64>,
}

impl Clock {
    pub(crate) fn system() -> Self {
        Self { start: Instant::now(), virtual_nanos: None }
    }

    pub(crate) fn simulated() -> Self {
        Self { virtual_nanos: Some(AtomicU64::new(0)), ..Self::system() }
    }

    pub(crate) fn now(&self) -> Instant {
        match &self.virtual_nanos {
            None => Instant::now(),
            Some(nanos) => self.start + Duration::from_nanos(nanos.load(SeqCst)),
        }
    }

    /// Returns the nanoseconds since the start. They have half the size of an `Instant`, and overflow after five centuries.
    pub(crate) fn nanos(&self) -> u64 {
        nanos(self.now().saturating_duration_since(self.start))
    }

    pub(crate) fn advance(&self, by: Duration) {
        if let Some(now) = &self.virtual_nanos {
            now.fetch_add(nanos(by), SeqCst);
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
