//! Costly requests: they cost their own connection, and have limits.

use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, options, serve_store};
use crate::house::{House, object, only, own_rows, tokens, user};
use crate::page::Page;

/// A server with a bucket of 16 records of a megabyte each, and a small one.
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

/// A filter that takes seconds on the texts: each condition searches all of them. A request with it is parsed on its I/O thread, so it
/// is once on the pool.
fn costly_filter() -> Json {
    let condition = |n: usize| json!({"text": {"$contains": format!("{}{n}", "spring tide ".repeat(12))}});
    json!({"$or": (0..256).map(condition).collect::<Vec<_>>()})
}

async fn wait_for_pool(server: &Server, requests: u64) {
    wait_until_async("the pool has this many requests", PATIENCE, async || {
        Page::of(server).await.get("pool_requests") == requests
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_costly_read_delays_no_other_client_and_ends_with_its_own() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    hostile.send("store.count", json!({"bucket": "texts", "filter": costly_filter()})).await;
    wait_for_pool(&server, 1).await;
    // The one thread of the server is free.
    assert_eq!(other.ask("store.get", json!({"bucket": "small", "key": 1})).await["id"], 1);
    assert_eq!(other.ask("store.count", json!({"bucket": "small"})).await, 1);
    assert_eq!(Page::of(&server).await.get("pool_requests"), 1, "the costly one goes on");
    drop(hostile);
    wait_for_pool(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_costly_read_ends_at_its_deadline() {
    let options = options().request_timeout(Duration::from_millis(100));
    let server = serve_texts(options).await;
    let mut client = Client::connect(&server).await;
    for (operation, params) in [
        ("store.count", json!({"bucket": "texts", "filter": costly_filter()})),
        ("store.findOne", json!({"bucket": "texts", "filter": costly_filter()})),
        ("store.query", json!({"bucket": "texts", "filter": costly_filter(), "sort": {"id": "desc"}})),
        ("store.sum", json!({"bucket": "texts", "filter": costly_filter(), "field": "id"})),
    ] {
        assert_eq!(client.fail(operation, params).await.0, "TIMEOUT", "{operation}");
        wait_for_pool(&server, 0).await;
    }
    assert_eq!(Page::of(&server).await.get("requests_timed_out_total"), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn cheap_reads_do_not_use_the_pool() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.where", json!({"bucket": "small", "filter": {"id": 1}})).await;
    client.ask("store.where", json!({"bucket": "texts", "filter": {"id": 70}})).await;
    client.ask("store.count", json!({"bucket": "texts"})).await;
    assert_eq!(Page::of(&server).await.get("requests_on_pool_total"), 0);
    client.ask("store.first", json!({"bucket": "texts", "n": 3})).await;
    assert_eq!(Page::of(&server).await.get("requests_on_pool_total"), 1);
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
    for (place, id) in sent.into_iter().enumerate() {
        let reply = client.reply(id).await;
        let found = reply["data"]["text"].as_str().unwrap();
        let round = place / 3;
        let expected = if place % 3 == 0 { format!("before {round}") } else { format!("{text} {round}") };
        assert!(*found == expected, "request {place} has the text {:?}…", &found[..20.min(found.len())]);
    }
    assert_eq!(Page::of(&server).await.get("requests_on_pool_total"), 20);

    // What is no request has the same errors as a short message.
    client.send_text(format!("{{\"id\": 1, \"type\": {text}")).await;
    assert_eq!(client.reply(0).await["code"], "PARSE_ERROR");
    client.send_text(format!("{{\"type\": \"{text}\"}}")).await;
    assert_eq!(client.reply(0).await["code"], "INVALID_REQUEST");
    client.send_text(format!("{{\"type\": \"pong\", \"timestamp\": 1, \"text\": \"{text}\"}}")).await;
    assert_eq!(client.fail("store.nothing", json!({"text": text})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(
        client.fail("store.insert", json!({"bucket": "none", "data": {"text": text}})).await.0,
        "BUCKET_NOT_DEFINED"
    );
    client.ask("store.get", json!({"bucket": "small", "key": 7})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_comes_after_the_reply_to_the_large_write_that_caused_it() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.subscribe", json!({"config": {"bucket": "small", "fields": ["id"]}})).await;
    for id in 10..30 {
        let data = json!({"id": id, "text": "x".repeat(70_000)});
        let id = client.send("store.insert", json!({"bucket": "small", "data": data})).await;
        // Nothing was pushed before the reply.
        assert_eq!(client.receive().await["id"], id);
        assert_eq!(client.push().await["type"], "push");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_have_a_limited_number_of_conditions() {
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
        let (code, error) = client.fail(operation, params).await;
        let expected = "the filter has 4 conditions; at most 3 are allowed. Use $in to match many values";
        assert_eq!((&*code, &error["message"]), ("VALIDATION_ERROR", &json!(expected)), "{operation}");
    }
    let query = json!({"name": "q", "config": {"bucket": "small", "filter": filter(4)}});
    assert_eq!(client.fail("store.defineQuery", query).await.0, "VALIDATION_ERROR");
    let many = json!({"id": {"$in": (0..1000).collect::<Vec<_>>()}});
    for (operation, params) in requests(filter(3)).into_iter().chain(requests(many)) {
        client.ask(operation, params).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conditions_of_row_permissions_are_not_counted() {
    let auth = only(tokens([user("mara", &["writer"])]), [own_rows("writer")]);
    let house = House::open_with(options().auth(auth).max_filter_conditions(1)).await;
    house
        .bucket("tasks", [json!({"id": "a", "owner": "mara", "n": 1}), json!({"id": "b", "owner": "petr", "n": 1})])
        .await;
    let mut mara = house.client("mara").await;
    assert_eq!(mara.ask("store.count", json!({"bucket": "tasks", "filter": {"n": 1}})).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_with_a_long_read_is_refused_with_the_index_that_it_lacks() {
    let server = serve_texts(options()).await;
    let mut client = Client::connect(&server).await;
    // 256 searches of the texts take seconds. The writer gives up after 50 ms of work.
    let step = json!({"op": "count", "bucket": "texts", "filter": costly_filter()});
    let (code, error) = client.fail("store.transaction", json!({"operations": [step]})).await;
    let expected = "operations[0]: the reads of the write exceed the limit of 50 ms in bucket \"texts\": \
                    use a filter that an index can serve, or read before the transaction";
    assert_eq!((&*code, &error["message"]), ("TOO_LARGE", &json!(expected)));
    let conditions: Vec<Json> =
        (0..255).map(|n| json!({"text": {"$contains": format!("{}{n}", "tide ".repeat(20))}})).collect();
    let filter = json!({"text": {"$startsWith": "spring"}, "$or": conditions});
    let step = json!({"op": "findOne", "bucket": "texts", "filter": filter});
    let (_, error) = client.fail("store.transaction", json!({"operations": [step]})).await;
    assert!(error["message"].as_str().unwrap().contains("define an index on \"text\""), "{error}");
    client.ask("store.insert", json!({"bucket": "small", "data": {"id": 2}})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_listings_are_made_on_the_pool() {
    let options = options().max_result_bytes(30_000);
    let server = serve_texts(options).await;
    let mut client = Client::connect(&server).await;
    for operation in ["store.buckets", "store.stats", "server.stats", "server.connections"] {
        client.ask(operation, json!({})).await;
    }
    assert_eq!(Page::of(&server).await.get("requests_on_pool_total"), 0);
    let config = json!({"key": "id", "schema": {"id": {"type": "number"}}});
    for n in 0..600 {
        client.send("store.defineBucket", json!({"name": format!("b{n}"), "config": config})).await;
    }
    for id in 5..605 {
        client.reply(id).await;
    }
    assert_eq!(client.ask("store.buckets", json!({})).await["count"], 602);
    assert_eq!(client.ask("store.stats", json!({})).await["buckets"]["count"], 602);
    assert_eq!(client.ask("server.stats", json!({})).await["store"]["buckets"]["count"], 602);
    assert_eq!(Page::of(&server).await.get("requests_on_pool_total"), 3);
    let filter = json!({"text": {"$in": ["x".repeat(1000)]}});
    for n in 0..50 {
        let config = json!({"bucket": "small", "filter": filter});
        client.ask("store.defineQuery", json!({"name": format!("q{n}"), "config": config})).await;
    }
    assert_eq!(client.fail("store.listQueries", json!({})).await.0, "TOO_LARGE");
}

#[tokio::test(flavor = "multi_thread")]
async fn costly_subscriptions_delay_no_push_of_another_bucket() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    other.ask("store.subscribe", json!({"config": {"bucket": "small"}})).await;
    for limit in 1..=3 {
        let config = json!({"bucket": "texts", "filter": costly_filter(), "limit": limit});
        hostile.send("store.subscribe", json!({"config": config})).await;
    }
    wait_until_async("a query is evaluated", PATIENCE, async || {
        Page::of(&server).await.get("live_evaluations_total") > 0
    })
    .await;
    for id in 2..5 {
        other.ask("store.insert", json!({"bucket": "small", "data": {"id": id}})).await;
        assert_eq!(other.push().await["data"].as_array().unwrap().len(), id);
    }
    let page = Page::of(&server).await;
    assert_eq!(page.get("live_queries"), 1, "the costly ones are not evaluated yet");
    assert!(page.get("live_kept_bytes") > 0);
    drop(hostile);
    // Nobody waits for the evaluations, so they end.
    wait_until_async("the evaluations end", PATIENCE, async || server.stats().subscriptions == 1).await;
    assert_eq!(Page::of(&server).await.get("live_reevaluations_total"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_takes_too_much_work_at_commits_ends() {
    let server = serve_texts(options()).await;
    let (mut hostile, mut other) = (Client::connect(&server).await, Client::connect(&server).await);
    let config = json!({"bucket": "small", "filter": costly_filter()});
    hostile.ask("store.subscribe", json!({"config": config, "pos": true})).await;
    other.ask("store.subscribe", json!({"config": {"bucket": "small"}, "mode": "delta"})).await;
    let text = "spring tide ".repeat(70_000);
    other.ask("store.insert", json!({"bucket": "small", "data": {"id": 2, "text": text}})).await;
    assert_eq!(hostile.push().await["error"]["code"], "RATE_LIMITED");
    assert_eq!(other.push().await["data"]["added"][0]["id"], 2);
    assert_eq!(Page::of(&server).await.get("live_too_costly_total"), 1);
    // The connection goes on.
    hostile.ask("store.get", json!({"bucket": "small", "key": 1})).await;
}
