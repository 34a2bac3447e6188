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

use crate::client::{options, serve, wait_for_connections};
use crate::metrics_page::{MetricsPage, metric};
use crate::raw_client::{RawClient, TEXT, frame, handshake};

/// Returns options of a server that trusts a proxy on this machine, and those in 10.0.0.0/8.
fn behind_proxy() -> ServerOptions {
    options().trusted_proxies(["127.0.0.1", "10.0.0.0/8"].map(|network| network.parse().unwrap()))
}

/// Opens a WebSocket with these header lines in its handshake.
async fn websocket(mut raw: RawClient, lines: &str) -> RawClient {
    raw.write(handshake("/", lines).as_bytes()).await;
    assert_eq!(raw.head().await.0, 101, "{lines}");
    assert_eq!(raw.json().await["type"], "welcome");
    raw
}

/// Returns the remote address of the only client, as the server sees it.
fn address(server: &Server) -> IpAddr {
    let connections = server.connections();
    assert_eq!(connections.len(), 1);
    connections[0].remote_address
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_proxy_sets_the_client_address() {
    let server = serve(behind_proxy()).await;
    for (lines, expected) in [
        ("", "127.0.0.1"),
        ("X-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
        ("X-Forwarded-For: 203.0.113.9, 192.0.2.1, 10.0.0.1\r\n", "192.0.2.1"),
        ("X-Forwarded-For: 203.0.113.9\r\nX-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
        ("Forwarded: for=\"[2001:db8::1]:4711\";host=tide.example;proto=https\r\n", "2001:db8::1"),
        ("Forwarded: for=192.0.2.1\r\nX-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1"),
    ] {
        let mut raw = websocket(RawClient::connect(&server).await, lines).await;
        assert_eq!(address(&server), expected.parse::<IpAddr>().unwrap(), "{lines}");
        raw.send(r#"{"id":1,"type":"server.connections"}"#).await;
        assert_eq!(raw.json().await["data"][0]["remoteAddress"], expected, "{lines}");
        drop(raw);
        wait_for_connections(&server, 0).await;
    }
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("forwarded_invalid_total"), page.get("forwarded_ignored_total")), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_forwarding_headers_are_counted_and_the_proxy_address_is_used() {
    let server = serve(behind_proxy()).await;
    let malformed = [
        "X-Forwarded-For: unknown\r\n",
        "X-Forwarded-For: 192.0.2.1, not-an-address\r\n",
        "Forwarded: for=\"192.0.2.1\r\n",
        "Forwarded: for=203.0.113.9\r\nX-Forwarded-For: 192.0.2.1\r\n",
    ];
    for (count, lines) in malformed.into_iter().enumerate() {
        let raw = websocket(RawClient::connect(&server).await, lines).await;
        assert_eq!(address(&server), IpAddr::from([127, 0, 0, 1]), "{lines}");
        drop(raw);
        wait_for_connections(&server, 0).await;
        assert_eq!(metric(&server, "forwarded_invalid_total").await, count as u64 + 1, "{lines}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarding_headers_of_untrusted_peers_are_ignored_and_counted() {
    let server = serve(behind_proxy()).await;
    let headers =
        ["X-Forwarded-For: 192.0.2.1\r\n", "Forwarded: for=192.0.2.1\r\n", "X-Forwarded-Host: tide.example\r\n"];
    for (count, lines) in headers.into_iter().enumerate() {
        let raw = websocket(RawClient::connect_from(&server, [127, 0, 0, 2]).await, lines).await;
        assert_eq!(address(&server), IpAddr::from([127, 0, 0, 2]), "{lines}");
        drop(raw);
        wait_for_connections(&server, 0).await;
        assert_eq!(metric(&server, "forwarded_ignored_total").await, count as u64 + 1, "{lines}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_per_address_apply_to_clients_behind_a_proxy() {
    let limit = RateLimit::new(1, Duration::from_hours(1));
    let server = serve(behind_proxy().max_connections_per_ip(1).rate_limit(limit)).await;
    let request = r#"{"id":1,"type":"store.buckets"}"#;
    let mut clients = Vec::new();
    for client in ["192.0.2.1", "192.0.2.2", "2001:db8::1"] {
        let lines = format!("X-Forwarded-For: {client}\r\n");
        let mut raw = websocket(RawClient::connect(&server).await, &lines).await;
        for outcome in ["result", "error"] {
            raw.send(request).await;
            assert_eq!(raw.json().await["type"], outcome, "{client}");
        }
        clients.push(raw);
        let mut second = RawClient::connect(&server).await;
        second.write(handshake("/", &lines).as_bytes()).await;
        assert_eq!(second.head().await.0, 101);
        assert_eq!(second.closed().await, (4003, "too_many_connections".to_owned()), "{client}");
    }
    drop(clients);
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_proxy_sets_the_host_of_a_page() {
    let server = serve(behind_proxy().allowed_hosts(["tide.example"])).await;
    let origin = "Origin: https://tide.example\r\n";
    for (own, lines, status) in [
        ([127, 0, 0, 1], "", 403),
        ([127, 0, 0, 1], "X-Forwarded-Host: tide.example\r\n", 101),
        ([127, 0, 0, 1], "Forwarded: for=192.0.2.1;host=\"tide.example:443\"\r\n", 101),
        ([127, 0, 0, 1], "X-Forwarded-Host: evil.example\r\n", 403),
        ([127, 0, 0, 2], "X-Forwarded-Host: tide.example\r\n", 403),
    ] {
        let mut raw = RawClient::connect_from(&server, own).await;
        // The proxy has replaced the host with the address of the server.
        let request = handshake("/", &format!("{origin}{lines}")).replacen("Host: tide", "Host: 127.0.0.1:8080", 1);
        raw.write(request.as_bytes()).await;
        assert_eq!(raw.head().await.0, status, "{own:?} {lines}");
    }
    // DNS rebinding passes through the proxy too.
    let mut raw = RawClient::connect(&server).await;
    raw.write(handshake("/", "Origin: http://evil.example\r\nX-Forwarded-Host: evil.example\r\n").as_bytes()).await;
    assert_eq!(raw.head().await.0, 403);
}

/// Returns a header of the PROXY protocol.
fn proxy_header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let mut header = b"\r\n\r\n\0\r\nQUIT\n".to_vec();
    header.extend([command, family]);
    header.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
    header.extend(rest);
    header
}

/// Returns a PROXY protocol header with this client address.
fn proxy_header_of(client: [u8; 4]) -> Vec<u8> {
    proxy_header(0x21, 0x11, &[&client[..], &[127, 0, 0, 1, 0x12, 0x67, 0x1f, 0x90]].concat())
}

fn with_proxy_protocol() -> ServerOptions {
    behind_proxy().proxy_protocol(true)
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_protocol_sets_the_client_address() {
    let server = serve(with_proxy_protocol()).await;
    let tcp6 =
        [&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 16], &[0x12, 0x67, 0x1f, 0x90]].concat();
    for (header, lines, expected) in [
        (proxy_header_of([192, 0, 2, 1]), "", "192.0.2.1"),
        (proxy_header(0x21, 0x21, &tcp6), "", "2001:db8::1"),
        // Connections of the proxy itself, and clients without an address.
        (proxy_header(0x20, 0x00, &[]), "", "127.0.0.1"),
        (proxy_header(0x21, 0x00, &[]), "", "127.0.0.1"),
        // The proxy does not read HTTP, so these headers come from the client.
        (proxy_header_of([192, 0, 2, 1]), "X-Forwarded-For: 203.0.113.9\r\n", "192.0.2.1"),
        (proxy_header(0x21, 0x00, &[]), "X-Forwarded-For: 203.0.113.9\r\n", "127.0.0.1"),
        // Behind another trusted proxy, which does read HTTP.
        (proxy_header_of([10, 0, 0, 1]), "X-Forwarded-For: 203.0.113.9\r\n", "203.0.113.9"),
    ] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(&header).await;
        let raw = websocket(raw, lines).await;
        assert_eq!(address(&server), expected.parse::<IpAddr>().unwrap(), "{lines}");
        drop(raw);
        wait_for_connections(&server, 0).await;
    }
    // In one write with the handshake and the first request, and byte by byte.
    let mut bytes = proxy_header_of([192, 0, 2, 1]);
    bytes.extend(handshake("/", "").bytes());
    bytes.extend(frame(TEXT, br#"{"id":1,"type":"store.buckets"}"#));
    for pieces in [1, bytes.len()] {
        let mut raw = RawClient::connect(&server).await;
        raw.stream.set_nodelay(true).unwrap();
        for piece in bytes.chunks(bytes.len() / pieces) {
            raw.write(piece).await;
        }
        assert_eq!(raw.head().await.0, 101);
        assert_eq!(raw.json().await["type"], "welcome");
        assert_eq!(raw.json().await["id"], 1);
        assert_eq!(address(&server), IpAddr::from([192, 0, 2, 1]));
        drop(raw);
        wait_for_connections(&server, 0).await;
    }
}

/// Reads the number of rejected PROXY headers. Connects from an untrusted address, because trusted proxies must send a header.
async fn rejected_headers(server: &Server) -> u64 {
    let mut raw = RawClient::connect_from(server, [127, 0, 0, 2]).await;
    raw.write(b"GET /metrics HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
    let (_, _, page) = raw.response().await;
    let line = page.lines().find_map(|line| line.strip_prefix("tidewire_proxy_headers_refused_total "));
    line.unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_without_a_valid_proxy_header_are_rejected_and_counted() {
    let server = serve(with_proxy_protocol().handshake_timeout(Duration::from_millis(200))).await;
    let (trusted, other) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    let too_long = [&proxy_header(0x21, 0x11, &[])[..14], &[0xff, 0xff]].concat();
    let hostile: [(_, Vec<u8>); 6] = [
        (trusted, handshake("/", "").into_bytes()),
        (trusted, b"PROXY TCP4 192.0.2.1 198.51.100.2 4711 8080\r\n".to_vec()),
        (trusted, proxy_header(0x21, 0x11, &[1, 2, 3])),
        (trusted, too_long),
        // An incomplete header is rejected after the timeout.
        (trusted, proxy_header_of([192, 0, 2, 1])[..20].to_vec()),
        (other, [proxy_header_of([192, 0, 2, 1]), handshake("/", "").into_bytes()].concat()),
    ];
    for (count, (own, bytes)) in hostile.into_iter().enumerate() {
        let mut raw = RawClient::connect_from(&server, own).await;
        raw.write(&bytes).await;
        while raw.read_some().await {}
        assert_eq!(raw.take_input(), "", "no response is sent");
        assert_eq!(rejected_headers(&server).await, count as u64 + 1, "{bytes:?}");
    }
    // Untrusted peers connect as clients.
    let raw = websocket(RawClient::connect_from(&server, other).await, "").await;
    assert_eq!(address(&server), IpAddr::from(other));
    drop(raw);
    // An idle peer is closed, and is not counted as rejected.
    let mut idle = RawClient::connect_from(&server, other).await;
    assert!(!idle.read_some().await);
    assert_eq!(rejected_headers(&server).await, 6);
}

/// Connects like a proxy that does not terminate TLS.
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
async fn proxy_header_precedes_tls() {
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
async fn proxy_protocol_requires_trusted_proxies() {
    let options = options().proxy_protocol(true);
    let started = Server::start(Store::memory(StoreOptions::default()), options).await;
    assert!(matches!(started, Err(StartError::NoTrustedProxies)));
}
