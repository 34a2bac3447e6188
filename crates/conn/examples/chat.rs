//! A chat: every message of a member is pushed to all other members. A member that does not read delays no other member.
//!
//! `cargo run -p tidewire-conn --example chat`

use std::convert::Infallible;

use bytes::Bytes;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Head, Protocol, PushPriority, Reply, Shutdown, Supervisor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Chat;

impl Protocol for Chat {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, message: Frame, context: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        // All frames share the body; only the head is copied.
        let head = Head::new(format!("{} says: ", context.id()).as_bytes()).unwrap_or_default();
        let receivers = context.sessions().broadcast(PushPriority::Low, |member| {
            (member.id() != context.id()).then(|| Frame::new(head, message.body().clone()))
        });
        Reply::Frame(Frame::from(Bytes::from(format!("sent to {receivers}"))))
    }
}

pub(crate) fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(chat()).expect("loopback works");
}

async fn chat() -> std::io::Result<()> {
    let server = Supervisor::builder(Chat).low_priority_capacity(4).build();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let serving = tokio::spawn({
        let server = server.clone();
        async move { server.serve(listener).await }
    });

    let mut alice = TcpStream::connect(addr).await?;
    let mut bob = TcpStream::connect(addr).await?;
    let slow = TcpStream::connect(addr).await?;
    while server.count() < 3 {
        tokio::task::yield_now().await;
    }

    for number in 1..=3 {
        send(&mut alice, &format!("message {number}")).await?;
        println!("alice: {}", receive(&mut alice).await?);
        println!("bob:   {}", receive(&mut bob).await?);
    }
    drop(slow);
    server.shutdown(Shutdown::default()).await;
    serving.await?
}

async fn send(member: &mut TcpStream, text: &str) -> std::io::Result<()> {
    member.write_u32(u32::try_from(text.len()).expect("a short text")).await?;
    member.write_all(text.as_bytes()).await
}

async fn receive(member: &mut TcpStream) -> std::io::Result<String> {
    let mut text = vec![0; member.read_u32().await? as usize];
    member.read_exact(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
