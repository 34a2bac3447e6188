//! Starting, inspecting, reloading and stopping a server.

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
use crate::transport::listener::{Listener, ListenerPhase};
use crate::transport::websocket::WebSocketProtocol;
use crate::{ServerOptions, revoked_users};

/// Limit of the requests of one connection that are in flight. Only writes run concurrently, so it limits the writes of one connection
/// that share an fsync.
const MAX_IN_FLIGHT: usize = 128;
/// Limit of queued high-priority pushes of a connection. Only notices have a high priority.
const MAX_QUEUED_NOTICES: usize = 16;
/// Limit of queued deltas of a connection. The limit on their bytes is usually reached first.
const MAX_QUEUED_DELTAS: usize = 65_536;
/// Timeout of the requests in flight after the client has disconnected. Their replies can no longer be read.
const DISCONNECTED_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of the requests in flight after the grace period of a shutdown.
const REPLY_TIMEOUT: Duration = Duration::from_secs(4);
/// Time from the end of the grace period until all connections are closed. Includes [`REPLY_TIMEOUT`] and the close handshake.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A running server. Dropping it stops the server immediately; [`stop`](Self::stop) shuts it down gracefully.
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
    /// Tells the listeners and their connections to stop.
    phase: watch::Sender<ListenerPhase>,
    /// The tasks of the listeners.
    listeners: Vec<JoinHandle<()>>,
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Binding the listening socket failed.
    #[error("cannot listen on {host}:{port}")]
    Listen {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The cause.
        source: io::Error,
    },
    /// The certificate or key file cannot be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The certificate or key is not valid.
    #[error("invalid TLS certificate or private key")]
    Tls(#[from] TlsError),
    /// The WebSocket path does not start with a slash.
    #[error("invalid WebSocket path \"{path}\": expected a path that starts with a slash")]
    Path {
        /// The path.
        path: String,
    },
    /// `proxy_protocol` is set, but `trusted_proxies` is empty.
    #[error("`proxy_protocol` requires `trusted_proxies`: the addresses of the proxies that send the header")]
    NoTrustedProxies,
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Why a reload failed. The server keeps its previous validator and certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The options enable or disable auth.
    #[error("auth cannot be enabled or disabled by a reload; restart the server")]
    Auth,
    /// The options enable or disable TLS.
    #[error("TLS cannot be enabled or disabled by a reload; restart the server")]
    Tls,
    /// The certificate or its key cannot be read or is invalid.
    #[error(transparent)]
    Certificate(#[from] StartError),
}

impl Server {
    /// Declares the system bucket in which a server persists the users revoked by `server.revoke`. A server also runs on a store
    /// without it, but then revocations do not survive a restart.
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

    /// Binds the listening sockets and starts to serve `store`. The server does not close the store when it stops.
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
        let (phase, phase_receiver) = watch::channel(ListenerPhase::Open);
        let pages = if admin.is_some() { Pages::Public } else { Pages::All };
        let public = Listener::new(Arc::clone(&state), supervisor.clone(), tls.clone(), pages, phase_receiver.clone());
        let mut listeners = vec![tokio::spawn(public.run(listener))];
        let admin_address = admin.map(|(listener, address)| {
            let admin = Listener::new(Arc::clone(&state), supervisor.clone(), None, Pages::Admin, phase_receiver);
            listeners.push(tokio::spawn(admin.run(listener)));
            address
        });
        Ok(Self { state, supervisor, address, admin_address, tls, phase, listeners })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address of the admin listener, if [`admin_listen`](ServerOptions::admin_listen) is set.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Returns the WebSocket URL for clients.
    pub fn url(&self) -> String {
        let scheme = if self.state.options.tls.is_some() { "wss" } else { "ws" };
        format!("{scheme}://{}{}", self.address, self.state.options.path)
    }

    /// Returns the number of connections, including in-process clients.
    pub fn connection_count(&self) -> usize {
        self.state.connection_count()
    }

    /// Returns whether the server accepts connections.
    pub fn is_running(&self) -> bool {
        *self.phase.borrow() == ListenerPhase::Open
    }

    /// Returns all connections: socket connections in the order in which they were opened, then in-process clients.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.state.connections_info()
    }

    /// Returns the current state of the server and its counters since it started.
    pub fn stats(&self) -> ServerStats {
        metrics::stats(&self.state, self.address)
    }

    /// Creates an in-process client with a session, or without a login. If the user is revoked, its requests fail with
    /// `SESSION_REVOKED`.
    pub fn client(&self, session: impl Into<Option<Session>>) -> Client {
        Client::new(&self.state, session.into())
    }

    /// Closes the connection with this [id](ConnectionInfo::connection_id), with [`Disconnect::NORMAL_CLOSURE`]. Returns whether an
    /// open connection was closed. In-process clients are not closed: drop them instead.
    pub fn disconnect(&self, connection_id: &str) -> bool {
        let connections = self.state.all_connections();
        let is_named =
            |connection: &&Arc<Connection>| !connection.is_local() && connection.to_string() == connection_id;
        let connection = connections.iter().find(is_named);
        connection.is_some_and(|connection| connection.close(Disconnect::NORMAL_CLOSURE))
    }

    /// Revokes the sessions for which `is_selected` returns true: closes their connections and rejects logins of their users for
    /// [`revocation_ttl`](ServerOptions::revocation_ttl). Returns the number of closed connections.
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

    /// Revokes the sessions of a user, even if the user has no connection. Returns the number of closed connections. The revocation
    /// is kept in memory only; the operation `server.revoke` also persists it.
    pub fn revoke_user(&self, user_id: &str) -> usize {
        self.state.revocations.revoke(user_id, self.state.store.now());
        self.state.revoke(|session| session.user_id == user_id)
    }

    /// Applies [`Auth::validator`](crate::auth::Auth::validator) and [`tls`](ServerOptions::tls) of these options, and reads the
    /// certificate files again. Other options are ignored. Returns the number of closed connections.
    ///
    /// Later logins use the new validator. If it no longer [accepts](crate::auth::TokenValidator::still_accepts) a session, for example
    /// because its static token was removed, the connection is closed with [`Disconnect::SESSION_REVOKED`]. New connections use the new
    /// certificate; open connections are not affected.
    ///
    /// # Errors
    ///
    /// Returns an error if the options enable or disable auth or TLS, or if the certificate is invalid. In that case nothing changes.
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

    /// Shuts down gracefully: stops accepting connections, notifies all clients, serves them until they disconnect or the grace
    /// period ends, and closes the remaining connections. Returns when all connections are closed.
    ///
    /// Dropping the future stops the server immediately.
    pub async fn stop(mut self, grace: Duration) {
        self.phase.send_replace(ListenerPhase::Stopping);
        let shutdown = Shutdown::default().grace(grace).deadline(grace.saturating_add(CLOSE_TIMEOUT));
        tokio::select! {
            () = self.supervisor.shutdown(shutdown) => {}
            never = self.close_after(grace.saturating_add(REPLY_TIMEOUT)) => match never {},
        }
        let listeners = std::mem::take(&mut self.listeners);
        // The listeners end when the server is dropped.
        drop(self);
        for listener in listeners {
            // The panic hook has already logged a panic.
            let _ = listener.await;
        }
    }

    /// Closes the remaining socket connections after a delay. Each of them still has a request in flight. Without this, the
    /// supervisor would abort them without a close frame.
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
        // The listener closes the socket connections.
        self.phase.send_replace(ListenerPhase::Dropped);
    }
}

fn supervisor(state: &Arc<ServerState>) -> Supervisor<WebSocketProtocol> {
    let options = &state.options;
    let timeouts =
        Timeouts::default().first_frame(None).half_closed(DISCONNECTED_TIMEOUT).tick(options.heartbeat.interval);
    let buffered = options.backpressure.max_buffered_bytes;
    let slots = options.connection_limits.max_subscriptions_per_connection.max(1);
    Supervisor::builder(WebSocketProtocol::new(state))
        .max_connections(options.max_connections)
        .max_in_flight(MAX_IN_FLIGHT)
        .high_priority_capacity(MAX_QUEUED_NOTICES)
        .low_priority_capacity(MAX_QUEUED_DELTAS)
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

/// Creates the TLS acceptor from PEM files.
pub(crate) fn tls(files: &crate::TlsFiles) -> Result<TlsServer, StartError> {
    let read = |file: &PathBuf| std::fs::read(file).map_err(|source| StartError::Read { file: file.clone(), source });
    let identity = Identity::from_pem(&read(&files.certificate)?, &read(&files.key)?)?;
    Ok(TlsServer::new(identity, TlsServerOptions::default().alpn([b"http/1.1".to_vec()]))?)
}
