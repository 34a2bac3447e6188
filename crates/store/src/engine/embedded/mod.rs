//! The embedded engine: a write-ahead log of commits in a directory, and snapshots that shorten it.
//!
//! ```text
//! lock                        held while the directory is open
//! log-<number>                segments of the log
//! snapshot-<sequence>         all rows as of a commit
//! log.tmp, snapshot.tmp       incomplete files, removed when the directory is opened again
//! ```
//!
//! After a crash the log has a prefix of complete groups, which includes every group that was reported as durable. The following
//! rules guarantee this:
//!
//! 1. A group is one frame. The next frame is written after it, and under [`Durability::Always`] after it is durable.
//! 2. A segment is durable to its end before the header of the next segment is written. The name of the next segment is durable
//!    before its header is written.
//! 3. Before a checkpoint begins, the log is durable up to its position. The snapshot is renamed when it is durable. The files that
//!    it replaces are recycled or removed when the rename is durable.
//! 4. Opening rewrites and syncs the end of the log before it appends: after a kill or a failed sync there may be frames that can
//!    be read and are not on disk.
//! 5. All frames of a segment have one layout, which the version in the segment header identifies. If the last segment has an older
//!    layout, the log continues in a new segment, with the same steps as when a segment is full.
//!
//! An open engine needs no further file descriptors for commits and checkpoints. It holds five: the lock, the directory, the
//! current segment, the next segment, and one reserved for the next snapshot. A new segment uses the descriptor that the last
//! segment released. If another thread gets that descriptor first, the current segment is extended, up to 1 GiB. If another thread
//! gets the reserved descriptor, the checkpoint fails, and the log is not shortened until the next checkpoint succeeds. Backups need
//! descriptors of their own.

mod backup;
mod checkpoint;
mod data_dir;
mod frame;
mod log;
mod recovery;
mod segment;
mod snapshot;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::{Disk, Durability, Engine, EngineError, EngineStats, Files, LogPressure, WriteSet};
use crate::Position;
use data_dir::{DataDir, Listing, create_dir};
use log::{Cursor, Log};
use segment::{MAX_SEGMENT_BYTES, PAGE_BYTES, Segment, SegmentHeader};

pub use backup::{Backup, BackupError, CopyError};
pub use checkpoint::{Checkpoint, CheckpointError};
pub use frame::Writes;
pub(crate) use frame::encoded_len;
pub use recovery::{Corruption, OpenError, Recovered, Recovery, TornTail};

/// Settings of [`Embedded`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddedOptions {
    /// The point at which a commit is acknowledged. Default: [`Durability::Always`], so that no acknowledged commit is lost.
    pub durability: Durability,
    /// Length of a segment of the log in bytes, between 8 KiB and 1 GiB. Default: 16 MiB. A small store has two segments, and a
    /// new one is filled with zeros within milliseconds.
    pub segment_bytes: u64,
    /// Limit of a group of commits in bytes, at most the capacity of a segment. A store permits a single commit half of it. Default:
    /// 8 MiB, enough for the largest request.
    pub max_group_bytes: usize,
    /// Length of the log in bytes above which a checkpoint is needed, if the log is also longer than the last snapshot. Default:
    /// 256 MiB, which is replayed in about a second.
    pub checkpoint_log_bytes: u64,
    /// Length of the log in bytes above which commits are slowed down. Above twice this length they are rejected. Default: 4 GiB,
    /// which is reached only if checkpoints fail.
    pub max_log_bytes: u64,
}

/// The purpose for which a directory is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenMode {
    /// To use it as a data directory.
    Normal,
    /// To complete a restored copy, which is still marked as incomplete and gets a new epoch.
    Restore,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Always,
            segment_bytes: 16 << 20,
            max_group_bytes: 8 << 20,
            checkpoint_log_bytes: 256 << 20,
            max_log_bytes: 4 << 30,
        }
    }
}

