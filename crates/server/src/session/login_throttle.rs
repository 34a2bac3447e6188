//! The throttle of failed logins: after too many failures, all logins from an address are rejected for a while.
//!
//! Only failures count, so any number of users may log in from one address. A successful login does not reset the count; otherwise
//! a client with one valid token could guess others without limit.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use super::address_limit::network;
use super::rate_limit::{RateKey, RateLimiter};
use crate::{RateLimit, RequestError};

/// Minimum interval between log lines about throttled addresses, so that clients with many addresses cannot flood the log.
const LOG_INTERVAL_MS: u64 = 10_000;

/// Limits the failed logins of an address.
#[derive(Debug)]
pub(crate) struct LoginThrottle {
    pub(crate) limit: RateLimit,
    failures: RateLimiter,
    log: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    logged_at: Option<u64>,
    /// The number of addresses throttled since then that were not logged.
    unlogged: u64,
}

/// An address that has just been throttled, to be logged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Throttled {
    pub(crate) network: IpAddr,
    /// The number of addresses that were throttled before without being logged.
    pub(crate) unlogged: u64,
}

impl LoginThrottle {
    pub(crate) fn new(limit: RateLimit) -> Self {
        Self { limit, failures: RateLimiter::new(limit), log: Mutex::default() }
    }

    /// Checks whether an address may attempt a login. Logins that are still being validated do not count.
    pub(crate) fn check(&self, address: IpAddr, now: u64) -> Result<(), RequestError> {
        self.failures
            .check(RateKey::Address(network(address)), now)
            .map_err(|retry_after| RequestError::rate_limited("Too many failed logins from this address", retry_after))
    }

    /// Counts a failed login. Returns the address if this failure throttles it, at most once per [`LOG_INTERVAL_MS`].
    pub(crate) fn record_failure(&self, address: IpAddr, now: u64) -> Option<Throttled> {
        let network = network(address);
        let key = RateKey::Address(network);
        let was_counted = self.failures.try_acquire(key, now).is_ok();
        if !was_counted || self.failures.check(key, now).is_ok() {
            return None;
        }
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        // `abs_diff`, so that a clock set back by more than the interval does not suppress log lines.
        if log.logged_at.is_some_and(|then| now.abs_diff(then) < LOG_INTERVAL_MS) {
            log.unlogged += 1;
            return None;
        }
        let LogState { unlogged, .. } = std::mem::replace(&mut *log, LogState { logged_at: Some(now), unlogged: 0 });
        Some(Throttled { network, unlogged })
    }

    /// Returns the number of addresses that the rate limiter evicted because its limit was reached.
    pub(crate) fn evicted(&self) -> u64 {
        self.failures.evicted()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;
    use crate::Code;

    fn address(n: u32) -> IpAddr {
        Ipv4Addr::from(n).into()
    }

    fn throttle(max: usize) -> LoginThrottle {
        LoginThrottle::new(RateLimit::new(max, Duration::from_mins(1)))
    }

    #[test]
    fn address_is_throttled_until_its_first_failure_leaves_the_window() {
        let throttle = throttle(2);
        let ann = address(1);
        assert_eq!(throttle.record_failure(ann, 1000), None);
        assert_eq!(throttle.check(ann, 1000), Ok(()));
        assert!(throttle.record_failure(ann, 2000).is_some());
        let error = throttle.check(ann, 3000).unwrap_err();
        assert_eq!((error.code, error.details.unwrap()["retryAfterMs"].as_u64()), (Code::RateLimited, Some(58_000)));
        assert_eq!(throttle.check(address(2), 3000), Ok(()));
        assert!(throttle.check(ann, 60_999).is_err());
        assert_eq!(throttle.check(ann, 61_000), Ok(()));
    }

    #[test]
    fn throttled_addresses_do_not_flood_the_log() {
        let throttle = throttle(1);
        let line = |n, unlogged| Some(Throttled { network: address(n), unlogged });
        assert_eq!(throttle.record_failure(address(0), 5), line(0, 0));
        for n in 1..=1000 {
            assert_eq!(throttle.record_failure(address(n), 5 + LOG_INTERVAL_MS - 1), None);
        }
        assert_eq!(throttle.record_failure(address(2000), 5 + LOG_INTERVAL_MS), line(2000, 1000));
        // Failures of logins that were already being validated are not logged again.
        assert_eq!(throttle.record_failure(address(2000), 5 + 2 * LOG_INTERVAL_MS), None);
        assert_eq!(throttle.record_failure(address(2001), 5 + 2 * LOG_INTERVAL_MS), line(2001, 0));
    }
}
