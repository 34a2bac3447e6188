//! Clients behind proxies: forwarding headers and the PROXY protocol.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::StreamExt as _;
use serde_json::Value as Json;
use tidewire::{RateLimit, Server, ServerOptions, StartError, TlsFiles};
use tidewire_conn::client::{Connect, Connected};
use tidewire_conn::tls::{Authorities, TlsClientOptions, TlsConnector};
use tidewire_store::{Store, StoreOptions};
use tidewire_testkit::Certificates;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::client::{is_left_with, options, serve};
use crate::page::{Page, metric};
use crate::raw::{Raw, TEXT, frame, handshake};

/// Options of a server behind a proxy on this machine, and others in 10.0.0.0/8.
fn behind_proxy() -> ServerOptions {
    options().trusted_proxies(["127.0.0.1", "10.0.0.0/8"].map(|network| network.parse().unwrap()))
}

/// A WebSocket whose handshake has these header lines.
async fn websocket(mut raw: Raw, lines: &str) -> Raw {
    raw.write(handshake("/", lines).as_bytes()).await;
    assert_eq!(raw.head().await.0, 101, "{lines}");
    assert_eq!(raw.json().await["type"], "welcome");
    raw
}

/// The address that the server has for its only client.
fn address(server: &Server) -> IpAddr {
    let connections = server.connections();
    assert_eq!(connections.len(), 1);
    connections[0].remote_address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_proxy_names_the_client() {
    let server = serve(behind_proxy()).await;
    for (lines, expected) in [
        ("", "127.0.0.1"),
        ("X-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
        ("X-Forwarded-For: 203.0.113.9, 192.0.2.1, 10.0.0.1\r\n", "192.0.2.1"),
        ("X-Forwarded-For: 203.0.113.9\r\nX-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
        ("Forwarded: for=\"[2001:db8::1]:4711\";host=tide.example;proto=https\r\n", "2001:db8::1"),
        ("Forwarded: for=192.0.2.1\r\nX-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
    ] {
        let mut raw = websocket(Raw::connect(&server).await, lines).await;
        assert_eq!(address(&server), expected.parse::<IpAddr>().unwrap(), "{lines}");
        raw.send(r#"{"id":1,"type":"server.connections"}"#).await;
        assert_eq!(raw.json().await["data"][0]["remoteAddress"], expected, "{lines}");
        drop(raw);
        is_left_with(&server, 0).await;
    }
    let page = Page::of(&server).await;
    assert_eq!((page.get("forwarded_invalid_total"), page.get("forwarded_ignored_total")), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_headers_of_a_trusted_proxy_are_counted_and_its_own_address_is_used() {
    let server = serve(behind_proxy()).await;
    let malformed = [
        "X-Forwarded-For: unknown\r\n",
        "X-Forwarded-For: 192.0.2.1, somebody\r\n",
        "Forwarded: for=\"192.0.2.1\r\n",
        "Forwarded: for=203.0.113.9\r\nX-Forwarded-For: 192.0.2.1\r\n",
    ];
    for (count, lines) in malformed.into_iter().enumerate() {
        let raw = websocket(Raw::connect(&server).await, lines).await;
        assert_eq!(address(&server), IpAddr::from([127, 0, 0, 1]), "{lines}");
        drop(raw);
        is_left_with(&server, 0).await;
        assert_eq!(metric(&server, "forwarded_invalid_total").await, count as u64 + 1, "{lines}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_other_peers_are_ignored_and_counted() {
    let server = serve(behind_proxy()).await;
    let headers =
        ["X-Forwarded-For: 192.0.2.1\r\n", "Forwarded: for=192.0.2.1\r\n", "X-Forwarded-Host: tide.example\r\n"];
    for (count, lines) in headers.into_iter().enumerate() {
        let raw = websocket(Raw::connect_from(&server, [127, 0, 0, 2]).await, lines).await;
        assert_eq!(address(&server), IpAddr::from([127, 0, 0, 2]), "{lines}");
        drop(raw);
        is_left_with(&server, 0).await;
        assert_eq!(metric(&server, "forwarded_ignored_total").await, count as u64 + 1, "{lines}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_by_address_count_the_clients_behind_a_proxy() {
    let limit = RateLimit::new(1, Duration::from_hours(1));
    let server = serve(behind_proxy().max_connections_per_ip(1).rate_limit(limit)).await;
    let request = r#"{"id":1,"type":"store.buckets"}"#;
    let mut clients = Vec::new();
    for client in ["192.0.2.1", "192.0.2.2", "2001:db8::1"] {
        let lines = format!("X-Forwarded-For: {client}\r\n");
        let mut raw = websocket(Raw::connect(&server).await, &lines).await;
        for outcome in ["result", "error"] {
            raw.send(request).await;
            assert_eq!(raw.json().await["type"], outcome, "{client}");
        }
        clients.push(raw);
        let mut second = Raw::connect(&server).await;
        second.write(handshake("/", &lines).as_bytes()).await;
        assert_eq!(second.head().await.0, 101);
        assert_eq!(second.closed().await, (4003, "too_many_connections".to_owned()), "{client}");
    }
    drop(clients);
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_proxy_names_the_host_of_a_page() {
    let server = serve(behind_proxy().allowed_hosts(["tide.example"])).await;
    let origin = "Origin: https://tide.example\r\n";
    for (own, lines, status) in [
        ([127, 0, 0, 1], "", 403),
        ([127, 0, 0, 1], "X-Forwarded-Host: tide.example\r\n", 101),
        ([127, 0, 0, 1], "Forwarded: for=192.0.2.1;host=\"tide.example:443\"\r\n", 101),
        ([127, 0, 0, 1], "X-Forwarded-Host: evil.example\r\n", 403),
        ([127, 0, 0, 2], "X-Forwarded-Host: tide.example\r\n", 403),
    ] {
        let mut raw = Raw::connect_from(&server, own).await;
        // The proxy has replaced the host by the address of the server.
        let request = handshake("/", &format!("{origin}{lines}")).replacen("Host: tide", "Host: 127.0.0.1:8080", 1);
        raw.write(request.as_bytes()).await;
        assert_eq!(raw.head().await.0, status, "{own:?} {lines}");
    }
    // Rebinding goes through the proxy as well.
    let mut raw = Raw::connect(&server).await;
    raw.write(handshake("/", "Origin: http://evil.example\r\nX-Forwarded-Host: evil.example\r\n").as_bytes()).await;
    assert_eq!(raw.head().await.0, 403);
}

/// A header of the PROXY protocol.
fn proxy_header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let mut header = b"\r\n\r\n\0\r\nQUIT\n".to_vec();
    header.extend([command, family]);
    header.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
    header.extend(rest);
    header
}

/// A header that names this client.
fn proxy_header_of(client: [u8; 4]) -> Vec<u8> {
    proxy_header(0x21, 0x11, &[&client[..], &[127, 0, 0, 1, 0x12, 0x67, 0x1f, 0x90]].concat())
}

fn with_proxy_protocol() -> ServerOptions {
    behind_proxy().proxy_protocol(true)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_protocol_names_the_client() {
    let server = serve(with_proxy_protocol()).await;
    let tcp6 =
        [&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 16], &[0x12, 0x67, 0x1f, 0x90]].concat();
    for (header, lines, expected) in [
        (proxy_header_of([192, 0, 2, 1]), "", "192.0.2.1"),
        (proxy_header(0x21, 0x21, &tcp6), "", "2001:db8::1"),
        // The proxy's own connections, and clients that it does not name.
        (proxy_header(0x20, 0x00, &[]), "", "127.0.0.1"),
        (proxy_header(0x21, 0x00, &[]), "", "127.0.0.1"),
        // Such a proxy does not read HTTP: these headers are the client's.
        (proxy_header_of([192, 0, 2, 1]), "X-Forwarded-For: 203.0.113.9\r\n", "192.0.2.1"),
        (proxy_header(0x21, 0x00, &[]), "X-Forwarded-For: 203.0.113.9\r\n", "127.0.0.1"),
        // Behind another proxy, which does.
        (proxy_header_of([10, 0, 0, 1]), "X-Forwarded-For: 203.0.113.9\r\n", "203.0.113.9"),
    ] {
        let mut raw = Raw::connect(&server).await;
        raw.write(&header).await;
        let raw = websocket(raw, lines).await;
        assert_eq!(address(&server), expected.parse::<IpAddr>().unwrap(), "{lines}");
        drop(raw);
        is_left_with(&server, 0).await;
    }
    // In one piece with the handshake and the first request, or byte by byte.
    let mut bytes = proxy_header_of([192, 0, 2, 1]);
    bytes.extend(handshake("/", "").bytes());
    bytes.extend(frame(TEXT, br#"{"id":1,"type":"store.buckets"}"#));
    for pieces in [1, bytes.len()] {
        let mut raw = Raw::connect(&server).await;
        raw.stream.set_nodelay(true).unwrap();
        for piece in bytes.chunks(bytes.len() / pieces) {
            raw.write(piece).await;
        }
        assert_eq!(raw.head().await.0, 101);
        assert_eq!(raw.json().await["type"], "welcome");
        assert_eq!(raw.json().await["id"], 1);
        assert_eq!(address(&server), IpAddr::from([192, 0, 2, 1]));
        drop(raw);
        is_left_with(&server, 0).await;
    }
}

/// Reads a metric of a server whose trusted proxies must send a header.
async fn refused(server: &Server) -> u64 {
    let mut raw = Raw::connect_from(server, [127, 0, 0, 2]).await;
    raw.write(b"GET /metrics HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
    let (_, _, page) = raw.response().await;
    let line = page.lines().find_map(|line| line.strip_prefix("tidewire_proxy_headers_refused_total "));
    line.unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_without_a_valid_proxy_header_are_refused_and_counted() {
    let server = serve(with_proxy_protocol().handshake_timeout(Duration::from_millis(200))).await;
    let (trusted, other) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    let too_long = [&proxy_header(0x21, 0x11, &[])[..14], &[0xff, 0xff]].concat();
    let hostile: [(_, Vec<u8>); 6] = [
        (trusted, handshake("/", "").into_bytes()),
        (trusted, b"PROXY TCP4 192.0.2.1 198.51.100.2 4711 8080\r\n".to_vec()),
        (trusted, proxy_header(0x21, 0x11, &[1, 2, 3])),
        (trusted, too_long),
        // It does not go on, so it is cut off.
        (trusted, proxy_header_of([192, 0, 2, 1])[..20].to_vec()),
        (other, [proxy_header_of([192, 0, 2, 1]), handshake("/", "").into_bytes()].concat()),
    ];
    for (count, (own, bytes)) in hostile.into_iter().enumerate() {
        let mut raw = Raw::connect_from(&server, own).await;
        raw.write(&bytes).await;
        while raw.more().await {}
        assert_eq!(raw.rest(), "", "it is not answered");
        assert_eq!(refused(&server).await, count as u64 + 1, "{bytes:?}");
    }
    // Other peers are clients.
    let raw = websocket(Raw::connect_from(&server, other).await, "").await;
    assert_eq!(address(&server), IpAddr::from(other));
    drop(raw);
    // A peer that sends nothing is closed, and is no error.
    let mut idle = Raw::connect_from(&server, other).await;
    assert!(!idle.more().await);
    assert_eq!(refused(&server).await, 6);
}

/// Connects like a proxy that does not end TLS.
struct ProxyConnector(SocketAddr);

impl Connect for ProxyConnector {
    type Socket = TcpStream;

    async fn connect(&self) -> io::Result<Connected<TcpStream>> {
        let mut socket = TcpStream::connect(self.0).await?;
        socket.write_all(&proxy_header_of([192, 0, 2, 1])).await?;
        Ok(Connected::new(socket, self.0))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_header_comes_before_tls() {
    let dir = tempfile::tempdir().unwrap();
    let certificates = Certificates::generate(dir.path());
    let files = TlsFiles { certificate: certificates.server.clone(), key: certificates.server_key.clone() };
    let server = serve(with_proxy_protocol().tls(files)).await;
    let authorities = Authorities::from_pem(&std::fs::read(&certificates.authority).unwrap()).unwrap();
    let tls = TlsClientOptions::default().authorities(authorities);
    let connector = TlsConnector::new(ProxyConnector(server.address()), "localhost", tls).unwrap();
    let socket = connector.connect().await.unwrap().socket;
    let (mut socket, _) = tokio_tungstenite::client_async("wss://localhost/", socket).await.unwrap();
    let welcome: Json = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    assert_eq!(welcome["type"], "welcome");
    assert_eq!(address(&server), IpAddr::from([192, 0, 2, 1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_protocol_needs_trusted_proxies() {
    let options = options().proxy_protocol(true);
    let started = Server::start(Store::memory(StoreOptions::default()), options).await;
    assert!(matches!(started, Err(StartError::NoTrustedProxies)));
}
