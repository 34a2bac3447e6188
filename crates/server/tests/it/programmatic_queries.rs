//! Programmatic queries: queries implemented by the embedding program.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::auth::TokenExpiry;
use tidewire::{Code, ProgrammaticQuery, RequestError, Server, ServerOptions, View};
use tidewire_store::{QueryOutput, Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::test_server::{TestServer, allow_only, ids, own_rows, tokens, user};
use crate::tides_server::{FOUR_TIDES, expect_error, insert_tides, serve_tides_with, tides_config};

/// The ports with a level of at least `params.least`, each once.
#[derive(Debug)]
struct Ports;

impl ProgrammaticQuery for Ports {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        let least = params.get("least").and_then(Json::as_i64).unwrap_or(i64::MIN);
        if least == 99 {
            return Err(RequestError::new(Code::ValidationError, "99 is no level").with_details(json!({"least": 99})));
        }
        let query = json!({"bucket": "tides", "filter": {"level": {"$gte": least}}, "sort": {"port": "asc"}});
        let QueryOutput::Records(records) = view.query(&query)? else { unreachable!() };
        let mut ports: Vec<Json> = records.into_iter().map(|tide| tide["port"].clone()).collect();
        ports.dedup();
        Ok(json!({"ports": ports}))
    }
}

/// Panics on demand.
#[derive(Debug)]
struct PanickingQuery {
    panics: Arc<AtomicBool>,
}

impl ProgrammaticQuery for PanickingQuery {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        assert!(!self.panics.load(SeqCst), "the query panics because the test asks for it");
        let first = view.get("tides", &json!(1))?;
        Ok(json!({"hasFirst": first.is_some(), "now": view.now()}))
    }
}

fn with_queries() -> (ServerOptions, Arc<AtomicBool>) {
    let panics = Arc::new(AtomicBool::new(false));
    (options().query("ports", Ports).query("fragile", PanickingQuery { panics: Arc::clone(&panics) }), panics)
}

