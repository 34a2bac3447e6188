//! The writer: the only thread that changes the store.
//!
//! It owns the engine and the head, a draft with the published state and the changes since. It runs queued writes on the head, one
//! after the other, and commits them as a group with one sync. Then it publishes the head with one atomic swap, appends the
//! commits to the history, and replies to the callers. Readers therefore see no partial write, and no write that could still be
//! lost.
//!
//! Writes are taken one at a time from a queue that is fair between owners (`fair_queue`), and a group is limited in time, so a
//! write is not delayed by the backlogs of other owners.
//!
//! All replies wait for the group, rejections included: a rejection may depend on an earlier write of the group, and a reply must
//! not reveal a write that a crash could still undo. If the engine fails, the head is reset to the published state.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::engine_writes::EngineWrites;
use super::history::Commit;
use super::pending::WriteError;
use super::queue::{Job, Message, Received};
use super::reply::wake_all;
use super::{Snapshot, StoreShared};
use crate::draft::Sweep;
use crate::engine::{CheckpointError, Engine, EngineError, LogPressure, StoredRow, Write, WriteSet};
use crate::replies::is_eviction;
use crate::{Cause, Change, Draft, Position, State};

/// Limits of a group: the number of writes, the bytes of the commits, and the time to run the writes. A group that reaches one of
/// them is committed. With these limits a sync costs little compared to a full group, and a write that arrives meanwhile waits only
/// a few milliseconds.
const MAX_GROUP_WRITES: usize = 1024;
const MAX_GROUP_BYTES: usize = 1 << 20;
const MAX_GROUP_TIME: Duration = Duration::from_millis(4);
/// Estimated work of a write in nanoseconds: per write, per changed record and per byte. The work of its reads is added. The time is
/// not measured, because that would charge a write for other threads that ran meanwhile.
const WORK_PER_WRITE: u64 = 1000;
const WORK_PER_CHANGE: u64 = 1000;
const WORK_PER_BYTE: u64 = 4;
/// Number of records that a sweep examines per commit.
const SWEEP_BATCH_RECORDS: usize = 1000;
/// Delay after each group while the log is longer than its limit.
const LOG_PRESSURE_DELAY: Duration = Duration::from_millis(10);
/// Delay before a failed checkpoint is retried.
const CHECKPOINT_RETRY_DELAY: Duration = Duration::from_secs(10);

pub(super) struct Writer {
    shared: Arc<StoreShared>,
    engine: Box<dyn Engine>,
    /// The published state and the writes after it.
    head: Draft,
    group: Group,
    /// The work of the last write in nanoseconds, until it is charged to its owner.
    last_work: u64,
    /// The error after which writes are rejected.
    stopped: Option<Arc<EngineError>>,
    /// The time of the last sweep.
    last_sweep: Instant,
    /// The current sweep.
    sweep: Sweep,
    /// The running checkpoint that the writer has started.
    checkpoint: Option<JoinHandle<Result<Position, CheckpointError>>>,
    /// The time before which no checkpoint is started, because the last one failed.
    checkpoint_after: Option<Instant>,
}

/// Writes that have run and will be committed together.
#[derive(Default)]
struct Group {
    /// The writes whose callers wait for a reply.
    jobs: Vec<Box<dyn Job>>,
    commits: Vec<Uncommitted>,
    /// Encoded length of the commits.
    bytes: usize,
}

impl Group {
    fn is_full(&self) -> bool {
        self.jobs.len() >= MAX_GROUP_WRITES || self.bytes >= MAX_GROUP_BYTES
    }
}

/// A commit that the engine has not stored yet.
struct Uncommitted {
    cause: Cause,
    changes: Vec<Change>,
    writes: EngineWrites,
}

impl Writer {
    pub(super) fn new(shared: Arc<StoreShared>, engine: Box<dyn Engine>) -> Self {
        let snapshot = shared.published.load_full();
        Self {
            engine,
            head: Draft::new(snapshot.state.clone(), 0).with_limits(shared.limits),
            group: Group::default(),
            last_work: 0,
            stopped: None,
            last_sweep: Instant::now(),
            sweep: Sweep::default(),
            checkpoint: None,
            checkpoint_after: None,
            shared,
        }
    }

    /// Runs until the queue is closed and empty.
    pub(super) fn run(mut self) -> Result<(), EngineError> {
        // Closes the queue and the history even if the writer panics.
        let _end = CloseOnDrop(Arc::clone(&self.shared));
        let mut until = self.next_maintenance();
        loop {
            match self.shared.queue.wait(std::mem::take(&mut self.last_work), until) {
                Received::Message(message) => self.handle_group(message),
                Received::TimedOut => self.set_now(),
                Received::Closed => break,
            }
            self.run_maintenance();
            until = self.next_maintenance();
        }
        if let Some(checkpoint) = self.checkpoint.take() {
            self.finish_checkpoint(checkpoint);
        }
        self.engine.close()
    }

