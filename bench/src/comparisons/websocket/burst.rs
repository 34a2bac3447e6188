//! Bursts of text messages to many connections, each with a head of its own before a body that all share.

use std::convert::Infallible;

use bytes::Bytes;
use tidewire_conn::websocket::{Message, Text, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, Reply};

use super::super::conn::burst::{Framing, LENGTH, receive};
use crate::role::Role;

/// A text message, as a server sends it, in one frame.
pub(super) struct Texts;

impl Framing for Texts {
    type Protocol = Silent;
    type Body = Text;
    const READERS: Role = Role { name: "websocket-burst-readers", play: receive::<Self> };
    #[expect(clippy::cast_possible_truncation, reason = "it is 84")]
    const PREFIX: &'static [u8] = &[0x81, LENGTH as u8];

    fn protocol() -> Silent {
        Silent
    }

    fn body(body: Bytes) -> Text {
        Text::try_from(body).expect("it is text")
    }

    fn push(head: &str, body: &Text) -> Message {
        Message::Text(body.clone().with_head(head).expect("it is short"))
    }
}

/// Only ever pushed to.
pub(super) struct Silent;

impl Protocol for Silent {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, _: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        Reply::None
    }
}
