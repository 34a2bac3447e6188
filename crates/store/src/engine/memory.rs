//! The memory engine, which assigns positions and stores nothing.

use std::path::Path;
use std::time::Instant;

use super::{Backup, Checkpoint, Engine, EngineError, EngineStats, LogPressure, WriteSet};
use crate::Position;

/// An engine that counts commits and stores nothing. Each instance has a new epoch.
#[derive(Debug)]
pub struct Memory {
    position: Position,
    stats: EngineStats,
}

impl Default for Memory {
    fn default() -> Self {
        Self { position: Position { epoch: super::embedded::new_epoch(0), sequence: 0 }, stats: EngineStats::default() }
    }
}

impl Engine for Memory {
    fn position(&self) -> Position {
        self.position
    }

    fn commit(&mut self, commits: &[WriteSet<'_>]) -> Result<Position, EngineError> {
        if !commits.is_empty() {
            self.position.sequence += commits.len() as u64;
            self.stats.commits += commits.len() as u64;
            self.stats.groups += 1;
        }
        Ok(self.position)
    }

    fn max_group_bytes(&self) -> usize {
        usize::MAX
    }

    fn sync(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    fn sync_deadline(&self) -> Option<Instant> {
        None
    }

    fn needs_checkpoint(&self) -> bool {
        false
    }

    fn checkpoint(&mut self) -> Result<Checkpoint, EngineError> {
        Ok(Checkpoint::noop(self.position))
    }

    fn backup(&mut self, _: &Path) -> Result<Backup, EngineError> {
        Err(EngineError::NotPersistent)
    }

    fn log_pressure(&self) -> LogPressure {
        LogPressure::Normal
    }

    fn stats(&self) -> EngineStats {
        self.stats
    }

    fn close(self: Box<Self>) -> Result<(), EngineError> {
        Ok(())
    }
}
