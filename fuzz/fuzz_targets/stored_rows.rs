//! Arbitrary bytes as stored rows, keys and definitions: a store either opens or returns an error about invalid data. A store that opened
//! opens again with the same content.

#![no_main]

use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tidewire_store::engine::{Embedded, EmbeddedOptions, Engine, Write, WriteSet};
use tidewire_store::query::Budget;
use tidewire_store::system::SystemBuckets;
use tidewire_store::{Query, Store, StoreOpenError, StoreOptions};

#[path = "../../crates/store/tests/it/engine/sim_disk.rs"]
mod disk;

use disk::SimDisk;

const BUCKETS: [&str; 6] = ["$buckets", "$queries", "$replies", "b", "x", "_system"];
const DEFINITION: &[u8] = br#"{"name":"b","config":{"key":"id","schema":{"id":{"type":"number"},"n":{"type":"number","unique":true,"generated":"autoincrement"}},"indexes":["n"],"ttl":1,"maxSize":3}}"#;
const SYSTEM: &[u8] = br#"{"name":"_system","config":{"key":"id","schema":{"id":{"type":"number"}}},"system":true}"#;

fn embedded() -> EmbeddedOptions {
    EmbeddedOptions::default().segment_bytes(64 * 1024)
}

/// Returns every bucket, row and query of the store as text.
fn content(store: &Store) -> String {
    let snapshot = store.snapshot();
    let mut text = String::new();
    let system = snapshot.state.system_bucket("_system").expect("the bucket is declared");
    for (name, bucket) in snapshot.state.buckets().chain([("_system", system)]) {
        text.push_str(name);
        for row in bucket.rows() {
            text.push_str(row.text());
        }
        let _ = Query::new(name).evaluate(bucket, 0, &Budget::unlimited());
        let _ = bucket.page(None, 10, &tidewire_store::Filter::everything(), 0, &Budget::unlimited());
    }
    for (name, config) in snapshot.state.queries() {
        text.push_str(&format!("{name}{config}"));
    }
    text
}

fuzz_target!(|data: &[u8]| {
    let disk = SimDisk::default();
    let open = || {
        let config =
            json!({"key": "id", "schema": {"id": {"type": "number"}, "n": {"type": "number", "unique": true}}});
        let buckets = SystemBuckets::default().declare("_system", &config).expect("the definition is valid");
        let options = StoreOptions::default().embedded(embedded()).sweep_interval(None).system_buckets(buckets);
        Store::open_on(Arc::new(disk.clone()), Path::new("db"), options)
    };
    let (mut engine, _) = Embedded::open_on(Arc::new(disk.clone()), Path::new("db"), embedded(), &mut |_| {})
        .expect("an empty disk opens");
    let defined = [DEFINITION, SYSTEM].map(|row| Write { bucket: "$buckets", key: b"", row: Some(row) });
    engine.commit(&[WriteSet { writes: &defined, ..WriteSet::default() }]).expect("the disk is not full");
    for piece in data.split(|byte| *byte == 0xff).take(64) {
        let Some((&[choice, kind], rest)) = piece.split_first_chunk() else { continue };
        let bucket = BUCKETS[usize::from(choice) % BUCKETS.len()];
        let write = match kind % 3 {
            0 => Write { bucket, key: rest, row: None },
            _ => Write { bucket, key: b"", row: Some(rest) },
        };
        engine.commit(&[WriteSet { writes: &[write], ..WriteSet::default() }]).expect("the disk is not full");
    }
    drop(engine);
    let first = match open() {
        Ok((store, _)) => content(&store),
        Err(StoreOpenError::InvalidData(_) | StoreOpenError::SystemBucket(_)) => return,
        Err(error) => panic!("{error}"),
    };
    let (store, _) = open().expect("the store opens again");
    assert_eq!(content(&store), first);
});
