//! Queries that are code of the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::{Code, ProgrammaticQuery, RequestError, Server, ServerOptions, View};
use tidewire_store::{Answer, Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::tides::{FOUR, fails, fill, serve_tides_with, tides};

/// The ports with a level of at least `params.least`, each once.
#[derive(Debug)]
struct Ports;

impl ProgrammaticQuery for Ports {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn answer(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        let least = params.get("least").and_then(Json::as_i64).unwrap_or(i64::MIN);
        if least == 99 {
            return Err(RequestError::new(Code::ValidationError, "99 is no level").with_details(json!({"least": 99})));
        }
        let query = json!({"bucket": "tides", "filter": {"level": {"$gte": least}}, "sort": {"port": "asc"}});
        let Answer::Records(records) = view.query(&query)? else { unreachable!() };
        let mut ports: Vec<Json> = records.into_iter().map(|tide| tide["port"].clone()).collect();
        ports.dedup();
        Ok(json!({"ports": ports}))
    }
}

/// Panics when it is told to, and otherwise counts.
#[derive(Debug)]
struct Fragile {
    panics: Arc<AtomicBool>,
}

impl ProgrammaticQuery for Fragile {
    fn buckets(&self) -> Vec<String> {
        vec!["tides".to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        assert!(!self.panics.load(SeqCst), "it was told to");
        let first = view.get("tides", &json!(1))?;
        Ok(json!({"hasFirst": first.is_some(), "now": view.now()}))
    }
}

fn with_queries() -> (ServerOptions, Arc<AtomicBool>) {
    let panics = Arc::new(AtomicBool::new(false));
    (options().query("ports", Ports).query("fragile", Fragile { panics: Arc::clone(&panics) }), panics)
}

async fn serve_ports() -> (Server, Client, Arc<AtomicBool>) {
    let (options, panics) = with_queries();
    let (server, client) = serve_tides_with(options).await;
    (server, client, panics)
}

#[tokio::test(flavor = "multi_thread")]
async fn code_is_followed_like_any_query() {
    let (server, mut client, _) = serve_ports().await;
    fill(&mut client, &FOUR).await;
    let subscribed = client.ask("store.subscribe", json!({"query": "ports", "params": {"least": 4}})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": {"ports": ["Brest", "Hook"]}}));
    fill(&mut client, &[("Dover", 4)]).await;
    let ports = json!({"ports": ["Brest", "Dover", "Hook"]});
    let expected = json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-1", "data": ports});
    assert_eq!(client.push().await, expected);
    // What leaves the answer as it is is not pushed: the next push is of what does not.
    fill(&mut client, &[("Dover", 9), ("Ryde", 1)]).await;
    client.ask("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await["data"], json!({"ports": []}));
    assert_eq!(server.stats().subscriptions, 1);
    assert_eq!(
        client.ask("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await,
        json!({"unsubscribed": true})
    );
    assert_eq!(server.stats().subscriptions, 0);
    fails(&mut client, "store.unsubscribe", json!({"subscriptionId": "sub-1"}), "NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reply_to_a_write_comes_before_what_code_makes_of_it() {
    let (_server, mut client, _) = serve_ports().await;
    client.ask("store.subscribe", json!({"query": "ports"})).await;
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
        assert!(count > shown && count <= answered, "{count} after {shown}, with {answered} answers");
        shown = count;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn code_is_listed_and_its_names_are_taken() {
    let (_server, mut client, _) = serve_ports().await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    client.ask("store.subscribe", json!({"query": "ports"})).await;
    let expected = json!({"queries": [
        {"name": "all", "type": "declarative", "activeSubscriptions": 0, "config": {"bucket": "tides"}},
        {"name": "fragile", "type": "programmatic", "activeSubscriptions": 0},
        {"name": "ports", "type": "programmatic", "activeSubscriptions": 1},
    ]});
    assert_eq!(client.ask("store.listQueries", json!({})).await, expected);
    let stats = client.ask("store.stats", json!({})).await;
    assert_eq!(stats["queries"], json!({"defined": 3, "activeSubscriptions": 1}));
    let again = json!({"name": "ports", "config": {"bucket": "tides"}});
    let message = fails(&mut client, "store.defineQuery", again, "ALREADY_EXISTS").await;
    assert_eq!(message, "query \"ports\" is already defined");
    fails(&mut client, "store.undefineQuery", json!({"name": "ports"}), "QUERY_NOT_DEFINED").await;
    assert_eq!(client.ask("store.listQueries", json!({})).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn code_has_a_name_before_the_store_has() {
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("tides", tides()).await.unwrap();
    store.define_query("ports", json!({"bucket": "tides"})).await.unwrap();
    let server = serve_store(store, with_queries().0).await;
    let mut client = Client::connect(&server).await;
    let subscribed = client.ask("store.subscribe", json!({"query": "ports"})).await;
    assert_eq!(subscribed["data"], json!({"ports": []}));
    let listed = client.ask("store.listQueries", json!({})).await;
    let types: Vec<&Json> = listed["queries"].as_array().unwrap().iter().map(|query| &query["type"]).collect();
    assert_eq!(types, [&json!("programmatic"), &json!("programmatic")]);
    let stats = client.ask("store.stats", json!({})).await;
    assert_eq!(stats["queries"]["defined"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn code_says_what_is_wrong() {
    let (server, mut client, _) = serve_ports().await;
    let (code, error) = client.fail("store.subscribe", json!({"query": "ports", "params": {"least": 99}})).await;
    assert_eq!((code.as_str(), &error["message"]), ("VALIDATION_ERROR", &json!("99 is no level")));
    assert_eq!(error["details"], json!({"least": 99}));
    let delta = json!({"query": "ports", "mode": "delta"});
    fails(&mut client, "store.subscribe", delta, "VALIDATION_ERROR").await;
    assert_eq!(server.stats().subscriptions, 0, "none of them takes a place");
    // A query that fails later ends.
    client.ask("store.subscribe", json!({"query": "ports"})).await;
    client.ask("store.subscribe", json!({"query": "ports", "pos": true})).await;
    client.ask("store.dropBucket", json!({"name": "tides"})).await;
    let push = client.push().await;
    assert_eq!((&push["subscriptionId"], &push["error"]["code"]), (&json!("sub-4"), &json!("BUCKET_NOT_DEFINED")));
    wait_until_async("both have ended", PATIENCE, async || server.stats().subscriptions == 0).await;
    fails(&mut client, "store.subscribe", json!({"query": "ports"}), "BUCKET_NOT_DEFINED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_ends_the_subscription_and_nothing_else() {
    let (server, mut client, panics) = serve_ports().await;
    client.ask("store.subscribe", json!({"query": "fragile", "pos": true})).await;
    client.ask("store.subscribe", json!({"query": "ports"})).await;
    panics.store(true, SeqCst);
    fill(&mut client, &[("Hook", 1)]).await;
    let mut pushes = [client.push().await, client.push().await];
    pushes.sort_by_key(|push| push["subscriptionId"].to_string());
    let error = json!({"code": "INTERNAL_ERROR", "message": "Internal server error"});
    assert_eq!(pushes[0]["error"], error, "it says nothing of what is inside");
    assert_eq!(pushes[1]["data"], json!({"ports": ["Hook"]}));
    let message = fails(&mut client, "store.subscribe", json!({"query": "fragile"}), "INTERNAL_ERROR").await;
    assert_eq!(message, "Internal server error");
    // The others go on, and so does this one when it is well.
    panics.store(false, SeqCst);
    fill(&mut client, &[("Dover", 1)]).await;
    assert_eq!(client.push().await["data"], json!({"ports": ["Dover", "Hook"]}));
    client.ask("store.subscribe", json!({"query": "fragile"})).await;
    assert_eq!(server.stats().subscriptions, 2);
    assert_eq!(server.stats().panics, 0, "no connection has ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_large_is_not_given() {
    let (server, mut client) = serve_tides_with(with_queries().0.max_result_bytes(600)).await;
    client.ask("store.subscribe", json!({"query": "ports", "pos": true})).await;
    fill(&mut client, &[(&"x".repeat(400), 1)]).await;
    assert!(client.push().await.get("data").is_some());
    fill(&mut client, &[(&"y".repeat(400), 1)]).await;
    let push = client.push().await;
    assert_eq!(push["error"]["code"], "TOO_LARGE", "{push}");
    fails(&mut client, "store.subscribe", json!({"query": "ports"}), "TOO_LARGE").await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn code_has_positions_and_no_history() {
    let (_server, mut client, _) = serve_ports().await;
    let subscribed = client.ask("store.subscribe", json!({"query": "ports", "pos": true})).await;
    assert!(subscribed["pos"].is_string() && subscribed.get("resumed").is_none(), "{subscribed}");
    fill(&mut client, &[("Hook", 1)]).await;
    let push = client.push().await;
    assert!(push["pos"].is_string() && push["pos"] != subscribed["pos"], "{push}");
    let again = client.ask("store.subscribe", json!({"query": "ports", "since": push["pos"]})).await;
    assert_eq!((&again["resumed"], &again["data"]), (&json!(false), &json!({"ports": ["Hook"]})));
    assert_eq!(again["pos"], push["pos"], "nothing was committed meanwhile");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_code_lets_its_store_go() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let mut store = None;
        wait_until_async("the server before it has let go", PATIENCE, async || {
            store = Store::open(dir.path(), StoreOptions::default()).ok();
            store.is_some()
        })
        .await;
        let (store, _) = store.unwrap();
        let server = serve_store(store, with_queries().0).await;
        let mut client = Client::connect(&server).await;
        if round == 0 {
            client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
        }
        client.ask("store.subscribe", json!({"query": "ports"})).await;
        let stopping = tokio::spawn(server.stop(Duration::ZERO));
        assert_eq!(client.closed().await.0, 1000);
        drop(client);
        stopping.await.unwrap();
    }
}
