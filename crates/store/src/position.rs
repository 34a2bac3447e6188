//! The position and the cause of a commit.

use std::fmt;

/// The position of a commit.
///
/// Positions of one epoch are totally ordered, and a sequence always names the same commit. Positions of different epochs cannot
/// be compared. A new epoch begins whenever visible commits may have been lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// The epoch: a random number that is stored with the data.
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
    /// The length of the chain of commits that caused this one, each the cause of the next. Zero if no commit caused it.
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
