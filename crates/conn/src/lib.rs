//! Connection actors for framed protocols: frames in, frames out, and any task may push to a live connection at any time.
//!
//! Each connection is an actor that owns its socket for life. A [`Protocol`] says what frames are and how they are answered;
//! a [`PushHandle`] pushes frames by [priority](PushPriority), with backpressure; a [`SessionRegistry`] finds the live
//! connections; a [`Supervisor`] admits, counts and ends them.
//!
//! ```
//! use std::convert::Infallible;
//! use bytes::Bytes;
//! use tidewire_conn::{ConnectionContext, Frame, LengthDelimited, Protocol, Reply, Shutdown, Supervisor};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use tokio::net::{TcpListener, TcpStream};
//!
//! struct Echo;
//!
//! impl Protocol for Echo {
//!     type Frame = Frame;
//!     type Codec = LengthDelimited;
//!     type ProtocolError = Infallible;
//!
//!     fn codec(&self) -> LengthDelimited {
//!         LengthDelimited::default()
//!     }
//!
//!     fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
//!         Reply::Frame(frame)
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> std::io::Result<()> {
//! let listener = TcpListener::bind("127.0.0.1:0").await?;
//! let addr = listener.local_addr()?;
//! let server = Supervisor::with_protocol(Echo).build();
//! let serving = tokio::spawn({
//!     let server = server.clone();
//!     async move { server.serve(listener).await }
//! });
//!
//! let mut client = TcpStream::connect(addr).await?;
//! client.write_all(b"\0\0\0\x05hello").await?;
//! let mut echo = [0; 9];
//! client.read_exact(&mut echo).await?;
//! assert_eq!(&echo, b"\0\0\0\x05hello");
//!
//! // Any task may push.
//! for session in server.sessions().list() {
//!     session.handle().push_high_priority(Frame::from(Bytes::from_static(b"news!"))).await?;
//! }
//! client.read_exact(&mut echo).await?;
//! assert_eq!(&echo, b"\0\0\0\x05news!");
//!
//! server.shutdown(Shutdown::default()).await;
//! serving.await.unwrap()
//! # }
//! ```

mod actor;
mod alarms;
mod batch;
mod client;
mod codec;
mod fragment;
mod frame;
mod mailbox;
mod memory;
mod outbox;
mod protocol;
mod push;
mod registry;
mod session;
mod stats;
mod supervisor;
mod sync;
mod timeouts;
#[cfg(feature = "tls")]
mod tls;
mod websocket;

pub use batch::Batch;
pub use client::{
    Client, ClientOptions, ClientProtocol, ClientStats, Connect, Connected, Connection, Incoming, Outcome, Pushed,
    Pushes, RequestError, TcpConnector, WebSocketConnector,
};
pub use codec::{ByteOrder, Codec, LengthDelimited, LengthDelimitedError, LengthDelimitedOptions, LengthPrefix, Part};
pub use fragment::{FragmentError, FragmentOptions, Fragmented};
pub use frame::{Frame, FrameLike, Head, HeadTooLong};
pub use memory::{Held, MemoryAccount, MemoryLimit};
pub use protocol::{CloseReason, Protocol, Reply, ReplyFuture, ReplyInTurn, ReplyStream, ServiceOrder, Tick};
pub use push::{
    FairnessConfig, PushAfter, PushError, PushHandle, PushPolicy, PushPriority, PushQueues, PushStats, Slot,
};
pub use registry::{ConnectionId, SessionRegistry};
pub use session::{ConnectionContext, Counters, ReplyTicket, Session};
pub use stats::Stats;
pub use supervisor::{Builder, Permit, Refused, Shutdown, Supervisor};
pub use timeouts::{Timeout, Timeouts};
#[cfg(feature = "tls")]
pub use tls::{
    Authorities, ClientCertificates, Identity, TlsClientOptions, TlsConnector, TlsError, TlsServer, TlsServerOptions,
};
pub use websocket::{
    ClientHandshake, ClientHandshakeError, CloseCode, CloseFrame, Message, ServerHandshake, ServerHandshakeError, Text,
    UpgradeRequest, Upgraded, WebSocket, WebSocketError, WebSocketOptions, accept_websocket, check_upgrade,
    close_websocket, connect_websocket,
};
