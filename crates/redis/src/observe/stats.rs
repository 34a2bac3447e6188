//! Statistics of a client.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::RequestPhase;
use crate::cache::CacheStats;
use crate::sync::{Mutex, lock};

/// The number of buckets of a [`Latency`].
const BUCKETS: usize = 26;

/// Statistics of a client. Returned by [`Client::stats`](crate::Client::stats).
///
/// Attempts to connect, lost connections, rejected requests and timeouts are counted for the shared connection and for the exclusive
/// ones. The other figures are those of the shared connection. Counters never decrease. The connection publishes its counters when it waits for the socket, so under load they may lag
/// slightly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// Requests that were written completely. A pipeline is one request.
    pub requests: u64,
    /// Replies read, including those whose caller has gone away. A pipeline has one for each command.
    pub replies: u64,
    /// Pushes read.
    pub pushes: u64,
    /// Bytes written, without handshakes.
    pub bytes_out: u64,
    /// Bytes read, without handshakes.
    pub bytes_in: u64,
    /// Attempts to connect, successful or not.
    pub connect_attempts: u64,
    /// Open connections that were lost.
    pub connections_lost: u64,
    /// Checks of a [`ClientSet`](crate::ClientSet) that the connection failed.
    pub health_checks_failed: u64,
    /// Requests rejected with [`Error::QueueFull`](crate::Error::QueueFull).
    pub rejected: u64,
    /// Requests that timed out.
    pub timeouts: TimeoutStats,
    /// The time from submission until a connection took the request.
    pub queue_latency: Latency,
    /// The time from there until the request was written completely.
    pub write_latency: Latency,
    /// The time from there until the last reply was read.
    pub reply_latency: Latency,
    /// Commands in flight now: queued, being written, or without a reply.
    pub in_flight: usize,
    /// The bytes of these commands.
    pub in_flight_bytes: usize,
    /// Requests in the queue now. A pipeline is one request.
    pub queued: usize,
    /// Changes of the login of open connections, the exclusive ones included.
    pub logins: LoginStats,
    /// The exclusive connections.
    pub exclusive: ExclusiveStats,
    /// The cache.
    pub cache: CacheStats,
    /// The subscriptions and their connection.
    pub pubsub: PubSubStats,
}

/// Changes of the login of open connections: see [`Credentials::changes`](crate::credentials::Credentials::changes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoginStats {
    /// Connections that changed their login.
    pub changed: u64,
    /// Logins that the server refused. The connections kept the previous ones.
    pub refused: u64,
    /// Calls of the provider after a change that failed or timed out.
    pub provider_failures: u64,
}

/// Statistics of the exclusive connections of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ExclusiveStats {
    /// Connections that are open now.
    pub open: usize,
    /// Open connections that a caller uses now.
    pub in_use: usize,
    /// Connections that were started.
    pub opened: u64,
    /// Elements that blocking commands popped after their callers had gone away. Each was given to
    /// [`Options::unclaimed_hook`](crate::Options::unclaimed_hook), or dropped if there is none.
    pub unclaimed: u64,
    /// Blocking commands whose callers had gone away and that may have popped an element: there was no reply.
    pub unknown: u64,
}

/// Statistics of the subscriptions of a client, and of the connection that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PubSubStats {
    /// Subscriptions now.
    pub subscriptions: usize,
    /// Different channels and patterns of these subscriptions now.
    pub channels: usize,
    /// Whether the connection is open and all subscriptions are restored.
    pub is_open: bool,
    /// Connections that were opened so far. It is the generation of the newest one.
    pub generation: u64,
    /// Attempts to connect, successful or not.
    pub connect_attempts: u64,
    /// Connections that were lost.
    pub connections_lost: u64,
    /// Messages read. One that several subscriptions receive counts once.
    pub messages: u64,
    /// Messages dropped because a subscription was full. One that several subscriptions miss counts for each.
    pub dropped: u64,
}

/// The counters of a client.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Rare events of all connections of the client, which are counted directly. The counters of the connection are zero here.
    rare: Arc<Mutex<ClientStats>>,
    /// The counters that the connection has published.
    connection: Mutex<ConnectionStats>,
}

/// The counters of a connection, updated by its task without a lock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ConnectionStats {
    pub(crate) requests: u64,
    pub(crate) replies: u64,
    pub(crate) pushes: u64,
    pub(crate) bytes_out: u64,
    pub(crate) bytes_in: u64,
    pub(crate) queue_latency: Latency,
    pub(crate) write_latency: Latency,
    pub(crate) reply_latency: Latency,
}

impl Counters {
    /// The counters of another connection of the same client.
    pub(crate) fn of_another_connection(other: &Self) -> Self {
        Self { rare: Arc::clone(&other.rare), connection: Mutex::default() }
    }

    /// Counts a rare event.
    pub(crate) fn count(&self, add: impl FnOnce(&mut ClientStats)) {
        add(&mut lock(&self.rare));
    }

