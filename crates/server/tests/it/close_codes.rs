//! Every close code of the server, triggered over a real socket. [`Disconnect::ALL`] lists them.

use std::time::Duration;

use futures_util::SinkExt as _;
use serde_json::json;
use tidewire::auth::Auth;
use tidewire::{Backpressure, Disconnect, Heartbeat, Memory, Server, ServerOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Client, RoleTokens, options, serve, wait_for_connections};
use crate::metrics_page::{MetricsPage, wait_for_metrics};
use crate::raw_client::{RawClient, TEXT, frame, handshake};

/// The code and reason of a close frame.
type Closed = (u16, String);

macro_rules! disconnects {
    ($($name:ident $code:literal $reason:literal in $scenario:ident;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $scenario() {
                assert_eq!(scenarios::$scenario().await, ($code, $reason.to_owned()));
            }
        )*

        #[test]
        fn every_close_code_has_a_test() {
            let tested = [$((Disconnect::$name, $code, $reason)),*];
            let expected: Vec<_> = Disconnect::ALL.iter().map(|one| (*one, one.code, one.reason)).collect();
            assert_eq!(tested.as_slice(), expected);
        }
    };
}

disconnects! {
    SERVER_SHUTDOWN 1000 "server_shutdown" in server_that_stops_closes_its_connections;
    NORMAL_CLOSURE 1000 "normal_closure" in program_can_disconnect_a_client;
    SERVER_SHUTTING_DOWN 1001 "server_shutting_down" in handshake_during_the_grace_period_is_rejected;
    BINARY_NOT_SUPPORTED 1003 "binary_not_supported" in binary_message_closes_the_connection;
    INTERNAL_ERROR 1011 "internal_error" in panic_closes_the_connection;
    MEMORY_LIMIT 1013 "memory_limit" in message_above_the_memory_limit_closes_the_connection;
    HEARTBEAT_TIMEOUT 4001 "heartbeat_timeout" in missing_pong_closes_the_connection;
    SESSION_REVOKED 4002 "session_revoked" in revoked_session_closes_the_connection;
    TOO_MANY_CONNECTIONS 4003 "too_many_connections" in connection_above_the_address_limit_is_rejected;
    SLOW_CONSUMER 4008 "slow_consumer" in client_that_does_not_read_is_disconnected;
    LOGIN_TIMEOUT 4009 "login_timeout" in client_that_does_not_log_in_is_disconnected;
}

/// Returns options with optional login by the tokens of [`RoleTokens`].
fn with_tokens() -> ServerOptions {
    options().auth(Auth::new(RoleTokens).required(false))
}

/// Returns the id of the only connection over a socket.
fn socket_id(server: &Server) -> String {
    let ids: Vec<String> = server.connections().into_iter().map(|row| row.connection_id).collect();
    let [id] = &ids.iter().filter(|id| id.starts_with("conn-")).collect::<Vec<_>>()[..] else { panic!("{ids:?}") };
    (*id).clone()
}

/// The scenarios. Each returns the close frame that the client receives.
mod scenarios {
    use super::*;

    pub(super) async fn server_that_stops_closes_its_connections() -> Closed {
        let server = serve(options()).await;
        let mut client = Client::connect(&server).await;
        let stopping = tokio::spawn(server.stop(Duration::ZERO));
        let closed = client.closed().await;
        drop(client);
        timeout(PATIENCE, stopping).await.expect("the server stops").unwrap();
        closed
    }

    pub(super) async fn program_can_disconnect_a_client() -> Closed {
        let server = serve(options()).await;
        let (mut client, local) = (Client::connect(&server).await, server.client(None));
        let id = socket_id(&server);
        for unknown in ["", "conn-", "conn-999", "local-1", &id.to_uppercase(), &format!(" {id}")] {
            assert!(!server.disconnect(unknown), "{unknown:?}");
        }
        let names: serde_json::Value =
            local.request("store.buckets", ()).await.expect("the in-process client stays connected");
        assert_eq!(names["count"], 0);
        assert!(server.disconnect(&id));
        let closed = client.closed().await;
        drop(client);
        wait_for_connections(&server, 1).await;
        assert!(!server.disconnect(&id), "the connection has closed");
        assert_eq!(MetricsPage::read(&server).await.ended("handle"), 1);
        closed
    }

    /// The other client stays connected, so that the grace period does not end.
    pub(super) async fn handshake_during_the_grace_period_is_rejected() -> Closed {
        let server = serve(options()).await;
        let mut other = Client::connect(&server).await;
        let (whole, mut late) = (handshake("/", ""), RawClient::connect(&server).await);
        let (first, rest) = whole.split_at(whole.len() / 2);
        late.write(first.as_bytes()).await;
        late.wait_until_read().await;
        let stopping = tokio::spawn(server.stop(Duration::from_hours(1)));
        assert_eq!(other.receive().await["event"], "shutdown");
        late.write(rest.as_bytes()).await;
        assert_eq!(late.head().await.0, 101);
        let closed = late.immediate_close().await;
        assert!(!stopping.is_finished());
        drop(other);
        timeout(PATIENCE, stopping).await.expect("the server stops").unwrap();
        closed
    }

    pub(super) async fn binary_message_closes_the_connection() -> Closed {
        let server = serve(options()).await;
        let mut client = Client::connect(&server).await;
        client.socket.send(Message::binary(vec![1, 2, 3])).await.unwrap();
        let closed = client.closed().await;
        wait_for_metrics(&server, "the close is counted", |page| page.ended("handler") == 1).await;
        closed
    }

