//! Connection actors for framed protocols: frames in, frames out, and any task may push to a live connection at any time.
//!
//! Each connection is an actor that owns its socket for life. A [`Protocol`] says what frames are and how they are answered;
//! a [`PushHandle`] pushes frames by [priority](PushPriority), with back-pressure; a [`SessionRegistry`] finds the live
//! connections; a [`Supervisor`] admits, counts and ends them.
//!
//! ```
//! use std::convert::Infallible;
//! use bytes::Bytes;
//! use tidewire_conn::{ConnectionContext, Frame, LengthDelimited, Protocol, Reply, Supervisor};
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
//! for (_, handle) in server.sessions().list() {
//!     handle.push_high_priority(Frame::from(Bytes::from_static(b"news!"))).await?;
//! }
//! client.read_exact(&mut echo).await?;
//! assert_eq!(&echo, b"\0\0\0\x05news!");
//!
//! server.shutdown(std::time::Duration::from_secs(5)).await;
//! serving.await.unwrap()
//! # }
//! ```

mod actor;
mod batch;
mod codec;
mod frame;
mod outbox;
mod protocol;
mod push;
mod registry;
mod supervisor;

pub use batch::Batch;
pub use codec::{ByteOrder, Codec, LengthDelimited, LengthDelimitedError, LengthDelimitedOptions, LengthPrefix};
pub use frame::{Frame, FrameLike, Head, HeadTooLong};
pub use protocol::{CloseReason, ConnectionContext, Protocol, Reply, ReplyFuture, ReplyStream};
pub use push::{FairnessConfig, PushError, PushHandle, PushPolicy, PushPriority, PushQueues, PushStats, Slot};
pub use registry::{ConnectionId, SessionRegistry};
pub use supervisor::{Builder, Permit, Refused, Supervisor};
