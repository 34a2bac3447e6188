//! An echo server of frames with a four-byte length. A client that is silent gets a ping after one minute, and is disconnected after two.
//!
//! `cargo run -p tidewire-conn --example echo` runs a server and a client; with an address it serves until Ctrl-C:
//! `cargo run -p tidewire-conn --example echo -- 127.0.0.1:7000`

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Shutdown, Supervisor, Timeouts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Echo;

impl Protocol for Echo {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::Frame(frame)
    }

    fn on_idle(&self, _: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        Some(Frame::from(Bytes::from_static(b"still there?")))
    }

    fn on_shutdown(&self, _: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        Some(Frame::from(Bytes::from_static(b"goodbye")))
    }
}

pub(crate) fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let serve_at = std::env::args().nth(1).filter(|argument| argument.contains(':'));
    runtime.block_on(echo(serve_at)).expect("the address is free");
}

async fn echo(serve_at: Option<String>) -> std::io::Result<()> {
    let timeouts = Timeouts::default().heartbeat(Duration::from_mins(1)).idle(Duration::from_mins(2));
    let server = Supervisor::builder(Echo).timeouts(timeouts).max_connections(1000).build();
    let listener = TcpListener::bind(serve_at.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let addr = listener.local_addr()?;
    println!("echoing on {addr}");
    let serving = tokio::spawn({
        let server = server.clone();
        async move { server.serve(listener).await }
    });

    if serve_at.is_some() {
        tokio::signal::ctrl_c().await?;
        server.shutdown(Shutdown::default()).await;
        return serving.await?;
    }
    let mut client = TcpStream::connect(addr).await?;
    for word in ["high", "tide"] {
        client.write_u32(u32::try_from(word.len()).expect("a short word")).await?;
        client.write_all(word.as_bytes()).await?;
        println!("{word} -> {}", receive(&mut client).await?);
    }
    let shutting = tokio::spawn({
        let server = server.clone();
        async move { server.shutdown(Shutdown::default()).await }
    });
    println!("shutdown -> {}", receive(&mut client).await?);
    drop(client);
    shutting.await?;
    serving.await?
}

async fn receive(client: &mut TcpStream) -> std::io::Result<String> {
    let mut body = vec![0; client.read_u32().await? as usize];
    client.read_exact(&mut body).await?;
    Ok(String::from_utf8_lossy(&body).into_owned())
}
