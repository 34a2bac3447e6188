//! The recovery time of a store after its process was killed.

use std::path::Path;
use std::thread;

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
use crate::role::Role;

const STORES: &[StoreProcess] = &[
    StoreProcess::new::<GroupCommit<Redb<1>>>("redb"),
    StoreProcess::new::<GroupCommit<Sqlite>>("SQLite"),
    StoreProcess::new::<Ours>("tidewire-store"),
];

/// A store that is filled and reopened in child processes.
struct StoreProcess {
    name: &'static str,
    /// Stores this number of rows, prints a line after each tenth of them, and continues to insert until it is killed.
    fill: fn(&Path, u64),
    /// Opens the store, prints a line after it has read a row, prints the number of rows, and waits until it is killed.
    start: fn(&Path, u64),
}

impl StoreProcess {
    const fn new<S: RowStore>(name: &'static str) -> Self {
        Self { name, fill: fill_until_killed::<S>, start: start_until_killed::<S> }
    }
}

pub(super) const FILL: Role = Role { name: "store-fill", run: |arguments| run(arguments, |store| store.fill) };
pub(super) const START: Role = Role { name: "store-start", run: |arguments| run(arguments, |store| store.start) };

fn run(arguments: &[String], part: fn(&StoreProcess) -> fn(&Path, u64)) {
    let [name, folder, rows] = arguments else { panic!("expected the name of a store, a folder and a number of rows") };
    let store = STORES.iter().find(|store| store.name == name).expect("the store name is known");
    part(store)(Path::new(folder), rows.parse().expect("a number of rows"));
}

pub(super) fn after_kill(effort: Effort) -> Workload {
    let rows = effort.operations(1_000_000);
    let contender = |store: &StoreProcess| {
        let (name, mut folder) = (store.name, None);
        Contender::new(name, move |meter| {
            round(meter, name, folder.get_or_insert_with(|| fill_and_kill(name, rows)), rows)
        })
    };
    Workload {
        name: "store-start",
        about: format!(
            "A process opens a store with {rows} rows of {} bytes, whose process was killed during a write, and reads one row. The \
             time includes the start of the process, which is then killed too. The files are in the page cache.",
            row::BYTES
        ),
        operation: "start",
        metrics: &[Metric::Wall],
        contenders: STORES.iter().map(contender).collect(),
    }
}

fn arguments(name: &str, folder: &TempDir, rows: u64) -> [String; 3] {
    [name.into(), folder.path().to_str().expect("the path is valid UTF-8").into(), rows.to_string()]
}

fn fill_and_kill(name: &str, rows: u64) -> TempDir {
    let folder = folder::new();
    let mut process = FILL.start(&arguments(name, &folder, rows));
    for tenth in 1..=10 {
        // A line per tenth, because a slow disk might exceed the timeout of a single wait.
        process.wait_for_line(&format!("stored {tenth} tenths"));
    }
    process.kill();
    folder
}

fn round(meter: Meter, name: &str, folder: &TempDir, rows: u64) -> Sample {
    let mut process = None;
    let sample = meter.measure(1, || {
        process.insert(START.start(&arguments(name, folder, rows))).wait_for_line("has read a row");
    });
    let mut process = process.expect("the process was started");
    let count: u64 = process.wait_for_line("has rows: ").parse().expect("a number of rows");
    assert!(count >= rows, "{count} rows were recovered, but {rows} were stored");
    process.kill();
    sample
}

fn fill_until_killed<S: RowStore>(folder: &Path, count: u64) {
    let (runtime, store, rows) = (runtime(), S::open(folder), Rows::new(count));
    for tenth in 1..=10 {
        fill(&runtime, &store, rows, (tenth - 1) * count / 10, tenth * count / 10);
        println!("stored {tenth} tenths");
    }
    for id in count.. {
        runtime.block_on(store.insert(rows.row(id)));
    }
}

fn start_until_killed<S: RowStore>(folder: &Path, count: u64) {
    let store = S::open(folder);
    let mut reader = store.reader();
    reader.read(count / 2);
    println!("has read a row");
    println!("has rows: {}", reader.count());
    loop {
        thread::park();
    }
}
