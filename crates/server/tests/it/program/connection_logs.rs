//! Log lines about the admin address, rejected origins and proxy headers.

use serde_json::{Value as Json, json};
use tidewire_testkit::Process;

use super::{ServerProcess, WorkDir, log};
use crate::raw_client::{RawClient, handshake};

/// Returns the log lines with this message.
fn lines(process: &Process, message: &str) -> Vec<Json> {
    log(process).into_iter().filter(|line| line["message"] == message).collect()
}

/// Performs a handshake with these header lines. Returns the status.
async fn status(server: &ServerProcess, lines: &str) -> u16 {
    let address = server.url.trim_start_matches("ws://").trim_end_matches('/');
    let mut raw = RawClient::connect_to(address.parse().unwrap()).await;
    raw.write(handshake("/", lines).as_bytes()).await;
    raw.head().await.0
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_address_is_logged() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory", "--admin-listen", "127.0.0.1:0"]);
    server.process.wait_for_line("admin listener started");
    assert!(server.process.stdout().starts_with(&server.url), "the first line is the URL");
    let [line] = &lines(&server.process, "admin listener started")[..] else { panic!("{}", server.process.output()) };
    let mut raw = RawClient::connect_to(line["address"].as_str().unwrap().parse().unwrap()).await;
    raw.write(b"GET /metrics HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
    let (status, _, page) = raw.response().await;
    assert!(status == 200 && page.contains("tidewire_connections 0"), "{page}");
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_origin_is_logged_with_its_headers_and_the_setting() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory"]);
    for _ in 0..3 {
        assert_eq!(status(&server, "Origin: https://evil.example\r\n").await, 403);
    }
    let process = server.stop();
    let [line] = &lines(&process, "origin rejected")[..] else { panic!("{}", process.output()) };
    assert_eq!((&line["level"], &line["setting"]), (&json!("WARN"), &json!("allowedOrigins")), "{line}");
    assert_eq!((&line["origin"], &line["host"]), (&json!("\"https://evil.example\""), &json!("\"tide\"")), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn untrusted_forwarding_headers_are_logged_once() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory"]);
    for _ in 0..3 {
        assert_eq!(status(&server, "X-Forwarded-For: 192.0.2.1\r\n").await, 101);
    }
    let process = server.stop();
    let message = "ignored forwarding headers from an untrusted peer";
    let [line] = &lines(&process, message)[..] else { panic!("{}", process.output()) };
    assert_eq!((&line["level"], &line["setting"]), (&json!("WARN"), &json!("trustedProxies")), "{line}");

    let server = dir.start(&["--engine", "memory", "--trusted-proxies", "127.0.0.0/8"]);
    for _ in 0..3 {
        assert_eq!(status(&server, "X-Forwarded-For: 192.0.2.1\r\n").await, 101);
    }
    for _ in 0..3 {
        assert_eq!(status(&server, "X-Forwarded-For: me\r\n").await, 101);
    }
    let process = server.stop();
    assert_eq!(lines(&process, message).len(), 0);
    let message = "invalid forwarding headers, using the address of the proxy";
    let [line] = &lines(&process, message)[..] else { panic!("{}", process.output()) };
    assert!(line["error"].as_str().unwrap().contains("\"me\""), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_proxy_header_is_logged() {
    let dir = WorkDir::new();
    dir.file("c.json", json!({"engine": "memory", "trustedProxies": ["127.0.0.1"], "proxyProtocol": true}).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let address = server.url.trim_start_matches("ws://").trim_end_matches('/');
    for _ in 0..3 {
        let mut raw = RawClient::connect_to(address.parse().unwrap()).await;
        raw.write(handshake("/", "").as_bytes()).await;
        while raw.read_some().await {}
    }
    let process = server.stop();
    let [line] = &lines(&process, "socket rejected because of its PROXY protocol header")[..] else {
        panic!("{}", process.output())
    };
    assert_eq!(line["settings"], "trustedProxies, proxyProtocol", "{line}");
}
