//! The server: starts, answers for itself, and stops.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidewire_conn::tls::{Identity, TlsError, TlsServer, TlsServerOptions};
use tidewire_conn::{Shutdown, Supervisor, Timeouts};
use tidewire_store::Store;
use tidewire_store::system::{SystemBucketError, SystemBuckets};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::auth::Session;
use crate::client::Client;
use crate::metrics::{self, ServerStats};
use crate::protocol::disconnect::Disconnect;
use crate::session::connection::{Connection, ConnectionInfo};
use crate::state::ServerState;
use crate::transport::http::Pages;
use crate::transport::listener::{Listener, Phase};
use crate::transport::websocket::WebSocketProtocol;
use crate::{ServerOptions, revoked_users};

/// Writes of a connection that wait for the disk together: as many as a busy client has in flight.
const MAX_IN_FLIGHT: usize = 128;
/// High-priority pushes that may wait. Only notices have a high priority.
const MAX_NOTICES: usize = 16;
/// Deltas that may wait for a connection; the limit on their bytes is usually reached first.
const MAX_DELTAS: usize = 65_536;
/// How long requests in flight may take when the client has left. Then they are given up: nobody reads the replies.
const LEFT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long requests in flight may take when the grace period is over.
const REPLY_TIMEOUT: Duration = Duration::from_secs(4);
/// How long connections may take to close when the grace period is over: the replies, then the close handshake.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A running server. Dropping it stops it at once.
///
/// ```
/// use tidewire::{Server, ServerOptions};
/// use tidewire_store::{Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
/// let store = Store::memory(StoreOptions::default());
/// let server = Server::start(store, ServerOptions::default().port(0)).await?;
/// println!("listening on {}", server.url());
/// assert_eq!(server.connection_count(), 0);
/// server.stop(std::time::Duration::ZERO).await;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    state: Arc<ServerState>,
    supervisor: Supervisor<WebSocketProtocol>,
    address: SocketAddr,
    admin_address: Option<SocketAddr>,
    tls: Option<TlsServer>,
    /// How far it is from its end.
    stopping: watch::Sender<Phase>,
    /// The listeners.
    accepting: Vec<JoinHandle<()>>,
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address cannot be listened on.
    #[error("cannot listen on {host}:{port}")]
    Listen {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The cause.
        source: io::Error,
    },
    /// The file of the certificate or key cannot be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The certificate or key is not valid.
    #[error("the certificate or its key cannot be used")]
    Tls(#[from] TlsError),
    /// The path of the WebSocket is not valid.
    #[error("\"{path}\" cannot be the path of the WebSocket: it must begin with a slash")]
    Path {
        /// The path.
        path: String,
    },
    /// The PROXY protocol is on, and nobody may use it.
    #[error("`proxy_protocol` needs `trusted_proxies`, the addresses that may send its header")]
    NoTrustedProxies,
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Why a server was not reloaded. Its validator and its certificate are as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The options turn auth on or off.
    #[error("auth cannot be turned on or off while the server runs: restart it")]
    Auth,
    /// The options turn TLS on or off.
    #[error("TLS cannot be turned on or off while the server runs: restart it")]
    Tls,
    /// The certificate or its key cannot be read or used.
    #[error(transparent)]
    Certificate(#[from] StartError),
}

impl Server {
    /// Declares the system buckets in which a server keeps its own state: the users that `server.revoke` has revoked. Without them
    /// it serves the store as well, and forgets them when it stops.
    ///
    /// ```
    /// use tidewire::Server;
    /// use tidewire_store::{Store, StoreOptions};
    /// use tidewire_store::system::SystemBuckets;
    ///
    /// # let dir = tempfile::tempdir()?;
    /// let buckets = Server::declare_buckets(SystemBuckets::default())?;
    /// let (store, _) = Store::open(dir.path(), StoreOptions::default().system_buckets(buckets))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn declare_buckets(buckets: SystemBuckets) -> Result<SystemBuckets, SystemBucketError> {
        revoked_users::declare(buckets)
    }

    /// Listens, and serves the store until it is stopped. The store stays open.
    pub async fn start(store: Store, options: ServerOptions) -> Result<Self, StartError> {
        if !options.path.starts_with('/') {
            return Err(StartError::Path { path: options.path });
        }
        if options.proxy_protocol && options.trusted_proxies.is_empty() {
            return Err(StartError::NoTrustedProxies);
        }
        let tls = options.tls.as_ref().map(tls).transpose()?;
        let (listener, address) = listen(&options.host, options.port).await?;
        let admin = match options.admin_listen {
            Some(address) => Some(listen(&address.ip().to_string(), address.port()).await?),
            None => None,
        };
        let state = Arc::new(ServerState::new(store, options).map_err(StartError::Thread)?);
        let supervisor = supervisor(&state);
        let (stopping, stopped) = watch::channel(Phase::Open);
        let pages = if admin.is_some() { Pages::Public } else { Pages::All };
        let public = Listener::new(Arc::clone(&state), supervisor.clone(), tls.clone(), pages, stopped.clone());
        let mut accepting = vec![tokio::spawn(public.run(listener))];
        let admin_address = admin.map(|(listener, address)| {
            let admin = Listener::new(Arc::clone(&state), supervisor.clone(), None, Pages::Admin, stopped);
            accepting.push(tokio::spawn(admin.run(listener)));
            address
        });
        Ok(Self { state, supervisor, address, admin_address, tls, stopping, accepting })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of `/metrics` and of the details of `/health`, if they have one of their own
    /// ([`admin_listen`](ServerOptions::admin_listen)).
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        let scheme = if self.state.options.tls.is_some() { "wss" } else { "ws" };
        format!("{scheme}://{}{}", self.address, self.state.options.path)
    }

    /// The number of connections, in-process clients included.
    pub fn connection_count(&self) -> usize {
        self.state.connection_count()
    }

    /// Whether it accepts connections.
    pub fn is_running(&self) -> bool {
        *self.stopping.borrow() == Phase::Open
    }

    /// The connections, in the order in which they were made.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.state.connections_info()
    }

    /// Its state, and what it has done since its start.
    pub fn stats(&self) -> ServerStats {
        metrics::stats(&self.state, self.address)
    }

    /// A client in this process, with this session or without a login. If the sessions of the user are revoked, its requests fail with
    /// `SESSION_REVOKED`.
    pub fn client(&self, session: impl Into<Option<Session>>) -> Client {
        Client::new(&self.state, session.into())
    }

    /// Closes a connection, by its [id](ConnectionInfo::connection_id), with the code `normal_closure`. Returns whether there was
    /// one. In-process clients are not closed: they end when they are dropped.
    pub fn disconnect(&self, connection_id: &str) -> bool {
        let connections = self.state.all_connections();
        let is_named =
            |connection: &&Arc<Connection>| !connection.is_local() && connection.to_string() == connection_id;
        let connection = connections.iter().find(is_named);
        connection.is_some_and(|connection| connection.close(Disconnect::NORMAL_CLOSURE))
    }

    /// Revokes the sessions that are selected: closes their connections, and refuses logins of their users for
    /// [`revocation_ttl`](ServerOptions::revocation_ttl). Returns the number of connections.
    ///
    /// ```no_run
    /// # fn revoke(server: &tidewire::Server) {
    /// server.revoke_sessions(|session| session.user_id == "mara");
    /// server.revoke_sessions(|session| session.roles.iter().any(|role| role == "writer"));
    /// # }
    /// ```
    pub fn revoke_sessions(&self, is_selected: impl Fn(&Session) -> bool) -> usize {
        self.state.revoke(is_selected)
    }

    /// Revokes the sessions of a user, also if it has no connection. Returns the number of connections. It holds in this process;
    /// the operation `server.revoke` stores it as well, so that it holds after a restart.
    pub fn revoke_user(&self, user_id: &str) -> usize {
        self.state.revocations.revoke(user_id, self.state.store.now());
        self.state.revoke(|session| session.user_id == user_id)
    }

    /// Takes [`Auth::validator`](crate::auth::Auth::validator) and [`tls`](ServerOptions::tls) from these options, and reads the files of
    /// the certificate again. The other options are not looked at. If there is an error, nothing has changed.
    ///
    /// The validator is for all further logins. A session that it does not [keep](crate::auth::TokenValidator::keeps), such as one that
    /// was logged in with a removed static token, ends at once: its connection is closed with
    /// [`Disconnect::SESSION_REVOKED`]. The certificate is for new connections; open ones go on. Returns the number of
    /// connections that were closed.
    pub fn reload(&self, options: &ServerOptions) -> Result<usize, ReloadError> {
        if options.auth.is_some() != self.state.auth.is_some() {
            return Err(ReloadError::Auth);
        }
        match (&self.tls, &options.tls) {
            (Some(current), Some(files)) => current.replace(&tls(files)?),
            (None, None) => {}
            _ => return Err(ReloadError::Tls),
        }
        let validator = options.auth.as_ref().map(|auth| Arc::clone(&auth.validator));
        Ok(validator.map_or(0, |validator| self.state.replace_validator(validator)))
    }

    /// Shuts down gracefully: stops accepting, notifies all clients, serves them for the grace period or until they have left, and
    /// closes the remaining connections. Returns when there are none.
    ///
    /// Dropping the future ends the grace period.
    pub async fn stop(mut self, grace: Duration) {
        self.stopping.send_replace(Phase::Stopping);
        let shutdown = Shutdown::default().grace(grace).deadline(grace.saturating_add(CLOSE_TIMEOUT));
        tokio::select! {
            () = self.supervisor.shutdown(shutdown) => {}
            never = self.close_after(grace.saturating_add(REPLY_TIMEOUT)) => match never {},
        }
        let accepting = std::mem::take(&mut self.accepting);
        // The listeners end when the server is dropped.
        drop(self);
        for accepting in accepting {
            // A panic was logged by the panic hook.
            let _ = accepting.await;
        }
    }

    /// Closes the remaining connections over sockets after this time. Each has a request that has not ended; without this, its
    /// client would get no close frame.
    async fn close_after(&self, after: Duration) -> Infallible {
        tokio::time::sleep(after).await;
        for connection in self.state.all_connections().iter().filter(|connection| !connection.is_local()) {
            connection.close(Disconnect::SERVER_SHUTDOWN);
        }
        std::future::pending().await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stop_local_clients();
        // The listener ends the connections over sockets.
        self.stopping.send_replace(Phase::Dropped);
    }
}

