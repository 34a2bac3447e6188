//! Data directories written by earlier versions.
//!
//! `tests/fixtures/log-v1` was written by the last version that logged commits without time and cause: a store that was closed
//! after a checkpoint, a store that was killed, and a log of the engine alone.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Cause, Position, Store, StoreOptions, WriteOptions};

use super::{ids, records};

/// Copies a fixture, because opening a directory writes to it.
fn copied(name: &str, to: &Path) -> PathBuf {
    let dir = to.join(name);
    fs::create_dir(&dir).unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/log-v1").join(name);
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    dir
}

fn open(dir: &Path) -> (Store, tidewire_store::engine::Recovery) {
    let options = StoreOptions::default()
        .embedded(EmbeddedOptions::default().segment_bytes(8 * 1024))
        .sweep_interval(None)
        .clock(tidewire_store::Clock::new(|| 1_700_000_100_000));
    Store::open(dir, options).unwrap()
}

/// Checks the rows, the named query and the definitions of the fixture.
fn check(store: &Store) {
    assert_eq!(store.snapshot().state.names().collect::<Vec<_>>(), ["ports", "ships"]);
    let ports = records(store, "ports");
    let expected = [
        json!({"name": "Brest", "depth": 12, "id": 1, "_version": 1, "_createdAt": 1_700_000_001_000_u64,
            "_updatedAt": 1_700_000_001_000_u64}),
        json!({"name": "Dover", "depth": 8, "id": 3, "_version": 2, "_createdAt": 1_700_000_003_000_u64,
            "_updatedAt": 1_700_000_005_000_u64}),
    ];
    assert_eq!(ports[..2], expected);
    assert_eq!(ids(store, "ports"), [1, 3, 4, 5, 6]);
    assert_eq!(ids(store, "ships"), ["Albatros", "Corbeau"], "one was deleted with its port");
    let deep = store.query_named("deep", json!({"least": 9}).as_object().unwrap()).unwrap();
    let deep = deep.into_records();
    let names: Vec<_> = deep.iter().map(|record| record["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["Brest", "Gdynia", "Esbjerg"]);
}

#[test]
fn directory_with_a_version_1_log_is_opened_and_written() {
    for (name, epoch, first, is_closed) in
        [("closed", 0xb7b7_244a_3356_8fcc, 9, true), ("unclosed", 0xf53d_1360_87b8_8514, 0, false)]
    {
        let temporary = tempfile::tempdir().unwrap();
        let dir = copied(name, temporary.path());
        let (store, recovery) = open(&dir);
        assert_eq!(recovery.position, Position { epoch, sequence: 13 });
        assert_eq!((recovery.is_new_epoch, recovery.was_closed, recovery.torn_tail), (false, is_closed, None));
        assert_eq!((recovery.commits, recovery.rows > 0), (13 - first, is_closed));
        check(&store);

        // The old commits are in the history, without time and cause.
        let old = Position { epoch, sequence: first };
        let commits = |store: &Store| {
            let mut follower = store.follow_from(old).unwrap();
            let all = std::iter::from_fn(|| follower.try_next().unwrap());
            all.map(|commit| (commit.at, commit.cause)).collect::<Vec<_>>()
        };
        let mut expected = vec![(0, Cause::default()); usize::try_from(13 - first).unwrap()];
        assert_eq!(commits(&store), expected);

        // Writes continue over several segments, and new commits have time and cause.
        for id in 7..60_u64 {
            let record = json!({"name": format!("port {id}"), "x": "x".repeat(200)});
            let written = store
                .write_with(WriteOptions::default().cause(Cause::of(id)), |draft| draft.insert("ports", record))
                .wait()
                .unwrap();
            assert_eq!(written.to_record()["id"], id);
            expected.push((1_700_000_100_000, Cause::of(id)));
        }
        assert!(store.delete("ports", json!(1), None).wait().unwrap());
        expected.push((1_700_000_100_000, Cause::default()));
        store.insert("ports", json!({"name": "Dover"})).wait().unwrap_err();
        store.close().unwrap();
        let (store, recovery) = open(&dir);
        assert_eq!(recovery.position, Position { epoch, sequence: 13 + 54 });
        assert_eq!(commits(&store), expected);
        assert_eq!((ids(&store, "ports").len(), ids(&store, "ships")), (57, vec![json!("Corbeau")]));
        // After a checkpoint, recovery reads no segment of the old layout.
        store.checkpoint().unwrap();
        store.close().unwrap();
        let (store, recovery) = open(&dir);
        assert_eq!((recovery.commits, ids(&store, "ports").len()), (0, 57));
    }
}
