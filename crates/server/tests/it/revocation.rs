//! Revoked sessions, and subscriptions after a change of the session.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, Rule, Session, TokenValidator, Validation};
use tidewire::{Backpressure, ProgrammaticQuery, RequestError, View};
use tidewire_store::QueryOutput;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::sync::Notify;

use crate::client::{Client, RoleTokens, options, serve};
use crate::gated_query::Gate;
use crate::metrics_page::{metric, wait_for_metrics};
use crate::raw_client::RawClient;
use crate::test_server::{TestServer, allow_only, ids, object, own_rows, tokens, user};

fn auth() -> Auth {
    tokens([user("ann", &["writer"]), user("bob", &["writer"]), user("rea", &["reader", "diver"])])
}

async fn expect_revoked(client: &mut Client) {
    let notice = json!({"type": "system", "event": "session_revoked", "reason": "Session revoked by administrator"});
    assert_eq!(client.push().await, notice);
    assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_user_cannot_log_in_until_the_revocation_expires() {
    let test = TestServer::start_with(options().auth(auth()).revocation_ttl(Duration::from_mins(1))).await;
    test.bucket("notes", []).await;
    let (mut one, mut two) = (test.client("ann").await, test.client("ann").await);
    let (mut bob, mut anonymous) = (test.client("bob").await, test.anonymous().await);
    one.call("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    assert_eq!(test.server.revoke_user("ann"), 2);
    expect_revoked(&mut one).await;
    expect_revoked(&mut two).await;
    bob.call("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    anonymous.call("auth.login", json!({"token": "bob"})).await;
    // A rejected login of a revoked user also ends the current session.
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(anonymous.call("auth.whoami", json!({})).await, json!({"authenticated": false}));
    test.advance(59_999);
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    test.advance(1);
    anonymous.call("auth.login", json!({"token": "ann"})).await;
    bob.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_without_connections_can_be_revoked() {
    let test = TestServer::start(auth()).await;
    assert_eq!(test.server.revoke_user("ann"), 0);
    let mut client = test.anonymous().await;
    assert_eq!(client.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(test.server.revoke_user("unknown"), 0);
    client.call("auth.login", json!({"token": "bob"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_revoked_by_a_predicate() {
    let test = TestServer::start(auth()).await;
    let (mut ann, mut bob, mut rea) = (test.client("ann").await, test.client("bob").await, test.client("rea").await);
    let is_diver = |session: &tidewire::auth::Session| session.roles.iter().any(|role| role == "diver");
    assert_eq!(test.server.revoke_sessions(is_diver), 1);
    expect_revoked(&mut rea).await;
    for client in [&mut ann, &mut bob] {
        client.call("store.buckets", json!({})).await;
    }
    let mut client = test.anonymous().await;
    assert_eq!(client.call_err("auth.login", json!({"token": "rea"})).await.0, "SESSION_REVOKED");
    assert_eq!(test.server.revoke_sessions(|_| true), 2);
    expect_revoked(&mut ann).await;
    expect_revoked(&mut bob).await;
    // Anonymous clients have no session to revoke.
    assert_eq!(client.call("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.call_err("auth.login", json!({"token": "bob"})).await.0, "SESSION_REVOKED");
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_client_cannot_log_in_again_before_its_connection_ends() {
    // The login is rejected as soon as the client has received the notice.
    let test = TestServer::start(auth()).await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push((test.client("ann").await, test.anonymous().await));
    }
    let tasks: Vec<_> = waiting
        .into_iter()
        .map(|(mut client, mut again)| {
            tokio::spawn(async move {
                assert_eq!(client.push().await["event"], "session_revoked");
                again.call_err("auth.login", json!({"token": "ann"})).await.0
            })
        })
        .collect();
    assert_eq!(test.server.revoke_sessions(|session| session.user_id == "ann"), 20);
    for task in tasks {
        assert_eq!(task.await.unwrap(), "SESSION_REVOKED");
    }
}

/// Starts a server with boats of ann and bob. Members see their own rows, and seers see all.
async fn serve_boats(is_required: bool) -> TestServer {
    let mut people: Vec<_> = ["ann", "bob"].map(|name| user(name, &["member"])).into();
    people.extend([user("sea", &["seer"]), user("non", &["none"])]);
    let auth = allow_only(tokens(people), [own_rows("member"), Rule::new("seer", ["store.*"])]).required(is_required);
    // All unread pushes are queued, and none is dropped.
    let backpressure = Backpressure::default().max_buffered_bytes(64 << 20);
    let test = TestServer::start_with(options().auth(auth).query("ids", Ids).backpressure(backpressure)).await;
    test.bucket("boats", [json!({"id": "a1", "owner": "ann"}), json!({"id": "b1", "owner": "bob"})]).await;
    test.query("boats", json!({"bucket": "boats"})).await;
    test
}

/// The ids of all boats.
#[derive(Debug)]
struct Ids;

impl ProgrammaticQuery for Ids {
    fn buckets(&self) -> Vec<String> {
        vec!["boats".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        match view.query(&json!({"bucket": "boats", "fields": ["id"]}))? {
            QueryOutput::Records(records) => Ok(records.into()),
            QueryOutput::Value(other) => panic!("expected records, got {other:?}"),
        }
    }
}

/// Returns all kinds of subscriptions to the boats: by name, by config, programmatic, with positions and with deltas.
fn subscribe_params() -> [Json; 6] {
    [
        json!({"query": "boats"}),
        json!({"config": {"bucket": "boats"}}),
        json!({"query": "ids"}),
        json!({"query": "boats", "pos": true}),
        json!({"config": {"bucket": "boats"}, "pos": true}),
        json!({"config": {"bucket": "boats"}, "mode": "delta"}),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn logout_ends_all_subscriptions() {
    let test = serve_boats(true).await;
    let mut client = test.client("sea").await;
    let mut notified = Vec::new();
    for params in subscribe_params() {
        let subscribed = client.call("store.subscribe", params.clone()).await;
        if params.get("pos").or(params.get("mode")).is_some() {
            notified.push(subscribed["subscriptionId"].clone());
        }
    }
    client.call("auth.logout", json!({})).await;
    let mut ended = Vec::new();
    for _ in 0..notified.len() {
        let push = client.push().await;
        assert_eq!(push["error"]["code"], "UNAUTHORIZED", "{push}");
        ended.push(push["subscriptionId"].clone());
    }
    ended.sort_by_key(Json::to_string);
    assert_eq!(ended, notified);
    test.write(|draft| draft.insert("boats", object(json!({"id": "x"})))).await;
    client.call("auth.login", json!({"token": "sea"})).await;
    test.write(|draft| draft.insert("boats", object(json!({"id": "y"})))).await;
    assert!(client.has_no_pushes().await);
    assert_eq!(test.server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn login_without_permission_ends_subscriptions() {
    let test = serve_boats(false).await;
    for params in subscribe_params() {
        let mut client = test.anonymous().await;
        let subscribed = client.call("store.subscribe", params.clone()).await;
        assert_eq!(ids(&subscribed["data"]), ["a1", "b1"]);
        client.call("auth.login", json!({"token": "non"})).await;
        if params.get("pos").or(params.get("mode")).is_some() {
            let push = client.push().await;
            assert_eq!(push["subscriptionId"], subscribed["subscriptionId"]);
            assert_eq!(push["error"]["code"], "FORBIDDEN", "{push}");
        }
        client.call("auth.logout", json!({})).await;
        test.write(|draft| draft.insert("boats", object(json!({"id": "b1", "owner": "bob"})))).await;
        assert!(client.has_no_pushes().await, "{params}");
    }
}

/// Returns the ids in a push with a snapshot or a reset.
fn snapshot_ids(push: &Json) -> Vec<&str> {
    ids(push["data"].get("reset").unwrap_or(&push["data"]))
}

#[tokio::test(flavor = "multi_thread")]
async fn login_of_another_user_switches_the_visible_rows() {
    for is_required in [true, false] {
        let test = serve_boats(is_required).await;
        for params in subscribe_params() {
            let mut client = test.anonymous().await;
            if is_required {
                client.call("auth.login", json!({"token": "sea"})).await;
            }
            let subscribed = client.call("store.subscribe", params.clone()).await;
            let id = &subscribed["subscriptionId"];
            assert_eq!(ids(&subscribed["data"]), ["a1", "b1"]);
            for (token, rows) in [("ann", ["a1"]), ("bob", ["b1"])] {
                client.call("auth.login", json!({"token": token})).await;
                let push = client.push().await;
                assert_eq!((&push["subscriptionId"], snapshot_ids(&push)), (id, rows.to_vec()), "{params}");
            }
            // Bob sees changes to his own rows only.
            test.write(|draft| draft.insert("boats", object(json!({"id": "a2", "owner": "ann"})))).await;
            test.write(|draft| draft.insert("boats", object(json!({"id": "b2", "owner": "bob"})))).await;
            let push = client.push().await;
            let got = if params.get("mode").is_some() { ids(&push["data"]["added"]) } else { snapshot_ids(&push) };
            assert_eq!(got.last(), Some(&"b2"), "{push}");
            assert!(!got.contains(&"a2"), "{push}");
            test.write(|draft| draft.delete("boats", &json!("a2"), None)).await;
            test.write(|draft| draft.delete("boats", &json!("b2"), None)).await;
            let push = client.push().await;
            assert!(!push.to_string().contains("\"a2\""), "{push}");
            client.call("auth.login", json!({"token": "sea"})).await;
            let push = client.push().await;
            assert_eq!((&push["subscriptionId"], snapshot_ids(&push)), (id, vec!["a1", "b1"]), "{params}");
            assert!(client.has_no_pushes().await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_push_of_the_previous_session_follows_the_reply_to_a_login() {
    let test = serve_boats(false).await;
    for round in 0..30 {
        let mut client = test.anonymous().await;
        for params in subscribe_params() {
            client.call("store.subscribe", params).await;
        }
        // Changes are in flight during the login.
        let (mut first, mut last) = (test.anonymous().await, test.anonymous().await);
        let insert = |n: usize| json!({"bucket": "boats", "data": {"id": format!("bobs{n}"), "owner": "bob"}});
        let mut sent = Vec::new();
        for n in 0..10 {
            sent.push(first.send("store.insert", insert(n)).await);
        }
        let login = client.send("auth.login", json!({"token": "ann"})).await;
        for n in 10..20 {
            last.send("store.insert", insert(n)).await;
        }
        for id in sent {
            first.reply(id).await;
        }
        // A push before the reply may belong to the anonymous session.
        client.reply(login).await;
        client.discard_pushes();
        let end = json!({"id": "end", "owner": "ann"});
        test.write(|draft| draft.insert("boats", object(end))).await;
        let mut left = subscribe_params().len();
        while left > 0 {
            let push = client.push().await.to_string();
            assert!(!push.contains("bobs"), "{round}: {push}");
            left -= usize::from(push.contains("\"end\""));
        }
        client.call("auth.logout", json!({})).await;
        first.call("store.clear", json!({"bucket": "boats"})).await;
        first.call("store.insert", json!({"bucket": "boats", "data": {"id": "a1", "owner": "ann"}})).await;
    }
}

/// Connects a client that subscribes to the deltas of all boats as a seer, and does not read while 200 boats of bob are inserted.
async fn late_reader(test: &TestServer) -> (RawClient, String) {
    late_reader_of(test, json!({"config": {"bucket": "boats"}})).await
}

async fn late_reader_of(test: &TestServer, mut query: Json) -> (RawClient, String) {
    let mut raw = RawClient::with_small_buffer(&test.server).await;
    raw.send(r#"{"id":1,"type":"auth.login","token":"sea"}"#).await;
    assert_eq!(raw.json().await["type"], "result");
    (query["id"], query["type"], query["mode"]) = (json!(2), json!("store.subscribe"), json!("delta"));
    raw.send(&query.to_string()).await;
    let subscription = raw.json().await["data"]["subscriptionId"].as_str().unwrap().to_owned();
    let before = metric(&test.server, "live_events_total").await;
    for number in 0..200 {
        let boat = json!({"id": format!("bobs{number}"), "owner": "bob", "text": "x".repeat(60_000)});
        test.write(move |draft| draft.insert("boats", object(boat))).await;
    }
    wait_for_metrics(&test.server, "all deltas are delivered", |page| page.get("live_events_total") >= before + 200)
        .await;
    (raw, subscription)
}

/// Sends a request and reads until its reply. Then sends another one, and returns the pushes before its reply.
async fn pushed_after(raw: &mut RawClient, request: &Json) -> Vec<Json> {
    raw.send(&request.to_string()).await;
    let mut deltas = 0;
    loop {
        let message = raw.json().await;
        if message["id"] == request["id"] {
            assert_eq!(message["type"], "result", "{message}");
            break;
        }
        deltas += 1;
    }
    assert!((1..200).contains(&deltas), "expected some deltas before the reply and some queued, got {deltas}");
    raw.send(r#"{"id":99,"type":"auth.whoami"}"#).await;
    let mut pushed = Vec::new();
    loop {
        let message = raw.json().await;
        if message["id"] == 99 {
            return pushed;
        }
        pushed.push(message);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_follows_the_reply_to_unsubscribe() {
    let test = serve_boats(true).await;
    let (mut raw, subscription) = late_reader(&test).await;
    let request = json!({"id": 3, "type": "store.unsubscribe", "subscriptionId": subscription});
    assert_eq!(pushed_after(&mut raw, &request).await, Vec::<Json>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_follows_the_reply_to_logout() {
    let test = serve_boats(true).await;
    let (mut raw, subscription) = late_reader(&test).await;
    let pushed = pushed_after(&mut raw, &json!({"id": 3, "type": "auth.logout"})).await;
    assert_eq!(pushed.len(), 1, "{pushed:?}");
    assert_eq!(
        (&pushed[0]["subscriptionId"], &pushed[0]["error"]["code"]),
        (&json!(subscription), &json!("UNAUTHORIZED"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_follows_the_reply_to_a_login_of_another_user() {
    let test = serve_boats(true).await;
    let (mut raw, subscription) = late_reader(&test).await;
    let mut pushed = pushed_after(&mut raw, &json!({"id": 3, "type": "auth.login", "token": "ann"})).await;
    if pushed.is_empty() {
        pushed.push(raw.json().await);
    }
    assert_eq!((&pushed[0]["subscriptionId"], snapshot_ids(&pushed[0])), (&json!(subscription), vec!["a1"]));
    test.write(|draft| draft.insert("boats", object(json!({"id": "a2", "owner": "ann"})))).await;
    assert_eq!(ids(&raw.json().await["data"]["added"]), ["a2"]);
}

/// Accepts the token `ann`. The validation of other tokens never completes.
struct StallingValidator;

impl TokenValidator for StallingValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            match token {
                "ann" => Ok(Some(Session::new("ann", ["member"]))),
                _ => std::future::pending().await,
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn login_that_times_out_changes_nothing() {
    let auth = allow_only(Auth::new(StallingValidator), [own_rows("member")]);
    let test = TestServer::start_with(options().auth(auth).request_timeout(Duration::from_millis(50))).await;
    test.bucket("boats", []).await;
    let mut client = test.client("ann").await;
    client.call("store.subscribe", json!({"config": {"bucket": "boats"}})).await;
    assert_eq!(client.call_err("auth.login", json!({"token": "bob"})).await.0, "TIMEOUT");
    assert_eq!(client.call("auth.whoami", json!({})).await["userId"], "ann");
    test.write(|draft| draft.insert("boats", object(json!({"id": "b", "owner": "bob"})))).await;
    test.write(|draft| draft.insert("boats", object(json!({"id": "a", "owner": "ann"})))).await;
    assert_eq!(snapshot_ids(&client.push().await), ["a"]);
}

/// The query is undefined before the login, but the live query may not have ended the subscription yet.
#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_of_an_undefined_query_follows_a_login() {
    let test = serve_boats(true).await;
    let (mut raw, _) = late_reader_of(&test, json!({"query": "boats"})).await;
    raw.send(r#"{"id":3,"type":"store.undefineQuery","name":"boats"}"#).await;
    let pushed = pushed_after(&mut raw, &json!({"id": 4, "type": "auth.login", "token": "ann"})).await;
    assert!(!pushed.iter().any(|push| push.to_string().contains("bobs")), "{pushed:?}");
}

/// Repeated logins queue at most one computation of a programmatic query, in addition to the running one.
#[tokio::test(flavor = "multi_thread")]
async fn logins_do_not_queue_computations() {
    let gate = Arc::new(Gate::default());
    let query = Arc::new(BoatCount { calls: AtomicUsize::new(0), gate: Arc::clone(&gate) });
    let auth = allow_only(tokens([user("ann", &["member"])]), [Rule::new("member", ["store.*"])]);
    let test = TestServer::start_with(options().auth(auth).query("counted", Arc::clone(&query))).await;
    test.bucket("boats", []).await;
    let mut client = test.client("ann").await;
    client.call("store.subscribe", json!({"query": "counted"})).await;
    let shut = gate.shut();
    for _ in 0..100 {
        client.call("auth.login", json!({"token": "ann"})).await;
    }
    wait_until_async("a computation is blocked", PATIENCE, async || gate.waiting() == 1).await;
    let before = query.calls.load(SeqCst);
    drop(shut);
    test.write(|draft| draft.insert("boats", object(json!({"id": "end"})))).await;
    // The last result arrives after everything that was queued.
    while client.push().await["data"] != 1 {}
    assert!(
        query.calls.load(SeqCst) <= before + 3,
        "{} calls, {before} before the gate opened",
        query.calls.load(SeqCst)
    );
}

/// The number of boats. It counts its calls.
#[derive(Debug)]
struct BoatCount {
    calls: AtomicUsize,
    gate: Arc<Gate>,
}

impl ProgrammaticQuery for BoatCount {
    fn buckets(&self) -> Vec<String> {
        vec!["boats".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        self.calls.fetch_add(1, SeqCst);
        self.gate.pass();
        match view.query(&json!({"bucket": "boats"}))? {
            QueryOutput::Records(records) => Ok(json!(records.len())),
            QueryOutput::Value(other) => panic!("expected records, got {other:?}"),
        }
    }
}

/// A session must not start on a connection that a revocation has closed.
#[tokio::test(flavor = "multi_thread")]
async fn login_on_a_closed_connection_does_not_start_a_session() {
    let (entered, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let test = TestServer::start(Auth::new(Arc::new(NotifyingValidator {
        entered: Arc::clone(&entered),
        release: Arc::clone(&release),
    })))
    .await;
    let client = test.server.client(Some(Session::new("ann", ["writer"])));
    let login = tokio::spawn({
        let client = client.clone();
        async move { client.request::<Json>("auth.login", json!({"token": "bob"})).await }
    });
    entered.notified().await;
    assert_eq!(test.server.revoke_user("ann"), 1);
    release.notify_one();
    let _ = login.await.unwrap();
    // `revoke_user` would retry forever if a closed connection had the session.
    assert_eq!(test.server.revoke_user("bob"), 0);
    drop(client);
}

/// Notifies the test when the validation of a login starts, and waits until the test releases it.
struct NotifyingValidator {
    entered: Arc<Notify>,
    release: Arc<Notify>,
}

impl TokenValidator for NotifyingValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.entered.notify_one();
            self.release.notified().await;
            Ok(Some(Session::new(token, ["writer"])))
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_predicate_may_inspect_the_server() {
    let options = options().auth(Auth::new(RoleTokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    client.call("auth.login", json!({"token": "ann:reader"})).await;
    let (revoked, result) = std::sync::mpsc::channel();
    // Runs on its own thread, so that a deadlock fails the test.
    std::thread::spawn(move || {
        let count =
            server.revoke_sessions(|session| server.connections()[0].user_id.as_ref() == Some(&session.user_id));
        revoked.send((count, server)).unwrap();
    });
    let (count, _server) = result.recv_timeout(PATIENCE).expect("deadlock in revoke_sessions");
    assert_eq!(count, 1);
    assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
}
