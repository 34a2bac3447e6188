//! System buckets, which only the program that declares them can access.

use std::io::Write as _;
use std::path::Path;

use serde_json::{Map, Value as Json, json};
use tidewire_store::engine::{Embedded, EmbeddedOptions};
use tidewire_store::query::Budget;
use tidewire_store::system::{BUCKETS, Incompatibility, SystemBucketError, SystemBuckets};
use tidewire_store::transaction::Operation;
use tidewire_store::{
    Draft, Filter, ImportProblem, Query, Row, Store, StoreError, StoreOpenError, StoreOptions, WriteError,
};
use tidewire_testkit::{PATIENCE, Process, is_rerun, rerun, wait_until};

use super::{TestClock, ids, plain};

fn audit() -> Json {
    json!({"key": "id", "schema": {
        "id": {"type": "number", "generated": "autoincrement"},
        "event": {"type": "string", "required": true},
    }, "indexes": ["event"]})
}

fn roles() -> Json {
    json!({"key": "name", "schema": {
        "name": {"type": "string"},
        "rank": {"type": "number", "unique": true},
        "parent": {"type": "string", "ref": "_roles", "onDelete": "cascade"},
    }})
}

fn declared() -> StoreOptions {
    declaring(&[("$audit", audit()), ("_roles", roles())])
}

fn declaring(buckets: &[(&str, Json)]) -> StoreOptions {
    let declare = |declared: SystemBuckets, (name, config): &(&str, Json)| declared.declare(name, config).unwrap();
    StoreOptions::default().system_buckets(buckets.iter().fold(SystemBuckets::default(), declare))
}

fn open(dir: &Path) -> Store {
    Store::open(dir, declared()).unwrap().0
}

/// Runs a test with each engine. `reopen` restarts a persistent store, and returns a store in memory unchanged.
fn with_each_engine(test: impl Fn(Store, &dyn Fn(Store) -> Store)) {
    test(Store::memory(declared()), &|store| store);
    for has_checkpoint in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        test(open(dir.path()), &|store| {
            if has_checkpoint {
                store.checkpoint().unwrap();
            }
            store.close().unwrap();
            open(dir.path())
        });
    }
}

fn insert(store: &Store, bucket: &'static str, record: Json) -> Result<Row, WriteError> {
    store.write(move |draft| draft.system(|draft| draft.insert(bucket, record))).wait()
}

/// Returns the records of a system bucket.
fn stored(store: &Store, bucket: &str) -> Vec<Json> {
    let snapshot = store.snapshot();
    let rows = snapshot.state.system_bucket(bucket).unwrap().rows().map(Row::to_record);
    rows.map(Json::Object).collect()
}

fn not_defined(bucket: &str) -> StoreError {
    StoreError::BucketNotDefined { bucket: bucket.to_owned() }
}

#[test]
fn invalid_declaration_is_rejected() {
    let refused = |name: &str, config: Json| {
        SystemBuckets::default().declare("$first", &plain()).unwrap().declare(name, &config).unwrap_err()
    };
    let long = format!("${}", "x".repeat(255));
    for name in ["", "$", "_", "audit", "$buckets", "$queries", "$replies", &long] {
        let error = refused(name, plain());
        assert!(matches!(error, SystemBucketError::Name { max: 255, .. }), "{name}: {error}");
    }
    assert_eq!(refused("$first", plain()), SystemBucketError::Duplicate { name: "$first".to_owned() });
    let error = refused("$x", json!({"key": "id"}));
    assert_eq!(error.to_string(), "system bucket \"$x\": schema must be an object of fields");
    let refers = |target: &str| json!({"key": "id", "schema": {"id": {"type": "number"}, "to": {"type": "number", "ref": target}}});
    assert_eq!(
        refused("$x", refers("users")).to_string(),
        "system bucket \"$x\": field to references \"users\"; expected a system bucket that is declared before it"
    );
    let mut deep = json!({});
    for _ in 0..120 {
        deep = json!({"x": deep});
    }
    let deep = json!({"key": "id", "schema": {"id": {"type": "number"}, "o": {"type": "object", "default": deep}}});
    assert!(matches!(refused("$x", deep), SystemBucketError::NotStored { .. }));
    SystemBuckets::default().declare("$a", &refers("$a")).unwrap().declare("_b", &refers("$a")).unwrap();
}

