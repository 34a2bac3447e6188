//! Options of authentication and permissions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{PermissionCheck, Permissions, Tier, TokenValidator};
use crate::RateLimit;

/// The options of authentication and permissions.
#[derive(Clone)]
#[non_exhaustive]
pub struct Auth {
    /// Whether clients must log in. Default: true, because auth that can be skipped protects nothing.
    pub required: bool,
    /// Validates the tokens of logins.
    pub validator: Arc<dyn TokenValidator>,
    /// The permission rules. Default: none; only tiers restrict sessions.
    pub permissions: Permissions,
    /// The tier of a session without any of the roles `reader`, `writer` and `admin`. Operations above it need a permission rule for
    /// one of its roles, or must be allowed by the [check](Self::check). Default: [`Tier::Write`], because users of an application
    /// read and write records but do not define buckets.
    pub default_tier: Tier,
    /// The tier of clients without a login, if no login is [required](Self::required). Permission rules do not apply to them.
    /// Default: none, so that they have full access, as on a server without auth.
    pub anonymous_tier: Option<Tier>,
    /// A permission check of the embedding program, which takes precedence over the rules. Default: none.
    pub check: Option<Arc<dyn PermissionCheck>>,
    /// The timeout of the first login of a connection, if a login is required. When it expires, the connection is closed with
    /// [`Disconnect::LOGIN_TIMEOUT`](crate::Disconnect::LOGIN_TIMEOUT). Default: 2 min, enough to type a password.
    pub login_timeout: Option<Duration>,
    /// The limit of failed logins from one IP address (for IPv6, from a /64) in a sliding window. When it is reached, further logins
    /// are rejected with `RATE_LIMITED`, even with a valid token. Default: 30 per minute, more than clients with expired tokens cause.
    pub login_rate_limit: RateLimit,
    /// The limits of clients before their first login, if a login is required.
    pub before_login: BeforeLogin,
}

impl Auth {
    /// Creates options that require a login and have no permission rules.
    pub fn new(validator: impl TokenValidator) -> Self {
        Self {
            required: true,
            validator: Arc::new(validator),
            permissions: Permissions::tiers_only(),
            default_tier: Tier::Write,
            anonymous_tier: None,
            check: None,
            login_timeout: Some(Duration::from_mins(2)),
            login_rate_limit: RateLimit::new(30, Duration::from_mins(1)),
            before_login: BeforeLogin::default(),
        }
    }

    /// Sets [`required`](#structfield.required).
    #[must_use]
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    /// Sets [`permissions`](#structfield.permissions).
    #[must_use]
    pub fn permissions(mut self, permissions: Permissions) -> Self {
        self.permissions = permissions;
        self
    }

    /// Sets [`default_tier`](#structfield.default_tier).
    #[must_use]
    pub fn default_tier(mut self, default_tier: Tier) -> Self {
        self.default_tier = default_tier;
        self
    }

    /// Sets [`anonymous_tier`](#structfield.anonymous_tier).
    #[must_use]
    pub fn anonymous_tier(mut self, anonymous_tier: Tier) -> Self {
        self.anonymous_tier = Some(anonymous_tier);
        self
    }

    /// Sets [`check`](#structfield.check).
    #[must_use]
    pub fn check(mut self, check: impl PermissionCheck) -> Self {
        self.check = Some(Arc::new(check));
        self
    }

    /// Sets [`login_timeout`](#structfield.login_timeout).
    #[must_use]
    pub fn login_timeout(mut self, login_timeout: impl Into<Option<Duration>>) -> Self {
        self.login_timeout = login_timeout.into();
        self
    }

    /// Sets [`login_rate_limit`](#structfield.login_rate_limit).
    #[must_use]
    pub fn login_rate_limit(mut self, login_rate_limit: RateLimit) -> Self {
        self.login_rate_limit = login_rate_limit;
        self
    }

    /// Sets [`before_login`](#structfield.before_login).
    #[must_use]
    pub fn before_login(mut self, before_login: BeforeLogin) -> Self {
        self.before_login = before_login;
        self
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("required", &self.required)
            .field("permissions", &self.permissions)
            .field("default_tier", &self.default_tier)
            .field("anonymous_tier", &self.anonymous_tier)
            .field("login_timeout", &self.login_timeout)
            .field("login_rate_limit", &self.login_rate_limit)
            .field("before_login", &self.before_login)
            .finish_non_exhaustive()
    }
}

/// The limits of clients before their first login, if a login is required.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BeforeLogin {
    /// The maximum size of a message in bytes, and of the messages queued while a token is validated. The limit of the server also
    /// applies. Default: 16 KiB, enough for a large signed token.
    pub max_payload_bytes: usize,
    /// The limit of all messages from one IP address (for IPv6, from a /64) in a sliding window. Default: 1000 in 10 s, which many
    /// clients behind one address do not reach when they reconnect.
    pub rate_limit: RateLimit,
    /// The maximum number of connections from one IP address (for IPv6, from a /64) that have not logged in. Default: 1000, which use
    /// at most a few dozen MiB.
    pub max_connections_per_ip: usize,
}

impl Default for BeforeLogin {
    fn default() -> Self {
        Self {
            max_payload_bytes: 16 << 10,
            rate_limit: RateLimit::new(1000, Duration::from_secs(10)),
            max_connections_per_ip: 1000,
        }
    }
}

impl BeforeLogin {
    /// Sets [`max_payload_bytes`](#structfield.max_payload_bytes).
    #[must_use]
    pub fn max_payload_bytes(mut self, max_payload_bytes: usize) -> Self {
        self.max_payload_bytes = max_payload_bytes;
        self
    }

    /// Sets [`rate_limit`](#structfield.rate_limit).
    #[must_use]
    pub fn rate_limit(mut self, rate_limit: RateLimit) -> Self {
        self.rate_limit = rate_limit;
        self
    }

    /// Sets [`max_connections_per_ip`](#structfield.max_connections_per_ip).
    #[must_use]
    pub fn max_connections_per_ip(mut self, max_connections_per_ip: usize) -> Self {
        self.max_connections_per_ip = max_connections_per_ip;
        self
    }
}
