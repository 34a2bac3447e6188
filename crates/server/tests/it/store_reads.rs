//! Read operations: results, and rejected parameters.

use serde_json::{Value as Json, json};

use crate::client::{Client, RpcClient as _, options};
use crate::tides_server::{
    FOUR_TIDES, expect_error, expect_invalid_params, insert_tides, serve_tides, serve_tides_locally, serve_tides_with,
    tide, tides_config,
};

fn four_tides() -> [Json; 4] {
    let mut id = 0;
    FOUR_TIDES.map(|(port, level)| {
        id += 1;
        tide(id, port, level)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_found_by_key_filter_and_position() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let [a, b, c, d] = four_tides();
    let in_tides = |params: Json| {
        let mut params = params;
        params["bucket"] = json!("tides");
        params
    };
    for (operation, params, expected) in [
        ("store.get", json!({"key": 2}), b.clone()),
        ("store.get", json!({"key": 2.0}), b.clone()),
        // Keys are equal only if their types are equal.
        ("store.get", json!({"key": "2"}), Json::Null),
        ("store.get", json!({"key": 99}), Json::Null),
        ("store.get", json!({"key": {"a": 1}}), Json::Null),
        ("store.get", json!({"key": [1]}), Json::Null),
        ("store.get", json!({"key": true}), Json::Null),
        ("store.all", json!({}), json!([a, b, c, d])),
        ("store.where", json!({"filter": {}}), json!([a, b, c, d])),
        ("store.where", json!({"filter": {"port": "Hook"}}), json!([a, d])),
        ("store.where", json!({"filter": {"level": {"$gte": 5}}}), json!([b, d])),
        ("store.where", json!({"filter": {"level": {"$between": [-2, 3]}}}), json!([a, c])),
        ("store.where", json!({"filter": {"$or": [{"level": 7}, {"port": {"$startsWith": "Cux"}}]}}), json!([b, c])),
        ("store.where", json!({"filter": {"port": {"$contains": "OOK"}, "level": {"$neq": 3}}}), json!([d])),
        // Placeholders are not substituted in filters of reads.
        ("store.where", json!({"filter": {"port": "{{ params.x }}"}}), json!([])),
        ("store.findOne", json!({"filter": {"port": "Hook"}}), a.clone()),
        ("store.findOne", json!({"filter": {"port": "Dover"}}), Json::Null),
        ("store.count", json!({}), json!(4)),
        ("store.count", json!({"filter": null}), json!(4)),
        ("store.count", json!({"filter": {"port": "Hook"}}), json!(2)),
        ("store.first", json!({"n": 2}), json!([a, b])),
        ("store.first", json!({"n": 1e300}), json!([a, b, c, d])),
        ("store.last", json!({"n": 2}), json!([c, d])),
        ("store.last", json!({"n": 2.0}), json!([c, d])),
        ("store.sum", json!({"field": "level"}), json!(13)),
        ("store.sum", json!({"field": "level", "filter": {"port": "Hook"}}), json!(8)),
        ("store.sum", json!({"field": "level", "filter": null}), json!(13)),
        ("store.sum", json!({"field": "port"}), json!(0)),
        ("store.avg", json!({"field": "level", "filter": {"port": "Hook"}}), json!(4)),
        ("store.avg", json!({"field": "none"}), json!(0)),
        ("store.min", json!({"field": "level"}), json!(-2)),
        ("store.max", json!({"field": "level"}), json!(7)),
        ("store.min", json!({"field": "port"}), Json::Null),
        ("store.max", json!({"field": "level", "filter": {"port": "Dover"}}), Json::Null),
    ] {
        let id = client.send(operation, in_tides(params.clone())).await;
        let reply = client.reply(id).await;
        // A missing record is null, not absent.
        assert!(reply.get("data").is_some(), "{operation} {params}: {reply}");
        let data = &reply["data"];
        let is_same = data == &expected || data.as_f64().is_some() && data.as_f64() == expected.as_f64();
        assert!(is_same, "{operation} {params}: {reply}, expected {expected}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn average_ignores_values_that_are_not_numbers() {
    let (_server, mut client) = serve_tides_locally().await;
    insert_tides(&mut client, &[("Hook", 2), ("Hook", 4)]).await;
    client.call("store.insert", json!({"bucket": "tides", "data": {"port": "Hook"}})).await;
    client.call("store.insert", json!({"bucket": "tides", "data": {"port": "Hook", "level": null}})).await;
    let average = client.call("store.avg", json!({"bucket": "tides", "field": "level"})).await;
    assert_eq!(average.as_f64(), Some(3.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn paginate_returns_pages_and_cursors() {
    let (_server, mut client) = serve_tides_locally().await;
    let [a, b, c, d] = four_tides();
    let empty = client.call("store.paginate", json!({"bucket": "tides", "limit": 2})).await;
    assert_eq!(empty, json!({"records": [], "hasMore": false}), "an empty page has no cursor");
    insert_tides(&mut client, &FOUR_TIDES).await;
    for (after, expected) in [
        (None, json!({"records": [a, b, c], "hasMore": true, "nextCursor": 3})),
        (Some(json!(1)), json!({"records": [b, c, d], "hasMore": false, "nextCursor": 4})),
        (Some(json!(3)), json!({"records": [d], "hasMore": false, "nextCursor": 4})),
        (Some(json!(4)), json!({"records": [], "hasMore": false})),
        (Some(json!("3")), json!({"records": [], "hasMore": false})),
        (Some(Json::Null), json!({"records": [], "hasMore": false})),
        (Some(json!({})), json!({"records": [], "hasMore": false})),
    ] {
        let mut params = json!({"bucket": "tides", "limit": 3});
        if let Some(after) = after {
            params["after"] = after;
        }
        assert_eq!(client.call("store.paginate", params.clone()).await, expected, "{params}");
    }
    for limit in [json!(1e300), json!(u64::MAX), json!(1_u64 << 53)] {
        let page = client.call("store.paginate", json!({"bucket": "tides", "limit": limit, "after": 2})).await;
        assert_eq!(page, json!({"records": [c, d], "hasMore": false, "nextCursor": 4}), "{limit}");
        let query = json!({"bucket": "tides", "limit": limit, "offset": 2});
        assert_eq!(client.call("store.query", query).await, json!([c, d]), "{limit}");
        let query = json!({"bucket": "tides", "offset": limit, "limit": limit, "sort": {"level": "asc"}});
        assert_eq!(client.call("store.query", query).await, json!([]), "{limit}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_set_is_paginated_by_key() {
    let (_server, mut client) = serve_tides_locally().await;
    let mut config = tides_config();
    config["etsType"] = json!("ordered_set");
    client.call("store.defineBucket", json!({"name": "sorted", "config": config})).await;
    for id in [10, 9, 100] {
        client.call("store.insert", json!({"bucket": "sorted", "data": {"id": id, "port": "Hook"}})).await;
    }
    let ids =
        |records: &Json| records.as_array().unwrap().iter().map(|record| record["id"].clone()).collect::<Vec<_>>();
    let first = client.call("store.first", json!({"bucket": "sorted", "n": 2})).await;
    assert_eq!(ids(&first), [json!(9), json!(10)]);
    let last = client.call("store.last", json!({"bucket": "sorted", "n": 2})).await;
    assert_eq!(ids(&last), [json!(10), json!(100)]);
    let page = client.call("store.paginate", json!({"bucket": "sorted", "limit": 5, "after": 9})).await;
    assert_eq!(ids(&page["records"]), [json!(10), json!(100)]);
    let all = client.call("store.all", json!({"bucket": "sorted"})).await;
    assert_eq!(ids(&all), [json!(10), json!(9), json!(100)], "`store.all` keeps the insertion order");
}

#[tokio::test(flavor = "multi_thread")]
async fn store_query_supports_all_clauses() {
    let (_server, mut client) = serve_tides().await;
    insert_tides(&mut client, &FOUR_TIDES).await;
    let [a, b, c, d] = four_tides();
    for (params, expected) in [
        (json!({}), json!([a, b, c, d])),
        (
            json!({"filter": null, "sort": null, "limit": null, "offset": null, "fields": null, "aggregate": null}),
            json!([a, b, c, d]),
        ),
        (json!({"sort": {"level": "desc"}}), json!([b, d, a, c])),
        (json!({"sort": {"port": "asc", "level": "desc"}, "offset": 1, "limit": 2}), json!([c, d])),
        (json!({"filter": {"level": {"$gt": "{{ params.least }}"}}, "params": {"least": 4}}), json!([b, d])),
        (json!({"filter": {"port": {"$in": ["{{ params.a }}", "Brest"]}}, "params": {"a": "Cuxhaven"}}), json!([b, c])),
        (json!({"fields": ["port", "none"], "limit": 1}), json!([{"port": "Hook"}])),
        (json!({"aggregate": {"function": "count"}}), json!(4)),
        (json!({"aggregate": {"function": "sum", "field": "level"}}), json!(13.0)),
        (json!({"aggregate": {"function": "max", "field": "level"}, "filter": {"port": "Hook"}}), json!(5)),
        (
            json!({"aggregate": {"function": "count", "groupBy": "port"}}),
            json!([{"key": {"port": "Hook"}, "value": 2}, {"key": {"port": "Brest"}, "value": 1}, {"key": {"port": "Cuxhaven"}, "value": 1}]),
        ),
    ] {
        let mut params = params;
        params["bucket"] = json!("tides");
        let found = client.call("store.query", params.clone()).await;
        let is_same = found == expected || found.as_f64().is_some() && found.as_f64() == expected.as_f64();
        assert!(is_same, "{params}: {found}, expected {expected}");
    }
    // The minimum of no rows has no data, as with a subscription.
    let least =
        json!({"bucket": "tides", "filter": {"port": "Dover"}, "aggregate": {"function": "min", "field": "level"}});
    let id = client.send("store.query", least).await;
    assert_eq!(client.reply(id).await, json!({"id": id, "type": "result"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_an_undefined_bucket_are_rejected() {
    let (_server, mut client) = serve_tides_locally().await;
    for (operation, params) in [
        ("store.get", json!({"key": 1})),
        ("store.all", json!({})),
        ("store.where", json!({"filter": {}})),
        ("store.findOne", json!({"filter": {}})),
        ("store.count", json!({})),
        ("store.first", json!({"n": 1})),
        ("store.last", json!({"n": 1})),
        ("store.paginate", json!({"limit": 1})),
        ("store.sum", json!({"field": "x"})),
        ("store.avg", json!({"field": "x"})),
        ("store.min", json!({"field": "x"})),
        ("store.max", json!({"field": "x"})),
        ("store.query", json!({})),
    ] {
        let mut params = params;
        params["bucket"] = json!("none");
        let message = expect_error(&mut client, operation, params, "BUCKET_NOT_DEFINED").await;
        assert_eq!(message, "bucket \"none\" is not defined");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_reads_are_checked() {
    let (_server, mut client) = serve_tides_locally().await;
    let no_text = [Json::Null, json!(""), json!(7), json!(["tides"]), json!({}), json!(true)];
    let no_object = [Json::Null, json!([]), json!("x"), json!(7), json!(false)];
    let no_filter = &no_object[1..];
    let no_count = [Json::Null, json!(0), json!(-1), json!(1.5), json!("3"), json!([])];
    let text = "a non-empty string";
    let object = "an object";
    let count = "an integer of at least 1";
    let bucket: (&str, &[Json], &str) = ("bucket", &no_text, text);
    for (operation, good, wrong) in [
        ("store.get", json!({"key": 1}), vec![("key", &[Json::Null][..], "a value other than null")]),
        ("store.all", json!({}), vec![]),
        ("store.where", json!({"filter": {}}), vec![("filter", &no_object[..], object)]),
        ("store.findOne", json!({"filter": {}}), vec![("filter", &no_object[..], object)]),
        ("store.count", json!({}), vec![("filter", no_filter, object)]),
        ("store.first", json!({"n": 1}), vec![("n", &no_count[..], count)]),
        ("store.last", json!({"n": 1}), vec![("n", &no_count[..], count)]),
        ("store.paginate", json!({"limit": 1}), vec![("limit", &no_count[..], count)]),
        ("store.sum", json!({"field": "level"}), vec![("field", &no_text[..], text), ("filter", no_filter, object)]),
        ("store.avg", json!({"field": "level"}), vec![("field", &no_text[..], text), ("filter", no_filter, object)]),
        ("store.min", json!({"field": "level"}), vec![("field", &no_text[..], text), ("filter", no_filter, object)]),
        ("store.max", json!({"field": "level"}), vec![("field", &no_text[..], text), ("filter", no_filter, object)]),
    ] {
        let mut good = good;
        good["bucket"] = json!("tides");
        client.call(operation, good.clone()).await;
        let wrong: Vec<_> = wrong.into_iter().chain([bucket]).collect();
        expect_invalid_params(&mut client, operation, good, &wrong).await;
    }
    let good = json!({"bucket": "tides"});
    let no_number = [json!(-1), json!(1.5), json!("3")];
    let wrong: &[(&str, &[Json], &str)] = &[
        bucket,
        ("filter", no_filter, ""),
        ("sort", &[json!("level"), json!(["level"]), json!({"level": "up"}), json!(1)], ""),
        ("limit", &no_number, ""),
        ("offset", &no_number, ""),
        ("fields", &[json!("port"), json!({}), json!([1])], ""),
        (
            "aggregate",
            &[json!("count"), json!({"function": "median", "field": "level"}), json!({"function": "sum"}), json!([])],
            "",
        ),
    ];
    expect_invalid_params(&mut client, "store.query", good, wrong).await;
    for params in [
        json!({"bucket": "tides", "filter": {"port": {"$like": "x"}}}),
        json!({"bucket": "tides", "filter": {"$not": []}}),
    ] {
        for operation in ["store.where", "store.findOne", "store.count", "store.query"] {
            let message = expect_error(&mut client, operation, params.clone(), "VALIDATION_ERROR").await;
            assert!(message.contains("$like") || message.contains("$not"), "{message}");
        }
    }
    let missing = json!({"bucket": "tides", "filter": {"port": "{{ params.port }}"}});
    let message = expect_error(&mut client, "store.query", missing, "VALIDATION_ERROR").await;
    assert!(message.contains("port"), "{message}");
}

async fn expect_too_large(client: &mut Client, operation: &str, params: Json) {
    let message = expect_error(client, operation, params, "TOO_LARGE").await;
    assert!(message.contains("1500"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_of_all_reads_are_limited() {
    let options = options().max_result_bytes(1500);
    let (_server, mut client) = serve_tides_with(options).await;
    let long = "x".repeat(1000);
    for _ in 0..2 {
        client.call("store.insert", json!({"bucket": "tides", "data": {"port": long}})).await;
    }
    let in_tides = |params: Json| {
        let mut params = params;
        params["bucket"] = json!("tides");
        params
    };
    // One record fits, two do not.
    client.call("store.first", in_tides(json!({"n": 1}))).await;
    client.call("store.paginate", in_tides(json!({"limit": 1}))).await;
    client.call("store.query", in_tides(json!({"limit": 1}))).await;
    client.call("store.count", in_tides(json!({}))).await;
    for (operation, params) in [
        ("store.all", json!({})),
        ("store.where", json!({"filter": {}})),
        ("store.first", json!({"n": 2})),
        ("store.last", json!({"n": 2})),
        ("store.paginate", json!({"limit": 2})),
        ("store.query", json!({})),
        ("store.query", json!({"sort": {"port": "asc"}})),
        ("store.query", json!({"aggregate": {"function": "count", "groupBy": ["port", "id"]}})),
    ] {
        expect_too_large(&mut client, operation, in_tides(params)).await;
    }
    client.call("store.insert", in_tides(json!({"data": {"port": long.repeat(2)}}))).await;
    expect_too_large(&mut client, "store.get", in_tides(json!({"key": 3}))).await;
    expect_too_large(&mut client, "store.findOne", in_tides(json!({"filter": {"id": 3}}))).await;
    expect_too_large(&mut client, "store.subscribe", json!({"config": {"bucket": "tides"}})).await;
    expect_too_large(
        &mut client,
        "store.subscribe",
        json!({"config": {"bucket": "tides", "filter": {"id": 3}}, "mode": "delta"}),
    )
    .await;
    // The rejected subscriptions do not exist.
    let stats = client.call("store.stats", json!({})).await;
    assert_eq!(stats["queries"]["activeSubscriptions"], 0);
    // Results of definitions are limited too.
    let mut wide = tides_config();
    for field in 0..100 {
        wide["schema"][format!("field{field}")] = json!({"type": "string"});
    }
    client.call("store.defineBucket", json!({"name": "wide", "config": wide})).await;
    expect_too_large(&mut client, "store.getBucketSchema", json!({"name": "wide"})).await;
    for query in 0..30 {
        let config = json!({"bucket": "tides", "filter": {"port": "a port"}});
        client.call("store.defineQuery", json!({"name": format!("query{query}"), "config": config})).await;
    }
    expect_too_large(&mut client, "store.listQueries", json!({})).await;
    for bucket in 0..30 {
        let name = format!("{bucket}{}", "x".repeat(100));
        client.call("store.defineBucket", json!({"name": name, "config": tides_config()})).await;
    }
    expect_too_large(&mut client, "store.buckets", json!({})).await;
    expect_too_large(&mut client, "store.stats", json!({})).await;
    expect_too_large(&mut client, "server.stats", json!({})).await;
}
