//! Durable inserts, by many concurrent writers and by a single writer.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_store::StoreOptions;
use tidewire_store::engine::EmbeddedOptions;

use super::super::Effort;
use super::contender::{self, RowStore, check_and_close, fill, runtime};
use super::folder;
use super::group::GroupCommit;
use super::ours::Ours;
use super::redb::Redb;
use super::row::{self, Rows};
use super::sqlite::Sqlite;

const WRITERS: u64 = 64;

/// The approximate length of a row in the log of tidewire-store.
const LOG_BYTES_PER_ROW: u64 = 341;

pub(super) fn many(effort: Effort) -> Workload {
    let (present, inserts) = (effort.operations(150_000), effort.operations(60_000));
    let log_bytes = LOG_BYTES_PER_ROW * (present + inserts / 4);
    Workload {
        name: "store-insert-many",
        about: format!(
            "{inserts} rows of {} bytes with one index, by {WRITERS} tasks on one thread, each of which waits until its row is \
             durable. The store has {present} rows before. The peers have one writer thread, which commits all waiting rows in \
             one transaction. tidewire-store begins a checkpoint of all rows in every round, because its log is limited to {} \
             MiB here. The disk is {}.",
            row::BYTES,
            log_bytes >> 20,
            folder::disk()
        ),
        operation: "row",
        metrics: &[Metric::Throughput, Metric::Cpu],
        contenders: vec![
            Contender::new("redb", move |meter| {
                insert_many(meter, present, inserts, GroupCommit::<Redb<1>>::open, |_| {})
            }),
            Contender::new("SQLite", move |meter| {
                insert_many(meter, present, inserts, GroupCommit::<Sqlite>::open, |_| {})
            }),
            Contender::new("tidewire-store", move |meter| {
                let options =
                    StoreOptions::default().embedded(EmbeddedOptions::default().checkpoint_log_bytes(log_bytes));
                insert_many(
                    meter,
                    present,
                    inserts,
                    |folder| Ours::open_with(folder, options),
                    Ours::wait_for_checkpoint,
                )
            }),
        ],
    }
}

/// Runs a round with a new store. Otherwise rounds would differ: the store would grow, and only some rounds would have a
/// checkpoint.
fn insert_many<S: RowStore>(
    meter: Meter,
    present: u64,
    inserts: u64,
    open: impl FnOnce(&Path) -> S,
    after_inserts: impl FnOnce(&S),
) -> Sample {
    let (folder, runtime) = (folder::new(), runtime());
    let store = Arc::new(open(folder.path()));
    let rows = Rows::new(present + inserts);
    fill(&runtime, &*store, rows, 0, present);
    let sample =
        meter.measure(inserts, || contender::insert(&runtime, &store, WRITERS, rows, present, present + inserts));
    after_inserts(&store);
    check_and_close(store, present + inserts);
    sample
}

pub(super) fn one(effort: Effort) -> Workload {
    let (present, inserts) = (effort.operations(20_000), effort.operations(2_000));
    Workload {
        name: "store-insert-one",
        about: format!(
            "{inserts} rows of {} bytes with one index, by one task, which waits until each row is durable. The store has {present} \
             rows before. \"write and sync\" is the cost of the disk alone: it overwrites as many bytes of a file and calls \
             fdatasync. The disk is {}.",
            row::BYTES,
            folder::disk()
        ),
        operation: "row",
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::LatencyP50, Metric::LatencyP99],
        contenders: vec![
            Contender::new("redb", move |meter| insert_one::<GroupCommit<Redb<1>>>(meter, present, inserts)),
            Contender::new("SQLite", move |meter| insert_one::<GroupCommit<Sqlite>>(meter, present, inserts)),
            Contender::new("tidewire-store", move |meter| insert_one::<Ours>(meter, present, inserts)),
            Contender::new("write and sync", move |meter| write_and_sync(meter, inserts)),
        ],
    }
}

fn insert_one<S: RowStore>(meter: Meter, present: u64, inserts: u64) -> Sample {
    let (folder, runtime) = (folder::new(), runtime());
    let store = Arc::new(S::open(folder.path()));
    let rows = Rows::new(present + inserts);
    fill(&runtime, &*store, rows, 0, present);
    let mut latencies = Vec::new();
    let sample = meter.measure(inserts, || {
        latencies = runtime.block_on(timed_inserts(&*store, rows, present, present + inserts));
    });
    check_and_close(store, present + inserts);
    sample.with_latencies(latencies)
}

/// Stores the rows with keys from `first` up to `end`. Returns the latency of each insert.
pub(super) async fn timed_inserts<S: RowStore>(store: &S, rows: Rows, first: u64, end: u64) -> Vec<Duration> {
    let mut latencies = Vec::new();
    for id in first..end {
        let row = rows.row(id);
        let started = Instant::now();
        store.insert(row).await;
        latencies.push(started.elapsed());
    }
    latencies
}

/// The minimum cost of a durable write: overwrites existing bytes, so that the file system updates no metadata.
fn write_and_sync(meter: Meter, writes: u64) -> Sample {
    let folder = folder::new();
    let path = folder.path().join("bytes");
    let file = OpenOptions::new().create_new(true).write(true).open(path).expect("a file can be created");
    let bytes = [b'x'; row::BYTES];
    let size = usize::try_from(writes).expect("64 bits") * row::BYTES;
    file.write_all_at(&vec![0; size], 0).and_then(|()| file.sync_all()).expect("the disk is not full");
    let mut latencies = Vec::new();
    let sample = meter.measure(writes, || {
        for number in 0..writes {
            let started = Instant::now();
            file.write_all_at(&bytes, number * row::BYTES as u64)
                .and_then(|()| file.sync_data())
                .expect("the write succeeds");
            latencies.push(started.elapsed());
        }
    });
    sample.with_latencies(latencies)
}
