//! Counters of a supervisor.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::session::Traffic;
use crate::{Counters, PushStats};

/// Every way in which a connection can end, as [`CloseReason::label`](crate::CloseReason::label) calls it; and a handshake that
/// failed before there was one.
const ENDS: [&str; 17] = [
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
    /// Requests that panicked, whether or not the connection went on.
    pub panics: u64,
    /// Traffic of all connections, those that have ended included.
    pub traffic: Counters,
    /// Pushed frames that were not written.
    pub push: PushStats,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) admitted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) panics: AtomicU64,
    /// Of connections that have ended.
    pub(crate) traffic: Traffic,
    ended: [AtomicU64; ENDS.len()],
}

impl Counts {
    pub(crate) fn ended(&self, label: &str) {
        if let Some(place) = ENDS.iter().position(|end| *end == label) {
            self.ended[place].fetch_add(1, Relaxed);
        }
    }

    /// All but what concerns live connections and pushes.
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            admitted: self.admitted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            panics: self.panics.load(Relaxed),
            traffic: self.traffic.counters(),
            ended: ENDS.iter().zip(&self.ended).map(|(end, count)| (*end, count.load(Relaxed))).collect(),
            ..Stats::default()
        }
    }
}
