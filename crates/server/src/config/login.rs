//! Reads the keys of `auth` that limit logins and clients before login.

use std::time::Duration;

use super::entry::{Entry, Report};
use super::settings::{MAX_BYTES, MAX_COUNT, set};
use crate::auth::Auth;

pub(super) const RATE_LIMIT_KEYS: &[&str] = &["maxAttempts", "windowMs"];
pub(super) const BEFORE_LOGIN_KEYS: &[&str] = &["maxPayloadBytes", "maxRequests", "windowMs", "maxConnectionsPerIp"];

/// The limits read so far. `None` means the default.
#[derive(Default)]
pub(super) struct LoginLimits {
    timeout: Option<Duration>,
    max_attempts: Option<usize>,
    attempts_window: Option<Duration>,
    max_payload_bytes: Option<usize>,
    max_requests: Option<usize>,
    requests_window: Option<Duration>,
    max_connections_per_ip: Option<usize>,
}

impl LoginLimits {
    pub(super) fn read(&mut self, key: &str, entry: &Entry<'_>, report: &mut Report) {
        match key {
            "loginTimeoutMs" => self.timeout = entry.milliseconds(report, 0),
            "loginRateLimit" => {
                for (key, entry) in entry.members(report, RATE_LIMIT_KEYS) {
                    match key {
                        "maxAttempts" => self.max_attempts = entry.count(report, 1..=MAX_COUNT),
                        _ => self.attempts_window = entry.milliseconds(report, 1),
                    }
                }
            }
            _ => {
                for (key, entry) in entry.members(report, BEFORE_LOGIN_KEYS) {
                    match key {
                        "maxPayloadBytes" => self.max_payload_bytes = entry.bytes(report, MAX_BYTES),
                        "maxRequests" => self.max_requests = entry.count(report, 1..=MAX_COUNT),
                        "windowMs" => self.requests_window = entry.milliseconds(report, 1),
                        _ => self.max_connections_per_ip = entry.count(report, 1..=MAX_COUNT),
                    }
                }
            }
        }
    }

    pub(super) fn apply(self, auth: &mut Auth) {
        // Zero means no timeout.
        set(&mut auth.login_timeout, self.timeout.map(|timeout| Some(timeout).filter(|timeout| !timeout.is_zero())));
        set(&mut auth.login_rate_limit.max_requests, self.max_attempts);
        set(&mut auth.login_rate_limit.window, self.attempts_window);
        let before = &mut auth.before_login;
        set(&mut before.max_payload_bytes, self.max_payload_bytes);
        set(&mut before.rate_limit.max_requests, self.max_requests);
        set(&mut before.rate_limit.window, self.requests_window);
        set(&mut before.max_connections_per_ip, self.max_connections_per_ip);
    }
}
