//! The settings of a client.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::CacheOptions;
use crate::credentials::Credentials;
use crate::exclusive::UnclaimedHook;
use crate::observe::SlowHook;
use crate::resp::{DecoderOptions, encode_command};
use crate::rotation::Rotation;
#[cfg(feature = "tls")]
use crate::tls::{SharedTls, TlsOptions};

/// The settings of a [`Client`](crate::Client).
///
/// ```
/// use std::time::Duration;
/// use tidewire_redis::{Login, Options, WhileDown};
///
/// let options = Options::from_url("redis://localhost/1")?
///     .login(Login::new("secret").user("app"))
///     .timeout(Duration::from_millis(500))
///     .while_down(WhileDown::Queue);
/// assert_eq!(options.database, 1);
/// # Ok::<(), tidewire_redis::UrlError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "they are independent settings")]
pub struct Options {
    /// The address of the server. Default: 127.0.0.1:6379, where Redis listens if it is not configured.
    pub address: Address,
    /// The user and password. Default: none, as for a server that is not configured.
    pub login: Option<Login>,
    /// A provider of the user and password, called for every attempt to connect. It replaces `login`. Default: none, so that a
    /// refused login is final.
    pub credentials: Option<Arc<dyn Credentials>>,
    /// TLS. Default: none, because it costs time and servers that are not configured have none. A URL with `rediss://` sets it to
    /// [`TlsOptions::default`]. Needs the feature `tls`.
    #[cfg(feature = "tls")]
    pub tls: Option<TlsOptions>,
    /// What `tls` has become for the connections of a client, which share it. A new client begins with an empty one.
    #[cfg(feature = "tls")]
    pub(crate) shared_tls: SharedTls,
    /// The newest login, for the connections of a client. Set by the client.
    pub(crate) rotation: Option<Rotation>,
    /// The number of the database. Default: 0, which every server has.
    pub database: u32,
    /// The name of the connection in `CLIENT LIST`. Default: none.
    pub name: Option<String>,
    /// Whether the server keeps the connections when it evicts clients (`maxmemory-clients`), with `CLIENT NO-EVICT ON`. A server that
    /// refuses it, such as one before Redis 7.0, refuses the handshake. Default: false.
    pub no_evict: bool,
    /// Whether reads leave the access time and frequency of keys as they are, which `maxmemory-policy` uses, with `CLIENT NO-TOUCH ON`. A
    /// server that refuses it, such as one before Redis 7.2, refuses the handshake. Default: false.
    pub no_touch: bool,
    /// The time for connecting, the handshake included. It is also the time that a server has to answer a probe when a reply is
    /// overdue. Default: 5 s, enough for a retransmitted SYN.
    pub connect_timeout: Duration,
    /// The time for a request, from its submission to its last reply. Default: 10 s, longer than a busy server takes and shorter
    /// than a user waits.
    pub timeout: Duration,
    /// The longest time that written bytes may stay unacknowledged by the TCP peer, or unsent because it does not read. Then the
    /// kernel closes the connection, even if no request times out. Zero means the default of the system, about 15 minutes. It has no
    /// effect on Unix sockets, and only Linux supports it. Default: 30 s, enough for several retransmissions.
    pub tcp_user_timeout: Duration,
    /// What happens to requests while there is no connection. Default: [`WhileDown::WaitForAttempt`].
    pub while_down: WhileDown,
    /// Whether a lost connection is replaced. Default: true. Without it, the first failure closes the client.
    pub reconnect: bool,
    /// The delay before the second attempt to reconnect; the first one has none. It doubles with each attempt, and each delay is
    /// shortened at random by up to a half, so that clients do not reconnect at the same time. Default: 100 ms.
    pub min_backoff: Duration,
    /// The longest delay between attempts. Default: 30 s, so that a server that returns is found soon.
    pub max_backoff: Duration,
    /// A connection that stayed open for this time resets the delay. Default: 10 s, so that a server that accepts and
    /// closes connections at once is not flooded.
    pub backoff_reset_after: Duration,
    /// Commands that may be in flight, from submission to reply; those of a pipeline count one by one. Default: 65 536.
    pub max_in_flight: usize,
    /// Bytes of commands that may be in flight. Default: 64 MiB.
    pub max_in_flight_bytes: usize,
    /// What happens to a request while `max_in_flight` or `max_in_flight_bytes` is reached. Default: [`WhenFull::Wait`].
    pub when_full: WhenFull,
    /// Exclusive connections that may be in use at a time, for blocking commands, watched keys and `WAIT`. At the limit, a caller waits.
    /// Default: 16. A program with more consumers that block needs more.
    pub max_exclusive: usize,
    /// A function that is called with an element that a blocking command has popped after its caller has gone away. Default: none, and
    /// the element is logged as dropped.
    pub unclaimed_hook: Option<UnclaimedHook>,
    /// The settings of the [cache](crate::cache) that [`Client::cached`](crate::Client::cached) reads through. Default: none, because
    /// the server uses memory for each key that it tracks.
    pub cache: Option<CacheOptions>,
    /// The time without input after which the pub/sub connection is probed with a `PING`, which the server must answer within
    /// `connect_timeout`. Default: 10 s, so that a server that is gone is noticed although no message is expected.
    /// `Duration::MAX` means never.
    pub pubsub_ping_after: Duration,
    /// Limits on replies. A reply above them ends the connection. Default: [`DecoderOptions::default`].
    pub decoder: DecoderOptions,
    /// Whether every request has a `tracing` span, with the name of the command and without its arguments. Default: false, because
    /// a span costs as much as a fast reply.
    pub trace: bool,
    /// A function that is called for slow commands. Default: none.
    pub slow_hook: Option<SlowHook>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            address: Address::Tcp { host: "127.0.0.1".to_owned(), port: 6379 },
            login: None,
            credentials: None,
            rotation: None,
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            shared_tls: SharedTls::default(),
            database: 0,
            name: None,
            no_evict: false,
            no_touch: false,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(10),
            tcp_user_timeout: Duration::from_secs(30),
            while_down: WhileDown::default(),
            reconnect: true,
            min_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(30),
            backoff_reset_after: Duration::from_secs(10),
            max_in_flight: 65_536,
            max_in_flight_bytes: 64 << 20,
            when_full: WhenFull::default(),
            max_exclusive: 16,
            unclaimed_hook: None,
            cache: None,
            pubsub_ping_after: Duration::from_secs(10),
            decoder: DecoderOptions::default(),
            trace: false,
            slow_hook: None,
        }
    }
}

