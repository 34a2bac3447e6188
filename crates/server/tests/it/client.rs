//! Helpers to start a server, and a WebSocket client that is independent of the server's own code.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value as Json, json};
use tidewire::auth::{Session, TokenValidator, Validation};
use tidewire::{Heartbeat, Server, ServerOptions};
use tidewire_store::{Clock, Store, StoreOptions};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, client_async, connect_async_with_config};

/// Returns server options with a free port, and without pings.
pub(crate) fn options() -> ServerOptions {
    // No pings, so that a client on a slow machine is not considered dead.
    ServerOptions::default().port(0).heartbeat(Heartbeat::default().interval(Duration::from_hours(1)))
}

/// Starts a server over an in-memory store.
pub(crate) async fn serve(options: ServerOptions) -> Server {
    serve_store(Store::memory(StoreOptions::default()), options).await
}

pub(crate) async fn serve_store(store: Store, options: ServerOptions) -> Server {
    Server::start(store, options).await.unwrap()
}

/// Returns the configuration of a bucket of notes: `id` is generated, `text` required, `rank` a number with an index.
pub(crate) fn notes_config() -> Json {
    json!({
        "key": "id",
        "schema": {
            "id": {"type": "string", "generated": "uuid"},
            "text": {"type": "string", "required": true},
            "rank": {"type": "number"},
        },
        "indexes": ["rank"],
    })
}

/// A WebSocket client. It queues pushes that arrive while it waits for a reply.
pub(crate) struct Client {
    pub(crate) socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub(crate) welcome: Json,
    next_id: u64,
    pushed: VecDeque<Json>,
}

impl Client {
    /// Connects and waits for the welcome message.
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(&server.url()).await
    }

    pub(crate) async fn connect_to(url: &str) -> Self {
        // With TCP_NODELAY: tests with a paused clock must not wait for Nagle's algorithm.
        let (socket, _) = connect_async_with_config(url, None, true).await.unwrap();
        Self::welcomed(socket).await
    }

    /// Connects from another address of the loopback network.
    pub(crate) async fn connect_from(address: IpAddr, server: &Server) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((address, 0).into()).unwrap();
        let stream = MaybeTlsStream::Plain(socket.connect(server.address()).await.unwrap());
        Self::welcomed(client_async(server.url(), stream).await.unwrap().0).await
    }

    async fn welcomed(socket: WebSocketStream<MaybeTlsStream<TcpStream>>) -> Self {
        let mut client = Self { socket, welcome: Json::Null, next_id: 1, pushed: VecDeque::new() };
        client.welcome = client.receive().await;
        assert_eq!(client.welcome["type"], "welcome");
        client
    }

    /// Sends a text message.
    pub(crate) async fn send_text(&mut self, text: impl Into<String>) {
        self.socket.send(Message::text(text.into())).await.unwrap();
    }

    /// Sends a request without waiting for its reply. Returns the request id.
    pub(crate) async fn send(&mut self, operation: &str, params: Json) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = params;
        request["id"] = json!(id);
        request["type"] = json!(operation);
        self.send_text(request.to_string()).await;
        id
    }

    /// Receives the next text message of any type.
    pub(crate) async fn receive(&mut self) -> Json {
        loop {
            match self.next().await {
                Message::Text(text) => return serde_json::from_str(text.as_str()).unwrap(),
                Message::Ping(_) | Message::Pong(_) => {}
                other => panic!("expected a text message, got {other:?}"),
            }
        }
    }

    async fn next(&mut self) -> Message {
        let next = tokio::time::timeout(PATIENCE, self.socket.next()).await.expect("no message within the timeout");
        next.expect("connection ended").expect("connection failed")
    }

    /// Receives the reply to a request, and queues the pushes that arrive before it.
    pub(crate) async fn reply(&mut self, id: u64) -> Json {
        loop {
            let message = self.receive().await;
            if message.get("id").is_some() {
                assert_eq!(message["id"], json!(id), "replies must come in order: {message}");
                return message;
            }
            self.pushed.push_back(message);
        }
    }

    /// Sends a request and returns the data of its reply; absent data is null.
    pub(crate) async fn call(&mut self, operation: &str, params: Json) -> Json {
        let id = self.send(operation, params).await;
        let reply = self.reply(id).await;
        assert_eq!(reply["type"], "result", "{operation}: {reply}");
        reply["data"].clone()
    }

    /// Sends a request that must fail. Returns the error code and the whole error.
    pub(crate) async fn call_err(&mut self, operation: &str, params: Json) -> (String, Json) {
        let id = self.send(operation, params).await;
        let reply = self.reply(id).await;
        assert_eq!(reply["type"], "error", "{operation}: {reply}");
        (reply["code"].as_str().unwrap().to_owned(), reply)
    }

    /// Returns the first queued push, or receives the next message, which must be a push or a notice.
    pub(crate) async fn push(&mut self) -> Json {
        if let Some(push) = self.pushed.pop_front() {
            return push;
        }
        let message = self.receive().await;
        assert!(message.get("id").is_none(), "expected a push: {message}");
        message
    }

    /// Removes and returns the queued pushes.
    pub(crate) fn take_pushes(&mut self) -> Vec<Json> {
        self.pushed.drain(..).collect()
    }

    /// Adds a push to the queue.
    pub(crate) fn requeue_push(&mut self, push: Json) {
        self.pushed.push_back(push);
    }

    /// Discards the queued pushes.
    pub(crate) fn discard_pushes(&mut self) {
        self.pushed.clear();
    }

    /// Sends a request. Returns whether no push has arrived before its reply.
    pub(crate) async fn has_no_pushes(&mut self) -> bool {
        self.call("store.buckets", json!({})).await;
        self.pushed.is_empty()
    }

    /// Waits for the close frame. Returns its code and reason; messages before it are discarded.
    pub(crate) async fn closed(&mut self) -> (u16, String) {
        loop {
            match self.next().await {
                Message::Close(Some(close)) => return (close.code.into(), close.reason.to_string()),
                Message::Close(None) => return (1005, String::new()),
                _ => {}
            }
        }
    }
}

