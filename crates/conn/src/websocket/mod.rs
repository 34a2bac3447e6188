//! The WebSocket protocol (RFC 6455), for servers and clients, without I/O or a clock.
//!
//! [`WebSocket`] turns bytes into [`Message`]s and back once a connection is a WebSocket; the handshakes make it one. Extensions
//! are neither offered nor accepted, so the reserved bits of a frame are errors.
//!
//! Input is checked as it arrives: a stream fails where it breaks a rule, not at the end of the frame, and with the same error
//! however it is split. Memory grows with the bytes that have arrived, not with the announced length.

mod close;
mod codec;
mod error;
mod handshake;
mod header;
mod mask;
mod message;
#[cfg(test)]
mod tests;
mod upgrade;
mod utf8;

pub use close::close_websocket;
pub use codec::{WebSocket, WebSocketOptions};
pub use error::WebSocketError;
pub use handshake::{
    ClientHandshake, ClientHandshakeError, ServerHandshake, ServerHandshakeError, UpgradeRequest, Upgraded,
    check_upgrade,
};
pub use message::{CloseCode, CloseFrame, Message, Text};
pub use upgrade::{accept_websocket, connect_websocket};
