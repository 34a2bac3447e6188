//! Concurrent and failing writes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;

use serde_json::{Map, json};
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Store, StoreError, WriteError};

use super::{ids, open, options, plain, records, refusal};

#[test]
fn concurrent_writes_are_each_applied_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert("b", json!({"id": 0, "n": 0})).wait().unwrap();
    let (_, mut follower) = store.follow();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let add = store.write(|draft| {
                        let n = draft.get("b", &json!(0))?.map_or(0, |row| row.to_record()["n"].as_u64().unwrap());
                        draft.update("b", &json!(0), json!({"n": n + 1}), None)
                    });
                    let written = add.wait().unwrap().to_record()["_version"].as_u64();
                    // After the reply, reads return this write or a later one.
                    let read = store.get("b", &json!(0)).unwrap().unwrap().to_record()["_version"].as_u64();
                    assert!(read >= written);
                }
            });
        }
    });
    assert_eq!(records(&store, "b")[0]["n"], 1600);
    for n in 1..=1600 {
        let commit = follower.try_next().unwrap().unwrap();
        assert_eq!(commit.changes[0].new.as_ref().unwrap().to_record()["n"], n);
    }
    let stats = store.stats();
    assert!(stats.engine.groups < stats.engine.commits, "{stats:?}");
}

/// Blocks the writer until the returned sender is used or dropped.
pub(super) fn block_writer(store: &Store) -> mpsc::Sender<()> {
    let (release, released) = mpsc::channel::<()>();
    let barrier = Arc::new(Barrier::new(2));
    let reached = Arc::clone(&barrier);
    drop(store.write(move |_| {
        reached.wait();
        let _ = released.recv();
        Ok(())
    }));
    barrier.wait();
    release
}

#[test]
fn held_back_writes_wait_and_none_is_lost() {
    let options = options().queue(16);
    let store = Store::memory(options);
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let waiting: Vec<_> = (0..10).map(|id| store.insert("b", json!({"id": id}))).collect();
    assert_eq!(store.stats().waiting, 4);
    // Dropping a held-back write cancels it.
    drop(store.insert("b", json!({"id": 99})));
    release.send(()).unwrap();
    for pending in waiting {
        pending.wait().unwrap();
    }
    assert_eq!(ids(&store, "b"), (0..10).collect::<Vec<_>>());
    assert_eq!(store.stats().abandoned, 1);
}

#[test]
fn held_back_writes_fail_when_the_store_closes() {
    let options = options().queue(1);
    let store = Store::memory(options);
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let first = store.insert("b", json!({"id": 1}));
    let second = store.insert("b", json!({"id": 2}));
    let closing = store.clone();
    let closing = thread::spawn(move || closing.close());
    // The write fails when the queue is closed, although the writer is still blocked.
    assert!(matches!(second.wait(), Err(WriteError::Closed)));
    release.send(()).unwrap();
    assert!(first.wait().is_ok(), "a queued write is done");
    closing.join().unwrap().unwrap();
    assert!(matches!(store.insert("b", Map::new()).wait(), Err(WriteError::Closed)));
    assert!(store.checkpoint().is_err() && store.close().is_ok());
    assert_eq!(ids(&store, "b"), [1], "reads still work");
}

#[test]
fn panicking_write_fails_alone() {
    let store = Store::memory(options());
    store.define_bucket("b", plain()).wait().unwrap();
    let panicking = store.write(|draft| -> Result<(), StoreError> {
        draft.insert("b", json!({"id": 1}))?;
        panic!("on purpose");
    });
    assert!(matches!(panicking.wait(), Err(WriteError::Panicked)));
    store.insert("b", json!({"id": 2})).wait().unwrap();
    assert_eq!(ids(&store, "b"), [2]);
    assert_eq!(store.stats().refused, 1);
}