#[test]
fn system_buckets_are_hidden_from_ordinary_requests() {
    with_each_engine(|store, reopen| {
        insert(&store, "$audit", json!({"event": "start"})).unwrap();
        insert(&store, "_roles", json!({"name": "admin", "rank": 1})).unwrap();
        store.define_bucket("b", plain()).wait().unwrap();
        let store = reopen(store);
        let before = (stored(&store, "$audit"), stored(&store, "_roles"));
        let snapshot = store.snapshot();
        assert_eq!(snapshot.state.names().collect::<Vec<_>>(), ["b"]);
        assert_eq!(snapshot.state.buckets().map(|(name, _)| name).collect::<Vec<_>>(), ["b"]);
        assert_eq!(store.stats().buckets.iter().map(|bucket| &bucket.name[..]).collect::<Vec<_>>(), ["b"]);
        for (name, key) in [("$audit", json!(1)), ("_roles", json!("admin"))] {
            assert_eq!(snapshot.state.bucket(name).err(), Some(not_defined(name)));
            assert_eq!(store.get(name, &key).err(), Some(not_defined(name)));
            assert_eq!(store.query(&Query::new(name)).err(), Some(not_defined(name)));
            assert_every_operation_fails(&store, name, &key);
        }
        assert_eq!((stored(&store, "$audit"), stored(&store, "_roles")), before);
        // Undeclared names that begin with an underscore can be used by ordinary buckets.
        store.define_bucket("_mine", plain()).wait().unwrap();
        assert_eq!(store.snapshot().state.names().collect::<Vec<_>>(), ["b", "_mine"]);
        let refused = store.define_bucket("$mine", plain()).wait().unwrap_err();
        assert!(matches!(refused, WriteError::Refused(StoreError::Name { .. })), "{refused}");
    });
}

/// Checks that every operation of a draft fails on an inaccessible name.
fn assert_every_operation_fails(store: &Store, name: &'static str, key: &Json) {
    type Work = Box<dyn FnOnce(&mut Draft) -> Result<(), StoreError> + Send>;
    let record = || json!({"id": 1, "name": "admin", "event": "x"});
    let all = move || Query::new(name);
    let keys: Vec<Json> = vec![key.clone(); 4];
    let [get, update, delete, filtered]: [Json; 4] = keys.try_into().unwrap();
    let not_found: Vec<Work> = vec![
        Box::new(move |draft| draft.insert(name, record()).map(drop)),
        Box::new(move |draft| draft.insert_many(name, vec![record()]).map(drop)),
        Box::new(move |draft| draft.upsert(name, record()).map(drop)),
        Box::new(move |draft| draft.update(name, &update, record(), None).map(drop)),
        Box::new(move |draft| draft.delete(name, &delete, None).map(drop)),
        Box::new(move |draft| draft.clear(name)),
        Box::new(move |draft| draft.get(name, &get).map(drop)),
        Box::new(move |draft| draft.query(&all()).map(drop)),
        Box::new(move |draft| draft.count(&all()).map(drop)),
        Box::new(move |draft| draft.update_bucket(name, &json!({"ttl": 1}))),
        Box::new(move |draft| draft.drop_bucket(name)),
        Box::new(move |draft| draft.define_query("q", &json!({"bucket": name}))),
        Box::new(move |draft| draft.once("u", "k", "r", |draft| draft.clear(name).map(|()| Json::Null)).map(drop)),
        Box::new(move |draft| {
            draft.with_row_filter(&Filter::everything(), |draft| draft.delete(name, &filtered, None)).map(drop)
        }),
        // Definitions apply to ordinary buckets, inside and outside of `system`.
        Box::new(move |draft| draft.system(|draft| draft.drop_bucket(name))),
        Box::new(move |draft| draft.system(|draft| draft.update_bucket(name, &json!({"ttl": 1})))),
    ];
    for (place, work) in not_found.into_iter().enumerate() {
        let refused = store.write(work).wait().unwrap_err();
        let is_not_found = match &refused {
            WriteError::Refused(StoreError::BucketNotDefined { bucket }) => bucket == name,
            other => other.to_string().ends_with(&not_defined(name).to_string()),
        };
        assert!(is_not_found, "{place}: {refused}");
    }
    for operation in [
        json!({"op": "get", "bucket": name, "key": key}),
        json!({"op": "insert", "bucket": name, "data": record()}),
        json!({"op": "update", "bucket": name, "key": key, "data": {}}),
        json!({"op": "delete", "bucket": name, "key": key}),
        json!({"op": "where", "bucket": name, "filter": {}}),
        json!({"op": "findOne", "bucket": name, "filter": {}}),
        json!({"op": "count", "bucket": name}),
    ] {
        let operations = Operation::parse_all(&json!([operation])).unwrap();
        let refused = store.transact(operations).wait().unwrap_err();
        assert_eq!(refused.to_string(), format!("operations[0]: bucket \"{name}\" is not defined"));
    }
    for refused in [
        store.define_bucket(name, plain()).wait().unwrap_err(),
        store.define_query(name, json!({"bucket": "b"})).wait().unwrap_err(),
        store.write(move |draft| draft.system(|draft| draft.define_bucket(name, &plain()))).wait().unwrap_err(),
    ] {
        assert!(matches!(refused, WriteError::Refused(StoreError::Name { .. })), "{refused}");
    }
    let refused = store.query_named(name, &Map::new()).unwrap_err();
    assert!(matches!(refused, StoreError::QueryNotDefined { .. }));
}