impl Options {
    /// Sets [`address`](#structfield.address), such as `("localhost", 6379)`, a `SocketAddr`, or the path of a Unix socket.
    #[must_use]
    pub fn address(mut self, address: impl Into<Address>) -> Self {
        self.address = address.into();
        self
    }

    /// Sets [`login`](#structfield.login).
    #[must_use]
    pub fn login(mut self, login: Login) -> Self {
        self.login = Some(login);
        self
    }

    /// Sets [`credentials`](#structfield.credentials).
    #[must_use]
    pub fn credentials(mut self, credentials: impl Credentials + 'static) -> Self {
        self.credentials = Some(Arc::new(credentials));
        self
    }

    /// Sets [`tls`](#structfield.tls).
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: TlsOptions) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets [`database`](#structfield.database).
    #[must_use]
    pub fn database(mut self, database: u32) -> Self {
        self.database = database;
        self
    }

    /// Sets [`name`](#structfield.name).
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets [`no_evict`](#structfield.no_evict).
    #[must_use]
    pub fn no_evict(mut self, no_evict: bool) -> Self {
        self.no_evict = no_evict;
        self
    }

    /// Sets [`no_touch`](#structfield.no_touch).
    #[must_use]
    pub fn no_touch(mut self, no_touch: bool) -> Self {
        self.no_touch = no_touch;
        self
    }

    /// Sets [`connect_timeout`](#structfield.connect_timeout).
    #[must_use]
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets [`timeout`](#structfield.timeout). `Duration::MAX` means that there is no deadline.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets [`tcp_user_timeout`](#structfield.tcp_user_timeout).
    #[must_use]
    pub fn tcp_user_timeout(mut self, tcp_user_timeout: Duration) -> Self {
        self.tcp_user_timeout = tcp_user_timeout;
        self
    }

    /// Sets [`while_down`](#structfield.while_down).
    #[must_use]
    pub fn while_down(mut self, while_down: WhileDown) -> Self {
        self.while_down = while_down;
        self
    }

    /// Sets [`reconnect`](#structfield.reconnect).
    #[must_use]
    pub fn reconnect(mut self, reconnect: bool) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// Sets [`min_backoff`](#structfield.min_backoff).
    #[must_use]
    pub fn min_backoff(mut self, min_backoff: Duration) -> Self {
        self.min_backoff = min_backoff;
        self
    }

    /// Sets [`max_backoff`](#structfield.max_backoff).
    #[must_use]
    pub fn max_backoff(mut self, max_backoff: Duration) -> Self {
        self.max_backoff = max_backoff;
        self
    }

    /// Sets [`backoff_reset_after`](#structfield.backoff_reset_after).
    #[must_use]
    pub fn backoff_reset_after(mut self, backoff_reset_after: Duration) -> Self {
        self.backoff_reset_after = backoff_reset_after;
        self
    }

    /// Sets [`max_in_flight`](#structfield.max_in_flight).
    #[must_use]
    pub fn max_in_flight(mut self, max_in_flight: usize) -> Self {
        self.max_in_flight = max_in_flight;
        self
    }

    /// Sets [`max_in_flight_bytes`](#structfield.max_in_flight_bytes).
    #[must_use]
    pub fn max_in_flight_bytes(mut self, max_in_flight_bytes: usize) -> Self {
        self.max_in_flight_bytes = max_in_flight_bytes;
        self
    }

    /// Sets [`when_full`](#structfield.when_full).
    #[must_use]
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// Sets [`max_exclusive`](#structfield.max_exclusive).
    #[must_use]
    pub fn max_exclusive(mut self, max_exclusive: usize) -> Self {
        self.max_exclusive = max_exclusive;
        self
    }

    /// Sets [`unclaimed_hook`](#structfield.unclaimed_hook).
    #[must_use]
    pub fn unclaimed_hook(mut self, unclaimed_hook: UnclaimedHook) -> Self {
        self.unclaimed_hook = Some(unclaimed_hook);
        self
    }

    /// Sets [`cache`](#structfield.cache).
    #[must_use]
    pub fn cache(mut self, cache: CacheOptions) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets [`pubsub_ping_after`](#structfield.pubsub_ping_after).
    #[must_use]
    pub fn pubsub_ping_after(mut self, pubsub_ping_after: Duration) -> Self {
        self.pubsub_ping_after = pubsub_ping_after;
        self
    }

    /// Sets [`decoder`](#structfield.decoder).
    #[must_use]
    pub fn decoder(mut self, decoder: DecoderOptions) -> Self {
        self.decoder = decoder;
        self
    }

    /// Sets [`trace`](#structfield.trace).
    #[must_use]
    pub fn trace(mut self, trace: bool) -> Self {
        self.trace = trace;
        self
    }

    /// Sets [`slow_hook`](#structfield.slow_hook).
    #[must_use]
    pub fn slow_hook(mut self, slow_hook: SlowHook) -> Self {
        self.slow_hook = Some(slow_hook);
        self
    }
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// A host and a port.
    Tcp {
        /// A host name or an IP address.
        host: String,
        /// The port, usually 6379.
        port: u16,
    },
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl<H: Into<String>> From<(H, u16)> for Address {
    fn from((host, port): (H, u16)) -> Self {
        Self::Tcp { host: host.into(), port }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::from((address.ip().to_string(), address.port()))
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

/// A user and its password.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Login {
    /// The user. Default: none, which means `default`, the user of servers without an ACL.
    pub user: Option<String>,
    /// The password. It is not shown by `Debug`.
    pub password: String,
}

impl Login {
    /// A login of the default user.
    pub fn new(password: impl Into<String>) -> Self {
        Self { user: None, password: password.into() }
    }

    /// Sets [`user`](#structfield.user).
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }
}

impl Login {
    /// Returns the encoded command `AUTH`. For the default user it is the form that all servers know.
    pub(crate) fn auth(&self) -> Vec<u8> {
        let mut command = Vec::new();
        match self.user.as_deref() {
            None | Some("default") => encode_command(&["AUTH", &self.password], &mut command),
            Some(user) => encode_command(&["AUTH", user, &self.password], &mut command),
        }
        command
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// What happens to requests while there is no connection.
///
/// Before the first connection, requests wait for the first attempt in any case. Requests that were written when the connection was
/// lost fail in any case, and are never sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhileDown {
    /// Requests wait while an attempt to connect is running, and fail between attempts.
    #[default]
    WaitForAttempt,
    /// Requests fail until there is a connection.
    Fail,
    /// Requests wait until there is a connection, or until their deadline. So do those that were queued and not written when the
    /// connection was lost.
    Queue,
}

/// What happens to a request while too many commands or bytes are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// It waits, in order of submission and until its deadline.
    #[default]
    Wait,
    /// It fails with [`Error::QueueFull`](crate::Error::QueueFull).
    Fail,
}
