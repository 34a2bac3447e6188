//! Recovery after the process was killed: acknowledged writes survive with the time and cause of their commits, and indexes agree
//! with rows.

use std::io::Write as _;
use std::thread;

use serde_json::{Value as Json, json};
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Cause, Position, Query, Store, StoreOptions, WriteOptions};
use tidewire_testkit::{PATIENCE, Process, is_rerun, rerun, wait_until};

const TEST: &str = "store::killed_process::acknowledged_writes_survive_a_kill";
const DIR: &str = "TIDEWIRE_STORE_KILL_DIR";
const WRITERS: u64 = 4;

fn open(dir: &str) -> Store {
    let options = StoreOptions::default()
        .embedded(EmbeddedOptions::default().segment_bytes(64 * 1024).checkpoint_log_bytes(96 * 1024));
    Store::open(dir, options).unwrap().0
}

/// Each writer increments a counter and inserts a record in one commit, and sometimes deletes the previous record.
fn write(dir: &str) {
    let store = open(dir);
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "group": {"type": "number"},
        "name": {"type": "string", "unique": true}}, "indexes": ["group"]});
    if store.snapshot().state.bucket("b").is_err() {
        store.define_bucket("b", config).wait().unwrap();
    }
    println!("opened");
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let store = &store;
            scope.spawn(move || {
                for n in counter(store, writer) + 1.. {
                    let step = store.write_with(WriteOptions::default().cause(cause(writer)), move |draft| {
                        draft.upsert("b", json!({"id": format!("counter-{writer}"), "n": n}))?;
                        if n % 3 == 0 {
                            draft.delete("b", &json!(format!("{writer}-{}", n - 1)), None)?;
                        }
                        let fill = "x".repeat(usize::try_from(n % 60).unwrap_or(0) * 8);
                        draft.insert(
                            "b",
                            json!({"id": format!("{writer}-{n}"), "group": n % 7,
                            "name": format!("name {writer}-{n}"), "fill": fill}),
                        )
                    });
                    step.wait().unwrap();
                    println!("acknowledged {writer} {n}");
                    std::io::stdout().flush().unwrap();
                }
            });
        }
    });
}

fn cause(writer: u64) -> Cause {
    Cause::of(writer + 1).next()
}

/// Checks that each commit in the history has the cause of its writer and the time of its records.
fn check_history(store: &Store) {
    let (position, commits) = (store.snapshot().position, store.stats().history_commits as u64);
    let first = Position { sequence: position.sequence - commits, ..position };
    let mut follower = store.follow_from(first).unwrap();
    while let Some(commit) = follower.try_next().unwrap() {
        let written =
            commit.changes.iter().filter(|change| *change.bucket == *"b").filter_map(|change| change.new.as_ref());
        for record in written.map(tidewire_store::Row::to_record) {
            let id = record["id"].as_str().unwrap();
            let writer = id.strip_prefix("counter-").or(id.split('-').next()).unwrap();
            assert_eq!(commit.cause, cause(writer.parse().unwrap()));
            assert_eq!(record["_updatedAt"], commit.at);
        }
    }
}

fn counter(store: &Store, writer: u64) -> u64 {
    let row = store.get("b", &json!(format!("counter-{writer}"))).unwrap();
    row.map_or(0, |row| row.to_record()["n"].as_u64().unwrap())
}

/// Returns the last acknowledged counter of each writer.
fn acknowledged(child: &Process) -> [u64; 4] {
    let mut last = [0; 4];
    for line in child.output().lines() {
        let mut words = line.strip_prefix("acknowledged ").into_iter().flat_map(|rest| rest.split(' '));
        if let (Some(writer), Some(n)) = (words.next(), words.next()) {
            last[writer.parse::<usize>().unwrap()] = n.parse().unwrap();
        }
    }
    last
}

fn query(store: &Store, query: &Json) -> Vec<Json> {
    store.query(&Query::parse(query).unwrap()).unwrap().into_records()
}

/// Checks that exactly the expected records are present, and that indexed queries return the same as full scans.
fn check(store: &Store, acknowledged: [u64; 4]) {
    if store.snapshot().state.bucket("b").is_err() {
        assert_eq!(acknowledged, [0; 4]);
        return;
    }
    let mut expected = 0;
    for writer in 0..WRITERS {
        let n = counter(store, writer);
        assert!(n >= acknowledged[usize::try_from(writer).unwrap()], "{n} of {acknowledged:?}");
        for own in 1..=n {
            let is_deleted = own % 3 == 2 && own < n;
            let row = store.get("b", &json!(format!("{writer}-{own}"))).unwrap();
            assert_eq!(row.is_none(), is_deleted, "{writer}-{own} of {n}");
            expected += u64::from(!is_deleted);
        }
        expected += u64::from(n > 0);
    }
    let all = query(store, &json!({"bucket": "b"}));
    assert_eq!(all.len() as u64, expected);
    for group in 0..7 {
        let found = query(store, &json!({"bucket": "b", "filter": {"group": group}}));
        assert!(found.iter().eq(all.iter().filter(|record| record["group"] == group)));
    }
    for record in all.iter().filter(|record| record.get("name").is_some()) {
        let found = query(store, &json!({"bucket": "b", "filter": {"name": record["name"]}}));
        assert_eq!(found, std::slice::from_ref(record));
    }
}

#[test]
fn acknowledged_writes_survive_a_kill() {
    if is_rerun() {
        return write(&std::env::var(DIR).unwrap());
    }
    let temporary = tempfile::tempdir().unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut rounds = 0;
    // A new directory is used after ten rounds, because the duration of a round grows with the number of rows.
    for life in 0..20 {
        let dir = temporary.path().join(life.to_string());
        let dir = dir.to_str().unwrap();
        for _ in 0..10 {
            let mut command = rerun(TEST);
            command.env(DIR, dir);
            let mut child = Process::spawn(command);
            // The process is killed at a random time: before, during or after opening.
            match rng.u8(..8) {
                0 => {}
                1 => drop(child.wait_for_line("opened")),
                _ => {
                    let enough = rng.usize(..150);
                    let lines = || child.output().lines().filter(|line| line.starts_with("acknowledged")).count();
                    wait_until("enough is acknowledged", PATIENCE, || lines() >= enough);
                }
            }
            child.kill();
            child.wait();
            let store = open(dir);
            check(&store, acknowledged(&child));
            check_history(&store);
            rounds += 1;
        }
    }
    assert_eq!(rounds, 200);
}