async fn serve_ports() -> (Server, Client, Arc<AtomicBool>) {
    let (options, panics) = with_queries();
    let (server, client) = serve_tides_with(options).await;
    (server, client, panics)
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_query_can_be_subscribed_to() {
    let (server, mut client, _) = serve_ports().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let subscribed = client.call("store.subscribe", json!({"query": "ports", "params": {"least": 4}})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": {"ports": ["Brest", "Hook"]}}));
    insert_tides(&mut client, &[("Dover", 4)]).await;
    let ports = json!({"ports": ["Brest", "Dover", "Hook"]});
    let expected = json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-1", "data": ports});
    assert_eq!(client.push().await, expected);
    // A write that leaves the result unchanged is not pushed.
    insert_tides(&mut client, &[("Dover", 9), ("Ryde", 1)]).await;
    client.call("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await["data"], json!({"ports": []}));
    assert_eq!(server.stats().subscriptions, 1);
    assert_eq!(
        client.call("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await,
        json!({"unsubscribed": true})
    );
    assert_eq!(server.stats().subscriptions, 0);
    expect_error(&mut client, "store.unsubscribe", json!({"subscriptionId": "sub-1"}), "NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_to_a_write_precedes_the_programmatic_push() {
    let (_server, mut client, _) = serve_ports().await;
    client.call("store.subscribe", json!({"query": "ports"})).await;
    for number in 0..50 {
        let data = json!({"port": format!("port{number:02}"), "level": 1});
        client.send("store.insert", json!({"bucket": "tides", "data": data})).await;
    }
    let (mut answered, mut shown) = (0, 0);
    while answered < 50 || shown < 50 {
        let message = client.receive().await;
        if message.get("id").is_some() {
            answered += 1;
            continue;
        }
        let count = message["data"]["ports"].as_array().unwrap().len();
        assert!(count > shown && count <= answered, "{count} ports after {shown}, with {answered} replies");
        shown = count;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_queries_are_listed_and_their_names_reserved() {
    let (_server, mut client, _) = serve_ports().await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    client.call("store.subscribe", json!({"query": "ports"})).await;
    let expected = json!({"queries": [
        {"name": "all", "type": "declarative", "activeSubscriptions": 0, "config": {"bucket": "tides"}},
        {"name": "fragile", "type": "programmatic", "activeSubscriptions": 0},
        {"name": "ports", "type": "programmatic", "activeSubscriptions": 1},
    ]});
    assert_eq!(client.call("store.listQueries", json!({})).await, expected);
    let stats = client.call("store.stats", json!({})).await;
    assert_eq!(stats["queries"], json!({"defined": 3, "activeSubscriptions": 1}));
    let again = json!({"name": "ports", "config": {"bucket": "tides"}});
    let message = expect_error(&mut client, "store.defineQuery", again, "ALREADY_EXISTS").await;
    assert_eq!(message, "query \"ports\" is already defined");
    expect_error(&mut client, "store.undefineQuery", json!({"name": "ports"}), "QUERY_NOT_DEFINED").await;
    assert_eq!(client.call("store.listQueries", json!({})).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_query_shadows_a_stored_query() {
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("tides", tides_config()).await.unwrap();
    store.define_query("ports", json!({"bucket": "tides"})).await.unwrap();
    let server = serve_store(store, with_queries().0).await;
    let mut client = Client::connect(&server).await;
    let subscribed = client.call("store.subscribe", json!({"query": "ports"})).await;
    assert_eq!(subscribed["data"], json!({"ports": []}));
    let listed = client.call("store.listQueries", json!({})).await;
    let types: Vec<&Json> = listed["queries"].as_array().unwrap().iter().map(|query| &query["type"]).collect();
    assert_eq!(types, [&json!("programmatic"), &json!("programmatic")]);
    let stats = client.call("store.stats", json!({})).await;
    assert_eq!(stats["queries"]["defined"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_programmatic_query_are_returned() {
    let (server, mut client, _) = serve_ports().await;
    let (code, error) = client.call_err("store.subscribe", json!({"query": "ports", "params": {"least": 99}})).await;
    assert_eq!((code.as_str(), &error["message"]), ("VALIDATION_ERROR", &json!("99 is no level")));
    assert_eq!(error["details"], json!({"least": 99}));
    let delta = json!({"query": "ports", "mode": "delta"});
    expect_error(&mut client, "store.subscribe", delta, "VALIDATION_ERROR").await;
    assert_eq!(server.stats().subscriptions, 0, "a failed subscription consumes no permit");
    // A subscription ends when its query fails later.
    client.call("store.subscribe", json!({"query": "ports"})).await;
    client.call("store.subscribe", json!({"query": "ports", "pos": true})).await;
    client.call("store.dropBucket", json!({"name": "tides"})).await;
    let push = client.push().await;
    assert_eq!((&push["subscriptionId"], &push["error"]["code"]), (&json!("sub-4"), &json!("BUCKET_NOT_DEFINED")));
    wait_until_async("both subscriptions have ended", PATIENCE, async || server.stats().subscriptions == 0).await;
    expect_error(&mut client, "store.subscribe", json!({"query": "ports"}), "BUCKET_NOT_DEFINED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_ends_only_its_subscription() {
    let (server, mut client, panics) = serve_ports().await;
    client.call("store.subscribe", json!({"query": "fragile", "pos": true})).await;
    client.call("store.subscribe", json!({"query": "ports"})).await;
    panics.store(true, SeqCst);
    insert_tides(&mut client, &[("Hook", 1)]).await;
    let mut pushes = [client.push().await, client.push().await];
    pushes.sort_by_key(|push| push["subscriptionId"].to_string());
    let error = json!({"code": "INTERNAL_ERROR", "message": "Internal server error"});
    assert_eq!(pushes[0]["error"], error, "internal details are hidden");
    assert_eq!(pushes[1]["data"], json!({"ports": ["Hook"]}));
    let message = expect_error(&mut client, "store.subscribe", json!({"query": "fragile"}), "INTERNAL_ERROR").await;
    assert_eq!(message, "Internal server error");
    // Other subscriptions continue, and the query can be used again.
    panics.store(false, SeqCst);
    insert_tides(&mut client, &[("Dover", 1)]).await;
    assert_eq!(client.push().await["data"], json!({"ports": ["Dover", "Hook"]}));
    client.call("store.subscribe", json!({"query": "fragile"})).await;
    assert_eq!(server.stats().subscriptions, 2);
    assert_eq!(server.stats().panics, 0, "no connection was closed by a panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_result_ends_the_subscription() {
    let (server, mut client) = serve_tides_with(with_queries().0.max_result_bytes(600)).await;
    client.call("store.subscribe", json!({"query": "ports", "pos": true})).await;
    insert_tides(&mut client, &[(&"x".repeat(400), 1)]).await;
    assert!(client.push().await.get("data").is_some());
    insert_tides(&mut client, &[(&"y".repeat(400), 1)]).await;
    let push = client.push().await;
    assert_eq!(push["error"]["code"], "TOO_LARGE", "{push}");
    expect_error(&mut client, "store.subscribe", json!({"query": "ports"}), "TOO_LARGE").await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_query_has_positions_but_cannot_resume() {
    let (_server, mut client, _) = serve_ports().await;
    let subscribed = client.call("store.subscribe", json!({"query": "ports", "pos": true})).await;
    assert!(subscribed["pos"].is_string() && subscribed.get("resumed").is_none(), "{subscribed}");
    insert_tides(&mut client, &[("Hook", 1)]).await;
    let push = client.push().await;
    assert!(push["pos"].is_string() && push["pos"] != subscribed["pos"], "{push}");
    let again = client.call("store.subscribe", json!({"query": "ports", "since": push["pos"]})).await;
    assert_eq!((&again["resumed"], &again["data"]), (&json!(false), &json!({"ports": ["Hook"]})));
    assert_eq!(again["pos"], push["pos"], "no commit happened in between");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_programmatic_queries_releases_its_store() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let mut store = None;
        wait_until_async("the previous server has released the store", PATIENCE, async || {
            store = Store::open(dir.path(), StoreOptions::default()).ok();
            store.is_some()
        })
        .await;
        let (store, _) = store.unwrap();
        let server = serve_store(store, with_queries().0).await;
        let mut client = Client::connect(&server).await;
        if round == 0 {
            client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
        }
        client.call("store.subscribe", json!({"query": "ports"})).await;
        let stopping = tokio::spawn(server.stop(Duration::ZERO));
        assert_eq!(client.closed().await.0, 1000);
        drop(client);
        stopping.await.unwrap();
    }
}

/// A programmatic query that blocks after a given number of computations. It returns whether tide 1 exists.
#[derive(Debug, Default)]
struct BlockingQuery {
    calls: AtomicUsize,
    /// The number of calls that may still return. `None` means any number.
    remaining: Mutex<Option<usize>>,
    unblocked: Condvar,
}

impl BlockingQuery {
    fn set_remaining(&self, remaining: Option<usize>) {
        *self.remaining.lock().unwrap() = remaining;
        self.unblocked.notify_all();
    }
}

impl ProgrammaticQuery for BlockingQuery {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        self.calls.fetch_add(1, SeqCst);
        let mut remaining =
            self.unblocked.wait_while(self.remaining.lock().unwrap(), |remaining| *remaining == Some(0)).unwrap();
        *remaining = remaining.map(|remaining| remaining - 1);
        drop(remaining);
        Ok(json!(view.get("tides", &json!(1))?.is_some()))
    }
}

/// Unblocks the query when dropped, even if the test panics.
struct BlockGuard(Arc<BlockingQuery>);

impl BlockGuard {
    /// Blocks the query after this number of calls.
    fn after(query: &Arc<BlockingQuery>, answers: usize) -> Self {
        query.set_remaining(Some(answers));
        Self(Arc::clone(query))
    }
}

impl Drop for BlockGuard {
    fn drop(&mut self) {
        self.0.set_remaining(None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_of_a_blocked_query_can_unsubscribe() {
    let query = Arc::new(BlockingQuery::default());
    let (server, mut writer) = serve_tides_with(options().query("gated", Arc::clone(&query))).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = Client::connect(&server).await;
        client.call("store.subscribe", json!({"query": "gated"})).await;
        clients.push(client);
    }
    let calls = query.calls.load(SeqCst);
    let guard = BlockGuard::after(&query, 0);
    insert_tides(&mut writer, &[("Dover", 4)]).await;
    wait_until_async("the query is called", PATIENCE, async || query.calls.load(SeqCst) > calls).await;
    // The query runs for one of the subscribers. None of them waits for it.
    for (number, client) in clients.iter_mut().enumerate() {
        let subscription = format!("sub-{}", number + 1);
        client.call("store.unsubscribe", json!({"subscriptionId": subscription})).await;
    }
    assert_eq!(server.stats().subscriptions, 0);
    drop(guard);
    // Its result is pushed to no client.
    for client in &mut clients {
        assert!(client.has_no_pushes().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_is_answered_after_the_first_result_of_its_query() {
    let query = Arc::new(BlockingQuery::default());
    let (server, mut client) = serve_tides_with(options().query("gated", Arc::clone(&query))).await;
    let guard = BlockGuard::after(&query, 1);
    let subscribed = client.call("store.subscribe", json!({"query": "gated"})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": false}));
    // The query is called again, because there may have been a commit after the first result.
    wait_until_async("the query is called", PATIENCE, async || query.calls.load(SeqCst) == 2).await;
    insert_tides(&mut client, &[("Dover", 4)]).await;
    drop(guard);
    assert_eq!(client.push().await["data"], true);
    assert_eq!(server.stats().subscriptions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn login_after_expiry_keeps_permitted_subscriptions() {
    let brief = user("brief", &["member"]).expiry(TokenExpiry::After(Duration::from_secs(1)));
    let auth = allow_only(tokens([brief, user("ann", &["member"])]), [own_rows("member")]);
    let test = TestServer::start_with(options().auth(auth).query("gated", BlockingQuery::default())).await;
    test.bucket("tides", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "brief"})]).await;
    let mut client = test.client("brief").await;
    let first = client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(ids(&first["data"]), ["b"]);
    client.call("store.subscribe", json!({"query": "gated"})).await;
    test.advance(1000);
    client.call("auth.login", json!({"token": "ann"})).await;
    assert_eq!(ids(&client.push().await["data"]), ["a"]);
    assert_eq!(test.server.stats().subscriptions, 2);
}
