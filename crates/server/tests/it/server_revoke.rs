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
use crate::metrics_page::metric;
use crate::test_server::{START_MILLIS, TestServer, allow_only, own_rows, tokens, user};

fn auth() -> Auth {
    tokens([user("ann", &["writer"]), user("bob", &["writer"]), user("adm", &["admin"])])
}

async fn client(server: &Server, token: &str) -> Client {
    let mut client = Client::connect(server).await;
    client.call("auth.login", json!({"token": token})).await;
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn administrator_revokes_a_user() {
    let test = TestServer::start_with(options().auth(auth()).revocation_ttl(Duration::from_mins(1))).await;
    let (mut one, mut two, mut bob) = (test.client("ann").await, test.client("ann").await, test.client("bob").await);
    let local = test.server.client(Session::new("ann", ["writer"]));
    let mut admin = test.client("adm").await;
    let revoked = admin.call("server.revoke", json!({"userId": "ann", "reason": "left"})).await;
    assert_eq!(
        revoked,
        json!({"userId": "ann", "revokedUntil": START_MILLIS + 60_000, "connections": 3, "stored": false})
    );
    for client in [&mut one, &mut two] {
        assert_eq!(client.push().await["event"], "session_revoked");
        assert_eq!(client.closed().await, (4002, "session_revoked".to_owned()));
    }
    let error = local.request::<Json>("store.buckets", json!({})).await.unwrap_err();
    assert_eq!(error.code.as_str(), "SESSION_REVOKED");
    bob.call("store.buckets", json!({})).await;
    let mut anonymous = test.anonymous().await;
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    assert_eq!(metric(&test.server, "sessions_revoked_total").await, 3);
    // A later revocation restarts the period.
    test.advance(30_000);
    let again = admin.call("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!((&again["connections"], &again["revokedUntil"]), (&json!(0), &json!(START_MILLIS + 90_000)));
    test.advance(59_999);
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
    test.advance(1);
    anonymous.call("auth.login", json!({"token": "ann"})).await;
    // An administrator can be revoked like any user.
    admin.send("server.revoke", json!({"userId": "adm"})).await;
    assert_eq!(admin.closed().await.0, 4002);
}

#[tokio::test(flavor = "multi_thread")]
async fn revoke_requires_the_admin_tier_and_checks_its_parameters() {
    let test = TestServer::start(auth()).await;
    let (mut ann, mut admin) = (test.client("ann").await, test.client("adm").await);
    assert_eq!(ann.call_err("server.revoke", json!({"userId": "bob"})).await.0, "FORBIDDEN");
    assert_eq!(test.anonymous().await.call_err("server.revoke", json!({"userId": "bob"})).await.0, "UNAUTHORIZED");
    for params in [
        json!({}),
        json!({"userId": ""}),
        json!({"userId": 7}),
        json!({"userId": "x".repeat((15 << 10) + 1)}),
        json!({"userId": "bob", "reason": 7}),
        json!({"userId": "bob", "reason": "x".repeat(257)}),
    ] {
        assert_eq!(admin.call_err("server.revoke", params.clone()).await.0, "VALIDATION_ERROR", "{params}");
    }
    test.client("bob").await;
    admin.call("server.revoke", json!({"userId": "x".repeat(15 << 10), "reason": null})).await;

    // A row filter grants no access to server operations.
    let rules = [Rule::new("boss", ["server.*"]), own_rows("member")];
    let test = TestServer::start(allow_only(tokens([user("eve", &["boss"]), user("non", &["member"])]), rules)).await;
    assert_eq!(test.client("non").await.call_err("server.revoke", json!({"userId": "eve"})).await.0, "FORBIDDEN");

    let server = crate::client::serve(options()).await;
    let (code, _) = Client::connect(&server).await.call_err("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!(code, "UNKNOWN_OPERATION", "without auth there are no users");
}

/// Opens a store with or without the system buckets of the server.
fn open(dir: &Path, is_declared: bool) -> Store {
    let mut buckets = SystemBuckets::default();
    if is_declared {
        buckets = Server::declare_buckets(buckets).unwrap();
    }
    Store::open(dir, StoreOptions::default().system_buckets(buckets)).unwrap().0
}

async fn start(store: &Store, ttl: Duration) -> Server {
    serve_store(store.clone(), options().auth(auth()).revocation_ttl(ttl)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn revocations_are_durable_if_the_program_declares_the_system_buckets() {
    let dir = tempfile::tempdir().unwrap();
    let hour = Duration::from_hours(1);
    for is_declared in [false, true] {
        let store = open(dir.path(), is_declared);
        let server = start(&store, hour).await;
        let revoked = client(&server, "adm").await.call("server.revoke", json!({"userId": "ann"})).await;
        assert_eq!(revoked["stored"], is_declared);
        server.stop(Duration::ZERO).await;
        store.close().unwrap();

        let store = open(dir.path(), true);
        let server = start(&store, hour).await;
        let mut anonymous = Client::connect(&server).await;
        let id = anonymous.send("auth.login", json!({"token": "ann"})).await;
        let reply = anonymous.reply(id).await;
        assert_eq!(reply["code"] == "SESSION_REVOKED", is_declared, "{reply}");
        // Clients can neither access nor see the bucket.
        let mut admin = client(&server, "adm").await;
        assert_eq!(admin.call("store.buckets", json!({})).await["count"], 0);
        assert_eq!(admin.call_err("store.clear", json!({"bucket": "$revoked_users"})).await.0, "FORBIDDEN");
        server.stop(Duration::ZERO).await;
        store.close().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_ttl_of_zero_only_closes_connections() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), true);
    let server = start(&store, Duration::ZERO).await;
    let mut ann = client(&server, "ann").await;
    let revoked = client(&server, "adm").await.call("server.revoke", json!({"userId": "ann"})).await;
    assert_eq!((&revoked["connections"], &revoked["stored"]), (&json!(1), &json!(false)));
    assert_eq!(ann.closed().await.0, 4002);
    client(&server, "ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_that_cannot_be_stored_lasts_until_the_server_stops() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), FaultyDisk::default());
    let buckets = Server::declare_buckets(SystemBuckets::default()).unwrap();
    let options = StoreOptions::default().system_buckets(buckets);
    let (store, _) = Store::open_on(Arc::new(disk.clone()), dir.path(), options).unwrap();
    let server = start(&store, Duration::from_hours(1)).await;
    let (mut ann, mut admin) = (client(&server, "ann").await, client(&server, "adm").await);
    disk.fail_syncs();
    let (_, error) = admin.call_err("server.revoke", json!({"userId": "ann"})).await;
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("the user is revoked until the server stops, but the revocation was not stored: "),
        "{error}"
    );
    assert_eq!(ann.closed().await.0, 4002);
    let mut anonymous = Client::connect(&server).await;
    assert_eq!(anonymous.call_err("auth.login", json!({"token": "ann"})).await.0, "SESSION_REVOKED");
}
