//! Encoding and delivery of snapshots.
//!
//! A small result is encoded by the live thread. A larger one is copied, which is cheap, and encoded in the background. If the result
//! changes meanwhile, it is encoded again afterwards. So each query has at most one encoding in flight, and subscribers receive
//! results in commit order.
//!
//! A subscriber in mode `Delta` gets a snapshot together with the deltas after it, which are collected during the encoding. If there
//! are too many, the subscriber gets only the snapshot, and then requests another one.

use std::collections::HashSet;
use std::sync::Arc;

use tidewire_pool::Key;
use tidewire_store::{BucketIdentity, Position};

use super::subscriber::Recipient;
use super::{Driver, Purpose};
use crate::background::{JobId, JobOutput};
use crate::live::LiveError;
use crate::mark::Mark;
use crate::matcher::QueryId;
use crate::query::{QueryResult, ResultTooLarge};
use crate::subscription::{Event, First, Following, Mode, Subscription, SubscriptionEnd};

/// The driver's state of a live query.
pub(super) struct QueryState {
    pub(super) hash: u64,
    pub(super) bucket: BucketIdentity,
    /// The last result delivered to subscribers in mode `Snapshot`, if it is short. An equal result is not delivered again.
    delivered: Option<QueryResult>,
    /// The background encoding in flight, if any.
    encoding: Option<Box<Encoding>>,
}

/// A result that is being encoded in the background.
struct Encoding {
    job: JobId,
    position: Position,
    version: u64,
    /// The oldest change that has not been delivered to subscribers in mode `Snapshot`.
    oldest: Position,
    /// Subscribers that get the result and the deltas after it.
    recipients: Vec<u64>,
    /// The deltas after the result, for the recipients.
    following: Vec<Event>,
    /// Whether `following` exceeded the limit and was cleared.
    has_too_many_deltas: bool,
    /// Set if the result must be encoded again: the oldest change or request that this encoding does not include.
    next_oldest: Option<Position>,
    /// Subscribers that need a newer result than this one.
    next_recipients: Vec<u64>,
}

/// Limit of the results that are encoded by the live thread.
const MAX_DIRECT_BYTES: usize = 64 << 10;

impl QueryState {
    /// Limit of the results that are stored for comparison. Longer results rarely return to an earlier value between two deliveries.
    const MAX_COMPARED_BYTES: usize = 4096;

    pub(super) fn new(hash: u64, bucket: BucketIdentity) -> Self {
        Self { hash, bucket, delivered: None, encoding: None }
    }

    fn set_delivered(&mut self, result: &QueryResult) {
        self.delivered = Some(result).filter(|result| result.len() <= Self::MAX_COMPARED_BYTES).cloned();
    }

    pub(super) fn clear_delivered(&mut self) {
        self.delivered = None;
    }

    /// Collects a delta for the recipients of the result that is being encoded.
    pub(super) fn collect_delta(&mut self, delta: &Event, max_deltas: usize) {
        let Some(encoding) = &mut self.encoding else { return };
        if encoding.recipients.is_empty() || encoding.has_too_many_deltas {
            return;
        }
        if encoding.following.len() < max_deltas {
            encoding.following.push(delta.clone());
        } else {
            (encoding.following, encoding.has_too_many_deltas) = (Vec::new(), true);
        }
    }

    /// Returns whether a result with the changes up to a position is not delivered yet.
    pub(super) fn is_behind(&self, position: Position) -> bool {
        let is_old = |oldest: Position| oldest.sequence <= position.sequence;
        self.encoding
            .as_ref()
            .is_some_and(|encoding| is_old(encoding.oldest) || encoding.next_oldest.is_some_and(is_old))
    }
}

/// Returns the work of encoding a result: about a nanosecond for four bytes.
fn encoding_work(result: &QueryResult) -> u64 {
    result.len() as u64 / 4
}

impl Driver {
    /// Delivers snapshots of the results that have changed.
    pub(super) fn deliver_changed_results(&mut self) {
        let position = self.matcher.position();
        for query in std::mem::take(&mut self.changed) {
            self.deliver_changed(query, position);
        }
    }

    /// Delivers a changed result to the subscribers that receive every snapshot. `oldest` is the first change that was not delivered.
    fn deliver_changed(&mut self, query: QueryId, oldest: Position) {
        let Some(state) = self.queries.get_mut(&query) else { return };
        if let Some(encoding) = &mut state.encoding {
            encoding.next_oldest.get_or_insert(oldest);
            return;
        }
        match self.matcher.result_within(query, MAX_DIRECT_BYTES.min(self.options.max_result_bytes)) {
            None => {}
            Some(Ok(result)) if state.delivered.as_ref() == Some(&result) => {}
            Some(Ok(result)) => {
                state.set_delivered(&result);
                self.matcher.add_work(query, encoding_work(&result));
                self.deliver_to_all(query, &result, self.matcher.position(), &HashSet::new());
            }
            Some(Err(ResultTooLarge)) => self.encode(query, Vec::new(), oldest),
        }
    }

    /// Delivers a snapshot to a subscriber, after encoding it if necessary.
    pub(super) fn request_result(&mut self, id: u64) {
        let Some(query) = self.matcher.query_of(id) else { return };
        let position = self.matcher.position();
        // Pending changes are delivered first, so that all subscribers in mode `Snapshot` have the same result.
        if self.changed.remove(&query) {
            self.deliver_changed(query, position);
        }
        let version = self.matcher.version(query);
        let Some(state) = self.queries.get_mut(&query) else { return };
        if let Some(encoding) = &mut state.encoding {
            if version == Some(encoding.version) {
                encoding.recipients.push(id);
            } else {
                encoding.next_oldest.get_or_insert(position);
                encoding.next_recipients.push(id);
            }
            return;
        }
        match self.matcher.result_within(query, MAX_DIRECT_BYTES.min(self.options.max_result_bytes)) {
            None => {}
            Some(Ok(result)) => {
                state.set_delivered(&result);
                self.deliver_snapshot(id, result, position, Following::Deltas(&[]));
            }
            Some(Err(ResultTooLarge)) => self.encode(query, vec![id], position),
        }
    }

