//! `maxConnectionsPerIp` counts every socket of an address, once.

use std::net::Ipv4Addr;

use tidewire::Server;
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{options, serve};
use crate::metrics_page::MetricsPage;
use crate::raw_client::{RawClient, handshake};

/// The address of the clients. The metrics are read from another one.
const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n";
/// Number of sockets above the limit that may send a request.
const MAX_REJECTED_PER_ADDRESS: usize = 64;

async fn serve_limited(max: usize) -> Server {
    serve(options().max_connections_per_ip(max)).await
}

/// Requests `/health` from the client address. Returns the status and the socket.
async fn status(server: &Server) -> (u16, RawClient) {
    let mut raw = RawClient::connect_from(server, CLIENT_ADDRESS).await;
    raw.write(HEALTH).await;
    (raw.response().await.0, raw)
}

/// Opens a WebSocket as soon as the address has a permit.
async fn open(server: &Server) -> RawClient {
    let mut opened = None;
    wait_until_async("there is a permit", PATIENCE, async || {
        let mut raw = RawClient::connect_from(server, CLIENT_ADDRESS).await;
        raw.write(handshake("/", "").as_bytes()).await;
        assert_eq!(raw.head().await.0, 101);
        let is_open = raw.frame().await.unwrap().0 == 1;
        opened = Some(raw).filter(|_| is_open);
        is_open
    })
    .await;
    opened.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_count_before_their_upgrade() {
    let server = serve_limited(2).await;
    let (first, mut idle) = (status(&server).await, status(&server).await.1);
    assert_eq!(first.0, 200);
    // An HTTP request gets a response, and the socket is closed.
    let (rejected, mut raw) = status(&server).await;
    assert_eq!(rejected, 429);
    assert!(!raw.read_some().await, "the connection ends");
    // A WebSocket client gets a close frame.
    let mut raw = RawClient::connect_from(&server, CLIENT_ADDRESS).await;
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.immediate_close().await, (4003, "too_many_connections".to_owned()));
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("sockets_refused_total"), page.get("connections_refused_total")), (1, 1));
    assert_eq!(page.get("connections_admitted_total"), 0);
    // Earlier sockets are not affected.
    idle.write(HEALTH).await;
    assert_eq!(idle.response().await.0, 200);
    drop(first);
    let mut raw = open(&server).await;
    raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
    assert_eq!(raw.json().await["type"], "result");
}

#[tokio::test(flavor = "multi_thread")]
async fn socket_is_counted_once_before_and_after_its_upgrade() {
    let server = serve_limited(1).await;
    for _ in 0..5 {
        let mut only = open(&server).await;
        assert_eq!(status(&server).await.0, 429, "an upgraded socket still counts");
        only.send(r#"{"id":1,"type":"store.buckets"}"#).await;
        assert_eq!(only.json().await["type"], "result");
    }
    // Sends a request, and then upgrades the same socket.
    let mut permitted = None;
    wait_until_async("there is a permit", PATIENCE, async || {
        let (answered, raw) = status(&server).await;
        permitted = Some(raw);
        answered == 200
    })
    .await;
    let mut raw = permitted.unwrap();
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.json().await["type"], "welcome");
    // Another address has its own limit.
    RawClient::websocket(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn socket_above_the_limit_is_served_once_a_permit_is_free() {
    let server = serve_limited(1).await;
    let only = open(&server).await;
    let mut above = Vec::new();
    for _ in 0..20 {
        above.push(RawClient::connect_from(&server, CLIENT_ADDRESS).await);
    }
    // Sockets are accepted in order, so the response to a later one shows that all of them are accepted.
    MetricsPage::read(&server).await;
    drop(only);
    wait_until_async("the first connection has closed", PATIENCE, async || server.connection_count() == 0).await;
    // The permit of the closed connection is released shortly afterwards.
    let mut is_served = false;
    for raw in &mut above {
        raw.write(HEALTH).await;
        is_served |= raw.response().await.0 == 200;
    }
    assert!(is_served);
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_sockets_above_the_limit_is_bounded() {
    let server = serve_limited(1).await;
    let _only = open(&server).await;
    let mut silent = Vec::new();
    for _ in 0..MAX_REJECTED_PER_ADDRESS {
        silent.push(RawClient::connect_from(&server, CLIENT_ADDRESS).await);
    }
    let (status, head, body) = RawClient::connect_from(&server, CLIENT_ADDRESS).await.response().await;
    assert_eq!((status, &*body), (429, ""), "the response comes before any request");
    assert!(head.contains("connection: close"), "{head}");
    // The others get a response that names the reason.
    for raw in &mut silent {
        raw.write(HEALTH).await;
        let (status, _, body) = raw.response().await;
        assert_eq!((status, &*body), (429, "too many connections from this address\n"));
    }
}
