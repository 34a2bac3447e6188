//! Random sequences of operations: failures have no effect, a restart preserves the state, and references do not dangle.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use serde_json::{Value as Json, json};
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Draft, Store, StoreError, StoreOptions};

use super::{clock, records};

const BUCKETS: [&str; 3] = ["a", "b", "c"];

fn config(rng: &mut Rng) -> Json {
    let on_delete = |rng: &mut Rng| *rng.choice(&["restrict", "cascade", "set_null"]).unwrap();
    let target = |rng: &mut Rng| *rng.choice(&BUCKETS).unwrap();
    let number = json!({"type": "number"});
    let reference = |rng: &mut Rng| json!({"type": "number", "ref": target(rng), "onDelete": on_delete(rng)});
    let id = if rng.bool() { json!({"type": "number", "generated": "autoincrement"}) } else { number.clone() };
    let mut config = json!({
        "key": if rng.u8(..3) == 0 { "u" } else { "id" },
        "schema": {"id": id, "u": {"type": "number", "unique": true}, "r": reference(rng), "s": reference(rng), "n": number},
    });
    if rng.bool() {
        config["indexes"] = json!(["n", ["r", "n"]]);
    }
    match rng.u8(..4) {
        0 => config["maxSize"] = json!(rng.u8(1..5)),
        1 => config["ttl"] = json!(rng.u16(1..60)),
        _ => {}
    }
    config
}

fn record(rng: &mut Rng) -> Json {
    let mut record = json!({"n": rng.u8(..4)});
    for (field, chance) in [("id", 6), ("u", 4), ("r", 2), ("s", 2)] {
        if rng.u8(..7) < chance {
            record[field] = if rng.u8(..9) == 0 { Json::Null } else { json!(rng.u8(1..8)) };
        }
    }
    if rng.u8(..9) == 0 {
        record["_expiresAt"] = rng.choice([json!(null), json!("x"), json!(-1), json!(1e300), json!(1050.5)]).unwrap();
    }
    record
}

fn step(draft: &mut Draft, rng: &mut Rng, drops: bool) -> Result<(), StoreError> {
    let bucket = *rng.choice(&BUCKETS).unwrap();
    let key = json!(rng.u8(1..8));
    match rng.u8(if drops { 0 } else { 6 }..40) {
        0 | 1 => draft.drop_bucket(bucket),
        2..=4 => draft.define_bucket(bucket, &config(rng)),
        5 => draft.update_bucket(bucket, &json!({"ttl": rng.u16(1..60), "addIndexes": ["u"]})),
        6 => draft.clear(bucket),
        7 => {
            draft.sweep(rng.usize(..4));
            Ok(())
        }
        8 => draft.define_query(rng.choice(["p", "q"]).unwrap(), &json!({"bucket": bucket})),
        9..=14 => draft.delete(bucket, &key, None).map(drop),
        15..=20 => draft.update(bucket, &key, record(rng), None).map(drop),
        21..=23 => draft.upsert(bucket, record(rng)).map(drop),
        24 => {
            let (key, record) = (rng.u8(..9).to_string(), record(rng));
            let work = |draft: &mut Draft| Ok(json!(draft.insert(bucket, record)?.to_record()));
            draft.once("u", &key, "r", work).map(drop)
        }
        _ => draft.insert(bucket, record(rng)).map(drop),
    }
}

/// Lists all records and definitions.
fn all(store: &Store) -> String {
    let mut lines = Vec::new();
    store.export(&mut lines).unwrap();
    String::from_utf8(lines).unwrap()
}

/// Describes a record with a dangling reference, if there is one.
fn dangling(store: &Store) -> Option<String> {
    let snapshot = store.snapshot();
    for (name, bucket) in snapshot.state.buckets() {
        for (field, rule) in &bucket.definition().fields {
            let Some(reference) = &rule.reference else { continue };
            let Ok(target) = snapshot.state.bucket(&reference.bucket) else { continue };
            for record in records(store, name) {
                let referred = &record[field];
                let exists = target.rows().any(|row| row.to_record()[&target.definition().key] == *referred);
                if !referred.is_null() && !exists {
                    return Some(format!("{record} of {name} by {field}"));
                }
            }
        }
    }
    None
}

fn run(seed: u64, drops: bool) {
    let mut rng = Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    let (clock, time): (_, Arc<AtomicU64>) = clock(1000);
    let options = StoreOptions::default().clock(clock).sweep_interval(None).embedded(
        EmbeddedOptions::default().segment_bytes(64 << 10).durability(tidewire_store::engine::Durability::None),
    );
    let open = || Store::open(dir.path(), options.clone()).unwrap().0;
    let mut store = open();
    if !drops {
        for bucket in BUCKETS {
            store.define_bucket(bucket, config(&mut rng)).wait().unwrap();
        }
    }
    for _ in 0..60 {
        time.fetch_add(rng.u64(..20), Ordering::Relaxed);
        let before = all(&store);
        let (seed, steps, fails) = (rng.u64(..), rng.u8(1..20), rng.u8(..3) == 0);
        let done = store.write(move |draft| {
            let mut rng = Rng::with_seed(seed);
            for _ in 0..steps {
                // A failed operation has no effect.
                let _ = step(draft, &mut rng, drops);
            }
            if fails { Err(StoreError::KeyReused { key: String::new() }) } else { Ok(()) }
        });
        if done.wait().is_err() {
            assert_eq!(all(&store), before, "seed {seed}");
        }
        if rng.u8(..5) == 0 {
            let before = all(&store);
            if rng.bool() {
                store.checkpoint().unwrap();
            }
            store.close().unwrap();
            drop(store);
            store = open();
            assert_eq!(all(&store), before, "seed {seed}");
        }
        if !drops {
            assert_eq!(dangling(&store), None, "seed {seed}");
        }
    }
}

#[test]
fn failed_writes_have_no_effect_and_restart_preserves_state() {
    for seed in 0..40 {
        run(seed, true);
    }
}

#[test]
fn references_never_dangle() {
    for seed in 0..40 {
        run(seed, false);
    }
}
