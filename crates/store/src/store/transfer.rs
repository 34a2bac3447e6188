//! Backups, and export and import as JSON lines.
//!
//! An import consists of ordinary commits, so positions stay valid and the epoch does not change. A restored backup gets a new
//! epoch.
//!
//! An export has one JSON object per line: a header, every bucket and named query with its configuration, every record with its
//! bucket, and an end with the number of records, so that a truncated file is detected. Lines of system buckets have the member
//! `system`: a program can import only the system buckets that it declares.
//!
//! ```text
//! {"tidewire":"export","version":1}
//! {"bucket":"harbours","config":{"key":"id","schema":{"id":{"type":"number"}}}}
//! {"system":"$audit","config":{"key":"id","schema":{"id":{"type":"number"}}}}
//! {"query":"high","config":{"bucket":"harbours","filter":{"tide":"high"}}}
//! {"in":"harbours","record":{"id":1,"tide":"high","_version":1,"_createdAt":1700000000000,"_updatedAt":1700000000000}}
//! {"end":1}
//! ```

use std::io::{self, BufRead, Read as _, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde_json::{Map, Value as Json, json};
use tokio::sync::oneshot;

use super::queue::Message;
use super::{Store, WriteError, block_on};
use crate::engine::{BackupError, CheckpointError, EngineError};
use crate::{Draft, Position, StoreError};

/// Bytes of lines that are imported in one commit.
const IMPORT_BATCH_BYTES: usize = 1 << 20;

/// The error of a backup or checkpoint. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MaintenanceError {
    /// The engine could not begin the backup or checkpoint.
    #[error(transparent)]
    Engine(EngineError),
    /// The backup failed.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// The checkpoint failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
}

/// The number of exported or imported definitions and records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Imported {
    /// The number of ordinary buckets. An import counts only those that were not defined before.
    pub buckets: u64,
    /// The number of named queries. An import counts only those that were not defined before.
    pub queries: u64,
    /// The number of records.
    pub records: u64,
}

/// The error of an import.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {problem}")]
#[non_exhaustive]
pub struct ImportError {
    /// The number of the line, counted from one.
    pub line: u64,
    /// The problem.
    #[source]
    pub problem: Box<ImportProblem>,
    /// The part that was imported before the error, and remains. The import can be repeated, because it overwrites records.
    pub imported: Imported,
}

