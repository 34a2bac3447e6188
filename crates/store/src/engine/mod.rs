//! Engines: they make commits durable.
//!
//! The writer hands groups of commits to an [`Engine`], which assigns each a [`Position`] and returns when the group is as
//! durable as the settings promise. All writes that wait form one group, so they share one sync. Keys and rows are opaque bytes
//! to an engine. Engines do not serve reads, because all rows are in memory.

mod disk;
mod embedded;
mod memory;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use disk::{Disk, DiskDir, DiskFile, Files};
pub use embedded::{
    Backup, BackupError, Checkpoint, CheckpointError, CopyError, Corruption, Cut, Embedded, EmbeddedOptions, OpenError,
    Recovered, Recovery, Writes,
};
pub use memory::Memory;

use crate::{Cause, Position};

/// What a commit does to one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Write<'a> {
    /// The bucket of the row; at most 65535 bytes.
    pub bucket: &'a str,
    /// The key of the row.
    pub key: &'a [u8],
    /// The new row; none if it is deleted.
    pub row: Option<&'a [u8]>,
}

/// A row as a snapshot has it.
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
    /// Returns the bytes that the commit takes in a group: see [`Engine::max_group_bytes`].
    pub fn encoded_len(&self) -> usize {
        Self::encoded_len_of(self.writes.iter().copied())
    }

    /// Returns the encoded length of a commit with these writes.
    pub(crate) fn encoded_len_of<'a>(writes: impl Iterator<Item = Write<'a>>) -> usize {
        embedded::encoded_len(writes)
    }
}

/// When a commit counts as made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Durability {
    /// When it is on the disk: nothing acknowledged is ever lost. The default, because a group costs one wait for the disk,
    /// however many commits it has.
    #[default]
    Always,
    /// When it is written. It is synced after this interval at the latest, provided that [`Engine::sync`] is called when
    /// [`Engine::sync_due`] says so. A power failure loses the commits since the last sync.
    Interval(Duration),
    /// When it is written; the operating system decides when it reaches the disk.
    None,
}

/// Whether the log grows faster than checkpoints shorten it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogPressure {
    /// The log is within its limit.
    Normal,
    /// The log is past its limit: commits are taken and counted as [`slowed`](EngineStats::slowed), and the writer should
    /// take its time until a checkpoint is done.
    Slow,
    /// The log has twice its limit: commits are refused with [`EngineError::LogFull`].
    Full,
}

/// What an engine has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Commits taken.
    pub commits: u64,
    /// Groups they came in.
    pub groups: u64,
    /// Times the log was forced to the disk.
    pub syncs: u64,
    /// Groups taken while the log was past its limit.
    pub slowed: u64,
    /// Groups refused, of which nothing was written.
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

/// Why a commit is not made, or not known to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Writing failed midway. Nothing more is taken; after reopening, the group is there as a whole or a prefix of whole
    /// commits of earlier groups is, and everything acknowledged under [`Durability::Always`] is.
    #[error(
        "cannot write {}: it is unknown whether the last group of commits is stored; free space or repair the disk, then reopen",
        file.display()
    )]
    OutcomeUnknown {
        /// The file that could not be written.
        file: PathBuf,
        /// What the disk said.
        source: io::Error,
    },
    /// An earlier write failed. Nothing was written.
    #[error("an earlier write failed, so nothing more is written: repair the disk, then reopen")]
    Stopped,
    /// The next segment of the log could not be created. Nothing was written, and the next commit tries again.
    ///
    /// If only file descriptors are missing, the current segment is extended instead, so this error means that the disk is full,
    /// that it failed, or that the segment has reached 1 GiB.
    #[error("cannot create {}, the next segment of the log, so nothing was written: free space, then retry", file.display())]
    NoSegment {
        /// The segment.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
    /// The log has twice the length at which commits are slowed. Nothing was written.
    #[error("the log has {len} bytes, and commits are refused from {max}: wait for a checkpoint, or see why it fails")]
    LogFull {
        /// The bytes it has.
        len: u64,
        /// From where it takes no more.
        max: u64,
    },
    /// A group is too large. Nothing was written.
    #[error("a group of {len} bytes: at most {max} are taken at a time")]
    TooLarge {
        /// The bytes it has.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The name of a bucket is too long. Nothing was written.
    #[error("the name of a bucket has {len} bytes: at most 65535 are taken")]
    BucketName {
        /// The bytes it has.
        len: usize,
    },
    /// A checkpoint is running; there is one at a time.
    #[error("a checkpoint is running: wait until it is done")]
    CheckpointRunning,
    /// The memory engine keeps nothing, so there is nothing to copy.
    #[error("the memory engine keeps nothing: there is nothing to back up")]
    KeepsNothing,
}

/// Storage of commits. Owned by a single writer.
pub trait Engine: Send {
    /// Returns the position of the newest commit.
    fn position(&self) -> Position;

    /// Stores these commits, in this order, with one sync if the durability asks for it. Each gets the next sequence; returns
    /// the position of the last. A crash leaves a prefix of whole groups.
    ///
    /// An error other than [`EngineError::OutcomeUnknown`] means that nothing was written.
    fn commit(&mut self, commits: &[WriteSet<'_>]) -> Result<Position, EngineError>;

    /// The largest sum of [`WriteSet::encoded_len`] of a group.
    fn max_group_bytes(&self) -> usize;

    /// Syncs the log. Does nothing if all commits are durable.
    fn sync(&mut self) -> Result<(), EngineError>;

    /// When [`sync`](Self::sync) should be called at the latest, under [`Durability::Interval`] with something unsynced.
    fn sync_due(&self) -> Option<Instant>;

    /// Whether the log is long enough for a checkpoint, and none is running.
    fn needs_checkpoint(&self) -> bool;

    /// Begins a checkpoint at the current position. The caller [runs](Checkpoint::run) it, on any thread, with the rows as of
    /// this position, while commits go on.
    fn checkpoint(&mut self) -> Result<Checkpoint, EngineError>;

    /// Begins a backup at the current position, into a directory that is empty or does not exist. The caller
    /// [runs](Backup::run) it, on any thread, while commits go on.
    fn backup(&mut self, dir: &Path) -> Result<Backup, EngineError>;

    /// Whether checkpoints keep up.
    fn log_pressure(&self) -> LogPressure;

    /// Returns its counters.
    fn stats(&self) -> EngineStats;

    /// Closes the engine, and logs that it was closed in order. Dropping it does the same and ignores errors.
    fn close(self: Box<Self>) -> Result<(), EngineError>;
}
