//! Deltas and positions: whoever applies what it is told has what asking anew gives, also after having been away.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, options, serve_store};
use crate::tides::{FOUR, fails, fill, serve_tides, tide, tides};

/// Does to a result what a delta says, as a client would.
fn apply(result: &mut Json, delta: &Json) {
    // What was computed is as it was.
    if delta.is_null() {
        return;
    }
    if let Some(whole) = delta.get("reset") {
        result.clone_from(whole);
        return;
    }
    let Json::Array(rows) = result else { panic!("a delta of something that is no list: {delta}") };
    let list = |name: &str| delta[name].as_array().cloned().unwrap_or_default();
    let place = |entry: &Json| entry["index"].as_u64().map(|index| usize::try_from(index).unwrap());
    for removed in list("removed").iter().rev() {
        let index = place(removed).unwrap_or_else(|| rows.iter().position(|row| row["id"] == *removed).unwrap());
        rows.remove(index);
    }
    let at = list("at");
    for (number, added) in list("added").iter().enumerate() {
        match (place(added), at.get(number).and_then(Json::as_u64)) {
            (Some(index), _) => rows.insert(index, added["record"].clone()),
            (None, Some(index)) => rows.insert(usize::try_from(index).unwrap(), added.clone()),
            (None, None) => rows.push(added.clone()),
        }
    }
    for changed in list("changed") {
        if let Some(index) = place(&changed) {
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

/// Something that is done to the bucket.
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

/// What somebody holds who follows a query.
#[derive(Debug, Clone, Default, PartialEq)]
struct Held {
    data: Json,
    pos: String,
}

impl Held {
    fn first(subscribed: &Json) -> (String, Self) {
        let held = Self { data: subscribed["data"].clone(), pos: subscribed["pos"].as_str().unwrap().to_owned() };
        (subscribed["subscriptionId"].as_str().unwrap().to_owned(), held)
    }
}

/// A client that follows all queries one way.
struct Watcher {
    client: Client,
    held: Vec<(String, Held)>,
    is_delta: bool,
}

impl Watcher {
    async fn new(mut client: Client, mode: &str) -> Self {
        let mut held = Vec::new();
        for query in queries() {
            let subscribed = client.ask("store.subscribe", json!({"config": query, "mode": mode})).await;
            held.push(Held::first(&subscribed));
        }
        Self { client, held, is_delta: mode == "delta" }
    }

    fn take(&mut self, push: &Json) {
        let (_, held) = self.held.iter_mut().find(|(id, _)| push["subscriptionId"] == json!(id)).unwrap();
        push["pos"].as_str().unwrap().clone_into(&mut held.pos);
        match push.get("data") {
            Some(delta) if self.is_delta => apply(&mut held.data, delta),
            data => held.data = data.cloned().unwrap_or_default(),
        }
    }

    /// Takes what is pushed until all results are these.
    async fn catch_up(&mut self, expected: &[Json]) {
        while self.held.iter().zip(expected).any(|((_, held), expected)| held.data != *expected) {
            let push = self.client.push().await;
            self.take(&push);
        }
    }
}

async fn ask_all(client: &mut Client) -> Vec<Json> {
    let mut results = Vec::new();
    for query in queries() {
        results.push(client.ask("store.query", query).await);
    }
    results
}

/// Some hundred random commits. The deltas of each lead to what the others are told, and to what asking gives.
#[tokio::test(flavor = "multi_thread")]
async fn deltas_lead_to_what_whole_results_are() {
    let (server, mut writer) = serve_tides().await;
    let mut deltas = Watcher::new(Client::connect(&server).await, "delta").await;
    let mut wholes = Watcher::new(Client::connect(&server).await, "whole").await;
    let mut runner = TestRunner::deterministic();
    for round in 0..60 {
        // Many at once, without waiting, and then a look.
        let mut sent = Vec::new();
        for _ in 0..=round % 10 {
            let (operation, params) = change().new_tree(&mut runner).unwrap().current();
            sent.push(writer.send(operation, params).await);
        }
        for id in sent {
            writer.reply(id).await;
        }
        let expected = ask_all(&mut writer).await;
        deltas.catch_up(&expected).await;
        wholes.catch_up(&expected).await;
    }
}

/// Whoever comes back with a position is told what has changed, whatever has.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_was_away_is_told_what_has_changed() {
    let (server, mut writer) = serve_tides().await;
    let mut away = Watcher::new(Client::connect(&server).await, "delta").await;
    let mut runner = TestRunner::deterministic();
    let mut resumed = 0;
    for _ in 0..25 {
        for _ in 0..8 {
            let (operation, params) = change().new_tree(&mut runner).unwrap().current();
            let id = writer.send(operation, params).await;
            writer.reply(id).await;
        }
        let expected = ask_all(&mut writer).await;
        for ((query, expected), (_, held)) in queries().into_iter().zip(expected).zip(&mut away.held) {
            let params = json!({"config": query, "mode": "delta", "since": held.pos});
            let subscribed = writer.ask("store.subscribe", params).await;
            let (id, now) = Held::first(&subscribed);
            if subscribed["resumed"] == json!(true) {
                resumed += 1;
                if subscribed["data"] != json!({"added": [], "changed": [], "removed": []}) {
                    apply(&mut held.data, &subscribed["data"]);
                }
                held.pos = now.pos;
            } else {
                assert_eq!(subscribed["resumed"], false);
                *held = now;
            }
            assert_eq!(held.data, expected, "{query}");
            writer.ask("store.unsubscribe", json!({"subscriptionId": id})).await;
        }
    }
    assert!(resumed > 100, "{resumed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_goes_on_from_its_position() {
    let (_server, mut client) = serve_tides().await;
    fill(&mut client, &FOUR).await;
    let config = json!({"bucket": "tides", "filter": {"level": {"$gt": 0}}});
    let subscribed = client.ask("store.subscribe", json!({"config": config, "pos": true})).await;
    assert!(subscribed.get("resumed").is_none(), "nobody asked: {subscribed}");
    client.ask("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    let since = subscribed["pos"].clone();
    let nothing = json!({"added": [], "changed": [], "removed": []});
    let again = client.ask("store.subscribe", json!({"config": config, "since": since})).await;
    assert_eq!((&again["resumed"], &again["data"], &again["pos"]), (&json!(true), &nothing, &since));
    client.ask("store.unsubscribe", json!({"subscriptionId": again["subscriptionId"]})).await;
    fill(&mut client, &[("Dover", 2), ("Deal", -2)]).await;
    client.ask("store.delete", json!({"bucket": "tides", "key": 1})).await;
    let again = client.ask("store.subscribe", json!({"config": config, "since": since})).await;
    let delta = json!({"added": [tide(5, "Dover", 2)], "changed": [], "removed": [1]});
    assert_eq!((&again["resumed"], &again["data"]), (&json!(true), &delta));
    // From there it goes on as it was asked to: whole.
    fill(&mut client, &[("Ryde", 3)]).await;
    let push = client.push().await;
    let ids: Vec<u64> = push["data"].as_array().unwrap().iter().map(|tide| tide["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [2, 4, 5, 7]);
    // A push's position is as good as a reply's.
    let again = client.ask("store.subscribe", json!({"config": config, "since": push["pos"]})).await;
    assert_eq!((&again["resumed"], &again["data"]), (&json!(true), &nothing));
    // A name that stands for an equal query is the same to it.
    client.ask("store.defineQuery", json!({"name": "high", "config": config})).await;
    let named = client.ask("store.subscribe", json!({"query": "high", "since": since})).await;
    assert_eq!(named["resumed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_says_nothing_gives_the_whole() {
    let (_server, mut client) = serve_tides().await;
    fill(&mut client, &FOUR).await;
    let config = json!({"bucket": "tides"});
    let pos =
        client.ask("store.subscribe", json!({"config": config, "pos": true})).await["pos"].as_str().unwrap().to_owned();
    let other_epoch = format!("{}{}", if pos.starts_with('0') { "1" } else { "0" }, &pos[1..]);
    let future = format!("{}ffffffffffffffff{}", &pos[..16], &pos[32..]);
    let whole = client.ask("store.all", json!({"bucket": "tides"})).await;
    for since in ["", "rubbish", &other_epoch, &future, &pos[1..], &format!("{pos}0"), &"💧".repeat(16)] {
        for mode in ["delta", "whole"] {
            let subscribed =
                client.ask("store.subscribe", json!({"config": config, "since": since, "mode": mode})).await;
            assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &whole), "{since}");
        }
    }
    // The position of another query is none of this one's.
    for query in [json!({"bucket": "tides", "limit": 9}), json!({"bucket": "tides", "filter": {"level": {"$gt": -9}}})]
    {
        let subscribed = client.ask("store.subscribe", json!({"config": query, "since": pos})).await;
        assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &whole), "{query}");
    }
    // A bucket of the same name is another one.
    client.ask("store.dropBucket", json!({"name": "tides"})).await;
    fails(&mut client, "store.subscribe", json!({"config": config, "since": pos}), "BUCKET_NOT_DEFINED").await;
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    let subscribed = client.ask("store.subscribe", json!({"config": config, "since": pos})).await;
    assert_eq!((&subscribed["resumed"], &subscribed["data"]), (&json!(false), &json!([])));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_history_has_forgotten_gives_the_whole() {
    let server = serve_store(Store::memory(StoreOptions::default().history_bytes(4096)), options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    let subscribed = client.ask("store.subscribe", json!({"config": {"bucket": "tides"}, "pos": true})).await;
    client.ask("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    fill(&mut client, &[("Hook", 1); 100]).await;
    let params = json!({"config": {"bucket": "tides"}, "since": subscribed["pos"], "mode": "delta"});
    let again = client.ask("store.subscribe", params).await;
    assert_eq!(again["resumed"], false);
    assert_eq!(again["data"].as_array().unwrap().len(), 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_outlives_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Store::open(dir.path(), StoreOptions::default()).unwrap().0;
    let store = open();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    fill(&mut client, &FOUR).await;
    let mut held = client.ask("store.subscribe", json!({"query": "all", "mode": "delta"})).await;
    let since = held["pos"].clone();
    fill(&mut client, &[("Dover", 2)]).await;
    let stopping = tokio::spawn(server.stop(Duration::ZERO));
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    stopping.await.unwrap();
    store.close().unwrap();
    let server = serve_store(open(), options()).await;
    let mut client = Client::connect(&server).await;
    let deleted = client.ask("store.delete", json!({"bucket": "tides", "key": 1})).await;
    assert_eq!(deleted, json!({"deleted": true}));
    let again = client.ask("store.subscribe", json!({"query": "all", "mode": "delta", "since": since})).await;
    assert_eq!(again["resumed"], true, "{again}");
    assert_eq!(again["data"]["removed"], json!([1]));
    assert_eq!(again["data"]["added"].as_array().unwrap().len(), 1);
    apply(&mut held["data"], &again["data"]);
    assert_eq!(held["data"], client.ask("store.all", json!({"bucket": "tides"})).await);
}