    /// Encodes a result in the background.
    fn encode(&mut self, query: QueryId, recipients: Vec<u64>, oldest: Position) {
        let max_bytes = self.options.max_result_bytes;
        let Some((copy, version)) = self.matcher.copy(query) else { return };
        let Some(state) = self.queries.get_mut(&query) else { return };
        let job = self.encoders.submit(Key::of(&query), move |_| JobOutput::Encoded(copy.encode(max_bytes)));
        self.jobs.insert(job, Purpose::Encoding(query));
        state.clear_delivered();
        state.encoding = Some(Box::new(Encoding {
            job,
            position: self.matcher.position(),
            version,
            oldest,
            recipients,
            following: Vec::new(),
            has_too_many_deltas: false,
            next_oldest: None,
            next_recipients: Vec::new(),
        }));
    }

    pub(super) fn finish_encoding(&mut self, job: JobId, query: QueryId, encoded: Result<QueryResult, ResultTooLarge>) {
        let Some(state) = self.queries.get_mut(&query) else { return };
        let Some(encoding) = state.encoding.take_if(|encoding| encoding.job == job) else { return };
        let Encoding { position, recipients, following, has_too_many_deltas, .. } = &*encoding;
        // A recipient may have been dropped meanwhile.
        let is_subscribed = |id: &u64| self.matcher.query_of(*id) == Some(query);
        let recipients: HashSet<u64> = recipients.iter().copied().filter(is_subscribed).collect();
        match encoded {
            Ok(result) => {
                self.matcher.cache_result(query, encoding.version, &result);
                self.matcher.add_work(query, encoding_work(&result));
                self.deliver_to_all(query, &result, *position, &recipients);
                let following = if *has_too_many_deltas { Following::Missing } else { Following::Deltas(following) };
                for id in recipients {
                    self.deliver_snapshot(id, result.clone(), *position, following);
                }
            }
            Err(ResultTooLarge) => self.end_too_large(query, &recipients),
        }
        if let Some(oldest) = encoding.next_oldest {
            self.deliver_changed(query, oldest);
            for id in encoding.next_recipients {
                self.request_result(id);
            }
        }
    }

    /// Returns the subscribers that receive every snapshot: those in mode `Snapshot`, and all subscribers of an aggregate, which has no
    /// deltas. Subscribers without a first result are excluded.
    fn snapshot_subscribers(&self, query: QueryId) -> Vec<u64> {
        let is_aggregate = self.matcher.query(query).is_some_and(|query| query.aggregate.is_some());
        let is_recipient = |id: &&u64| {
            let subscriber = self.subscribers.get(id);
            subscriber.is_some_and(|known| known.pending.is_none() && (is_aggregate || known.mode == Mode::Snapshot))
        };
        self.matcher.subscribers(query).iter().filter(is_recipient).copied().collect()
    }

    /// Delivers a result to the subscribers that receive every snapshot, with exceptions.
    fn deliver_to_all(&mut self, query: QueryId, result: &QueryResult, position: Position, except: &HashSet<u64>) {
        for id in self.snapshot_subscribers(query) {
            if !except.contains(&id) {
                self.deliver_snapshot(id, result.clone(), position, Following::Deltas(&[]));
            }
        }
    }

    /// Ends the subscribers that need a snapshot, because the result is too large.
    fn end_too_large(&mut self, query: QueryId, recipients: &HashSet<u64>) {
        let max = self.options.max_result_bytes;
        let all = self.snapshot_subscribers(query);
        for id in all.iter().chain(recipients) {
            self.end_with(*id, SubscriptionEnd::ResultTooLarge, LiveError::ResultTooLarge { max });
        }
    }

    /// Delivers a snapshot and the deltas after it to a subscriber.
    fn deliver_snapshot(&mut self, id: u64, result: QueryResult, position: Position, following: Following<'_>) {
        let hash = self.matcher.query_of(id).and_then(|query| self.queries.get(&query)).map(|state| state.hash);
        let (Some(hash), Some(subscriber)) = (hash, self.subscribers.get_mut(&id)) else { return };
        if let Some(Recipient::Caller { .. }) = subscriber.pending.as_ref().map(|pending| &pending.recipient) {
            return self.begin(id, First::Snapshot(result), position, following);
        }
        subscriber.pending = None;
        let event = Event::Snapshot { result, mark: Mark::new(position, hash) };
        subscriber.inbox.replace(event, following, self.options.max_deltas, &self.shared.counters);
    }

    /// Begins a subscription with its first result and the deltas after it.
    pub(super) fn begin(&mut self, id: u64, first: First, position: Position, following: Following<'_>) {
        let hash = self.matcher.query_of(id).and_then(|query| self.queries.get(&query)).map(|state| state.hash);
        let (Some(hash), Some(subscriber)) = (hash, self.subscribers.get_mut(&id)) else { return };
        let Some(Recipient::Caller { reply, .. }) = subscriber.pending.take().map(|pending| pending.recipient) else {
            return;
        };
        subscriber.inbox.begin(following, self.options.max_deltas, &self.shared.counters);
        let inbox = Arc::clone(&subscriber.inbox);
        let (first, mark, shared) = (Some(Box::new(first)), Mark::new(position, hash), Arc::clone(&self.shared));
        self.send_reply(reply, Ok(Subscription { id, first, mark, inbox, shared }));
    }
}