#[test]
fn too_large_commit_is_rejected_and_its_group_is_committed() {
    let dir = tempfile::tempdir().unwrap();
    let options = options().embedded(EmbeddedOptions::default().max_group_bytes(10_000));
    let (store, _) = Store::open(dir.path(), options).unwrap();
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let large = |id: u64, len: usize| store.insert("b", json!({"id": id, "x": "x".repeat(len)}));
    let pending: Vec<_> = [(1, 10), (2, 5000), (3, 10), (4, 4500), (5, 4500), (6, 4500)]
        .into_iter()
        .map(|(id, len)| large(id, len))
        .collect();
    release.send(()).unwrap();
    let results: Vec<bool> = pending
        .into_iter()
        .map(|pending| match pending.wait() {
            Ok(_) => true,
            Err(WriteError::TooLarge { max: 5000, len }) => len < 5000,
            Err(error) => panic!("{error}"),
        })
        .collect();
    assert_eq!(results, [true, false, true, true, true, true]);
    store.close().unwrap();
    let store = open(dir.path());
    assert_eq!(ids(&store, "b"), [1, 3, 4, 5, 6]);
    // Clearing a bucket is a small commit, regardless of the number of records.
    let many = (0..2000).map(|id| json!({"id": id}));
    store.insert_many("b", many).wait().unwrap();
    store.close().unwrap();
    let mut options = super::options();
    options.embedded.max_group_bytes = 10_000;
    let (store, _) = Store::open(dir.path(), options).unwrap();
    store.clear("b").wait().unwrap();
    store.close().unwrap();
    assert_eq!(open(dir.path()).stats().buckets[0].records, 0);
}

/// The last handle is dropped on the writer thread.
#[test]
fn write_can_drop_the_last_handle() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    let release = block_writer(&store);
    let last = store.clone();
    let pending = store.write(move |draft| {
        drop(last);
        draft.insert("b", json!({"id": 1}))
    });
    drop(store);
    release.send(()).unwrap();
    pending.wait().unwrap();
    let again = || Store::open(dir.path(), options()).is_ok();
    tidewire_testkit::wait_until("the directory is free", tidewire_testkit::PATIENCE, again);
    assert_eq!(ids(&open(dir.path()), "b"), [1]);
}

#[test]
fn dropping_the_last_handle_waits_for_writes() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    let done = Arc::new(AtomicU64::new(0));
    for id in 0..100 {
        let done = Arc::clone(&done);
        drop(store.write(move |draft| {
            done.fetch_add(1, Ordering::Relaxed);
            draft.insert("b", json!({"id": id}))
        }));
    }
    drop(store);
    assert_eq!(done.load(Ordering::Relaxed), 100);
    assert_eq!(ids(&open(dir.path()), "b").len(), 100);
}

#[test]
fn record_that_is_not_an_object_is_rejected() {
    let store = Store::memory(options());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert("b", json!({"id": 1})).wait().unwrap();
    for wrong in [json!(null), json!(7), json!("{}"), json!([{"id": 2}])] {
        let invalid = |refused: StoreError| {
            assert!(matches!(&refused, StoreError::Validation(error) if error.issues[0].code == "type"), "{refused:?}");
            assert_eq!(refused.to_string(), "Validation failed for bucket \"b\": a record must be an object");
        };
        invalid(refusal(store.insert("b", wrong.clone()).wait()));
        invalid(refusal(store.upsert("b", wrong.clone()).wait()));
        invalid(refusal(store.update("b", 1, wrong.clone(), None).wait()));
        let StoreError::Record { index: 1, source } =
            refusal(store.insert_many("b", [json!({"id": 3}), wrong.clone()]).wait())
        else {
            panic!("{wrong} was accepted")
        };
        invalid(*source);
        invalid(refusal(store.write(|draft| draft.insert("b", json!({"id": 4})).and(draft.insert("b", wrong))).wait()));
    }
    assert_eq!(records(&store, "b").len(), 1);
    assert!(store.update("b", 1, Map::new(), Some(1)).wait().is_ok());
    assert!(store.delete("b", 1, None).wait().unwrap());
}
