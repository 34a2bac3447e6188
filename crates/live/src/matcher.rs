//! The matcher, the core of live queries: applies commits in order and finds the queries whose results change.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use slab::Slab;
use tidewire_store::query::Budget;
use tidewire_store::{Bucket, Change, Position, Query, Row};

use crate::index::{Index, Slot};
use crate::net_change::{Hit, NetChange, net_changes};
use crate::query::{LiveQuery, QueryResult, ResultChange, ResultCopy, ResultTooLarge, RowLifetime, dropped_bucket};

/// Live queries and their subscribers.
///
/// It has no thread, clock or socket. The caller applies commits in order. Between commits it adds queries, which are evaluated on the
/// state of the last commit, and reads results.
#[derive(Debug)]
pub struct Matcher {
    position: Position,
    queries: Slab<Box<LiveQuery>>,
    by_canonical: HashMap<Arc<[u8]>, Slot>,
    /// The buckets with a query.
    buckets: HashMap<Arc<str>, BucketQueries>,
    subscribers: HashMap<u64, SubscriberEntry>,
    /// The number of queries added so far.
    generations: u32,
    /// The number of commits applied so far.
    commits: u64,
    /// The number of changes checked so far.
    changes: u64,
    evaluations: u64,
    /// The approximate memory of all queries, without the rows themselves.
    kept_bytes: usize,
    /// Limit of the work of a query in one commit.
    max_commit_work: u64,
    /// Queries whose work has reached the charging threshold.
    chargeable: Vec<QueryId>,
    /// The queries with a cached encoded result, in the order of encoding.
    encoded: VecDeque<QueryId>,
    /// The total size of the cached results.
    encoded_bytes: usize,
}

#[derive(Debug, Default)]
struct BucketQueries {
    index: Index,
    slots: BTreeSet<Slot>,
}

/// The query of a subscriber, and the subscriber's index in the list of the query.
#[derive(Debug, Clone, Copy)]
struct SubscriberEntry {
    slot: Slot,
    index: u32,
}

/// Identifies a live query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueryId {
    slot: Slot,
    generation: u32,
}

/// Why a subscriber cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    /// The subscriber id is in use.
    #[error("subscriber {subscriber} already exists; each subscriber needs its own id")]
    Exists {
        /// The id.
        subscriber: u64,
    },
    /// The limit of queries, or of subscribers of one query, is reached.
    #[error("the limit of {max} live queries, or of {max} subscribers of one query, is reached")]
    TooMany {
        /// The limit.
        max: u32,
    },
}

/// The effect of a commit.
#[derive(Debug)]
#[non_exhaustive]
pub struct Committed {
    /// The position of the commit. The updates lead from the results before it to the results at it.
    pub position: Position,
    /// The queries whose results have changed, each once.
    pub updates: Vec<Update>,
    /// The queries that have ended because their buckets were dropped.
    pub ended: Vec<EndedQuery>,
    /// The queries that have ended because applying the commit to them exceeded the work limit per query.
    pub(crate) too_costly: Vec<EndedQuery>,
}

/// A query whose result has changed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Update {
    /// The query, whose [subscribers](Matcher::subscribers) need the update.
    pub query: QueryId,
    /// The change of the result.
    pub change: ResultChange,
}

/// A query that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndedQuery {
    /// The query.
    pub query: QueryId,
    /// Its subscribers.
    pub subscribers: Vec<u64>,
}

/// Statistics of a matcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MatcherStats {
    /// Live queries.
    pub queries: usize,
    /// Subscribers of all queries.
    pub subscribers: usize,
    /// Buckets that have a live query.
    pub buckets: usize,
    /// Queries whose filter is checked with every change of their bucket, because no index applies.
    pub unindexed: usize,
    /// Retained rows. A row that several queries retain is counted for each.
    pub rows: usize,
    /// Approximate memory of queries, without the rows themselves, which are shared with the store.
    pub kept_bytes: usize,
    /// Number of filter evaluations so far.
    pub evaluations: u64,
    /// Bytes of cached encoded results.
    pub encoded_bytes: usize,
}