#[test]
fn ordinary_bucket_cannot_reference_a_system_bucket() {
    with_each_engine(|store, reopen| {
        insert(&store, "_roles", json!({"name": "admin"})).unwrap();
        let refers = |on_delete: &str| {
            json!({"key": "id", "schema": {"id": {"type": "number"},
                "role": {"type": "string", "ref": "_roles", "onDelete": on_delete}}})
        };
        for on_delete in ["restrict", "cascade", "set_null"] {
            store.define_bucket(on_delete, refers(on_delete)).wait().unwrap();
            // The insert succeeds for any reference, as if the bucket did not exist, so it does not reveal system records.
            for (id, role) in [(1, "admin"), (2, "none")] {
                store.insert(on_delete, json!({"id": id, "role": role})).wait().unwrap();
            }
        }
        let store = reopen(store);
        let delete = store.write(|draft| draft.system(|draft| draft.delete("_roles", &json!("admin"), None)));
        assert!(delete.wait().unwrap());
        for bucket in ["restrict", "cascade", "set_null"] {
            assert_eq!(store.get(bucket, &json!(1)).unwrap().unwrap().to_record()["role"], "admin");
        }
    });
}

#[test]
fn system_buckets_support_schema_indexes_references_and_transactions() {
    with_each_engine(|store, reopen| {
        assert_eq!(insert(&store, "$audit", json!({"event": "start"})).unwrap().to_record()["id"], 1);
        let refused = insert(&store, "_roles", json!({"name": "admin", "rank": "first"})).unwrap_err();
        assert!(matches!(refused, WriteError::Refused(StoreError::Validation(_))), "{refused}");
        insert(&store, "_roles", json!({"name": "admin", "rank": 1})).unwrap();
        insert(&store, "_roles", json!({"name": "owner", "rank": 2, "parent": "admin"})).unwrap();
        let refused = insert(&store, "_roles", json!({"name": "other", "rank": 2})).unwrap_err();
        assert!(matches!(refused, WriteError::Refused(StoreError::NotUnique { .. })), "{refused}");
        let refused = insert(&store, "_roles", json!({"name": "lost", "parent": "missing"})).unwrap_err();
        assert!(matches!(refused, WriteError::Refused(StoreError::Validation(_))), "{refused}");

        let store = reopen(store);
        let query = Query::parse(&json!({"bucket": "$audit", "filter": {"event": "start"}})).unwrap();
        let snapshot = store.snapshot();
        let bucket = snapshot.state.system_bucket("$audit").unwrap();
        let found = query.evaluate(bucket, store.now(), &Budget::unlimited()).unwrap().into_records();
        assert_eq!(found, stored(&store, "$audit"));
        let operations = json!([
            {"op": "insert", "bucket": "$audit", "data": {"event": "login"}},
            {"op": "update", "bucket": "_roles", "key": "admin", "data": {"rank": 7}},
            {"op": "count", "bucket": "$audit"},
            {"op": "where", "bucket": "_roles", "filter": {"rank": 7}},
        ]);
        let operations = Operation::parse_all(&operations).unwrap();
        let results = store.write(move |draft| Ok(draft.system(|draft| draft.transact(&operations))?)).wait().unwrap();
        let results: Vec<Json> = results.iter().map(tidewire_store::transaction::OperationResult::to_json).collect();
        assert_eq!((&results[0]["id"], &results[2], &results[3][0]["name"]), (&json!(2), &json!(2), &json!("admin")));

        // The row filter has no effect inside `system`. After it, the filter applies again, and names are those of ordinary buckets.
        store.define_bucket("b", plain()).wait().unwrap();
        let own = Filter::parse(&json!({"owner": "me"})).unwrap();
        let written = store.write(move |draft| {
            draft.with_row_filter(&own, |draft| {
                draft.system(|draft| draft.insert("$audit", json!({"event": "write"})))?;
                assert!(draft.insert("$audit", json!({"event": "write"})).is_err());
                assert!(draft.system(|draft| draft.insert("b", json!({"id": 2}))).is_err());
                draft.insert("b", json!({"id": 1, "owner": "other"}))
            })
        });
        let refused = written.wait().unwrap_err();
        assert!(matches!(refused, WriteError::Refused(StoreError::Forbidden { .. })), "{refused}");
        assert_eq!(stored(&store, "$audit").len(), 2, "one commit, all or nothing");

        let delete = store.write(|draft| draft.system(|draft| draft.delete("_roles", &json!("admin"), None)));
        assert!(delete.wait().unwrap());
        assert!(stored(&store, "_roles").is_empty(), "referring records are deleted too");
        store.write(|draft| draft.system(|draft| draft.clear("$audit"))).wait().unwrap();
        let store = reopen(store);
        assert!(stored(&store, "$audit").is_empty() && stored(&store, "_roles").is_empty());
    });
}

