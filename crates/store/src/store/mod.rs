//! The store: a published state, one writer, and an engine that makes writes durable.
//!
//! Reads use the published state and never wait.
//!
//! # The path of a write
//!
//! 1. [`Store::write`] submits a closure to the bounded queue (`queue`, `admission`) and returns a [`Pending`].
//! 2. The writer thread takes queued writes, fairly between owners (`fair_queue`), up to a limit of writes, bytes and time. It runs
//!    each on the head, a [`Draft`](crate::Draft) with the published state and the changes since (`writer`). A failed write is
//!    undone.
//! 3. The draft validates a record, its references and its permissions, and stores it: by ordinal, by key, and in every index.
//! 4. The engine makes the commits of the group durable with one sync.
//! 5. The writer publishes the head with one atomic swap, appends the commits to the history, where followers read them, and
//!    replies to all writes of the group, rejected ones included.
//! 6. Between groups the writer deletes expired records at intervals. If the log is long, it starts a checkpoint, which runs on its
//!    own thread over the immutable state.

mod admission;
mod declarations;
mod engine_writes;
mod fair_queue;
mod history;
mod pending;
mod queue;
mod recover;
mod reply;
mod stats;
mod transfer;
mod writer;

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
pub use self::recover::{InvalidData, StoreOpenError};
pub use self::stats::{BucketList, BucketStats, StoreStats};
pub use self::transfer::{ImportError, ImportProblem, Imported, MaintenanceError};

use self::admission::Bounds;
use self::history::History;
use self::pending::block_on;
use self::queue::{Message, Queue};
use self::recover::Loader;
use self::stats::Counters;
use self::writer::Writer;
use crate::engine::{
    Disk, Embedded, EmbeddedOptions, Engine, EngineError, EngineStats, Files, Memory, Recovery, TornTail,
};
use crate::lock::lock;
use crate::query::Budget;
use crate::system::SystemBuckets;
use crate::transaction::{Operation, OperationResult};
use crate::{Cause, Draft, IntoRecord, Limits, Position, Query, QueryOutput, Row, State, StoreError};

/// Settings of a [`Store`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Limits on records, definitions and the whole store.
    pub limits: Limits,
    /// Limit of the writes in the queue. One owner can use a quarter of it: see [`WriteOptions::owner`]. Further writes are held
    /// back: see [`Pending::is_held_back`]. Default: 4096, so that one owner can fill a group.
    pub queue: usize,
    /// Limit of the bytes of the writes in the queue: see [`WriteOptions::bytes`]. One owner can use a quarter of it; a single
    /// larger write is queued alone. Default: 64 MiB, which is 64 of the largest records.
    pub queue_bytes: usize,
    /// Limit of the bytes of the history: the newest commits, which followers read. A follower that falls further behind gets
    /// [`FollowError::Behind`] and must start again from a snapshot. Default: 64 MiB, a few seconds at the highest write rate.
    pub history_bytes: usize,
    /// Interval at which expired records are deleted. Reads do not see them in the meantime. With `None`, only [`Store::sweep`]
    /// deletes them. Default: one second.
    pub sweep_interval: Option<Duration>,
    /// Settings of the embedded engine, which [`Store::open`] uses.
    pub embedded: EmbeddedOptions,
    /// The clock for timestamps and expiry. Default: the system clock.
    pub clock: Clock,
    /// Buckets of the embedding program, which ordinary requests cannot access. Default: none.
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

/// Options of a write: its cause, its owner and its size. See [`Store::write_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WriteOptions {
    /// The cause of the write, which is logged with its commit. Writes of one owner with the same origin run in the order in which
    /// they were submitted; writes with different origins take turns.
    pub cause: Cause,
    /// The owner that is charged for the write, such as a hash of a user id. Owners get equal shares of the writer, and one owner
    /// cannot fill the queue. Default: 0, which is the embedding program.
    pub owner: u64,
    /// The memory of the queued closure in bytes, which counts towards [`StoreOptions::queue_bytes`]. Default: 0, so only the number
    /// of writes is bounded.
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

/// A state and the position of its last commit.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Snapshot {
    /// All buckets.
    pub state: State,
    /// The position of the last commit in the state.
    pub position: Position,
}

/// An embedded database of JSON records. A clone is another handle to the same store.
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
/// let row = store.get("harbours", &json!(1))?.expect("the record is stored");
/// assert_eq!(row.to_record()["tide"], "high");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Dropping the last handle waits until all writes are done and the engine is closed. [`close`](Self::close) does the same and
/// reports errors.
#[derive(Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

struct StoreInner {
    shared: Arc<StoreShared>,
    writer: Mutex<Option<JoinHandle<Result<(), EngineError>>>>,
    writer_id: ThreadId,
}