impl EmbeddedOptions {
    /// Sets [`durability`](#structfield.durability).
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Sets [`segment_bytes`](#structfield.segment_bytes).
    #[must_use]
    pub fn segment_bytes(mut self, segment_bytes: u64) -> Self {
        self.segment_bytes = segment_bytes;
        self
    }

    /// Sets [`max_group_bytes`](#structfield.max_group_bytes).
    #[must_use]
    pub fn max_group_bytes(mut self, max_group_bytes: usize) -> Self {
        self.max_group_bytes = max_group_bytes;
        self
    }

    /// Sets [`checkpoint_log_bytes`](#structfield.checkpoint_log_bytes).
    #[must_use]
    pub fn checkpoint_log_bytes(mut self, checkpoint_log_bytes: u64) -> Self {
        self.checkpoint_log_bytes = checkpoint_log_bytes;
        self
    }

    /// Sets [`max_log_bytes`](#structfield.max_log_bytes).
    #[must_use]
    pub fn max_log_bytes(mut self, max_log_bytes: u64) -> Self {
        self.max_log_bytes = max_log_bytes;
        self
    }

    fn within_limits(mut self) -> Self {
        let page = PAGE_BYTES as u64;
        self.segment_bytes = self.segment_bytes.clamp(2 * page, MAX_SEGMENT_BYTES).next_multiple_of(page);
        let capacity = usize::try_from(self.segment_bytes).unwrap_or(usize::MAX)
            - PAGE_BYTES
            - frame::HEADER_BYTES
            - frame::ALIGN_BYTES;
        self.max_group_bytes = self.max_group_bytes.min(capacity);
        self
    }
}

/// An engine that stores commits in a directory.
///
/// ```
/// use tidewire_store::engine::{Write, WriteSet, Embedded, EmbeddedOptions, Engine, Recovered};
///
/// # let dir = tempfile::tempdir()?;
/// let (mut engine, _) = Embedded::open(dir.path(), EmbeddedOptions::default(), |_| {})?;
/// let writes = [Write { bucket: "users", key: b"1", row: Some(b"{}") }];
/// engine.commit(&[WriteSet { writes: &writes, ..WriteSet::default() }])?;
/// drop(engine);
///
/// let mut keys = Vec::new();
/// let (engine, recovery) = Embedded::open(dir.path(), EmbeddedOptions::default(), |recovered| {
///     if let Recovered::Commit { writes, .. } = recovered {
///         keys.extend(writes.map(|write| write.key.to_vec()));
///     }
/// })?;
/// assert_eq!((keys, recovery.commits), (vec![b"1".to_vec()], 1));
/// assert_eq!(engine.position().sequence, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Embedded {
    data_dir: Arc<DataDir>,
    log: Log,
    options: EmbeddedOptions,
    stats: EngineStats,
    /// The time of the first commit that is not durable.
    unsynced_since: Option<Instant>,
    is_closed: bool,
}

