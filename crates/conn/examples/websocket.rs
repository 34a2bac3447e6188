//! A WebSocket echo server: `cargo run -p tidewire-conn --example websocket`

use std::convert::Infallible;

use tidewire_conn::websocket::{self, Message, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, Reply, Supervisor};
use tokio::net::TcpListener;

struct Echo;

impl Protocol for Echo {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        match message {
            Message::Text(_) | Message::Binary(_) => Reply::Frame(message),
            // The codec answers pings and closes.
            _ => Reply::None,
        }
    }
}

pub(crate) async fn serve(listener: TcpListener) -> std::io::Result<()> {
    let upgrade = async |mut socket| {
        let already_read = websocket::accept(&mut socket, |_| None).await?;
        Ok((socket, already_read))
    };
    Supervisor::builder(Echo).build().serve_with(listener, upgrade).await
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    serve(TcpListener::bind("127.0.0.1:7000").await?).await
}