    /// Sets the time of the head, which never decreases.
    fn set_now(&mut self) {
        self.head.set_now(self.head.now().max(self.shared.clock.now()));
    }

    /// Handles queued messages until the group is full, and commits the group.
    fn handle_group(&mut self, first: Message) {
        self.set_now();
        let start = Instant::now();
        let mut next = Some(first);
        while let Some(message) = next {
            self.handle(message);
            // Writes that arrive meanwhile join the group and share its sync.
            if self.group.is_full() || start.elapsed() >= MAX_GROUP_TIME {
                break;
            }
            next = self.shared.queue.next(std::mem::take(&mut self.last_work));
        }
        // `flush` reports an error to the callers.
        let _ = self.flush();
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Write(job) => self.write(job),
            // The caller may have gone away.
            Message::Checkpoint(reply) => {
                let _ = self.flush();
                let state = self.head.state();
                let _ = reply.send(self.engine.checkpoint().map(|checkpoint| (checkpoint, state.clone())));
            }
            Message::Backup(dir, reply) => {
                let _ = self.flush();
                let _ = reply.send(self.engine.backup(&dir));
            }
            Message::CheckpointEnded => {
                if let Some(ended) = self.checkpoint.take() {
                    self.finish_checkpoint(ended);
                }
            }
            Message::RefreshStats => {}
        }
    }

    /// Runs a write on the head and adds it to the group.
    fn write(&mut self, mut job: Box<dyn Job>) {
        // A commit has at most half of the bytes of a group, and joins a group that is at most half full, so it always fits.
        if self.group.bytes > self.engine.max_group_bytes() / 2 {
            // `flush` reports an error to the callers.
            let _ = self.flush();
        }
        if let Some(cause) = &self.stopped {
            self.shared.counters.refused.fetch_add(1, Relaxed);
            wake_all(Vec::from_iter(job.send_result(Err(WriteError::Stopped(Arc::clone(cause))))));
            return;
        }
        self.head.reset_read_work();
        let before = self.group.bytes;
        let mut is_done = job.run(&mut self.head);
        let changed = self.head.changes().0.len() as u64;
        if is_done && let Err(error) = self.add_write_to_group(job.cause()) {
            job.reject(error);
            is_done = false;
        }
        let bytes = (self.group.bytes - before) as u64;
        self.last_work =
            self.head.read_work().saturating_add(WORK_PER_WRITE + changed * WORK_PER_CHANGE + bytes * WORK_PER_BYTE);
        self.group.jobs.push(job);
        if !is_done {
            self.shared.counters.refused.fetch_add(1, Relaxed);
            if !self.head.roll_back() {
                self.abort_group();
            }
        }
    }

    /// Moves the changes of a write from the head into the group. Fails if they are too large or the store is full.
    fn add_write_to_group(&mut self, cause: Cause) -> Result<(), WriteError> {
        self.head.check_store_bytes()?;
        self.add_changes_to_group(cause)
    }

    /// Moves the changes of the head into the group as one commit. Fails if they are too large.
    fn add_changes_to_group(&mut self, cause: Cause) -> Result<(), WriteError> {
        let (changes, cleared) = self.head.changes();
        if changes.is_empty() {
            return Ok(());
        }
        let writes = EngineWrites::of(changes, cleared, self.head.state());
        let (len, max) = (writes.encoded_len(changes), self.engine.max_group_bytes() / 2);
        if len > max {
            return Err(WriteError::TooLarge { len, max });
        }
        self.group.bytes += len;
        self.group.commits.push(Uncommitted { cause, changes: self.head.take_changes(), writes });
        Ok(())
    }

    /// Fails all writes of the group and resets the head, which a panic has left in an inconsistent state.
    fn abort_group(&mut self) {
        tracing::error!("write panicked during a change of the state; its group of writes was aborted");
        self.reset_head();
        send_replies(std::mem::take(&mut self.group).jobs, &Err(WriteError::Panicked));
    }

    fn reset_head(&mut self) {
        let state = self.shared.published.load().state.clone();
        self.head = Draft::new(state, self.head.now()).with_limits(self.shared.limits);
    }

    /// Commits and publishes the group, and replies to its callers.
    fn flush(&mut self) -> Result<(), WriteError> {
        let Group { jobs, commits, .. } = std::mem::take(&mut self.group);
        let stored = if commits.is_empty() { Ok(()) } else { self.commit_group(commits) };
        *self.shared.engine_stats() = self.engine.stats();
        send_replies(jobs, &stored);
        stored
    }

    fn commit_group(&mut self, commits: Vec<Uncommitted>) -> Result<(), WriteError> {
        let at = self.head.now();
        let writes: Vec<Write<'_>> = commits.iter().flat_map(|commit| commit.writes.iter(&commit.changes)).collect();
        let mut rest = &writes[..];
        let sets: Vec<WriteSet<'_>> = commits
            .iter()
            .map(|commit| {
                let (own, others) = rest.split_at(commit.writes.len());
                rest = others;
                WriteSet { writes: own, at, cause: commit.cause }
            })
            .collect();
        let position = match self.engine.commit(&sets) {
            Ok(position) => position,
            Err(error) => return Err(self.handle_engine_error(error)),
        };
        let first = position.sequence + 1 - commits.len() as u64;
        self.shared.published.store(Arc::new(Snapshot { state: self.head.state().clone(), position }));
        self.shared.counters.commits.fetch_add(commits.len() as u64, Relaxed);
        let changes = commits.iter().flat_map(|commit| &commit.changes);
        let evicted = changes.filter(|change| is_eviction(change, at)).count();
        self.shared.counters.evicted_replies.fetch_add(evicted as u64, Relaxed);
        let commits = commits.into_iter().zip(first..).map(|(commit, sequence)| {
            let position = Position { sequence, ..position };
            Arc::new(Commit { position, at, cause: commit.cause, changes: commit.changes })
        });
        self.shared.history.append(commits);
        Ok(())
    }

    /// Resets the head after the engine rejected a group or failed. Returns the error for the callers.
    fn handle_engine_error(&mut self, error: EngineError) -> WriteError {
        self.shared.counters.not_kept.fetch_add(1, Relaxed);
        self.reset_head();
        let is_unknown = matches!(error, EngineError::OutcomeUnknown { .. });
        let is_final = is_unknown || matches!(error, EngineError::Stopped);
        let error = Arc::new(error);
        if is_final {
            self.stop(Arc::clone(&error));
        }
        if is_unknown { WriteError::Unknown(error) } else { WriteError::NotStored(error) }
    }

    fn stop(&mut self, error: Arc<EngineError>) {
        if self.stopped.is_none() {
            tracing::error!(error = &*error as &dyn std::error::Error, "disk failed; all further writes are rejected");
            self.shared.counters.is_stopped.store(true, Relaxed);
            self.stopped = Some(error);
        }
    }

    /// Returns the time of the next maintenance task: a sync, a sweep or a checkpoint.
    fn next_maintenance(&self) -> Option<Instant> {
        let sweep = || {
            let interval = self.shared.sweep_interval?;
            let expiry = self.head.state().next_expiry()?;
            let left = Duration::from_millis(expiry.saturating_sub(self.shared.clock.now()));
            Some(self.last_sweep.checked_add(interval)?.max(Instant::now().checked_add(left)?))
        };
        if self.stopped.is_some() {
            return None;
        }
        let retry = self.checkpoint_after.filter(|_| self.checkpoint.is_none() && self.engine.needs_checkpoint());
        [self.engine.sync_deadline(), sweep(), retry].into_iter().flatten().min()
    }

    fn run_maintenance(&mut self) {
        if self.stopped.is_some() {
            return;
        }
        let now = Instant::now();
        if self.engine.sync_deadline().is_some_and(|deadline| deadline <= now)
            && let Err(error) = self.engine.sync()
        {
            self.stop(Arc::new(error));
            return;
        }
        if self.shared.sweep_interval.is_some_and(|interval| now.duration_since(self.last_sweep) >= interval) {
            self.sweep(now);
        }
        self.manage_log(now);
        *self.shared.engine_stats() = self.engine.stats();
    }

    /// Continues the current sweep, or begins one. The next sweep begins one interval after this one is done.
    fn sweep(&mut self, at: Instant) {
        if self.sweep.is_done() {
            self.sweep = self.head.begin_sweep();
        }
        let swept = self.sweep_batch();
        if self.flush().is_ok() {
            self.shared.counters.swept.fetch_add(swept as u64, Relaxed);
        } else {
            // The deletions were undone, and the next sweep repeats them.
            self.sweep = Sweep::default();
        }
        if self.sweep.is_done() {
            self.last_sweep = at;
        }
    }

    /// Deletes a batch of expired records, as many as fit into a commit, and adds the commit to the group. Returns the number of
    /// deleted records.
    fn sweep_batch(&mut self) -> usize {
        let mut count = SWEEP_BATCH_RECORDS;
        loop {
            let mut sweep = self.sweep.clone();
            let swept = self.head.sweep_batch(&mut sweep, count);
            let is_taken = self.add_changes_to_group(Cause::default()).is_ok();
            if is_taken || count == 1 {
                self.sweep = sweep;
            }
            if is_taken {
                return swept;
            }
            self.head.roll_back();
            if count == 1 {
                // The record and its cascade are too large for a commit. Reads hide the record, and clients can delete the
                // referring records in parts.
                self.shared.counters.not_kept.fetch_add(1, Relaxed);
                return 0;
            }
            count /= 2;
        }
    }

    /// Begins a checkpoint if the log is long enough, and delays the writer while the log is longer than its limit.
    fn manage_log(&mut self, now: Instant) {
        let may_begin = self.checkpoint.is_none() && self.checkpoint_after.is_none_or(|after| now >= after);
        if may_begin && self.engine.needs_checkpoint() {
            self.begin_checkpoint();
        }
        if self.engine.log_pressure() == LogPressure::Slow {
            std::thread::sleep(LOG_PRESSURE_DELAY);
        }
    }

    fn begin_checkpoint(&mut self) {
        let checkpoint = match self.engine.checkpoint() {
            Ok(checkpoint) => checkpoint,
            // `Store::checkpoint` is running one.
            Err(EngineError::CheckpointRunning) => return,
            Err(error) => return self.stop(Arc::new(error)),
        };
        let state = self.head.state().clone();
        let thread = std::thread::Builder::new().name("tidewire-checkpoint".to_owned());
        let ended = CheckpointEnded(Arc::clone(&self.shared));
        match thread.spawn(move || {
            let _ended = ended;
            checkpoint.run(stored_rows(&state))
        }) {
            Ok(running) => self.checkpoint = Some(running),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread for the checkpoint; retrying later");
                self.checkpoint_after = Instant::now().checked_add(CHECKPOINT_RETRY_DELAY);
            }
        }
    }

    fn finish_checkpoint(&mut self, ended: JoinHandle<Result<Position, CheckpointError>>) {
        let failed = match ended.join() {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "checkpoint failed; retrying later");
                true
            }
            Err(_) => {
                tracing::error!("checkpoint panicked; retrying later");
                true
            }
        };
        if failed {
            self.checkpoint_after = Instant::now().checked_add(CHECKPOINT_RETRY_DELAY);
        }
    }
}

