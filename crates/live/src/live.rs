//! Live queries over a store.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json};
use tidewire_store::{Filter, Position, Query, Store, StoreError};
use tokio::sync::oneshot;

use crate::SubscribeError;
use crate::driver::Driver;
use crate::mark::Mark;
use crate::shared::{Command, LiveShared, Subscribe, Target};
use crate::subscription::{Mode, Subscription, SubscriptionEnd};

/// Settings of [`Live`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveOptions {
    /// Limit of the number of subscriptions. Further subscriptions are rejected. Default: 10 000.
    pub max_subscriptions: usize,
    /// Limit of the queued deltas of a subscriber. Above it, the subscriber gets a snapshot instead. Default: 64.
    pub max_deltas: usize,
    /// Limit of the queued requests to the live thread. Further callers wait for a permit. Default: 1024.
    pub queue: usize,
    /// Number of threads that deliver the events of a commit that changes more than 64 queries, at most
    /// [`MAX_WORKERS`](Self::MAX_WORKERS). Default: one per core, at most 8.
    pub workers: usize,
    /// Limit of a snapshot in bytes of JSON. Default: 16 MiB.
    pub max_result_bytes: usize,
    /// Timeout of an evaluation. It applies to subscriptions without an earlier
    /// [deadline](SubscribeOptions::deadline), and to queries that are evaluated again. Default: 30 seconds, which is the timeout
    /// of a request.
    pub evaluation_timeout: Duration,
    /// Limit of the work that the live queries of an owner may take at commits within a second, in units of about a nanosecond. An
    /// owner above it loses its costliest subscription. A query that takes more in a single commit ends. Default: 100 000 000, a
    /// tenth of a second.
    pub max_owner_work: u64,
    /// Limit of the memory of the live queries of an owner, without the rows themselves: about 40 bytes per row. Default: 64 MiB.
    pub max_owner_bytes: usize,
    /// Limit of the memory of all live queries, without the rows themselves. Default: 512 MiB.
    pub max_bytes: usize,
}

impl Default for LiveOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_subscriptions: 10_000,
            max_deltas: 64,
            queue: 1024,
            workers: cores.min(8),
            max_result_bytes: 16 << 20,
            evaluation_timeout: Duration::from_secs(30),
            max_owner_work: 100_000_000,
            max_owner_bytes: 64 << 20,
            max_bytes: 512 << 20,
        }
    }
}

impl LiveOptions {
    /// Limit of [`workers`](#structfield.workers).
    pub const MAX_WORKERS: usize = 64;

    /// Sets [`max_subscriptions`](#structfield.max_subscriptions).
    #[must_use]
    pub fn max_subscriptions(mut self, max_subscriptions: usize) -> Self {
        self.max_subscriptions = max_subscriptions;
        self
    }

    /// Sets [`max_deltas`](#structfield.max_deltas).
    #[must_use]
    pub fn max_deltas(mut self, max_deltas: usize) -> Self {
        self.max_deltas = max_deltas;
        self
    }

    /// Sets [`queue`](#structfield.queue).
    #[must_use]
    pub fn queue(mut self, queue: usize) -> Self {
        self.queue = queue;
        self
    }

    /// Sets [`workers`](#structfield.workers).
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Sets [`max_result_bytes`](#structfield.max_result_bytes).
    #[must_use]
    pub fn max_result_bytes(mut self, max_result_bytes: usize) -> Self {
        self.max_result_bytes = max_result_bytes;
        self
    }

    /// Sets [`evaluation_timeout`](#structfield.evaluation_timeout).
    #[must_use]
    pub fn evaluation_timeout(mut self, evaluation_timeout: Duration) -> Self {
        self.evaluation_timeout = evaluation_timeout;
        self
    }

    /// Sets [`max_owner_work`](#structfield.max_owner_work).
    #[must_use]
    pub fn max_owner_work(mut self, max_owner_work: u64) -> Self {
        self.max_owner_work = max_owner_work;
        self
    }

    /// Sets [`max_owner_bytes`](#structfield.max_owner_bytes).
    #[must_use]
    pub fn max_owner_bytes(mut self, max_owner_bytes: usize) -> Self {
        self.max_owner_bytes = max_owner_bytes;
        self
    }

    /// Sets [`max_bytes`](#structfield.max_bytes).
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }
}

