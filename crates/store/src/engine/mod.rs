//! Storage engines, which make commits durable.
//!
//! The writer passes groups of commits to an [`Engine`], which assigns each commit a [`Position`] and returns when the group has
//! the configured durability. The commits of a group share one sync (group commit). Keys and rows are opaque bytes to an engine.
//! Engines do not serve reads, because all rows are in memory.

mod disk;
mod embedded;
mod memory;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use disk::{Disk, DiskDir, DiskFile, Files};
pub use embedded::{
    Backup, BackupError, Checkpoint, CheckpointError, CopyError, Corruption, Embedded, EmbeddedOptions, OpenError,
    Recovered, Recovery, TornTail, Writes,
};
pub use memory::Memory;

use crate::{Cause, Position};

/// The write of one row in a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Write<'a> {
    /// The bucket of the row; at most 65535 bytes.
    pub bucket: &'a str,
    /// The key of the row.
    pub key: &'a [u8],
    /// The new row. `None` deletes the row.
    pub row: Option<&'a [u8]>,
}

/// A row of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StoredRow<'a> {
    /// The bucket of the row; at most 65535 bytes.
    pub bucket: &'a str,
    /// The key of the row.
    pub key: &'a [u8],
    /// The row.
    pub row: &'a [u8],
}

/// One commit: writes that are stored together or not at all, and the commit's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WriteSet<'a> {
    /// The writes, in the order in which they apply.
    pub writes: &'a [Write<'a>],
    /// The time of the commit, in milliseconds since 1970.
    pub at: u64,
    /// The cause of the commit.
    pub cause: Cause,
}

impl WriteSet<'_> {
    /// Returns the encoded length of the commit in bytes, which counts towards [`Engine::max_group_bytes`].
    pub fn encoded_len(&self) -> usize {
        Self::encoded_len_of(self.writes.iter().copied())
    }

    /// Returns the encoded length of a commit with these writes.
    pub(crate) fn encoded_len_of<'a>(writes: impl Iterator<Item = Write<'a>>) -> usize {
        embedded::encoded_len(writes)
    }
}

/// The point at which a commit is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Durability {
    /// After fsync: no acknowledged commit is lost. The default, because all commits of a group share one fsync.
    #[default]
    Always,
    /// After the write to the log. The log is synced within this interval, provided that [`Engine::sync`] is called at the
    /// [`Engine::sync_deadline`]. A power failure loses the commits since the last sync.
    Interval(Duration),
    /// After the write to the log. The operating system chooses the time of the write to the disk.
    None,
}

/// Whether the log grows faster than checkpoints shorten it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogPressure {
    /// The log is within its limit.
    Normal,
    /// The log is longer than its limit. Commits succeed and are counted as [`slowed`](EngineStats::slowed). The writer should
    /// slow down until a checkpoint is done.
    Slow,
    /// The log is longer than twice its limit. Commits fail with [`EngineError::LogFull`].
    Full,
}

/// Statistics of an engine: counters since it was opened, and gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Commits written.
    pub commits: u64,
    /// Groups of commits written.
    pub groups: u64,
    /// Syncs of the log.
    pub syncs: u64,
    /// Groups written while the log was longer than its limit.
    pub slowed: u64,
    /// Groups rejected before anything was written.
    pub refused: u64,
    /// Checkpoints done.
    pub checkpoints: u64,
    /// Checkpoints that failed or were dropped.
    pub checkpoints_failed: u64,
    /// Bytes of the log that a recovery would replay.
    pub log_bytes: u64,
    /// Bytes of the newest snapshot.
    pub snapshot_bytes: u64,
}

/// The error of an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The disk failed during a write. All further commits fail. After reopening, the group is either stored completely or not at
    /// all, and all commits acknowledged under [`Durability::Always`] are present.
    #[error(
        "cannot write {}: it is unknown whether the last group of commits is stored; free space or repair the disk, then reopen",
        file.display()
    )]
    OutcomeUnknown {
        /// The file that could not be written.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// An earlier write failed. Nothing was written.
    #[error("writes are rejected because the disk failed during an earlier write: repair the disk, then reopen")]
    Stopped,
    /// The next segment of the log could not be created. Nothing was written, and the next commit tries again.
    ///
    /// If only file descriptors are missing, the current segment is extended instead, so this error means that the disk is full,
    /// that it failed, or that the segment has reached 1 GiB.
    #[error("cannot create {}, the next segment of the log; nothing was written: free space, then retry", file.display())]
    NoSegment {
        /// The segment.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// The log is longer than twice the length from which commits are slowed down. Nothing was written.
    #[error(
        "the log has {len} bytes, more than the limit of {max}: wait for a checkpoint, or check why checkpoints fail"
    )]
    LogFull {
        /// The length of the log in bytes.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// A group is too large. Nothing was written.
    #[error("the group of commits has {len} bytes, more than the limit of {max}")]
    TooLarge {
        /// The length of the group in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The name of a bucket is too long. Nothing was written.
    #[error("the name of a bucket has {len} bytes, more than the limit of 65535")]
    BucketName {
        /// The length of the name in bytes.
        len: usize,
    },
    /// Another checkpoint is running.
    #[error("another checkpoint is running: wait until it is done")]
    CheckpointRunning,
    /// The memory engine stores nothing that could be backed up.
    #[error("a store in memory has no files to back up")]
    NotPersistent,
}

/// A storage engine: stores commits. It is owned by a single writer.
pub trait Engine: Send {
    /// Returns the position of the newest commit.
    fn position(&self) -> Position;

    /// Stores commits in this order, with one sync if the durability requires it. Each commit gets the next sequence. Returns the
    /// position of the last commit. A crash leaves a prefix of complete groups.
    ///
    /// An error other than [`EngineError::OutcomeUnknown`] means that nothing was written.
    fn commit(&mut self, commits: &[WriteSet<'_>]) -> Result<Position, EngineError>;

    /// Returns the limit of a group: the sum of [`WriteSet::encoded_len`] of its commits.
    fn max_group_bytes(&self) -> usize;

    /// Syncs the log. Does nothing if all commits are durable.
    fn sync(&mut self) -> Result<(), EngineError>;

    /// Returns the latest time at which [`sync`](Self::sync) must be called, if there are unsynced commits under
    /// [`Durability::Interval`].
    fn sync_deadline(&self) -> Option<Instant>;

    /// Returns whether the log is long enough for a checkpoint and none is running.
    fn needs_checkpoint(&self) -> bool;

    /// Begins a checkpoint at the current position. The caller [runs](Checkpoint::run) it, on any thread, with the rows as of
    /// this position, while commits continue.
    fn checkpoint(&mut self) -> Result<Checkpoint, EngineError>;

    /// Begins a backup at the current position, into a directory that is empty or does not exist. The caller
    /// [runs](Backup::run) it, on any thread, while commits continue.
    fn backup(&mut self, dir: &Path) -> Result<Backup, EngineError>;

    /// Returns whether the log grows faster than checkpoints shorten it.
    fn log_pressure(&self) -> LogPressure;

    /// Returns the statistics of the engine.
    fn stats(&self) -> EngineStats;

    /// Closes the engine, and logs the clean shutdown. Dropping the engine does the same and ignores errors.
    fn close(self: Box<Self>) -> Result<(), EngineError>;
}
