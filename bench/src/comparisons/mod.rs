//! The comparisons, one module each.

mod channels;
mod conn;
mod live;
mod pipelining;
mod pool;
mod redis;
mod resident;
mod server;
mod store;
mod websocket;

use tidewire_bench::Workload;

use self::resident::resident_bytes;
use crate::role::Role;

/// All comparisons.
pub(crate) const COMPARISONS: &[Comparison] = &[
    channels::COMPARISON,
    conn::COMPARISON,
    live::COMPARISON,
    pipelining::COMPARISON,
    pool::COMPARISON,
    redis::COMPARISON,
    server::COMPARISON,
    store::COMPARISON,
    websocket::COMPARISON,
];

/// A group of workloads on one subject.
pub(crate) struct Comparison {
    /// The name on the command line.
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Creates the workloads. Must not start processes or do expensive work.
    pub(crate) workloads: fn(Effort) -> Vec<Workload>,
    /// The roles of its child processes.
    pub(crate) roles: &'static [Role],
}

/// The amount of work in a round.
#[derive(Clone, Copy)]
pub(crate) enum Effort {
    /// Enough to measure: a round of the fastest contender takes tens of milliseconds.
    Full,
    /// A hundredth of the work, to check that everything runs.
    Quick,
}

impl Effort {
    /// Returns the number of operations, given the number at full effort.
    pub(crate) fn operations(self, full: u64) -> u64 {
        match self {
            Self::Full => full,
            Self::Quick => full / 100,
        }
    }
}
