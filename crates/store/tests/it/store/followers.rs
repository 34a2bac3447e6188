//! Followers.

use std::thread;

use serde_json::json;
use tidewire_store::{Cause, Commit, FollowError, Position, Store, WriteOptions};

use super::{TestClock, open, options, plain};

#[test]
fn follower_sees_every_commit_after_its_start() {
    let store = Store::memory(options());
    store.define_bucket("b", plain()).wait().unwrap();
    let writer = store.clone();
    let writer = thread::spawn(move || {
        for id in 0..2000 {
            writer
                .write_with(WriteOptions::default().cause(Cause::of(7)), move |draft| {
                    draft.insert("b", json!({"id": id}))
                })
                .wait()
                .unwrap();
        }
    });
    let followers: Vec<_> = (0..4)
        .map(|_| {
            let store = store.clone();
            thread::spawn(move || {
                let (snapshot, mut follower) = store.follow();
                let mut seen = snapshot.state.bucket("b").unwrap().len();
                while seen < 2000 {
                    let before = follower.position();
                    let commit = follower.wait().unwrap();
                    assert_eq!(commit.position.sequence, before.sequence + 1);
                    assert_eq!(commit.changes[0].new.as_ref().unwrap().to_record()["id"], seen);
                    assert_eq!(commit.cause, Cause::of(7));
                    seen += 1;
                }
            })
        })
        .collect();
    writer.join().unwrap();
    for follower in followers {
        follower.join().unwrap();
    }
    assert_eq!(Cause::of(7).next().next().depth, 2);
}

#[test]
fn slow_follower_gets_an_error_and_starts_again() {
    let options = options().history_bytes(10_000);
    let store = Store::memory(options);
    store.define_bucket("b", plain()).wait().unwrap();
    let (_, mut follower) = store.follow();
    let began = follower.position();
    let insert = |id: u64| store.insert("b", json!({"id": id, "x": "x".repeat(200)})).wait().unwrap();
    (0..100).for_each(|id| drop(insert(id)));
    assert_eq!(follower.try_next(), Err(FollowError::Behind { position: began }));
    assert_eq!(store.follow_from(began).unwrap_err(), FollowError::Behind { position: began });
    let stats = store.stats();
    assert!(stats.history_bytes <= 10_000 && stats.history_commits > 5 && stats.followers_behind == 1, "{stats:?}");
    let (snapshot, mut follower) = store.follow();
    assert_eq!(snapshot.state.bucket("b").unwrap().len(), 100);
    insert(100);
    assert!(follower.try_next().unwrap().is_some());
    // The history does not keep a single commit that exceeds its limit.
    store.insert("b", json!({"id": 101, "x": "x".repeat(20_000)})).wait().unwrap();
    assert!(matches!(follower.try_next(), Err(FollowError::Behind { .. })));
    assert!(store.follow().1.try_next().unwrap().is_none());
}

#[test]
fn positions_of_other_histories_are_rejected() {
    let store = Store::memory(options());
    let position = store.snapshot().position;
    for wrong in [Position { epoch: position.epoch ^ 1, ..position }, Position { sequence: 1, ..position }] {
        assert_eq!(store.follow_from(wrong).unwrap_err(), FollowError::Unknown { position: wrong });
    }
}

#[test]
fn follower_resumes_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert("b", json!({"id": 1, "x": 1})).wait().unwrap();
    let position = store.snapshot().position;
    store.update("b", json!(1), json!({"x": 2}), None).wait().unwrap();
    store.insert("b", json!({"id": 2})).wait().unwrap();
    store.delete("b", json!(1), None).wait().unwrap();
    store.clear("b").wait().unwrap();
    store.drop_bucket("b").wait().unwrap();
    let all = |store: &Store| {
        let mut follower = store.follow_from(position).unwrap();
        std::iter::from_fn(|| follower.try_next().unwrap()).map(|commit| commit.changes.clone()).collect::<Vec<_>>()
    };
    let before = all(&store);
    assert_eq!(before.len(), 5);
    store.close().unwrap();
    let mut follower = store.follow_from(position).unwrap();
    for _ in 0..5 {
        follower.try_next().unwrap().unwrap();
    }
    assert_eq!(follower.wait(), Err(FollowError::Closed));
    let store = open(dir.path());
    assert_eq!(all(&store), before, "old rows and ordinals included");
    store.checkpoint().unwrap();
    store.close().unwrap();
    let store = open(dir.path());
    assert_eq!(store.follow_from(position).unwrap_err(), FollowError::Behind { position });
}

/// Returns the commits after a position.
fn commits_after(store: &Store, position: Position) -> Vec<Commit> {
    let mut follower = store.follow_from(position).unwrap();
    std::iter::from_fn(|| follower.try_next().unwrap()).map(|commit| (*commit).clone()).collect()
}

#[test]
fn commit_keeps_time_and_cause_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let clock = TestClock::new(5000);
    let open = || {
        let options = options().clock(clock.clock());
        Store::open(dir.path(), options).unwrap().0
    };
    let store = open();
    let start = store.snapshot().position;
    store.define_bucket("b", plain()).wait().unwrap();
    for id in 0..20_u32 {
        clock.set(6000 + u64::from(id));
        let cause = (0..id).fold(Cause::of(u64::MAX - u64::from(id)), |cause, _| cause.next());
        store
            .write_with(WriteOptions::default().cause(cause), move |draft| draft.insert("b", json!({"id": id})))
            .wait()
            .unwrap();
    }
    let before = commits_after(&store, start);
    assert_eq!((before[0].at, before[0].cause), (5000, Cause::default()));
    assert_eq!((before[20].at, before[20].cause.origin, before[20].cause.depth), (6019, u64::MAX - 19, 19));
    drop(store);
    clock.set(9000);
    let store = open();
    assert_eq!(commits_after(&store, start), before);
    // The commits after a checkpoint are logged in the same way.
    store.checkpoint().unwrap();
    let checkpoint = store.snapshot().position;
    store.write_with(WriteOptions::default().cause(Cause::of(3)), |draft| draft.clear("b")).wait().unwrap();
    store.close().unwrap();
    let after = commits_after(&open(), checkpoint);
    assert_eq!((after.len(), after[0].at, after[0].cause), (1, 9000, Cause::of(3)));
}
