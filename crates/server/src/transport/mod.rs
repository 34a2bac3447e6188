//! Sockets: listeners, client addresses behind proxies, HTTP and the WebSocket upgrade, and the WebSocket protocol.

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
