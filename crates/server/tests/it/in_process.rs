//! Clients in the same process as the server: the same operations, permissions, limits and subscriptions as over a socket.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tidewire::auth::Session;
use tidewire::{Code, ConnectionLimits, RateLimit, RequestError, Server};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::time::timeout;

use crate::client::{Client, options, serve};
use crate::gated_query::{Gate, GatedQuery};
use crate::metrics_page::MetricsPage;
use crate::test_server::{TestServer, allow_only, own_rows, tokens, user};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Tide {
    id: String,
    metres: f64,
}

fn tide(id: &str, metres: f64) -> Tide {
    Tide { id: id.to_owned(), metres }
}

async fn serve_tides() -> (Server, tidewire::Client) {
    let server = serve(options()).await;
    let client = server.client(None);
    define_tides(&client).await;
    (server, client)
}

async fn define_tides(client: &tidewire::Client) {
    let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
    client.request::<Json>("store.defineBucket", json!({"name": "tides", "config": config})).await.unwrap();
}

fn code<T: std::fmt::Debug>(result: Result<T, RequestError>) -> Code {
    result.unwrap_err().code
}

#[tokio::test(flavor = "multi_thread")]
async fn typed_records_are_written_and_read() {
    let (server, client) = serve_tides().await;
    let brest: Tide = client.insert("tides", tide("Brest", 4.2)).await.unwrap();
    assert_eq!(brest, tide("Brest", 4.2));
    assert_eq!(client.get("tides", "Brest").await.unwrap(), Some(brest));
    assert_eq!(client.get::<Tide>("tides", "Hook").await.unwrap(), None);
    assert_eq!(client.update::<Tide>("tides", "Brest", json!({"metres": 5.0})).await.unwrap(), tide("Brest", 5.0));
    client.insert::<Json>("tides", tide("Hook", 1.0)).await.unwrap();
    let query = json!({"bucket": "tides", "sort": {"metres": "asc"}});
    let sorted: Vec<Tide> = client.query(query).await.unwrap();
    assert_eq!(sorted, [tide("Hook", 1.0), tide("Brest", 5.0)]);
    let results: Json =
        client.request("store.transaction", json!({"operations": [{"op": "count", "bucket": "tides"}]})).await.unwrap();
    assert_eq!(results, json!({"results": [{"index": 0, "data": 2}]}));
    client.delete("tides", "Brest").await.unwrap();
    assert_eq!(client.get::<Tide>("tides", "Brest").await.unwrap(), None);
    let nothing =
        json!({"bucket": "tides", "filter": {"id": "x"}, "aggregate": {"function": "max", "field": "metres"}});
    assert_eq!(client.query::<Option<f64>>(nothing).await.unwrap(), None, "a result without data is null");
    // The same records over a socket.
    let mut socket = Client::connect(&server).await;
    assert_eq!(socket.call("store.count", json!({"bucket": "tides"})).await, 1);
    let page = MetricsPage::read(&server).await;
    let counted = [
        ("store.defineBucket", 1),
        ("store.insert", 2),
        ("store.get", 3),
        ("store.update", 1),
        ("store.query", 2),
        ("store.transaction", 1),
        ("store.delete", 1),
        ("store.count", 1),
    ];
    for (operation, count) in counted {
        assert_eq!(page.requests(operation, "ok"), count, "{operation}");
    }
    let stats = server.stats();
    assert_eq!((stats.requests, stats.failed), (counted.iter().map(|(_, count)| count).sum(), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_those_of_the_wire_protocol() {
    let (server, client) = serve_tides().await;
    assert_eq!(code(client.get::<Tide>("none", 1).await), Code::BucketNotDefined);
    assert_eq!(code(client.request::<Json>("store.gett", json!({})).await), Code::UnknownOperation);
    assert_eq!(code(client.request::<Json>("rules.emit", json!({})).await), Code::RulesNotAvailable);
    assert_eq!(code(client.request::<Json>("", json!({})).await), Code::InvalidRequest);
    assert_eq!(code(client.request::<Json>("store.get", json!([1])).await), Code::ValidationError);
    assert_eq!(code(client.request::<Json>("pong", json!({"timestamp": 1})).await), Code::ValidationError);
    let wrong = client.insert::<Json>("tides", json!({"metres": 1})).await.unwrap_err();
    assert_eq!(wrong.details.unwrap()[0]["code"], "required");
    client.insert::<Json>("tides", tide("Brest", 4.2)).await.unwrap();
    let wrong = client.get::<Vec<u8>>("tides", "Brest").await.unwrap_err();
    assert!(wrong.message.contains("does not have the expected type"), "{wrong}");
    let ended = client.subscribe::<Json>(json!({"query": "none"})).await;
    assert_eq!(code(ended.map(drop)), Code::QueryNotDefined);
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn error_details_are_hidden_if_configured() {
    let options = options().expose_error_details(false);
    let server = serve(options).await;
    let client = server.client(None);
    define_tides(&client).await;
    let wrong = client.insert::<Json>("tides", json!({"metres": 1})).await.unwrap_err();
    assert_eq!((wrong.code, wrong.details), (Code::ValidationError, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_push_results_deltas_and_their_end() {
    let (server, client) = serve_tides().await;
    let mut socket = Client::connect(&server).await;
    let query = json!({"config": {"bucket": "tides"}});
    let mut results = client.subscribe::<Vec<Tide>>(query).await.unwrap();
    assert_eq!(results.first::<Vec<Tide>>().unwrap(), Some(Vec::new()));
    assert_eq!(results.position(), None);
    let query = json!({"config": {"bucket": "tides"}, "mode": "delta"});
    let mut deltas = client.subscribe::<Json>(query).await.unwrap();
    assert!(deltas.position().is_some() && !deltas.is_resumed());
    socket.call("store.insert", json!({"bucket": "tides", "data": tide("Brest", 4.2)})).await;
    let push = results.next().await.unwrap();
    assert_eq!((push.data, push.position), (Some(vec![tide("Brest", 4.2)]), None));
    let push = deltas.next().await.unwrap();
    assert_eq!(push.data.unwrap()["added"][0]["id"], "Brest");
    let position = push.position.unwrap();
    drop(deltas);
    socket.call("store.insert", json!({"bucket": "tides", "data": tide("Hook", 1.0)})).await;
    let since = json!({"config": {"bucket": "tides"}, "mode": "delta", "since": position});
    let resumed = client.subscribe::<Json>(since).await.unwrap();
    assert!(resumed.is_resumed());
    assert_eq!(resumed.first::<Json>().unwrap().unwrap()["added"][0]["id"], "Hook");
    assert_eq!(server.stats().subscriptions, 2);
    drop(resumed);
    assert_eq!(server.stats().subscriptions, 1, "dropping a subscription ends it");
    assert_eq!(results.next().await.unwrap().data.map(|tides| tides.len()), Some(2));
    socket.call("store.dropBucket", json!({"name": "tides"})).await;
    assert_eq!(code(results.next().await), Code::BucketNotDefined);
    assert_eq!(code(results.next().await), Code::NotFound, "the end is reported once");
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_gets_the_newest_result() {
    let (_server, client) = serve_tides().await;
    let mut results = client.subscribe::<Vec<Json>>(json!({"config": {"bucket": "tides"}})).await.unwrap();
    for number in 0..1000 {
        client.insert::<Json>("tides", json!({"id": "Brest", "number": number})).await.unwrap();
    }
    let (mut pushes, mut last) = (0, 0);
    while last < 999 {
        let push = timeout(PATIENCE, results.next()).await.unwrap().unwrap();
        let number = push.data.unwrap()[0]["number"].as_u64().unwrap();
        assert!(number > last || pushes == 0, "results must not go back");
        (pushes, last) = (pushes + 1, number);
    }
    assert!(pushes < 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn permissions_and_row_filters_apply() {
    let auth = allow_only(tokens([user("ann", &["member"])]), [own_rows("member")]);
    let test = TestServer::start(auth).await;
    test.bucket("notes", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "bob"})]).await;
    let anonymous = test.server.client(None);
    assert_eq!(code(anonymous.get::<Json>("notes", "a").await), Code::Unauthorized);
    let ann = test.server.client(Session::new("ann", ["member"]));
    assert!(ann.get::<Json>("notes", "a").await.unwrap().is_some());
    assert!(ann.get::<Json>("notes", "b").await.unwrap().is_none());
    assert_eq!(code(ann.update::<Json>("notes", "b", json!({"x": 1})).await), Code::NotFound);
    assert_eq!(code(ann.request::<Json>("store.stats", json!({})).await), Code::Forbidden);
    let mut notes = ann.subscribe::<Vec<Json>>(json!({"config": {"bucket": "notes"}})).await.unwrap();
    assert_eq!(notes.first::<Vec<Json>>().unwrap().unwrap().len(), 1);
    test.write(|draft| draft.insert("notes", crate::test_server::object(json!({"id": "c", "owner": "bob"})))).await;
    test.write(|draft| draft.insert("notes", crate::test_server::object(json!({"id": "d", "owner": "ann"})))).await;
    let seen = notes.next().await.unwrap().data.unwrap();
    assert_eq!(seen.iter().map(|note| note["id"].as_str().unwrap()).collect::<Vec<_>>(), ["a", "d"]);
    // It is listed like any connection, and its session can be revoked.
    let listed = test.server.connections();
    assert_eq!(listed.iter().filter(|row| row.user_id.as_deref() == Some("ann")).count(), 1);
    assert!(listed.iter().all(|row| row.connection_id.starts_with("local-")));
    assert_eq!(test.server.revoke_user("ann"), 1);
    assert_eq!(code(notes.next().await), Code::SessionRevoked);
    assert_eq!(code(ann.get::<Json>("notes", "a").await), Code::SessionRevoked);
    let again = test.server.client(Session::new("ann", ["member"]));
    assert_eq!(code(again.get::<Json>("notes", "a").await), Code::SessionRevoked, "as a login would be");
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_and_subscription_limits_apply() {
    let options = options()
        .rate_limit(RateLimit::new(3, Duration::from_hours(1)))
        .connection_limits(ConnectionLimits::default().max_subscriptions_per_connection(1));
    let server = serve(options).await;
    let client = server.client(None);
    define_tides(&client).await;
    let query = json!({"config": {"bucket": "tides"}});
    let _held = client.subscribe::<Json>(query.clone()).await.unwrap();
    assert_eq!(code(client.subscribe::<Json>(query).await.map(drop)), Code::RateLimited);
    let limited = client.get::<Json>("tides", 1).await.unwrap_err();
    assert_eq!(limited.code, Code::RateLimited);
    assert!(limited.details.unwrap()["retryAfterMs"].as_u64().unwrap() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_ends_with_the_server_and_does_not_delay_its_stop() {
    let (server, client) = serve_tides().await;
    let mut results = client.subscribe::<Json>(json!({"config": {"bucket": "tides"}})).await.unwrap();
    let waiting = tokio::spawn(async move { results.next().await });
    assert_eq!(server.connection_count(), 1);
    let other = client.clone();
    drop(client);
    assert_eq!(server.connection_count(), 1, "a clone is the same client");
    let late = server.client(None);
    drop(late);
    timeout(PATIENCE, server.stop(Duration::ZERO)).await.unwrap();
    assert_eq!(code(timeout(PATIENCE, waiting).await.unwrap().unwrap()), Code::ShuttingDown);
    assert_eq!(code(other.get::<Json>("tides", 1).await), Code::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_client_releases_its_connection_and_subscriptions() {
    let (server, client) = serve_tides().await;
    let results = client.subscribe::<Json>(json!({"config": {"bucket": "tides"}})).await.unwrap();
    drop(client);
    assert_eq!(server.stats().subscriptions, 1, "a subscription holds its client");
    drop(results);
    wait_until_async("the connection is removed", PATIENCE, async || server.connection_count() == 0).await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_can_log_in_with_a_token() {
    let test = TestServer::start(tokens([user("ann", &["admin"])])).await;
    let client = test.server.client(None);
    let session: Json = client.request("auth.login", json!({"token": "ann"})).await.unwrap();
    assert_eq!(session["userId"], "ann");
    define_tides(&client).await;
    assert_eq!(client.request::<Json>("auth.whoami", ()).await.unwrap()["authenticated"], true);
    client.request::<Json>("auth.logout", ()).await.unwrap();
    assert_eq!(code(client.get::<Json>("tides", 1).await), Code::Unauthorized);
}

#[tokio::test(flavor = "multi_thread")]
async fn unsubscribing_by_id_ends_the_subscription_for_its_reader() {
    let (server, client) = serve_tides().await;
    let mut results = client.subscribe::<Json>(json!({"config": {"bucket": "tides"}})).await.unwrap();
    let waiting = tokio::spawn(async move { results.next().await });
    tokio::task::yield_now().await;
    client.request::<Json>("store.unsubscribe", json!({"subscriptionId": "sub-1"})).await.unwrap();
    assert_eq!(code(timeout(PATIENCE, waiting).await.unwrap().unwrap()), Code::NotFound);
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_does_not_overtake_a_login() {
    let gate = Arc::new(Gate::default());
    let auth = allow_only(tokens([user("bob", &["member"])]), [own_rows("member")]);
    let mine = GatedQuery { bucket: "notes", gate: Arc::clone(&gate), owner: None };
    let test = TestServer::start_with(options().auth(auth).query("mine", mine)).await;
    test.bucket("notes", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "bob"})]).await;
    let client = test.server.client(Session::new("ann", ["member"]));
    let shut = gate.shut();
    let (subscribed, logged_in, ()) = tokio::join!(
        client.subscribe::<Vec<Json>>(json!({"query": "mine"})),
        client.request::<Json>("auth.login", json!({"token": "bob"})),
        async {
            wait_until_async("the query is computed", PATIENCE, async || gate.waiting() > 0).await;
            drop(shut);
        }
    );
    assert_eq!(logged_in.unwrap()["userId"], "bob");
    let mut notes = subscribed.unwrap();
    test.write(|draft| draft.insert("notes", crate::test_server::object(json!({"id": "c", "owner": "bob"})))).await;
    test.write(|draft| draft.insert("notes", crate::test_server::object(json!({"id": "d", "owner": "ann"})))).await;
    let seen = timeout(PATIENCE, notes.next()).await.unwrap().unwrap().data.unwrap();
    assert!(seen.iter().all(|note| note["owner"] == "bob"), "{seen:?}");
}

/// Unparks a thread.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, without a runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_works_without_a_runtime() {
    let all = GatedQuery { bucket: "tides", gate: Arc::default(), owner: None };
    let server = serve(options().query("all", all)).await;
    let client = server.client(None);
    let thread = std::thread::spawn(move || {
        block_on(async {
            define_tides(&client).await;
            let mut tides = client.subscribe::<Vec<Json>>(json!({"query": "all"})).await.unwrap();
            client.insert::<Json>("tides", tide("Brest", 4.2)).await.unwrap();
            tides.next().await.unwrap().data.unwrap().len()
        })
    });
    let joined = tokio::task::spawn_blocking(move || thread.join()).await.unwrap();
    assert_eq!(joined.unwrap(), 1);
    drop(server);
}
