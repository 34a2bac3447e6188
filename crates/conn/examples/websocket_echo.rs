//! The WebSocket server and client of the conformance tests. For a shorter server, see the example `websocket`.
//!
//! `cargo run -p tidewire-conn --example websocket_echo -- serve 127.0.0.1:7000` serves until Ctrl-C;
//! `cargo run -p tidewire-conn --example websocket_echo -- cases ws://127.0.0.1:9001` runs the client: it connects once
//! for every case of the test suite, and echoes its messages.

use std::convert::Infallible;

use tidewire_conn::client::{Client, ClientOptions, ClientProtocol, Incoming, TcpConnector};
use tidewire_conn::websocket::{
    self, ClientHandshake, CloseCode, Message, WebSocket, WebSocketConnector, WebSocketOptions,
};
use tidewire_conn::{CloseReason, ConnectionContext, Protocol, Reply, Shutdown, Supervisor};
use tokio::net::TcpListener;

/// Limit of a message, in bytes.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

struct Echo;

impl Protocol for Echo {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(options())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message {
            Message::Text(_) | Message::Binary(_) => Reply::Frame(message),
            // The codec answers pings and closes.
            _ => Reply::None,
        }
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext<Message>) -> Option<Message> {
        match reason {
            CloseReason::Shutdown => Some(Message::close(CloseCode::AWAY, "the server is going down")),
            // The codec sends the close frame after an invalid message.
            _ => None,
        }
    }
}

fn options() -> WebSocketOptions {
    WebSocketOptions::default()
        .max_frame(MAX_MESSAGE_BYTES)
        .max_message(MAX_MESSAGE_BYTES)
        .max_fragments(MAX_MESSAGE_BYTES)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", addr] => Ok(serve(addr).await?),
        ["cases", url] => cases(url.strip_prefix("ws://").ok_or("the URL must begin with ws://")?).await,
        _ => Err("usage: websocket_echo serve ADDRESS | cases URL".into()),
    }
}

async fn serve(addr: &str) -> std::io::Result<()> {
    let listener = TcpListener::bind(addr).await?;
    println!("listening on {}", listener.local_addr()?);
    let server = Supervisor::builder(Echo).build();
    let serving = server.serve_with(listener, async |mut socket| {
        let already_read = websocket::accept(&mut socket, |_| None).await?;
        Ok((socket, already_read))
    });
    tokio::select! {
        served = serving => served,
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            server.shutdown(Shutdown::default()).await;
            Ok(())
        }
    }
}

/// A client that sends no requests: every message of the server is a push.
struct EchoBack;

impl ClientProtocol for EchoBack {
    type Frame = Message;
    type Codec = WebSocket;

    fn codec(&self) -> WebSocket {
        WebSocket::client(options())
    }

    fn classify(&self, message: &Message) -> Incoming {
        match message {
            Message::Text(_) | Message::Binary(_) => Incoming::Push,
            _ => Incoming::Discard,
        }
    }
}

async fn cases(host: &str) -> Result<(), Box<dyn std::error::Error>> {
    let count = echo_back(host, "/getCaseCount").await?.ok_or("the test suite did not send the number of cases")?;
    let count: u32 = count.as_text().ok_or("the number of cases is not text")?.parse()?;
    for case in 1..=count {
        echo_back(host, &format!("/runCase?case={case}&agent=tidewire")).await?;
    }
    echo_back(host, "/updateReports?agent=tidewire").await?;
    println!("{count} cases");
    Ok(())
}

/// Connects, echoes until the server closes, and returns the first message.
async fn echo_back(host: &str, path: &str) -> Result<Option<Message>, Box<dyn std::error::Error>> {
    let connector = WebSocketConnector::new(TcpConnector::new(host), ClientHandshake::new(host, path)?);
    let options = ClientOptions::default().reconnect(false);
    let (client, mut pushes, connection) = Client::builder(EchoBack, connector).options(options).build();
    let running = tokio::spawn(connection.run());
    let mut first = None;
    while let Some(pushed) = pushes.recv().await {
        first.get_or_insert_with(|| pushed.frame.clone());
        // Fails when the server has closed the connection. Then the pushes end too.
        let _ = client.send(pushed.frame).await;
    }
    running.await?;
    Ok(first)
}