/// Approximate work of applying one changed row to a result, in units of about a nanosecond.
const HIT_WORK: u64 = 500;

impl Matcher {
    /// Limit of the bytes of encoded results that are cached across commits, for later subscribers of the same query.
    pub const MAX_ENCODED_BYTES: usize = 8 << 20;
    /// Limit of the number of encoded results that are cached across commits.
    pub const MAX_ENCODED: usize = 4096;

    /// Creates a matcher without queries. `position` is that of the state on which queries will be evaluated.
    pub fn new(position: Position) -> Self {
        Self {
            position,
            queries: Slab::new(),
            by_canonical: HashMap::new(),
            buckets: HashMap::new(),
            subscribers: HashMap::new(),
            generations: 0,
            commits: 0,
            changes: 0,
            evaluations: 0,
            kept_bytes: 0,
            max_commit_work: u64::MAX,
            chargeable: Vec::new(),
            encoded: VecDeque::new(),
            encoded_bytes: 0,
        }
    }

    /// Returns the position of the last commit, which is the position of all results.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Adds a subscriber of a query. `bucket` must be in the state of the last commit, and `now`, in milliseconds, must not be before
    /// the time of the commit. The first result is the current [`result`](Self::result).
    ///
    /// Equal queries are evaluated once, for the first subscriber. A record that has expired since then stays in the result until it
    /// is swept.
    pub fn subscribe(
        &mut self,
        subscriber: u64,
        query: &Query,
        bucket: &Bucket,
        now: u64,
    ) -> Result<QueryId, SubscribeError> {
        if self.subscribers.contains_key(&subscriber) {
            return Err(SubscribeError::Exists { subscriber });
        }
        let canonical: Arc<[u8]> = query.canonical().into();
        let known = match self.find(&canonical) {
            Some(known) => known,
            None => self.insert(LiveQuery::evaluate_all(query, canonical, bucket, now))?,
        };
        self.add_subscriber(subscriber, known)?;
        Ok(known)
    }

    /// Returns the query with this canonical form.
    pub(crate) fn find(&self, canonical: &[u8]) -> Option<QueryId> {
        let slot = *self.by_canonical.get(canonical)?;
        Some(QueryId { slot, generation: self.queries[slot as usize].generation })
    }

    /// Adds a new query that was evaluated at the position of the last commit. The caller must add a subscriber.
    pub(crate) fn insert(&mut self, live: LiveQuery) -> Result<QueryId, SubscribeError> {
        let slot = Slot::try_from(self.queries.vacant_key()).map_err(|_| SubscribeError::TooMany { max: u32::MAX })?;
        let mut live = Box::new(live);
        if let Some((name, _)) = self.buckets.get_key_value(&live.bucket) {
            live.bucket = Arc::clone(name);
        }
        self.generations = self.generations.wrapping_add(1);
        live.generation = self.generations;
        live.last_checked = self.changes;
        let queries = self.buckets.entry(Arc::clone(&live.bucket)).or_default();
        live.entries = queries.index.insert(&live.query.filter, slot);
        queries.slots.insert(slot);
        self.by_canonical.insert(Arc::clone(&live.canonical), slot);
        self.kept_bytes += live.bytes();
        self.queries.insert(live);
        Ok(QueryId { slot, generation: self.generations })
    }

    /// Adds a subscriber of a query.
    pub(crate) fn add_subscriber(&mut self, subscriber: u64, query: QueryId) -> Result<(), SubscribeError> {
        if self.subscribers.contains_key(&subscriber) {
            return Err(SubscribeError::Exists { subscriber });
        }
        let live = &mut self.queries[query.slot as usize];
        let index = u32::try_from(live.subscribers.len()).map_err(|_| SubscribeError::TooMany { max: u32::MAX })?;
        live.subscribers.push(subscriber);
        self.subscribers.insert(subscriber, SubscriberEntry { slot: query.slot, index });
        Ok(())
    }

