//! Deltas and positions: applying deltas gives the same result as a new query, also after a resume.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, options, serve_store};
use crate::tides_server::{FOUR_TIDES, expect_error, insert_tides, serve_tides, tide, tides_config};

/// Applies a delta to a result as a client would.
fn apply(result: &mut Json, delta: &Json) {
    // Null means that the result of an aggregate is unchanged.
    if delta.is_null() {
        return;
    }
    if let Some(snapshot) = delta.get("reset") {
        result.clone_from(snapshot);
        return;
    }
    let Json::Array(rows) = result else { panic!("a delta of a result that is not a list: {delta}") };
    let list = |name: &str| delta[name].as_array().cloned().unwrap_or_default();
    let index_of = |entry: &Json| entry["index"].as_u64().map(|index| usize::try_from(index).unwrap());
    for removed in list("removed").iter().rev() {
        let index = index_of(removed).unwrap_or_else(|| rows.iter().position(|row| row["id"] == *removed).unwrap());
        rows.remove(index);
    }
    let at = list("at");
    for (number, added) in list("added").iter().enumerate() {
        match (index_of(added), at.get(number).and_then(Json::as_u64)) {
            (Some(index), _) => rows.insert(index, added["record"].clone()),
            (None, Some(index)) => rows.insert(usize::try_from(index).unwrap(), added.clone()),
            (None, None) => rows.push(added.clone()),
        }
    }
    for changed in list("changed") {
        if let Some(index) = index_of(&changed) {
            rows[index] = changed["record"].clone();
        } else {
            let index = rows.iter().position(|row| row["id"] == changed["id"]).unwrap();
            rows[index] = changed;
        }
    }
}

fn queries() -> Vec<Json> {
    [
        json!({}),
        json!({"filter": {"level": {"$gte": 3}}}),
        json!({"filter": {"port": "p1"}, "fields": ["port", "level"]}),
        json!({"sort": {"level": "asc"}}),
        json!({"sort": {"port": "desc", "level": "asc"}, "limit": 3}),
        json!({"sort": {"level": "desc"}, "offset": 2, "limit": 3, "fields": ["level"]}),
        json!({"limit": 4}),
        json!({"aggregate": {"function": "count"}}),
        json!({"aggregate": {"function": "sum", "field": "level"}, "filter": {"port": "p0"}}),
        json!({"aggregate": {"function": "max", "field": "level"}}),
        json!({"aggregate": {"function": "avg", "field": "level", "groupBy": "port"}}),
    ]
    .into_iter()
    .map(|mut query| {
        query["bucket"] = json!("tides");
        query
    })
    .collect()
}

/// Returns a random write to the bucket.
fn change() -> impl Strategy<Value = (&'static str, Json)> {
    let key = 1..12_u64;
    let level = prop_oneof![4 => (0..7_i64).prop_map(Json::from), 1 => Just(Json::Null)];
    let data = (0..3_u8, level).prop_map(|(port, level)| json!({"port": format!("p{port}"), "level": level}));
    let in_tides = |mut params: Json| {
        params["bucket"] = json!("tides");
        params
    };
    prop_oneof![
        6 => (key.clone(), data.clone()).prop_map(move |(key, mut data)| {
            data["id"] = json!(key);
            ("store.upsert", in_tides(json!({"data": data})))
        }),
        3 => (key.clone(), data.clone()).prop_map(move |(key, mut data)| {
            data["id"] = json!(key);
            ("store.insert", in_tides(json!({"data": data})))
        }),
        4 => key.clone().prop_map(move |key| ("store.delete", in_tides(json!({"key": key})))),
        2 => (key.clone(), key, data).prop_map(|(one, other, data)| {
            let operations = json!([
                {"op": "delete", "bucket": "tides", "key": one},
                {"op": "delete", "bucket": "tides", "key": other},
                {"op": "insert", "bucket": "tides", "data": data},
            ]);
            ("store.transaction", json!({"operations": operations}))
        }),
        1 => Just(("store.clear", in_tides(json!({})))),
    ]
}

/// The state that a subscriber holds of a query.
#[derive(Debug, Clone, Default, PartialEq)]
struct SubscriberState {
    data: Json,
    pos: String,
}

impl SubscriberState {
    fn first(subscribed: &Json) -> (String, Self) {
        let state = Self { data: subscribed["data"].clone(), pos: subscribed["pos"].as_str().unwrap().to_owned() };
        (subscribed["subscriptionId"].as_str().unwrap().to_owned(), state)
    }
}

