//! Checkpoints: a new snapshot, written while commits continue.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::{EngineError, StoredRow};
use super::home::{Home, Kept};
use super::snapshot::{self, SnapshotHeader};
use crate::Position;

/// A checkpoint that has begun. Dropping it abandons it, and the log is not shortened.
///
/// The directory stays locked until the checkpoint ends, even if the engine is closed before.
#[must_use = "a checkpoint that is not run shortens nothing"]
pub struct Checkpoint {
    position: Position,
    /// `None` for the memory engine.
    job: Option<Job>,
}

/// Why a checkpoint failed. Nothing is lost: the log still has every commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The disk failed, or is full.
    #[error("cannot write the snapshot {}: the log stays as long as it is", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
}

struct Job {
    home: Arc<Home>,
    header: SnapshotHeader,
    /// Bytes appended to the log when the checkpoint began.
    appended: u64,
    is_done: bool,
}

impl Checkpoint {
    pub(in super::super) fn of_nothing(position: Position) -> Self {
        Self { position, job: None }
    }

    /// The log is durable up to the position. Later commits are in this segment or a later one.
    pub(super) fn begin(
        home: &Arc<Home>,
        log: u64,
        position: Position,
        segment: u64,
        appended: u64,
    ) -> Result<Self, EngineError> {
        let mut inventory = home.inventory();
        if inventory.is_checkpointing {
            return Err(EngineError::CheckpointRunning);
        }
        inventory.is_checkpointing = true;
        drop(inventory);
        let header = SnapshotHeader { log, epoch: position.epoch, sequence: position.sequence, segment };
        Ok(Self { position, job: Some(Job { home: Arc::clone(home), header, appended, is_done: false }) })
    }

    /// Returns the position of the snapshot.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Writes the snapshot: all rows as of its [`position`](Self::position), in any order, each once.
    pub fn run<'a>(self, rows: impl IntoIterator<Item = StoredRow<'a>>) -> Result<Position, CheckpointError> {
        let Some(mut job) = self.job else { return Ok(self.position) };
        let home = &job.home;
        let unfinished = home.dir.join("snapshot.tmp");
        let path = home.snapshot(job.header.sequence);
        let written = (|| {
            let file = home.create(&unfinished)?;
            let bytes = snapshot::write(&*file, &job.header, rows)?;
            home.disk.rename(&unfinished, &path)?;
            home.entries.sync()?;
            Ok((bytes, file))
        })();
        match written {
            Ok((bytes, file)) => {
                home.reserve(file);
                home.replace(job.header.segment, Kept { path, bytes, appended: job.appended });
                job.is_done = true;
                Ok(self.position)
            }
            Err(source) => {
                // Frees the space for the log.
                let _ = home.disk.remove(&unfinished);
                // If no descriptor is left, the next checkpoint does without a reserved one.
                let _ = home.reserve_again();
                Err(CheckpointError::Io { file: unfinished, source })
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut inventory = self.home.inventory();
        inventory.is_checkpointing = false;
        inventory.checkpoints_failed += u64::from(!self.is_done);
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("position", &self.position).finish_non_exhaustive()
    }
}
