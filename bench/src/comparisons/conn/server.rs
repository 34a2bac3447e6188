//! The echo servers that are compared, in this process or in one of their own.

use std::convert::Infallible;
use std::{future, net};

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::{FutureExt as _, SinkExt, StreamExt as _};
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use super::{allow_files, runtime};
use crate::role::Role;

/// What is echoed, without and with the length that precedes it.
pub(super) const BODY: usize = 64;
pub(super) const FRAME: usize = 4 + BODY;

/// Echo servers that speak the same, and how a client speaks to them.
#[derive(Clone, Copy)]
pub(crate) struct Dialect {
    /// Any of the servers as a process: it is told its name and how many connections there will be, and prints where it listens.
    pub(crate) role: &'static Role,
    /// Each by its name.
    pub(crate) servers: &'static [(&'static str, Serve)],
    /// What comes first on a new connection.
    pub(crate) greet: fn(&mut net::TcpStream),
    /// So many requests, and what is answered to them.
    pub(crate) exchange: fn(usize) -> (Vec<u8>, Vec<u8>),
}

/// Serves on the runtime that it is called on, for as long as that lives.
pub(crate) type Serve = fn(TcpListener);

/// Frames behind their length.
pub(super) const FRAMES: Dialect =
    Dialect { role: &ROLE, servers: ALL, greet: |_| {}, exchange: |count| (frames(count), frames(count)) };

/// Each by its name.
pub(super) const ALL: &[(&str, Serve)] = &[
    ("raw loop", |listener| accept(listener, raw)),
    ("Framed", |listener| accept(listener, framed)),
    ("tidewire-conn", |listener| {
        tokio::spawn(async move { Supervisor::builder(Echo).build().serve(listener).await });
    }),
];

pub(super) const ROLE: Role = Role { name: "conn-server", play: |arguments| serve(arguments, ALL) };

/// Plays the role of the server that the arguments name.
pub(crate) fn serve(arguments: &[String], servers: &[(&str, Serve)]) {
    let [name, connections] = arguments else { panic!("the server is told its name and a number") };
    allow_files(2 * connections.parse::<usize>().expect("a number of connections"));
    let (_, serve) = servers.iter().find(|(known, _)| known == name).expect("there is such a server");
    runtime().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        println!("listening on {}", listener.local_addr().expect("it is bound"));
        serve(listener);
        future::pending::<()>().await;
    });
}

/// So many requests.
pub(super) fn frames(count: usize) -> Vec<u8> {
    let mut frame = u32::try_from(BODY).expect("small").to_be_bytes().to_vec();
    frame.resize(FRAME, b'x');
    frame.repeat(count)
}

/// Runs `serve` on every connection, on a task of its own.
pub(crate) fn accept<F: Future<Output = ()> + Send + 'static>(listener: TcpListener, serve: fn(TcpStream) -> F) {
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            socket.set_nodelay(true).expect("TCP_NODELAY can be set");
            tokio::spawn(serve(socket));
        }
    });
}

/// What one writes by hand: a buffer in, a buffer out, one write per read.
async fn raw(mut socket: TcpStream) {
    let (mut input, mut output) = (BytesMut::with_capacity(16 * 1024), Vec::with_capacity(16 * 1024));
    loop {
        match socket.read_buf(&mut input).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        while input.len() >= 4 {
            let length = 4 + u32::from_be_bytes([input[0], input[1], input[2], input[3]]) as usize;
            if input.len() < length {
                break;
            }
            output.extend_from_slice(&input[..length]);
            input.advance(length);
        }
        if socket.write_all(&output).await.is_err() {
            return;
        }
        output.clear();
    }
}

/// Framed, which flushes when nothing more is there to be read.
async fn framed(socket: TcpStream) {
    let mut framed = Framed::new(socket, LengthDelimitedCodec::new());
    while let Some(Ok(frame)) = framed.next().await {
        if framed.feed(frame.freeze()).await.is_err() {
            return;
        }
        while let Some(Some(Ok(frame))) = framed.next().now_or_never() {
            if framed.feed(frame.freeze()).await.is_err() {
                return;
            }
        }
        if SinkExt::<Bytes>::flush(&mut framed).await.is_err() {
            return;
        }
    }
}

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
}
