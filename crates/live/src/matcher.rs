//! The matcher: takes commits in order and finds out whose results they change. It is the core of live queries.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, LazyLock};

use slab::Slab;
use tidewire_store::{BUCKETS, Bucket, Change, Field, Position, Query, Value};

use crate::index::{Index, Slot};
use crate::net::{Hit, net};
use crate::query::{Life, LiveQuery, Outcome, Whole};

/// Live queries and who follows them.
///
/// It has no thread, clock or socket. Commits are given to it one after the other; between two of them, queries are subscribed to,
/// with the state as the last commit left it, and results are read.
#[derive(Debug)]
pub struct Matcher {
    position: Position,
    queries: Slab<Box<LiveQuery>>,
    by_canonical: HashMap<Arc<[u8]>, Slot>,
    /// Those that have a query.
    buckets: HashMap<Arc<str>, BucketQueries>,
    subscribers: HashMap<u64, Subscription>,
    /// How many queries there have been.
    generations: u32,
    /// How many changes there have been.
    changes: u64,
    evaluations: u64,
    /// The queries whose whole result is kept as JSON, in the order in which it was made, and its bytes.
    encoded: VecDeque<QueryId>,
    encoded_bytes: usize,
}

#[derive(Debug, Default)]
struct BucketQueries {
    index: Index,
    slots: BTreeSet<Slot>,
}

/// Where a subscriber stands: at which query, and where in its list.
#[derive(Debug, Clone, Copy)]
struct Subscription {
    slot: Slot,
    place: u32,
}

/// A live query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueryId {
    slot: Slot,
    generation: u32,
}

/// Why somebody cannot subscribe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    /// The number is that of another subscriber.
    #[error("there is a subscriber {subscriber} already; each needs a number of its own")]
    Exists {
        /// The number.
        subscriber: u64,
    },
    /// There are as many as can be counted.
    #[error("there are {max} live queries or subscribers of one, and no more can be")]
    TooMany {
        /// How many there can be.
        max: u32,
    },
}

/// What a commit has changed.
#[derive(Debug)]
#[non_exhaustive]
pub struct Committed {
    /// Where it stands. What is in `updates` leads from the results before it to those at it.
    pub position: Position,
    /// The queries whose results are others now, each once. One that looks the same is not among them.
    pub updates: Vec<Update>,
    /// The queries that have ended with their buckets.
    pub ended: Vec<Ended>,
}

/// A query whose result is another one now.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Update {
    /// The query. Its [subscribers](Matcher::subscribers) must hear of it.
    pub query: QueryId,
    /// How its result has changed.
    pub outcome: Outcome,
}

/// A query that is live no more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ended {
    /// What it was known by.
    pub query: QueryId,
    /// Who followed it.
    pub subscribers: Vec<u64>,
}

/// How much there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MatcherStats {
    /// Live queries.
    pub queries: usize,
    /// Subscribers of all of them.
    pub subscribers: usize,
    /// Buckets that have a live query.
    pub buckets: usize,
    /// Queries that every change of their bucket is tried with, because no index can serve them.
    pub unserved: usize,
    /// Rows that queries keep, those that several keep counted for each.
    pub rows: usize,
    /// How often a row was tried with a filter, since the beginning.
    pub evaluations: u64,
    /// Bytes of whole results that are kept for others who may ask.
    pub encoded_bytes: usize,
}

impl Matcher {
    /// How many bytes of whole results may stay when a commit comes. They are kept for those who subscribe to a query that others
    /// follow: enough for the first screens of a thousand users, and little beside the rows.
    pub const MAX_ENCODED_BYTES: usize = 8 << 20;
    /// How many whole results may stay when a commit comes.
    pub const MAX_ENCODED: usize = 4096;

    /// Without any query, at the position of the state that queries will be read from.
    pub fn new(position: Position) -> Self {
        Self {
            position,
            queries: Slab::new(),
            by_canonical: HashMap::new(),
            buckets: HashMap::new(),
            subscribers: HashMap::new(),
            generations: 0,
            changes: 0,
            evaluations: 0,
            encoded: VecDeque::new(),
            encoded_bytes: 0,
        }
    }