/// Settings of a subscription. A [`Mode`] converts into settings with this mode and the other defaults.
///
/// ```
/// use std::time::{Duration, Instant};
/// use tidewire_live::{Mode, SubscribeOptions};
///
/// let options = SubscribeOptions::from(Mode::Delta).deadline(Instant::now() + Duration::from_secs(5));
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct SubscribeOptions {
    /// How changes are delivered. Default: as snapshots.
    pub mode: Mode,
    /// A mark of an earlier subscription to the same query, to resume from. If the store's history does not reach back to it, the
    /// subscription begins with a snapshot. Default: none.
    pub since: Option<Mark>,
    /// The owner. All subscriptions of an owner share its limits of [work](LiveOptions::max_owner_work) and
    /// [memory](LiveOptions::max_owner_bytes). Default: none, so only the limit of the total memory applies.
    pub owner: Option<u64>,
    /// Deadline for the evaluation of the query, if it is earlier than the end of [`LiveOptions::evaluation_timeout`]. Subscribers that
    /// wait for equal queries share one evaluation, which has the latest of their deadlines. Default: none.
    pub deadline: Option<Instant>,
}

impl SubscribeOptions {
    /// Sets [`mode`](#structfield.mode).
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets [`since`](#structfield.since).
    #[must_use]
    pub fn since(mut self, since: impl Into<Option<Mark>>) -> Self {
        self.since = since.into();
        self
    }

    /// Sets [`owner`](#structfield.owner).
    #[must_use]
    pub fn owner(mut self, owner: u64) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Sets [`deadline`](#structfield.deadline).
    #[must_use]
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

impl From<Mode> for SubscribeOptions {
    fn from(mode: Mode) -> Self {
        Self::default().mode(mode)
    }
}

/// Why a subscription failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LiveError {
    /// The bucket or the query is not defined, or a parameter is missing.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The limit of subscriptions is reached.
    #[error("the limit of {max} subscriptions is reached")]
    TooMany {
        /// The limit.
        max: usize,
    },
    /// Too many evaluations are queued.
    #[error("too many evaluations of queries are queued; try again later")]
    Busy,
    /// The result is larger than [`LiveOptions::max_result_bytes`].
    #[error("the result is larger than {max} bytes; use a filter, a limit or fewer fields")]
    ResultTooLarge {
        /// The limit.
        max: usize,
    },
    /// The matching rows exceed a memory limit.
    #[error("the matching records exceed the {limit} of {max} bytes; use a narrower filter")]
    TooLarge {
        /// The limit that is exceeded.
        limit: MemoryLimit,
        /// The limit.
        max: usize,
    },
    /// The deadline passed before the query was evaluated.
    #[error("the query was not evaluated before its deadline")]
    Deadline,
    /// The store's history did not reach back to the start of the evaluation, in several attempts.
    #[error(
        "too many commits during the evaluation of the query: the store's history does not reach back to its start"
    )]
    TooManyCommits,
    /// The evaluation of the query panicked.
    #[error("the evaluation of the query failed")]
    Panicked,
    /// The subscription ended before its first result.
    #[error("the subscription ended before its first result: {0}")]
    Ended(SubscriptionEnd),
    /// The matcher cannot add the subscriber.
    #[error(transparent)]
    Matcher(#[from] SubscribeError),
    /// The [`Live`] handle was dropped, or the store was closed.
    #[error("live queries are closed")]
    Closed,
}

/// A limit of the memory of live queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// [`LiveOptions::max_owner_bytes`].
    Owner,
    /// [`LiveOptions::max_bytes`].
    Total,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Owner => "memory limit of a client's subscriptions",
            Self::Total => "memory limit of all subscriptions",
        })
    }
}

/// Statistics of live queries: gauges, and counters since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LiveStats {
    /// Live queries. Equal queries are counted once.
    pub queries: usize,
    /// Subscriptions, including those that wait for their first result.
    pub subscriptions: usize,
    /// Approximate memory of live queries, without the rows themselves, which are shared with the store.
    pub kept_bytes: usize,
    /// Commits applied.
    pub commits: u64,
    /// Events delivered to subscribers.
    pub events: u64,
    /// Number of times that queued events of a subscriber were dropped or replaced, because it was slow or paused.
    pub conflated: u64,
    /// Subscriptions that ended with a [`SubscriptionEnd`].
    pub ended: u64,
    /// Number of times that the live thread missed commits and evaluated all queries again.
    pub restarts: u64,
    /// Evaluations of queries by background threads.
    pub evaluations: u64,
    /// Evaluations that were repeated, because the history did not reach back to their start.
    pub reevaluations: u64,
    /// Subscriptions that were ended because they exceeded the work limit.
    pub too_costly: u64,
}