/// Sends all replies, and then wakes the callers.
fn send_replies(jobs: Vec<Box<dyn Job>>, stored: &Result<(), WriteError>) {
    wake_all(jobs.into_iter().filter_map(|job| job.send_result(stored.clone())).collect());
}

/// Returns all rows of persistent buckets in insertion order, definitions first. The key of a row is part of its text.
pub(super) fn stored_rows(state: &State) -> impl Iterator<Item = StoredRow<'_>> {
    state.all_buckets().filter(|(_, bucket)| bucket.definition().persistent).flat_map(|(name, bucket)| {
        bucket.rows().map(move |row| StoredRow { bucket: name, key: &[], row: row.text().as_bytes() })
    })
}

/// Notifies the writer when dropped, even if the checkpoint panicked.
struct CheckpointEnded(Arc<StoreShared>);

impl Drop for CheckpointEnded {
    fn drop(&mut self) {
        self.0.queue.signal(Message::CheckpointEnded);
    }
}

/// Closes the queue and the history when dropped, even if the writer panicked.
struct CloseOnDrop(Arc<StoreShared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.queue.close_and_clear();
        self.0.history.close();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use crate::state::visits;
    use crate::{Store, StoreOptions};

    /// Returns the number of buckets that the writer visits for a fixed set of writes, in a store with this many buckets.
    fn visits(buckets: usize) -> usize {
        let sweep_interval = Some(Duration::from_hours(1));
        let store = Store::memory(StoreOptions { sweep_interval, ..StoreOptions::default() });
        let number = json!({"type": "number"});
        let reference = json!({"type": "number", "ref": "targets", "onDelete": "cascade"});
        let configs = [
            ("targets", json!({"key": "id", "schema": {"id": number}, "ttl": "1h"})),
            ("referring", json!({"key": "id", "schema": {"id": number, "target": reference}})),
        ];
        for (name, config) in configs {
            store.define_bucket(name, config).wait().unwrap();
        }
        for index in 0..buckets {
            let config = json!({"key": "id", "schema": {"id": number}, "ttl": "1h"});
            store.define_bucket(&format!("b{index}"), config).wait().unwrap();
            store.insert(&format!("b{index}"), json!({"id": 1})).wait().unwrap();
        }
        let total = || store.write(|_| Ok(visits::total())).wait().unwrap();
        let before = total();
        for id in 0..5 {
            store.insert("targets", json!({"id": id})).wait().unwrap();
            store.insert("referring", json!({"id": id, "target": id})).wait().unwrap();
        }
        store.delete("targets", json!(1), None).wait().unwrap();
        store.delete("b1", json!(1), None).wait().unwrap();
        store.clear("b2").wait().unwrap();
        store.sweep().wait().unwrap();
        store.drop_bucket("b3").wait().unwrap();
        total() - before
    }

    #[test]
    fn cost_of_a_write_does_not_depend_on_the_number_of_buckets() {
        assert_eq!(visits(10), visits(200));
    }
}
