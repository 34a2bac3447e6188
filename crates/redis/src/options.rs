//! The settings of a client, each with a default.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::{Credentials, DecoderOptions, Slow};

/// The settings of a [`Client`](crate::Client).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Where the server is. Default: 127.0.0.1:6379.
    pub address: Address,
    /// Who logs in. Default: nobody does.
    pub login: Option<Login>,
    /// Says who logs in instead, anew for every attempt to connect. Default: nobody, so that a refused login is for good.
    pub credentials: Option<Arc<dyn Credentials>>,
    /// The database. Default: 0.
    pub database: u32,
    /// What the connection calls itself. Default: nothing.
    pub name: Option<String>,
    /// How long a connection may take, its handshake included. Default: 5 s.
    pub connect_timeout: Duration,
    /// How long a request may take from its submission, whatever it waits for. Default: 10 s.
    pub timeout: Duration,
    /// What becomes of requests while there is no connection. Default: [`WhileDown::AsStates`].
    pub while_down: WhileDown,
    /// Whether a connection that is lost is made anew. Default: yes.
    pub reconnect: bool,
    /// The first pause between attempts to connect, after the first ones; it doubles. Default: 100 ms.
    pub min_backoff: Duration,
    /// The longest pause. Default: 30 s.
    pub max_backoff: Duration,
    /// A connection that has lasted so long was a good one: pauses begin anew. Default: 10 s.
    pub steady_after: Duration,
    /// How many requests may be under way, those of a pipeline counted one by one. Default: 65 536.
    pub max_requests: usize,
    /// How many bytes of them. Default: 64 MiB.
    pub max_bytes: usize,
    /// What becomes of a request for which there is no room. Default: it waits.
    pub when_full: WhenFull,
    /// How long replies may be.
    pub decoder: DecoderOptions,
    /// Whether every request is a span of `tracing`, with its command's name and without its arguments. Default: no, because it
    /// costs as much as a fast reply.
    pub trace: bool,
    /// Who is told of slow commands. Default: nobody.
    pub slow: Option<Slow>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            address: Address::Tcp { host: "127.0.0.1".to_owned(), port: 6379 },
            login: None,
            credentials: None,
            database: 0,
            name: None,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(10),
            while_down: WhileDown::AsStates,
            reconnect: true,
            min_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(30),
            steady_after: Duration::from_secs(10),
            max_requests: 65_536,
            max_bytes: 64 << 20,
            when_full: WhenFull::Wait,
            decoder: DecoderOptions::default(),
            trace: false,
            slow: None,
        }
    }
}

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// A host and a port.
    Tcp {
        /// A name or an address.
        host: String,
        /// Usually 6379.
        port: u16,
    },
    /// A socket of this machine.
    Unix(PathBuf),
}

/// Who logs in.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Default: `default`, who is there before any user is defined.
    pub user: Option<String>,
    /// The password.
    pub password: String,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// What becomes of requests while there is no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhileDown {
    /// They are refused between two attempts to connect, and wait while one is made.
    #[default]
    AsStates,
    /// They are refused until there is a connection again.
    Fail,
    /// They wait until there is one, or until their deadline. So do those that were not sent when the connection was lost.
    Queue,
}

/// What becomes of a request for which there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// It waits for room, until its deadline.
    #[default]
    Wait,
    /// It is refused.
    Fail,
}
