//! The position and the cause of a commit.

use std::fmt;

/// The position of a commit.
///
/// Positions of one epoch are totally ordered, and a sequence always names the same commit. Positions of different epochs cannot
/// be compared. The epoch is new whenever commits that were visible may be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// Random, and stored with the data.
    pub epoch: u64,
    /// The number of the commit, counted from one; zero before the first.
    pub sequence: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.epoch, self.sequence)
    }
}

/// The cause of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Cause {
    /// The originator of the write: a number chosen by the caller, such as a connection number. Zero means none.
    pub origin: u64,
    /// Length of the chain of commits that led to this one, each the cause of the next.
    pub depth: u32,
}

impl Cause {
    /// Returns the cause of a write by this originator.
    pub fn of(origin: u64) -> Self {
        Self { origin, depth: 0 }
    }

    /// Returns the cause of a write that responds to a commit with this cause.
    #[must_use]
    pub fn next(self) -> Self {
        Self { depth: self.depth.saturating_add(1), ..self }
    }
}