#[test]
fn panic_ends_the_system_scope() {
    let store = Store::memory(declared());
    let panicked = store.write::<(), _>(|draft| draft.system(|_| panic!("on purpose"))).wait().unwrap_err();
    assert!(matches!(panicked, WriteError::Panicked));
    let refused = store.insert("$audit", json!({"event": "x"})).wait().unwrap_err();
    assert!(matches!(refused, WriteError::Refused(StoreError::BucketNotDefined { .. })), "{refused}");
}

#[test]
fn records_of_system_buckets_expire() {
    let clock = TestClock::new(1000);
    let session = json!({"key": "id", "schema": {"id": {"type": "number"}}, "ttl": 100});
    let options = declaring(&[("$sessions", session)]).clock(clock.clock()).sweep_interval(None);
    let store = Store::memory(options);
    insert(&store, "$sessions", json!({"id": 1})).unwrap();
    clock.set(1100);
    let found = store.write(|draft| draft.system(|draft| Ok(draft.get("$sessions", &json!(1))?.is_some())));
    assert!(!found.wait().unwrap());
    assert_eq!(store.sweep().wait().unwrap(), 1);
    assert!(stored(&store, "$sessions").is_empty());
}

#[test]
fn followers_see_system_buckets() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let start = tidewire_store::Position { sequence: 0, ..store.snapshot().position };
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
    let commits = |store: &Store| {
        let mut follower = store.follow_from(start).unwrap();
        std::iter::from_fn(|| follower.try_next().unwrap()).map(|commit| (*commit).clone()).collect::<Vec<_>>()
    };
    let before = commits(&store);
    assert_eq!(before.len(), 2);
    assert!(before[0].changes.iter().all(|change| *change.bucket == *BUCKETS) && before[0].changes.len() == 2);
    assert_eq!(*before[1].changes[0].bucket, *"$audit");
    assert_eq!(before[1].changes[0].new.as_ref().unwrap().to_record()["event"], "start");
    store.close().unwrap();
    let store = open(dir.path());
    assert_eq!(commits(&store), before, "unchanged declarations are not committed");
}

