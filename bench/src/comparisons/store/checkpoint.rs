//! Latency of commits while a checkpoint is written.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use tempfile::TempDir;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::contender::{RowStore as _, fill, runtime};
use super::folder;
use super::insert::timed_inserts;
use super::ours::Ours;
use super::row::{self, Rows};

pub(super) fn commits(effort: Effort) -> Workload {
    let (present, inserts) = (effort.operations(200_000), effort.operations(4_000));
    let contender = |name, has_checkpoints| {
        let mut filled = None;
        Contender::new(name, move |meter| {
            filled.get_or_insert_with(|| FilledStore::new(present)).round(meter, inserts, has_checkpoints)
        })
    };
    Workload {
        name: "store-checkpoint",
        about: format!(
            "{inserts} rows of {} bytes with one index, by one task, which waits until each row is durable. The store has {present} \
             rows and grows from round to round. \"during checkpoints\" writes one checkpoint after the other meanwhile. The \
             disk is {}.",
            row::BYTES,
            folder::disk()
        ),
        operation: "row",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50, Metric::Throughput],
        contenders: vec![contender("alone", false), contender("during checkpoints", true)],
    }
}

/// A store, and the key of its next row.
struct FilledStore {
    store: Ours,
    rows: Rows,
    next: u64,
    // Dropped last, because it deletes the files.
    _folder: TempDir,
}

impl FilledStore {
    fn new(present: u64) -> Self {
        let (folder, rows) = (folder::new(), Rows::new(present));
        // The log stays below the length at which the store would start a checkpoint.
        let store = Ours::open(folder.path());
        fill(&runtime(), &store, rows, 0, present);
        Self { store, rows, next: present, _folder: folder }
    }

    fn round(&mut self, meter: Meter, inserts: u64, has_checkpoints: bool) -> Sample {
        let Self { store, rows, next, .. } = self;
        let (is_done, has_started) = (AtomicBool::new(!has_checkpoints), AtomicBool::new(!has_checkpoints));
        let mut latencies = Vec::new();
        let sample = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    has_started.store(true, Relaxed);
                    store.store().checkpoint().expect("a checkpoint is written");
                }
            });
            while !has_started.load(Relaxed) {
                thread::yield_now();
            }
            let sample = meter.measure(inserts, || {
                latencies = runtime().block_on(timed_inserts(store, *rows, *next, *next + inserts));
            });
            is_done.store(true, Relaxed);
            sample
        });
        *next += inserts;
        sample.with_latencies(latencies)
    }
}