/// Live queries over a store: a subscriber gets the result of a query, and every change of it.
///
/// ```
/// use serde_json::json;
/// use tidewire_live::{Event, First, Live, Mode, QueryResult};
/// use tidewire_store::{Query, Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let store = Store::memory(StoreOptions::default());
/// store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).await?;
/// let live = Live::new(store.clone());
///
/// let query = Query::new("harbours").filter(json!({"tide": "high"}))?.fields(["id"]);
/// let mut high = live.subscribe(query, Mode::Delta).await?;
/// assert!(matches!(high.first(), First::Snapshot(QueryResult::Json(json)) if json == "[]"));
///
/// store.insert("harbours", json!({"id": 1, "tide": "high"})).await?;
/// let Event::Delta { delta, .. } = high.next().await? else { unreachable!() };
/// assert_eq!(delta.encoded(), r#"{"added":[{"id":1}],"changed":[],"removed":[]}"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// One thread applies commits and delivers events, and a few background threads evaluate queries and encode large results. Dropping
/// the handle ends the threads and all subscriptions.
pub struct Live {
    shared: Arc<LiveShared>,
    thread: Option<JoinHandle<()>>,
}

impl Live {
    /// Starts live queries over a store, with default settings.
    ///
    /// # Panics
    ///
    /// If the process cannot start another thread.
    pub fn new(store: Store) -> Self {
        Self::with_options(store, LiveOptions::default())
    }

    /// Starts live queries over a store.
    ///
    /// # Panics
    ///
    /// If the process cannot start another thread.
    pub fn with_options(store: Store, options: LiveOptions) -> Self {
        let shared = Arc::new(LiveShared::new(options.queue));
        let driver = Driver::new(store, options, Arc::clone(&shared)).expect("a process can start a few threads");
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime without drivers cannot fail");
        let thread = std::thread::Builder::new().name("tidewire-live".to_owned());
        let thread = thread.spawn(move || runtime.block_on(driver.run())).expect("a process can start one thread");
        Self { shared, thread: Some(thread) }
    }

    /// Subscribes to a query, which must be restricted to the rows that the subscriber may see. The first result includes all
    /// commits that were published before the call.
    ///
    /// A costly query that is not live yet is evaluated by a background thread. Dropping the future cancels the evaluation, unless
    /// other subscribers wait for it.
    pub async fn subscribe(
        &self,
        query: Query,
        options: impl Into<SubscribeOptions>,
    ) -> Result<Subscription, LiveError> {
        self.subscribe_to(Target::Query(query), options.into()).await
    }

    /// Subscribes to a named query with these parameters, restricted to the rows that match `row_filter`.
    pub async fn subscribe_named(
        &self,
        name: &str,
        params: Map<String, Json>,
        row_filter: Option<Filter>,
        options: impl Into<SubscribeOptions>,
    ) -> Result<Subscription, LiveError> {
        self.subscribe_to(Target::Named { name: name.to_owned(), params, row_filter }, options.into()).await
    }

    async fn subscribe_to(&self, target: Target, options: SubscribeOptions) -> Result<Subscription, LiveError> {
        let mut waiting = WaitingCaller { id: Some(self.shared.next_id()), shared: &self.shared };
        let id = waiting.id.unwrap_or_default();
        let subscribed =
            self.request(|reply| Command::Subscribe(Box::new(Subscribe { id, target, options, reply }))).await;
        // From here on, dropping the subscription ends it.
        waiting.id = None;
        subscribed?
    }

    /// Waits until all published commits are applied and their events are delivered. Returns the position of the last commit.
    pub async fn settled(&self) -> Result<Position, LiveError> {
        self.request(Command::Settle).await
    }

    async fn request<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, LiveError> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(command(reply)).await;
        answer.await.map_err(|_| LiveError::Closed)
    }

    /// Returns gauges and counters.
    pub fn stats(&self) -> LiveStats {
        let counters = &self.shared.counters;
        LiveStats {
            queries: counters.queries.load(Relaxed),
            subscriptions: counters.subscribers.load(Relaxed),
            kept_bytes: counters.kept_bytes.load(Relaxed),
            commits: counters.commits.load(Relaxed),
            events: counters.events.load(Relaxed),
            conflated: counters.conflated.load(Relaxed),
            ended: counters.ended.load(Relaxed),
            restarts: counters.restarts.load(Relaxed),
            evaluations: counters.evaluations.load(Relaxed),
            reevaluations: counters.reevaluations.load(Relaxed),
            too_costly: counters.too_costly.load(Relaxed),
        }
    }
}

/// A caller that waits for its subscription. If it stops waiting, the subscription ends.
struct WaitingCaller<'a> {
    id: Option<u64>,
    shared: &'a LiveShared,
}

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.shared.unsubscribe(id);
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.close();
        // A waker on the live thread may drop the last handle. The thread cannot join itself.
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !is_own(thread)) {
            // If the thread panicked, all subscriptions have ended.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
