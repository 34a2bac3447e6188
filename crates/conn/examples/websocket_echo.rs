//! A WebSocket echo: text and binary messages come back as they were sent.
//!
//! `cargo run -p tidewire-conn --example websocket_echo -- serve 127.0.0.1:7000` serves until Ctrl-C.

use std::convert::Infallible;

use tidewire_conn::{
    CloseCode, ConnectionContext, Message, Protocol, Reply, Shutdown, Supervisor, WebSocket, WebSocketOptions,
    accept_websocket,
};
use tokio::net::TcpListener;

/// The largest message that is echoed.
const LARGEST: usize = 64 << 20;

struct Echo;

impl Protocol for Echo {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(options())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext) -> Reply<Message, Infallible> {
        match message {
            Message::Text(_) | Message::Binary(_) => Reply::Frame(message),
            // The codec answers pings and closes.
            _ => Reply::None,
        }
    }

    fn on_shutdown(&self, _: &mut ConnectionContext) -> Option<Message> {
        Some(Message::close(CloseCode::AWAY, "the server is going down"))
    }
}

fn options() -> WebSocketOptions {
    let mut options = WebSocketOptions::default();
    (options.max_frame, options.max_message, options.max_fragments) = (LARGEST, LARGEST, LARGEST);
    options
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", addr] => serve(addr).await,
        _ => {
            eprintln!("usage: websocket_echo serve ADDRESS");
            std::process::exit(2)
        }
    }
}

async fn serve(addr: &str) -> std::io::Result<()> {
    let listener = TcpListener::bind(addr).await?;
    println!("listening on {}", listener.local_addr()?);
    let server = Supervisor::with_protocol(Echo).build();
    let serving = server.serve_with(listener, async |mut socket| {
        let already_read = accept_websocket(&mut socket, |_| None).await?;
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
