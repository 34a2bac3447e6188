//! Flow control of one connection: which pushes enter its buffer, which are dropped, and when a slow consumer is disconnected.
//!
//! A push is accepted if it fits in the buffer. Otherwise it is dropped, which the metrics count as *held back*, and its subscription is
//! *behind*: it is paused until the client has read, and then refreshed with a snapshot of the newest result. Subscriptions that are behind
//! are refreshed one at a time, in the order in which they fell behind, and all other pushes are dropped in the meantime. So the buffer
//! drains, and even the largest snapshot eventually fits.
//!
//! This is a state machine without a clock, lock or socket. The owner of the connection reports events and carries out the
//! decisions.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// How long a client may read nothing while a subscription is behind.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The flow control of one connection. Its size is one word while no subscription is behind.
#[derive(Debug, Default)]
pub(crate) struct Flow(Option<Box<Behind>>);

/// The subscriptions that are behind.
#[derive(Debug)]
struct Behind {
    /// The subscriptions whose newest result was dropped. The first is refreshed next.
    subscriptions: VecDeque<u64>,
    /// Whether a refresh of the first subscription was requested and has not arrived yet.
    is_refreshing: bool,
    /// Whether the last snapshot of the first subscription did not fit. Then the next refresh waits until the buffer is empty.
    needs_empty: bool,
    stall: Stall,
}

/// The start of the period in which the client has read nothing.
#[derive(Debug, Clone, Copy)]
struct Stall {
    since: Instant,
    sent: u64,
}

/// The state of the push buffer of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    /// Queued bytes.
    pub(crate) queued: usize,
    /// Limit of the queued bytes. A single push may be larger.
    pub(crate) limit: usize,
    /// Bytes sent to the client so far.
    pub(crate) sent: u64,
}

/// What to do with a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PushDecision {
    /// Append it to the buffer.
    Push,
    /// Drop it, and [pause](Flow::pause) the subscription until it is [refreshed](Flow::next_refresh).
    Drop,
}

/// Whether the client reads its pushes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConsumerHealth {
    Reading,
    /// A subscription is behind: check again after this time.
    CheckAfter(Duration),
    /// The client has read nothing for [`STALL_TIMEOUT`].
    Stalled,
}

impl Flow {
    /// Decides whether a push of `size` bytes enters the buffer. `others` is the number of queued bytes, without the unsent result that the
    /// push would replace. After [`PushDecision::Drop`] the owner must [pause](Self::pause) the subscription.
    pub(crate) fn offer(&mut self, subscription: u64, size: usize, others: usize, limit: usize) -> PushDecision {
        let fits = others == 0 || others.saturating_add(size) <= limit;
        let Some(behind) = self.0.as_deref_mut().filter(|behind| !behind.subscriptions.is_empty()) else {
            return if fits { PushDecision::Push } else { PushDecision::Drop };
        };
        if !behind.is_refreshing || behind.subscriptions.front() != Some(&subscription) {
            return PushDecision::Drop;
        }
        (behind.is_refreshing, behind.needs_empty) = (false, !fits);
        if !fits {
            return PushDecision::Drop;
        }
        behind.subscriptions.pop_front();
        PushDecision::Push
    }

    /// Marks a subscription as behind, because a push of it was dropped.
    pub(crate) fn pause(&mut self, subscription: u64, buffer: Buffer, now: Instant) {
        let stall = Stall { since: now, sent: buffer.sent };
        let behind = self.0.get_or_insert_with(|| {
            Box::new(Behind { subscriptions: VecDeque::new(), is_refreshing: false, needs_empty: false, stall })
        });
        if behind.subscriptions.is_empty() {
            behind.stall = stall;
        }
        if !behind.subscriptions.contains(&subscription) {
            behind.subscriptions.push_back(subscription);
        }
    }

