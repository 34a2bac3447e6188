//! Shutdown by signals.

use futures_util::StreamExt as _;
use serde_json::json;
use tidewire_testkit::{PATIENCE, Process, wait_until_async};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;

use super::WorkDir;

const SIGNALS: [fn(&Process); 2] = [Process::terminate, Process::interrupt];

#[tokio::test(flavor = "multi_thread")]
async fn signal_starts_the_grace_period() {
    let dir = WorkDir::new();
    for signal in SIGNALS {
        let mut server = dir.start(&["--grace", "3600000"]);
        let mut client = server.client().await;
        signal(&server.process);
        assert_eq!(client.push().await, json!({"type": "system", "event": "shutdown", "gracePeriodMs": 3_600_000}));
        client.call("store.buckets", json!({})).await;
        wait_until_async("new connections fail", PATIENCE, async || connect_async(&server.url).await.is_err()).await;
        client.call("store.buckets", json!({})).await;
        drop(client);
        assert_eq!(server.process.wait().code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_closed_after_the_grace_period() {
    let dir = WorkDir::new();
    dir.file("c.toml", "shutdownGraceMs = 2");
    let mut server = dir.start(&["--config", "c.toml"]);
    let mut client = server.client().await;
    server.process.terminate();
    assert_eq!(client.push().await["gracePeriodMs"], 2);
    assert_eq!(client.closed().await, (1000, "server_shutdown".to_owned()));
    drop(client);
    assert_eq!(server.process.wait().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_grace_period_closes_connections_without_notice() {
    let dir = WorkDir::new();
    let mut server = dir.start(&["--grace", "0", "--engine", "memory"]);
    let mut client = server.client().await;
    server.process.terminate();
    let next = client.socket.next().await;
    assert!(matches!(&next, Some(Ok(Message::Close(Some(close)))) if close.reason == "server_shutdown"), "{next:?}");
    drop(client);
    assert_eq!(server.process.wait().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn second_signal_ends_the_process_immediately() {
    let dir = WorkDir::new();
    for (first, second) in SIGNALS.into_iter().zip([Process::interrupt, Process::interrupt]) {
        let mut server = dir.start(&["--grace", "3600000"]);
        let mut client = server.client().await;
        first(&server.process);
        assert_eq!(client.push().await["event"], "shutdown");
        second(&server.process);
        assert_eq!(server.process.wait().code(), Some(130));
    }
}
