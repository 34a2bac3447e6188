//! The WebSocket protocol (RFC 6455), for servers and clients.
//!
//! [`WebSocket`] is the codec of an established connection: it turns bytes into [`Message`]s and back. A server performs the handshake
//! with [`accept`], or with [`check_upgrade`] if it uses an HTTP library. A client connects with a [`WebSocketConnector`]. The codec and
//! the handshakes have no I/O and no clock. Extensions are neither offered nor accepted, so the reserved bits of a frame are errors.
//!
//! Input is checked as it arrives: an error is reported at the first invalid byte, not at the end of the frame, and is the same however
//! the input is split. Memory grows with the bytes that have arrived, not with the announced length.

mod close;
mod codec;
mod connector;
mod error;
mod handshake;
mod header;
mod mask;
mod message;
#[cfg(test)]
mod tests;
mod upgrade;
mod utf8;

pub use close::close;
pub use codec::{WebSocket, WebSocketOptions};
pub use connector::WebSocketConnector;
pub use error::WebSocketError;
pub use handshake::{
    ClientHandshake, ClientHandshakeError, ServerHandshake, ServerHandshakeError, UpgradeRequest, Upgraded,
    check_upgrade,
};
pub use message::{CloseCode, CloseFrame, Message, Text};
pub use upgrade::{accept, connect};
