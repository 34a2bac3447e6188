//! System buckets of the embedding program: neither requests nor programmatic queries can access them.

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, Session};
use tidewire::{ProgrammaticQuery, RequestError, Server, ServerOptions, View};
use tidewire_store::system::SystemBuckets;
use tidewire_store::{QueryOutput, Store, StoreOptions};

use crate::client::{Client, RoleTokens, RpcClient, notes_config, options, serve_store};
use crate::metrics_page::metric;
use crate::test_server::object;

/// Creates a store with the system buckets `$state` and `_jobs`, with a record in each, and an ordinary bucket.
fn store() -> Store {
    let config =
        json!({"key": "id", "schema": {"id": {"type": "string"}, "secret": {"type": "string"}}, "indexes": ["secret"]});
    let buckets = SystemBuckets::default().declare("$state", &config).unwrap().declare("_jobs", &config).unwrap();
    let store = Store::memory(StoreOptions::default().system_buckets(buckets));
    store.define_bucket("notes", notes_config()).wait().unwrap();
    for bucket in ["$state", "_jobs"] {
        let record = object(json!({"id": "k", "secret": "tide"}));
        store.write(move |draft| draft.system(|draft| draft.insert(bucket, record))).wait().unwrap();
    }
    store
}

/// Asserts that both system buckets have their original record.
fn assert_untouched(store: &Store) {
    let snapshot = store.snapshot();
    for name in ["$state", "_jobs"] {
        let bucket = snapshot.state.system_bucket(name).unwrap();
        let records: Vec<_> = bucket.rows().map(|row| Json::Object(row.to_record())).collect();
        assert_eq!(records.len(), 1);
        assert_eq!((&records[0]["secret"], &records[0]["_version"]), (&json!("tide"), &json!(1)));
    }
    assert_eq!(snapshot.state.names().collect::<Vec<_>>(), ["notes"]);
    assert_eq!(store.stats().queries, 0);
}

/// Returns every operation that names a bucket, with this one.
fn operations(bucket: &str) -> Vec<(&'static str, Json)> {
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    let step = |step: Json| json!({"operations": [{"op": "count", "bucket": "notes"}, step]});
    vec![
        ("store.get", json!({"bucket": bucket, "key": "k"})),
        ("store.all", json!({"bucket": bucket})),
        ("store.where", json!({"bucket": bucket, "filter": {"secret": "tide"}})),
        ("store.findOne", json!({"bucket": bucket, "filter": {}})),
        ("store.count", json!({"bucket": bucket})),
        ("store.first", json!({"bucket": bucket, "n": 1})),
        ("store.last", json!({"bucket": bucket, "n": 1})),
        ("store.paginate", json!({"bucket": bucket, "limit": 1})),
        ("store.sum", json!({"bucket": bucket, "field": "n"})),
        ("store.avg", json!({"bucket": bucket, "field": "n"})),
        ("store.min", json!({"bucket": bucket, "field": "n"})),
        ("store.max", json!({"bucket": bucket, "field": "n"})),
        ("store.query", json!({"bucket": bucket})),
        ("store.insert", json!({"bucket": bucket, "data": {"id": "k"}})),
        ("store.insertMany", json!({"bucket": bucket, "data": [{"id": "k"}]})),
        ("store.update", json!({"bucket": bucket, "key": "k", "data": {"secret": "ebb"}})),
        ("store.upsert", json!({"bucket": bucket, "data": {"id": "k", "secret": "ebb"}})),
        ("store.delete", json!({"bucket": bucket, "key": "k"})),
        ("store.clear", json!({"bucket": bucket})),
        ("store.transaction", step(json!({"op": "get", "bucket": bucket, "key": "k"}))),
        ("store.transaction", step(json!({"op": "insert", "bucket": bucket, "data": {"id": "z"}}))),
        ("store.transaction", step(json!({"op": "delete", "bucket": bucket, "key": "k"}))),
        ("store.subscribe", json!({"config": {"bucket": bucket}})),
        ("store.subscribe", json!({"config": {"bucket": bucket}, "mode": "delta"})),
        ("store.defineBucket", json!({"name": bucket, "config": config})),
        ("store.updateBucket", json!({"name": bucket, "updates": {"addFields": {"x": {"type": "string"}}}})),
        ("store.dropBucket", json!({"name": bucket})),
        ("store.getBucketSchema", json!({"name": bucket})),
        ("store.defineQuery", json!({"name": "q", "config": {"bucket": bucket}})),
    ]
}

/// Returns options without and with auth.
fn settings() -> [ServerOptions; 2] {
    [options(), options().auth(Auth::new(RoleTokens))]
}

/// Connects a WebSocket client and an in-process client, both with all permissions.
async fn admins(server: &Server, has_auth: bool) -> (Client, tidewire::Client) {
    let mut socket = Client::connect(server).await;
    if has_auth {
        socket.call("auth.login", json!({"token": "mara:admin"})).await;
    }
    (socket, server.client(Session::new("mara", ["admin"])))
}

