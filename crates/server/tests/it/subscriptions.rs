//! Live subscriptions: their pushes and their end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use serde_json::{Value as Json, json};
use tidewire::{ConnectionLimits, Server};
use tidewire_store::{Clock, Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::metrics_page::metric;
use crate::tides_server::{
    FOUR_TIDES, NOW, expect_error, expect_invalid_params, insert_tides, serve_tides, serve_tides_with, tide,
    tides_config,
};

fn push(id: &str, data: impl Into<Json>) -> Json {
    let data: Json = data.into();
    json!({"type": "push", "channel": "subscription", "subscriptionId": id, "data": data})
}

async fn insert(client: &mut Client, port: &str, level: impl Into<Json>) -> Json {
    let level: Json = level.into();
    client.call("store.insert", json!({"bucket": "tides", "data": {"port": port, "level": level}})).await
}

/// Returns the number of subscriptions that the server has ended.
async fn subscriptions_ended(server: &Server) -> u64 {
    metric(server, "subscriptions_ended_total").await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_the_result_pushes_a_snapshot() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"bucket": "tides", "filter": {"level": {"$gte": "{{ params.least }}"}}});
    client.call("store.defineQuery", json!({"name": "high", "config": config})).await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let (b, d) = (tide(2, "Brest", 7), tide(4, "Hook", 5));
    let subscribed = client.call("store.subscribe", json!({"query": "high", "params": {"least": 5}})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": [b, d]}), "only the documented members");
    let e = insert(&mut client, "Dover", 6).await;
    assert_eq!(client.push().await, push("sub-1", json!([b, d, e])));
    // The record enters the result in insertion order, and another one leaves it.
    let a = client.call("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 9}})).await;
    assert_eq!(client.push().await, push("sub-1", json!([a, b, d, e])));
    client.call("store.update", json!({"bucket": "tides", "key": 2, "data": {"level": 0}})).await;
    assert_eq!(client.push().await, push("sub-1", json!([a, d, e])));
    client.call("store.delete", json!({"bucket": "tides", "key": 1})).await;
    assert_eq!(client.push().await, push("sub-1", json!([d, e])));
    // A write that does not change the result is not pushed.
    insert(&mut client, "Hook", 1).await;
    client.call("store.delete", json!({"bucket": "tides", "key": 3})).await;
    client.call("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await, push("sub-1", json!([])));
    // Clearing an empty bucket changes nothing.
    client.call("store.clear", json!({"bucket": "tides"})).await;
    let done = client
        .call(
            "store.insertMany",
            json!({"bucket": "tides", "data": [{"port": "A", "level": 8}, {"port": "B", "level": 9}]}),
        )
        .await;
    assert_eq!(client.push().await, push("sub-1", done["records"].clone()), "one operation is one change");
}

#[tokio::test(flavor = "multi_thread")]
async fn aggregate_is_pushed_only_when_its_value_changes() {
    let (_server, mut client) = serve_tides().await;
    let aggregate = |function: &str| json!({"bucket": "tides", "aggregate": {"function": function, "field": "level"}});
    let mut count = aggregate("count");
    count["aggregate"].as_object_mut().unwrap().remove("field");
    let subscribed = client.call("store.subscribe", json!({"config": count})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-1", "data": 0}));
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-1", json!(1)));
    client.call("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 4}})).await;
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-1", json!(2)), "the update did not change the count");
    client.call("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await;
    // The minimum of no rows has no data, in the reply and in a push.
    client.call("store.clear", json!({"bucket": "tides"})).await;
    let subscribed = client.call("store.subscribe", json!({"config": aggregate("min")})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-2"}));
    insert(&mut client, "Hook", 3).await;
    assert_eq!(client.push().await, push("sub-2", json!(3)));
    client.call("store.clear", json!({"bucket": "tides"})).await;
    assert_eq!(client.push().await, json!({"type": "push", "channel": "subscription", "subscriptionId": "sub-2"}));
    let grouped = json!({"bucket": "tides", "aggregate": {"function": "sum", "field": "level", "groupBy": "port"}});
    let subscribed = client.call("store.subscribe", json!({"config": grouped})).await;
    assert_eq!(subscribed, json!({"subscriptionId": "sub-3", "data": []}));
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_and_expired_records_are_pushed() {
    let clock = Arc::new(AtomicU64::new(NOW));
    let time = Arc::clone(&clock);
    let store_options = StoreOptions::default().clock(Clock::new(move || time.load(SeqCst))).sweep_interval(None);
    let store = Store::memory(store_options);
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let mut config = tides_config();
    (config["maxSize"], config["ttl"]) = (json!(2), json!("1m"));
    client.call("store.defineBucket", json!({"name": "tides", "config": config})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "tides", "fields": ["id"]}})).await;
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
async fn subscription_ids_are_unique_and_belong_to_their_connection() {
    let (server, mut client) = serve_tides().await;
    let mut other = Client::connect(&server).await;
    let subscribe = json!({"config": {"bucket": "tides"}});
    for (client, id) in [(&mut client, "sub-1"), (&mut other, "sub-2")] {
        assert_eq!(client.call("store.subscribe", subscribe.clone()).await["subscriptionId"], id);
    }
    // Equal subscriptions have different ids.
    assert_eq!(client.call("store.subscribe", subscribe).await["subscriptionId"], "sub-3");
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
        expect_error(&mut client, "store.unsubscribe", unsubscribe(id), "NOT_FOUND").await;
    }
    assert_eq!(client.call("store.unsubscribe", unsubscribe("sub-1")).await, json!({"unsubscribed": true}));
    expect_error(&mut client, "store.unsubscribe", unsubscribe("sub-1"), "NOT_FOUND").await;
    let wrong: &[(&str, &[Json], &str)] =
        &[("subscriptionId", &[Json::Null, json!(""), json!(1), json!([])], "a non-empty string")];
    expect_invalid_params(&mut client, "store.unsubscribe", unsubscribe("sub-3"), wrong).await;
    let a = insert(&mut client, "Hook", 1).await;
    assert_eq!(client.push().await, push("sub-3", json!([a])));
    assert_eq!(other.push().await, push("sub-2", json!([a])));
    drop(client);
    wait_until_async("the connection has closed", PATIENCE, async || server.connection_count() == 1).await;
    assert_eq!(server.stats().subscriptions, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_subscriptions_are_checked() {
    let (_server, mut client) = serve_tides().await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    let config = json!({"bucket": "tides", "filter": {"port": "{{ params.port }}"}});
    client.call("store.defineQuery", json!({"name": "of", "config": config})).await;
    let text = "a non-empty string";
    let wrong: &[(&str, &[Json], &str)] = &[
        ("query", &[Json::Null, json!(""), json!(7), json!({})], text),
        ("mode", &[json!("deltas")], "\"delta\""),
        ("mode", &[json!(7), json!(""), json!({})], ""),
        ("since", &[json!(7), json!({})], "a string"),
        ("pos", &[json!("yes"), json!(1), json!({})], "true or false"),
        ("config", &[json!("x"), json!([]), json!({})], ""),
    ];
    expect_invalid_params(&mut client, "store.subscribe", json!({"query": "all"}), wrong).await;
    let both = json!({"query": "all", "config": {"bucket": "tides"}});
    let message = expect_error(&mut client, "store.subscribe", both, "VALIDATION_ERROR").await;
    assert!(message.contains("\"query\" and \"config\""), "{message}");
    let message = expect_error(&mut client, "store.subscribe", json!({"query": "none"}), "QUERY_NOT_DEFINED").await;
    assert_eq!(message, "query \"none\" is not defined");
    expect_error(&mut client, "store.subscribe", json!({"config": {"bucket": "none"}}), "BUCKET_NOT_DEFINED").await;
    // A missing parameter is an error. Parameters that are not an object are treated as empty.
    for params in [json!({}), Json::Null, json!("x"), json!([1]), json!({"other": 1})] {
        let message =
            expect_error(&mut client, "store.subscribe", json!({"query": "of", "params": params}), "VALIDATION_ERROR")
                .await;
        assert!(message.contains("port"), "{message}");
        client.call("store.subscribe", json!({"query": "all", "params": params})).await;
    }
    client.call("store.subscribe", json!({"query": "of", "params": {"port": null}})).await;
    let subscribed = client.call("store.subscribe", json!({"config": config, "params": {"port": "Hook"}})).await;
    assert_eq!(subscribed["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_are_limited_per_connection_and_in_total() {
    let options = options()
        .connection_limits(ConnectionLimits::default().max_subscriptions_per_connection(2).max_total_subscriptions(3));
    let (server, mut client) = serve_tides_with(options).await;
    let mut other = Client::connect(&server).await;
    let subscribe = json!({"config": {"bucket": "tides"}});
    for _ in 0..2 {
        client.call("store.subscribe", subscribe.clone()).await;
    }
    expect_error(&mut client, "store.subscribe", subscribe.clone(), "RATE_LIMITED").await;
    other.call("store.subscribe", subscribe.clone()).await;
    expect_error(&mut other, "store.subscribe", subscribe.clone(), "RATE_LIMITED").await;
    client.call("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await;
    other.call("store.subscribe", subscribe.clone()).await;
    // A failed subscription consumes no permit.
    client.call("store.unsubscribe", json!({"subscriptionId": "sub-2"})).await;
    for _ in 0..5 {
        expect_error(&mut client, "store.subscribe", json!({"query": "none"}), "QUERY_NOT_DEFINED").await;
    }
    client.call("store.subscribe", subscribe).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn position_is_sent_only_if_requested() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"bucket": "tides"});
    for (options, has_position) in [
        (json!({}), false),
        (json!({"pos": false}), false),
        (json!({"pos": null, "mode": null, "since": null}), false),
        (json!({"pos": true}), true),
        (json!({"mode": "whole"}), true),
        (json!({"mode": "delta"}), true),
        (json!({"since": "x"}), true),
        (json!({"since": ""}), true),
    ] {
        let mut params = options.clone();
        params["config"] = config.clone();
        let subscribed = client.call("store.subscribe", params).await;
        assert_eq!(subscribed["pos"].is_string(), has_position, "{options}: {subscribed}");
        assert_eq!(subscribed.get("resumed").is_some(), options["since"].is_string(), "{options}: {subscribed}");
        client.call("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await;
        let push = client.push().await;
        assert_eq!(push["pos"].is_string(), has_position, "{options}: {push}");
        assert_eq!(push.as_object().unwrap().len(), if has_position { 5 } else { 4 }, "{options}: {push}");
        assert!(!has_position || push["pos"] != subscribed["pos"], "each push has a new position");
        client.call("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deltas_name_added_changed_and_removed_records() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
    assert_eq!(subscribed["data"].as_array().unwrap().len(), 4, "the first reply is a snapshot");
    let e = insert(&mut client, "Dover", 9).await;
    assert_eq!(client.push().await["data"], json!({"added": [e], "changed": [], "removed": []}));
    let a = client.call("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 9}})).await;
    assert_eq!(client.push().await["data"], json!({"added": [], "changed": [a], "removed": []}));
    client.call("store.delete", json!({"bucket": "tides", "key": 2})).await;
    assert_eq!(client.push().await["data"], json!({"added": [], "changed": [], "removed": [2]}));
    client.call("store.unsubscribe", json!({"subscriptionId": subscribed["subscriptionId"]})).await;
    // With a sort or a limit, entries have indexes.
    let sorted = json!({"bucket": "tides", "sort": {"level": "desc"}, "limit": 2, "fields": ["port"]});
    let subscribed = client.call("store.subscribe", json!({"config": sorted, "mode": "delta"})).await;
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
async fn dropped_bucket_ends_its_subscriptions() {
    let (server, mut client) = serve_tides().await;
    client.call("store.defineBucket", json!({"name": "other", "config": tides_config()})).await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    for params in [
        json!({"query": "all"}),
        json!({"query": "all", "pos": true}),
        json!({"config": {"bucket": "tides"}, "mode": "delta"}),
        json!({"config": {"bucket": "other"}, "pos": true}),
    ] {
        client.call("store.subscribe", params).await;
    }
    client.call("store.dropBucket", json!({"name": "tides"})).await;
    let mut pushes = [client.push().await, client.push().await];
    pushes.sort_by_key(|push| push["subscriptionId"].to_string());
    for (push, id) in pushes.iter().zip(["sub-2", "sub-3"]) {
        assert_eq!(push["error"]["code"], "BUCKET_NOT_DEFINED");
        assert!(push["error"]["message"].is_string());
        let keys: Vec<&str> = push.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys.len(), 4, "type, channel, subscriptionId and error: {push}");
        assert_eq!((&push["type"], &push["channel"]), (&json!("push"), &json!("subscription")));
        assert_eq!(push["subscriptionId"], id);
    }
    // The first subscription ends without a notice, and is counted.
    wait_until_async("the subscriptions have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(subscriptions_ended(&server).await, 3);
    for id in ["sub-1", "sub-2", "sub-3"] {
        expect_error(&mut client, "store.unsubscribe", json!({"subscriptionId": id}), "NOT_FOUND").await;
    }
    // A new bucket with the same name is a different bucket.
    client.call("store.defineBucket", json!({"name": "tides", "config": tides_config()})).await;
    insert(&mut client, "Hook", 1).await;
    client.call("store.insert", json!({"bucket": "other", "data": {"port": "Hook"}})).await;
    assert_eq!(client.push().await["subscriptionId"], "sub-4");
}

#[tokio::test(flavor = "multi_thread")]
async fn undefined_query_ends_its_subscriptions_by_name() {
    let (server, mut client) = serve_tides().await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    client.call("store.subscribe", json!({"query": "all"})).await;
    client.call("store.subscribe", json!({"query": "all", "mode": "delta"})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    client.call("store.undefineQuery", json!({"name": "all"})).await;
    let push = client.push().await;
    assert_eq!((&push["subscriptionId"], &push["error"]["code"]), (&json!("sub-2"), &json!("QUERY_NOT_DEFINED")));
    wait_until_async("both subscriptions have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(subscriptions_ended(&server).await, 2);
    insert(&mut client, "Hook", 1).await;
    assert_eq!(client.push().await["subscriptionId"], "sub-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn result_that_becomes_too_large_ends_its_subscription() {
    let options = options().max_result_bytes(1500);
    let (server, mut client) = serve_tides_with(options).await;
    let config = json!({"bucket": "tides", "filter": {"port": {"$startsWith": "x"}}});
    client.call("store.subscribe", json!({"config": config})).await;
    client.call("store.subscribe", json!({"config": config, "pos": true})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "tides", "aggregate": {"function": "count"}}})).await;
    insert(&mut client, &"x".repeat(1000), 1).await;
    for _ in 0..3 {
        assert!(client.push().await.get("data").is_some());
    }
    insert(&mut client, &"x".repeat(1000), 2).await;
    let mut pushes = [client.push().await, client.push().await];
    pushes.sort_by_key(|push| push["subscriptionId"].to_string());
    assert_eq!(pushes[0]["error"]["code"], "TOO_LARGE", "{}", pushes[0]);
    assert_eq!(pushes[1], push("sub-3", json!(2)));
    wait_until_async("both subscriptions have ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(subscriptions_ended(&server).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_delta_ends_its_subscription() {
    let options = options().max_result_bytes(1500);
    let (_server, mut client) = serve_tides_with(options).await;
    client.call("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
    let record = json!({"port": "x".repeat(1000)});
    client.call("store.insertMany", json!({"bucket": "tides", "data": [record, record]})).await;
    let push = client.push().await;
    assert_eq!(push["error"]["code"], "TOO_LARGE", "{push}");
}

/// A client that reads is not a slow consumer, however large the results of one commit are.
#[tokio::test(flavor = "multi_thread")]
async fn many_large_results_reach_a_client_that_reads() {
    let (server, mut writer) = serve_tides().await;
    let mut client = Client::connect(&server).await;
    let record = json!({"port": "x".repeat(100_000), "level": 1});
    writer.call("store.insertMany", json!({"bucket": "tides", "data": [record, record, record, record, record]})).await;
    for _ in 0..20 {
        client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    }
    // Twenty results of half a megabyte.
    writer.call("store.update", json!({"bucket": "tides", "key": 1, "data": {"level": 2}})).await;
    let mut subscriptions = std::collections::BTreeSet::new();
    while subscriptions.len() < 20 {
        let push = client.push().await;
        assert_eq!(push["data"][0]["level"], 2);
        subscriptions.insert(push["subscriptionId"].to_string());
    }
    assert_eq!(server.stats().slow_consumers, 0);
}
