//! The driver: feeds the matcher with the commits of a store, on its own thread, and delivers events to subscribers.
//!
//! Between two commits it handles new and cancelled subscriptions. A new subscriber gets its result from the published state of
//! the store. The driver takes in all commits up to that state first, so there is no gap between the result and the deltas that
//! follow. If the driver falls so far behind that the store's history no longer has the next commit, it starts again from a
//! snapshot, and all subscribers get whole results.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use serde_json::{Map, Value as Json};
use tidewire_store::{
    BucketIdentity, Change, Commit, Field, Filter, FollowError, Follower, Position, QUERIES, Query, Row, Snapshot,
    State, Store, StoreError, Value,
};
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::fanout::Fanout;
use crate::live::{LiveError, LiveOptions};
use crate::mark::{self, Mark};
use crate::matcher::{Matcher, QueryId, Update, dropped};
use crate::query::{Outcome, Whole};
use crate::resume::{self, Since};
use crate::rows::is_same;
use crate::subscription::{End, Event, First, Inbox, Mode, Subscription};
use crate::wake::shielded;

static NAME: LazyLock<Field> = LazyLock::new(|| Field::new("name"));
static CONFIG: LazyLock<Field> = LazyLock::new(|| Field::new("config"));

/// What the driver is asked for.
pub(crate) enum Command {
    Subscribe { query: Asked, mode: Mode, since: Option<Mark>, reply: oneshot::Sender<Result<Subscription, LiveError>> },
    Replace { id: u64, query: Box<Query>, reply: oneshot::Sender<Result<(), LiveError>> },
    Settle(oneshot::Sender<Position>),
}

/// A query, or the name of one.
pub(crate) enum Asked {
    Query(Box<Query>),
    Named(Box<Named>),
}

/// A named query with its parameters, and what of it may be seen.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) params: Map<String, Json>,
    pub(crate) guard: Option<Filter>,
}

/// What subscribers and handles share with the driver.
pub(crate) struct Shared {
    asked: Mutex<AskedFor>,
    /// How many more commands may wait.
    room: Semaphore,
    awake: Notify,
    pub(crate) counters: Counters,
}

/// What waits for the driver.
#[derive(Default)]
struct AskedFor {
    commands: VecDeque<Command>,
    /// Subscribers that have gone, each once.
    left: Vec<u64>,
    /// Subscribers that want a whole result, each once.
    refresh: Vec<u64>,
    is_closed: bool,
}

/// What is counted since the beginning, and what there is.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commits: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) conflated: AtomicU64,
    pub(crate) ended: AtomicU64,
    pub(crate) restarts: AtomicU64,
    pub(crate) queries: AtomicUsize,
    pub(crate) subscribers: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(commands: usize) -> Self {
        Self {
            asked: Mutex::default(),
            room: Semaphore::new(commands.clamp(1, Semaphore::MAX_PERMITS)),
            awake: Notify::new(),
            counters: Counters::default(),
        }
    }

    fn asked(&self) -> MutexGuard<'_, AskedFor> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for something, when there is room. What is asked of a driver that has ended is dropped.
    pub(crate) async fn ask(&self, command: Command) {
        let Ok(permit) = self.room.acquire().await else { return };
        permit.forget();
        let mut asked = self.asked();
        if !asked.is_closed {
            asked.commands.push_back(command);
        }
        drop(asked);
        self.awake.notify_one();
    }

    pub(crate) fn leave(&self, id: u64) {
        self.asked().left.push(id);
        self.awake.notify_one();
    }

    pub(crate) fn refresh(&self, id: u64) {
        self.asked().refresh.push(id);
        self.awake.notify_one();
    }

    /// Nobody asks for anything any more.
    pub(crate) fn close(&self) {
        self.asked().is_closed = true;
        shielded(|| self.room.close());
        self.awake.notify_one();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("counters", &self.counters).finish_non_exhaustive()
    }
}

/// A subscriber, as the driver knows it.
struct Subscriber {
    inbox: Arc<Inbox>,
    mode: Mode,
    /// What the query was asked for by.
    definition: Option<Definition>,
}

