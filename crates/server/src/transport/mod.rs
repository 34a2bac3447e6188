//! Sockets: the listener, who is at the other end, HTTP and the upgrade, and the WebSocket protocol over a connection actor.

mod admission;
mod forwarded;
pub(crate) mod http;
pub(crate) mod listener;
mod log_limit;
pub(crate) mod origin;
mod proxy_protocol;
mod source;
pub(crate) mod websocket;
mod write_timeout;
