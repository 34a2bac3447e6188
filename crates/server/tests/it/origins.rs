//! Which browser pages may connect, by `Origin` and `Host`.

use serde_json::json;
use tidewire::Server;
use tidewire::auth::Auth;

use crate::client::{Client, RoleTokens, options, serve, wait_for_connections};
use crate::metrics_page::metric;
use crate::raw_client::{RawClient, handshake};

/// Performs a handshake with this host and additional header lines. Returns the status and the text of a rejection, which must end
/// the connection.
async fn connect(server: &Server, host: &str, lines: &str) -> (u16, String) {
    let mut raw = RawClient::connect(server).await;
    raw.write(handshake("/", lines).replacen("Host: tide", &format!("Host: {host}"), 1).as_bytes()).await;
    let (status, head) = raw.head().await;
    if status == 101 {
        assert_eq!(raw.json().await["type"], "welcome");
        return (status, String::new());
    }
    assert!(head.contains("connection: close"), "{head}");
    while raw.read_some().await {}
    (status, raw.take_input())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_login_only_local_and_same_host_pages_connect() {
    let options = options().allowed_hosts(["tide.example"]);
    let server = serve(options).await;
    for (host, lines, status) in [
        ("localhost:8080", "", 101),
        ("evil.example", "", 101),
        ("localhost:8080", "Origin: http://localhost:3000\r\n", 101),
        ("127.0.0.1:8080", "Origin: http://app.localhost\r\n", 101),
        ("192.0.2.1:8080", "Origin: http://192.0.2.1\r\n", 101),
        ("tide.example", "Origin: https://tide.example\r\n", 101),
        ("127.0.0.1:8080", "Origin: https://evil.example\r\n", 403),
        ("tide.example", "Origin: https://evil.example\r\n", 403),
        ("evil.example:8080", "Origin: http://evil.example:8080\r\n", 403),
        ("localhost", "Origin: null\r\n", 403),
        ("localhost", "Origin:\r\n", 403),
        ("localhost", "Origin: http://localhost\r\nOrigin: http://localhost\r\n", 403),
        // Only a trusted proxy may set the forwarded host.
        ("evil.example", "Origin: http://evil.example\r\nX-Forwarded-Host: tide.example\r\n", 403),
    ] {
        assert_eq!(connect(&server, host, lines).await.0, status, "{host} {lines}");
    }
    assert_eq!(metric(&server, "origins_refused_total").await, 7);
    wait_for_connections(&server, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejection_names_the_headers_and_the_setting() {
    let server = serve(options()).await;
    let (_, text) = connect(&server, "localhost:8080", "Origin: https://evil.example\r\n").await;
    assert!(text.contains("Origin \"https://evil.example\"") && text.contains("\"localhost:8080\""), "{text}");
    assert!(text.contains("set `allowedOrigins`"), "{text}");
    let (_, text) = connect(&server, "evil.example", "Origin: http://evil.example\r\n").await;
    assert!(text.contains("Host \"evil.example\"") && text.contains("`allowedHosts`"), "{text}");
    let long = format!("Origin: http://{}\r\n", "x".repeat(8000));
    let (status, text) = connect(&server, "localhost", &long).await;
    assert!(status == 403 && text.len() < 500, "{text}");
}

/// A browser does not send a token by itself, so a foreign page cannot log in.
#[tokio::test(flavor = "multi_thread")]
async fn with_required_login_pages_of_any_origin_connect() {
    for is_required in [true, false] {
        let server = serve(options().auth(Auth::new(RoleTokens).required(is_required))).await;
        for origin in ["https://evil.example", "null"] {
            let (status, _) = connect(&server, "tide.example", &format!("Origin: {origin}\r\n")).await;
            assert_eq!(status, if is_required { 101 } else { 403 }, "{origin}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_http_requests_of_pages_are_checked_too() {
    let server = serve(options()).await;
    for path in ["/health", "/metrics", "/", "/nowhere"] {
        let mut raw = RawClient::connect(&server).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\r\n");
        raw.write(request.as_bytes()).await;
        assert_eq!(raw.response().await.0, 403, "{path}");
        assert!(!raw.read_some().await, "the connection ends");
    }
    let mut raw = RawClient::connect(&server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost:3000\r\n\r\n").await;
    assert_eq!(raw.response().await.0, 200);
    Client::connect(&server).await.call("store.buckets", json!({})).await;
}
