//! Bursts of text messages to many connections, with a head per connection before a shared body.

use std::convert::Infallible;

use bytes::Bytes;
use tidewire_conn::websocket::{Message, Text, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, Reply};

use super::super::conn::burst::{Framing, PUSH_BYTES, receive};
use crate::role::Role;

/// Text messages in one unmasked frame.
pub(super) struct TextFraming;

impl Framing for TextFraming {
    type Protocol = PushOnly;
    type Body = Text;
    const RECEIVERS: Role = Role { name: "websocket-burst-receivers", run: receive::<Self> };
    #[expect(clippy::cast_possible_truncation, reason = "it is 84")]
    const PREFIX: &'static [u8] = &[0x81, PUSH_BYTES as u8];

    fn protocol() -> PushOnly {
        PushOnly
    }

    fn body(body: Bytes) -> Text {
        Text::try_from(body).expect("it is text")
    }

    fn push(head: &str, body: &Text) -> Message {
        Message::Text(body.clone().with_head(head).expect("it is short"))
    }
}

/// A protocol that ignores all messages and only pushes.
pub(super) struct PushOnly;

impl Protocol for PushOnly {
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