/// The name of a query, and what it stood for then: the record that said so, which all who asked for it share.
struct Definition(Row);

impl Definition {
    fn has_name(&self, name: &str) -> bool {
        matches!(self.0.get(&NAME), Some(Value::String(own)) if own == name)
    }

    /// Whether the name stands for the same.
    fn is_in(&self, state: &State) -> bool {
        let Some(Value::String(name)) = self.0.get(&NAME) else { return false };
        let Ok(record) = state.query_record(&name) else { return false };
        let configs = record.text_of(&CONFIG).zip(self.0.text_of(&CONFIG));
        configs.is_some_and(|(is, was)| is_same(is, was))
    }
}

/// A live query, as the driver knows it.
#[derive(Clone)]
struct Followed {
    hash: u64,
    bucket: BucketIdentity,
    /// The result that all subscribers in mode `Whole` have or are about to receive, if it is short: an equal one is not delivered.
    told: Option<Whole>,
}

impl Followed {
    /// A result that is longer is not kept to be compared with: it seldom becomes what it was within one look.
    const SHORT: usize = 4096;

    fn tell(&mut self, whole: &Whole) {
        self.told = Some(whole).filter(|whole| whole.len() <= Self::SHORT).cloned();
    }
}

pub(crate) struct Driver {
    store: Store,
    options: LiveOptions,
    shared: Arc<Shared>,
    follower: Follower,
    matcher: Matcher,
    subscribers: HashMap<u64, Subscriber>,
    queries: HashMap<QueryId, Followed>,
    /// Queries whose whole result has changed, and is to be told.
    changed: HashSet<QueryId>,
    fanout: Fanout,
    next_id: u64,
}

/// How many commits are taken in before it is looked who has come or gone.
const COMMITS_AT_A_TIME: usize = 256;

impl Driver {
    pub(crate) fn new(store: Store, options: LiveOptions, shared: Arc<Shared>, fanout: Fanout) -> Self {
        let (snapshot, follower) = store.follow();
        Self {
            matcher: Matcher::new(snapshot.position),
            store,
            options,
            shared,
            follower,
            subscribers: HashMap::new(),
            queries: HashMap::new(),
            changed: HashSet::new(),
            fanout,
            next_id: 1,
        }
    }

    /// Works until nobody asks for anything any more, or the store ends.
    pub(crate) async fn run(mut self) {
        loop {
            let is_open = self.take_commits(None);
            self.tell_whole();
            if !is_open || !self.take_asked() {
                return;
            }
            self.wait().await;
        }
    }