/// A client that subscribes to all queries in one mode.
struct Subscriber {
    client: Client,
    states: Vec<(String, SubscriberState)>,
    is_delta: bool,
}

impl Subscriber {
    async fn new(mut client: Client, mode: &str) -> Self {
        let mut states = Vec::new();
        for query in queries() {
            let subscribed = client.call("store.subscribe", json!({"config": query, "mode": mode})).await;
            states.push(SubscriberState::first(&subscribed));
        }
        Self { client, states, is_delta: mode == "delta" }
    }

    fn apply_push(&mut self, push: &Json) {
        let (_, state) = self.states.iter_mut().find(|(id, _)| push["subscriptionId"] == json!(id)).unwrap();
        push["pos"].as_str().unwrap().clone_into(&mut state.pos);
        match push.get("data") {
            Some(delta) if self.is_delta => apply(&mut state.data, delta),
            data => state.data = data.cloned().unwrap_or_default(),
        }
    }

    /// Applies pushes until the results equal the expected ones.
    async fn catch_up(&mut self, expected: &[Json]) {
        while self.states.iter().zip(expected).any(|((_, state), expected)| state.data != *expected) {
            let push = self.client.push().await;
            self.apply_push(&push);
        }
    }
}

async fn query_all(client: &mut Client) -> Vec<Json> {
    let mut results = Vec::new();
    for query in queries() {
        results.push(client.call("store.query", query).await);
    }
    results
}

/// Runs random commits. Deltas, snapshots and queries must agree after each batch.
#[tokio::test(flavor = "multi_thread")]
async fn deltas_agree_with_snapshots() {
    let (server, mut writer) = serve_tides().await;
    let mut deltas = Subscriber::new(Client::connect(&server).await, "delta").await;
    let mut snapshots = Subscriber::new(Client::connect(&server).await, "whole").await;
    let mut runner = TestRunner::deterministic();
    for round in 0..60 {
        // A batch of pipelined writes.
        let mut sent = Vec::new();
        for _ in 0..=round % 10 {
            let (operation, params) = change().new_tree(&mut runner).unwrap().current();
            sent.push(writer.send(operation, params).await);
        }
        for id in sent {
            writer.reply(id).await;
        }
        let expected = query_all(&mut writer).await;
        deltas.catch_up(&expected).await;
        snapshots.catch_up(&expected).await;
    }
}