    pub(crate) fn count_timeout(&self, phase: RequestPhase) {
        self.count(|stats| stats.timeouts.count(phase));
    }

    /// Returns what was last published, for the next connection to go on with.
    pub(crate) fn connection(&self) -> ConnectionStats {
        *lock(&self.connection)
    }

    pub(crate) fn publish(&self, stats: &ConnectionStats) {
        *lock(&self.connection) = *stats;
    }

    /// Returns all counters. The figures of the queue are zero.
    pub(crate) fn snapshot(&self) -> ClientStats {
        let connection = self.connection();
        ClientStats {
            requests: connection.requests,
            replies: connection.replies,
            pushes: connection.pushes,
            bytes_out: connection.bytes_out,
            bytes_in: connection.bytes_in,
            queue_latency: connection.queue_latency,
            write_latency: connection.write_latency,
            reply_latency: connection.reply_latency,
            ..*lock(&self.rare)
        }
    }
}

/// Requests that timed out, by the phase they were in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TimeoutStats {
    /// Waiting for a permit or in the queue.
    pub queued: u64,
    /// Waiting for a connection.
    pub connecting: u64,
    /// Partly written.
    pub writing: u64,
    /// Waiting for the reply.
    pub waiting: u64,
}

impl TimeoutStats {
    fn count(&mut self, phase: RequestPhase) {
        *match phase {
            RequestPhase::Queued => &mut self.queued,
            RequestPhase::Connecting => &mut self.connecting,
            RequestPhase::Writing => &mut self.writing,
            RequestPhase::Waiting => &mut self.waiting,
        } += 1;
    }
}

/// Records requests that began and ended at the same moments as one entry, because they were written or answered together.
#[derive(Default)]
pub(crate) struct LatencyGroup {
    since: Option<Instant>,
    count: u32,
}

impl LatencyGroup {
    /// Adds a request that ends now.
    #[inline]
    pub(crate) fn add(&mut self, since: Instant, now: Instant, latency: &mut Latency) {
        if self.since != Some(since) {
            self.finish(now, latency);
            self.since = Some(since);
        }
        self.count += 1;
    }

    /// Records the requests added last.
    pub(crate) fn finish(&mut self, now: Instant, latency: &mut Latency) {
        if let Some(since) = self.since.take() {
            latency.record_all(now.saturating_duration_since(since), std::mem::take(&mut self.count));
        }
    }
}

/// A histogram of durations, with buckets that double.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latency {
    count: u64,
    sum: Duration,
    max: Duration,
    buckets: [u64; BUCKETS],
}

impl Latency {
    pub(crate) fn record(&mut self, duration: Duration) {
        self.record_all(duration, 1);
    }

    /// Records the same duration `count` times.
    fn record_all(&mut self, duration: Duration, count: u32) {
        self.count += u64::from(count);
        self.sum = self.sum.saturating_add(duration.saturating_mul(count));
        self.max = self.max.max(duration);
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - micros.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += u64::from(count);
    }

    /// Returns the number of durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns the longest duration.
    pub fn max(&self) -> Duration {
        self.max
    }

    /// Returns the buckets: the upper bound of each, which it excludes, and its count. The first bound is 1 µs and each is twice
    /// the one before. The last bucket also has all durations above its bound, which is half a minute.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        self.buckets.iter().enumerate().map(|(bucket, count)| (Duration::from_micros(1 << bucket), *count))
    }

    /// Returns an upper bound of the quantile `q`, from 0 to 1, which is at most twice its true value.
    pub fn quantile(&self, q: f64) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "the result is exact to a factor of two only")]
        let rank = q.clamp(0.0, 1.0) * self.count as f64;
        let mut seen = 0;
        for (bound, count) in self.buckets() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "as above")]
            if count > 0 && seen as f64 >= rank {
                return bound.min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_double() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantile(0.5), Duration::ZERO);
        for (micros, below) in [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (1023, 1024), (1024, 2048)] {
            let before: Vec<_> = latency.buckets().collect();
            latency.record(Duration::from_micros(micros));
            let changed = latency.buckets().zip(before).find(|(now, before)| now != before).unwrap().0;
            assert_eq!(changed.0, Duration::from_micros(below), "{micros}");
        }
        latency.record(Duration::MAX);
        assert_eq!((latency.count(), latency.max(), latency.sum()), (8, Duration::MAX, Duration::MAX));
        assert_eq!(latency.buckets().last().unwrap().1, 1);
        assert_eq!(latency.quantile(0.5), Duration::from_micros(4));
        assert_eq!(latency.quantile(7.0), Duration::from_micros(1 << (BUCKETS - 1)));
        let (mut one_by_one, mut at_once) = (Latency::default(), Latency::default());
        (0..3).for_each(|_| one_by_one.record(Duration::from_millis(7)));
        at_once.record_all(Duration::from_millis(7), 3);
        assert_eq!(one_by_one, at_once);
    }
}
