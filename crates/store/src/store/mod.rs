//! The store: a published state, one writer, and an engine that makes writes durable.
//!
//! Reads take the published state and never wait.
//!
//! # The path of a write
//!
//! 1. [`Store::write`] puts the work into the bounded queue (`queue`), in the line of its owner (`lines`), and returns a
//!    [`Pending`].
//! 2. The writer thread takes waiting work by turns between owners, up to a limit of writes, bytes and time, and runs each piece on
//!    the head, a [`Draft`](crate::Draft): the published state and the changes since (`writer`). A failed write is undone.
//! 3. The draft validates a record, its references and its permissions, and stores it: by ordinal, by key, and in every index.
//! 4. The engine makes the commits of the group durable with one sync.
//! 5. The writer publishes the head with one atomic swap, appends the commits to the history, where followers read them, and
//!    answers every write of the group, refused ones included.
//! 6. From time to time the writer starts a checkpoint, which runs on its own thread over the immutable state, and sweeps expired
//!    records.

mod declare;
mod history;
mod lines;
mod pending;
mod queue;
mod recover;
mod reply;
mod stats;
mod transfer;
mod turns;
mod writer;
mod writes;

use std::fmt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use serde_json::{Map, Value as Json};
use tokio::sync::oneshot;

pub use self::history::{Commit, FollowError, Follower};
pub use self::pending::{Pending, WriteError};
pub use self::recover::{StoreOpenError, Unreadable};
pub use self::stats::{BucketList, BucketStats, StoreStats};
pub use self::transfer::{ImportError, ImportProblem, Imported, UpkeepError};

use self::history::History;
use self::lines::Bounds;
use self::pending::block_on;
use self::queue::{Message, Queue};
use self::recover::Loader;
use self::stats::Counters;
use self::writer::Writer;
use crate::engine::{Disk, Embedded, EmbeddedOptions, Engine, EngineError, EngineStats, Files, Memory, Recovery};
use crate::lock::lock;
use crate::query::Budget;
use crate::system::SystemBuckets;
use crate::transaction::{Operation, OperationResult};
use crate::{Answer, Cause, Draft, IntoRecord, Limits, Position, Query, Row, State, StoreError};

/// Settings of a [`Store`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Limits on records, definitions and the whole store.
    pub limits: Limits,
    /// Limit of the writes in the queue. One owner can use a quarter of it: see [`WriteOptions::owner`]. Further writes wait
    /// outside: see [`Pending`]. Default: 4096, so that one owner can fill a group.
    pub queue: usize,
    /// Limit of the bytes of the writes in the queue: see [`WriteOptions::bytes`]. One owner can use a quarter of it; a single
    /// larger write is queued alone. Default: 64 MiB, which is 64 of the largest records.
    pub queue_bytes: usize,
    /// Limit of the bytes of the newest commits that are kept for followers. A follower that falls further behind gets
    /// [`FollowError::Behind`] and starts again from a snapshot. Default: 64 MiB, which is seconds of the highest write rate.
    pub history_bytes: usize,
    /// Interval at which expired records are deleted. Reads do not see them in the meantime. `None` means only when
    /// [`Store::sweep`] is called. Default: one second.
    pub sweep_interval: Option<Duration>,
    /// Settings of the embedded engine, which [`Store::open`] uses.
    pub embedded: EmbeddedOptions,
    /// The clock that timestamps and expiry follow. Default: the clock of the system.
    pub clock: Clock,
    /// Buckets of the embedding program, which ordinary requests do not reach. Default: none.
    pub system_buckets: SystemBuckets,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            queue: 4096,
            queue_bytes: 64 << 20,
            history_bytes: 64 << 20,
            sweep_interval: Some(Duration::from_secs(1)),
            embedded: EmbeddedOptions::default(),
            clock: Clock::default(),
            system_buckets: SystemBuckets::default(),
        }
    }
}

