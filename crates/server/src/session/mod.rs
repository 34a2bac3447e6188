//! The state of a client between its requests: login, permissions, rate limits and heartbeat.

pub(crate) mod address_limit;
pub(crate) mod before_login;
pub(crate) mod caller;
pub(crate) mod connection;
pub(crate) mod decision;
pub(crate) mod explanation;
pub(crate) mod heartbeat;
pub(crate) mod in_flight;
pub(crate) mod login_throttle;
pub(crate) mod rate_limit;
