//! Recovery of the state and the history from the data of an engine.

use std::sync::Arc;

use super::history::{Commit, History};
use crate::catalog::{self, BUCKETS};
use crate::engine::{EngineError, OpenError, Recovered, StoredRow, Write};
use crate::query::IndexKey;
use crate::system::SystemBucketError;
use crate::system::is_system_name;
use crate::{Bucket, Change, Row, State, StoreError};

/// An error in recovered rows, which do not form a valid state.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidData {
    /// A row is not a record, or violates a constraint of its bucket.
    #[error("a row of bucket \"{bucket}\" is invalid: {problem}")]
    Row {
        /// The bucket.
        bucket: String,
        /// The problem.
        problem: Box<StoreError>,
    },
    /// The bucket of a row is not defined.
    #[error("found rows of bucket \"{bucket}\", which is not defined")]
    Undefined {
        /// The bucket.
        bucket: String,
    },
}

/// The error of opening a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreOpenError {
    /// The engine cannot be opened.
    #[error(transparent)]
    Engine(#[from] OpenError),
    /// The recovered rows are intact, but invalid for a store of this version: another program or a newer version wrote them.
    #[error("the data directory has data that is invalid for this version: {0}")]
    InvalidData(#[from] InvalidData),
    /// A system bucket conflicts with the stored data: an ordinary bucket has its name, or its records do not match the definition.
    #[error(transparent)]
    SystemBucket(#[from] SystemBucketError),
    /// The declarations of system buckets could not be stored.
    #[error("the declarations of system buckets could not be stored")]
    Declaration(#[source] EngineError),
}

/// Builds a state from recovered rows and commits.
#[derive(Default)]
pub(super) struct Loader {
    state: State,
    /// The newest commits, for the history.
    commits: Vec<Arc<Commit>>,
    bytes: usize,
    max_bytes: usize,
    problem: Option<InvalidData>,
}

impl Loader {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    /// Adds a row or a commit. Does nothing after the first error.
    pub(super) fn add(&mut self, recovered: Recovered<'_>) {
        if self.problem.is_some() {
            return;
        }
        let taken = match recovered {
            Recovered::Row(StoredRow { bucket, key, row }) => {
                self.write(&Write { bucket, key, row: Some(row) }, &mut None)
            }
            Recovered::Commit { position, at, cause, mut writes } => {
                let mut changes = Some(Vec::new());
                let taken = writes.try_for_each(|write| self.write(&write, &mut changes));
                let commit = Commit { position, at, cause, changes: changes.unwrap_or_default() };
                self.add_to_history(commit);
                taken
            }
        };
        self.problem = taken.err();
    }

    fn add_to_history(&mut self, commit: Commit) {
        self.bytes += commit.size();
        self.commits.push(Arc::new(commit));
        // Removes the commits that do not fit into the history. The list is trimmed at twice the limit, so the amortized cost is
        // constant.
        if self.bytes > self.max_bytes.saturating_mul(2) {
            let mut surplus = self.bytes - self.max_bytes;
            let outdated = self.commits.iter().take_while(|commit| {
                let is_outdated = surplus > 0;
                surplus = surplus.saturating_sub(commit.size());
                is_outdated
            });
            let outdated = outdated.count();
            self.commits.drain(..outdated);
            self.bytes = self.commits.iter().map(|commit| commit.size()).sum();
        }
    }

    fn write(&mut self, write: &Write<'_>, changes: &mut Option<Vec<Change>>) -> Result<(), InvalidData> {
        let name = write.bucket;
        let invalid_row =
            |problem: StoreError| InvalidData::Row { bucket: name.to_owned(), problem: Box::new(problem) };
        let undefined = |_| InvalidData::Undefined { bucket: name.to_owned() };
        let (shared, _) = self.state.any_bucket(name).map_err(undefined)?;
        let shared = Arc::clone(shared);
        let mut record_change = |ordinal, old, new| {
            if let Some(changes) = changes {
                changes.push(Change { bucket: Arc::clone(&shared), ordinal, old, new });
            }
        };
        match write.row {
            Some(text) => {
                let text = std::str::from_utf8(text).map_err(|_| invalid_row(crate::RowError::Malformed.into()))?;
                let row = Row::of_text(text).map_err(|problem| invalid_row(problem.into()))?;
                if name == BUCKETS {
                    self.define(&row)?;
                }
                let placed = self.state.change_bucket(name, |bucket| bucket.put_row(row.clone())).map_err(undefined)?;
                let (ordinal, old) =
                    placed.map_err(|source| invalid_row(StoreError::NotUnique { bucket: name.to_owned(), source }))?;
                record_change(ordinal, old, Some(row));
            }
            None if write.key.is_empty() => {
                let clear = |bucket: &mut Bucket| {
                    bucket.entries().for_each(|(ordinal, row)| record_change(ordinal, Some(row.clone()), None));
                    bucket.clear();
                };
                self.state.change_bucket(name, clear).map_err(undefined)?;
            }
            None => {
                let key = IndexKey::of_bytes(write.key);
                let taken = self.state.change_bucket(name, |bucket| bucket.remove_key(&key)).map_err(undefined)?;
                let Some((ordinal, row)) = taken else { return Ok(()) };
                if name == BUCKETS
                    && let Some(dropped) = catalog::name_of(&row)
                {
                    self.state.uninstall(&dropped);
                }
                record_change(ordinal, Some(row), None);
            }
        }
        Ok(())
    }

    /// Defines or redefines the bucket that a row of [`BUCKETS`] describes.
    fn define(&mut self, row: &Row) -> Result<(), InvalidData> {
        let invalid_row = |problem| InvalidData::Row { bucket: BUCKETS.to_owned(), problem: Box::new(problem) };
        let defined = catalog::bucket_of(row).unwrap_or(Err(crate::RowError::Malformed.into()));
        let (name, definition) = defined.map_err(invalid_row)?;
        let (is_system, definition) = (catalog::is_system(row), Arc::new(definition));
        let is_allowed = if is_system { is_system_name(&name) } else { !self.state.is_hidden(&name) };
        if !is_allowed || is_system && self.state.bucket(&name).is_ok() {
            return Err(invalid_row(crate::RowError::Malformed.into()));
        }
        let bucket = match self.state.any_bucket(&name) {
            Err(_) => Bucket::new(definition),
            Ok((_, bucket)) => bucket
                .redefine(definition)
                .map_err(|source| invalid_row(StoreError::NotUnique { bucket: name.clone(), source }))?,
        };
        if is_system {
            // The bucket is hidden until the program declares it.
            self.state.install_system(&name, bucket, false);
        } else {
            self.state.install(&name, bucket);
        }
        Ok(())
    }

    /// Returns the state and the history of the newest commits.
    pub(super) fn finish(self, position: crate::Position) -> Result<(State, History), InvalidData> {
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        let commits = self.commits.into_iter().filter(|commit| commit.position.epoch == position.epoch);
        let commits: Vec<Arc<Commit>> = commits.collect();
        let before = commits.first().map_or(position.sequence, |first| first.position.sequence - 1);
        let history = History::new(position.epoch, before, self.max_bytes);
        history.append(commits);
        Ok((self.state, history))
    }
}
