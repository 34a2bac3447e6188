//! What the program logs of its edge: refused origins.

use serde_json::{Value as Json, json};
use tidewire_testkit::Process;

use super::{ServerProcess, WorkDir, log};
use crate::raw::{Raw, handshake};

/// The log lines with this message.
fn lines(process: &Process, message: &str) -> Vec<Json> {
    log(process).into_iter().filter(|line| line["message"] == message).collect()
}

/// The status of a handshake with these header lines.
async fn status(server: &ServerProcess, lines: &str) -> u16 {
    let address = server.url.trim_start_matches("ws://").trim_end_matches('/');
    let mut raw = Raw::connect_to(address.parse().unwrap()).await;
    raw.write(handshake("/", lines).as_bytes()).await;
    raw.head().await.0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_origin_is_logged_with_its_headers_and_the_setting() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory"]);
    for _ in 0..3 {
        assert_eq!(status(&server, "Origin: https://evil.example\r\n").await, 403);
    }
    let process = server.stop();
    let [line] = &lines(&process, "origin refused")[..] else { panic!("{}", process.output()) };
    assert_eq!((&line["level"], &line["setting"]), (&json!("WARN"), &json!("allowedOrigins")), "{line}");
    assert_eq!((&line["origin"], &line["host"]), (&json!("\"https://evil.example\""), &json!("\"tide\"")), "{line}");
}
