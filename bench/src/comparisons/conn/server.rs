//! The echo servers to compare, run in this process or in a child process.

use std::convert::Infallible;
use std::{future, net};

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::{FutureExt as _, SinkExt, StreamExt as _};
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use super::{raise_file_limit, runtime};
use crate::role::Role;

/// The length of the body of a frame.
pub(super) const BODY_BYTES: usize = 64;
/// The length of a frame, with its length prefix.
pub(super) const FRAME_BYTES: usize = 4 + BODY_BYTES;

/// Echo servers with the same wire format, and the client side of it.
#[derive(Clone, Copy)]
pub(crate) struct EchoProtocol {
    /// Runs one of the servers in a child process. Its arguments are the name and the number of connections. It prints its address.
    pub(crate) role: &'static Role,
    /// The servers, by name.
    pub(crate) servers: &'static [(&'static str, Serve)],
    /// The client side of the handshake on a new connection.
    pub(crate) handshake: fn(&mut net::TcpStream),
    /// Returns this number of requests, and the replies to them.
    pub(crate) exchange: fn(usize) -> (Vec<u8>, Vec<u8>),
}

/// Starts serving on the current runtime.
pub(crate) type Serve = fn(TcpListener);

/// Frames with a length prefix.
pub(super) const FRAMES: EchoProtocol =
    EchoProtocol { role: &ROLE, servers: ALL, handshake: |_| {}, exchange: |count| (frames(count), frames(count)) };

/// The servers, by name.
pub(super) const ALL: &[(&str, Serve)] = &[
    ("raw loop", |listener| accept(listener, raw)),
    ("Framed", |listener| accept(listener, framed)),
    ("tidewire-conn", |listener| {
        tokio::spawn(async move { Supervisor::builder(Echo).build().serve(listener).await });
    }),
];

pub(super) const ROLE: Role = Role { name: "conn-server", run: |arguments| serve(arguments, ALL) };

/// Runs the server that the arguments name.
pub(crate) fn serve(arguments: &[String], servers: &[(&str, Serve)]) {
    let [name, connections] = arguments else { panic!("expected the name of a server and a number of connections") };
    raise_file_limit(2 * connections.parse::<usize>().expect("a number of connections"));
    let (_, serve) = servers.iter().find(|(known, _)| known == name).expect("the server name is known");
    runtime().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        println!("listening on {}", listener.local_addr().expect("it is bound"));
        serve(listener);
        future::pending::<()>().await;
    });
}

/// Returns this number of requests.
pub(super) fn frames(count: usize) -> Vec<u8> {
    let mut frame = u32::try_from(BODY_BYTES).expect("small").to_be_bytes().to_vec();
    frame.resize(FRAME_BYTES, b'x');
    frame.repeat(count)
}

/// Runs `serve` in a task for every connection.
pub(crate) fn accept<F: Future<Output = ()> + Send + 'static>(listener: TcpListener, serve: fn(TcpStream) -> F) {
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            socket.set_nodelay(true).expect("TCP_NODELAY can be set");
            tokio::spawn(serve(socket));
        }
    });
}

/// A typical hand-written loop: an input and an output buffer, one write per read.
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

/// `Framed`, flushed when no more frames are ready to be read.
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
