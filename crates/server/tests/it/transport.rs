//! The way in: paths, plain HTTP, origins, sizes, kinds of messages.

use futures_util::SinkExt as _;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, is_left_with, options, serve};
use crate::raw::{Raw, TEXT, frame, handshake};

#[tokio::test(flavor = "multi_thread")]
async fn the_path_counts_and_its_query_does_not() {
    let options = options().path("/live");
    let server = serve(options).await;
    assert!(server.url().ends_with("/live"));
    Client::connect(&server).await.ask("store.buckets", json!({})).await;
    Client::connect_to(&format!("{}?token=x&y", server.url())).await.ask("store.buckets", json!({})).await;
    for path in ["/", "/live/", "/Live", "/live/x", "//live", "/?/live"] {
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake(path, "").as_bytes()).await;
        assert_eq!(raw.response().await.0, 404, "{path}");
    }
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_is_answered_on_one_connection() {
    let server = serve(options()).await;
    let mut raw = Raw::connect(&server).await;
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
        let (answered, head, body) = raw.response().await;
        assert_eq!(answered, status, "{request}");
        assert!(body.contains(word), "{request}: {body}");
        assert_eq!(head.contains("upgrade: websocket"), status == 426, "{head}");
    }
    // And the same connection can still become a WebSocket.
    raw.write(handshake("/", "").as_bytes()).await;
    assert_eq!(raw.head().await.0, 101);
    assert_eq!(raw.json().await["type"], "welcome");
    assert_eq!(server.connection_count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_tell_of_connections() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    client.ask("store.buckets", json!({})).await;
    let mut raw = Raw::connect(&server).await;
    raw.write(b"GET /metrics HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    let (_, _, page) = raw.response().await;
    for line in ["tidewire_connections 1", "tidewire_connections_admitted_total 1", "tidewire_requests_total 1"] {
        assert!(page.lines().any(|known| known == line), "{line} in {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_handshake_is_refused() {
    let server = serve(options()).await;
    let whole = handshake("/", "");
    for (text, status) in [
        (whole.replace("GET", "POST"), 400),
        (whole.replace("keep-alive, Upgrade", "keep-alive"), 400),
        (whole.replace("Version: 13", "Version: 8"), 426),
        (whole.replace("dGhlIHNhbXBsZSBub25jZQ==", "dGhlIHNhbXBsZQ=="), 400),
        (whole.replace("dGhlIHNhbXBsZSBub25jZQ==", "not base64 at all!!!!"), 400),
        (handshake("/", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), 400),
        (whole.replace("HTTP/1.1", "HTTP/1.0"), 400),
    ] {
        let mut raw = Raw::connect(&server).await;
        raw.write(text.as_bytes()).await;
        assert_eq!(raw.response().await.0, status, "{text}");
        assert!(!raw.more().await, "the connection ends: {text}");
    }
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_has_to_be_allowed_if_there_is_one() {
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
        let mut raw = Raw::connect(&server).await;
        raw.write(handshake("/", lines).as_bytes()).await;
        if status == 101 {
            assert_eq!(raw.head().await.0, status, "{lines}");
        } else {
            assert_eq!(raw.response().await.0, status, "{lines}");
            assert!(!raw.more().await, "the connection ends");
        }
    }
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_extension_and_no_protocol_is_agreed_on() {
    let server = serve(options()).await;
    let mut raw = Raw::connect(&server).await;
    let asked = "Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Protocol: chat\r\n";
    raw.write(handshake("/", asked).as_bytes()).await;
    let (status, head) = raw.head().await;
    assert_eq!(status, 101);
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    assert!(!head.contains("-extensions") && !head.contains("-protocol"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_with_the_handshake_is_not_lost() {
    let server = serve(options()).await;
    let mut raw = Raw::connect(&server).await;
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
async fn a_message_may_be_as_long_as_the_limit_and_not_a_byte_longer() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    for length in [300_000, 1 << 20] {
        client.send_text(padded(length)).await;
        assert_eq!(client.reply(1).await["type"], "result");
    }
    let mut raw = Raw::websocket(&server).await;
    let whole = padded((1 << 20) + 1);
    // It is enough to announce it.
    raw.write(&frame(TEXT, whole.as_bytes())[..64]).await;
    assert_eq!(raw.closed().await.0, 1009);
    let mut raw = Raw::websocket(&server).await;
    let (first, second) = whole.as_bytes().split_at(600_000);
    raw.write(&frame(0x01, first)).await;
    raw.write(&frame(0x80, second)[..64]).await;
    assert_eq!(raw.closed().await.0, 1009);
    is_left_with(&server, 1).await;
    client.ask("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_smaller_limit_is_as_exact() {
    let options = options().max_payload_bytes(128);
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    client.send_text(padded(128)).await;
    assert_eq!(client.reply(1).await["type"], "result");
    client.send_text(padded(129)).await;
    assert_eq!(client.closed().await.0, 1009);
    drop(client);
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn binary_messages_are_not_supported() {
    let server = serve(options()).await;
    let mut other = Client::connect(&server).await;
    for body in [&b""[..], br#"{"id":1,"type":"store.buckets"}"#] {
        let mut client = Client::connect(&server).await;
        // What was asked before is answered.
        let id = client.send("store.buckets", json!({})).await;
        client.socket.send(Message::binary(body.to_vec())).await.unwrap();
        client.reply(id).await;
        assert_eq!(client.closed().await, (1003, "binary_not_supported".to_owned()));
    }
    other.ask("store.buckets", json!({})).await;
    is_left_with(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pings_of_the_websocket_are_answered() {
    let server = serve(options()).await;
    let mut raw = Raw::websocket(&server).await;
    raw.write(&frame(0x89, b"tide")).await;
    assert_eq!(raw.frame().await, Some((10, b"tide".to_vec())));
    // A pong that nobody asked for is nothing.
    raw.write(&frame(0x8a, b"ebb")).await;
    raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
    assert_eq!(raw.json().await["id"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_closes_or_leaves_is_forgotten() {
    let server = serve(options()).await;
    let mut raw = Raw::websocket(&server).await;
    raw.write(&frame(0x88, &[0x03, 0xe8, b'b', b'y', b'e'])).await;
    assert_eq!(raw.closed().await, (1000, String::new()));
    is_left_with(&server, 0).await;
    let mut raw = Raw::websocket(&server).await;
    raw.stream.shutdown().await.unwrap();
    assert!(raw.frame().await.is_none_or(|(kind, _)| kind == 8));
    is_left_with(&server, 0).await;
    let raw = Raw::websocket(&server).await;
    raw.stream.set_zero_linger().unwrap();
    drop(raw);
    is_left_with(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_may_not_be_endless() {
    let server = serve(options()).await;
    let mut raw = Raw::connect(&server).await;
    let long = format!("X-Long: {}\r\n", "x".repeat(64 * 1024));
    // It may be cut off before it has said all.
    let _ = raw.stream.write_all(handshake("/", &long).as_bytes()).await;
    let mut heard = Vec::new();
    // A reset is an end too.
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut raw.stream, &mut heard).await;
    assert!(heard.is_empty() || heard.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&heard));
    connect_async(server.url()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_dawdles_over_the_handshake_is_cut_off() {
    let options = options().handshake_timeout(std::time::Duration::from_millis(50));
    let server = serve(options).await;
    let whole = handshake("/", "");
    for begun in [&whole[..0], &whole[..1], &whole[..40], &whole[..whole.len() - 2]] {
        let mut raw = Raw::connect(&server).await;
        raw.write(begun.as_bytes()).await;
        // Whether it is told why or not.
        while raw.more().await {}
    }
    // One that was answered may not sit there for ever either.
    let mut raw = Raw::connect(&server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: tide\r\n\r\n").await;
    raw.response().await;
    assert!(!raw.more().await);
    // Once it is a WebSocket, it may be silent for as long as it likes.
    let mut client = Client::connect(&server).await;
    let mut raw = Raw::connect(&server).await;
    assert!(!raw.more().await);
    client.ask("store.buckets", json!({})).await;
}
