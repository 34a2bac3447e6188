//! Handshakes, plain HTTP, origins, message sizes and frame types.

use futures_util::SinkExt as _;
use serde_json::json;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, options, serve, wait_for_connections};
use crate::raw_client::{RawClient, TEXT, frame, handshake};

#[tokio::test(flavor = "multi_thread")]
async fn path_must_match_and_its_query_is_ignored() {
    let options = options().path("/live");
    let server = serve(options).await;
    assert!(server.url().ends_with("/live"));
    Client::connect(&server).await.call("store.buckets", json!({})).await;
    Client::connect_to(&format!("{}?token=x&y", server.url())).await.call("store.buckets", json!({})).await;
    for path in ["/", "/live/", "/Live", "/live/x", "//live", "/?/live"] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake(path, "").as_bytes()).await;
        assert_eq!(raw.response().await.0, 404, "{path}");
    }
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_requests_share_a_connection() {
    let server = serve(options()).await;
    let mut raw = RawClient::connect(&server).await;
    for (request, status, word) in [
        ("GET / HTTP/1.1", 426, "WebSocket"),
        ("POST / HTTP/1.1", 426, "WebSocket"),
        ("GET /health HTTP/1.1", 200, "\"status\":\"ok\""),
        ("GET /health?verbose HTTP/1.1", 200, "\"status\":\"ok\""),
        ("GET /metrics HTTP/1.1", 200, "tidewire_connections 0"),
        ("POST /metrics HTTP/1.1", 404, "not found"),
        ("GET /nowhere HTTP/1.1", 404, "not found"),
    ] {
        raw.write(format!("{request}\r\nHost: tide\r\n\r\n").as_bytes()).await;
        let (got, head, body) = raw.response().await;
        assert_eq!(got, status, "{request}");
        assert!(body.contains(word), "{request}: {body}");
        assert_eq!(head.contains("upgrade: websocket"), status == 426, "{head}");
    }
    // The same connection can still be upgraded.
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.json().await["type"], "welcome");
    assert_eq!(server.connection_count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_connections() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.buckets", json!({})).await;
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /metrics HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    let (_, _, page) = raw.response().await;
    for line in ["tidewire_connections 1", "tidewire_connections_admitted_total 1", "tidewire_requests_total 1"] {
        assert!(page.lines().any(|found| found == line), "{line} in {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_handshakes_are_rejected() {
    let server = serve(options()).await;
    let valid = handshake("/", "");
    for (text, status) in [
        (valid.replace("GET", "POST"), 400),
        (valid.replace("keep-alive, Upgrade", "keep-alive"), 400),
        (valid.replace("Version: 13", "Version: 8"), 426),
        (valid.replace("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZQ=="), 400),
        (valid.replace("dGhlIHNhbXBsZSBub25jZQ==", "not base64 at all!!!!"), 400),
        (handshake("/", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), 400),
        (valid.replace("HTTP/1.1", "HTTP/1.0"), 400),
    ] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(text.as_bytes()).await;
        assert_eq!(raw.response().await.0, status, "{text}");
        assert!(!raw.read_some().await, "the connection ends: {text}");
    }
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn origin_must_be_allowed_if_present() {
    let options = options().allowed_origins(["https://tide.example", "https://ebb.example"]);
    let server = serve(options).await;
    for (lines, status) in [
        ("", 101),
        ("Origin: https://tide.example\r\n", 101),
        ("Origin: https://ebb.example\r\n", 101),
        ("Origin: https://evil.example\r\n", 403),
        ("Origin: https://tide.example.evil.example\r\n", 403),
        ("Origin: null\r\n", 403),
        ("Origin:\r\n", 403),
        ("Origin: https://tide.example\r\nOrigin: https://evil.example\r\n", 403),
    ] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(handshake("/", lines).as_bytes()).await;
        if status == 101 {
            assert_eq!(raw.head().await.0, status, "{lines}");
        } else {
            assert_eq!(raw.response().await.0, status, "{lines}");
            assert!(!raw.read_some().await, "the connection ends");
        }
    }
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_extension_or_subprotocol_is_negotiated() {
    let server = serve(options()).await;
    let mut raw = RawClient::connect(&server).await;
    let offered = "Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Protocol: chat\r\n";
    raw.write(handshake("/", offered).as_bytes()).await;
    let (status, head) = raw.head().await;
    assert_eq!(status, 101);
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    assert!(!head.contains("-extensions") && !head.contains("-protocol"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_after_the_handshake_are_not_lost() {
    let server = serve(options()).await;
    let mut raw = RawClient::connect(&server).await;
    let mut bytes = handshake("/", "").into_bytes();
    bytes.extend(frame(TEXT, br#"{"id":1,"type":"store.buckets"}"#));
    raw.write(&bytes).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.json().await["type"], "welcome");
    assert_eq!(raw.json().await["id"], 1);
}

fn padded(length: usize) -> String {
    let (front, back) = (r#"{"id":1,"type":"store.buckets","pad":""#, "\"}");
    format!("{front}{}{back}", "x".repeat(length - front.len() - back.len()))
}

#[tokio::test(flavor = "multi_thread")]
async fn message_size_limit_is_exact() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    for length in [300_000, 1 << 20] {
        client.send_text(padded(length)).await;
        assert_eq!(client.reply(1).await["type"], "result");
    }
    let mut raw = RawClient::websocket(&server).await;
    let too_long = padded((1 << 20) + 1);
    // The header of the frame is enough.
    raw.write(&frame(TEXT, too_long.as_bytes())[..64]).await;
    assert_eq!(raw.closed().await.0, 1009);
    let mut raw = RawClient::websocket(&server).await;
    let (first, second) = too_long.as_bytes().split_at(600_000);
    raw.write(&frame(0x01, first)).await;
    raw.write(&frame(0x80, second)[..64]).await;
    assert_eq!(raw.closed().await.0, 1009);
    wait_for_connections(&server, 1).await;
    client.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn smaller_message_size_limit_is_exact() {
    let options = options().max_payload_bytes(128);
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    client.send_text(padded(128)).await;
    assert_eq!(client.reply(1).await["type"], "result");
    client.send_text(padded(129)).await;
    assert_eq!(client.closed().await.0, 1009);
    drop(client);
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn binary_messages_are_not_supported() {
    let server = serve(options()).await;
    let mut other = Client::connect(&server).await;
    for body in [&b""[..], br#"{"id":1,"type":"store.buckets"}"#] {
        let mut client = Client::connect(&server).await;
        // Earlier requests are answered.
        let id = client.send("store.buckets", json!({})).await;
        client.socket.send(Message::binary(body.to_vec())).await.unwrap();
        client.reply(id).await;
        assert_eq!(client.closed().await, (1003, "binary_not_supported".to_owned()));
    }
    other.call("store.buckets", json!({})).await;
    wait_for_connections(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn websocket_pings_are_answered() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    raw.write(&frame(0x89, b"tide")).await;
    assert_eq!(raw.frame().await, Some((10, b"tide".to_vec())));
    // An unsolicited pong is ignored.
    raw.write(&frame(0x8a, b"ebb")).await;
    raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
    assert_eq!(raw.json().await["id"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_connections_are_removed() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    raw.write(&frame(0x88, &[0x03, 0xe8, b'b', b'y', b'e'])).await;
    assert_eq!(raw.closed().await, (1000, String::new()));
    wait_for_connections(&server, 0).await;
    let mut raw = RawClient::websocket(&server).await;
    raw.stream.shutdown().await.unwrap();
    assert!(raw.frame().await.is_none_or(|(kind, _)| kind == 8));
    wait_for_connections(&server, 0).await;
    let raw = RawClient::websocket(&server).await;
    raw.stream.set_zero_linger().unwrap();
    drop(raw);
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_head_is_limited() {
    let server = serve(options()).await;
    let mut raw = RawClient::connect(&server).await;
    let long = format!("X-Long: {}\r\n", "x".repeat(64 * 1024));
    // The connection may be closed before everything is written.
    let _ = raw.stream.write_all(handshake("/", &long).as_bytes()).await;
    let mut received = Vec::new();
    // The stream may end with a reset.
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut raw.stream, &mut received).await;
    assert!(received.is_empty() || received.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&received));
    connect_async(server.url()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_handshake_times_out() {
    let options = options().handshake_timeout(std::time::Duration::from_millis(50));
    let server = serve(options).await;
    let full = handshake("/", "");
    for partial in [&full[..0], &full[..1], &full[..40], &full[..full.len() - 2]] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(partial.as_bytes()).await;
        // The server may send a response before it closes the socket.
        while raw.read_some().await {}
    }
    // An idle connection after a response times out too.
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    raw.response().await;
    assert!(!raw.read_some().await);
    // A WebSocket has no such timeout.
    let mut client = Client::connect(&server).await;
    let mut raw = RawClient::connect(&server).await;
    assert!(!raw.read_some().await);
    client.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handshake_with_a_body_is_rejected() {
    let server = serve(options()).await;
    for (more, body) in [("Content-Length: 4\r\n", "tide"), ("Transfer-Encoding: chunked\r\n", "0\r\n\r\n")] {
        let mut raw = RawClient::connect(&server).await;
        raw.write(format!("{}{body}", handshake("/", more)).as_bytes()).await;
        assert_eq!(raw.head().await.0, 400, "{more}");
    }
    let mut raw = RawClient::connect(&server).await;
    raw.write(handshake("/", "Content-Length: 0\r\n").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn http_client_that_does_not_read_is_disconnected() {
    let options = options().max_connections(1).handshake_timeout(std::time::Duration::from_millis(50));
    let server = serve(options).await;
    let raw = RawClient::connect(&server).await;
    // More responses than the socket buffers hold. The client may be disconnected before it has sent all requests.
    let requests = b"GET /metrics HTTP/1.1\r\nHost: tide\r\n\r\n".repeat(20_000);
    let client = raw.split(requests);
    wait_until_async("its permit is released", PATIENCE, async || {
        let mut raw = RawClient::connect(&server).await;
        let _ = raw.stream.write_all(b"GET /health HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
        raw.read_some().await && raw.head().await.0 == 200
    })
    .await;
    drop(client);
}
