//! Expensive requests delay only their own connection, and are limited.

use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::metrics_page::MetricsPage;
use crate::test_server::{TestServer, allow_only, object, own_rows, tokens, user};

/// Starts a server with a bucket of 16 records of a megabyte each, and a small bucket.
async fn serve_texts(options: ServerOptions) -> Server {
    let store = Store::memory(StoreOptions::default());
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    let text = "spring tide ".repeat(80_000);
    store
        .write(move |draft| {
            for bucket in ["texts", "small"] {
                draft.define_bucket(bucket, &config)?;
            }
            for id in 0..16 {
                draft.insert("texts", object(json!({"id": id, "text": text})))?;
            }
            draft.insert("small", object(json!({"id": 1})))
        })
        .await
        .unwrap();
    serve_store(store, options).await
}

/// Returns a filter that takes seconds on the texts: each condition searches all of them. A request with it is small enough to be parsed on
/// the I/O thread, so it enters the pool once.
fn expensive_filter() -> Json {
    let condition = |n: usize| json!({"text": {"$contains": format!("{}{n}", "spring tide ".repeat(12))}});
    json!({"$or": (0..256).map(condition).collect::<Vec<_>>()})
}

async fn wait_for_pool(server: &Server, requests: u64) {
    wait_until_async("the pool has this many requests", PATIENCE, async || {
        MetricsPage::read(server).await.get("pool_requests") == requests
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn expensive_read_delays_no_other_client_and_ends_with_its_connection() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    hostile.send("store.count", json!({"bucket": "texts", "filter": expensive_filter()})).await;
    wait_for_pool(&server, 1).await;
    // The only thread of the server is free.
    assert_eq!(other.call("store.get", json!({"bucket": "small", "key": 1})).await["id"], 1);
    assert_eq!(other.call("store.count", json!({"bucket": "small"})).await, 1);
    assert_eq!(MetricsPage::read(&server).await.get("pool_requests"), 1, "the expensive read still runs");
    drop(hostile);
    wait_for_pool(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn expensive_read_ends_at_its_timeout() {
    let options = options().request_timeout(Duration::from_millis(100));
    let server = serve_texts(options).await;
    let mut client = Client::connect(&server).await;
    for (operation, params) in [
        ("store.count", json!({"bucket": "texts", "filter": expensive_filter()})),
        ("store.findOne", json!({"bucket": "texts", "filter": expensive_filter()})),
        ("store.query", json!({"bucket": "texts", "filter": expensive_filter(), "sort": {"id": "desc"}})),
        ("store.sum", json!({"bucket": "texts", "filter": expensive_filter(), "field": "id"})),
    ] {
        assert_eq!(client.call_err(operation, params).await.0, "TIMEOUT", "{operation}");
        wait_for_pool(&server, 0).await;
    }
    assert_eq!(MetricsPage::read(&server).await.get("requests_timed_out_total"), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn cheap_reads_do_not_use_the_pool() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.where", json!({"bucket": "small", "filter": {"id": 1}})).await;
    client.call("store.where", json!({"bucket": "texts", "filter": {"id": 70}})).await;
    client.call("store.count", json!({"bucket": "texts"})).await;
    assert_eq!(MetricsPage::read(&server).await.get("requests_on_pool_total"), 0);
    client.call("store.first", json!({"bucket": "texts", "n": 3})).await;
    assert_eq!(MetricsPage::read(&server).await.get("requests_on_pool_total"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_requests_are_parsed_on_the_pool_and_keep_their_order() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    let text = "x".repeat(70_000);
    let large = |id: u64, text: &str| json!({"bucket": "small", "data": {"id": id, "text": text}});
    let mut sent = Vec::new();
    for round in 0..20 {
        sent.push(client.send("store.upsert", large(7, &format!("before {round}"))).await);
        sent.push(client.send("store.upsert", large(7, &format!("{text} {round}"))).await);
        sent.push(client.send("store.get", json!({"bucket": "small", "key": 7})).await);
    }
    for (index, id) in sent.into_iter().enumerate() {
        let reply = client.reply(id).await;
        let found = reply["data"]["text"].as_str().unwrap();
        let round = index / 3;
        let expected = if index % 3 == 0 { format!("before {round}") } else { format!("{text} {round}") };
        assert!(*found == expected, "request {index} has the text {:?}…", &found[..20.min(found.len())]);
    }
    assert_eq!(MetricsPage::read(&server).await.get("requests_on_pool_total"), 20);

    // Invalid large messages get the same errors as small ones.
    client.send_text(format!("{{\"id\": 1, \"type\": {text}")).await;
    assert_eq!(client.reply(0).await["code"], "PARSE_ERROR");
    client.send_text(format!("{{\"type\": \"{text}\"}}")).await;
    assert_eq!(client.reply(0).await["code"], "INVALID_REQUEST");
    client.send_text(format!("{{\"type\": \"pong\", \"timestamp\": 1, \"text\": \"{text}\"}}")).await;
    assert_eq!(client.call_err("store.nothing", json!({"text": text})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(
        client.call_err("store.insert", json!({"bucket": "none", "data": {"text": text}})).await.0,
        "BUCKET_NOT_DEFINED"
    );
    client.call("store.get", json!({"bucket": "small", "key": 7})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn push_follows_the_reply_to_the_large_write_that_caused_it() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.subscribe", json!({"config": {"bucket": "small", "fields": ["id"]}})).await;
    for id in 10..30 {
        let data = json!({"id": id, "text": "x".repeat(70_000)});
        let id = client.send("store.insert", json!({"bucket": "small", "data": data})).await;
        // No push before the reply.
        assert_eq!(client.receive().await["id"], id);
        assert_eq!(client.push().await["type"], "push");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_filter_conditions_is_limited() {
    let options = options().max_filter_conditions(3);
    let server = serve_texts(options).await;
    let mut client = Client::connect(&server).await;
    let filter = |count: usize| json!({"$or": (0..count).map(|n| json!({"id": n})).collect::<Vec<_>>()});
    let requests = |filter: Json| {
        let step = |op: &str| json!({"operations": [{"op": op, "bucket": "small", "filter": filter}]});
        [
            ("store.where", json!({"bucket": "small", "filter": filter})),
            ("store.findOne", json!({"bucket": "small", "filter": filter})),
            ("store.count", json!({"bucket": "small", "filter": filter})),
            ("store.max", json!({"bucket": "small", "field": "id", "filter": filter})),
            ("store.query", json!({"bucket": "small", "filter": filter})),
            ("store.subscribe", json!({"config": {"bucket": "small", "filter": filter}})),
            ("store.transaction", step("where")),
            ("store.transaction", step("findOne")),
            ("store.transaction", step("count")),
        ]
    };
    for (operation, params) in requests(filter(4)) {
        let (code, error) = client.call_err(operation, params).await;
        let expected = "the filter has 4 conditions; at most 3 are allowed. Use $in to match many values";
        assert_eq!((&*code, &error["message"]), ("VALIDATION_ERROR", &json!(expected)), "{operation}");
    }
    let query = json!({"name": "q", "config": {"bucket": "small", "filter": filter(4)}});
    assert_eq!(client.call_err("store.defineQuery", query).await.0, "VALIDATION_ERROR");
    let many = json!({"id": {"$in": (0..1000).collect::<Vec<_>>()}});
    for (operation, params) in requests(filter(3)).into_iter().chain(requests(many)) {
        client.call(operation, params).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_permission_filters_do_not_count_as_conditions() {
    let auth = allow_only(tokens([user("mara", &["writer"])]), [own_rows("writer")]);
    let test = TestServer::start_with(options().auth(auth).max_filter_conditions(1)).await;
    test.bucket("tasks", [json!({"id": "a", "owner": "mara", "n": 1}), json!({"id": "b", "owner": "petr", "n": 1})])
        .await;
    let mut mara = test.client("mara").await;
    assert_eq!(mara.call("store.count", json!({"bucket": "tasks", "filter": {"n": 1}})).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_with_a_long_read_is_rejected_with_an_index_hint() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    // 256 searches of the texts take seconds. The writer stops after 50 ms of work.
    let step = json!({"op": "count", "bucket": "texts", "filter": expensive_filter()});
    let (code, error) = client.call_err("store.transaction", json!({"operations": [step]})).await;
    let expected = "operations[0]: the reads of the write exceed the limit of 50 ms in bucket \"texts\": \
                    use a filter that an index can serve, or read before the transaction";
    assert_eq!((&*code, &error["message"]), ("TOO_LARGE", &json!(expected)));
    let conditions: Vec<Json> =
        (0..255).map(|n| json!({"text": {"$contains": format!("{}{n}", "tide ".repeat(20))}})).collect();
    let filter = json!({"text": {"$startsWith": "spring"}, "$or": conditions});
    let step = json!({"op": "findOne", "bucket": "texts", "filter": filter});
    let (_, error) = client.call_err("store.transaction", json!({"operations": [step]})).await;
    assert!(error["message"].as_str().unwrap().contains("define an index on \"text\""), "{error}");
    client.call("store.insert", json!({"bucket": "small", "data": {"id": 2}})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_listings_are_produced_on_the_pool() {
    let options = options().max_result_bytes(30_000);
    let server = serve_texts(options).await;
    let mut client = Client::connect(&server).await;
    for operation in ["store.buckets", "store.stats", "server.stats", "server.connections"] {
        client.call(operation, json!({})).await;
    }
    assert_eq!(MetricsPage::read(&server).await.get("requests_on_pool_total"), 0);
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    for n in 0..600 {
        client.send("store.defineBucket", json!({"name": format!("b{n}"), "config": config})).await;
    }
    for id in 5..605 {
        client.reply(id).await;
    }
    assert_eq!(client.call("store.buckets", json!({})).await["count"], 602);
    assert_eq!(client.call("store.stats", json!({})).await["buckets"]["count"], 602);
    assert_eq!(client.call("server.stats", json!({})).await["store"]["buckets"]["count"], 602);
    assert_eq!(MetricsPage::read(&server).await.get("requests_on_pool_total"), 3);
    let filter = json!({"text": {"$in": ["x".repeat(1000)]}});
    for n in 0..50 {
        let config = json!({"bucket": "small", "filter": filter});
        client.call("store.defineQuery", json!({"name": format!("q{n}"), "config": config})).await;
    }
    assert_eq!(client.call_err("store.listQueries", json!({})).await.0, "TOO_LARGE");
}

#[tokio::test(flavor = "multi_thread")]
async fn expensive_subscriptions_do_not_delay_pushes_of_other_buckets() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    other.call("store.subscribe", json!({"config": {"bucket": "small"}})).await;
    for limit in 1..=3 {
        let config = json!({"bucket": "texts", "filter": expensive_filter(), "limit": limit});
        hostile.send("store.subscribe", json!({"config": config})).await;
    }
    wait_until_async("a query is evaluated", PATIENCE, async || {
        MetricsPage::read(&server).await.get("live_evaluations_total") > 0
    })
    .await;
    for id in 2..5 {
        other.call("store.insert", json!({"bucket": "small", "data": {"id": id}})).await;
        assert_eq!(other.push().await["data"].as_array().unwrap().len(), id);
    }
    let page = MetricsPage::read(&server).await;
    assert_eq!(page.get("live_queries"), 1, "the expensive queries are not evaluated yet");
    assert!(page.get("live_kept_bytes") > 0);
    drop(hostile);
    // No subscriber is left, so the evaluations are cancelled.
    wait_until_async("the evaluations end", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(MetricsPage::read(&server).await.get("live_reevaluations_total"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_that_is_too_expensive_at_commits_ends() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    let config = json!({"bucket": "small", "filter": expensive_filter()});
    hostile.call("store.subscribe", json!({"config": config, "pos": true})).await;
    other.call("store.subscribe", json!({"config": {"bucket": "small"}, "mode": "delta"})).await;
    let text = "spring tide ".repeat(70_000);
    other.call("store.insert", json!({"bucket": "small", "data": {"id": 2, "text": text}})).await;
    assert_eq!(hostile.push().await["error"]["code"], "RATE_LIMITED");
    assert_eq!(other.push().await["data"]["added"][0]["id"], 2);
    assert_eq!(MetricsPage::read(&server).await.get("live_too_costly_total"), 1);
    // The connection stays open.
    hostile.call("store.get", json!({"bucket": "small", "key": 1})).await;
}
