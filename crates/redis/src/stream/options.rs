//! The settings of a worker.

use std::time::Duration;

use crate::commands::StreamStart;

/// The shortest `min_idle` that is useful: the worker resets idle times three times as often.
const SHORTEST_MIN_IDLE: Duration = Duration::from_millis(30);
/// Servers reject longer times. It means that no entry is claimed.
const LONGEST_MIN_IDLE: Duration = Duration::from_hours(24 * 365 * 100);
/// The shortest time between two requests of the same kind that find nothing.
pub(super) const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// The settings of a [`Worker`](super::Worker).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerOptions {
    /// The consumer group. Workers of one group share its entries. Default: `workers`.
    pub group: String,
    /// The name of the consumer, which no other running worker of the group may have. Default: random, so that workers do not need to be
    /// told apart. Redis keeps the name of every consumer: a worker that restarts often needs a fixed one, with which it also finds its
    /// pending entries at once.
    pub consumer: String,
    /// Where a group that does not exist begins. `Now` is the start of the worker. Default: the beginning of the stream, so that no entry
    /// is missed.
    pub start: StreamStart,
    /// Handlers that run at the same time. Zero counts as one. Default: 1, so that entries are handled in order.
    pub max_concurrent: usize,
    /// Entries that are read at once, of all streams together but at least one of each. Zero counts as one. Up to twice as many are held
    /// in memory, besides those of running handlers. Default: 10, because they wait for the handlers.
    pub batch: usize,
    /// For how long a read waits on the server for new entries. A group that is deleted meanwhile is noticed afterwards. Less than 10 ms
    /// counts as 10 ms. Default: 5 s.
    pub block: Duration,
    /// How often an entry is delivered before it is moved to the dead-letter stream, which is when the handler fails once more. Zero
    /// counts as one, and `u64::MAX` means without a limit. Default: 10.
    pub max_deliveries: u64,
    /// The stream for entries that failed too often. It is not trimmed. Default: none, which is the name of the stream and `:dead`.
    pub dead_letter_stream: Option<String>,
    /// The delay before a failed entry is handled again. It doubles with each delivery, and each delay is shortened at random by up to a
    /// half. Less than 10 ms counts as 10 ms. Default: 1 s.
    pub min_backoff: Duration,
    /// The longest delay before a failed entry is handled again. Default: 1 min.
    pub max_backoff: Duration,
    /// Failed entries that may wait for another attempt. At the limit the worker reads no new entries. Zero counts as one. Default: 1000,
    /// so that a few bad entries do not stop the good ones, while an outage that fails all of them does.
    pub max_retrying: usize,
    /// The idle time after which an entry is claimed from its consumer, because the consumer must have ended. Less than 30 ms counts as
    /// 30 ms. Default: 1 min, longer than a restart of the server or a short outage takes.
    pub min_idle: Duration,
    /// The time between searches for entries to claim. Less than 10 ms counts as 10 ms. Default: 15 s.
    pub claim_interval: Duration,
    /// The time that running handlers have after [`stop`](super::WorkerHandle::stop). Then they are aborted, and their entries stay
    /// pending. Default: 30 s.
    pub grace: Duration,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            group: "workers".to_owned(),
            consumer: format!("worker-{:016x}", fastrand::u64(..)),
            start: StreamStart::Beginning,
            max_concurrent: 1,
            batch: 10,
            block: Duration::from_secs(5),
            max_deliveries: 10,
            dead_letter_stream: None,
            min_backoff: Duration::from_secs(1),
            max_backoff: Duration::from_mins(1),
            max_retrying: 1000,
            min_idle: Duration::from_mins(1),
            claim_interval: Duration::from_secs(15),
            grace: Duration::from_secs(30),
        }
    }
}

impl WorkerOptions {
    /// Sets [`group`](#structfield.group).
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// Sets [`consumer`](#structfield.consumer).
    #[must_use]
    pub fn consumer(mut self, consumer: impl Into<String>) -> Self {
        self.consumer = consumer.into();
        self
    }

    /// Sets [`start`](#structfield.start).
    #[must_use]
    pub fn start(mut self, start: StreamStart) -> Self {
        self.start = start;
        self
    }

