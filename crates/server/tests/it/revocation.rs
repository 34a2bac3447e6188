//! Sessions that are revoked, and subscriptions whose owner is another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, Rule, Session, TokenValidator, Validation};
use tidewire::{Backpressure, ProgrammaticQuery, RequestError, View};
use tidewire_store::Answer;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::sync::Notify;

use crate::client::{Client, options};
use crate::gate::Gate;
use crate::house::{House, ids, object, only, own_rows, tokens, user};
use crate::page::{metric, wait_for};
use crate::raw::Raw;

fn people() -> Auth {
    tokens([user("ann", &["writer"]), user("bob", &["writer"]), user("rea", &["reader", "diver"])])
}

async fn is_let_go(client: &mut Client) {
    let notice = json!({"type": "system", "event": "session_revoked", "reason": "Session revoked by administrator"});
    assert_eq!(client.push().await, notice);
    assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_is_revoked_is_out_for_a_while() {
    let house = House::open_with(options().auth(people()).revocation_ttl(Duration::from_mins(1))).await;
    house.bucket("notes", []).await;
    let (mut one, mut two) = (house.client("ann").await, house.client("ann").await);
    let (mut bob, mut stranger) = (house.client("bob").await, house.stranger().await);
    one.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    assert_eq!(house.server.revoke_user("ann"), 2);
    is_let_go(&mut one).await;
    is_let_go(&mut two).await;
    bob.ask("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    stranger.ask("auth.login", json!({"token": "bob"})).await;
    // A login of somebody who is revoked also takes away who was there.
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(stranger.ask("auth.whoami", json!({})).await, json!({"authenticated": false}));
    house.advance(59_999);
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    house.advance(1);
    stranger.ask("auth.login", json!({"token": "ann"})).await;
    bob.ask("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_there_is_out_as_well() {
    let house = House::open(people()).await;
    assert_eq!(house.server.revoke_user("ann"), 0);
    let mut client = house.stranger().await;
    assert_eq!(client.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(house.server.revoke_user("nobody"), 0);
    client.ask("auth.login", json!({"token": "bob"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_revoked_by_what_they_are() {
    let house = House::open(people()).await;
    let (mut ann, mut bob, mut rea) = (house.client("ann").await, house.client("bob").await, house.client("rea").await);
    let is_diver = |session: &tidewire::auth::Session| session.roles.iter().any(|role| role == "diver");
    assert_eq!(house.server.revoke_sessions(is_diver), 1);
    is_let_go(&mut rea).await;
    for client in [&mut ann, &mut bob] {
        client.ask("store.buckets", json!({})).await;
    }
    let mut client = house.stranger().await;
    assert_eq!(client.fail("auth.login", json!({"token": "rea"})).await.0, "SESSION_REVOKED");
    assert_eq!(house.server.revoke_sessions(|_| true), 2);
    is_let_go(&mut ann).await;
    is_let_go(&mut bob).await;
    // Strangers have no sessions.
    assert_eq!(client.ask("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.fail("auth.login", json!({"token": "bob"})).await.0, "SESSION_REVOKED");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_back_before_they_are_out() {
    // As soon as a client hears that it is revoked it may not log in.
    let house = House::open(people()).await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push((house.client("ann").await, house.stranger().await));
    }
    let tasks: Vec<_> = waiting
        .into_iter()
        .map(|(mut client, mut again)| {
            tokio::spawn(async move {
                assert_eq!(client.push().await["event"], "session_revoked");
                again.fail("auth.login", json!({"token": "ann"})).await.0
            })
        })
        .collect();
    assert_eq!(house.server.revoke_sessions(|session| session.user_id == "ann"), 20);
    for task in tasks {
        assert_eq!(task.await.unwrap(), "SESSION_REVOKED");
    }
}

/// A house with rows of ann and bob, where members see their own rows, and seers all of them.
async fn harbour(is_required: bool) -> House {
    let mut people: Vec<_> = ["ann", "bob"].map(|name| user(name, &["member"])).into();
    people.extend([user("sea", &["seer"]), user("non", &["none"])]);
    let auth = only(tokens(people), [own_rows("member"), Rule::new("seer", ["store.*"])]).required(is_required);
    // Everything that a late reader has not read is queued, and nothing is dropped.
    let backpressure = Backpressure::default().max_buffered_bytes(64 << 20);
    let house = House::open_with(options().auth(auth).query("ids", Ids).backpressure(backpressure)).await;
    house.bucket("boats", [json!({"id": "a1", "owner": "ann"}), json!({"id": "b1", "owner": "bob"})]).await;
    house.query("boats", json!({"bucket": "boats"})).await;
    house
}

/// The ids of all boats.
#[derive(Debug)]
struct Ids;

impl ProgrammaticQuery for Ids {
    fn buckets(&self) -> Vec<String> {
        vec!["boats".to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        match view.query(&json!({"bucket": "boats", "fields": ["id"]}))? {
            Answer::Records(records) => Ok(records.into()),
            Answer::Value(other) => panic!("records were expected, not {other:?}"),
        }
    }
}

/// Every way to follow the boats: plain, told and delta, named and not, and the host's.
fn ways() -> [Json; 6] {
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
async fn who_logs_out_follows_nothing_any_more() {
    let house = harbour(true).await;
    let mut client = house.client("sea").await;
    let mut told = Vec::new();
    for way in ways() {
        let followed = client.ask("store.subscribe", way.clone()).await;
        if way.get("pos").or(way.get("mode")).is_some() {
            told.push(followed["subscriptionId"].clone());
        }
    }
    client.ask("auth.logout", json!({})).await;
    let mut ended = Vec::new();
    for _ in 0..told.len() {
        let push = client.push().await;
        assert_eq!(push["error"]["code"], "UNAUTHORIZED", "{push}");
        ended.push(push["subscriptionId"].clone());
    }
    ended.sort_by_key(Json::to_string);
    assert_eq!(ended, told);
    house.write(|draft| draft.insert("boats", object(json!({"id": "x"})))).await;
    client.ask("auth.login", json!({"token": "sea"})).await;
    house.write(|draft| draft.insert("boats", object(json!({"id": "y"})))).await;
    assert!(client.is_silent().await);
    assert_eq!(house.server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_follow_it_does_not() {
    let house = harbour(false).await;
    for way in ways() {
        let mut client = house.stranger().await;
        let followed = client.ask("store.subscribe", way.clone()).await;
        assert_eq!(ids(&followed["data"]), ["a1", "b1"]);
        client.ask("auth.login", json!({"token": "non"})).await;
        if way.get("pos").or(way.get("mode")).is_some() {
            let push = client.push().await;
            assert_eq!(push["subscriptionId"], followed["subscriptionId"]);
            assert_eq!(push["error"]["code"], "FORBIDDEN", "{push}");
        }
        client.ask("auth.logout", json!({})).await;
        house.write(|draft| draft.insert("boats", object(json!({"id": "b1", "owner": "bob"})))).await;
        assert!(client.is_silent().await, "{way}");
    }
}

/// The ids in a push, of a whole result or one that replaces it.
fn seen(push: &Json) -> Vec<&str> {
    ids(push["data"].get("reset").unwrap_or(&push["data"]))
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_somebody_else_sees_their_own_rows() {
    for is_required in [true, false] {
        let house = harbour(is_required).await;
        for way in ways() {
            let mut client = house.stranger().await;
            if is_required {
                client.ask("auth.login", json!({"token": "sea"})).await;
            }
            let followed = client.ask("store.subscribe", way.clone()).await;
            let id = &followed["subscriptionId"];
            assert_eq!(ids(&followed["data"]), ["a1", "b1"]);
            for (token, rows) in [("ann", ["a1"]), ("bob", ["b1"])] {
                client.ask("auth.login", json!({"token": token})).await;
                let push = client.push().await;
                assert_eq!((&push["subscriptionId"], seen(&push)), (id, rows.to_vec()), "{way}");
            }
            // What happens to others is nothing to bob, and what happens to him is.
            house.write(|draft| draft.insert("boats", object(json!({"id": "a2", "owner": "ann"})))).await;
            house.write(|draft| draft.insert("boats", object(json!({"id": "b2", "owner": "bob"})))).await;
            let push = client.push().await;
            let got = if way.get("mode").is_some() { ids(&push["data"]["added"]) } else { seen(&push) };
            assert_eq!(got.last(), Some(&"b2"), "{push}");
            assert!(!got.contains(&"a2"), "{push}");
            house.write(|draft| draft.delete("boats", &json!("a2"), None)).await;
            house.write(|draft| draft.delete("boats", &json!("b2"), None)).await;
            let push = client.push().await;
            assert!(!push.to_string().contains("\"a2\""), "{push}");
            client.ask("auth.login", json!({"token": "sea"})).await;
            let push = client.push().await;
            assert_eq!((&push["subscriptionId"], seen(&push)), (id, vec!["a1", "b1"]), "{way}");
            assert!(client.is_silent().await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_for_other_eyes_comes_after_the_reply() {
    let house = harbour(false).await;
    for round in 0..30 {
        let mut client = house.stranger().await;
        for way in ways() {
            client.ask("store.subscribe", way).await;
        }
        // Changes are on their way while somebody logs in.
        let (mut first, mut last) = (house.stranger().await, house.stranger().await);
        let insert = |n: usize| json!({"bucket": "boats", "data": {"id": format!("bobs{n}"), "owner": "bob"}});
        let mut asked = Vec::new();
        for n in 0..10 {
            asked.push(first.send("store.insert", insert(n)).await);
        }
        let login = client.send("auth.login", json!({"token": "ann"})).await;
        for n in 10..20 {
            last.send("store.insert", insert(n)).await;
        }
        for id in asked {
            first.reply(id).await;
        }
        // What comes before the reply may be for a stranger's eyes.
        client.reply(login).await;
        client.forget_pushes();
        let end = json!({"id": "end", "owner": "ann"});
        house.write(|draft| draft.insert("boats", object(end))).await;
        let mut left = ways().len();
        while left > 0 {
            let push = client.push().await.to_string();
            assert!(!push.contains("bobs"), "{round}: {push}");
            left -= usize::from(push.contains("\"end\""));
        }
        client.ask("auth.logout", json!({})).await;
        first.ask("store.clear", json!({"bucket": "boats"})).await;
        first.ask("store.insert", json!({"bucket": "boats", "data": {"id": "a1", "owner": "ann"}})).await;
    }
}

/// A client that subscribes to the deltas of all boats as a seer, and reads nothing while 200 boats of bob are inserted.
async fn late_reader(house: &House) -> (Raw, String) {
    late_reader_of(house, json!({"config": {"bucket": "boats"}})).await
}

async fn late_reader_of(house: &House, mut query: Json) -> (Raw, String) {
    let mut raw = Raw::small(&house.server).await;
    raw.send(r#"{"id":1,"type":"auth.login","token":"sea"}"#).await;
    assert_eq!(raw.json().await["type"], "result");
    (query["id"], query["type"], query["mode"]) = (json!(2), json!("store.subscribe"), json!("delta"));
    raw.send(&query.to_string()).await;
    let subscription = raw.json().await["data"]["subscriptionId"].as_str().unwrap().to_owned();
    let before = metric(&house.server, "live_events_total").await;
    for number in 0..200 {
        let boat = json!({"id": format!("bobs{number}"), "owner": "bob", "text": "x".repeat(60_000)});
        house.write(move |draft| draft.insert("boats", object(boat))).await;
    }
    wait_for(&house.server, "all deltas are delivered", |page| page.get("live_events_total") >= before + 200).await;
    (raw, subscription)
}

/// Sends a request, and reads until its reply. Then sends another one, and returns what is pushed until its reply comes.
async fn pushed_after(raw: &mut Raw, request: &Json) -> Vec<Json> {
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
    assert!((1..200).contains(&deltas), "{deltas} deltas came before the reply, and some were queued");
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
async fn no_queued_delta_comes_after_the_reply_to_an_unsubscribe() {
    let house = harbour(true).await;
    let (mut raw, subscription) = late_reader(&house).await;
    let request = json!({"id": 3, "type": "store.unsubscribe", "subscriptionId": subscription});
    assert_eq!(pushed_after(&mut raw, &request).await, Vec::<Json>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_comes_after_the_reply_to_a_logout() {
    let house = harbour(true).await;
    let (mut raw, subscription) = late_reader(&house).await;
    let pushed = pushed_after(&mut raw, &json!({"id": 3, "type": "auth.logout"})).await;
    assert_eq!(pushed.len(), 1, "{pushed:?}");
    assert_eq!(
        (&pushed[0]["subscriptionId"], &pushed[0]["error"]["code"]),
        (&json!(subscription), &json!("UNAUTHORIZED"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_comes_after_the_reply_to_a_login_of_another_user() {
    let house = harbour(true).await;
    let (mut raw, subscription) = late_reader(&house).await;
    let mut pushed = pushed_after(&mut raw, &json!({"id": 3, "type": "auth.login", "token": "ann"})).await;
    if pushed.is_empty() {
        pushed.push(raw.json().await);
    }
    assert_eq!((&pushed[0]["subscriptionId"], seen(&pushed[0])), (&json!(subscription), vec!["a1"]));
    house.write(|draft| draft.insert("boats", object(json!({"id": "a2", "owner": "ann"})))).await;
    assert_eq!(ids(&raw.json().await["data"]["added"]), ["a2"]);
}

/// Knows ann, and never comes to an end about anyone else.
struct Slow;

impl TokenValidator for Slow {
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
async fn a_login_that_times_out_changes_nothing() {
    let auth = only(Auth::new(Slow), [own_rows("member")]);
    let house = House::open_with(options().auth(auth).request_timeout(Duration::from_millis(50))).await;
    house.bucket("boats", []).await;
    let mut client = house.client("ann").await;
    client.ask("store.subscribe", json!({"config": {"bucket": "boats"}})).await;
    assert_eq!(client.fail("auth.login", json!({"token": "bob"})).await.0, "TIMEOUT");
    assert_eq!(client.ask("auth.whoami", json!({})).await["userId"], "ann");
    house.write(|draft| draft.insert("boats", object(json!({"id": "b", "owner": "bob"})))).await;
    house.write(|draft| draft.insert("boats", object(json!({"id": "a", "owner": "ann"})))).await;
    assert_eq!(seen(&client.push().await), ["a"]);
}

/// The query is gone when the login changes, and live queries may not have ended the subscription yet.
#[tokio::test(flavor = "multi_thread")]
async fn no_queued_delta_of_an_undefined_query_comes_after_a_login() {
    let house = harbour(true).await;
    let (mut raw, _) = late_reader_of(&house, json!({"query": "boats"})).await;
    raw.send(r#"{"id":3,"type":"store.undefineQuery","name":"boats"}"#).await;
    let pushed = pushed_after(&mut raw, &json!({"id": 4, "type": "auth.login", "token": "ann"})).await;
    assert!(!pushed.iter().any(|push| push.to_string().contains("bobs")), "{pushed:?}");
}

/// However often a client logs in, one computation of its programmatic query runs and one waits.
#[tokio::test(flavor = "multi_thread")]
async fn logins_do_not_queue_computations() {
    let gate = Arc::new(Gate::default());
    let query = Arc::new(Counted { calls: AtomicUsize::new(0), gate: Arc::clone(&gate) });
    let auth = only(tokens([user("ann", &["member"])]), [Rule::new("member", ["store.*"])]);
    let house = House::open_with(options().auth(auth).query("counted", Arc::clone(&query))).await;
    house.bucket("boats", []).await;
    let mut client = house.client("ann").await;
    client.ask("store.subscribe", json!({"query": "counted"})).await;
    let shut = gate.shut();
    for _ in 0..100 {
        client.ask("auth.login", json!({"token": "ann"})).await;
    }
    wait_until_async("a computation waits", PATIENCE, async || gate.waiting() == 1).await;
    let before = query.calls.load(SeqCst);
    drop(shut);
    house.write(|draft| draft.insert("boats", object(json!({"id": "end"})))).await;
    // The last result comes after all that was queued.
    while client.push().await["data"] != 1 {}
    assert!(query.calls.load(SeqCst) <= before + 3, "{} of {before}", query.calls.load(SeqCst));
}

/// The number of boats.
#[derive(Debug)]
struct Counted {
    calls: AtomicUsize,
    gate: Arc<Gate>,
}

impl ProgrammaticQuery for Counted {
    fn buckets(&self) -> Vec<String> {
        vec!["boats".to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        self.calls.fetch_add(1, SeqCst);
        self.gate.pass();
        match view.query(&json!({"bucket": "boats"}))? {
            Answer::Records(records) => Ok(json!(records.len())),
            Answer::Value(other) => panic!("records were expected, not {other:?}"),
        }
    }
}

/// A session that begins on a connection which was closed meanwhile can be revoked.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_on_a_closed_connection_does_not_begin() {
    let (entered, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let house =
        House::open(Auth::new(Arc::new(Waits { entered: Arc::clone(&entered), release: Arc::clone(&release) }))).await;
    let client = house.server.client(Some(Session::new("ann", ["writer"])));
    let login = tokio::spawn({
        let client = client.clone();
        async move { client.request::<Json>("auth.login", json!({"token": "bob"})).await }
    });
    entered.notified().await;
    assert_eq!(house.server.revoke_user("ann"), 1);
    release.notify_one();
    let _ = login.await.unwrap();
    // It would try again and again to end a session that a closed connection has.
    assert_eq!(house.server.revoke_user("bob"), 0);
    drop(client);
}

/// Lets a test act while a login is validated.
struct Waits {
    entered: Arc<Notify>,
    release: Arc<Notify>,
}

impl TokenValidator for Waits {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.entered.notify_one();
            self.release.notified().await;
            Ok(Some(Session::new(token, ["writer"])))
        })
    }
}