/// An error in a line of an import.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportProblem {
    /// The line cannot be read.
    #[error("cannot read the line")]
    Read(#[from] io::Error),
    /// The line is not JSON.
    #[error("invalid JSON")]
    Json(#[from] serde_json::Error),
    /// The line has an unknown form.
    #[error("expected a bucket, a system bucket, a query, a record or the end of the export")]
    Unknown,
    /// The program does not declare the system bucket.
    #[error("system bucket \"{name}\" is not declared by this program; declare it when the store is opened")]
    SystemBucket {
        /// The bucket.
        name: String,
    },
    /// The first line is not the header of an export of this version.
    #[error("expected the header {{\"tidewire\":\"export\",\"version\":1}}")]
    Header,
    /// The line is longer than the largest record can be.
    #[error("the line is longer than {max} bytes")]
    TooLong {
        /// The limit in bytes.
        max: usize,
    },
    /// The last line is missing, or does not have the number of records that were read.
    #[error("the export is incomplete: read {records} records and found no matching end line")]
    Incomplete {
        /// The number of records that were read.
        records: u64,
    },
    /// The store rejected the line.
    #[error("the store rejected the line")]
    Write(#[from] WriteError),
}

impl Store {
    /// Copies the store into a directory that is empty or does not exist, while writes continue. Blocks until the copy is durable.
    /// Returns the position of the last commit in it. To use the copy, restore it: see
    /// [`Embedded::restore`](crate::engine::Embedded::restore).
    pub fn backup(&self, dir: &Path) -> Result<Position, MaintenanceError> {
        let (reply, begun) = oneshot::channel();
        self.shared().queue.request(Message::Backup(dir.to_owned(), reply));
        let begun = block_on(begun).map_err(|_| MaintenanceError::Closed)?;
        Ok(begun.map_err(MaintenanceError::Engine)?.run()?)
    }

    /// Writes the current state as JSON lines, while writes continue.
    pub fn export(&self, mut to: impl Write) -> io::Result<Imported> {
        let (snapshot, now) = (self.snapshot(), self.now());
        let mut exported = Imported::default();
        writeln!(to, "{}", json!({"tidewire": "export", "version": 1}))?;
        for (name, bucket) in snapshot.state.buckets() {
            writeln!(to, "{}", json!({"bucket": name, "config": bucket.definition().config}))?;
            exported.buckets += 1;
        }
        for (name, bucket) in snapshot.state.system_buckets() {
            writeln!(to, "{}", json!({"system": name, "config": bucket.definition().config}))?;
        }
        for (name, config) in snapshot.state.queries() {
            writeln!(to, "{}", json!({"query": name, "config": config}))?;
            exported.queries += 1;
        }
        for (name, bucket) in snapshot.state.buckets().chain(snapshot.state.system_buckets()) {
            let name = Json::from(name);
            for row in bucket.rows().filter(|row| bucket.is_live(row, now)) {
                writeln!(to, "{{\"in\":{name},\"record\":{row}}}")?;
                exported.records += 1;
            }
        }
        writeln!(to, "{}", json!({"end": exported.records}))?;
        to.flush()?;
        Ok(exported)
    }

    /// Imports the lines that [`export`](Self::export) wrote. A bucket or query that is already defined must have the same
    /// configuration, and a system bucket must be declared. A record replaces the record with the same key. Records keep their
    /// versions and times. They must match the schema; references are not checked, because the target may follow later in the
    /// export.
    ///
    /// An import consists of many commits. If it fails, the commits before the error remain.
    pub fn import(&self, from: impl BufRead) -> Result<Imported, ImportError> {
        Import { store: self, imported: Imported::default(), line: 0, batch: Vec::new(), bytes: 0, records: 0 }
            .run(from)
    }
}

/// A line of an export.
enum Line {
    Header,
    Bucket(String, Json),
    System(String),
    Query(String, Json),
    Record(String, Map<String, Json>),
    End(Json),
}

impl Line {
    fn parse(line: &[u8]) -> Result<Self, ImportProblem> {
        let Json::Object(mut members) = serde_json::from_slice(line)? else { return Err(ImportProblem::Unknown) };
        let mut member = |name: &str| members.swap_remove(name);
        if member("tidewire") == Some(json!("export")) && member("version") == Some(json!(1)) {
            return Ok(Self::Header);
        }
        if let Some(records) = member("end") {
            return Ok(Self::End(records));
        }
        if let Some(system) = member("system") {
            return if let Json::String(name) = system { Ok(Self::System(name)) } else { Err(ImportProblem::Unknown) };
        }
        match (member("bucket"), member("query"), member("in"), member("config"), member("record")) {
            (Some(Json::String(name)), None, None, Some(config), None) => Ok(Self::Bucket(name, config)),
            (None, Some(Json::String(name)), None, Some(config), None) => Ok(Self::Query(name, config)),
            (None, None, Some(Json::String(bucket)), None, Some(Json::Object(record))) => {
                Ok(Self::Record(bucket, record))
            }
            _ => Err(ImportProblem::Unknown),
        }
    }
}

/// An import in progress.
struct Import<'a> {
    store: &'a Store,
    imported: Imported,
    line: u64,
    /// Records to be committed together.
    batch: Vec<NumberedRecord>,
    bytes: usize,
    /// The number of records that were read.
    records: u64,
}

/// A record, its bucket and the number of its line.
struct NumberedRecord {
    line: u64,
    bucket: String,
    record: Map<String, Json>,
}

impl Import<'_> {
    fn run(mut self, mut from: impl BufRead) -> Result<Imported, ImportError> {
        let mut line = Vec::new();
        loop {
            self.line += 1;
            line.clear();
            match self.read_line(&mut from, &mut line).and_then(|()| self.import_line(&line)) {
                Ok(false) => {}
                Ok(true) => return Ok(self.imported),
                Err(problem) => {
                    return Err(ImportError { line: self.line, problem: problem.into(), imported: self.imported });
                }
            }
        }
    }

    fn read_line(&self, from: &mut impl BufRead, line: &mut Vec<u8>) -> Result<(), ImportProblem> {
        // The record, its bucket and the JSON around them.
        let max = self.store.shared().limits.max_record_bytes.saturating_add(1 << 12);
        from.by_ref().take(max as u64).read_until(b'\n', line)?;
        if line.len() == max && line.last() != Some(&b'\n') {
            return Err(ImportProblem::TooLong { max });
        }
        Ok(())
    }

    /// Imports a line. Returns whether it was the last line of the export.
    fn import_line(&mut self, line: &[u8]) -> Result<bool, ImportProblem> {
        let parsed = Line::parse(line);
        if self.line == 1 {
            return if matches!(parsed, Ok(Line::Header)) { Ok(false) } else { Err(ImportProblem::Header) };
        }
        if line.is_empty() {
            self.commit()?;
            return Err(ImportProblem::Incomplete { records: self.records });
        }
        let parsed = match parsed? {
            Line::Record(bucket, record) => {
                self.batch.push(NumberedRecord { line: self.line, bucket, record });
                self.records += 1;
                self.bytes += line.len();
                return if self.bytes < IMPORT_BATCH_BYTES { Ok(false) } else { self.commit().map(|()| false) };
            }
            other => other,
        };
        self.commit()?;
        match parsed {
            Line::Bucket(name, config) => {
                self.imported.buckets += u64::from(self.define(move |draft| match draft.state().bucket(&name) {
                    Ok(bucket) if bucket.definition().config == config => Ok(false),
                    _ => draft.define_bucket(&name, &config).map(|()| true),
                })?);
                Ok(false)
            }
            Line::System(name) => match self.store.snapshot().state.system_bucket(&name) {
                Ok(_) => Ok(false),
                Err(_) => Err(ImportProblem::SystemBucket { name }),
            },
            Line::Query(name, config) => {
                self.imported.queries +=
                    u64::from(self.define(move |draft| match draft.state().query_config(&name) {
                        Ok(known) if known == config => Ok(false),
                        _ => draft.define_query(&name, &config).map(|()| true),
                    })?);
                Ok(false)
            }
            Line::End(records) if records == json!(self.records) => Ok(true),
            Line::End(_) => Err(ImportProblem::Incomplete { records: self.records }),
            Line::Header | Line::Record(..) => Err(ImportProblem::Unknown),
        }
    }

    fn define(
        &self,
        work: impl FnOnce(&mut Draft) -> Result<bool, StoreError> + Send + 'static,
    ) -> Result<bool, WriteError> {
        self.store.write(work).wait()
    }

    /// Commits the current batch. If a record is rejected, the error has its line, and no record of the batch is imported.
    fn commit(&mut self) -> Result<(), ImportProblem> {
        let batch = std::mem::take(&mut self.batch);
        self.bytes = 0;
        let (Some(first), count) = (batch.first().map(|record| record.line), batch.len() as u64) else { return Ok(()) };
        let at = Arc::new(AtomicU64::new(first));
        let reached = Arc::clone(&at);
        let committed = self.store.write(move |draft| {
            batch.into_iter().try_for_each(|NumberedRecord { line, bucket, record }| {
                reached.store(line, Relaxed);
                if draft.state().system_bucket(&bucket).is_ok() {
                    return draft.system(|draft| draft.import_record(&bucket, record));
                }
                draft.import_record(&bucket, record)
            })
        });
        if let Err(problem) = committed.wait() {
            self.line = at.load(Relaxed);
            return Err(problem.into());
        }
        self.imported.records += count;
        Ok(())
    }
}