    /// Waits for a commit, or until something is asked for.
    async fn wait(&mut self) {
        let mut asked = pin!(self.shared.awake.notified());
        let mut commit = pin!(self.follower.ready());
        poll_fn(|context| {
            let is_ready = commit.as_mut().poll(context).is_ready() || asked.as_mut().poll(context).is_ready();
            if is_ready { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Takes commits in: all up to a position, or some. Returns whether there can be more.
    fn take_commits(&mut self, until: Option<Position>) -> bool {
        let mut left = if until.is_some() { usize::MAX } else { COMMITS_AT_A_TIME };
        while left > 0 && until.is_none_or(|until| self.matcher.position().sequence < until.sequence) {
            match self.follower.try_next() {
                Ok(Some(commit)) => self.take_commit(&commit),
                // What is published is in the history in a moment.
                Ok(None) if until.is_some() => std::thread::yield_now(),
                Ok(None) => break,
                Err(FollowError::Closed) => return false,
                Err(_) => {
                    self.begin_anew();
                    // That takes long, and may be needed again at once: others have waited.
                    left = if until.is_some() { left } else { 1 };
                }
            }
            left -= 1;
        }
        true
    }

    fn take_commit(&mut self, commit: &Commit) {
        self.shared.counters.commits.fetch_add(1, Relaxed);
        let committed = self.matcher.commit(commit.position, &commit.changes);
        for ended in committed.ended {
            self.queries.remove(&ended.query);
            for id in ended.subscribers {
                self.end(id, End::BucketDropped);
            }
        }
        for change in commit.changes.iter().filter(|change| *change.bucket == *QUERIES && change.new.is_none()) {
            self.end_named(change);
        }
        self.tell(commit.position, committed.updates);
    }

    /// Delivers deltas, and notes the queries whose whole result has to be delivered.
    fn tell(&mut self, position: Position, updates: Vec<Update>) {
        let mut deliveries = Vec::new();
        let concerned = updates.len();
        for update in updates {
            let Some(followed) = self.queries.get(&update.query) else { continue };
            let mark = Mark::new(position, followed.hash);
            let mut is_whole = matches!(update.outcome, Outcome::Value);
            if let Outcome::Records(delta) = &update.outcome {
                for id in self.matcher.subscribers(update.query) {
                    match self.subscribers.get(id) {
                        Some(Subscriber { mode: Mode::Delta, inbox, .. }) => {
                            let event = Event::Delta { delta: delta.clone(), mark };
                            deliveries.push((Arc::clone(inbox), event));
                        }
                        _ => is_whole = true,
                    }
                }
            }
            if is_whole {
                self.changed.insert(update.query);
            }
        }
        let delivered = self.fanout.deliver(deliveries, concerned, self.options.max_deltas);
        self.shared.counters.events.fetch_add(delivered.given, Relaxed);
        self.shared.counters.conflated.fetch_add(delivered.behind, Relaxed);
    }

    /// Delivers the whole results that have changed, as they are now.
    fn tell_whole(&mut self) {
        let position = self.matcher.position();
        for query in std::mem::take(&mut self.changed) {
            let Some(followed) = self.queries.get_mut(&query) else { continue };
            let Some(whole) = self.matcher.whole(query) else { continue };
            if followed.told.as_ref() == Some(&whole) {
                continue;
            }
            followed.tell(&whole);
            let mark = Mark::new(position, followed.hash);
            // The result of an aggregate has no parts, so all subscribers receive it.
            let is_value = self.matcher.query(query).is_some_and(|query| query.aggregate.is_some());
            for id in self.matcher.subscribers(query) {
                let Some(subscriber) = self.subscribers.get(id) else { continue };
                if is_value || subscriber.mode == Mode::Whole {
                    subscriber.inbox.replace(Event::Whole { whole: whole.clone(), mark }, &self.shared.counters);
                }
            }
        }
    }

    /// Too much has been missed: reads all queries anew.
    fn begin_anew(&mut self) {
        self.shared.counters.restarts.fetch_add(1, Relaxed);
        let (snapshot, follower) = self.store.follow();
        self.follower = follower;
        self.changed.clear();
        let old = std::mem::replace(&mut self.matcher, Matcher::new(snapshot.position));
        let queries = std::mem::take(&mut self.queries);
        let now = self.store.now();
        for (query, followed) in queries {
            let Some(asked) = old.query(query) else { continue };
            for id in old.subscribers(query) {
                let bucket = snapshot.state.bucket(&asked.bucket).ok();
                let Some(bucket) = bucket.filter(|bucket| bucket.identity() == followed.bucket) else {
                    self.end(*id, End::BucketDropped);
                    continue;
                };
                let definition = self.subscribers.get(id).and_then(|subscriber| subscriber.definition.as_ref());
                if definition.is_some_and(|definition| !definition.is_in(&snapshot.state)) {
                    self.end(*id, End::QueryUndefined);
                    continue;
                }
                match self.matcher.subscribe(*id, asked, bucket, now) {
                    Ok(query) => {
                        let anew = || Followed { told: None, ..followed.clone() };
                        self.queries.entry(query).or_insert_with(anew);
                    }
                    Err(_) => self.end(*id, End::Closed),
                }
            }
        }
        // Also those who follow deltas begin anew.
        let ids: Vec<u64> = self.subscribers.keys().copied().collect();
        for id in ids {
            self.give_whole(id);
        }
    }

    /// Delivers the whole result to a subscriber, in place of all that waits for it. All changes of the result have been delivered to
    /// the others before.
    fn give_whole(&mut self, id: u64) {
        let Some(query) = self.matcher.query_of(id) else { return };
        let Some(followed) = self.queries.get_mut(&query) else { return };
        let Some(subscriber) = self.subscribers.get(&id) else { return };
        let mark = Mark::new(self.matcher.position(), followed.hash);
        if let Some(whole) = self.matcher.whole(query) {
            followed.tell(&whole);
            subscriber.inbox.replace(Event::Whole { whole, mark }, &self.shared.counters);
        }
    }

    /// Handles what has been asked of the driver. Returns whether it is still open.
    fn take_asked(&mut self) -> bool {
        let mut asked = self.shared.asked();
        let (commands, left, refresh) =
            (std::mem::take(&mut asked.commands), std::mem::take(&mut asked.left), std::mem::take(&mut asked.refresh));
        let is_open = !asked.is_closed;
        drop(asked);
        for _ in &commands {
            // One by one, so that a waker that panics costs no other caller its turn.
            shielded(|| self.shared.room.add_permits(1));
        }
        for id in left {
            self.forget(id);
        }
        for id in refresh {
            if self.subscribers.get(&id).is_some_and(|subscriber| subscriber.inbox.take_request()) {
                self.give_whole(id);
            }
        }
        for command in commands {
            self.obey(command);
        }
        self.measure();
        is_open
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Subscribe { query, mode, since, reply } => {
                let subscribed = self.subscribe(query, mode, since);
                self.answer(reply, subscribed);
            }
            Command::Replace { id, query, reply } => {
                let replaced = self.replace(id, &query);
                self.answer(reply, replaced);
            }
            Command::Settle(reply) => {
                self.settle();
                self.answer(reply, self.matcher.position());
            }
        }
    }

    /// Answers a caller. It may have gone away, and then the answer is dropped. The counters are up to date before.
    fn answer<T>(&self, reply: oneshot::Sender<T>, answer: T) {
        self.measure();
        shielded(|| drop(reply.send(answer)));
    }

    /// Publishes the numbers of queries and subscribers.
    fn measure(&self) {
        self.shared.counters.queries.store(self.queries.len(), Relaxed);
        self.shared.counters.subscribers.store(self.subscribers.len(), Relaxed);
    }

    /// Takes in all that is published, and returns it.
    fn settle(&mut self) -> Arc<Snapshot> {
        loop {
            let snapshot = self.store.snapshot();
            let is_open = self.take_commits(Some(snapshot.position));
            self.tell_whole();
            // It may have begun anew with a later one.
            if self.matcher.position() == snapshot.position || !is_open {
                return snapshot;
            }
        }
    }

    fn subscribe(&mut self, asked: Asked, mode: Mode, since: Option<Mark>) -> Result<Subscription, LiveError> {
        let snapshot = self.settle();
        let max = self.options.max_subscriptions;
        if self.subscribers.len() >= max {
            return Err(LiveError::TooMany { max });
        }
        let now = self.store.now();
        let (query, definition) = match asked {
            Asked::Query(query) => (query, None),
            Asked::Named(named) => {
                let config = snapshot.state.query_config(&named.name)?;
                let query = Query::parse(&config, &named.params).map_err(StoreError::from)?;
                let query = match &named.guard {
                    Some(guard) => query.restrict(guard),
                    None => query,
                };
                (Box::new(query), Some(Definition(snapshot.state.query_record(&named.name)?.clone())))
            }
        };
        let bucket = snapshot.state.bucket(&query.bucket)?;
        let id = self.next_id;
        let live = self.matcher.subscribe(id, &query, bucket, now)?;
        self.next_id += 1;
        let hash = mark::hash(&query);
        let resumed =
            since.filter(|since| since.is_of(hash)).and_then(|since| self.resume(&query, since, &snapshot, now));
        let whole = || First::Whole(self.matcher.whole(live).unwrap_or(Whole::Nothing));
        let first = resumed.unwrap_or_else(whole);
        let anew = || Followed { hash, bucket: bucket.identity(), told: None };
        let followed = self.queries.entry(live).or_insert_with(anew);
        // Also for a query that others follow: by deltas they may be further than what was last told.
        followed.told = None;
        if let First::Whole(whole) = &first {
            followed.tell(whole);
        }
        let inbox = Arc::new(Inbox::default());
        self.subscribers.insert(id, Subscriber { inbox: Arc::clone(&inbox), mode, definition });
        let mark = Mark::new(snapshot.position, hash);
        Ok(Subscription { id, first: Some(Box::new(first)), mark, inbox, shared: Arc::clone(&self.shared) })
    }

    /// What has changed since a mark; none if that is not known any more, or if it can only be said as a whole.
    fn resume(&self, query: &Query, since: Mark, snapshot: &Snapshot, now: u64) -> Option<First> {
        let bucket = snapshot.state.bucket(&query.bucket).ok()?;
        // What is not kept has gone with a restart, and no commit says so.
        if !bucket.definition().persistent && since.position().sequence <= self.store.began().sequence {
            return None;
        }
        let mut follower = self.store.follow_from(since.position()).ok()?;
        let mut commits = Vec::new();
        while follower.position().sequence < snapshot.position.sequence {
            commits.push(follower.try_next().ok()??);
        }
        let changes = commits.iter().flat_map(|commit| &commit.changes);
        // What it was the result of is not there any more.
        if changes.clone().any(|change| dropped(change).is_some_and(|name| name == query.bucket)) {
            return None;
        }
        match resume::since(query, bucket, now, changes)? {
            Since::Nothing => Some(First::Resumed(None)),
            Since::Changed(Outcome::Records(delta)) => Some(First::Resumed(Some(delta))),
            Since::Changed(Outcome::Value) => None,
        }
    }

    /// Lets a subscriber follow another query from now on.
    fn replace(&mut self, id: u64, query: &Query) -> Result<(), LiveError> {
        let snapshot = self.settle();
        // It may have ended just now.
        if !self.subscribers.contains_key(&id) {
            return Err(LiveError::NotSubscribed { id });
        }
        let bucket = match snapshot.state.bucket(&query.bucket) {
            Ok(bucket) => bucket,
            Err(error) => {
                self.end(id, End::BucketDropped);
                return Err(error.into());
            }
        };
        self.unfollow(id);
        match self.matcher.subscribe(id, query, bucket, self.store.now()) {
            Ok(live) => {
                self.queries.entry(live).or_insert_with(|| Followed {
                    hash: mark::hash(query),
                    bucket: bucket.identity(),
                    told: None,
                });
                self.give_whole(id);
                Ok(())
            }
            Err(error) => {
                self.end(id, End::Closed);
                Err(error.into())
            }
        }
    }

    /// Ends the subscriptions to a named query that is defined no more.
    fn end_named(&mut self, change: &Change) {
        let Some(Value::String(name)) = change.old.as_ref().and_then(|row| row.get(&NAME)) else { return };
        let is_its = |subscriber: &Subscriber| {
            subscriber.definition.as_ref().is_some_and(|definition| definition.has_name(&name))
        };
        let ids = self.subscribers.iter().filter(|(_, subscriber)| is_its(subscriber)).map(|(id, _)| *id);
        for id in ids.collect::<Vec<u64>>() {
            self.end(id, End::QueryUndefined);
        }
    }

    fn end(&mut self, id: u64, end: End) {
        self.unfollow(id);
        if let Some(subscriber) = self.subscribers.remove(&id) {
            self.shared.counters.ended.fetch_add(1, Relaxed);
            subscriber.inbox.end(end);
        }
    }

    /// A subscriber has gone.
    fn forget(&mut self, id: u64) {
        self.unfollow(id);
        self.subscribers.remove(&id);
    }

    fn unfollow(&mut self, id: u64) {
        let Some(query) = self.matcher.query_of(id) else { return };
        self.matcher.unsubscribe(id);
        if self.matcher.subscribers(query).is_empty() {
            self.queries.remove(&query);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // However it ends, no caller and no subscriber may be left waiting.
        self.shared.close();
        let commands = std::mem::take(&mut self.shared.asked().commands);
        for command in commands {
            shielded(|| drop(command));
        }
        self.queries.clear();
        let subscribers = std::mem::take(&mut self.subscribers);
        self.measure();
        self.shared.counters.ended.fetch_add(subscribers.len() as u64, Relaxed);
        for subscriber in subscribers.values() {
            subscriber.inbox.end(End::Closed);
        }
    }
}
