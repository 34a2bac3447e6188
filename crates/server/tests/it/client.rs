//! A server to talk to, and a client that is not ours to talk to it.

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

/// Options of a server on a free port, without pings.
pub(crate) fn options() -> ServerOptions {
    // No pings, so that no client of a slow machine is taken for dead.
    ServerOptions::default().port(0).heartbeat(Heartbeat::default().interval(Duration::from_hours(1)))
}

/// A server over a store in memory.
pub(crate) async fn serve(options: ServerOptions) -> Server {
    serve_store(Store::memory(StoreOptions::default()), options).await
}

pub(crate) async fn serve_store(store: Store, options: ServerOptions) -> Server {
    Server::start(store, options).await.unwrap()
}

/// A bucket of notes: `id` is generated, `text` required, `rank` a number with an index.
pub(crate) fn notes() -> Json {
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

/// A client, which remembers what it was pushed while it waited for a reply.
pub(crate) struct Client {
    pub(crate) socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub(crate) welcome: Json,
    next_id: u64,
    pushed: VecDeque<Json>,
}

impl Client {
    /// Connects, and is welcomed.
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(&server.url()).await
    }

    pub(crate) async fn connect_to(url: &str) -> Self {
        // Without delay: where time is paused, it does not wait for what the system holds back.
        let (socket, _) = connect_async_with_config(url, None, true).await.unwrap();
        Self::welcomed(socket).await
    }

    /// Connects from another address of this machine.
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

    /// Sends text as it is.
    pub(crate) async fn send_text(&mut self, text: impl Into<String>) {
        self.socket.send(Message::text(text.into())).await.unwrap();
    }

    /// Sends a request, and does not wait for its reply. Returns its id.
    pub(crate) async fn send(&mut self, operation: &str, params: Json) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = params;
        request["id"] = json!(id);
        request["type"] = json!(operation);
        self.send_text(request.to_string()).await;
        id
    }

    /// The next message, whatever it is.
    pub(crate) async fn receive(&mut self) -> Json {
        loop {
            match self.next().await {
                Message::Text(text) => return serde_json::from_str(text.as_str()).unwrap(),
                Message::Ping(_) | Message::Pong(_) => {}
                other => panic!("a text message was expected, not {other:?}"),
            }
        }
    }

    async fn next(&mut self) -> Message {
        let next = tokio::time::timeout(PATIENCE, self.socket.next()).await.expect("a message comes in time");
        next.expect("the connection is open").expect("the connection does not fail")
    }

    /// The reply to a request; what is pushed meanwhile is kept.
    pub(crate) async fn reply(&mut self, id: u64) -> Json {
        loop {
            let message = self.receive().await;
            if message.get("id").is_some() {
                assert_eq!(message["id"], json!(id), "replies come in order: {message}");
                return message;
            }
            self.pushed.push_back(message);
        }
    }

    /// Sends a request and gives its data; absent data is null.
    pub(crate) async fn ask(&mut self, operation: &str, params: Json) -> Json {
        let id = self.send(operation, params).await;
        let reply = self.reply(id).await;
        assert_eq!(reply["type"], "result", "{operation}: {reply}");
        reply["data"].clone()
    }

    /// Sends a request that fails, and gives the code, and the whole error.
    pub(crate) async fn fail(&mut self, operation: &str, params: Json) -> (String, Json) {
        let id = self.send(operation, params).await;
        let reply = self.reply(id).await;
        assert_eq!(reply["type"], "error", "{operation}: {reply}");
        (reply["code"].as_str().unwrap().to_owned(), reply)
    }

    /// The next push, or whatever else has no id.
    pub(crate) async fn push(&mut self) -> Json {
        if let Some(push) = self.pushed.pop_front() {
            return push;
        }
        let message = self.receive().await;
        assert!(message.get("id").is_none(), "a push was expected: {message}");
        message
    }

    /// What was pushed so far, and was not asked for.
    pub(crate) fn take_pushes(&mut self) -> Vec<Json> {
        self.pushed.drain(..).collect()
    }

    /// Gives a push back, behind the others.
    pub(crate) fn keep_push(&mut self, push: Json) {
        self.pushed.push_back(push);
    }

    /// Passes over what was pushed so far.
    pub(crate) fn forget_pushes(&mut self) {
        self.pushed.clear();
    }

    /// Whether nothing has been pushed by the time that another request is answered.
    pub(crate) async fn is_silent(&mut self) -> bool {
        self.ask("store.buckets", json!({})).await;
        self.pushed.is_empty()
    }

    /// The code and reason with which the server closes; what comes before is passed over.
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

/// A client of either kind, for tests of operations: it does not matter to them how a request travels.
pub(crate) trait Ask {
    /// Sends a request and returns its data; absent data is null.
    async fn ask(&mut self, operation: &str, params: Json) -> Json;

    /// Sends a request that fails, and returns the code and the whole error.
    async fn fail(&mut self, operation: &str, params: Json) -> (String, Json);
}

impl Ask for Client {
    async fn ask(&mut self, operation: &str, params: Json) -> Json {
        Self::ask(self, operation, params).await
    }

    async fn fail(&mut self, operation: &str, params: Json) -> (String, Json) {
        Self::fail(self, operation, params).await
    }
}

impl Ask for tidewire::Client {
    async fn ask(&mut self, operation: &str, params: Json) -> Json {
        let asked = self.request(operation, &params).await;
        asked.unwrap_or_else(|error| panic!("{operation} {params}: {error}"))
    }

    async fn fail(&mut self, operation: &str, params: Json) -> (String, Json) {
        let error = self.request::<Json>(operation, &params).await.expect_err("it fails");
        let code = error.code.as_str().to_owned();
        let mut message = json!({"id": 0, "type": "error", "code": code, "message": error.message});
        if let Some(details) = error.details {
            message["details"] = *details;
        }
        (code, message)
    }
}

/// Waits until so many connections are left, and sees that nothing else is left of those that went.
pub(crate) async fn is_left_with(server: &Server, connections: usize) {
    wait_until_async("the others have gone", PATIENCE, async || server.connection_count() == connections).await;
    let rows = server.connections();
    let following: usize = rows.iter().map(|row| row.store_subscriptions).sum();
    let stats = server.stats();
    assert_eq!((rows.len(), stats.connections, stats.subscriptions), (connections, connections, following));
    assert_eq!(stats.wire["connectionCount"], json!(connections));
    assert_eq!(stats.wire["connections"]["active"], json!(connections));
    assert_eq!(stats.wire["connections"]["totalStoreSubscriptions"], json!(following));
    assert_eq!(stats.wire["store"]["queries"]["activeSubscriptions"], json!(following));
    assert_eq!(stats.panics, 0);
}

/// Knows tokens that say what they are: `user:role`. `panic` panics, and `slow` takes for ever.
#[derive(Debug)]
pub(crate) struct Tokens;

impl TokenValidator for Tokens {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            assert_ne!(token, "panic", "the validator of a host has a fault");
            if token == "slow" {
                std::future::pending::<()>().await;
            }
            Ok(token.split_once(':').map(|(user, role)| Session::new(user, [role])))
        })
    }
}

/// A store whose time is told by hand.
pub(crate) fn store_at(now: &Arc<AtomicU64>) -> Store {
    let now = Arc::clone(now);
    Store::memory(StoreOptions::default().clock(Clock::new(move || now.load(SeqCst))))
}
