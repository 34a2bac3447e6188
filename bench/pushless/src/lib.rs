//! `tidewire-conn` as it would be if nobody could push: the same sources, with an outbox that is always empty and costs
//! nothing. What is left of pushes in the loop of an actor, the compiler sees to be dead.
//!
//! It is here to be measured against: the difference is what a connection pays for pushes that it does not get.
#![allow(dead_code, unused_imports, reason = "what only pushes use")]
#![allow(clippy::all, clippy::pedantic, reason = "linted where they are at home")]

#[path = "../../../crates/conn/src/actor/mod.rs"]
mod actor;
#[path = "../../../crates/conn/src/alarms.rs"]
mod alarms;
#[path = "../../../crates/conn/src/batch.rs"]
mod batch;
#[path = "../../../crates/conn/src/client/mod.rs"]
mod client;
#[path = "../../../crates/conn/src/codec.rs"]
mod codec;
#[path = "../../../crates/conn/src/fragment.rs"]
mod fragment;
#[path = "../../../crates/conn/src/frame.rs"]
mod frame;
#[path = "../../../crates/conn/src/memory.rs"]
mod memory;
mod outbox;
#[path = "../../../crates/conn/src/protocol.rs"]
mod protocol;
#[path = "../../../crates/conn/src/push.rs"]
mod push;
#[path = "../../../crates/conn/src/registry.rs"]
mod registry;
#[path = "../../../crates/conn/src/session.rs"]
mod session;
#[path = "../../../crates/conn/src/stats.rs"]
mod stats;
#[path = "../../../crates/conn/src/supervisor.rs"]
mod supervisor;
#[path = "../../../crates/conn/src/timeouts.rs"]
mod timeouts;
#[path = "../../../crates/conn/src/websocket/mod.rs"]
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
pub use websocket::{
    ClientHandshake, ClientHandshakeError, CloseCode, CloseFrame, Message, ServerHandshake, ServerHandshakeError, Text,
    UpgradeRequest, Upgraded, WebSocket, WebSocketError, WebSocketOptions, accept_websocket, check_upgrade,
    close_websocket, connect_websocket,
};