    /// Returns whether no subscription was behind at the last [check](Self::check) or has fallen behind since.
    pub(crate) fn is_caught_up(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the subscription to refresh now, if one is behind and the buffer has drained enough.
    pub(crate) fn next_refresh(&mut self, buffer: Buffer) -> Option<u64> {
        let behind = self.0.as_deref_mut()?;
        let has_drained = if behind.needs_empty { buffer.queued == 0 } else { buffer.queued <= buffer.limit / 2 };
        if behind.is_refreshing || !has_drained {
            return None;
        }
        let first = behind.subscriptions.front().copied()?;
        behind.is_refreshing = true;
        Some(first)
    }

    /// Removes a subscription that has ended.
    pub(crate) fn remove(&mut self, subscription: u64) {
        let Some(behind) = self.0.as_deref_mut() else { return };
        if behind.subscriptions.front() == Some(&subscription) {
            (behind.is_refreshing, behind.needs_empty) = (false, false);
        }
        behind.subscriptions.retain(|behind| *behind != subscription);
    }

    /// Checks whether the client reads while a subscription is behind.
    pub(crate) fn check(&mut self, buffer: Buffer, now: Instant) -> ConsumerHealth {
        if self.0.as_ref().is_some_and(|behind| behind.subscriptions.is_empty()) {
            self.0 = None;
        }
        let Some(Behind { stall, .. }) = self.0.as_deref_mut() else { return ConsumerHealth::Reading };
        // If the buffer is empty, the delay is not caused by the client.
        if buffer.sent != stall.sent || buffer.queued == 0 {
            *stall = Stall { since: now, sent: buffer.sent };
        }
        match STALL_TIMEOUT.checked_sub(now.saturating_duration_since(stall.since)) {
            Some(left) if !left.is_zero() => ConsumerHealth::CheckAfter(left),
            _ => ConsumerHealth::Stalled,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 100;
    const SUBSCRIPTIONS: u64 = 4;

    /// An event of a connection.
    #[derive(Debug, Clone)]
    enum Step {
        /// The result of a query changes, and has this size.
        Commit { query: u64, size: usize },
        /// The client reads this number of bytes.
        Read(usize),
        /// Live queries deliver the requested refresh.
        DeliverRefresh,
        /// The client unsubscribes and subscribes to the same query again.
        Resubscribe(u64),
        /// Time passes.
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let query = 0..SUBSCRIPTIONS;
        prop_oneof![
            4 => (query.clone(), prop_oneof![1_usize..40, 60_usize..250]).prop_map(|(query, size)| Step::Commit { query, size }),
            3 => (1_usize..200).prop_map(Step::Read),
            3 => Just(Step::DeliverRefresh),
            1 => query.prop_map(Step::Resubscribe),
            1 => (1_u64..2000).prop_map(Step::Wait),
        ]
    }

    /// A query and the state of its subscription.
    #[derive(Debug, Default, Clone, Copy)]
    struct Query {
        version: u64,
        size: usize,
        /// The version that a subscriber of deltas has after the last push in the buffer.
        pushed: u64,
        is_paused: bool,
        is_refresh_requested: bool,
    }

    /// A push in the buffer. A snapshot replaces the unsent one of its subscription, a delta does not.
    #[derive(Debug, Clone, Copy)]
    struct Queued {
        query: u64,
        version: u64,
        size: usize,
        left: usize,
        /// The version to which a delta applies; `None` for a snapshot.
        base: Option<u64>,
    }

    /// A minimal model of a connection with a buffer and a client. Even queries push snapshots, odd queries push deltas.
    struct Model {
        flow: Flow,
        now: Instant,
        queries: BTreeMap<u64, Query>,
        buffer: Vec<Queued>,
        sent: u64,
        /// The version of each result that the client has received.
        client: BTreeMap<u64, u64>,
        last_progress: Instant,
        is_closed: bool,
    }

    impl Model {
        fn new() -> Self {
            let now = Instant::now();
            Self {
                flow: Flow::default(),
                now,
                queries: (0..SUBSCRIPTIONS).map(|query| (query, Query::default())).collect(),
                buffer: Vec::new(),
                sent: 0,
                client: BTreeMap::new(),
                last_progress: now,
                is_closed: false,
            }
        }

        fn queued(&self) -> usize {
            self.buffer.iter().map(|queued| queued.left).sum()
        }

        fn state(&self) -> Buffer {
            Buffer { queued: self.queued(), limit: LIMIT, sent: self.sent }
        }

        /// Returns the index of a snapshot of this query of which nothing has been sent.
        fn replaceable(&self, query: u64) -> Option<usize> {
            self.buffer
                .iter()
                .position(|queued| queued.query == query && queued.base.is_none() && queued.left == queued.size)
        }

        fn push(&mut self, number: u64, is_snapshot: bool) {
            let query = self.queries[&number];
            // A snapshot for a delta subscriber does not replace an earlier one, because deltas may be queued in between.
            let replaced = self.replaceable(number).filter(|_| number.is_multiple_of(2));
            let others = self.queued() - replaced.map_or(0, |at| self.buffer[at].left);
            let decision = self.flow.offer(number, query.size, others, LIMIT);
            let (buffer, now) = (self.state(), self.now);
            let known = self.queries.get_mut(&number).unwrap();
            match decision {
                PushDecision::Drop => {
                    self.flow.pause(number, buffer, now);
                    assert!(!self.flow.is_caught_up());
                    known.is_paused = true;
                }
                PushDecision::Push => {
                    let base = (!is_snapshot).then_some(known.pushed);
                    known.pushed = known.version;
                    let (version, size) = (query.version, query.size);
                    let queued = Queued { query: number, version, size, left: size, base };
                    match replaced {
                        Some(at) => self.buffer[at] = queued,
                        None => self.buffer.push(queued),
                    }
                    let others = self.queued() - size;
                    assert!(others == 0 || self.queued() <= LIMIT, "the buffer is bounded");
                }
            }
            self.refresh();
        }

        fn refresh(&mut self) {
            if let Some(number) = self.flow.next_refresh(self.state()) {
                let query = self.queries.get_mut(&number).unwrap();
                assert!(query.is_paused && !query.is_refresh_requested);
                query.is_refresh_requested = true;
            }
        }

        fn read(&mut self, mut bytes: usize) {
            while bytes > 0 && !self.buffer.is_empty() {
                let first = &mut self.buffer[0];
                let taken = bytes.min(first.left);
                (first.left, bytes) = (first.left - taken, bytes - taken);
                self.sent += taken as u64;
                self.last_progress = self.now;
                if first.left == 0 {
                    let Queued { query, version, base, .. } = self.buffer.remove(0);
                    let known = self.client.entry(query).or_default();
                    if let Some(base) = base {
                        assert_eq!(*known, base, "deltas have no gap");
                    }
                    assert!(version >= *known, "results do not go back");
                    *known = version;
                }
            }
            if self.buffer.is_empty() {
                self.refresh();
            }
        }

        fn run(&mut self, step: &Step) {
            match step {
                Step::Commit { query, size } => {
                    let known = self.queries.get_mut(query).unwrap();
                    known.version += 1;
                    known.size = *size;
                    if !known.is_paused {
                        self.push(*query, query % 2 == 0);
                    }
                }
                Step::Read(bytes) => self.read(*bytes),
                Step::DeliverRefresh => {
                    let requested =
                        self.queries.iter().find(|(_, query)| query.is_refresh_requested).map(|(number, _)| *number);
                    if let Some(number) = requested {
                        let query = self.queries.get_mut(&number).unwrap();
                        (query.is_refresh_requested, query.is_paused) = (false, false);
                        self.push(number, true);
                    }
                }
                Step::Resubscribe(number) => {
                    self.flow.remove(*number);
                    self.buffer.retain(|queued| queued.query != *number || queued.left < queued.size);
                    let query = self.queries.get_mut(number).unwrap();
                    (query.is_paused, query.is_refresh_requested) = (false, false);
                    // The reply has the newest result.
                    query.pushed = query.version;
                    self.buffer.retain(|queued| queued.query != *number);
                    self.client.insert(*number, query.version);
                    self.refresh();
                }
                Step::Wait(millis) => self.now += Duration::from_millis(*millis),
            }
            let is_stalled = self.flow.check(self.state(), self.now) == ConsumerHealth::Stalled;
            if is_stalled {
                let silent = self.now.duration_since(self.last_progress);
                assert!(silent >= STALL_TIMEOUT, "a client that reads is not disconnected");
                assert!(!self.buffer.is_empty(), "a client that has read everything is not disconnected");
                self.is_closed = true;
            }
        }
    }

    proptest! {
        #[test]
        fn buffer_is_bounded_and_newest_result_arrives(steps in prop::collection::vec(step(), 0..200)) {
            let mut model = Model::new();
            for step in &steps {
                model.run(step);
                if model.is_closed {
                    return Ok(());
                }
            }
            // A client that reads everything gets the newest result of every query.
            for _ in 0..4 * SUBSCRIPTIONS {
                model.run(&Step::Read(usize::MAX));
                model.run(&Step::DeliverRefresh);
            }
            model.run(&Step::Read(usize::MAX));
            for (number, query) in &model.queries {
                let known = model.client.get(number).copied().unwrap_or_default();
                prop_assert_eq!(known, query.version, "query {}", number);
            }
            prop_assert_eq!(model.flow.check(model.state(), model.now), ConsumerHealth::Reading);
        }

        #[test]
        fn client_that_stops_reading_is_disconnected(steps in prop::collection::vec(step(), 0..100)) {
            let mut model = Model::new();
            for step in &steps {
                model.run(step);
            }
            // No two of these results fit in the buffer together.
            for query in 0..SUBSCRIPTIONS {
                model.run(&Step::Commit { query, size: 80 });
                model.run(&Step::DeliverRefresh);
            }
            for _ in 0..4 {
                model.run(&Step::Wait(1000));
            }
            prop_assert!(model.is_closed);
        }

        #[test]
        fn client_that_reads_slowly_is_not_disconnected(steps in prop::collection::vec(step(), 0..200)) {
            let mut model = Model::new();
            for step in &steps {
                model.run(&Step::Read(1));
                match step {
                    Step::Wait(millis) => model.run(&Step::Wait(millis % 1500)),
                    step => model.run(step),
                }
            }
            prop_assert!(!model.is_closed);
        }
    }
}
