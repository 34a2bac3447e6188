//! The recovery time of a store that was killed.

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

const SUBJECTS: &[Subject] = &[
    Subject::new::<GroupCommit<Redb<1>>>("redb"),
    Subject::new::<GroupCommit<Sqlite>>("SQLite"),
    Subject::new::<Ours>("tidewire-store"),
];

/// A store that is filled and started, each in a process of its own.
struct Subject {
    name: &'static str,
    /// Stores so many rows, tells of every tenth part of them, and goes on until it is killed.
    fill: fn(&Path, u64),
    /// Opens what was left, tells when it has read a row, and how many there are, and waits until it is killed.
    start: fn(&Path, u64),
}

impl Subject {
    const fn new<S: RowStore>(name: &'static str) -> Self {
        Self { name, fill: fill_until_killed::<S>, start: start_until_killed::<S> }
    }
}

pub(super) const FILL: Role = Role { name: "store-fill", play: |arguments| play(arguments, |subject| subject.fill) };
pub(super) const START: Role = Role { name: "store-start", play: |arguments| play(arguments, |subject| subject.start) };

fn play(arguments: &[String], part: fn(&Subject) -> fn(&Path, u64)) {
    let [name, folder, rows] = arguments else { panic!("a store is told its name, its folder and a number of rows") };
    let subject = SUBJECTS.iter().find(|subject| subject.name == name).expect("there is such a store");
    part(subject)(Path::new(folder), rows.parse().expect("a number of rows"));
}

pub(super) fn after_kill(effort: Effort) -> Workload {
    let rows = effort.operations(1_000_000);
    let contender = |subject: &Subject| {
        let (name, mut killed) = (subject.name, None);
        Contender::new(name, move |meter| {
            round(meter, name, killed.get_or_insert_with(|| fill_and_kill(name, rows)), rows)
        })
    };
    Workload {
        name: "store-start",
        about: format!(
            "A process opens the store that was killed while it had {rows} rows of {} bytes and was being written, and reads one: \
             from the start of the process. Then it is killed itself. The files are in the cache of the system.",
            row::BYTES
        ),
        operation: "start",
        metrics: &[Metric::Wall],
        contenders: SUBJECTS.iter().map(contender).collect(),
    }
}

fn arguments(name: &str, folder: &TempDir, rows: u64) -> [String; 3] {
    [name.into(), folder.path().to_str().expect("a path that is text").into(), rows.to_string()]
}

fn fill_and_kill(name: &str, rows: u64) -> TempDir {
    let folder = folder::new();
    let mut process = FILL.start(&arguments(name, &folder, rows));
    for tenth in 1..=10 {
        // Waiting has its limit, which a slow disk might reach with all of them.
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
    let mut process = process.expect("it was started");
    let count: u64 = process.wait_for_line("has rows: ").parse().expect("a number of rows");
    assert!(count >= rows, "{count} rows are there, and {rows} were stored");
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
