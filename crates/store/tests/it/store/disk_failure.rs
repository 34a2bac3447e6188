//! Writes and reads while the disk fails or is full.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tidewire_store::engine::{Durability, EmbeddedOptions, OpenError};
use tidewire_store::{Store, StoreOpenError, StoreOptions, WriteError};
use tidewire_testkit::{PATIENCE, wait_until};

use super::{ids, open, options, plain};
use crate::engine::sim_disk::SimDisk;

fn open_on(disk: &SimDisk, options: StoreOptions) -> Store {
    Store::open_on(Arc::new(disk.clone()), Path::new("db"), options).unwrap().0
}

fn small_log() -> EmbeddedOptions {
    EmbeddedOptions::default().segment_bytes(16 << 10).checkpoint_log_bytes(32 << 10)
}

fn small() -> StoreOptions {
    options().embedded(small_log())
}

#[test]
fn failed_sync_stops_writes_but_not_reads() {
    let disk = SimDisk::default();
    let store = open_on(&disk, small());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert("b", json!({"id": 1})).wait().unwrap();
    let (_, mut follower) = store.follow();
    disk.fail_after(1, ErrorKind::Other);
    let unknown = store.insert("b", json!({"id": 2})).wait().unwrap_err();
    assert!(matches!(unknown, WriteError::Unknown(_)), "{unknown:?}");
    for _ in 0..2 {
        let stopped = store.insert("b", json!({"id": 3})).wait().unwrap_err();
        assert!(matches!(&stopped, WriteError::Stopped(_)), "{stopped:?}");
        assert_eq!(
            stopped.to_string(),
            "writes are rejected because the disk failed during an earlier write: repair the disk, then restart"
        );
    }
    // Reads do not return a write with an unknown outcome.
    assert_eq!(ids(&store, "b"), [1]);
    assert_eq!(follower.try_next(), Ok(None));
    assert!(store.stats().is_stopped && store.checkpoint().is_err());
    drop(store);
    let store = open_on(&disk, small());
    assert_eq!(ids(&store, "b")[0], 1);
    store.insert("b", json!({"id": 3})).wait().unwrap();
}

#[test]
fn full_disk_rejects_writes_until_space_is_free() {
    let disk = SimDisk::default();
    let store = open_on(&disk, small());
    store.define_bucket("b", plain()).wait().unwrap();
    disk.set_capacity(Some(100 << 10));
    let mut kept = Vec::new();
    let refused = loop {
        let id = kept.len();
        match store.insert("b", json!({"id": id, "x": "x".repeat(1000)})).wait() {
            Ok(_) => kept.push(json!(id)),
            Err(error) => break error,
        }
        assert!(kept.len() < 1000, "the disk has no space for so much data");
    };
    assert!(matches!(refused, WriteError::NotStored(_)), "{refused:?}");
    assert_eq!(ids(&store, "b"), kept);
    assert!(!store.stats().is_stopped && store.stats().not_kept > 0);
    disk.set_capacity(None);
    store.insert("b", json!({"id": kept.len()})).wait().unwrap();
    kept.push(json!(kept.len()));
    store.close().unwrap();
    assert_eq!(ids(&open_on(&disk, small()), "b"), kept);
}

/// If any disk operation fails, no acknowledged write is lost, and the store can be opened again.
#[test]
fn store_survives_any_failed_disk_operation() {
    let run = |disk: &SimDisk| {
        let mut kept = 0;
        let Ok((store, _)) = Store::open_on(Arc::new(disk.clone()), Path::new("db"), small()) else { return kept };
        if store.define_bucket("b", plain()).wait().is_err() {
            return kept;
        }
        for id in 0..60 {
            if store.insert("b", json!({"id": id, "x": "x".repeat(900)})).wait().is_err() {
                break;
            }
            kept += 1;
        }
        kept
    };
    let disk = SimDisk::default();
    assert_eq!(run(&disk), 60);
    for failing in 0..disk.writes() {
        let disk = SimDisk::default();
        disk.fail_after(failing, if failing % 2 == 0 { ErrorKind::StorageFull } else { ErrorKind::Other });
        let kept = run(&disk);
        // The failure may not have occurred yet, because the time of checkpoints varies.
        disk.fail_after(u64::MAX, ErrorKind::Other);
        let store = open_on(&disk, small());
        if let Ok(bucket) = store.snapshot().state.bucket("b") {
            assert!((kept..=kept + 1).contains(&bucket.len()), "{failing}: {} of {kept}", bucket.len());
        } else {
            assert_eq!(kept, 0);
        }
    }
}

