//! The history: the newest commits, for followers.
//!
//! A follower has a position in the history instead of a queue. One bounded list of commits serves all followers, and followers do
//! not slow down the writer. A follower sees each commit once, in order, without gaps. If the next commit of a follower is no
//! longer in the history, the follower gets an error and must start again from a snapshot.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::watch;

use super::pending::block_on;
use crate::lock::lock;
use crate::{Cause, Change, Position};

/// A commit: changes that were made together.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Commit {
    /// The position of the commit.
    pub position: Position,
    /// The time of the commit by the store's clock, in milliseconds since 1970. Zero if the commit was logged by a version that did
    /// not log the time.
    pub at: u64,
    /// The cause of the commit. The default if the commit was logged by a version that did not log the cause.
    pub cause: Cause,
    /// The changes, in order.
    pub changes: Vec<Change>,
}

impl Commit {
    /// Returns the approximate memory of the commit, including rows that are shared with other commits.
    pub fn size(&self) -> usize {
        let row = |row: &Option<crate::Row>| row.as_ref().map_or(0, crate::Row::size);
        let change = |change: &Change| size_of::<Change>() + row(&change.old) + row(&change.new);
        size_of::<Self>() + self.changes.iter().map(change).sum::<usize>()
    }
}

/// The error of a follower that cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FollowError {
    /// The next commit is no longer in the history. Start again from a snapshot.
    #[error("the commits after {position} are no longer in the history: start again from a snapshot")]
    Behind {
        /// The position of the last commit that the follower has seen.
        position: Position,
    },
    /// The position is from another epoch, or ahead of the newest commit.
    #[error("the position {position} is not in this history: start again from a snapshot")]
    Unknown {
        /// The position.
        position: Position,
    },
    /// The store is closed, and the follower has seen all commits.
    #[error("the store is closed")]
    Closed,
}

/// The newest commits, limited in memory.
#[derive(Debug)]
pub(super) struct History {
    epoch: u64,
    max_bytes: usize,
    recent: Mutex<RecentCommits>,
    /// The sequence of the newest commit.
    newest: watch::Sender<u64>,
    behind: AtomicU64,
}

#[derive(Debug, Default)]
struct RecentCommits {
    commits: VecDeque<Arc<Commit>>,
    bytes: usize,
    /// The sequence of the commit before the first commit in the list.
    before: u64,
    is_closed: bool,
}

impl RecentCommits {
    fn push(&mut self, commit: Arc<Commit>, max_bytes: usize) {
        self.bytes += commit.size();
        self.commits.push_back(commit);
        while self.bytes > max_bytes
            && let Some(oldest) = self.commits.pop_front()
        {
            self.bytes -= oldest.size();
            self.before = oldest.position.sequence;
        }
    }
}

impl History {
    /// Creates a history that begins after this position.
    pub(super) fn new(epoch: u64, before: u64, max_bytes: usize) -> Self {
        let recent = Mutex::new(RecentCommits { before, ..RecentCommits::default() });
        Self { epoch, max_bytes, recent, newest: watch::Sender::new(before), behind: AtomicU64::new(0) }
    }

    fn recent(&self) -> MutexGuard<'_, RecentCommits> {
        lock(&self.recent)
    }

    /// Appends consecutive commits, and wakes the followers.
    pub(super) fn append(&self, commits: impl IntoIterator<Item = Arc<Commit>>) {
        let mut newest = None;
        let mut recent = self.recent();
        for commit in commits {
            newest = Some(commit.position.sequence);
            recent.push(commit, self.max_bytes);
        }
        drop(recent);
        if let Some(newest) = newest {
            self.newest.send_replace(newest);
        }
    }

    pub(super) fn close(&self) {
        self.recent().is_closed = true;
        // Wakes waiting followers.
        self.newest.send_modify(|_| {});
    }

    /// Returns the number of commits, their bytes, and the number of times that a follower has fallen behind.
    pub(super) fn stats(&self) -> (usize, usize, u64) {
        let recent = self.recent();
        (recent.commits.len(), recent.bytes, self.behind.load(Relaxed))
    }

    /// Returns the commit after this sequence, or `None` if it is not committed yet.
    fn after(&self, sequence: u64) -> Result<Option<Arc<Commit>>, FollowError> {
        let recent = self.recent();
        let position = Position { epoch: self.epoch, sequence };
        let Some(index) = sequence.checked_sub(recent.before) else { return Err(FollowError::Behind { position }) };
        match usize::try_from(index).ok().and_then(|index| recent.commits.get(index)) {
            Some(commit) => Ok(Some(Arc::clone(commit))),
            None if recent.is_closed => Err(FollowError::Closed),
            None => Ok(None),
        }
    }

    /// Returns a follower that sees every commit after this position.
    pub(super) fn follow(self: &Arc<Self>, from: Position) -> Result<Follower, FollowError> {
        let newest = self.newest.subscribe();
        if from.epoch != self.epoch || from.sequence > *newest.borrow() {
            return Err(FollowError::Unknown { position: from });
        }
        if from.sequence < self.recent().before {
            return Err(FollowError::Behind { position: from });
        }
        Ok(Follower { history: Arc::clone(self), newest, sequence: from.sequence })
    }
}

/// A cursor over the commits of a store, which returns each commit once and in order.
#[derive(Debug)]
pub struct Follower {
    history: Arc<History>,
    newest: watch::Receiver<u64>,
    /// The sequence of the last commit that was returned.
    sequence: u64,
}

impl Follower {
    /// Returns the position of the last commit that was returned.
    pub fn position(&self) -> Position {
        Position { epoch: self.history.epoch, sequence: self.sequence }
    }

    /// Returns the next commit, or `None` if the follower has seen all commits.
    pub fn try_next(&mut self) -> Result<Option<Arc<Commit>>, FollowError> {
        let next = self.history.after(self.sequence);
        if matches!(next, Err(FollowError::Behind { .. })) {
            self.history.behind.fetch_add(1, Relaxed);
        }
        let next = next?;
        self.sequence += u64::from(next.is_some());
        Ok(next)
    }

    /// Waits until [`try_next`](Self::try_next) has a commit or an error.
    pub async fn ready(&mut self) {
        loop {
            self.newest.mark_unchanged();
            if !matches!(self.history.after(self.sequence), Ok(None)) || self.newest.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits for the next commit. Cancel safe: no commit is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Arc<Commit>, FollowError> {
        loop {
            self.newest.mark_unchanged();
            if let Some(commit) = self.try_next()? {
                return Ok(commit);
            }
            if self.newest.changed().await.is_err() {
                return Err(FollowError::Closed);
            }
        }
    }

    /// Like [`next`](Self::next), but blocks the thread.
    pub fn wait(&mut self) -> Result<Arc<Commit>, FollowError> {
        block_on(self.next())
    }
}