    /// Removes all queries, and continues at a later position. Returns the queries with their subscribers.
    pub(crate) fn restart(&mut self, position: Position) -> Vec<(QueryId, LiveQuery)> {
        // The counters continue, so ids of queries stay unique.
        let Self { generations, commits, changes, evaluations, max_commit_work, .. } = *self;
        let new = Self { generations, commits, changes, evaluations, max_commit_work, ..Self::new(position) };
        let old = std::mem::replace(self, new);
        let id = |live: &LiveQuery| QueryId { slot: old.by_canonical[&live.canonical], generation: live.generation };
        old.queries.into_iter().map(|(_, live)| (id(&live), *live)).collect()
    }

    /// Removes a subscriber. Returns whether it existed. A query ends with its last subscriber.
    pub fn unsubscribe(&mut self, subscriber: u64) -> bool {
        let is_known = self.subscribers.contains_key(&subscriber);
        self.remove_subscriber(subscriber);
        is_known
    }

    /// Removes a subscriber. Returns the query if this was its last subscriber.
    pub(crate) fn remove_subscriber(&mut self, subscriber: u64) -> Option<LiveQuery> {
        let SubscriberEntry { slot, index } = self.subscribers.remove(&subscriber)?;
        let subscribers = &mut self.queries[slot as usize].subscribers;
        subscribers.swap_remove(index as usize);
        if let Some(moved) = subscribers.get(index as usize) {
            self.subscribers.insert(*moved, SubscriberEntry { slot, index });
        }
        subscribers.is_empty().then(|| self.remove(slot))
    }

    /// Applies a commit. `changes` are its changes in order.
    pub fn commit(&mut self, position: Position, changes: &[Change]) -> Committed {
        self.evict_encoded();
        self.position = position;
        self.commits += 1;
        let mut hits = Vec::new();
        let mut ended = Vec::new();
        let mut too_costly = Vec::new();
        for (change_index, change) in (0..).zip(changes) {
            self.find_matches(change, change_index, &mut hits, &mut too_costly);
            if let Some(bucket) = dropped_bucket(change) {
                ended.extend(self.end_bucket(&bucket));
            }
        }
        let too_costly = too_costly.into_iter().filter_map(|query| self.end(query)).collect();
        // Groups the hits by query. A query has at most one hit per change, so the hits of a query are in the order of the changes.
        if changes.len() > 1 {
            hits.sort_unstable_by_key(|hit| (hit.slot, hit.change));
        }
        let mut updates = Vec::new();
        for hits in hits.chunk_by(|one, two| one.slot == two.slot) {
            let slot = hits[0].slot;
            // The query may have ended with its bucket.
            let Some(live) = self.queries.get_mut(slot as usize) else { continue };
            let before = live.bytes();
            let change = live.apply(&net_changes(hits, changes));
            if live.add_work(HIT_WORK * hits.len() as u64) {
                self.chargeable.push(QueryId { slot, generation: live.generation });
            }
            self.kept_bytes = self.kept_bytes + live.bytes() - before;
            let Some(change) = change else { continue };
            let query = QueryId { slot, generation: live.generation };
            self.encoded_bytes -= live.encoded.take().map_or(0, |result| result.len());
            updates.push(Update { query, change });
        }
        Committed { position, updates, ended, too_costly }
    }

    /// Sets the limit of the work of a query in one commit, in units of about a nanosecond. A query above it ends.
    pub(crate) fn set_max_commit_work(&mut self, max_work: u64) {
        self.max_commit_work = max_work;
    }

    /// Adds work that the driver did for a query.
    pub(crate) fn add_work(&mut self, query: QueryId, work: u64) {
        if self.live_mut(query).is_some_and(|live| live.add_work(work)) {
            self.chargeable.push(query);
        }
    }

    /// Returns and resets the work of the queries that have reached the charging threshold.
    pub(crate) fn take_work(&mut self) -> Vec<(QueryId, u64)> {
        let chargeable = std::mem::take(&mut self.chargeable);
        let work = |query: QueryId| Some((query, std::mem::take(&mut self.live_mut(query)?.work)));
        chargeable.into_iter().filter_map(work).filter(|(_, work)| *work > 0).collect()
    }

