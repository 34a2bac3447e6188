//! Sockets: the listener, the HTTP upgrade, and the WebSocket protocol over a connection actor.

mod http;
pub(crate) mod listener;
pub(crate) mod websocket;
mod write_timeout;