#[test]
fn undeclared_system_bucket_stays_stored_and_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
    insert(&store, "_roles", json!({"name": "admin"})).unwrap();
    let before = (stored(&store, "$audit"), stored(&store, "_roles"));
    store.close().unwrap();
    for has_checkpoint in [false, true] {
        let store = super::open(dir.path());
        let snapshot = store.snapshot();
        assert_eq!(snapshot.state.names().len(), 0);
        for name in ["$audit", "_roles"] {
            assert!(snapshot.state.bucket(name).is_err() && snapshot.state.system_bucket(name).is_err());
            let refused = store.write(move |draft| draft.system(|draft| draft.clear(name))).wait().unwrap_err();
            assert!(matches!(refused, WriteError::Refused(StoreError::BucketNotDefined { .. })));
            let refused = store.define_bucket(name, plain()).wait().unwrap_err();
            assert!(matches!(refused, WriteError::Refused(StoreError::Name { .. })), "{refused}");
        }
        if has_checkpoint {
            store.checkpoint().unwrap();
        }
        store.close().unwrap();
    }
    let store = open(dir.path());
    assert_eq!((stored(&store, "$audit"), stored(&store, "_roles")), before);
}

#[test]
fn compatible_declaration_replaces_the_stored_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
    store.close().unwrap();
    let more = json!({"key": "id", "schema": {
        "id": {"type": "number", "generated": "autoincrement"},
        "event": {"type": "string", "unique": true},
        "user": {"type": "string"},
    }, "indexes": ["user"], "ttl": "30d"});
    let reopen = || Store::open(dir.path(), declaring(&[("$audit", more.clone()), ("_roles", roles())])).unwrap().0;
    let store = reopen();
    assert_eq!(store.snapshot().state.system_bucket("$audit").unwrap().definition().config, more);
    let position = store.snapshot().position;
    let refused = insert(&store, "$audit", json!({"event": "start"})).unwrap_err();
    assert!(matches!(refused, WriteError::Refused(StoreError::NotUnique { .. })), "{refused}");
    store.close().unwrap();
    let store = reopen();
    assert_eq!(store.snapshot().position, position, "the declaration was already stored");
    assert_eq!(insert(&store, "$audit", json!({"event": "login", "user": "u"})).unwrap().to_record()["id"], 2);
    store.close().unwrap();
    // The directory can also be opened without the declaration.
    drop(super::open(dir.path()));
    assert_eq!(stored(&reopen(), "$audit").len(), 2);
}

#[test]
fn store_with_an_incompatible_declaration_does_not_open() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for event in ["start", "start"] {
        insert(&store, "$audit", json!({"event": event})).unwrap();
    }
    store.define_bucket("_mine", plain()).wait().unwrap();
    store.close().unwrap();
    let changed = |change: fn(&mut Json)| {
        let mut config = audit();
        change(&mut config);
        let error = Store::open(dir.path(), declaring(&[("$audit", config)])).unwrap_err();
        let StoreOpenError::SystemBucket(SystemBucketError::Incompatible { name, problem }) = error else {
            panic!("{error}")
        };
        assert_eq!(name, "$audit");
        problem
    };
    let key = changed(|config| config["key"] = json!("event"));
    assert_eq!(key, Incompatibility::Key { stored: "id".to_owned(), declared: "event".to_owned() });
    assert_eq!(changed(|config| config["persistent"] = json!(false)), Incompatibility::Persistent);
    let record = changed(|config| config["schema"]["event"]["type"] = json!("number"));
    assert!(matches!(record, Incompatibility::Record(_)), "{record}");
    let unique = changed(|config| config["schema"]["event"]["unique"] = json!(true));
    assert!(matches!(unique, Incompatibility::NotUnique(_)), "{unique}");
    let error = Store::open(dir.path(), declaring(&[("_mine", plain())])).unwrap_err();
    assert!(matches!(error, StoreOpenError::SystemBucket(SystemBucketError::Taken { .. })), "{error}");
    assert_eq!(
        error.to_string(),
        "system bucket \"_mine\" has the name of an ordinary bucket in this directory; choose another name"
    );
    // The stored bucket is unchanged, and an empty bucket accepts any declaration.
    let store = open(dir.path());
    assert_eq!(stored(&store, "$audit").len(), 2);
    store.write(|draft| draft.system(|draft| draft.clear("$audit"))).wait().unwrap();
    store.close().unwrap();
    let other = json!({"key": "event", "schema": {"event": {"type": "string"}}, "persistent": false});
    let store = Store::open(dir.path(), declaring(&[("$audit", other)])).unwrap().0;
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
}

