//! Connection actors for framed protocols: frames in, frames out, and any task can push to a live connection at any time.
//!
//! Each connection is an actor that owns its socket for life. A [`Protocol`] answers frames, a [`PushHandle`] pushes frames by
//! [priority](PushPriority) and with backpressure, a [`SessionRegistry`] lists the live connections, and a [`Supervisor`] admits,
//! counts and closes them.
//!
//! | Module | |
//! |---|---|
//! | the crate root | servers: protocols, replies, pushes, sessions, limits |
//! | [`codec`] | frames and bytes: length-delimited frames, fragments, and the trait of custom codecs |
//! | [`websocket`] | RFC 6455: messages, codec and handshakes, for servers and clients |
//! | [`client`] | connections to a server, with requests and reconnects |
//! | `tls` | TLS for servers and clients (feature `tls`) |
//!
//! # Example
//!
//! ```
//! use std::convert::Infallible;
//! use tidewire_conn::codec::LengthDelimited;
//! use tidewire_conn::{ConnectionContext, Frame, Protocol, PushPriority, Reply, Shutdown, Supervisor};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use tokio::net::{TcpListener, TcpStream};
//!
//! /// Echoes a frame to its sender, and pushes it to all other connections.
//! struct Shout;
//!
//! impl Protocol for Shout {
//!     type Frame = Frame;
//!     type Codec = LengthDelimited;
//!     type ProtocolError = Infallible;
//!
//!     fn codec(&self) -> LengthDelimited {
//!         LengthDelimited::default()
//!     }
//!
//!     fn on_frame(&self, frame: Frame, context: &mut ConnectionContext) -> Reply<Frame, Infallible> {
//!         let sender = context.id();
//!         context.sessions().broadcast(PushPriority::Low, |other| (other.id() != sender).then(|| frame.clone()));
//!         Reply::Frame(frame)
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> std::io::Result<()> {
//! let listener = TcpListener::bind("127.0.0.1:0").await?;
//! let addr = listener.local_addr()?;
//! let server = Supervisor::builder(Shout).max_connections(1000).build();
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
//! server.shutdown(Shutdown::default()).await;
//! serving.await?
//! # }
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

mod actor;
mod alarms;
mod batch;
pub mod client;
pub mod codec;
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
pub mod tls;
pub mod websocket;

pub use frame::{Frame, FrameLike, Head, HeadTooLong};
pub use memory::{MemoryAccount, MemoryHold, MemoryLimit};
pub use protocol::{CloseReason, Protocol, Reply, ReplyFuture, ReplyInTurn, ReplyStream, ServiceOrder, Tick};
pub use push::{
    FairnessConfig, PushAfter, PushError, PushHandle, PushPolicy, PushPriority, PushQueues, PushStats, Slot,
};
pub use registry::{ConnectionId, SessionRegistry};
pub use session::{ConnectionContext, Counters, ReplyTicket, Session};
pub use stats::Stats;
pub use supervisor::{AdmitError, Builder, Permit, Shutdown, Supervisor};
pub use timeouts::{Timeout, Timeouts};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/conn.md")]
struct Manual;
