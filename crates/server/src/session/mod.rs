//! The state of a client between its requests: who it is, what it may do, how often it may ask.

pub(crate) mod caller;
pub(crate) mod connection;
pub(crate) mod rate_limit;
