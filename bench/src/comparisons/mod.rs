//! The comparisons, a file or a folder each.

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

use self::resident::resident;
use crate::role::Role;

/// All there are; the program finds them here.
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

/// Workloads on one subject.
pub(crate) struct Comparison {
    /// What the command line calls it.
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Makes the workloads, without starting anything yet.
    pub(crate) workloads: fn(Effort) -> Vec<Workload>,
    /// What it has processes of their own do.
    pub(crate) roles: &'static [Role],
}

/// How much work a round does.
#[derive(Clone, Copy)]
pub(crate) enum Effort {
    /// Enough to measure: a round of the fastest contender takes some tens of milliseconds.
    Full,
    /// Enough to see that it runs.
    Quick,
}

impl Effort {
    pub(crate) fn operations(self, full: u64) -> u64 {
        match self {
            Self::Full => full,
            Self::Quick => full / 100,
        }
    }
}