impl StoreOptions {
    /// Sets [`limits`](#structfield.limits).
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets [`queue`](#structfield.queue).
    #[must_use]
    pub fn queue(mut self, queue: usize) -> Self {
        self.queue = queue;
        self
    }

    /// Sets [`queue_bytes`](#structfield.queue_bytes).
    #[must_use]
    pub fn queue_bytes(mut self, queue_bytes: usize) -> Self {
        self.queue_bytes = queue_bytes;
        self
    }

    /// Sets [`history_bytes`](#structfield.history_bytes).
    #[must_use]
    pub fn history_bytes(mut self, history_bytes: usize) -> Self {
        self.history_bytes = history_bytes;
        self
    }

    /// Sets [`sweep_interval`](#structfield.sweep_interval).
    #[must_use]
    pub fn sweep_interval(mut self, sweep_interval: impl Into<Option<Duration>>) -> Self {
        self.sweep_interval = sweep_interval.into();
        self
    }

    /// Sets [`embedded`](#structfield.embedded).
    #[must_use]
    pub fn embedded(mut self, embedded: EmbeddedOptions) -> Self {
        self.embedded = embedded;
        self
    }

    /// Sets [`clock`](#structfield.clock).
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Sets [`system_buckets`](#structfield.system_buckets).
    #[must_use]
    pub fn system_buckets(mut self, system_buckets: SystemBuckets) -> Self {
        self.system_buckets = system_buckets;
        self
    }
}

/// How a write is accounted for: see [`Store::write_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WriteOptions {
    /// The cause of the write, which is logged with its commit. Writes of one owner with the same origin run in the order in which
    /// they were submitted; those with different origins take turns.
    pub cause: Cause,
    /// The owner that is charged for the write, such as a hash of a user id. Owners get equal shares of the writer, and one owner
    /// cannot fill the queue. Default: 0, which is the embedding program.
    pub owner: u64,
    /// The memory that the closure of the write holds while it waits. Default: 0, so only the number of writes is bounded.
    pub bytes: usize,
}

impl WriteOptions {
    /// Sets [`cause`](#structfield.cause).
    #[must_use]
    pub fn cause(mut self, cause: Cause) -> Self {
        self.cause = cause;
        self
    }

    /// Sets [`owner`](#structfield.owner).
    #[must_use]
    pub fn owner(mut self, owner: u64) -> Self {
        self.owner = owner;
        self
    }

    /// Sets [`bytes`](#structfield.bytes).
    #[must_use]
    pub fn bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }
}

/// A clock, in milliseconds since 1970.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Clock {
    /// Creates a clock that calls `now`.
    pub fn new(now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Returns the time.
    pub fn now(&self) -> u64 {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// A state and the position of the commit that made it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Snapshot {
    /// All buckets.
    pub state: State,
    /// The commit that it is current to.
    pub position: Position,
}

/// Buckets of JSON records, kept by an engine. A clone is another handle to the same store.
///
/// ```
/// use serde_json::json;
/// use tidewire_store::{Store, StoreOptions};
///
/// # let dir = tempfile::tempdir()?;
/// let (store, _) = Store::open(dir.path(), StoreOptions::default())?;
/// store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).wait()?;
/// store.insert("harbours", json!({"id": 1, "tide": "high"})).wait()?;
/// store.close()?;
///
/// let (store, _) = Store::open(dir.path(), StoreOptions::default())?;
/// let row = store.get("harbours", &json!(1))?.expect("it was kept");
/// assert_eq!(row.to_record()["tide"], "high");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The last handle that is dropped waits until all writes are done and the engine is closed. [`close`](Self::close) does the
/// same, and says whether it went well.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<Result<(), EngineError>>>>,
    writer_id: ThreadId,
}

/// State shared by the handles and the writer.
struct Shared {
    published: ArcSwap<Snapshot>,
    began: Position,
    queue: Arc<Queue>,
    history: Arc<History>,
    counters: Counters,
    engine: Mutex<EngineStats>,
    keeps: bool,
    limits: Limits,
    sweep_interval: Option<Duration>,
    clock: Clock,
}

impl Shared {
    fn engine_stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.engine)
    }
}

impl Store {
    /// A store in memory, which ends with the process.
    pub fn memory(options: StoreOptions) -> Self {
        let engine = Memory::default();
        let position = engine.position();
        let history = History::new(position.epoch, position.sequence, options.history_bytes);
        let state = State::with_system_buckets(&options.system_buckets);
        Self::start(Box::new(engine), false, state, history, options)
    }

    /// Opens a store in a directory, or makes it.
    pub fn open(dir: impl AsRef<Path>, options: StoreOptions) -> Result<(Self, Recovery), StoreOpenError> {
        Self::open_on(Arc::new(Files), dir.as_ref(), options)
    }

    /// Like [`open`](Self::open), on another disk than that of this machine.
    pub fn open_on(disk: Arc<dyn Disk>, dir: &Path, options: StoreOptions) -> Result<(Self, Recovery), StoreOpenError> {
        let mut loader = Loader::new(options.history_bytes);
        let (mut engine, recovery) =
            Embedded::open_on(disk, dir, options.embedded, &mut |recovered| loader.take(recovered))?;
        let (state, history) = loader.finish(recovery.position)?;
        if let Some(cut) = &recovery.cut {
            tracing::warn!(?cut, "the log ended in a write that was not whole, which was cut off");
        }
        let state = declare::declare(&mut engine, state, &history, &options)?;
        Ok((Self::start(Box::new(engine), true, state, history, options), recovery))
    }