fn supervisor(state: &Arc<ServerState>) -> Supervisor<WebSocketProtocol> {
    let options = &state.options;
    let timeouts = Timeouts::default().first_frame(None).half_closed(LEFT_TIMEOUT).tick(options.heartbeat.interval);
    let buffered = options.backpressure.max_buffered_bytes;
    let slots = options.connection_limits.max_subscriptions_per_connection.max(1);
    Supervisor::builder(WebSocketProtocol::new(state))
        .max_connections(options.max_connections)
        .max_in_flight(MAX_IN_FLIGHT)
        .high_priority_capacity(MAX_NOTICES)
        .low_priority_capacity(MAX_DELTAS)
        .push_bytes(buffered)
        .max_slots(slots)
        .slot_bytes(buffered)
        .memory_limit(state.memory.clone())
        .timeouts(timeouts)
        .build()
}

async fn listen(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), StartError> {
    let error = |source| StartError::Listen { host: host.to_owned(), port, source };
    let listener = TcpListener::bind((host, port)).await.map_err(error)?;
    let address = listener.local_addr().map_err(error)?;
    Ok((listener, address))
}

/// The TLS side of the listener.
pub(crate) fn tls(files: &crate::TlsFiles) -> Result<TlsServer, StartError> {
    let read = |file: &PathBuf| std::fs::read(file).map_err(|source| StartError::Read { file: file.clone(), source });
    let identity = Identity::from_pem(&read(&files.certificate)?, &read(&files.key)?)?;
    Ok(TlsServer::new(identity, TlsServerOptions::default().alpn([b"http/1.1".to_vec()]))?)
}