impl Embedded {
    /// Opens a directory, and creates it and its parents if they do not exist. Passes its contents to `each`: the rows of the
    /// newest snapshot, then the commits after it.
    ///
    /// All rows and commits that were passed to `each` are durable when this returns, even if a sync of an earlier process failed.
    pub fn open(
        dir: impl AsRef<Path>,
        options: EmbeddedOptions,
        mut each: impl FnMut(Recovered<'_>),
    ) -> Result<(Self, Recovery), OpenError> {
        Self::open_on(Arc::new(Files), dir.as_ref(), options, &mut each)
    }

    /// Like [`open`](Self::open), on the given disk.
    pub fn open_on(
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: EmbeddedOptions,
        each: &mut dyn FnMut(Recovered<'_>),
    ) -> Result<(Self, Recovery), OpenError> {
        Self::open_as(OpenMode::Normal, disk, dir, options, each)
    }

    fn open_as(
        mode: OpenMode,
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: EmbeddedOptions,
        each: &mut dyn FnMut(Recovered<'_>),
    ) -> Result<(Self, Recovery), OpenError> {
        let options = options.within_limits();
        let failed = |source| OpenError::Io { file: dir.to_owned(), source };
        create_dir(&*disk, dir).map_err(failed)?;
        let lock = disk.lock(&dir.join("lock")).map_err(failed)?;
        let lock = lock.ok_or_else(|| OpenError::Locked { dir: dir.to_owned() })?;
        let spares = usize::try_from(options.checkpoint_log_bytes / options.segment_bytes).unwrap_or(usize::MAX);
        let data_dir =
            DataDir::new(disk, dir, lock, options.segment_bytes, spares.saturating_add(2)).map_err(failed)?;
        let data_dir = Arc::new(data_dir);
        // Renames of a process that was killed are visible and may not be durable.
        data_dir.entries.sync().map_err(failed)?;
        let listing = Listing::read(&*data_dir.disk, dir).map_err(failed)?;
        if listing.is_unfinished_backup && mode == OpenMode::Normal {
            return Err(OpenError::UnfinishedBackup { dir: dir.to_owned() });
        }
        for name in &listing.unfinished {
            data_dir.disk.remove(&dir.join(name)).map_err(failed)?;
        }
        let (log, recovery) = match recovery::recover(&data_dir, &listing, each)? {
            Some(end) => Self::resume(&data_dir, end, &options, mode)?,
            None => Self::create(&data_dir, &options)?,
        };
        let mut engine =
            Self { data_dir, log, options, stats: EngineStats::default(), unsynced_since: None, is_closed: false };
        engine.append_opened().map_err(|error| OpenError::of_engine(error, dir))?;
        engine.data_dir.reserve_again().map_err(failed)?;
        for sequence in listing.snapshots.iter().rev().skip(1) {
            // Older snapshots are no longer needed. If the removal fails, the next opening tries again.
            let _ = engine.data_dir.disk.remove(&engine.data_dir.snapshot(*sequence));
        }
        Ok((engine, recovery))
    }

    /// Copies a data directory that no engine has open into a directory that is empty or does not exist. The copy is a backup like
    /// those of [`Engine::backup`]. The whole data directory is read and checked first, and is not changed. Returns the position of
    /// the last commit when the copy is durable.
    pub fn backup_dir(dir: &Path, to: &Path) -> Result<Position, CopyError> {
        let disk: Arc<dyn Disk> = Arc::new(Files);
        Ok(Backup::of_dir(&disk, dir, to)?.run()?)
    }

    /// Copies a backup into a data directory that is empty or does not exist, and checks the whole copy. The copy has a new epoch, so
    /// that its positions differ from those of the original. The backup is unchanged.
    ///
    /// The data directory is durable when this returns. A crash before that leaves a directory that fails to open with
    /// [`OpenError::UnfinishedBackup`], or an empty one.
    pub fn restore(backup: &Path, dir: &Path, options: EmbeddedOptions) -> Result<Recovery, CopyError> {
        Self::restore_on(Arc::new(Files), backup, dir, options)
    }

    /// Like [`restore`](Self::restore), on the given disk.
    pub fn restore_on(
        disk: Arc<dyn Disk>,
        backup: &Path,
        dir: &Path,
        options: EmbeddedOptions,
    ) -> Result<Recovery, CopyError> {
        Backup::of_dir(&disk, backup, dir)?.restore(|| {
            let (engine, recovery) = Self::open_as(OpenMode::Restore, disk, dir, options, &mut |_| {})?;
            Box::new(engine).close().map_err(|error| OpenError::of_engine(error, dir))?;
            Ok(recovery)
        })
    }

    fn create(data_dir: &Arc<DataDir>, options: &EmbeddedOptions) -> Result<(Log, Recovery), OpenError> {
        let cursor = Cursor { log: new_epoch(0), epoch: new_epoch(0), frame: 1, sequence: 1, chain: 0 };
        let is_relaxed = options.durability != Durability::Always;
        let Cursor { log, epoch, frame, sequence, chain } = cursor;
        let mut page = Vec::with_capacity(PAGE_BYTES);
        let layout = frame::Layout::CURRENT;
        SegmentHeader { layout, log, number: 1, epoch, sequence, frame, chain, is_relaxed }.write(&mut page);
        let segment = Segment::create(data_dir, 1, Some(&page))
            .map_err(|source| OpenError::Io { file: data_dir.segment(1), source })?;
        let recovery = Recovery {
            position: Position { epoch, sequence: 0 },
            is_new_epoch: true,
            was_closed: true,
            rows: 0,
            commits: 0,
            torn_tail: None,
        };
        Ok((Log::new(Arc::clone(data_dir), segment, cursor, PAGE_BYTES as u64, Vec::new(), is_relaxed), recovery))
    }

    fn resume(
        data_dir: &Arc<DataDir>,
        end: recovery::LogEnd,
        options: &EmbeddedOptions,
        mode: OpenMode,
    ) -> Result<(Log, Recovery), OpenError> {
        let open = |number| {
            let path = data_dir.segment(number);
            match data_dir.disk.open(&path) {
                Ok(file) => Ok((path, file)),
                Err(source) => Err(OpenError::Io { file: path, source }),
            }
        };
        let (path, file) = open(end.segment)?;
        if let Err(source) = end.unproven.rewrite(&*file) {
            return Err(OpenError::NotDurable { file: path, source });
        }
        let segment = Segment { number: end.segment, path, file, capacity: end.capacity };
        let mut cursor = end.cursor;
        let is_new_epoch = mode == OpenMode::Restore || end.is_relaxed && !end.was_closed;
        if is_new_epoch {
            cursor.epoch = new_epoch(cursor.epoch);
        }
        let recovery = Recovery {
            position: Position { epoch: cursor.epoch, sequence: cursor.sequence - 1 },
            is_new_epoch,
            was_closed: end.was_closed,
            rows: end.rows,
            commits: end.commits,
            torn_tail: end.torn_tail,
        };
        let is_relaxed = options.durability != Durability::Always;
        let mut log = Log::new(Arc::clone(data_dir), segment, cursor, end.page_offset, end.tail, is_relaxed);
        log.appended = end.log_bytes;
        if let Some(number) = end.prepared {
            let (path, file) = open(number)?;
            // A segment of another length is replaced when the next one is created.
            if matches!(file.len(), Ok(len) if len == data_dir.segment_bytes) {
                log.set_next(Segment { number, path, file, capacity: data_dir.segment_bytes });
            }
        }
        if end.layout != frame::Layout::CURRENT {
            log.rotate().map_err(|error| OpenError::of_engine(error, &data_dir.dir))?;
        }
        Ok((log, recovery))
    }

    fn append_opened(&mut self) -> Result<(), EngineError> {
        let epoch = self.log.cursor.epoch;
        self.log.append(frame::FrameKind::Opened, 0, 8, |out| out.extend_from_slice(&epoch.to_le_bytes()))?;
        self.log.sync()?;
        self.log.prepare_next_segment();
        Ok(())
    }

    fn append_closed(&mut self) -> Result<(), EngineError> {
        self.is_closed = true;
        self.log.append(frame::FrameKind::Closed, 0, 0, |_| {})?;
        self.log.sync()
    }

    fn log_bytes(&self) -> u64 {
        self.log.appended - self.data_dir.inventory().snapshot.as_ref().map_or(0, |snapshot| snapshot.appended)
    }

    /// Checks the limits of a group. Returns its length in bytes and the number of its commits.
    fn check_group(&mut self, commits: &[WriteSet<'_>]) -> Result<(u32, u32), EngineError> {
        self.log.check()?;
        let too_long = |len: &usize| *len > usize::from(u16::MAX);
        let names = commits.iter().flat_map(|commit| commit.writes).map(|write| write.bucket.len());
        if let Some(len) = names.into_iter().find(too_long) {
            return Err(EngineError::BucketName { len });
        }
        let (len, max) = (commits.iter().map(WriteSet::encoded_len).sum(), self.options.max_group_bytes);
        if len > max {
            return Err(EngineError::TooLarge { len, max });
        }
        let (log_bytes, limit) = (self.log_bytes(), self.options.max_log_bytes);
        if log_bytes > limit.saturating_mul(2) {
            return Err(EngineError::LogFull { len: log_bytes, max: limit.saturating_mul(2) });
        }
        self.stats.slowed += u64::from(log_bytes > limit);
        // Both numbers fit: the limit of a group is below `u32::MAX`, and each commit has at least one byte.
        Ok((u32::try_from(len).unwrap_or(u32::MAX), u32::try_from(commits.len()).unwrap_or(u32::MAX)))
    }

    fn write(&mut self, commits: &[WriteSet<'_>]) -> Result<(), EngineError> {
        let (len, count) = self.check_group(commits)?;
        self.log.append(frame::FrameKind::Commits, count, len, |out| {
            for commit in commits {
                frame::encode(commit, out);
            }
        })
    }
}

/// Returns a random epoch other than `old` and zero.
pub(super) fn new_epoch(old: u64) -> u64 {
    loop {
        let epoch = rand::random();
        if epoch != 0 && epoch != old {
            return epoch;
        }
    }
}

impl Engine for Embedded {
    fn position(&self) -> Position {
        Position { epoch: self.log.cursor.epoch, sequence: self.log.cursor.sequence - 1 }
    }

    fn commit(&mut self, commits: &[WriteSet<'_>]) -> Result<Position, EngineError> {
        if commits.is_empty() {
            return Ok(self.position());
        }
        if let Err(error) = self.write(commits) {
            self.stats.refused += u64::from(!matches!(error, EngineError::OutcomeUnknown { .. }));
            return Err(error);
        }
        match self.options.durability {
            Durability::Always => self.log.sync()?,
            Durability::Interval(interval) => {
                let now = Instant::now();
                if now.duration_since(*self.unsynced_since.get_or_insert(now)) >= interval {
                    self.sync()?;
                }
            }
            Durability::None => {}
        }
        self.stats.groups += 1;
        self.stats.commits += commits.len() as u64;
        Ok(self.position())
    }

    fn max_group_bytes(&self) -> usize {
        self.options.max_group_bytes
    }

    fn sync(&mut self) -> Result<(), EngineError> {
        self.log.sync()?;
        self.unsynced_since = None;
        Ok(())
    }

    fn sync_deadline(&self) -> Option<Instant> {
        match self.options.durability {
            Durability::Interval(interval) => self.unsynced_since?.checked_add(interval),
            Durability::Always | Durability::None => None,
        }
    }

    fn needs_checkpoint(&self) -> bool {
        let inventory = self.data_dir.inventory();
        let (bytes, appended) =
            inventory.snapshot.as_ref().map_or((0, 0), |snapshot| (snapshot.bytes, snapshot.appended));
        !inventory.is_checkpointing && self.log.appended - appended > self.options.checkpoint_log_bytes.max(bytes)
    }

    fn checkpoint(&mut self) -> Result<Checkpoint, EngineError> {
        self.sync()?;
        let (segment, _) = self.log.end();
        Checkpoint::begin(&self.data_dir, self.log.cursor.log, self.position(), segment, self.log.appended)
    }

    fn backup(&mut self, dir: &Path) -> Result<Backup, EngineError> {
        self.sync()?;
        Ok(Backup::begin(&self.data_dir, dir, self.position(), self.log.end()))
    }

    fn log_pressure(&self) -> LogPressure {
        let (len, limit) = (self.log_bytes(), self.options.max_log_bytes);
        match len {
            _ if len > limit.saturating_mul(2) => LogPressure::Full,
            _ if len > limit => LogPressure::Slow,
            _ => LogPressure::Normal,
        }
    }

    fn stats(&self) -> EngineStats {
        let log_bytes = self.log_bytes();
        let inventory = self.data_dir.inventory();
        EngineStats {
            syncs: self.log.syncs,
            checkpoints: inventory.checkpoints,
            checkpoints_failed: inventory.checkpoints_failed,
            log_bytes,
            snapshot_bytes: inventory.snapshot.as_ref().map_or(0, |snapshot| snapshot.bytes),
            ..self.stats
        }
    }

    fn close(mut self: Box<Self>) -> Result<(), EngineError> {
        self.append_closed()
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        if !self.is_closed {
            // `close` reports errors.
            let _ = self.append_closed();
        }
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded")
            .field("dir", &self.data_dir.dir)
            .field("position", &self.position())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