/// A WebSocket client or an in-process client, for tests that run the same operations over both.
pub(crate) trait RpcClient {
    /// Sends a request and returns the data of its reply; absent data is null.
    async fn call(&mut self, operation: &str, params: Json) -> Json;

    /// Sends a request that must fail. Returns the error code and the whole error.
    async fn call_err(&mut self, operation: &str, params: Json) -> (String, Json);
}

impl RpcClient for Client {
    async fn call(&mut self, operation: &str, params: Json) -> Json {
        Self::call(self, operation, params).await
    }

    async fn call_err(&mut self, operation: &str, params: Json) -> (String, Json) {
        Self::call_err(self, operation, params).await
    }
}

impl RpcClient for tidewire::Client {
    async fn call(&mut self, operation: &str, params: Json) -> Json {
        let reply = self.request(operation, &params).await;
        reply.unwrap_or_else(|error| panic!("{operation} {params}: {error}"))
    }

    async fn call_err(&mut self, operation: &str, params: Json) -> (String, Json) {
        let error = self.request::<Json>(operation, &params).await.expect_err("request must fail");
        let code = error.code.as_str().to_owned();
        let mut message = json!({"id": 0, "type": "error", "code": code, "message": error.message});
        if let Some(details) = error.details {
            message["details"] = *details;
        }
        (code, message)
    }
}

/// Waits until this number of connections is left. Checks that the server keeps no state of the closed ones.
pub(crate) async fn wait_for_connections(server: &Server, connections: usize) {
    wait_until_async("the other connections have closed", PATIENCE, async || server.connection_count() == connections)
        .await;
    let rows = server.connections();
    let subscriptions: usize = rows.iter().map(|row| row.store_subscriptions).sum();
    let stats = server.stats();
    assert_eq!((rows.len(), stats.connections, stats.subscriptions), (connections, connections, subscriptions));
    assert_eq!(stats.wire["connectionCount"], json!(connections));
    assert_eq!(stats.wire["connections"]["active"], json!(connections));
    assert_eq!(stats.wire["connections"]["totalStoreSubscriptions"], json!(subscriptions));
    assert_eq!(stats.wire["store"]["queries"]["activeSubscriptions"], json!(subscriptions));
    assert_eq!(stats.panics, 0);
}

/// Accepts tokens of the form `user:role`. The token `panic` panics, and `slow` never completes.
#[derive(Debug)]
pub(crate) struct RoleTokens;

impl TokenValidator for RoleTokens {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            assert_ne!(token, "panic", "the validator panics because the test asks for it");
            if token == "slow" {
                std::future::pending::<()>().await;
            }
            Ok(token.split_once(':').map(|(user, role)| Session::new(user, [role])))
        })
    }
}

/// Returns an in-memory store with a manual clock.
pub(crate) fn store_with_clock(now: &Arc<AtomicU64>) -> Store {
    let now = Arc::clone(now);
    Store::memory(StoreOptions::default().clock(Clock::new(move || now.load(SeqCst))))
}