/// State that the handles share with the writer.
struct StoreShared {
    published: ArcSwap<Snapshot>,
    opened_at: Position,
    queue: Arc<Queue>,
    history: Arc<History>,
    counters: Counters,
    engine: Mutex<EngineStats>,
    is_persistent: bool,
    limits: Limits,
    sweep_interval: Option<Duration>,
    clock: Clock,
}

impl StoreShared {
    fn engine_stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.engine)
    }
}

impl Store {
    /// Creates a store in memory.
    pub fn memory(options: StoreOptions) -> Self {
        let engine = Memory::default();
        let position = engine.position();
        let history = History::new(position.epoch, position.sequence, options.history_bytes);
        let state = State::with_system_buckets(&options.system_buckets);
        Self::start(Box::new(engine), false, state, history, options)
    }

    /// Opens a store in a directory. Creates the directory if it does not exist.
    pub fn open(dir: impl AsRef<Path>, options: StoreOptions) -> Result<(Self, Recovery), StoreOpenError> {
        Self::open_on(Arc::new(Files), dir.as_ref(), options)
    }

    /// Like [`open`](Self::open), on the given disk.
    pub fn open_on(disk: Arc<dyn Disk>, dir: &Path, options: StoreOptions) -> Result<(Self, Recovery), StoreOpenError> {
        let mut loader = Loader::new(options.history_bytes);
        let (mut engine, recovery) =
            Embedded::open_on(disk, dir, options.embedded, &mut |recovered| loader.add(recovered))?;
        let (state, history) = loader.finish(recovery.position)?;
        if let Some(TornTail { file, offset, .. }) = &recovery.torn_tail {
            tracing::warn!(file = %file.display(), offset, "truncated an incomplete record at the end of the log");
        }
        let state = declarations::declare(&mut engine, state, &history, &options)?;
        Ok((Self::start(Box::new(engine), true, state, history, options), recovery))
    }

    fn start(
        engine: Box<dyn Engine>,
        is_persistent: bool,
        state: State,
        history: History,
        options: StoreOptions,
    ) -> Self {
        let snapshot = Snapshot { state, position: engine.position() };
        let shared = Arc::new(StoreShared {
            opened_at: snapshot.position,
            published: ArcSwap::from_pointee(snapshot),
            queue: Arc::new(Queue::new(Bounds::new(options.queue, options.queue_bytes))),
            history: Arc::new(history),
            counters: Counters::default(),
            engine: Mutex::new(engine.stats()),
            is_persistent,
            limits: options.limits,
            sweep_interval: options.sweep_interval,
            clock: options.clock,
        });
        let writer = Writer::new(Arc::clone(&shared), engine);
        let thread = std::thread::Builder::new().name("tidewire-writer".to_owned());
        let writer = thread.spawn(move || writer.run()).expect("a process can start one thread");
        let writer_id = writer.thread().id();
        Self { inner: Arc::new(StoreInner { shared, writer: Mutex::new(Some(writer)), writer_id }) }
    }

    fn shared(&self) -> &Arc<StoreShared> {
        &self.inner.shared
    }

