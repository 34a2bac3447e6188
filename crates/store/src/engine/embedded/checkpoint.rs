//! Checkpoints, which write a new snapshot while commits continue.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::{EngineError, StoredRow};
use super::data_dir::{DataDir, SnapshotFile};
use super::snapshot::{self, SnapshotHeader};
use crate::Position;

/// A checkpoint that has begun. Dropping it abandons it, and the log is not shortened.
///
/// The directory stays locked until the checkpoint ends, even if the engine is closed before.
#[must_use = "a checkpoint does nothing unless it is run"]
pub struct Checkpoint {
    position: Position,
    /// `None` for the memory engine.
    job: Option<Job>,
}

/// The error of a checkpoint. The log still has all commits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The disk failed, or is full.
    #[error("cannot write the snapshot {}: the log was not shortened", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the disk.
        source: io::Error,
    },
}

struct Job {
    data_dir: Arc<DataDir>,
    header: SnapshotHeader,
    /// Bytes appended to the log when the checkpoint began.
    appended: u64,
    is_done: bool,
}

impl Checkpoint {
    /// Creates a checkpoint that writes nothing.
    pub(in super::super) fn noop(position: Position) -> Self {
        Self { position, job: None }
    }

    /// Begins a checkpoint. The log must be durable up to the position, and later commits must be in `segment` or later segments.
    pub(super) fn begin(
        data_dir: &Arc<DataDir>,
        log: u64,
        position: Position,
        segment: u64,
        appended: u64,
    ) -> Result<Self, EngineError> {
        let mut inventory = data_dir.inventory();
        if inventory.is_checkpointing {
            return Err(EngineError::CheckpointRunning);
        }
        inventory.is_checkpointing = true;
        drop(inventory);
        let header = SnapshotHeader { log, epoch: position.epoch, sequence: position.sequence, segment };
        Ok(Self { position, job: Some(Job { data_dir: Arc::clone(data_dir), header, appended, is_done: false }) })
    }

    /// Returns the position of the snapshot.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Writes the snapshot: all rows as of its [`position`](Self::position), in any order, each once.
    pub fn run<'a>(self, rows: impl IntoIterator<Item = StoredRow<'a>>) -> Result<Position, CheckpointError> {
        let Some(mut job) = self.job else { return Ok(self.position) };
        let data_dir = &job.data_dir;
        let unfinished = data_dir.dir.join("snapshot.tmp");
        let path = data_dir.snapshot(job.header.sequence);
        let written = (|| {
            let file = data_dir.create(&unfinished)?;
            let bytes = snapshot::write(&*file, &job.header, rows)?;
            data_dir.disk.rename(&unfinished, &path)?;
            data_dir.entries.sync()?;
            Ok((bytes, file))
        })();
        match written {
            Ok((bytes, file)) => {
                data_dir.reserve(file);
                data_dir.set_snapshot(job.header.segment, SnapshotFile { path, bytes, appended: job.appended });
                job.is_done = true;
                Ok(self.position)
            }
            Err(source) => {
                // The log may need the space.
                let _ = data_dir.disk.remove(&unfinished);
                // If no descriptor is left, the next checkpoint has no reserved descriptor.
                let _ = data_dir.reserve_again();
                Err(CheckpointError::Io { file: unfinished, source })
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut inventory = self.data_dir.inventory();
        inventory.is_checkpointing = false;
        inventory.checkpoints_failed += u64::from(!self.is_done);
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("position", &self.position).finish_non_exhaustive()
    }
}
