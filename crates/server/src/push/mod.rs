//! Subscriptions, and the flow control between them and a connection.

pub(crate) mod flow;
pub(crate) mod permit;
pub(crate) mod programmatic;
pub(crate) mod pusher;
pub(crate) mod sink;
pub(crate) mod subscription;
pub(crate) mod view;
