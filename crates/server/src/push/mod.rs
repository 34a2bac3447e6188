//! Pushes: subscriptions and the flow control between them and a connection.

pub(crate) mod outlet;
pub(crate) mod programmatic;
pub(crate) mod subscription;
pub(crate) mod view;
