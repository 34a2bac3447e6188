//! What clients may do before their first login, where a login is required.
//!
//! The limits are by address, since nothing else is known of these clients. They are apart from those of users, so a flood of
//! strangers takes nothing from users who are logged in.

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

    /// Admits a connection. The permit is dropped at its first login or its end. None if its address has too many.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<AddressPermit> {
        self.connections.admit(address)
    }

    /// Counts a message. Returns the error if its address has sent too many.
    pub(crate) fn count_message(&self, address: IpAddr, now: u64) -> Result<(), RequestError> {
        self.messages.take(RateKey::Address(network(address)), now).map_err(|retry_after| {
            RequestError::rate_limited("Too many messages from this address before a login", retry_after)
        })
    }

    /// Addresses whose count was reset because there were too many.
    pub(crate) fn forgotten(&self) -> u64 {
        self.messages.forgotten()
    }
}
