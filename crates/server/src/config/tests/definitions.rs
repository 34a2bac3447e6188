//! Applying the definitions of a file to stores on disk.

use std::path::Path;

use serde_json::json;
use tidewire_store::{Store, StoreOptions};

use super::*;
use crate::config::{Definition, DefinitionError, apply};

fn open(dir: &Path) -> Store {
    Store::open(dir, StoreOptions::default()).unwrap().0
}

fn applied(store: &Store, config: &Config) -> Result<Vec<String>, String> {
    match apply(store, &config.buckets, &config.queries) {
        Ok(applied) => Ok(applied
            .iter()
            .map(|one| format!("{} {} {:?}", one.kind, one.name, one.outcome).to_lowercase())
            .collect()),
        Err(error) => Err(error.to_string()),
    }
}

fn users(field: &Json) -> Json {
    json!({"key": "id", "schema": {"id": {"type": "number"}, "name": field}})
}

fn record(json: Json) -> serde_json::Map<String, Json> {
    serde_json::from_value(json).unwrap()
}

#[test]
fn changed_file_is_applied_at_the_next_start() {
    let fixture = Fixture::new();
    let dir = fixture.dir.path().join("data");
    let text = json!({"type": "string"});
    let first =
        json!({"buckets": {"users": users(&text)}, "queries": {"all": {"bucket": "users", "sort": {"name": "asc"}}}});

    let store = open(&dir);
    let config = fixture.config(&first);
    assert_eq!(applied(&store, &config).unwrap(), ["bucket users created", "query all created"]);
    store.insert("users", record(json!({"id": 1, "name": "ann", "age": 7}))).wait().unwrap();
    store.define_bucket("wire", users(&text)).wait().unwrap();
    store.close().unwrap();

    // The same file again writes nothing.
    let store = open(&dir);
    let position = store.snapshot().position;
    assert_eq!(applied(&store, &config).unwrap(), ["bucket users unchanged", "query all unchanged"]);
    assert_eq!(store.snapshot().position, position);
    store.close().unwrap();

    let mut second = first.clone();
    second["buckets"]["users"]["schema"]["age"] = json!({"type": "number"});
    second["buckets"]["users"]["indexes"] = json!(["age"]);
    second["buckets"]["users"]["ttl"] = json!("1h");
    second["queries"]["all"]["limit"] = json!(10);
    second["queries"]["young"] = json!({"bucket": "users", "filter": {"age": {"$lt": 10}}});
    let store = open(&dir);
    let config = fixture.config(&second);
    assert_eq!(applied(&store, &config).unwrap(), ["bucket users updated", "query all updated", "query young created"]);
    store.close().unwrap();

    let store = open(&dir);
    assert_eq!(
        applied(&store, &config).unwrap(),
        ["bucket users unchanged", "query all unchanged", "query young unchanged"]
    );
    let snapshot = store.snapshot();
    assert_eq!(snapshot.state.bucket("users").unwrap().definition().config, second["buckets"]["users"]);
    assert_eq!(snapshot.state.bucket("users").unwrap().len(), 1);
    assert_eq!(snapshot.state.query_config("all").unwrap()["limit"], 10);
    assert!(snapshot.state.bucket("wire").is_ok(), "buckets defined by clients are kept");
}

#[test]
fn incompatible_definitions_are_rejected_and_change_nothing() {
    let fixture = Fixture::new();
    let dir = fixture.dir.path().join("data");
    let store = open(&dir);
    let old = fixture.config(&json!({"buckets": {"users": users(&json!({"type": "string"}))}}));
    applied(&store, &old).unwrap();
    store.close().unwrap();

    let store = open(&dir);
    let position = store.snapshot().position;
    let text = "[buckets.new]\nkey = 'id'\nschema.id.type = 'number'\n\n[buckets.users]\nkey = 'name'\n\
                schema.id.type = 'number'\nschema.name.type = 'number'\nschema.age.type = 'number'\n\n\
                [queries.lost]\nbucket = 'nowhere'\n";
    let file = fixture.file("c.toml", text);
    let config = fixture.load(&["--config", &file]).unwrap();
    let error = applied(&store, &config).unwrap_err().replace(&format!("{}/", fixture.dir.path().display()), "");
    let expected = "c.toml:5:1: bucket \"users\": the stored definition differs in keys that cannot be changed; only fields and \
                    indexes can be added, and `ttl` can be changed. Change the file, or drop the bucket\n  \
                    key: stored \"id\", file \"name\"\n  \
                    schema.name.type: stored \"string\", file \"number\"\n\
                    c.toml:11:1: query \"lost\": ";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(store.snapshot().position, position);
    assert!(store.snapshot().state.bucket("new").is_err());
    // The old file still works.
    assert_eq!(applied(&store, &old).unwrap(), ["bucket users unchanged"]);
}

#[test]
fn update_that_stored_records_violate_is_rejected() {
    let fixture = Fixture::new();
    let store = open(&fixture.dir.path().join("data"));
    let id = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    applied(&store, &fixture.config(&json!({"buckets": {"users": id}}))).unwrap();
    for key in [1, 2] {
        store.insert("users", record(json!({"id": key, "name": "ann"}))).wait().unwrap();
    }
    let unique = users(&json!({"type": "string", "unique": true}));
    let config = fixture.config(&json!({"buckets": {"a": id, "users": unique}}));
    let error = applied(&store, &config).unwrap_err();
    assert!(error.contains("c.json:1:") && error.contains("bucket \"users\""), "{error}");
    assert!(store.snapshot().state.bucket("a").is_err());
}

#[test]
fn closed_store_is_an_error() {
    let store = Store::memory(StoreOptions::default());
    store.close().unwrap();
    let bucket = Definition::new("users", users(&json!({"type": "string"})), None);
    assert!(matches!(apply(&store, &[bucket], &[]), Err(DefinitionError::Store(_))));
}