    /// Returns the approximate memory of a query, without the rows themselves.
    pub(crate) fn bytes_of(&self, query: QueryId) -> usize {
        self.live(query).map_or(0, LiveQuery::bytes)
    }

    /// Returns the current result of a query. It is encoded on the first call, and cached until it changes.
    pub fn result(&mut self, query: QueryId) -> Option<QueryResult> {
        self.result_within(query, usize::MAX)?.ok()
    }

    /// Like [`result`](Self::result), for results of at most `max_bytes`.
    pub(crate) fn result_within(
        &mut self,
        query: QueryId,
        max_bytes: usize,
    ) -> Option<Result<QueryResult, ResultTooLarge>> {
        let live = self.live(query)?;
        if let Some(result) = &live.encoded {
            return Some(Ok(result.clone()));
        }
        let encoded = live.encode(max_bytes);
        if let Ok(result) = &encoded {
            self.cache_result(query, live.version, result);
        }
        Some(encoded)
    }

    /// Caches an encoded result for later subscribers, if the result still has this version.
    pub(crate) fn cache_result(&mut self, query: QueryId, version: u64, result: &QueryResult) {
        let Some(live) = self.live_mut(query).filter(|live| live.version == version && live.encoded.is_none()) else {
            return;
        };
        live.encoded = Some(result.clone());
        self.encoded_bytes += result.len();
        self.encoded.push_back(query);
    }

    /// Returns a copy of the result of a query, to be encoded by another thread, and its version.
    pub(crate) fn copy(&self, query: QueryId) -> Option<(ResultCopy, u64)> {
        self.live(query).map(|live| (live.copy(), live.version))
    }

    /// Returns the version of the result of a query, which changes with the result.
    pub(crate) fn version(&self, query: QueryId) -> Option<u64> {
        self.live(query).map(|live| live.version)
    }

    /// Undoes and reapplies the newest net changes of a result. Returns the change that they made to it.
    pub(crate) fn replay(&mut self, query: QueryId, changes: &[NetChange<&Row>]) -> Option<ResultChange> {
        let live = self.live_mut(query)?;
        let version = live.version;
        let undo: Vec<NetChange<&Row>> =
            changes.iter().map(|net| NetChange { ordinal: net.ordinal, old: net.new, new: net.old }).collect();
        live.apply(&undo);
        let change = live.apply(changes);
        live.version = version;
        change
    }

    /// Returns the query, as its first subscriber submitted it.
    pub fn query(&self, query: QueryId) -> Option<&Query> {
        self.live(query).map(|live| &live.query)
    }

    /// Returns the subscribers of a query.
    pub fn subscribers(&self, query: QueryId) -> &[u64] {
        self.live(query).map_or(&[], |live| &live.subscribers)
    }

    /// Returns the query of a subscriber.
    pub fn query_of(&self, subscriber: u64) -> Option<QueryId> {
        let slot = self.subscribers.get(&subscriber)?.slot;
        Some(QueryId { slot, generation: self.queries[slot as usize].generation })
    }

    /// Ends a query.
    pub fn end(&mut self, query: QueryId) -> Option<EndedQuery> {
        self.live(query)?;
        let live = self.remove(query.slot);
        for subscriber in &live.subscribers {
            self.subscribers.remove(subscriber);
        }
        Some(EndedQuery { query, subscribers: live.subscribers })
    }

    /// Ends all queries of a bucket.
    pub fn end_bucket(&mut self, bucket: &str) -> Vec<EndedQuery> {
        let slots = self.buckets.get(bucket).map(|queries| queries.slots.clone()).unwrap_or_default();
        let id = |slot: &Slot| QueryId { slot: *slot, generation: self.queries[*slot as usize].generation };
        let ids: Vec<QueryId> = slots.iter().map(id).collect();
        ids.into_iter().filter_map(|query| self.end(query)).collect()
    }