#[test]
fn second_store_in_a_directory_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let refused = Store::open(dir.path(), options()).unwrap_err();
    assert!(matches!(refused, StoreOpenError::Engine(OpenError::Locked { .. })), "{refused}");
    drop(store);
    open(dir.path());
}

/// The rows were not written by a store.
#[test]
fn invalid_data_is_not_opened() {
    use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, Write, WriteSet};
    for (bucket, row, error) in [
        ("b", &b"{\"id\":1}"[..], "found rows of bucket \"b\", which is not defined"),
        (
            "$buckets",
            b"{\"name\":\"b\"}",
            "a row of bucket \"$buckets\" is invalid: the stored text is not a valid record",
        ),
        (
            "$buckets",
            b"{\"name\":\"b\",\"config\":{}}",
            "a row of bucket \"$buckets\" is invalid: key must be the name of a field",
        ),
        ("$queries", b"\xff", "a row of bucket \"$queries\" is invalid: the stored text is not a valid record"),
        ("$queries", b"[]", "a row of bucket \"$queries\" is invalid: the stored text is not a valid record"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (mut engine, _) = Embedded::open(dir.path(), EmbeddedOptions::default(), |_| {}).unwrap();
        let writes = [Write { bucket, key: b"", row: Some(row) }];
        engine.commit(&[WriteSet { writes: &writes, ..WriteSet::default() }]).unwrap();
        drop(engine);
        let refused = Store::open(dir.path(), options()).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("the data directory has data that is invalid for this version: {error}")
        );
    }
}

#[test]
fn interval_durability_syncs_in_the_background() {
    let disk = SimDisk::default();
    let options = options().embedded(small_log().durability(Durability::Interval(Duration::from_millis(1))));
    let store = open_on(&disk, options);
    store.define_bucket("b", plain()).wait().unwrap();
    let syncs = store.stats().engine.syncs;
    store.insert("b", json!({"id": 1})).wait().unwrap();
    tidewire_testkit::wait_until("it is synced", tidewire_testkit::PATIENCE, || store.stats().engine.syncs > syncs);
}

/// Automatic checkpoints are off, so the log grows until one is requested.
#[test]
fn long_log_slows_then_rejects_writes_until_a_checkpoint() {
    let disk = SimDisk::default();
    let options = options().embedded(small_log().checkpoint_log_bytes(u64::MAX).max_log_bytes(20_000));
    let store = open_on(&disk, options);
    store.define_bucket("b", plain()).wait().unwrap();
    let insert = |id: u64| store.insert("b", json!({"id": id, "x": "x".repeat(1000)})).wait();
    let refused = (0..100).find_map(|id| insert(id).err()).expect("the log is full after 100 writes");
    assert!(
        matches!(&refused, WriteError::NotStored(cause) if cause.to_string().contains("checkpoint")),
        "{refused:?}"
    );
    assert!(store.stats().engine.slowed > 0 && !store.stats().is_stopped);
    store.checkpoint().unwrap();
    insert(100).unwrap();
}

#[test]
fn checkpoint_is_counted_without_further_writes() {
    let store = open_on(&SimDisk::default(), small());
    store.define_bucket("b", plain()).wait().unwrap();
    for id in 0..11 {
        store.insert("b", json!({"id": id, "x": "x".repeat(3000)})).wait().unwrap();
    }
    wait_until("the checkpoint is counted", PATIENCE, || store.stats().engine.checkpoints == 1);
    store.checkpoint().unwrap();
    wait_until("a requested checkpoint is counted", PATIENCE, || store.stats().engine.checkpoints == 2);
}