    pub(super) async fn panic_closes_the_connection() -> Closed {
        let server = serve(with_tokens()).await;
        let mut client = Client::connect(&server).await;
        client.send("auth.login", json!({"token": "panic"})).await;
        let closed = client.closed().await;
        let page = wait_for_metrics(&server, "the panic is counted", |page| page.get("panics_total") == 1).await;
        assert_eq!(page.ended("panic"), 1);
        closed
    }

    pub(super) async fn message_above_the_memory_limit_closes_the_connection() -> Closed {
        let options = options().memory(Memory::default().max_bytes(256 * 1024));
        let server = serve(options).await;
        let mut raw = RawClient::websocket(&server).await;
        let message = frame(TEXT, &vec![b'x'; 1 << 20]);
        raw.write(&message[..512 * 1024]).await;
        let closed = raw.closed().await;
        wait_for_metrics(&server, "the close is counted", |page| {
            page.get("memory_closed_total") == 1
                && page.ended("memory_limit") == 1
                && page.get("memory_used_bytes") == 0
        })
        .await;
        assert_eq!(MetricsPage::read(&server).await.get("memory_max_bytes"), 256 * 1024);
        closed
    }

    pub(super) async fn missing_pong_closes_the_connection() -> Closed {
        let interval = Duration::from_millis(20);
        let server = serve(options().heartbeat(Heartbeat::default().interval(interval).timeout(interval))).await;
        let mut client = Client::connect(&server).await;
        assert_eq!(client.receive().await["type"], "ping");
        let closed = client.closed().await;
        wait_for_metrics(&server, "the missed heartbeat is counted", |page| page.get("heartbeats_missed_total") == 1)
            .await;
        closed
    }

    pub(super) async fn revoked_session_closes_the_connection() -> Closed {
        let server = serve(with_tokens()).await;
        let mut client = Client::connect(&server).await;
        client.call("auth.login", json!({"token": "mara:admin"})).await;
        assert_eq!(server.revoke_user("mara"), 1);
        let notice = client.receive().await;
        assert_eq!((&notice["type"], &notice["event"]), (&json!("system"), &json!("session_revoked")));
        let closed = client.closed().await;
        let page = MetricsPage::read(&server).await;
        assert_eq!((page.get("sessions_revoked_total"), page.get("pushes_dropped_total")), (1, 0));
        closed
    }

    pub(super) async fn connection_above_the_address_limit_is_rejected() -> Closed {
        let options = options().max_connections_per_ip(1);
        let server = serve(options).await;
        let mut first = Client::connect(&server).await;
        let mut second = RawClient::connect(&server).await;
        second.write(handshake("/", "").as_bytes()).await;
        assert_eq!(second.head().await.0, 101, "a browser sees the reason only in a close frame");
        let closed = second.immediate_close().await;
        first.call("store.buckets", json!({})).await;
        drop(first);
        // The permit of the first connection is released, so that the metrics can be read.
        let mut page = None;
        wait_until_async("the first connection has closed", PATIENCE, async || {
            page = MetricsPage::try_read(&server).await;
            page.is_some()
        })
        .await;
        let page = page.unwrap();
        assert_eq!((page.get("connections_admitted_total"), page.get("connections_refused_total")), (1, 1));
        closed
    }

    pub(super) async fn client_that_does_not_read_is_disconnected() -> Closed {
        let options = options().backpressure(Backpressure::default().max_buffered_bytes(64 * 1024));
        let server = serve(options).await;
        let mut writer = server.client(None);
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
        crate::client::RpcClient::call(&mut writer, "store.defineBucket", json!({"name": "b", "config": config})).await;
        let mut stalled = RawClient::with_small_buffer(&server).await;
        for id in 0..5 {
            stalled.send(&json!({"id": id, "type": "store.subscribe", "config": {"bucket": "b"}}).to_string()).await;
            assert_eq!(stalled.json().await["type"], "result");
        }
        let pad = "x".repeat(20_000);
        for number in 0..20_000 {
            let record = json!({"id": "x", "number": number, "pad": pad});
            writer.insert::<serde_json::Value>("b", record).await.unwrap();
            if server.stats().slow_consumers == 1 {
                break;
            }
        }
        assert_eq!(MetricsPage::read(&server).await.get("slow_consumers_total"), 1);
        stalled.closed().await
    }

    pub(super) async fn client_that_does_not_log_in_is_disconnected() -> Closed {
        let auth = Auth::new(RoleTokens).login_timeout(Duration::from_millis(50));
        let server = serve(options().auth(auth)).await;
        let mut client = Client::connect(&server).await;
        let closed = client.closed().await;
        assert_eq!(MetricsPage::read(&server).await.get("logins_timed_out_total"), 1);
        closed
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_by_the_program_abandons_the_request_in_flight() {
    let server = serve(with_tokens()).await;
    let mut client = Client::connect(&server).await;
    client.send("auth.login", json!({"token": "slow"})).await;
    wait_for_metrics(&server, "the request is read", |page| page.get("messages_received_total") == 1).await;
    assert_eq!(MetricsPage::read(&server).await.get("requests_total"), 0, "the request is in flight");
    assert!(server.disconnect(&socket_id(&server)));
    assert_eq!(client.closed().await, (1000, "normal_closure".to_owned()));
    let page = wait_for_metrics(&server, "the request has ended", |page| page.get("requests_total") == 1).await;
    assert_eq!(page.requests("auth.login", "abandoned"), 1);
    assert_eq!(page.get("requests_failed_total"), 0, "the request was not answered");
}
