//! Failed logins are throttled by address.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session, TokenValidator, Validation};
use tidewire::{Code, RateLimit};

use crate::client::Client;
use crate::house::{House, ids, object};
use crate::page::Page;
use crate::raw::Raw;

const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Knows `ann`, and counts what it is asked.
#[derive(Debug, Default)]
struct Counting {
    asked: AtomicUsize,
}

impl TokenValidator for Counting {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        self.asked.fetch_add(1, SeqCst);
        Box::pin(async move { Ok((token == "ann").then(|| Session::new("ann", ["admin"]))) })
    }
}

/// Auth that admits the token `ann`, and the number of its validations.
fn counting() -> (Auth, Arc<Counting>) {
    let validator = Arc::new(Counting::default());
    (Auth::new(Arc::clone(&validator)), validator)
}

/// A server that refuses logins after `max` failed ones in a minute.
async fn open(max: usize) -> (House, Arc<Counting>) {
    let (auth, validator) = counting();
    (House::open(auth.login_rate_limit(RateLimit::new(max, Duration::from_mins(1)))).await, validator)
}

/// The code of the reply to a login.
async fn log_in(client: &mut Client, token: &str) -> String {
    let id = client.send("auth.login", json!({"token": token})).await;
    client.reply(id).await["code"].as_str().unwrap_or("ok").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_too_many_failures_even_the_right_token_has_to_wait() {
    let (house, validator) = open(3).await;
    // Any number of logins may succeed, and they forgive nothing.
    for _ in 0..5 {
        house.client("ann").await;
    }
    let mut client = house.stranger().await;
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    house.advance(10_000);
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    assert_eq!(log_in(&mut client, "ann").await, "ok");
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    let asked = validator.asked.load(SeqCst);
    // On whatever connection of the address.
    for client in [&mut client, &mut house.stranger().await] {
        let (code, error) = client.fail("auth.login", json!({"token": "ann"})).await;
        assert_eq!((&*code, &error["details"]), ("RATE_LIMITED", &json!({"retryAfterMs": 50_000})));
        let message = "Too many failed logins from this address: try again in 50000 ms";
        assert_eq!(error["message"], message);
    }
    assert_eq!(validator.asked.load(SeqCst), asked, "the validator has no work with it");
    let page = Page::of(&house.server).await;
    assert_eq!((page.get("logins_failed_total"), page.get("logins_throttled_total")), (3, 2));
    // Another address has its own count.
    let mut elsewhere = Raw::websocket_from(&house.server, ELSEWHERE).await;
    let login = |token: &str| json!({"id": 1, "type": "auth.login", "token": token});
    assert_eq!(elsewhere.ask(&login("eve")).await["code"], "UNAUTHORIZED");
    assert_eq!(elsewhere.ask(&login("ann")).await["type"], "result");
    // The first failure leaves the window.
    house.advance(49_999);
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
    house.advance(1);
    assert_eq!(log_in(&mut client, "ann").await, "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_failed_logins_reaches_the_validator_thirty_times() {
    let (auth, validator) = counting();
    let house = House::open(auth).await;
    let mut ann = house.client("ann").await;
    house.bucket("notes", []).await;
    ann.ask("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let before = validator.asked.load(SeqCst);
    let mut codes = Vec::new();
    for _ in 0..5 {
        let mut eve = house.stranger().await;
        for n in 0..50 {
            codes.push(log_in(&mut eve, &format!("guess {n}")).await);
        }
    }
    let (tried, throttled) = codes.split_at(30);
    assert!(tried.iter().all(|code| code == "UNAUTHORIZED"), "{tried:?}");
    assert!(throttled.iter().all(|code| code == "RATE_LIMITED"), "{throttled:?}");
    assert_eq!(validator.asked.load(SeqCst) - before, 30);
    // The session of a user at the same address goes on, with its requests and its pushes.
    ann.ask("store.count", json!({"bucket": "notes"})).await;
    house.write(|draft| draft.insert("notes", object(json!({"id": "a"})))).await;
    assert_eq!(ids(&ann.push().await["data"]), ["a"]);
    assert_eq!(ann.ask("auth.whoami", json!({})).await["userId"], "ann");
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_that_need_not_be_are_throttled_too() {
    let limit = RateLimit::new(1, Duration::from_mins(1));
    let house = House::open(counting().0.required(false).login_rate_limit(limit)).await;
    let mut client = house.stranger().await;
    assert_eq!(log_in(&mut client, "eve").await, "UNAUTHORIZED");
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
    client.ask("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_in_the_process_have_no_address() {
    let (house, _) = open(1).await;
    let local = house.server.client(None);
    let log_in = async |token: &str| local.request::<Json>("auth.login", json!({"token": token})).await;
    for _ in 0..5 {
        assert_eq!(log_in("eve").await.unwrap_err().code, Code::Unauthorized);
    }
    assert_eq!(log_in("ann").await.unwrap()["userId"], "ann");
    // Nor do they use that of others.
    house.client("ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_of_a_revoked_user_has_failed() {
    let (house, _) = open(2).await;
    house.server.revoke_user("ann");
    let mut client = house.stranger().await;
    assert_eq!(log_in(&mut client, "ann").await, "SESSION_REVOKED");
    assert_eq!(log_in(&mut client, "ann").await, "SESSION_REVOKED");
    assert_eq!(log_in(&mut client, "ann").await, "RATE_LIMITED");
}