    /// Returns statistics. The cost is proportional to the number of queries.
    pub fn stats(&self) -> MatcherStats {
        MatcherStats {
            queries: self.queries.len(),
            subscribers: self.subscribers.len(),
            buckets: self.buckets.len(),
            unindexed: self.buckets.values().map(|queries| queries.index.unindexed()).sum(),
            rows: self.queries.iter().map(|(_, live)| live.row_count()).sum(),
            kept_bytes: self.kept_bytes,
            evaluations: self.evaluations,
            encoded_bytes: self.encoded_bytes,
        }
    }

    fn live(&self, query: QueryId) -> Option<&LiveQuery> {
        self.queries.get(query.slot as usize).filter(|live| live.generation == query.generation).map(|live| &**live)
    }

    fn live_mut(&mut self, query: QueryId) -> Option<&mut LiveQuery> {
        let live = self.queries.get_mut(query.slot as usize).filter(|live| live.generation == query.generation);
        live.map(|live| &mut **live)
    }

    /// Returns the approximate memory of all queries, without the rows themselves.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Removes a query. The caller removes the entries of its subscribers.
    fn remove(&mut self, slot: Slot) -> LiveQuery {
        let live = self.queries.remove(slot as usize);
        self.by_canonical.remove(&live.canonical);
        self.kept_bytes -= live.bytes();
        self.encoded_bytes -= live.encoded.as_ref().map_or(0, QueryResult::len);
        if let Some(queries) = self.buckets.get_mut(&live.bucket) {
            queries.index.remove(live.entries.as_deref(), slot);
            queries.slots.remove(&slot);
            if queries.slots.is_empty() {
                debug_assert!(queries.index.is_empty(), "the index has no entry of a removed query");
                self.buckets.remove(&live.bucket);
            }
        }
        *live
    }

    /// Finds the queries that match the old or the new row of a change, and those that exceed the work limit.
    fn find_matches(&mut self, change: &Change, change_index: u32, hits: &mut Vec<Hit>, too_costly: &mut Vec<QueryId>) {
        self.changes += 1;
        let Self { queries, buckets, commits, changes, evaluations, chargeable, max_commit_work, .. } = self;
        let Some(BucketQueries { index, .. }) = buckets.get_mut(&*change.bucket) else { return };
        let old = change.old.as_ref().map(|row| (row, RowLifetime::of(row)));
        let new = change.new.as_ref().map(|row| (row, RowLifetime::of(row)));
        let tried = u64::from(old.is_some()) + u64::from(new.is_some());
        index.for_each_candidate(change.old.as_ref(), change.new.as_ref(), |slot| {
            let Some(live) = queries.get_mut(slot as usize) else { return };
            if std::mem::replace(&mut live.last_checked, *changes) == *changes {
                return;
            }
            *evaluations += tried;
            if live.commit_work.0 != *commits {
                live.commit_work = (*commits, 0);
            }
            let budget = Budget::unlimited().max_work(max_commit_work.saturating_sub(live.commit_work.1));
            let is_match = |row: Option<(&Row, RowLifetime)>| match row {
                Some((row, life)) => live.matches(row, life, &budget),
                None => Ok(false),
            };
            let matched = is_match(old).and_then(|old_matches| Ok((old_matches, is_match(new)?)));
            let query = QueryId { slot, generation: live.generation };
            live.commit_work.1 += budget.work();
            if live.add_work(budget.work()) {
                chargeable.push(query);
            }
            match matched {
                Ok((false, false)) => {}
                Ok((old_matches, new_matches)) => {
                    hits.push(Hit { slot, change: change_index, old_matches, new_matches });
                }
                Err(_) if too_costly.contains(&query) => {}
                Err(_) => too_costly.push(query),
            }
        });
    }

    /// Evicts the oldest cached results above the limits.
    fn evict_encoded(&mut self) {
        while self.encoded_bytes > Self::MAX_ENCODED_BYTES || self.encoded.len() > Self::MAX_ENCODED {
            let Some(query) = self.encoded.pop_front() else { return };
            let live = self.queries.get_mut(query.slot as usize).filter(|live| live.generation == query.generation);
            if let Some(result) = live.and_then(|live| live.encoded.take()) {
                self.encoded_bytes -= result.len();
            }
        }
    }
}