    fn start(engine: Box<dyn Engine>, keeps: bool, state: State, history: History, options: StoreOptions) -> Self {
        let snapshot = Snapshot { state, position: engine.position() };
        let shared = Arc::new(Shared {
            began: snapshot.position,
            published: ArcSwap::from_pointee(snapshot),
            queue: Arc::new(Queue::new(Bounds::new(options.queue, options.queue_bytes))),
            history: Arc::new(history),
            counters: Counters::default(),
            engine: Mutex::new(engine.stats()),
            keeps,
            limits: options.limits,
            sweep_interval: options.sweep_interval,
            clock: options.clock,
        });
        let writer = Writer::new(Arc::clone(&shared), engine);
        let thread = std::thread::Builder::new().name("tidewire-writer".to_owned());
        let writer = thread.spawn(move || writer.run()).expect("a process can start one thread");
        let writer_id = writer.thread().id();
        Self { inner: Arc::new(Inner { shared, writer: Mutex::new(Some(writer)), writer_id }) }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// Everything at one moment. It stays as it is while the store goes on.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared().published.load_full()
    }

    /// Where it stood when it was opened. Records of buckets that are not kept are gone since then, without a commit that says so.
    pub fn began(&self) -> Position {
        self.shared().began
    }

    /// The time, by the store's clock.
    pub fn now(&self) -> u64 {
        self.shared().clock.now()
    }

