//! Definitions, statistics, and operations that this server does not support.

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, RpcClient as _, options, serve, serve_store};
use crate::tides_server::{
    FOUR_TIDES, NOW, expect_error, expect_invalid_params, insert_tides, serve_tides, serve_tides_locally, tides_config,
};

#[tokio::test(flavor = "multi_thread")]
async fn buckets_are_defined_shown_changed_and_dropped() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.call("store.buckets", json!({})).await, json!({"count": 0, "names": []}));
    for name in ["tides", "anchors"] {
        let created = client.call("store.defineBucket", json!({"name": name, "config": tides_config()})).await;
        assert_eq!(created, json!({"name": name, "created": true}));
    }
    let buckets = client.call("store.buckets", json!({})).await;
    assert_eq!(buckets, json!({"count": 2, "names": ["tides", "anchors"]}), "in definition order");
    let again = json!({"name": "tides", "config": tides_config()});
    let message = expect_error(&mut client, "store.defineBucket", again, "ALREADY_EXISTS").await;
    assert_eq!(message, "bucket \"tides\" is already defined");
    let schema = client.call("store.getBucketSchema", json!({"name": "tides"})).await;
    assert_eq!(schema, json!({"name": "tides", "config": tides_config()}));
    let updates = json!({"addFields": {"depth": {"type": "number"}}, "addIndexes": ["depth"], "ttl": "1h"});
    let updated = client.call("store.updateBucket", json!({"name": "tides", "updates": updates})).await;
    assert_eq!(updated, json!({"name": "tides", "updated": true}));
    let mut expected = tides_config();
    expected["schema"]["depth"] = json!({"type": "number"});
    expected["indexes"] = json!(["level", "depth"]);
    expected["ttl"] = json!("1h");
    let schema = client.call("store.getBucketSchema", json!({"name": "tides"})).await;
    assert_eq!(schema["config"], expected);
    // Omitted members are unchanged, and null removes a value.
    client.call("store.updateBucket", json!({"name": "tides", "updates": {}})).await;
    assert_eq!(client.call("store.getBucketSchema", json!({"name": "tides"})).await["config"], expected);
    client.call("store.updateBucket", json!({"name": "tides", "updates": {"ttl": null}})).await;
    let config = client.call("store.getBucketSchema", json!({"name": "tides"})).await["config"].clone();
    assert!(config.get("ttl").is_none_or(Json::is_null), "{config}");
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    let dropped = client.call("store.dropBucket", json!({"name": "tides"})).await;
    assert_eq!(dropped, json!({"name": "tides", "dropped": true}));
    assert_eq!(client.call("store.buckets", json!({})).await, json!({"count": 1, "names": ["anchors"]}));
    assert_eq!(
        client.call("store.listQueries", json!({})).await,
        json!({"queries": []}),
        "its queries were dropped too"
    );
    for (operation, params) in [
        ("store.dropBucket", json!({})),
        ("store.updateBucket", json!({"updates": {}})),
        ("store.getBucketSchema", json!({})),
    ] {
        let mut params = params;
        params["name"] = json!("tides");
        let message = expect_error(&mut client, operation, params, "BUCKET_NOT_DEFINED").await;
        assert_eq!(message, "bucket \"tides\" is not defined");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_definition_changes_nothing() {
    let (_server, mut client) = serve_tides_locally().await;
    let changed = |change: fn(&mut Json)| {
        let mut config = tides_config();
        change(&mut config);
        config
    };
    for config in [
        json!({}),
        json!({"key": "id"}),
        changed(|config| config["key"] = json!("none")),
        changed(|config| config["key"] = json!(7)),
        changed(|config| config["schema"] = json!([])),
        changed(|config| config["indexes"] = json!(["none"])),
        changed(|config| config["indexes"] = json!("level")),
        changed(|config| config["ttl"] = json!("soon")),
        changed(|config| config["ttl"] = json!(-1)),
        changed(|config| config["maxSize"] = json!(0)),
        changed(|config| config["colour"] = json!("blue")),
        changed(|config| config["schema"]["level"]["type"] = json!("decimal")),
        changed(|config| config["schema"]["level"]["generated"] = json!("magic")),
        changed(|config| config["schema"]["level"]["colour"] = json!("blue")),
        changed(|config| config["schema"]["port"]["pattern"] = json!("(")),
    ] {
        let params = json!({"name": "new", "config": config});
        expect_error(&mut client, "store.defineBucket", params, "VALIDATION_ERROR").await;
        expect_error(&mut client, "store.getBucketSchema", json!({"name": "new"}), "BUCKET_NOT_DEFINED").await;
    }
    expect_error(&mut client, "store.defineBucket", json!({"name": "$new", "config": tides_config()}), "FORBIDDEN")
        .await;
    let before = client.call("store.getBucketSchema", json!({"name": "tides"})).await;
    for updates in [
        json!({"addFields": {"level": {"type": "number"}}}),
        json!({"addFields": {"good": {"type": "number"}, "bad": {"type": "none"}}}),
        json!({"addFields": []}),
        json!({"addIndexes": ["none"]}),
        json!({"addFields": {"good": {"type": "number"}}, "addIndexes": ["none"]}),
        json!({"addIndexes": "level"}),
        json!({"ttl": "soon"}),
        json!({"schema": {}}),
    ] {
        let params = json!({"name": "tides", "updates": updates});
        let message = expect_error(&mut client, "store.updateBucket", params, "VALIDATION_ERROR").await;
        assert_eq!(client.call("store.getBucketSchema", json!({"name": "tides"})).await, before, "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_are_defined_listed_and_undefined() {
    let (server, mut client) = serve_tides().await;
    let config =
        json!({"bucket": "tides", "filter": {"level": {"$gt": "{{ params.least }}"}}, "sort": {"level": "desc"}});
    let defined = client.call("store.defineQuery", json!({"name": "high", "config": config})).await;
    assert_eq!(defined, json!({"name": "high", "defined": true}));
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    let again = json!({"name": "all", "config": {"bucket": "tides"}});
    expect_error(&mut client, "store.defineQuery", again, "ALREADY_EXISTS").await;
    let elsewhere = json!({"name": "none", "config": {"bucket": "none"}});
    expect_error(&mut client, "store.defineQuery", elsewhere, "BUCKET_NOT_DEFINED").await;
    let mut other = Client::connect(&server).await;
    client.call("store.subscribe", json!({"query": "all"})).await;
    client.call("store.subscribe", json!({"query": "high", "params": {"least": 3}})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    other.call("store.subscribe", json!({"query": "all"})).await;
    let listed = |high: usize, all: usize| {
        json!({"queries": [
            {"name": "high", "type": "declarative", "activeSubscriptions": high, "config": config},
            {"name": "all", "type": "declarative", "activeSubscriptions": all, "config": {"bucket": "tides"}},
        ]})
    };
    assert_eq!(client.call("store.listQueries", json!({})).await, listed(1, 2));
    client.call("store.unsubscribe", json!({"subscriptionId": "sub-2"})).await;
    assert_eq!(client.call("store.listQueries", json!({})).await, listed(0, 2));
    drop(other);
    wait_until_async("the other connection has closed", PATIENCE, async || server.connection_count() == 1).await;
    assert_eq!(client.call("store.listQueries", json!({})).await, listed(0, 1));
    let undefined = client.call("store.undefineQuery", json!({"name": "all"})).await;
    assert_eq!(undefined, json!({"name": "all", "undefined": true}));
    let message = expect_error(&mut client, "store.undefineQuery", json!({"name": "all"}), "QUERY_NOT_DEFINED").await;
    assert_eq!(message, "query \"all\" is not defined");
    // The named subscription has ended, so only the inline one is left in every count.
    wait_until_async("the subscription has ended", PATIENCE, async || server.stats().subscriptions == 1).await;
    let stats = client.call("store.stats", json!({})).await;
    assert_eq!(stats["queries"], json!({"defined": 1, "activeSubscriptions": 1}));
    let rows = client.call("server.connections", json!({})).await;
    assert_eq!(rows[0]["storeSubscriptionCount"], 1);
    expect_error(&mut client, "store.unsubscribe", json!({"subscriptionId": "sub-1"}), "NOT_FOUND").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_queries_are_not_defined() {
    let (_server, mut client) = serve_tides_locally().await;
    for config in [
        json!({}),
        json!({"bucket": ""}),
        json!({"bucket": 7}),
        json!({"bucket": "tides", "filter": {"level": {"$above": 1}}}),
        json!({"bucket": "tides", "filter": []}),
        json!({"bucket": "tides", "sort": {"level": "up"}}),
        json!({"bucket": "tides", "limit": -1}),
        json!({"bucket": "tides", "fields": "level"}),
        json!({"bucket": "tides", "aggregate": {"function": "median", "field": "level"}}),
        json!({"bucket": "tides", "colour": "blue"}),
    ] {
        let params = json!({"name": "bad", "config": config});
        expect_error(&mut client, "store.defineQuery", params, "VALIDATION_ERROR").await;
        expect_error(&mut client, "store.subscribe", json!({"query": "bad"}), "QUERY_NOT_DEFINED").await;
        expect_error(&mut client, "store.subscribe", json!({"config": config}), "VALIDATION_ERROR").await;
    }
    assert_eq!(client.call("store.listQueries", json!({})).await, json!({"queries": []}));
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_definitions_are_checked() {
    let (_server, mut client) = serve_tides_locally().await;
    let no_text = [Json::Null, json!(""), json!(7), json!([]), json!({})];
    let no_object = [Json::Null, json!([]), json!("x"), json!(7)];
    let name: (&str, &[Json], &str) = ("name", &no_text, "a non-empty string");
    for (operation, good, wrong) in [
        ("store.defineBucket", json!({"name": "b", "config": tides_config()}), vec!["config"]),
        ("store.updateBucket", json!({"name": "b", "updates": {}}), vec!["updates"]),
        ("store.getBucketSchema", json!({"name": "b"}), vec![]),
        ("store.defineQuery", json!({"name": "q", "config": {"bucket": "b"}}), vec!["config"]),
        ("store.undefineQuery", json!({"name": "q"}), vec![]),
        ("store.dropBucket", json!({"name": "b"}), vec![]),
    ] {
        client.call(operation, good.clone()).await;
        let wrong: Vec<_> = wrong.into_iter().map(|name| (name, &no_object[..], "an object")).chain([name]).collect();
        expect_invalid_params(&mut client, operation, good, &wrong).await;
    }
}

fn stats_of_tides(name: &str, subscriptions: usize, is_persistent: bool) -> Json {
    json!({
        "name": name,
        "buckets": {"count": 2, "names": ["tides", "anchors"]},
        "records": {"total": 4, "perBucket": {"tides": 4, "anchors": 0}},
        // The listed index and the unique one.
        "indexes": {"total": 4, "perBucket": {"tides": 2, "anchors": 2}},
        "queries": {"defined": 1, "activeSubscriptions": subscriptions},
        "persistence": {"enabled": is_persistent},
        "ttl": {"enabled": true, "checkIntervalMs": 1000},
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_have_every_member() {
    let (server, mut client) = serve_tides().await;
    client.call("store.defineBucket", json!({"name": "anchors", "config": tides_config()})).await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "tides"}})).await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let mut other = Client::connect(&server).await;
    client.call("store.subscribe", json!({"query": "all"})).await;
    other.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    other.call("store.subscribe", json!({"config": {"bucket": "tides"}, "mode": "delta"})).await;
    let store = stats_of_tides("tidewire", 3, false);
    assert_eq!(client.call("store.stats", json!({})).await, store);
    let expected = json!({
        "name": "tidewire",
        "connectionCount": 2,
        "authEnabled": false,
        "rateLimitEnabled": false,
        "rulesEnabled": false,
        "connections": {"active": 2, "authenticated": 0, "totalStoreSubscriptions": 3, "totalRulesSubscriptions": 0},
        "store": store,
        "rules": null,
    });
    assert_eq!(client.call("server.stats", json!({})).await, expected);
    assert_eq!(server.stats().wire, expected);
    let rows = client.call("server.connections", json!({})).await;
    let row = |id: &Json, subscriptions: usize| {
        json!({
            "connectionId": id,
            "remoteAddress": "127.0.0.1",
            "connectedAt": NOW,
            "authenticated": false,
            "userId": null,
            "roles": [],
            "storeSubscriptionCount": subscriptions,
            "rulesSubscriptionCount": 0,
        })
    };
    assert_eq!(rows, json!([row(&rows[0]["connectionId"], 1), row(&rows[1]["connectionId"], 2)]));
    let number =
        |row: &Json| row["connectionId"].as_str().unwrap().strip_prefix("conn-").unwrap().parse::<u64>().unwrap();
    assert!(number(&rows[0]) < number(&rows[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_of_a_durable_store() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), StoreOptions::default().sweep_interval(None)).unwrap();
    let options = options().name("harbour");
    let server = serve_store(store, options).await;
    let mut client = Client::connect(&server).await;
    let stats = client.call("store.stats", json!({})).await;
    assert_eq!(stats["name"], "harbour");
    assert_eq!(stats["persistence"], json!({"enabled": true}));
    assert_eq!(stats["ttl"]["enabled"], false);
    assert_eq!(stats["records"], json!({"total": 0, "perBucket": {}}));
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_operations_are_rejected() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let rules = [
        "emit",
        "setFact",
        "getFact",
        "deleteFact",
        "queryFacts",
        "getAllFacts",
        "subscribe",
        "unsubscribe",
        "stats",
        "registerRule",
        "unregisterRule",
        "updateRule",
        "enableRule",
        "disableRule",
        "getRule",
        "getRules",
        "validateRule",
        "whatever",
        "",
    ];
    for name in rules {
        expect_error(&mut client, &format!("rules.{name}"), json!({}), "RULES_NOT_AVAILABLE").await;
    }
    for operation in [
        "audit.query",
        "audit.x",
        "procedures.register",
        "procedures.unregister",
        "procedures.update",
        "procedures.get",
        "procedures.list",
        "procedures.call",
        "procedures.x",
        "identity.login",
        "identity.whoami",
        "identity.createUser",
        "identity.x",
        "auth.login",
        "auth.logout",
        "auth.whoami",
        "auth.x",
        "store.x",
        "store.",
        "store",
        "server.x",
        "ping",
        "Store.get",
        "rules",
        "x",
        "💧",
    ] {
        let message =
            expect_error(&mut client, operation, json!({"token": "x", "name": "x"}), "UNKNOWN_OPERATION").await;
        assert!(message.contains(operation), "{message}");
    }
    let long = "x".repeat(100_000);
    let message = expect_error(&mut client, &long, json!({}), "UNKNOWN_OPERATION").await;
    assert!(message.len() < 200, "a long name must be truncated: {message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_with_references_to_it_cannot_be_dropped() {
    let (_server, mut client) = serve_tides().await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}, "tide": {"type": "number", "ref": "tides"}}});
    client.call("store.defineBucket", json!({"name": "boats", "config": config})).await;
    let message = expect_error(&mut client, "store.dropBucket", json!({"name": "tides"}), "VALIDATION_ERROR").await;
    assert!(message.contains("boats") && message.contains("tide"), "{message}");
    assert_eq!(client.call("store.buckets", json!({})).await["names"], json!(["tides", "boats"]));
    client.call("store.dropBucket", json!({"name": "boats"})).await;
    client.call("store.dropBucket", json!({"name": "tides"})).await;
}
