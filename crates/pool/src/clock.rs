//! The clock of a pool: the system's, or a virtual one for simulations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{AtomicU64, Ordering::SeqCst};

/// Time added to time. What is longer than a century is one: no clock could count it.
pub(crate) fn later(now: Instant, by: Duration) -> Instant {
    now + by.min(Duration::from_hours(100 * 365 * 24))
}

#[derive(Debug, Clone)]
pub(crate) enum Clock {
    System,
    /// Stands still but for [`Clock::advance`].
    Virtual {
        start: Instant,
        nanos: Arc<AtomicU64>,
    },
}

impl Clock {
    pub(crate) fn stopped() -> Self {
        Self::Virtual { start: Instant::now(), nanos: Arc::new(AtomicU64::new(0)) }
    }

    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::System => Instant::now(),
            Self::Virtual { start, nanos } => *start + Duration::from_nanos(nanos.load(SeqCst)),
        }
    }

    pub(crate) fn advance(&self, by: Duration) {
        if let Self::Virtual { nanos, .. } = self {
            nanos.fetch_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX), SeqCst);
        }
    }
}
