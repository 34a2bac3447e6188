//! Live subscriptions: what is pushed, what is not, and how they end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use serde_json::{Value as Json, json};
use tidewire::{ConnectionLimits, Server};
use tidewire_store::{Clock, Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::page::metric;
use crate::tides::{FOUR, NOW, fails, fill, refuses, serve_tides, serve_tides_with, tide, tides};

fn push(id: &str, data: impl Into<Json>) -> Json {
    let data: Json = data.into();
    json!({"type": "push", "channel": "subscription", "subscriptionId": id, "data": data})
}

async fn insert(client: &mut Client, port: &str, level: impl Into<Json>) -> Json {
    let level: Json = level.into();
    client.ask("store.insert", json!({"bucket": "tides", "data": {"port": port, "level": level}})).await
}

/// The number of subscriptions that the server has ended.
async fn ended(server: &Server) -> u64 {
    metric(server, "subscriptions_ended_total").await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_the_result_is_pushed_whole() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"bucket": "tides", "filter": {"level": {"$gte": "{{ params.least }}"}}});
    client.ask("store.defineQuery", json!({"name": "high", "config": config})).await;
    fill(&mut client, &FOUR).await;
    let (b, d) = (tide(2, "Brest", 7), tide(4, "Hook", 5));
    let subscribed = client.ask("store.subscribe", json!({"query": "high", "params": {"least": 5}})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": [b, d]}), "nothing but what is asked for");
    let e = insert(&mut client, "Dover", 6).await;
    assert_eq!(client.push().await, push("sub-1", json!([b, d, e])));
    // It comes into the result in its place, and leaves it.
    let a = client.ask("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 9}})).await;
    assert_eq!(client.push().await, push("sub-1", json!([a, b, d, e])));
    client.ask("store.update", json!({"bucket": "tides", "key": 2, "data": {"level": 0}})).await;
    assert_eq!(client.push().await, push("sub-1", json!([a, d, e])));
    client.ask("store.delete", json!({"bucket": "tides", "key": 1})).await;
    assert_eq!(client.push().await, push("sub-1", json!([d, e])));
    // What does not show is not pushed: the next push is of what does.
    insert(&mut client, "Hook", 1).await;
    client.ask("store.delete", json!({"bucket": "tides", "key": 3})).await;
    client.ask("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await, push("sub-1", json!([])));
    // Nothing more to clear.
    client.ask("store.clear", json!({"bucket": "tides"})).await;
    let done = client
        .ask(
            "store.insertMany",
            json!({"bucket": "tides", "data": [{"port": "A", "level": 8}, {"port": "B", "level": 9}]}),
        )
        .await;
    assert_eq!(client.push().await, push("sub-1", done["records"].clone()), "many at once are one change");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aggregate_is_silent_until_its_value_changes() {
    let (_server, mut client) = serve_tides().await;
    let aggregate = |function: &str| json!({"bucket": "tides", "aggregate": {"function": function, "field": "level"}});
    let mut count = aggregate("count");
    count["aggregate"].as_object_mut().unwrap().remove("field");
    let subscribed = client.ask("store.subscribe", json!({"config": count})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": 0}));
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-1", json!(1)));
    client.ask("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 4}})).await;
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-1", json!(2)), "the update changed no count");
    client.ask("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await;
    // The least of nothing is nothing: there is no data, in the reply and in a push.
    client.ask("store.clear", json!({"bucket": "tides"})).await;
    let subscribed = client.ask("store.subscribe", json!({"config": aggregate("min")})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-2"}));
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-2", json!(3)));
    client.ask("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await, json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-2"}));
    let grouped = json!({"bucket": "tides", "aggregate": {"function": "sum", "field": "level", "groupBy": "port"}});
    let subscribed = client.ask("store.subscribe", json!({"config": grouped})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-3", "data": []}));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_room_or_expires_is_pushed() {
    let clock = Arc::new(AtomicU64::new(NOW));
    let told = Arc::clone(&clock);
    let store_options = StoreOptions::default().clock(Clock::new(move || told.load(SeqCst))).sweep_interval(None);
    let store = Store::memory(store_options);
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let mut config = tides();
    (config["maxSize"], config["ttl"]) = (json!(2), json!("1m"));
    client.ask("store.defineBucket", json!({"name": "tides", "config": config})).await;
    client.ask("store.subscribe", json!({"config": {"bucket": "tides", "fields": ["id"]}})).await;
    for (level, expected) in
        [(1, json!([{"id": 1}])), (2, json!([{"id": 1}, {"id": 2}])), (3, json!([{"id": 2}, {"id": 3}]))]
    {
        insert(&mut client, "Hook", level).await;
        assert_eq!(client.push().await, push("sub-1", expected));
    }
    clock.fetch_add(61_000, SeqCst);
    store.sweep().await.unwrap();
    assert_eq!(client.push().await, push("sub-1", json!([])));
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_are_the_servers_and_subscriptions_their_connections() {
    let (server, mut client) = serve_tides().await;
    let mut other = Client::connect(&server).await;
    let subscribe = json!({"config": {"bucket": "tides"}});
    for (client, id) in [(&mut client, "sub-1"), (&mut other, "sub-2")] {
        assert_eq!(client.ask("store.subscribe", subscribe.clone()).await["subscriptionId"], id);
    }
    // Equal ones are two.
    assert_eq!(client.ask("store.subscribe", subscribe).await["subscriptionId"], "sub-3");
    let unsubscribe = |id: &str| json!({"subscriptionId": id});
    for id in [
        "sub-2",
        "sub-4",
        "sub-0",
        "sub-",
        "sub",
        "1",
        "sub-01",
        "sub-+1",
        "SUB-1",
        "sub-1 ",
        "sub-18446744073709551616",
    ] {
        fails(&mut client, "store.unsubscribe", unsubscribe(id), "NOT_FOUND").await;
    }
    assert_eq!(client.ask("store.unsubscribe", unsubscribe("sub-1")).await, json!({"unsubscribed": true}));
    fails(&mut client, "store.unsubscribe", unsubscribe("sub-1"), "NOT_FOUND").await;
    let wrong: &[(&str, &[Json], &str)] =
        &[("subscriptionId", &[Json::Null, json!(""), json!(1), json!([])], "a non-empty string")];
    refuses(&mut client, "store.unsubscribe", unsubscribe("sub-3"), wrong).await;
    let a = insert(&mut client, "Hook", 1).await;
    assert_eq!(client.push().await, push("sub-3", json!([a])));
    assert_eq!(other.push().await, push("sub-2", json!([a])));
    drop(client);
    wait_until_async("it has left", PATIENCE, async || server.connection_count() == 1).await;
    assert_eq!(server.stats().subscriptions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_subscriptions_are_checked() {
    let (_server, mut client) = serve_tides().await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    let config = json!({"bucket": "tides", "filter": {"port": "{{ params.port }}"}});
    client.ask("store.defineQuery", json!({"name": "of", "config": config})).await;
    let text = "a non-empty string";
    let wrong: &[(&str, &[Json], &str)] = &[
        ("query", &[Json::Null, json!(""), json!(7), json!({})], text),
        ("mode", &[json!("deltas")], "\"delta\""),
        ("mode", &[json!(7), json!(""), json!({})], ""),
        ("since", &[json!(7), json!({})], "a string"),
        ("pos", &[json!("yes"), json!(1), json!({})], "true or false"),
        ("config", &[json!("x"), json!([]), json!({})], ""),
    ];
    refuses(&mut client, "store.subscribe", json!({"query": "all"}), wrong).await;
    let both = json!({"query": "all", "config": {"bucket": "tides"}});
    let message = fails(&mut client, "store.subscribe", both, "VALIDATION_ERROR").await;
    assert!(message.contains("\"query\" and \"config\""), "{message}");
    let message = fails(&mut client, "store.subscribe", json!({"query": "none"}), "QUERY_NOT_DEFINED").await;
    assert_eq!(message, "query \"none\" is not defined");
    fails(&mut client, "store.subscribe", json!({"config": {"bucket": "none"}}), "BUCKET_NOT_DEFINED").await;
    // A parameter that is not given is missed; whatever has no names gives none.
    for params in [json!({}), Json::Null, json!("x"), json!([1]), json!({"other": 1})] {
        let message =
            fails(&mut client, "store.subscribe", json!({"query": "of", "params": params}), "VALIDATION_ERROR").await;
        assert!(message.contains("port"), "{message}");
        client.ask("store.subscribe", json!({"query": "all", "params": params})).await;
    }
    client.ask("store.subscribe", json!({"query": "of", "params": {"port": null}})).await;
    let subscribed = client.ask("store.subscribe", json!({"config": config, "params": {"port": "Hook"}})).await;
    assert_eq!(subscribed["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn there_may_be_only_so_many() {
    let options = options()
        .connection_limits(ConnectionLimits::default().max_subscriptions_per_connection(2).max_total_subscriptions(3));
    let (server, mut client) = serve_tides_with(options).await;
    let mut other = Client::connect(&server).await;
    let subscribe = json!({"config": {"bucket": "tides"}});
    for _ in 0..2 {
        client.ask("store.subscribe", subscribe.clone()).await;
    }
    fails(&mut client, "store.subscribe", subscribe.clone(), "RATE_LIMITED").await;
    other.ask("store.subscribe", subscribe.clone()).await;
    fails(&mut other, "store.subscribe", subscribe.clone(), "RATE_LIMITED").await;
    client.ask("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await;
    other.ask("store.subscribe", subscribe.clone()).await;
    // One that fails takes no place.
    client.ask("store.unsubscribe", json!({"subscriptionId": "sub-2"})).await;
    for _ in 0..5 {
        fails(&mut client, "store.subscribe", json!({"query": "none"}), "QUERY_NOT_DEFINED").await;
    }
    client.ask("store.subscribe", subscribe).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_is_told_to_who_asks_for_it() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"bucket": "tides"});
    for (asked, is_told) in [
        (json!({}), false),
        (json!({"pos": false}), false),
        (json!({"pos": null, "mode": null, "since": null}), false),
        (json!({"pos": true}), true),
        (json!({"mode": "whole"}), true),
        (json!({"mode": "delta"}), true),
        (json!({"since": "x"}), true),
        (json!({"since": ""}), true),
    ] {
        let mut params = asked.clone();
        params["config"] = config.clone();
        let subscribed = client.ask("store.subscribe", params).await;
        assert_eq!(subscribed["pos"].is_string(), is_told, "{asked}: {subscribed}");
        assert_eq!(subscribed.get("resumed").is_some(), asked["since"].is_string(), "{asked}: {subscribed}");
        client.ask("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await;
        let push = client.push().await;
        assert_eq!(push["pos"].is_string(), is_told, "{asked}: {push}");
        assert_eq!(push.as_object().unwrap().len(), if is_told { 5 } else { 4 }, "{asked}: {push}");
        assert!(!is_told || push["pos"] != subscribed["pos"], "it moves on");
        client.ask("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deltas() {
    let (_server, mut client) = serve_tides().await;
    fill(&mut client, &FOUR).await;
    let subscribed = client.ask("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
    assert_eq!(subscribed["data"].as_array().unwrap().len(), 4, "the first reply is as usual");
    let e = insert(&mut client, "Dover", 9).await;
    assert_eq!(client.push().await["data"], json!({"added": [e], "changed": [], "removed": []}));
    let a = client.ask("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 9}})).await;
    assert_eq!(client.push().await["data"], json!({"added": [], "changed": [a], "removed": []}));
    client.ask("store.delete", json!({"bucket": "tides", "key": 2})).await;
    assert_eq!(client.push().await["data"], json!({"added": [], "changed": [], "removed": [2]}));
    client.ask("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    // With a sort or a limit each has its index.
    let sorted = json!({"bucket": "tides", "sort": {"level": "desc"}, "limit": 2, "fields": ["port"]});
    let subscribed = client.ask("store.subscribe", json!({"config": sorted, "mode": "delta"})).await;
    assert_eq!(subscribed["data"], json!([{"port": "Hook"}, {"port": "Dover"}]));
    insert(&mut client, "Brest", 20).await;
    let expected = json!({
        "added": [{"index": 0, "record": {"port": "Brest"}}],
        "changed": [],
        "removed": [{"index": 1, "key": 5}],
    });
    assert_eq!(client.push().await["data"], expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_is_dropped_ends_what_follows_it() {
    let (server, mut client) = serve_tides().await;
    client.ask("store.defineBucket", json!({"name": "other", "config": tides()})).await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    for params in [
        json!({"query": "all"}),
        json!({"query": "all", "pos": true}),
        json!({"config": {"bucket": "tides"}, "mode": "delta"}),
        json!({"config": {"bucket": "other"}, "pos": true}),
    ] {
        client.ask("store.subscribe", params).await;
    }
    client.ask("store.dropBucket", json!({"name": "tides"})).await;
    let mut told = [client.push().await, client.push().await];
    told.sort_by_key(|push| push["subscriptionId"].to_string());
    for (push, id) in told.iter().zip(["sub-2", "sub-3"]) {
        assert_eq!(push["error"]["code"], "BUCKET_NOT_DEFINED");
        assert!(push["error"]["message"].is_string());
        let keys: Vec<&str> = push.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys.len(), 4, "type, channel, subscriptionId and error: {push}");
        assert_eq!((&push["type"], &push["channel"]), (&json!("push"), &json!("subscription")));
        assert_eq!(push["subscriptionId"], id);
    }
    // Of the first nothing is said, but it is over, and counted.
    wait_until_async("all have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(ended(&server).await, 3);
    for id in ["sub-1", "sub-2", "sub-3"] {
        fails(&mut client, "store.unsubscribe", json!({"subscriptionId": id}), "NOT_FOUND").await;
    }
    // A bucket of the same name is another one.
    client.ask("store.defineBucket", json!({"name": "tides", "config": tides()})).await;
    insert(&mut client, "Hook", 1).await;
    client.ask("store.insert", json!({"bucket": "other", "data": {"port": "Hook"}})).await;
    assert_eq!(client.push().await["subscriptionId"], "sub-4");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_is_undefined_ends_what_follows_it_by_name() {
    let (server, mut client) = serve_tides().await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    client.ask("store.subscribe", json!({"query": "all"})).await;
    client.ask("store.subscribe", json!({"query": "all", "mode": "delta"})).await;
    client.ask("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    client.ask("store.undefineQuery", json!({"name": "all"})).await;
    let push = client.push().await;
    assert_eq!((&push["subscriptionId"], &push["error"]["code"]), (&json!("sub-2"), &json!("QUERY_NOT_DEFINED")));
    wait_until_async("both have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(ended(&server).await, 2);
    insert(&mut client, "Hook", 1).await;
    assert_eq!(client.push().await["subscriptionId"], "sub-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_has_become_too_large_ends_its_subscription() {
    let options = options().max_result_bytes(1500);
    let (server, mut client) = serve_tides_with(options).await;
    let config = json!({"bucket": "tides", "filter": {"port": {"$startsWith": "x"}}});
    client.ask("store.subscribe", json!({"config": config})).await;
    client.ask("store.subscribe", json!({"config": config, "pos": true})).await;
    client.ask("store.subscribe", json!({"config": {"bucket": "tides", "aggregate": {"function": "count"}}})).await;
    insert(&mut client, &"x".repeat(1000), 1).await;
    for _ in 0..3 {
        assert!(client.push().await.get("data").is_some());
    }
    insert(&mut client, &"x".repeat(1000), 2).await;
    let mut pushes = [client.push().await, client.push().await];
    pushes.sort_by_key(|push| push["subscriptionId"].to_string());
    assert_eq!(pushes[0]["error"]["code"], "TOO_LARGE", "{}", pushes[0]);
    assert_eq!(pushes[1], push("sub-3", json!(2)));
    wait_until_async("both have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(ended(&server).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delta_that_is_too_large_ends_its_subscription() {
    let options = options().max_result_bytes(1500);
    let (_server, mut client) = serve_tides_with(options).await;
    client.ask("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
    let record = json!({"port": "x".repeat(1000)});
    client.ask("store.insertMany", json!({"bucket": "tides", "data": [record, record]})).await;
    let push = client.push().await;
    assert_eq!(push["error"]["code"], "TOO_LARGE", "{push}");
}
/// Whoever reads what it is sent is no slow consumer, however much one commit changes.
#[tokio::test(flavor = "multi_thread")]
async fn many_large_results_at_once_reach_a_client_that_reads() {
    let (server, mut writer) = serve_tides().await;
    let mut client = Client::connect(&server).await;
    let record = json!({"port": "x".repeat(100_000), "level": 1});
    writer.ask("store.insertMany", json!({"bucket": "tides", "data": [record, record, record, record, record]})).await;
    for _ in 0..20 {
        client.ask("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    }
    // Twenty times half a megabyte.
    writer.ask("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 2}})).await;
    let mut told = std::collections::BTreeSet::new();
    while told.len() < 20 {
        let push = client.push().await;
        assert_eq!(push["data"][0]["level"], 2);
        told.insert(push["subscriptionId"].to_string());
    }
    assert_eq!(server.stats().slow_consumers, 0);
}
