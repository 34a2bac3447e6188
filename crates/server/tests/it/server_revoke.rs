//! The operation `server.revoke`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::Server;
use tidewire::auth::{Auth, Rule, Session};
use tidewire_store::system::SystemBuckets;
use tidewire_store::{Store, StoreOptions};

use crate::client::{Client, options, serve_store};
use crate::faulty_disk::FaultyDisk;
use crate::house::{House, NOON, only, own_rows, tokens, user};
use crate::page::metric;

fn people() -> Auth {
    tokens([user("ann", &["writer"]), user("bob", &["writer"]), user("adm", &["admin"])])
}

async fn client(server: &Server, token: &str) -> Client {
    let mut client = Client::connect(server).await;
    client.ask("auth.login", json!({"token": token})).await;
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn an_administrator_revokes_a_user() {
    let house = House::open_with(options().auth(people()).revocation_ttl(Duration::from_mins(1))).await;
    let (mut one, mut two, mut bob) = (house.client("ann").await, house.client("ann").await, house.client("bob").await);
    let local = house.server.client(Session::new("ann", ["writer"]));
    let mut admin = house.client("adm").await;
    let revoked = admin.ask("server.revoke", json!({"userId": "ann", "reason": "left"})).await;
    assert_eq!(revoked, json!({"userId": "ann", "revokedUntil": NOON + 60_000, "connections": 3, "stored": false}));
    for client in [&mut one, &mut two] {
        assert_eq!(client.push().await["event"], "session_revoked");
        assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
    }
    let refused = local.request::<Json>("store.buckets", json!({})).await.unwrap_err();
    assert_eq!(refused.code.as_str(), "SESSION_REVOKED");
    bob.ask("store.buckets", json!({})).await;
    let mut stranger = house.stranger().await;
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(metric(&house.server, "sessions_revoked_total").await, 3);
    // Again, later: from then on.
    house.advance(30_000);
    let again = admin.ask("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!((&again["connections"], &again["revokedUntil"]), (&json!(0), &json!(NOON + 90_000)));
    house.advance(59_999);
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    house.advance(1);
    stranger.ask("auth.login", json!({"token": "ann"})).await;
    // An administrator is a user like any other.
    admin.send("server.revoke", json!({"userId": "adm"})).await;
    assert_eq!(admin.closed().await.0, 4002);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_administrators_may_and_parameters_are_checked() {
    let house = House::open(people()).await;
    let (mut ann, mut admin) = (house.client("ann").await, house.client("adm").await);
    assert_eq!(ann.fail("server.revoke", json!({"userId": "bob"})).await.0, "FORBIDDEN");
    assert_eq!(house.stranger().await.fail("server.revoke", json!({"userId": "bob"})).await.0, "UNAUTHORIZED");
    for params in [
        json!({}),
        json!({"userId": ""}),
        json!({"userId": 7}),
        json!({"userId": "x".repeat((15 << 10) + 1)}),
        json!({"userId": "bob", "reason": 7}),
        json!({"userId": "bob", "reason": "x".repeat(257)}),
    ] {
        assert_eq!(admin.fail("server.revoke", params.clone()).await.0, "VALIDATION_ERROR", "{params}");
    }
    house.client("bob").await;
    admin.ask("server.revoke", json!({"userId": "x".repeat(15 << 10), "reason": null})).await;

    // A row filter is not a right to the whole server.
    let rules = [Rule::new("boss", ["server.*"]), own_rows("member")];
    let house = House::open(only(tokens([user("eve", &["boss"]), user("non", &["member"])]), rules)).await;
    assert_eq!(house.client("non").await.fail("server.revoke", json!({"userId": "eve"})).await.0, "FORBIDDEN");

    let server = crate::client::serve(options()).await;
    let (code, _) = Client::connect(&server).await.fail("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!(code, "UNKNOWN_OPERATION", "without auth there are no users");
}

/// Opens a directory with the buckets of the server, or without them.
fn open(dir: &Path, is_declared: bool) -> Store {
    let mut buckets = SystemBuckets::default();
    if is_declared {
        buckets = Server::declare_buckets(buckets).unwrap();
    }
    Store::open(dir, StoreOptions::default().system_buckets(buckets)).unwrap().0
}

async fn start(store: &Store, ttl: Duration) -> Server {
    serve_store(store.clone(), options().auth(people()).revocation_ttl(ttl)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedding_program_declares_the_bucket_that_stores_it() {
    let dir = tempfile::tempdir().unwrap();
    let hour = Duration::from_hours(1);
    for is_declared in [false, true] {
        let store = open(dir.path(), is_declared);
        let server = start(&store, hour).await;
        let revoked = client(&server, "adm").await.ask("server.revoke", json!({"userId": "ann"})).await;
        assert_eq!(revoked["stored"], is_declared);
        server.stop(Duration::ZERO).await;
        store.close().unwrap();

        let store = open(dir.path(), true);
        let server = start(&store, hour).await;
        let mut stranger = Client::connect(&server).await;
        let id = stranger.send("auth.login", json!({"token": "ann"})).await;
        let reply = stranger.reply(id).await;
        assert_eq!(reply["code"] == "SESSION_REVOKED", is_declared, "{reply}");
        // Clients cannot reach the bucket, and do not see it.
        let mut admin = client(&server, "adm").await;
        assert_eq!(admin.ask("store.buckets", json!({})).await["count"], 0);
        assert_eq!(admin.fail("store.clear", json!({"bucket": "$revoked_users"})).await.0, "FORBIDDEN");
        server.stop(Duration::ZERO).await;
        store.close().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_to_live_of_zero_only_closes_connections() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), true);
    let server = start(&store, Duration::ZERO).await;
    let mut ann = client(&server, "ann").await;
    let revoked = client(&server, "adm").await.ask("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!((&revoked["connections"], &revoked["stored"]), (&json!(1), &json!(false)));
    assert_eq!(ann.closed().await.0, 4002);
    client(&server, "ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_that_cannot_be_stored_holds_until_the_server_stops() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), FaultyDisk::default());
    let buckets = Server::declare_buckets(SystemBuckets::default()).unwrap();
    let options = StoreOptions::default().system_buckets(buckets);
    let (store, _) = Store::open_on(Arc::new(disk.clone()), dir.path(), options).unwrap();
    let server = start(&store, Duration::from_hours(1)).await;
    let (mut ann, mut admin) = (client(&server, "ann").await, client(&server, "adm").await);
    disk.fail_syncs();
    let (_, error) = admin.fail("server.revoke", json!({"userId": "ann"})).await;
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("the user is revoked until the server stops, but the revocation was not stored: "),
        "{error}"
    );
    assert_eq!(ann.closed().await.0, 4002);
    let mut stranger = Client::connect(&server).await;
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
}