    /// Sets [`max_concurrent`](#structfield.max_concurrent).
    #[must_use]
    pub fn max_concurrent(mut self, max_concurrent: usize) -> Self {
        self.max_concurrent = max_concurrent;
        self
    }

    /// Sets [`batch`](#structfield.batch).
    #[must_use]
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }

    /// Sets [`block`](#structfield.block).
    #[must_use]
    pub fn block(mut self, block: Duration) -> Self {
        self.block = block;
        self
    }

    /// Sets [`max_deliveries`](#structfield.max_deliveries).
    #[must_use]
    pub fn max_deliveries(mut self, max_deliveries: u64) -> Self {
        self.max_deliveries = max_deliveries;
        self
    }

    /// Sets [`dead_letter_stream`](#structfield.dead_letter_stream).
    #[must_use]
    pub fn dead_letter_stream(mut self, dead_letter_stream: impl Into<String>) -> Self {
        self.dead_letter_stream = Some(dead_letter_stream.into());
        self
    }

    /// Sets [`min_backoff`](#structfield.min_backoff).
    #[must_use]
    pub fn min_backoff(mut self, min_backoff: Duration) -> Self {
        self.min_backoff = min_backoff;
        self
    }

    /// Sets [`max_backoff`](#structfield.max_backoff).
    #[must_use]
    pub fn max_backoff(mut self, max_backoff: Duration) -> Self {
        self.max_backoff = max_backoff;
        self
    }

    /// Sets [`max_retrying`](#structfield.max_retrying).
    #[must_use]
    pub fn max_retrying(mut self, max_retrying: usize) -> Self {
        self.max_retrying = max_retrying;
        self
    }

    /// Sets [`min_idle`](#structfield.min_idle).
    #[must_use]
    pub fn min_idle(mut self, min_idle: Duration) -> Self {
        self.min_idle = min_idle;
        self
    }

    /// Sets [`claim_interval`](#structfield.claim_interval).
    #[must_use]
    pub fn claim_interval(mut self, claim_interval: Duration) -> Self {
        self.claim_interval = claim_interval;
        self
    }

    /// Sets [`grace`](#structfield.grace).
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Replaces values that are too small or too large to work.
    pub(super) fn limited(mut self) -> Self {
        self.max_concurrent = self.max_concurrent.max(1);
        self.batch = self.batch.max(1);
        self.block = self.block.max(MIN_INTERVAL);
        self.max_deliveries = self.max_deliveries.max(1);
        self.min_backoff = self.min_backoff.max(MIN_INTERVAL);
        self.max_retrying = self.max_retrying.max(1);
        self.min_idle = self.min_idle.clamp(SHORTEST_MIN_IDLE, LONGEST_MIN_IDLE);
        self.claim_interval = self.claim_interval.max(MIN_INTERVAL);
        self
    }

    /// Returns the delay before an entry that was delivered this often is handled again.
    pub(super) fn retry_delay(&self, deliveries: u64) -> Duration {
        backoff(self.min_backoff, self.max_backoff, deliveries)
    }

    /// Returns the time between two resets of the idle time of an entry.
    pub(super) fn extension_interval(&self) -> Duration {
        self.min_idle / 3
    }
}

/// Returns the delay after a number of failures in a row, at least one.
pub(super) fn backoff(min: Duration, max: Duration, failures: u64) -> Duration {
    let doublings = u32::try_from(failures.saturating_sub(1)).unwrap_or(u32::MAX).min(20);
    let longest = min.saturating_mul(1 << doublings).min(max.max(min));
    longest.mul_f64(1.0 - fastrand::f64() / 2.0).max(MIN_INTERVAL / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_up_to_the_longest() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(1));
        for (failures, longest) in [(0, 100), (1, 100), (2, 200), (3, 400), (5, 1000), (u64::MAX, 1000)] {
            for _ in 0..100 {
                let delay = backoff(min, max, failures);
                let longest = Duration::from_millis(longest);
                assert!(delay <= longest && delay >= longest / 2, "{failures}: {delay:?}");
            }
        }
        assert!(backoff(Duration::ZERO, Duration::ZERO, 1) > Duration::ZERO, "no loop without a delay");
        assert!(backoff(Duration::MAX, Duration::MAX, 9) > max);
    }
}
