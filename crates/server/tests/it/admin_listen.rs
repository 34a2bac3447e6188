//! The admin address: `/metrics` and the details of `/health`, separate from the port for clients.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::{Server, ServerOptions, StartError};
use tidewire_store::{Store, StoreOptions};
use tokio::net::TcpStream;

use crate::client::{Client, notes_config, options, serve, serve_store, wait_for_connections};
use crate::faulty_disk::FaultyDisk;
use crate::raw_client::{RawClient, handshake};

fn with_admin() -> ServerOptions {
    options().admin_listen(([127, 0, 0, 1], 0))
}

/// Requests a page. Returns the status and the body.
async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut raw = RawClient::connect_to(address).await;
    raw.write(format!("GET {path} HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").as_bytes()).await;
    let (status, _, body) = raw.response().await;
    (status, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_details_are_served_on_the_admin_address_only() {
    let server = serve(with_admin()).await;
    let (public, admin) = (server.address(), server.admin_address().unwrap());
    assert_ne!(public, admin);
    assert!(admin.port() != 0);

    assert_eq!(get(public, "/health").await, (200, r#"{"status":"ok"}"#.to_owned()));
    let (status, text) = get(public, "/metrics").await;
    assert_eq!(status, 404);
    assert!(!text.contains("metrics"), "{text}");
    let mut client = Client::connect(&server).await;
    client.call("store.buckets", json!({})).await;

    let (status, page) = get(admin, "/metrics").await;
    assert_eq!(status, 200);
    assert!(page.lines().any(|line| line == "tidewire_connections 1"), "{page}");
    let (status, health) = get(admin, "/health").await;
    let health: Json = serde_json::from_str(&health).unwrap();
    assert_eq!((status, &health["status"]), (200, &json!("ok")));
    assert!(health["uptimeMs"].is_u64() && health["version"].is_string(), "{health}");

    // Clients cannot connect to it.
    let mut raw = RawClient::connect_to(admin).await;
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.response().await.0, 404);
    wait_for_connections(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_admin_address_one_port_serves_all() {
    let server = serve(options()).await;
    assert_eq!(server.admin_address(), None);
    assert_eq!(get(server.address(), "/metrics").await.0, 200);
    assert!(get(server.address(), "/health").await.1.contains("uptimeMs"));
}

#[tokio::test(flavor = "multi_thread")]
async fn public_health_hides_the_cause_of_a_failure() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let opened = Store::open_on(Arc::new(disk.clone()), &dir.path().join("data"), StoreOptions::default());
    let (store, _) = opened.unwrap();
    store.define_bucket("notes", notes_config()).wait().unwrap();
    let server = serve_store(store, with_admin()).await;
    disk.fail_syncs();
    let mut client = Client::connect(&server).await;
    client.call_err("store.insert", json!({"bucket": "notes", "data": {"text": "ebb"}})).await;
    assert_eq!(get(server.address(), "/health").await, (503, r#"{"status":"unavailable"}"#.to_owned()));
    let (status, health) = get(server.admin_address().unwrap(), "/health").await;
    assert!(status == 503 && health.contains("disk has failed"), "{health}");
}

/// Each port has its own limit on sockets.
#[tokio::test(flavor = "multi_thread")]
async fn flooding_one_port_does_not_affect_the_other() {
    let server = serve(with_admin()).await;
    let admin = server.admin_address().unwrap();
    let mut idle = Vec::new();
    for _ in 0..32 {
        idle.push(RawClient::connect_to(admin).await);
    }
    let mut rejected = RawClient::connect_to(admin).await;
    assert_eq!(rejected.head().await.0, 503);
    assert_eq!(get(server.address(), "/health").await.0, 200);
    drop(idle);

    let server = serve(with_admin().max_connections(1)).await;
    let idle = RawClient::connect(&server).await;
    let mut rejected = RawClient::connect(&server).await;
    assert_eq!(rejected.head().await.0, 503);
    let (status, page) = get(server.admin_address().unwrap(), "/metrics").await;
    assert_eq!(status, 200);
    assert!(page.lines().any(|line| line == "tidewire_sockets_refused_total 1"), "{page}");
    drop(idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_port_disconnects_slow_peers_and_rejects_foreign_origins() {
    let server = serve(with_admin().handshake_timeout(Duration::from_millis(50))).await;
    let admin = server.admin_address().unwrap();
    let mut slow = RawClient::connect_to(admin).await;
    slow.write(b"GET /metrics HTTP/1.1\r\n").await;
    while slow.read_some().await {}
    let mut page = RawClient::connect_to(admin).await;
    page.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\r\n").await;
    assert_eq!(page.response().await.0, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_port_closes_with_the_server() {
    for is_graceful in [true, false] {
        let server = serve(with_admin()).await;
        let admin = server.admin_address().unwrap();
        let mut idle = RawClient::connect_to(admin).await;
        idle.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
        assert_eq!(idle.response().await.0, 200);
        if is_graceful {
            server.stop(Duration::ZERO).await;
        } else {
            drop(server);
        }
        assert!(!idle.read_some().await);
        tidewire_testkit::wait_until_async("the port is closed", tidewire_testkit::PATIENCE, async || {
            TcpStream::connect(admin).await.is_err()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_address_in_use_prevents_the_start() {
    let one = serve(with_admin()).await;
    let taken = one.admin_address().unwrap();
    let options = options().admin_listen(taken);
    let error = Server::start(Store::memory(StoreOptions::default()), options).await.unwrap_err();
    assert!(matches!(error, StartError::Listen { port, .. } if port == taken.port()), "{error}");
}