async fn expect_forbidden(client: &mut impl RpcClient) {
    let mut messages = Vec::new();
    for bucket in ["$state", "$none", "$", "$buckets", "$queries", "$replies", "$STATE"] {
        for (operation, params) in operations(bucket) {
            let (code, error) = client.call_err(operation, params).await;
            assert_eq!(code, "FORBIDDEN", "{operation} {bucket}: {error}");
            let message = error["message"].as_str().unwrap().replace(bucket, "NAME");
            messages.push((operation, message));
        }
    }
    messages.sort();
    messages.dedup();
    let texts: Vec<_> = messages.iter().map(|(_, message)| message).collect();
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]), "errors must not reveal which buckets exist: {texts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_names_with_a_dollar_sign_are_forbidden() {
    for options in settings() {
        let (store, has_auth) = (store(), options.auth.is_some());
        let server = serve_store(store.clone(), options).await;
        let (mut socket, mut local) = admins(&server, has_auth).await;
        expect_forbidden(&mut socket).await;
        expect_forbidden(&mut local).await;
        assert_untouched(&store);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn system_bucket_with_an_underscore_cannot_be_accessed_or_defined() {
    for options in settings() {
        let (store, has_auth) = (store(), options.auth.is_some());
        let server = serve_store(store.clone(), options).await;
        let (mut socket, mut local) = admins(&server, has_auth).await;
        for (operation, params) in operations("_jobs") {
            let (code, error) = socket.call_err(operation, params.clone()).await;
            assert_ne!(code, "INTERNAL_ERROR", "{operation}: {error}");
            assert_eq!(local.call_err(operation, params).await.0, code, "{operation}");
        }
        assert_untouched(&store);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_and_statistics_hide_system_buckets() {
    for options in settings() {
        let (store, has_auth) = (store(), options.auth.is_some());
        let server = serve_store(store.clone(), options).await;
        let (mut socket, mut local) = admins(&server, has_auth).await;
        for operation in ["store.buckets", "store.stats", "store.listQueries", "server.stats", "server.connections"] {
            for shown in [socket.call(operation, json!({})).await, local.call(operation, json!({})).await] {
                let text = shown.to_string();
                assert!(!text.contains("$state") && !text.contains("_jobs") && !text.contains("tide\""), "{text}");
            }
        }
        assert_eq!(socket.call("store.buckets", json!({})).await, json!({"count": 1, "names": ["notes"]}));
        let stats = socket.call("store.stats", json!({})).await;
        assert_eq!((&stats["buckets"]["count"], &stats["records"]["total"]), (&json!(1), &json!(0)), "{stats}");
        assert_eq!((metric(&server, "store_buckets").await, metric(&server, "store_records").await), (1, 0));
    }
}

/// A field may refer to an undefined bucket, and a system bucket counts as undefined: references neither reveal its records nor
/// prevent their deletion.
#[tokio::test(flavor = "multi_thread")]
async fn references_do_not_reach_system_buckets() {
    let store = store();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let mut replies = Vec::new();
    for target in ["$state", "_jobs", "$none", "_none", "none"] {
        for on_delete in ["restrict", "cascade", "set_null"] {
            let field = json!({"type": "string", "ref": target, "onDelete": on_delete});
            let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "of": field}});
            let name = format!("{on_delete}-{target}");
            client.call("store.defineBucket", json!({"name": name, "config": config})).await;
            for key in ["k", "absent"] {
                let data = json!({"id": key, "of": key});
                let id = client.send("store.insert", json!({"bucket": name, "data": data})).await;
                let reply = client.reply(id).await;
                replies.push((reply["type"].clone(), reply["code"].clone(), reply["data"]["of"] == key));
            }
        }
    }
    replies.dedup();
    assert_eq!(replies, [(json!("result"), Json::Null, true)], "the same for all targets");
    for bucket in ["$state", "_jobs"] {
        let deleted = store.write(move |draft| draft.system(|draft| draft.delete(bucket, &json!("k"), None)));
        assert!(deleted.await.unwrap(), "no reference of a client prevents the deletion");
        for on_delete in ["restrict", "cascade", "set_null"] {
            let kept = client.call("store.get", json!({"bucket": format!("{on_delete}-{bucket}"), "key": "k"})).await;
            assert_eq!(kept["of"], "k", "{on_delete} {bucket}: the deletion must not be visible");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn query_parameters_cannot_name_system_buckets() {
    let store = store();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"bucket": "{{ params.bucket }}"});
    client.call_err("store.defineQuery", json!({"name": "any", "config": config})).await;
    for bucket in ["$state", "_jobs"] {
        client.call_err("store.subscribe", json!({"config": config, "params": {"bucket": bucket}})).await;
        client.call_err("store.query", json!({"bucket": "{{ params.bucket }}", "params": {"bucket": bucket}})).await;
    }
    assert_untouched(&store);
}

/// Reads the bucket named in the parameters.
#[derive(Debug)]
struct BucketReader;

impl ProgrammaticQuery for BucketReader {
    fn buckets(&self) -> Vec<String> {
        Vec::new()
    }

    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        if let Some(key) = params.get("key") {
            return Ok(json!(view.get(params["bucket"].as_str().unwrap(), key)?));
        }
        match view.query(&json!({"bucket": params["bucket"]}))? {
            QueryOutput::Records(records) => Ok(json!(records)),
            QueryOutput::Value(value) => Ok(json!(value)),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_queries_cannot_read_system_buckets() {
    let server = serve_store(store(), options().query("reader", BucketReader)).await;
    let mut client = server.client(None);
    for bucket in ["$state", "_jobs", "$buckets", "$queries"] {
        for params in [json!({"bucket": bucket}), json!({"bucket": bucket, "key": "k"})] {
            let (code, error) = client.call_err("store.subscribe", json!({"query": "reader", "params": params})).await;
            assert_eq!(code, "BUCKET_NOT_DEFINED", "{error}");
        }
    }
    client.call("store.subscribe", json!({"query": "reader", "params": {"bucket": "notes"}})).await;
}
