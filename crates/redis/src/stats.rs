//! Statistics of a client.

use std::time::Duration;

use tokio::time::Instant;

use crate::Phase;

/// How many classes a [`Latency`] has.
const CLASSES: usize = 26;

/// What a client has done so far, and has in hand. Counts never go back.
///
/// The connection counts for itself and tells when it has nothing to do, so that under load the figures are a moment old.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// Requests that were wholly written; a pipeline is one.
    pub requests: u64,
    /// Replies that came, also those that nobody waited for any more; a pipeline has several.
    pub replies: u64,
    /// Pushes that came.
    pub pushes: u64,
    /// Bytes written, without handshakes.
    pub bytes_out: u64,
    /// Bytes read, without handshakes.
    pub bytes_in: u64,
    /// Attempts to connect, whatever came of them.
    pub attempts: u64,
    /// Connections that were lost, and made anew if that is wanted.
    pub lost: u64,
    /// Requests that were refused because there was no room.
    pub refused: u64,
    /// Requests that were late.
    pub timeouts: TimeoutStats,
    /// How long requests waited until a connection took them.
    pub queue_latency: Latency,
    /// How long it took from there until they were wholly written.
    pub write_latency: Latency,
    /// How long it took from there to the last reply.
    pub reply_latency: Latency,
    /// Commands under way now: those in the queue, being written, or with a reply to come.
    pub in_flight: usize,
    /// Bytes of them.
    pub in_flight_bytes: usize,
    /// Requests that no connection has taken yet; a pipeline is one.
    pub queued: usize,
}

/// What a connection counts for itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) replies: u64,
    pub(crate) pushes: u64,
    pub(crate) bytes_out: u64,
    pub(crate) bytes_in: u64,
    pub(crate) queue_latency: Latency,
    pub(crate) write_latency: Latency,
    pub(crate) reply_latency: Latency,
}

impl ClientStats {
    /// With what the connection has told.
    pub(crate) fn with(self, tally: &Tally) -> Self {
        Self {
            requests: tally.requests,
            replies: tally.replies,
            pushes: tally.pushes,
            bytes_out: tally.bytes_out,
            bytes_in: tally.bytes_in,
            queue_latency: tally.queue_latency,
            write_latency: tally.write_latency,
            reply_latency: tally.reply_latency,
            ..self
        }
    }
}

/// Requests that were late, by what they were waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TimeoutStats {
    /// For room, or for their turn.
    pub queued: u64,
    /// For a connection.
    pub connecting: u64,
    /// For the socket to take them.
    pub writing: u64,
    /// For their reply.
    pub waiting: u64,
}

impl TimeoutStats {
    pub(crate) fn count(&mut self, phase: Phase) {
        *match phase {
            Phase::Queued => &mut self.queued,
            Phase::Connecting => &mut self.connecting,
            Phase::Writing => &mut self.writing,
            Phase::Waiting => &mut self.waiting,
        } += 1;
    }
}

/// Those that began together, and end one after the other at the same time.
#[derive(Default)]
pub(crate) struct Together {
    since: Option<Instant>,
    count: u32,
}

impl Together {
    /// One more has ended.
    #[inline]
    pub(crate) fn add(&mut self, since: Instant, now: Instant, latency: &mut Latency) {
        if self.since != Some(since) {
            self.end(now, latency);
            self.since = Some(since);
        }
        self.count += 1;
    }

    /// All have: says how long they took.
    pub(crate) fn end(&mut self, now: Instant, latency: &mut Latency) {
        if let Some(since) = self.since.take() {
            latency.record_all(now.saturating_duration_since(since), std::mem::take(&mut self.count));
        }
    }
}

/// How long something took: how often, altogether, at most, and by classes that double.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latency {
    count: u64,
    sum: Duration,
    max: Duration,
    classes: [u64; CLASSES],
}

impl Latency {
    pub(crate) fn record(&mut self, took: Duration) {
        self.record_all(took, 1);
    }

    /// The same, for so many that took equally long.
    pub(crate) fn record_all(&mut self, took: Duration, count: u32) {
        self.count += u64::from(count);
        self.sum = self.sum.saturating_add(took.saturating_mul(count));
        self.max = self.max.max(took);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let class = (u64::BITS - micros.leading_zeros()) as usize;
        self.classes[class.min(CLASSES - 1)] += u64::from(count);
    }

    /// How often.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Altogether.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// The longest.
    pub fn max(&self) -> Duration {
        self.max
    }

    /// The classes: below how long, and how often. The first is below 1 µs and each goes to twice the one before; the last has all
    /// above half a minute, too.
    pub fn classes(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        self.classes.iter().enumerate().map(|(class, count)| (Duration::from_micros(1 << class), *count))
    }

    /// Below this, or at the longest, were so many of them, from 0 to 1: right to a factor of two.
    pub fn quantile(&self, part: f64) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "it is right to a factor of two")]
        let wanted = part.clamp(0.0, 1.0) * self.count as f64;
        let mut seen = 0;
        for (below, count) in self.classes() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "as above")]
            if count > 0 && seen as f64 >= wanted {
                return below.min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_classes_that_double() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantile(0.5), Duration::ZERO);
        for (micros, below) in [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (1023, 1024), (1024, 2048)] {
            let before: Vec<_> = latency.classes().collect();
            latency.record(Duration::from_micros(micros));
            let changed = latency.classes().zip(before).find(|(now, before)| now != before).unwrap().0;
            assert_eq!(changed.0, Duration::from_micros(below), "{micros}");
        }
        latency.record(Duration::MAX);
        assert_eq!((latency.count(), latency.max(), latency.sum()), (8, Duration::MAX, Duration::MAX));
        assert_eq!(latency.classes().last().unwrap().1, 1);
        assert_eq!(latency.quantile(0.5), Duration::from_micros(4));
        assert_eq!(latency.quantile(7.0), Duration::from_micros(1 << (CLASSES - 1)));
        let (mut one_by_one, mut together) = (Latency::default(), Latency::default());
        (0..3).for_each(|_| one_by_one.record(Duration::from_millis(7)));
        together.record_all(Duration::from_millis(7), 3);
        assert_eq!(one_by_one, together);
    }
}
