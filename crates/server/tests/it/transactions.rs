//! Transactions are atomic.

use serde_json::{Value as Json, json};

use crate::client::{Client, RpcClient, options};
use crate::tides_server::{
    FOUR_TIDES, expect_error, expect_error_details, expect_invalid_params, insert_tides, serve_tides,
    serve_tides_locally, serve_tides_with, tide, tides_config,
};

async fn transact(client: &mut impl RpcClient, operations: Json) -> Json {
    client.call("store.transaction", json!({"operations": operations})).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_operation_has_a_result() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let mut changed = tide(1, "Hook", 30);
    changed["_version"] = json!(2);
    let done = transact(
        &mut client,
        json!([
            {"op": "get", "bucket": "tides", "key": 1},
            {"op": "update", "bucket": "tides", "key": 1, "data": {"level": 30}},
            {"op": "get", "bucket": "tides", "key": 1},
            {"op": "get", "bucket": "tides", "key": 99},
            {"op": "insert", "bucket": "tides", "data": {"port": "Dover", "level": 9}},
            {"op": "delete", "bucket": "tides", "key": 2},
            {"op": "delete", "bucket": "tides", "key": 99},
            {"op": "where", "bucket": "tides", "filter": {"level": {"$gte": 9}}},
            {"op": "findOne", "bucket": "tides", "filter": {"port": "Dover"}},
            {"op": "findOne", "bucket": "tides", "filter": {"port": "Brest"}},
            {"op": "count", "bucket": "tides"},
            {"op": "count", "bucket": "tides", "filter": {"port": "Hook"}},
        ]),
    )
    .await;
    let dover = tide(5, "Dover", 9);
    let data = [
        tide(1, "Hook", 3),
        changed.clone(),
        changed.clone(),
        Json::Null,
        dover.clone(),
        json!({"deleted": true}),
        json!({"deleted": true}),
        json!([changed, dover]),
        dover,
        Json::Null,
        json!(4),
        json!(2),
    ];
    let results: Vec<Json> =
        data.into_iter().enumerate().map(|(index, data)| json!({"index": index, "data": data})).collect();
    assert_eq!(done, json!({"results": results}));
}

#[tokio::test(flavor = "multi_thread")]
async fn failure_rolls_back_and_names_the_operation() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    client.call("store.insert", json!({"bucket": "tides", "data": {"port": "Dover", "code": "dov"}})).await;
    client.call("store.defineBucket", json!({"name": "log", "config": tides_config()})).await;
    let before = client.call("store.all", json!({"bucket": "tides"})).await;
    let cases = [
        (json!({"op": "get", "bucket": "none", "key": 1}), "BUCKET_NOT_DEFINED", None),
        (json!({"op": "update", "bucket": "tides", "key": 99, "data": {}}), "NOT_FOUND", None),
        (
            json!({"op": "insert", "bucket": "tides", "data": {"id": 3, "port": "Hook"}}),
            "CONFLICT",
            Some(json!({"bucket": "tides", "key": 3})),
        ),
        (
            json!({"op": "insert", "bucket": "tides", "data": {"port": "Hook", "code": "dov"}}),
            "ALREADY_EXISTS",
            Some(json!({"bucket": "tides", "field": "code", "value": "dov"})),
        ),
        (
            json!({"op": "update", "bucket": "tides", "key": 1, "data": {"code": "dov"}}),
            "ALREADY_EXISTS",
            Some(json!({"bucket": "tides", "field": "code", "value": "dov"})),
        ),
    ];
    for (last, code, details) in cases {
        let operations = json!([
            {"op": "insert", "bucket": "log", "data": {"port": "Hook"}},
            {"op": "delete", "bucket": "tides", "key": 2},
            last,
        ]);
        let params = json!({"operations": operations});
        let message = match details {
            Some(details) => expect_error_details(&mut client, "store.transaction", params, code, details).await,
            None => expect_error(&mut client, "store.transaction", params, code).await,
        };
        assert!(message.starts_with("operations[2]: "), "{message}");
        assert_eq!(client.call("store.all", json!({"bucket": "tides"})).await, before);
        assert_eq!(client.call("store.count", json!({"bucket": "log"})).await, 0);
    }
    let invalid = json!({"operations": [{"op": "insert", "bucket": "tides", "data": {"level": 1}}]});
    let (code, error) = client.call_err("store.transaction", invalid).await;
    assert_eq!(code, "VALIDATION_ERROR");
    assert_eq!((&error["details"][0]["field"], &error["details"][0]["code"]), (&json!("port"), &json!("required")));
    assert!(error["message"].as_str().unwrap().starts_with("operations[0]: "), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_operations_are_validated_before_any_runs() {
    let (_server, mut client) = serve_tides_locally().await;
    let good = json!({"op": "insert", "bucket": "tides", "data": {"port": "Hook"}});
    for (wrong, named) in [
        (Json::Null, "object"),
        (json!(7), "object"),
        (json!({}), "bucket"),
        (json!({"op": "get", "key": 1}), "bucket"),
        (json!({"op": "get", "bucket": "", "key": 1}), "bucket"),
        (json!({"op": "get", "bucket": 7, "key": 1}), "bucket"),
        (json!({"bucket": "tides", "key": 1}), "op"),
        (json!({"op": "clear", "bucket": "tides"}), "op"),
        (json!({"op": 7, "bucket": "tides"}), "op"),
        (json!({"op": "get", "bucket": "tides"}), "key"),
        (json!({"op": "get", "bucket": "tides", "key": null}), "key"),
        (json!({"op": "update", "bucket": "tides", "data": {}}), "key"),
        (json!({"op": "update", "bucket": "tides", "key": 1}), "data"),
        (json!({"op": "insert", "bucket": "tides", "data": []}), "data"),
        (json!({"op": "delete", "bucket": "tides"}), "key"),
        (json!({"op": "where", "bucket": "tides"}), "filter"),
        (json!({"op": "where", "bucket": "tides", "filter": "x"}), "filter"),
        (json!({"op": "findOne", "bucket": "tides", "filter": []}), "filter"),
        (json!({"op": "count", "bucket": "tides", "filter": 7}), "filter"),
        (json!({"op": "count", "bucket": "tides", "filter": {"level": {"$above": 1}}}), "$above"),
    ] {
        let params = json!({"operations": [good, wrong]});
        let message = expect_error(&mut client, "store.transaction", params, "VALIDATION_ERROR").await;
        assert!(message.starts_with("operations[1]: ") && message.contains(named), "{wrong}: {message}");
    }
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 0);
    let no_list = [Json::Null, json!({}), json!("x"), json!(7), json!([])];
    let wrong: &[(&str, &[Json], &str)] = &[("operations", &no_list, "array")];
    expect_invalid_params(&mut client, "store.transaction", json!({}), wrong).await;
    let message = expect_error(&mut client, "store.transaction", json!({"operations": []}), "VALIDATION_ERROR").await;
    assert_eq!(message, "\"operations\" must be a non-empty array of operations, got an empty array");
}

