//! `maxConnectionsPerIp` counts every socket of an address, once.

use std::net::Ipv4Addr;

use tidewire::Server;
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{options, serve};
use crate::page::Page;
use crate::raw::{Raw, handshake};

/// The address of the clients. The page of metrics is read from another one.
const CROWD: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n";
/// Sockets above the limit that may send a request.
const MAX_REFUSED_PER_ADDRESS: usize = 64;

async fn serve_limited(max: usize) -> Server {
    serve(options().max_connections_per_ip(max)).await
}

/// The status of an answer to a request of the crowd, and the socket.
async fn status(server: &Server) -> (u16, Raw) {
    let mut raw = Raw::connect_from(server, CROWD).await;
    raw.write(HEALTH).await;
    (raw.response().await.0, raw)
}

/// Opens a WebSocket when the address has a permit for it.
async fn open(server: &Server) -> Raw {
    let mut opened = None;
    wait_until_async("there is a permit", PATIENCE, async || {
        let mut raw = Raw::connect_from(server, CROWD).await;
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
async fn sockets_that_are_not_upgraded_count() {
    let server = serve_limited(2).await;
    let (first, mut idle) = (status(&server).await, status(&server).await.1);
    assert_eq!(first.0, 200);
    // Any other request is answered, and the socket is closed.
    let (refused, mut raw) = status(&server).await;
    assert_eq!(refused, 429);
    assert!(!raw.more().await, "it ends");
    // A WebSocket client is told by a close frame.
    let mut raw = Raw::connect_from(&server, CROWD).await;
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.closed_at_once().await, (4003, "too_many_connections".to_owned()));
    let page = Page::of(&server).await;
    assert_eq!((page.get("sockets_refused_total"), page.get("connections_refused_total")), (1, 1));
    assert_eq!(page.get("connections_admitted_total"), 0);
    // Those that were there before go on.
    idle.write(HEALTH).await;
    assert_eq!(idle.response().await.0, 200);
    drop(first);
    let mut raw = open(&server).await;
    raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
    assert_eq!(raw.json().await["type"], "result");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_is_counted_once_before_and_after_its_upgrade() {
    let server = serve_limited(1).await;
    for _ in 0..5 {
        let mut only = open(&server).await;
        assert_eq!(status(&server).await.0, 429, "an upgraded socket still counts");
        only.send(r#"{"id":1,"type":"store.buckets"}"#).await;
        assert_eq!(only.json().await["type"], "result");
    }
    // A request, and the upgrade on the same socket.
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
    // The limit is that of an address.
    Raw::websocket(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_above_the_limit_is_served_if_another_has_left_by_then() {
    let server = serve_limited(1).await;
    let only = open(&server).await;
    let mut above = Vec::new();
    for _ in 0..20 {
        above.push(Raw::connect_from(&server, CROWD).await);
    }
    // All of them have been accepted when a later one is served.
    Page::of(&server).await;
    drop(only);
    wait_until_async("the first has ended", PATIENCE, async || server.connection_count() == 0).await;
    // Its permit is free a moment later.
    let mut is_served = false;
    for raw in &mut above {
        raw.write(HEALTH).await;
        is_served |= raw.response().await.0 == 200;
    }
    assert!(is_served);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_so_many_sockets_above_the_limit_are_heard() {
    let server = serve_limited(1).await;
    let _only = open(&server).await;
    let mut silent = Vec::new();
    for _ in 0..MAX_REFUSED_PER_ADDRESS {
        silent.push(Raw::connect_from(&server, CROWD).await);
    }
    let (status, head, body) = Raw::connect_from(&server, CROWD).await.response().await;
    assert_eq!((status, &*body), (429, ""), "without being asked");
    assert!(head.contains("connection: close"), "{head}");
    // The others were heard, and are told why.
    for raw in &mut silent {
        raw.write(HEALTH).await;
        let (status, _, body) = raw.response().await;
        assert_eq!((status, &*body), (429, "too many connections from this address\n"));
    }
}
