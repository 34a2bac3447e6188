//! Rate limit of failed logins, per address.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session, TokenValidator, Validation};
use tidewire::{Code, RateLimit};

use crate::client::Client;
use crate::metrics_page::MetricsPage;
use crate::raw_client::RawClient;
use crate::test_server::{TestServer, ids, object};

const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Accepts the token `ann`, and counts its validations.
#[derive(Debug, Default)]
struct CountingValidator {
    validations: AtomicUsize,
}

impl TokenValidator for CountingValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        self.validations.fetch_add(1, SeqCst);
        Box::pin(async move { Ok((token == "ann").then(|| Session::new("ann", ["admin"]))) })
    }
}

/// Auth with a counting validator, and the validator.
fn counting() -> (Auth, Arc<CountingValidator>) {
    let validator = Arc::new(CountingValidator::default());
    (Auth::new(Arc::clone(&validator)), validator)
}

/// Starts a server that rejects logins after `max` failed ones in a minute.
async fn open(max: usize) -> (TestServer, Arc<CountingValidator>) {
    let (auth, validator) = counting();
    (TestServer::start(auth.login_rate_limit(RateLimit::new(max, Duration::from_mins(1)))).await, validator)
}

/// Logs in. Returns the error code of the reply, or `ok`.
async fn log_in(client: &mut Client, token: &str) -> String {
    let id = client.send("auth.login", json!({"token": token})).await;
    client.reply(id).await["code"].as_str().unwrap_or("ok").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_failed_logins_throttle_even_the_right_token() {
    let (test, validator) = open(3).await;
    // Successful logins are not limited, and do not reset the count of failures.
    for _ in 0..5 {
        test.client("ann").await;
    }
    let mut client = test.anonymous().await;
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    test.advance(10_000);
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    assert_eq!(log_in(&mut client, "ann").await, "ok");
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    let validations = validator.validations.load(SeqCst);
    // The throttle applies to every connection of the address.
    for client in [&mut client, &mut test.anonymous().await] {
        let (code, error) = client.call_err("auth.login", json!({"token": "ann"})).await;
        assert_eq!((&*code, &error["details"]), ("RATE_LIMITED", &json!({"retryAfterMs": 50_000})));
        let message = "Too many failed logins from this address: try again in 50000 ms";
        assert_eq!(error["message"], message);
    }
    assert_eq!(validator.validations.load(SeqCst), validations, "a throttled login must not reach the validator");
    let page = MetricsPage::read(&test.server).await;
    assert_eq!((page.get("logins_failed_total"), page.get("logins_throttled_total")), (3, 2));
    // Another address has its own count.
    let mut elsewhere = RawClient::websocket_from(&test.server, OTHER_ADDRESS).await;
    let login = |token: &str| json!({"id": 1, "type": "auth.login", "token": token});
    assert_eq!(elsewhere.call(&login("eve")).await["code"], "UNAUTHORIZED");
    assert_eq!(elsewhere.call(&login("ann")).await["type"], "result");
    // The first failure leaves the window.
    test.advance(49_999);
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
    test.advance(1);
    assert_eq!(log_in(&mut client, "ann").await, "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_thirty_failed_logins_reach_the_validator() {
    let (auth, validator) = counting();
    let test = TestServer::start(auth).await;
    let mut ann = test.client("ann").await;
    test.bucket("notes", []).await;
    ann.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let before = validator.validations.load(SeqCst);
    let mut codes = Vec::new();
    for _ in 0..5 {
        let mut eve = test.anonymous().await;
        for n in 0..50 {
            codes.push(log_in(&mut eve, &format!("guess {n}")).await);
        }
    }
    let (tried, throttled) = codes.split_at(30);
    assert!(tried.iter().all(|code| code == "UNAUTHORIZED"), "{tried:?}");
    assert!(throttled.iter().all(|code| code == "RATE_LIMITED"), "{throttled:?}");
    assert_eq!(validator.validations.load(SeqCst) - before, 30);
    // The session of a user at the same address continues, with its requests and pushes.
    ann.call("store.count", json!({"bucket": "notes"})).await;
    test.write(|draft| draft.insert("notes", object(json!({"id": "a"})))).await;
    assert_eq!(ids(&ann.push().await["data"]), ["a"]);
    assert_eq!(ann.call("auth.whoami", json!({})).await["userId"], "ann");
}

#[tokio::test(flavor = "multi_thread")]
async fn optional_logins_are_throttled_too() {
    let limit = RateLimit::new(1, Duration::from_mins(1));
    let test = TestServer::start(counting().0.required(false).login_rate_limit(limit)).await;
    let mut client = test.anonymous().await;
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
    client.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_process_clients_are_not_throttled() {
    let (test, _) = open(1).await;
    let local = test.server.client(None);
    let log_in = async |token: &str| local.request::<Json>("auth.login", json!({"token": token})).await;
    for _ in 0..5 {
        assert_eq!(log_in("eve").await.unwrap_err().code, Code::Unauthorized);
    }
    assert_eq!(log_in("ann").await.unwrap()["userId"], "ann");
    // They do not consume the budget of an address either.
    test.client("ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn login_of_a_revoked_user_counts_as_failed() {
    let (test, _) = open(2).await;
    test.server.revoke_user("ann");
    let mut client = test.anonymous().await;
    assert_eq!(log_in(&mut client, "ann").await, "SESSION_REVOKED");
    assert_eq!(log_in(&mut client, "ann").await, "SESSION_REVOKED");
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
}