    /// The record with this key, if there is one.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<Row>, StoreError> {
        let snapshot = self.shared().published.load();
        Ok(snapshot.state.bucket(bucket)?.record(key, || self.now()).cloned())
    }

    /// What a query returns.
    pub fn query(&self, query: &Query) -> Result<Answer, StoreError> {
        let snapshot = self.shared().published.load();
        Ok(query.answer(snapshot.state.bucket(&query.bucket)?, self.now(), &Budget::unlimited())?)
    }

    /// What a named query returns.
    pub fn query_named(&self, name: &str, params: &Map<String, Json>) -> Result<Answer, StoreError> {
        let snapshot = self.shared().published.load();
        let query = snapshot.state.query(name, params)?;
        Ok(query.answer(snapshot.state.bucket(&query.bucket)?, self.now(), &Budget::unlimited())?)
    }

    /// Runs `work` on a draft of the state and commits its changes: all of them, or none if it fails. It runs on the writer's
    /// thread, in its turn: slow work delays all other writes, and work that waits for another write deadlocks.
    pub fn write<T, F>(&self, work: F) -> Pending<T>
    where
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.write_with(WriteOptions::default(), work)
    }

    /// Like [`write`](Self::write), with a cause, an owner and a size.
    ///
    /// Writes of one owner and origin are done in the order of submission. Owners, and the origins of an owner, get equal shares of
    /// the writer's work: a write that is alone waits for the one that runs, and for others that are as cheap as itself, whatever
    /// the backlogs of others.
    pub fn write_with<T, F>(&self, options: WriteOptions, work: F) -> Pending<T>
    where
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.shared().queue.write(options, work)
    }

    /// Defines a bucket: see [`Draft::define_bucket`].
    pub fn define_bucket(&self, name: &str, config: Json) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.define_bucket(&name, &config))
    }

    /// Adds fields and indexes to a bucket, or changes its time to live: see [`Draft::update_bucket`].
    pub fn update_bucket(&self, name: &str, updates: Json) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.update_bucket(&name, &updates))
    }

    /// Drops a bucket: see [`Draft::drop_bucket`].
    pub fn drop_bucket(&self, name: &str) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.drop_bucket(&name))
    }

    /// Defines a query by a name: see [`Draft::define_query`].
    pub fn define_query(&self, name: &str, config: Json) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.define_query(&name, &config))
    }

    /// Forgets a named query.
    pub fn undefine_query(&self, name: &str) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.undefine_query(&name))
    }

    /// Inserts a record, or replaces the one with the same key.
    pub fn insert(&self, bucket: &str, record: impl IntoRecord) -> Pending<Row> {
        let bucket = bucket.to_owned();
        self.write(move |draft| draft.insert(&bucket, record))
    }

    /// Inserts all of these records, or none: see [`Draft::insert_many`].
    pub fn insert_many(&self, bucket: &str, records: impl IntoIterator<Item = impl IntoRecord>) -> Pending<Vec<Row>> {
        let (bucket, records) = (bucket.to_owned(), Vec::from_iter(records));
        self.write(move |draft| draft.insert_many(&bucket, records))
    }

    /// Merges fields into a record. If a version is given, the record must have it.
    pub fn update(
        &self,
        bucket: &str,
        key: impl Into<Json>,
        patch: impl IntoRecord,
        version: Option<u64>,
    ) -> Pending<Row> {
        let (bucket, key) = (bucket.to_owned(), key.into());
        self.write(move |draft| draft.update(&bucket, &key, patch, version))
    }

    /// Merges a record into the one with the same key, or inserts it.
    pub fn upsert(&self, bucket: &str, record: impl IntoRecord) -> Pending<Row> {
        let bucket = bucket.to_owned();
        self.write(move |draft| draft.upsert(&bucket, record))
    }

    /// Deletes a record. If a version is given, the record must have it. Returns whether it existed.
    pub fn delete(&self, bucket: &str, key: impl Into<Json>, version: Option<u64>) -> Pending<bool> {
        let (bucket, key) = (bucket.to_owned(), key.into());
        self.write(move |draft| draft.delete(&bucket, &key, version))
    }

    /// Deletes all records of a bucket.
    pub fn clear(&self, bucket: &str) -> Pending<()> {
        let bucket = bucket.to_owned();
        self.write(move |draft| draft.clear(&bucket))
    }

    /// Runs operations one after the other, all of them or none. Returns what each of them gave.
    pub fn transact(&self, operations: Vec<Operation>) -> Pending<Vec<OperationResult>> {
        self.write(move |draft| Ok(draft.transact(&operations)?))
    }

    /// Deletes what has expired. Returns how many records did. It is done from time to time anyway: see
    /// [`StoreOptions::sweep_interval`].
    pub fn sweep(&self) -> Pending<usize> {
        self.write(|draft| Ok(draft.sweep(usize::MAX)))
    }

    /// Everything at one moment, and a follower that sees every commit after it.
    pub fn follow(&self) -> (Arc<Snapshot>, Follower) {
        loop {
            let snapshot = self.snapshot();
            // If it is behind by now, the next one is not.
            if let Ok(follower) = self.follow_from(snapshot.position) {
                return (snapshot, follower);
            }
        }
    }

    /// A follower that sees every commit after this position.
    pub fn follow_from(&self, position: Position) -> Result<Follower, FollowError> {
        loop {
            let followed = self.shared().history.follow(position);
            let newest = self.shared().published.load().position;
            let is_published = position.epoch == newest.epoch && position.sequence <= newest.sequence;
            match followed {
                // It is published before it is in the history, so that it may be ahead, but for a moment only.
                Err(FollowError::Unknown { .. }) if is_published => std::thread::yield_now(),
                followed => return followed,
            }
        }
    }

    /// Writes a new snapshot to the disk, so that the log is short, and waits until that is done. It is done from time to time
    /// anyway.
    pub fn checkpoint(&self) -> Result<Position, UpkeepError> {
        let (reply, begun) = oneshot::channel();
        self.shared().queue.request(Message::Checkpoint(reply));
        let begun = block_on(begun).map_err(|_| UpkeepError::Closed)?;
        let (checkpoint, state) = begun.map_err(UpkeepError::Engine)?;
        let done = checkpoint.run(writer::stored_rows(&state));
        self.shared().queue.signal(Message::Duties);
        Ok(done?)
    }

    /// Returns the condition of the store and its counters. The cost does not depend on the number of buckets; that of reading
    /// [`StoreStats::buckets`] does.
    pub fn stats(&self) -> StoreStats {
        StoreStats::of(self.shared())
    }

    /// Whether the disk has failed. No write is accepted until a restart. Reads one atomic flag, so a health check may call it
    /// at any rate.
    pub fn is_stopped(&self) -> bool {
        self.shared().counters.is_stopped.load(Relaxed)
    }

    /// Ends it: writes that have their place are done, later ones are refused, and the engine is closed. Reads go on, of what
    /// was there last. Ending it again does nothing.
    pub fn close(&self) -> Result<(), EngineError> {
        self.inner.close()
    }
}

impl Inner {
    fn close(&self) -> Result<(), EngineError> {
        self.shared.queue.close();
        // A write has the last handle, or closes: its thread cannot wait for itself, and ends when it is done.
        if self.writer_id == std::thread::current().id() {
            return Ok(());
        }
        // Held while the writer ends, so that a second caller waits here.
        let mut writer = lock(&self.writer);
        match writer.take() {
            // A writer that panicked has reported it, and its callers have been told.
            Some(writer) => writer.join().unwrap_or(Err(EngineError::Stopped)),
            None => Ok(()),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(error = &error as &dyn std::error::Error, "the store was not closed in order");
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("position", &self.snapshot().position).finish_non_exhaustive()
    }
}
