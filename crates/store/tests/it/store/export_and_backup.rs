//! Backups, exports and imports.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::json;
use tidewire_store::engine::{Embedded, EmbeddedOptions, EngineError};
use tidewire_store::{MaintenanceError, Store};

use super::{ids, open, options, plain, records};

fn filled(store: &Store) {
    store
        .define_bucket("b", json!({"key": "id", "schema": {"id": {"type": "number"}}, "indexes": ["id"]}))
        .wait()
        .unwrap();
    let refers = json!({"key": "id", "schema": {"id": {"type": "number"}, "to": {"type": "number", "ref": "late"}}});
    store.define_bucket("refers", refers).wait().unwrap();
    store.define_bucket("late", plain()).wait().unwrap();
    store.define_query("q", json!({"bucket": "b", "filter": {"id": "{{ params.id }}"}})).wait().unwrap();
    let record = |id| json!({"id": id, "text": "\"tide\"\n", "x": "x".repeat(500)});
    store.insert_many("b", (0..3000).map(record)).wait().unwrap();
    store.update("b", json!(7), json!({"text": null}), None).wait().unwrap();
    store.insert("late", json!({"id": 1})).wait().unwrap();
    store.insert("refers", json!({"id": 1, "to": 1})).wait().unwrap();
}

#[test]
fn export_and_import_reproduce_the_store() {
    let store = Store::memory(options());
    filled(&store);
    let mut exported = Vec::new();
    let counts = store.export(&mut exported).unwrap();
    assert_eq!((counts.buckets, counts.queries, counts.records), (3, 1, 3002));
    let dir = tempfile::tempdir().unwrap();
    let copy = open(dir.path());
    assert_eq!(copy.import(&exported[..]).unwrap(), counts);
    copy.close().unwrap();
    let copy = open(dir.path());
    for bucket in ["b", "refers", "late"] {
        assert_eq!(records(&copy, bucket), records(&store, bucket));
    }
    let mut again = Vec::new();
    copy.export(&mut again).unwrap();
    assert!(again == exported, "the exports are identical");
    // A second import defines nothing new and overwrites the records.
    let counts = copy.import(&exported[..]).unwrap();
    assert_eq!((counts.buckets, counts.queries, counts.records), (0, 0, 3002));
    let mut again = Vec::new();
    copy.export(&mut again).unwrap();
    assert!(again == exported);
}