/// A subscriber that resumes from a position gets the changes since then.
#[tokio::test(flavor = "multi_thread")]
async fn resumed_subscription_gets_the_changes() {
    let (server, mut writer) = serve_tides().await;
    let mut away = Subscriber::new(Client::connect(&server).await, "delta").await;
    let mut runner = TestRunner::deterministic();
    let mut resumed = 0;
    for _ in 0..25 {
        for _ in 0..8 {
            let (operation, params) = change().new_tree(&mut runner).unwrap().current();
            let id = writer.send(operation, params).await;
            writer.reply(id).await;
        }
        let expected = query_all(&mut writer).await;
        for ((query, expected), (_, state)) in queries().into_iter().zip(expected).zip(&mut away.states) {
            let params = json!({"config": query, "mode": "delta", "since": state.pos});
            let subscribed = writer.call("store.subscribe", params).await;
            let (id, now) = SubscriberState::first(&subscribed);
            if subscribed["resumed"] == json!(true) {
                resumed += 1;
                if subscribed["data"] != json!({"added": [], "changed": [], "removed": []}) {
                    apply(&mut state.data, &subscribed["data"]);
                }
                state.pos = now.pos;
            } else {
                assert_eq!(subscribed["resumed"], false);
                *state = now;
            }
            assert_eq!(state.data, expected, "{query}");
            writer.call("store.unsubscribe", json!({"subscriptionId": id})).await;
        }
    }
    assert!(resumed > 100, "{resumed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_resumes_from_its_position() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let config = json!({"bucket": "tides", "filter": {"level": {"$gt": 0}}});
    let subscribed = client.call("store.subscribe", json!({"config": config, "pos": true})).await;
    assert!(subscribed.get("resumed").is_none(), "no resume was requested: {subscribed}");
    client.call("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    let since = subscribed["pos"].clone();
    let nothing = json!({"added": [], "changed": [], "removed": []});
    let again = client.call("store.subscribe", json!({"config": config, "since": since})).await;
    assert_eq!((&again["resumed"], &again["data"], &again["pos"]), (&json!(true), &nothing, &since));
    client.call("store.unsubscribe", json!({"subscriptionId": again["subscriptionId"]})).await;
    insert_tides(&mut client, &[("Dover", 2), ("Deal", -2)]).await;
    client.call("store.delete", json!({"bucket": "tides", "key": 1})).await;
    let again = client.call("store.subscribe", json!({"config": config, "since": since})).await;
    let delta = json!({"added": [tide(5, "Dover", 2)], "changed": [], "removed": [1]});
    assert_eq!((&again["resumed"], &again["data"]), (&json!(true), &delta));
    // After that, pushes are snapshots as requested.
    insert_tides(&mut client, &[("Ryde", 3)]).await;
    let push = client.push().await;
    let ids: Vec<u64> = push["data"].as_array().unwrap().iter().map(|tide| tide["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [2, 4, 5, 7]);
    // The position of a push works like that of a reply.
    let again = client.call("store.subscribe", json!({"config": config, "since": push["pos"]})).await;
    assert_eq!((&again["resumed"], &again["data"]), (&json!(true), &nothing));
    // A named query with the same definition can resume from it.
    client.call("store.defineQuery", json!({"name": "high", "config": config})).await;
    let named = client.call("store.subscribe", json!({"query": "high", "since": since})).await;
    assert_eq!(named["resumed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_position_gives_a_snapshot() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let config = json!({"bucket": "tides"});
    let pos = client.call("store.subscribe", json!({"config": config, "pos": true})).await["pos"]
        .as_str()
        .unwrap()
        .to_owned();
    let other_epoch = format!("{}{}", if pos.starts_with('0') { "1" } else { "0" }, &pos[1..]);
    let future = format!("{}ffffffffffffffff{}", &pos[..16], &pos[32..]);
    let snapshot = client.call("store.all", json!({"bucket": "tides"})).await;
    for since in ["", "rubbish", &other_epoch, &future, &pos[1..], &format!("{pos}0"), &"💧".repeat(16)] {
        for mode in ["delta", "whole"] {
            let subscribed =
                client.call("store.subscribe", json!({"config": config, "since": since, "mode": mode})).await;
            assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &snapshot), "{since}");
        }
    }
    // A position of another query cannot be used.
    for query in [json!({"bucket": "tides", "limit": 9}), json!({"bucket": "tides", "filter": {"level": {"$gt": -9}}})]
    {
        let subscribed = client.call("store.subscribe", json!({"config": query, "since": pos})).await;
        assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &snapshot), "{query}");
    }
    // A new bucket with the same name is a different bucket.
    client.call("store.dropBucket", json!({"name": "tides"})).await;
    expect_error(&mut client, "store.subscribe", json!({"config": config, "since": pos}), "BUCKET_NOT_DEFINED").await;
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    let subscribed = client.call("store.subscribe", json!({"config": config, "since": pos})).await;
    assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &json!([])));
}

#[tokio::test(flavor = "multi_thread")]
async fn position_older_than_the_history_gives_a_snapshot() {
    let server = serve_store(Store::memory(StoreOptions::default().history_bytes(4096)), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "tides"}, "pos": true})).await;
    client.call("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    insert_tides(&mut client, &[("Hook", 1); 100]).await;
    let params = json!({"config": {"bucket": "tides"}, "since": subscribed["pos"], "mode": "delta"});
    let again = client.call("store.subscribe", params).await;
    assert_eq!(again["resumed"], false);
    assert_eq!(again["data"].as_array().unwrap().len(), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn position_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
    let store = open();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let mut held = client.call("store.subscribe", json!({"query": "all", "mode": "delta"})).await;
    let since = held["pos"].clone();
    insert_tides(&mut client, &[("Dover", 2)]).await;
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    stopping.await.unwrap();
    store.close().unwrap();
    let server = serve_store(open(), options()).await;
    let mut client = Client::connect(&server).await;
    let deleted = client.call("store.delete", json!({"bucket": "tides", "key": 1})).await;
    assert_eq!(deleted, json!({"deleted": true}));
    let again = client.call("store.subscribe", json!({"query": "all", "mode": "delta", "since": since})).await;
    assert_eq!(again["resumed"], true, "{again}");
    assert_eq!(again["data"]["removed"], json!([1]));
    assert_eq!(again["data"]["added"].as_array().unwrap().len(), 1);
    apply(&mut held["data"], &again["data"]);
    assert_eq!(held["data"], client.call("store.all", json!({"bucket": "tides"})).await);
}
