//! Live queries over a store.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

use serde_json::{Map, Value as Json};
use tidewire_store::{Filter, Position, Query, Store, StoreError};
use tokio::sync::oneshot;

use crate::SubscribeError;
use crate::driver::{Asked, Command, Driver, Named, Shared};
use crate::fanout::Fanout;
use crate::mark::Mark;
use crate::subscription::{Mode, Subscription};

/// Settings of [`Live`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveOptions {
    /// How many subscriptions there may be; more are refused. Default: 10 000.
    pub max_subscriptions: usize,
    /// How many deltas wait for a subscriber; with more it gets the whole result instead. Default: 64.
    pub max_deltas: usize,
    /// How many requests wait for the driver; more wait for room. Default: 1024.
    pub queue: usize,
    /// The threads that tell subscribers of a commit that concerns more than 64 queries, at most
    /// [`MAX_WORKERS`](Self::MAX_WORKERS). Default: one per core, at most 8.
    pub workers: usize,
}

impl LiveOptions {
    /// With more threads than this, none has enough to do.
    pub const MAX_WORKERS: usize = 64;
}

impl Default for LiveOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { max_subscriptions: 10_000, max_deltas: 64, queue: 1024, workers: cores.min(8) }
    }
}

/// Why a query is not followed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LiveError {
    /// Its bucket or name is not defined, or a parameter is missing.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There are as many subscriptions as there may be.
    #[error("there are {max} subscriptions, and there may be no more")]
    TooMany {
        /// How many there may be.
        max: usize,
    },
    /// The matcher cannot take it.
    #[error(transparent)]
    Matcher(#[from] SubscribeError),
    /// There is no such subscription.
    #[error("there is no subscription {id}")]
    NotSubscribed {
        /// Its number.
        id: u64,
    },
    /// The live queries or the store have ended.
    #[error("live queries have ended")]
    Closed,
}

/// What there is, and what has been done since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LiveStats {
    /// Queries that are followed, equal ones counted once.
    pub queries: usize,
    /// Who follows them.
    pub subscriptions: usize,
    /// Commits taken in.
    pub commits: u64,
    /// Events given to subscribers.
    pub events: u64,
    /// Times that events of a subscriber were dropped or replaced, because it was slow or paused.
    pub conflated: u64,
    /// Subscriptions that ended by another's doing.
    pub ended: u64,
    /// Times that everything was read anew, because commits came too fast.
    pub restarts: u64,
}

/// Live queries over a store: whoever subscribes has a result, and hears of every commit that changes it.
///
/// ```
/// use serde_json::json;
/// use tidewire_live::{Event, First, Live, Mode, Whole};
/// use tidewire_store::{Query, Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let store = Store::memory(StoreOptions::default());
/// store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).await?;
/// let live = Live::new(store.clone());
///
/// let query = Query::parse(&json!({"bucket": "harbours", "filter": {"tide": "high"}, "fields": ["id"]}), &Default::default())?;
/// let mut high = live.subscribe(query, Mode::Delta, None).await?;
/// assert!(matches!(high.first(), First::Whole(Whole::Json(json)) if json == "[]"));
///
/// store.insert("harbours", serde_json::from_value(json!({"id": 1, "tide": "high"}))?).await?;
/// let Event::Delta { delta, .. } = high.next().await? else { unreachable!() };
/// assert_eq!(delta.encoded(), r#"{"added":[{"id":1}],"changed":[],"removed":[]}"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It has a thread of its own, which ends when this is dropped; subscriptions end with it.
pub struct Live {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Live {
    /// Live queries over this store.
    ///
    /// # Panics
    ///
    /// If the process cannot start another thread.
    pub fn new(store: Store) -> Self {
        Self::with_options(store, LiveOptions::default())
    }

    /// With other settings than the usual ones.
    ///
    /// # Panics
    ///
    /// If the process cannot start another thread.
    pub fn with_options(store: Store, options: LiveOptions) -> Self {
        let shared = Arc::new(Shared::new(options.queue));
        let fanout =
            Fanout::new(options.workers.min(LiveOptions::MAX_WORKERS)).expect("a process can start a few threads");
        let driver = Driver::new(store, options, Arc::clone(&shared), fanout);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("it has neither files nor threads");
        let thread = std::thread::Builder::new().name("tidewire-live".to_owned());
        let thread = thread.spawn(move || runtime.block_on(driver.run())).expect("a process can start one thread");
        Self { shared, thread: Some(thread) }
    }

    /// Follows a query, restricted to what the subscriber may see. With a mark of an earlier subscription to the same query it goes
    /// on from there, if the store's history reaches back so far; else it begins with the whole result.
    pub async fn subscribe(&self, query: Query, mode: Mode, since: Option<Mark>) -> Result<Subscription, LiveError> {
        self.ask_for(Asked::Query(Box::new(query)), mode, since).await
    }

    /// Follows a named query, with these parameters, restricted to what a filter means.
    pub async fn subscribe_named(
        &self,
        name: &str,
        params: Map<String, Json>,
        guard: Option<Filter>,
        mode: Mode,
        since: Option<Mark>,
    ) -> Result<Subscription, LiveError> {
        self.ask_for(Asked::Named(Box::new(Named { name: name.to_owned(), params, guard })), mode, since).await
    }

    async fn ask_for(&self, query: Asked, mode: Mode, since: Option<Mark>) -> Result<Subscription, LiveError> {
        self.ask(|reply| Command::Subscribe { query, mode, since, reply }).await?
    }

    /// Lets a subscription follow another query, because what it may see is another: it gets the whole result of that one next. If
    /// that cannot be, it ends: it does not go on with what it may not see.
    pub async fn replace(&self, id: u64, query: Query) -> Result<(), LiveError> {
        self.ask(|reply| Command::Replace { id, query: Box::new(query), reply }).await?
    }

    /// Waits until all that the store has published is taken in. Returns up to where.
    pub async fn settled(&self) -> Result<Position, LiveError> {
        self.ask(Command::Settle).await
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, LiveError> {
        let (reply, answer) = oneshot::channel();
        self.shared.ask(command(reply)).await;
        answer.await.map_err(|_| LiveError::Closed)
    }

    /// What there is, and what has been done.
    pub fn stats(&self) -> LiveStats {
        let counters = &self.shared.counters;
        LiveStats {
            queries: counters.queries.load(Relaxed),
            subscriptions: counters.subscribers.load(Relaxed),
            commits: counters.commits.load(Relaxed),
            events: counters.events.load(Relaxed),
            conflated: counters.conflated.load(Relaxed),
            ended: counters.ended.load(Relaxed),
            restarts: counters.restarts.load(Relaxed),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.close();
        // Its own thread, which may be telling somebody who drops this, cannot wait for itself.
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !is_own(thread)) {
            // If it panicked, it has said so, and everybody knows.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
