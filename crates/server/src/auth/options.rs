//! Settings of authentication and permissions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{PermissionCheck, Permissions, Tier, TokenValidator};
use crate::RateLimit;

/// The settings of authentication and permissions.
#[derive(Clone)]
#[non_exhaustive]
pub struct Auth {
    /// Whether clients must log in. Default: true, because auth that can be skipped protects nothing.
    pub required: bool,
    /// Validates the tokens of logins.
    pub validator: Arc<dyn TokenValidator>,
    /// The permission rules. Default: none; sessions may do what their tiers allow.
    pub permissions: Permissions,
    /// The tier of a session that has none of the roles `reader`, `writer` and `admin`. Above it, only a permission rule for one of
    /// its roles, or the [check](Self::check), allows an operation. Default: [`Tier::Write`], because a user of the application
    /// reads and writes records, and does not define buckets.
    pub default_tier: Tier,
    /// The tier of clients without a login, if none is [required](Self::required). Permission rules do not apply to them. Default:
    /// none, so that such clients may do everything, as on a server without auth.
    pub anonymous_tier: Option<Tier>,
    /// A check of the host application, consulted before the rules. Default: none.
    pub check: Option<Arc<dyn PermissionCheck>>,
    /// The time from the connection to its first login, where a login is required. Later the connection is closed with
    /// [`Disconnect::LOGIN_TIMEOUT`](crate::Disconnect::LOGIN_TIMEOUT). Default: 2 min, enough to type a password.
    pub login_timeout: Option<Duration>,
    /// The failed logins of an IP address (IPv6: of a /64) in a sliding window. At the limit further logins are refused with
    /// `RATE_LIMITED`, also with a valid token. Default: 30 in a minute, more than clients with expired tokens make.
    pub login_rate_limit: RateLimit,
    /// The limits of clients that have not logged in, where a login is required.
    pub before_login: BeforeLogin,
}

impl Auth {
    /// Creates settings that require a login and have no permission rules.
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

/// The limits of clients that have not logged in, where a login is required. They end with the first login of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BeforeLogin {
    /// The limit of a message in bytes, and of messages that wait while a token is validated. The limit of the server applies too.
    /// Default: 16 KiB, enough for a large signed token.
    pub max_payload_bytes: usize,
    /// The messages of one IP address (IPv6: of a /64) in a sliding window, whatever they are. Default: 1000 in 10 s, which a crowd
    /// behind one address does not reach when it reconnects.
    pub rate_limit: RateLimit,
    /// The limit of connections of one IP address (IPv6: of a /64) that have not logged in. Default: 1000, which hold at most a few
    /// dozen MiB.
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