    /// Where the last commit stands. All results are those at this position.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Lets somebody follow a query. The bucket must be as the last commit left it, and the time, in milliseconds, not before that
    /// of the commit. The first result is the [whole](Self::whole) one at this position.
    ///
    /// Equal queries are one: it is read when the first comes. Then a record that has expired since is in the result until the
    /// sweep has come by, as it is for all who follow it.
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
        let slot = match self.by_canonical.get(&canonical) {
            Some(slot) => *slot,
            None => self.begin(query, canonical, bucket, now)?,
        };
        let live = &mut self.queries[slot as usize];
        let place = u32::try_from(live.subscribers.len()).map_err(|_| SubscribeError::TooMany { max: u32::MAX })?;
        live.subscribers.push(subscriber);
        self.subscribers.insert(subscriber, Subscription { slot, place });
        Ok(QueryId { slot, generation: live.generation })
    }

    /// Lets somebody go. Returns whether they were there. A query that nobody follows is forgotten.
    pub fn unsubscribe(&mut self, subscriber: u64) -> bool {
        let Some(Subscription { slot, place }) = self.subscribers.remove(&subscriber) else { return false };
        let subscribers = &mut self.queries[slot as usize].subscribers;
        subscribers.swap_remove(place as usize);
        if let Some(moved) = subscribers.get(place as usize) {
            self.subscribers.insert(*moved, Subscription { slot, place });
        }
        if subscribers.is_empty() {
            self.forget(slot);
        }
        true
    }

    /// Takes a commit in: its position, and all that it changes, in order.
    pub fn commit(&mut self, position: Position, changes: &[Change]) -> Committed {
        self.shed();
        self.position = position;
        let mut hits = Vec::new();
        let mut ended = Vec::new();
        for (place, change) in (0..).zip(changes) {
            self.find(change, place, &mut hits);
            if let Some(bucket) = dropped(change) {
                ended.extend(self.end_bucket(&bucket));
            }
        }
        // Those of one change have a query each; those of a query stay in the order of the changes.
        if changes.len() > 1 {
            hits.sort_unstable_by_key(|hit| (hit.slot, hit.change));
        }
        let mut updates = Vec::new();
        for hits in hits.chunk_by(|one, two| one.slot == two.slot) {
            let slot = hits[0].slot;
            // It may have ended with its bucket.
            let Some(live) = self.queries.get_mut(slot as usize) else { continue };
            let Some(outcome) = live.apply(&net(hits, changes)) else { continue };
            let query = QueryId { slot, generation: live.generation };
            self.encoded_bytes -= live.whole.take().map_or(0, |whole| whole.len());
            updates.push(Update { query, outcome });
        }
        Committed { position, updates, ended }
    }

    /// The whole result of a query, as the last commit left it. It is made when first asked for, and shared by all who ask before
    /// it changes.
    pub fn whole(&mut self, query: QueryId) -> Option<Whole> {
        let live = self.queries.get_mut(query.slot as usize).filter(|live| live.generation == query.generation)?;
        if let Some(whole) = &live.whole {
            return Some(whole.clone());
        }
        let whole = live.encode();
        live.whole = Some(whole.clone());
        self.encoded_bytes += whole.len();
        self.encoded.push_back(query);
        Some(whole)
    }

    /// What is asked by a query: what the first who followed it subscribed to.
    pub fn query(&self, query: QueryId) -> Option<&Query> {
        self.live(query).map(|live| &live.query)
    }

    /// Who follows a query.
    pub fn subscribers(&self, query: QueryId) -> &[u64] {
        self.live(query).map_or(&[], |live| &live.subscribers)
    }

    /// The query that somebody follows.
    pub fn query_of(&self, subscriber: u64) -> Option<QueryId> {
        let slot = self.subscribers.get(&subscriber)?.slot;
        Some(QueryId { slot, generation: self.queries[slot as usize].generation })
    }

    /// Ends a query, whoever follows it.
    pub fn end(&mut self, query: QueryId) -> Option<Ended> {
        self.live(query)?;
        let live = self.forget(query.slot);
        for subscriber in &live.subscribers {
            self.subscribers.remove(subscriber);
        }
        Some(Ended { query, subscribers: live.subscribers })
    }

    /// Ends all queries of a bucket.
    pub fn end_bucket(&mut self, bucket: &str) -> Vec<Ended> {
        let slots = self.buckets.get(bucket).map(|queries| queries.slots.clone()).unwrap_or_default();
        let id = |slot: &Slot| QueryId { slot: *slot, generation: self.queries[*slot as usize].generation };
        let ids: Vec<QueryId> = slots.iter().map(id).collect();
        ids.into_iter().filter_map(|query| self.end(query)).collect()
    }

    /// How much there is. Adds up all queries.
    pub fn stats(&self) -> MatcherStats {
        MatcherStats {
            queries: self.queries.len(),
            subscribers: self.subscribers.len(),
            buckets: self.buckets.len(),
            unserved: self.buckets.values().map(|queries| queries.index.unserved()).sum(),
            rows: self.queries.iter().map(|(_, live)| live.rows()).sum(),
            evaluations: self.evaluations,
            encoded_bytes: self.encoded_bytes,
        }
    }

    fn live(&self, query: QueryId) -> Option<&LiveQuery> {
        self.queries.get(query.slot as usize).filter(|live| live.generation == query.generation).map(|live| &**live)
    }

    /// Makes a query live.
    fn begin(
        &mut self,
        query: &Query,
        canonical: Arc<[u8]>,
        bucket: &Bucket,
        now: u64,
    ) -> Result<Slot, SubscribeError> {
        let slot = Slot::try_from(self.queries.vacant_key()).map_err(|_| SubscribeError::TooMany { max: u32::MAX })?;
        let name = match self.buckets.get_key_value(&*query.bucket) {
            Some((name, _)) => Arc::clone(name),
            None => query.bucket.as_str().into(),
        };
        let mut live = Box::new(LiveQuery::new(query, Arc::clone(&canonical), Arc::clone(&name), bucket, now));
        self.generations = self.generations.wrapping_add(1);
        live.generation = self.generations;
        live.seen = self.changes;
        let queries = self.buckets.entry(name).or_default();
        live.accesses = queries.index.insert(&live.query.filter, slot);
        queries.slots.insert(slot);
        self.by_canonical.insert(canonical, slot);
        self.queries.insert(live);
        Ok(slot)
    }

    /// Leaves nothing of a query, but those who followed it.
    fn forget(&mut self, slot: Slot) -> LiveQuery {
        let live = self.queries.remove(slot as usize);
        self.by_canonical.remove(&live.canonical);
        self.encoded_bytes -= live.whole.as_ref().map_or(0, Whole::len);
        if let Some(queries) = self.buckets.get_mut(&live.bucket) {
            queries.index.remove(live.accesses.as_deref(), slot);
            queries.slots.remove(&slot);
            if queries.slots.is_empty() {
                debug_assert!(queries.index.is_empty(), "a query leaves nothing in the index");
                self.buckets.remove(&live.bucket);
            }
        }
        *live
    }

    /// Finds the queries that a change concerns.
    fn find(&mut self, change: &Change, place: u32, hits: &mut Vec<Hit>) {
        self.changes += 1;
        let Self { queries, buckets, changes: seen, evaluations, .. } = self;
        let Some(BucketQueries { index, .. }) = buckets.get_mut(&*change.bucket) else { return };
        let old = change.old.as_ref().map(|row| (row, Life::of(row)));
        let new = change.new.as_ref().map(|row| (row, Life::of(row)));
        let tried = u64::from(old.is_some()) + u64::from(new.is_some());
        index.touched(change.old.as_ref(), change.new.as_ref(), |slot| {
            let Some(live) = queries.get_mut(slot as usize) else { return };
            if std::mem::replace(&mut live.seen, *seen) == *seen {
                return;
            }
            *evaluations += tried;
            let was = old.is_some_and(|(row, life)| live.means(row, life));
            let is = new.is_some_and(|(row, life)| live.means(row, life));
            if was || is {
                hits.push(Hit { slot, change: place, was, is });
            }
        });
    }

    /// Lets go of whole results that were made longest ago, if there are too many.
    fn shed(&mut self) {
        while self.encoded_bytes > Self::MAX_ENCODED_BYTES || self.encoded.len() > Self::MAX_ENCODED {
            let Some(query) = self.encoded.pop_front() else { return };
            let live = self.queries.get_mut(query.slot as usize).filter(|live| live.generation == query.generation);
            if let Some(whole) = live.and_then(|live| live.whole.take()) {
                self.encoded_bytes -= whole.len();
            }
        }
    }
}

/// The bucket that a change drops, if it drops one.
pub(crate) fn dropped(change: &Change) -> Option<String> {
    static NAME: LazyLock<Field> = LazyLock::new(|| Field::new("name"));
    if *change.bucket != *BUCKETS || change.new.is_some() {
        return None;
    }
    match change.old.as_ref()?.get(&NAME)? {
        Value::String(name) => Some(name.into_owned()),
        _ => None,
    }
}