    /// Returns the current state, which later writes do not change.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared().published.load_full()
    }

    /// Returns the position at which the store was opened. Buckets that are not persistent are empty at that position, without a
    /// commit that deletes their records.
    pub fn opened_at(&self) -> Position {
        self.shared().opened_at
    }

    /// Returns the time of the store's clock, in milliseconds since 1970.
    pub fn now(&self) -> u64 {
        self.shared().clock.now()
    }

    /// Returns the record with this key, if it exists and has not expired.
    pub fn get(&self, bucket: &str, key: &Json) -> Result<Option<Row>, StoreError> {
        let snapshot = self.shared().published.load();
        Ok(snapshot.state.bucket(bucket)?.record(key, || self.now()).cloned())
    }

    /// Returns the result of a query.
    pub fn query(&self, query: &Query) -> Result<QueryOutput, StoreError> {
        let snapshot = self.shared().published.load();
        Ok(query.evaluate(snapshot.state.bucket(&query.bucket)?, self.now(), &Budget::unlimited())?)
    }

    /// Returns the result of a named query.
    pub fn query_named(&self, name: &str, params: &Map<String, Json>) -> Result<QueryOutput, StoreError> {
        let snapshot = self.shared().published.load();
        let query = snapshot.state.query(name, params)?;
        Ok(query.evaluate(snapshot.state.bucket(&query.bucket)?, self.now(), &Budget::unlimited())?)
    }

    /// Runs `work` on a draft of the state and commits its changes: all of them, or none if it fails. `work` runs on the writer
    /// thread: if it is slow, it delays all other writes; if it waits for another write, it deadlocks.
    pub fn write<T, F>(&self, work: F) -> Pending<T>
    where
        F: FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.write_with(WriteOptions::default(), work)
    }

    /// Like [`write`](Self::write), with a cause, an owner and a size.
    ///
    /// Writes of one owner and origin run in the order of submission. Owners, and the origins of an owner, get equal shares of the
    /// writer's work. An owner that submits one write at a time waits for the current group, and until the other owners have used as
    /// much work as its last write, however long their backlogs are.
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

    /// Defines a named query: see [`Draft::define_query`].
    pub fn define_query(&self, name: &str, config: Json) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.define_query(&name, &config))
    }

    /// Removes the definition of a named query.
    pub fn undefine_query(&self, name: &str) -> Pending<()> {
        let name = name.to_owned();
        self.write(move |draft| draft.undefine_query(&name))
    }

    /// Inserts a record, or replaces the record with the same key.
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

    /// Merges a record into the record with the same key, or inserts it if there is none.
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

    /// Runs operations in order as one commit: see [`Draft::transact`]. Returns the result of each.
    pub fn transact(&self, operations: Vec<Operation>) -> Pending<Vec<OperationResult>> {
        self.write(move |draft| Ok(draft.transact(&operations)?))
    }

    /// Deletes expired records. Returns their number. The store also does this periodically: see [`StoreOptions::sweep_interval`].
    pub fn sweep(&self) -> Pending<usize> {
        self.write(|draft| Ok(draft.sweep(usize::MAX)))
    }

    /// Returns the current state, and a follower that sees every commit after it.
    pub fn follow(&self) -> (Arc<Snapshot>, Follower) {
        loop {
            let snapshot = self.snapshot();
            // The history may have dropped the commits after this snapshot meanwhile. Then a newer snapshot is used.
            if let Ok(follower) = self.follow_from(snapshot.position) {
                return (snapshot, follower);
            }
        }
    }

    /// Returns a follower that sees every commit after this position.
    pub fn follow_from(&self, position: Position) -> Result<Follower, FollowError> {
        loop {
            let followed = self.shared().history.follow(position);
            let newest = self.shared().published.load().position;
            let is_published = position.epoch == newest.epoch && position.sequence <= newest.sequence;
            match followed {
                // A commit is published shortly before it is in the history.
                Err(FollowError::Unknown { .. }) if is_published => std::thread::yield_now(),
                followed => return followed,
            }
        }
    }

    /// Runs a checkpoint: writes a snapshot to the disk and shortens the log. Blocks until it is done. The store also runs
    /// checkpoints when the log is long: see [`EmbeddedOptions::checkpoint_log_bytes`].
    pub fn checkpoint(&self) -> Result<Position, MaintenanceError> {
        let (reply, begun) = oneshot::channel();
        self.shared().queue.request(Message::Checkpoint(reply));
        let begun = block_on(begun).map_err(|_| MaintenanceError::Closed)?;
        let (checkpoint, state) = begun.map_err(MaintenanceError::Engine)?;
        let done = checkpoint.run(writer::stored_rows(&state));
        self.shared().queue.signal(Message::RefreshStats);
        Ok(done?)
    }

    /// Returns the statistics of the store. The cost does not depend on the number of buckets, unless [`StoreStats::buckets`] is read.
    pub fn stats(&self) -> StoreStats {
        StoreStats::of(self.shared())
    }

    /// Returns whether all writes are rejected until a restart, because the disk has failed. This reads one atomic flag, so health
    /// checks can call it often.
    pub fn is_stopped(&self) -> bool {
        self.shared().counters.is_stopped.load(Relaxed)
    }

    /// Closes the store: runs the queued writes, rejects later ones, and closes the engine. Reads still return the last state. A
    /// second call does nothing.
    pub fn close(&self) -> Result<(), EngineError> {
        self.inner.close()
    }
}

impl StoreInner {
    fn close(&self) -> Result<(), EngineError> {
        self.shared.queue.close();
        // A write may close the store or drop its last handle. The writer thread cannot wait for itself, and ends later.
        if self.writer_id == std::thread::current().id() {
            return Ok(());
        }
        // Locked until the writer has ended, so that a concurrent caller waits too.
        let mut writer = lock(&self.writer);
        match writer.take() {
            // The panic was reported where it happened, and pending writes have failed.
            Some(writer) => writer.join().unwrap_or(Err(EngineError::Stopped)),
            None => Ok(()),
        }
    }
}

impl Drop for StoreInner {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot close the store cleanly");
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("position", &self.snapshot().position).finish_non_exhaustive()
    }
}