#[test]
fn invalid_import_is_rejected_with_its_line() {
    let head = r#"{"tidewire":"export","version":1}"#;
    let bucket = r#"{"bucket":"b","config":{"key":"id","schema":{"id":{"type":"number"}}}}"#;
    let record = r#"{"in":"b","record":{"id":1}}"#;
    let long = format!(r#"{{"in":"b","record":{{"id":1,"x":"{}"}}}}"#, "x".repeat(2 << 20));
    for (lines, line, error, records) in [
        (vec![], 1, "expected the header {\"tidewire\":\"export\",\"version\":1}", 0),
        (vec!["nothing"], 1, "expected the header {\"tidewire\":\"export\",\"version\":1}", 0),
        (
            vec![r#"{"tidewire":"export","version":2}"#],
            1,
            "expected the header {\"tidewire\":\"export\",\"version\":1}",
            0,
        ),
        (vec![head, bucket, "nothing"], 3, "invalid JSON", 0),
        (
            vec![head, bucket, "[]"],
            3,
            "expected a bucket, a system bucket, a query, a record or the end of the export",
            0,
        ),
        (
            vec![head, bucket, r#"{"in":"b"}"#],
            3,
            "expected a bucket, a system bucket, a query, a record or the end of the export",
            0,
        ),
        (
            vec![head, bucket, record, record],
            5,
            "the export is incomplete: read 2 records and found no matching end line",
            2,
        ),
        (
            vec![head, bucket, record, r#"{"end":2}"#],
            4,
            "the export is incomplete: read 1 records and found no matching end line",
            1,
        ),
        (
            vec![head, bucket, record, r#"{"in":"b","record":{"id":"x"}}"#, record, r#"{"end":3}"#],
            4,
            "the store rejected the line",
            0,
        ),
        (vec![head, record, r#"{"end":1}"#], 2, "the store rejected the line", 0),
        (vec![head, bucket, &long], 3, "the line is longer than 1052672 bytes", 0),
    ] {
        let store = Store::memory(options());
        let refused = store.import(lines.join("\n").as_bytes()).unwrap_err();
        assert_eq!((refused.to_string(), refused.imported.records), (format!("line {line}: {error}"), records));
        let there = store.stats().buckets.first().map_or(0, |bucket| bucket.records);
        assert_eq!(there > 0, records > 0);
    }
    let store = Store::memory(options());
    store.define_bucket("b", json!({"key": "x", "schema": {"x": {"type": "number"}}})).wait().unwrap();
    let refused = store.import([head, bucket].join("\n").as_bytes()).unwrap_err();
    assert_eq!(refused.line, 2);
}

#[test]
fn backup_during_writes_can_be_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (data, backup, restored) = (dir.path().join("data"), dir.path().join("backup"), dir.path().join("restored"));
    let store = open(&data);
    filled(&store);
    let filled = store.snapshot().position.sequence;
    let stop = AtomicBool::new(false);
    let (position, before) = thread::scope(|scope| {
        scope.spawn(|| {
            for id in 3000.. {
                store.insert("b", json!({"id": id})).wait().unwrap();
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let before = store.snapshot().position;
        let position = store.backup(&backup).unwrap();
        stop.store(true, Ordering::Relaxed);
        (position, before)
    });
    assert!(position.sequence >= before.sequence && position.epoch == before.epoch);
    assert!(matches!(store.backup(&backup), Err(MaintenanceError::Backup(_))), "the directory is not empty");
    Embedded::restore(&backup, &restored, EmbeddedOptions::default()).unwrap();
    assert!(Embedded::restore(&backup, &restored, EmbeddedOptions::default()).is_err());
    let copy = open(&restored);
    let snapshot = copy.snapshot();
    assert_eq!(snapshot.position.sequence, position.sequence);
    assert_ne!(snapshot.position.epoch, position.epoch, "the copy has a new epoch");
    // The copy has exactly the commits up to the position.
    let there = ids(&copy, "b");
    let until = 3000 + position.sequence - filled;
    assert!(there == (0..until).map(|id| json!(id)).collect::<Vec<_>>(), "{} of {until}", there.len());
    copy.insert("b", json!({"id": -1})).wait().unwrap();
    // The backup is unchanged and can be restored again.
    let again = dir.path().join("again");
    Embedded::restore(&backup, &again, EmbeddedOptions::default()).unwrap();
    assert_eq!(ids(&open(&again), "b"), there);
    let nothing = dir.path().join("nothing");
    assert!(Embedded::restore(&nothing, &dir.path().join("x"), EmbeddedOptions::default()).is_err());
}

#[test]
fn closed_store_is_backed_up_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (data, backup, restored) = (dir.path().join("data"), dir.path().join("backup"), dir.path().join("restored"));
    let store = open(&data);
    filled(&store);
    let position = store.snapshot().position;
    let locked = Embedded::backup_dir(&data, &backup).unwrap_err();
    assert!(locked.to_string().contains("is locked"), "{locked}");
    let before = records(&store, "b");
    store.close().unwrap();
    assert_eq!(Embedded::backup_dir(&data, &backup).unwrap(), position);
    let recovery = Embedded::restore(&backup, &restored, EmbeddedOptions::default()).unwrap();
    assert_eq!(recovery.position.sequence, position.sequence);
    let copy = open(&restored);
    assert_eq!(copy.snapshot().position, recovery.position);
    assert!(records(&copy, "b") == before);
    assert!(copy.follow_from(position).is_err(), "positions of the original are not those of the copy");
    copy.insert("b", json!({"id": -1})).wait().unwrap();
    assert!(records(&open(&data), "b") == before);
}

#[test]
fn store_in_memory_is_exported_but_not_backed_up() {
    let dir = tempfile::tempdir().unwrap();
    let refused = Store::memory(options()).backup(dir.path()).unwrap_err();
    assert!(matches!(refused, MaintenanceError::Engine(EngineError::NotPersistent)));
}
