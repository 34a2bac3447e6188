//! Limits of clients before their first login, if a login is required.
//!
//! These limits are per address and separate from those of users, so that a flood of unauthenticated clients does not affect users
//! who are logged in.

use std::net::IpAddr;
use std::sync::Arc;

use super::address_limit::{AddressLimit, AddressPermit, network};
use super::rate_limit::{RateKey, RateLimiter};
use crate::RequestError;
use crate::auth::BeforeLogin;

/// The limits of all connections that have not logged in.
#[derive(Debug)]
pub(crate) struct BeforeLoginLimits {
    connections: Arc<AddressLimit>,
    messages: RateLimiter,
}

impl BeforeLoginLimits {
    pub(crate) fn new(options: &BeforeLogin) -> Self {
        Self {
            connections: AddressLimit::new(options.max_connections_per_ip),
            messages: RateLimiter::new(options.rate_limit),
        }
    }

    /// Admits a connection, or returns `None` if its address has too many. The permit is held until the first login or the end of
    /// the connection.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<AddressPermit> {
        self.connections.admit(address)
    }

    /// Counts a message. Returns an error if its address has sent too many.
    pub(crate) fn count_message(&self, address: IpAddr, now: u64) -> Result<(), RequestError> {
        self.messages.try_acquire(RateKey::Address(network(address)), now).map_err(|retry_after| {
            RequestError::rate_limited("Too many messages from this address before login", retry_after)
        })
    }

    /// Returns the number of addresses that the rate limiter evicted because its limit was reached.
    pub(crate) fn evicted(&self) -> u64 {
        self.messages.evicted()
    }
}
