//! Sockets: the listener, HTTP and the upgrade, and the WebSocket protocol over a connection actor.

mod http;
pub(crate) mod listener;
mod log_limit;
pub(crate) mod origin;
pub(crate) mod websocket;
mod write_timeout;
