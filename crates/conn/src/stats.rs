//! Counters of a supervisor.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::session::Traffic;
use crate::{Counters, PushStats};

/// The labels of all close reasons ([`CloseReason::label`](crate::CloseReason::label)), and of handshakes that failed.
const END_LABELS: [&str; 17] = [
    "decode",
    "dropped",
    "encode",
    "first_frame",
    "frame",
    "half_closed",
    "handle",
    "handler",
    "handshake",
    "idle",
    "io",
    "memory_limit",
    "panic",
    "peer",
    "protocol",
    "shutdown",
    "write_stall",
];

/// Counters of all connections of a supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Connections that are admitted and have not ended.
    pub connections: usize,
    /// Connections that were admitted.
    pub admitted: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections that have ended, by the [label](crate::CloseReason::label) of the reason. Has every label.
    pub ended: BTreeMap<&'static str, u64>,
    /// Requests whose handler or reply panicked, even if the connection continued.
    pub panics: u64,
    /// Traffic of all connections, including those that have ended.
    pub traffic: Counters,
    /// Pushed frames that were not written.
    pub push: PushStats,
}

#[derive(Debug, Default)]
pub(crate) struct SupervisorCounters {
    pub(crate) admitted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) panics: AtomicU64,
    /// The traffic of connections that have ended.
    pub(crate) traffic: Traffic,
    ended: [AtomicU64; END_LABELS.len()],
}

impl SupervisorCounters {
    pub(crate) fn count_ended(&self, label: &str) {
        if let Some(index) = END_LABELS.iter().position(|end| *end == label) {
            self.ended[index].fetch_add(1, Relaxed);
        }
    }

    /// Returns the counters except those of live connections and of pushes.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            admitted: self.admitted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            panics: self.panics.load(Relaxed),
            traffic: self.traffic.counters(),
            ended: END_LABELS.iter().zip(&self.ended).map(|(end, count)| (*end, count.load(Relaxed))).collect(),
            ..Stats::default()
        }
    }
}