#[test]
fn backup_includes_system_buckets() {
    let dir = tempfile::tempdir().unwrap();
    let (data, backup, restored) = (dir.path().join("data"), dir.path().join("backup"), dir.path().join("restored"));
    let store = open(&data);
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
    store.checkpoint().unwrap();
    insert(&store, "_roles", json!({"name": "admin"})).unwrap();
    store.backup(&backup).unwrap();
    Embedded::restore(&backup, &restored, EmbeddedOptions::default()).unwrap();
    let copy = open(&restored);
    for bucket in ["$audit", "_roles"] {
        assert_eq!(stored(&copy, bucket), stored(&store, bucket));
    }
}

#[test]
fn system_buckets_are_exported_and_imported_if_declared() {
    let store = Store::memory(declared());
    store.define_bucket("b", plain()).wait().unwrap();
    store.insert("b", json!({"id": 1})).wait().unwrap();
    insert(&store, "$audit", json!({"event": "start"})).unwrap();
    insert(&store, "_roles", json!({"name": "owner"})).unwrap();
    let mut exported = Vec::new();
    let counts = store.export(&mut exported).unwrap();
    assert_eq!((counts.buckets, counts.records), (1, 3));

    let dir = tempfile::tempdir().unwrap();
    let copy = open(dir.path());
    assert_eq!(copy.import(&exported[..]).unwrap(), counts);
    copy.close().unwrap();
    let copy = open(dir.path());
    for bucket in ["$audit", "_roles"] {
        assert_eq!(stored(&copy, bucket), stored(&store, bucket));
    }
    assert_eq!(ids(&copy, "b"), [1]);
    let mut again = Vec::new();
    copy.export(&mut again).unwrap();
    assert!(again == exported, "the exports are identical");

    let other = Store::memory(declaring(&[("$audit", audit())]));
    let refused = other.import(&exported[..]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "line 4: system bucket \"_roles\" is not declared by this program; declare it when the store is opened"
    );
    assert!(matches!(*refused.problem, ImportProblem::SystemBucket { .. }));
    // A record of a system bucket without its definition line is rejected too.
    let lines = "{\"tidewire\":\"export\",\"version\":1}\n{\"in\":\"_roles\",\"record\":{\"name\":\"a\"}}\n{\"end\":1}";
    assert_eq!(other.import(lines.as_bytes()).unwrap_err().line, 2);
}

const TEST: &str = "store::system_buckets::killed_process_leaves_both_records_of_a_commit_or_none";
const DIR: &str = "TIDEWIRE_STORE_SYSTEM_DIR";

/// Repeatedly inserts a record and its audit entry in one commit.
fn write(dir: &str) {
    let store = open(Path::new(dir));
    if store.snapshot().state.bucket("b").is_err() {
        store.define_bucket("b", plain()).wait().unwrap();
    }
    for id in ids(&store, "b").len().. {
        let step = store.write(move |draft| {
            draft.insert("b", json!({"id": id}))?;
            draft.system(|draft| draft.insert("$audit", json!({"id": id, "event": "insert"})))
        });
        step.wait().unwrap();
        println!("acknowledged {id}");
        std::io::stdout().flush().unwrap();
    }
}

#[test]
fn killed_process_leaves_both_records_of_a_commit_or_none() {
    if is_rerun() {
        return write(&std::env::var(DIR).unwrap());
    }
    let dir = tempfile::tempdir().unwrap();
    let mut enough = 0;
    for _ in 0..5 {
        let mut command = rerun(TEST);
        command.env(DIR, dir.path());
        let mut child = Process::spawn(command);
        let acknowledged = || child.output().lines().filter(|line| line.starts_with("acknowledged")).count();
        wait_until("some are acknowledged", PATIENCE, || acknowledged() >= 20);
        child.kill();
        child.wait();
        enough += child.output().lines().filter(|line| line.starts_with("acknowledged")).count();
        let store = open(dir.path());
        let entries: Vec<_> = stored(&store, "$audit").iter().map(|entry| entry["id"].clone()).collect();
        assert_eq!(entries, ids(&store, "b"));
        assert!(entries.len() >= enough, "{} of {enough}", entries.len());
    }
}
