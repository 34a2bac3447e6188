//! Point reads on two threads, while another thread inserts rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::contender::{Reader as _, RowStore, fill, runtime};
use super::folder;
use super::group::GroupCommit;
use super::ours::Ours;
use super::redb::Redb;
use super::row::{self, Rows};
use super::sqlite::Sqlite;

const READERS: u64 = 2;

/// The pause of the writer after each row, so that the write load hardly depends on the speed of the store.
const WRITE_PAUSE: Duration = Duration::from_millis(1);

pub(super) fn points(effort: Effort) -> Workload {
    let (present, reads) = (effort.operations(200_000), effort.operations(200_000));
    Workload {
        name: "store-read",
        about: format!(
            "{reads} reads of random rows by key, of {present} rows of {} bytes, on {READERS} threads, while another thread inserts \
             rows with a pause of {WRITE_PAUSE:?} after each. Every read sees all rows committed before it, except for \"redb, 100 at a \
             time\", which begins a new transaction for every 100th read.",
            row::BYTES
        ),
        operation: "read",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![
            contender::<GroupCommit<Redb<1>>>("redb", present, reads),
            contender::<GroupCommit<Redb<100>>>("redb, 100 at a time", present, reads),
            contender::<GroupCommit<Sqlite>>("SQLite", present, reads),
            contender::<Ours>("tidewire-store", present, reads),
        ],
    }
}

/// Creates a contender whose store is created in the first round.
fn contender<S: RowStore>(name: &'static str, present: u64, reads: u64) -> Contender {
    let mut open = None;
    Contender::new(name, move |meter| open.get_or_insert_with(|| FilledStore::<S>::filled(present)).round(meter, reads))
}

/// A store, the number of rows to read from, and the key of the next row.
struct FilledStore<S> {
    store: Arc<S>,
    present: u64,
    next: u64,
    // Dropped last, because it deletes the files.
    _folder: TempDir,
}

impl<S: RowStore> FilledStore<S> {
    fn filled(present: u64) -> Self {
        let folder = folder::new();
        let store = Arc::new(S::open(folder.path()));
        fill(&runtime(), &*store, Rows::new(present), 0, present);
        Self { store, present, next: present, _folder: folder }
    }

    fn round(&mut self, meter: Meter, reads: u64) -> Sample {
        let Self { store, present, next, .. } = self;
        let is_done = AtomicBool::new(false);
        let mut readers: Vec<_> = (0..READERS).map(|number| (number, store.reader())).collect();
        let sample = thread::scope(|scope| {
            scope.spawn(|| {
                let (runtime, rows) = (runtime(), Rows::new(*present));
                while !is_done.load(Relaxed) {
                    runtime.block_on(store.insert(rows.row(*next)));
                    *next += 1;
                    thread::sleep(WRITE_PAUSE);
                }
            });
            let sample = meter.measure(reads, || {
                thread::scope(|scope| {
                    for (number, reader) in &mut readers {
                        scope.spawn(|| {
                            let mut random = *number;
                            for _ in 0..reads / READERS {
                                random = random
                                    .wrapping_mul(6_364_136_223_846_793_005)
                                    .wrapping_add(1_442_695_040_888_963_407);
                                reader.read((random >> 33) % *present);
                            }
                        });
                    }
                });
            });
            is_done.store(true, Relaxed);
            sample
        });
        assert!(store.reader().count() == *next, "all inserted rows are stored");
        sample
    }
}