#[tokio::test(flavor = "multi_thread")]
async fn result_limit_applies_to_transactions_and_rolls_back() {
    let options = options().max_result_bytes(1500);
    let (_server, mut client) = serve_tides_with(options).await;
    for _ in 0..2 {
        client.call("store.insert", json!({"bucket": "tides", "data": {"port": "x".repeat(1000)}})).await;
    }
    let operations = json!([
        {"op": "insert", "bucket": "tides", "data": {"port": "Hook"}},
        {"op": "where", "bucket": "tides", "filter": {}},
    ]);
    let message = expect_error(&mut client, "store.transaction", json!({"operations": operations}), "TOO_LARGE").await;
    assert!(message.starts_with("operations[1]: ") && message.contains("1500"), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 2);
    transact(&mut client, json!([{"op": "get", "bucket": "tides", "key": 1}])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inserts_respect_max_size_and_ttl() {
    let (_server, mut client) = serve_tides_locally().await;
    let mut config = tides_config();
    config["maxSize"] = json!(1);
    config["ttl"] = json!(500);
    client.call("store.defineBucket", json!({"name": "one", "config": config})).await;
    let insert = json!({"op": "insert", "bucket": "one", "data": {"port": "Hook"}});
    let done = transact(&mut client, json!([insert, insert])).await;
    assert_eq!(done["results"][1]["data"]["_expiresAt"], crate::tides_server::NOW + 500);
    let all = client.call("store.all", json!({"bucket": "one"})).await;
    assert_eq!(all, json!([done["results"][1]["data"]]));
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_never_see_a_partial_transaction() {
    let (server, mut client) = serve_tides().await;
    insert_tides(&mut client, &[("from", 100), ("to", 0)]).await;
    let mut subscriber = Client::connect(&server).await;
    let total = json!({"bucket": "tides", "aggregate": {"function": "sum", "field": "level"}});
    let first = subscriber.call("store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    assert_eq!(first["data"].as_array().unwrap().len(), 2);
    subscriber.call("store.subscribe", json!({"config": total})).await;
    let mut ids = Vec::new();
    for moved in 1..=50 {
        let operations = json!([
            {"op": "update", "bucket": "tides", "key": 1, "data": {"level": 100 - moved}},
            {"op": "update", "bucket": "tides", "key": 2, "data": {"level": moved}},
        ]);
        ids.push(client.send("store.transaction", json!({"operations": operations})).await);
    }
    for id in ids {
        assert_eq!(client.reply(id).await["type"], "result");
    }
    loop {
        let push = subscriber.push().await;
        assert_eq!(push["subscriptionId"], first["subscriptionId"], "an unchanged sum is not pushed");
        let levels: Vec<i64> =
            push["data"].as_array().unwrap().iter().map(|tide| tide["level"].as_i64().unwrap()).collect();
        assert_eq!(levels.iter().sum::<i64>(), 100, "{push}");
        if levels[1] == 50 {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_steps_can_expect_a_version() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &[("Hook", 1), ("Brest", 2)]).await;
    let stale = json!([
        {"op": "delete", "bucket": "tides", "key": 2, "version": 1},
        {"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 9},
    ]);
    let details = json!({"bucket": "tides", "key": 1, "version": 1});
    let params = json!({"operations": stale});
    let message = expect_error_details(&mut client, "store.transaction", params, "CONFLICT", details).await;
    assert!(message.starts_with("operations[1]: "), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "tides"})).await, 2, "nothing was written");
    let current = json!([{"op": "update", "bucket": "tides", "key": 1, "data": {"level": 5}, "version": 1}]);
    client.call("store.transaction", json!({"operations": current})).await;
    let wrong = json!([{"op": "delete", "bucket": "tides", "key": 1, "version": "one"}]);
    let message =
        expect_error(&mut client, "store.transaction", json!({"operations": wrong}), "VALIDATION_ERROR").await;
    assert!(message.contains("operations[0]") && message.contains("version"), "{message}");
}
