//! The `revoke` command, which sends an operation to a running server.

use std::fmt::Write as _;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use serde_json::{Value as Json, json};
use tidewire::config::{RevokeCommand, ServerUrl};
use tidewire_conn::client::{
    Client, ClientOptions, ClientProtocol, Connect, Connected, Incoming, Pushes, TcpConnector,
};
use tidewire_conn::tls::{TlsClientOptions, TlsConnector};
use tidewire_conn::websocket::{ClientHandshake, Message, WebSocket, WebSocketConnector, WebSocketOptions};

/// Timeout of the connection, including the TLS and WebSocket handshakes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Revokes a user. Returns the summary to print.
pub(crate) fn revoke(command: &RevokeCommand) -> anyhow::Result<String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a thread")?;
    runtime.block_on(async {
        let mut server = Remote::connect(&command.url).await?;
        server.request("auth.login", json!({"token": command.token()})).await.context("cannot log in")?;
        let params = json!({"userId": command.user_id, "reason": command.reason});
        let revoked = server.request("server.revoke", params).await;
        describe(&revoked.with_context(|| format!("cannot revoke {:?}", command.user_id))?, server.time)
    })
}

/// Formats the result of `server.revoke`. `now` is the time of the server.
fn describe(revoked: &Json, now: u64) -> anyhow::Result<String> {
    let number =
        |name: &str| revoked[name].as_u64().ok_or_else(|| anyhow!("unexpected result from the server: {revoked}"));
    let (until, connections) = (number("revokedUntil")?, number("connections")?);
    let mut summary = format!("Revoked {}\n", revoked["userId"]);
    writeln!(summary, "  connections closed: {connections}")?;
    writeln!(summary, "  logins rejected for: {} s", until.saturating_sub(now).div_ceil(1000))?;
    if revoked["stored"] != true {
        writeln!(
            summary,
            "The revocation is not persistent: after a restart of the server, the user can log in again."
        )?;
    }
    Ok(summary)
}

/// A connection to a running server.
struct Remote {
    client: Client<RequestProtocol>,
    /// The server's time when the connection was made, in milliseconds since 1970.
    time: u64,
    /// The number of requests sent.
    sent: u64,
    /// Pushes such as pings. They are not read, but dropping this would close the stream of pushes.
    _pushes: Pushes<Message>,
}

impl Remote {
    async fn connect(url: &ServerUrl) -> anyhow::Result<Self> {
        let tcp = TcpConnector::new(url.authority());
        let handshake =
            ClientHandshake::new(&url.authority(), &url.path).with_context(|| format!("cannot use {url}"))?;
        if url.is_secure {
            let tls = TlsConnector::new(tcp, &url.host, TlsClientOptions::default())
                .with_context(|| format!("cannot use {url}"))?;
            Self::connect_by(&WebSocketConnector::new(tls, handshake), url).await
        } else {
            Self::connect_by(&WebSocketConnector::new(tcp, handshake), url).await
        }
    }

    async fn connect_by<C: Connect>(connector: &C, url: &ServerUrl) -> anyhow::Result<Self> {
        // Connected here and not by the client, so that the error has the cause.
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connector.connect()).await;
        let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let connected = connected.with_context(|| format!("cannot connect to {url}"))?;
        let (client, mut pushes, connection) =
            Client::builder(RequestProtocol, EstablishedConnector(Mutex::new(Some(connected))))
                .options(ClientOptions::default().reconnect(false))
                .build();
        tokio::spawn(connection.run());
        let welcome = tokio::time::timeout(CONNECT_TIMEOUT, pushes.recv()).await.ok().flatten();
        let welcome = welcome.and_then(|welcome| json(&welcome.frame)).filter(|welcome| welcome["type"] == "welcome");
        let time = welcome.and_then(|welcome| welcome["serverTime"].as_u64());
        let time = time.ok_or_else(|| anyhow!("{url} is not a tidewire server: expected a welcome message"))?;
        Ok(Self { client, time, sent: 0, _pushes: pushes })
    }

    /// Sends a request. Returns the data of its result.
    async fn request(&mut self, operation: &str, params: Json) -> anyhow::Result<Json> {
        self.sent += 1;
        let mut request = params;
        (request["id"], request["type"]) = (json!(self.sent), json!(operation));
        let reply = self.client.request(Message::text(request.to_string())).await?;
        let mut reply = json(&reply).ok_or_else(|| anyhow!("the reply of the server is not JSON"))?;
        if reply["type"] == "result" {
            return Ok(reply["data"].take());
        }
        let text = |name: &str| reply[name].as_str().unwrap_or_default().to_owned();
        bail!("{}: {}", text("code"), text("message"))
    }
}

/// A connector that returns an established connection, once.
struct EstablishedConnector<S>(Mutex<Option<Connected<S>>>);

impl<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static> Connect for EstablishedConnector<S> {
    type Socket = S;

    async fn connect(&self) -> io::Result<Connected<S>> {
        let connected = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        connected.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

/// The wire protocol for one request at a time.
struct RequestProtocol;

impl ClientProtocol for RequestProtocol {
    type Frame = Message;
    type Codec = WebSocket;

    fn codec(&self) -> WebSocket {
        WebSocket::client(WebSocketOptions::default())
    }

    fn classify(&self, message: &Message) -> Incoming {
        // Requests are sent one at a time, so a reply belongs to the oldest request.
        if json(message).is_some_and(|message| message.get("id").is_some()) {
            Incoming::NextReply
        } else {
            Incoming::Push
        }
    }
}

fn json(message: &Message) -> Option<Json> {
    serde_json::from_str(message.as_text()?).ok()
}
