//! A server that runs.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidewire_conn::{Identity, Shutdown, Supervisor, Timeouts, TlsError, TlsServer, TlsServerOptions};
use tidewire_store::Store;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::metrics::{self, ServerStats};
use crate::session::connection::ConnectionInfo;
use crate::state::Core;
use crate::transport::listener::{Listener, Phase};
use crate::transport::websocket::Wire;
use crate::{ServerOptions, Session};

/// How many writes of a connection wait for the disk together: as many as a busy client has in flight.
const IN_FLIGHT: usize = 128;
/// How many urgent pushes may wait. Only notices are urgent.
const URGENT: usize = 16;
/// How many deltas may wait for a connection; their bytes are the limit that is met first.
const DELTAS: usize = 65_536;
/// How long connections have to end when the grace is over.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A server that runs. Dropping it stops it at once.
///
/// ```
/// use tidewire::{Server, ServerOptions};
/// use tidewire_store::{Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
/// let store = Store::memory(StoreOptions::default());
/// let mut options = ServerOptions::default();
/// options.port = 0;
/// let server = Server::start(store, options).await?;
/// println!("listening on {}", server.url());
/// assert_eq!(server.connection_count(), 0);
/// server.stop(std::time::Duration::ZERO).await;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    core: Arc<Core>,
    supervisor: Supervisor<Wire>,
    address: SocketAddr,
    /// Told when nobody is let in any more.
    stopping: watch::Sender<Phase>,
    accepting: Option<JoinHandle<()>>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It cannot listen there.
    #[error("cannot listen on {host}:{port}")]
    Listen {
        /// Where.
        host: String,
        /// Where.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// A file of certificate or key cannot be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Certificate and key are not what they should be.
    #[error("the certificate or its key cannot be used")]
    Tls(#[from] TlsError),
    /// The path of the WebSocket is none.
    #[error("\"{path}\" cannot be the path of the WebSocket: it begins with a slash")]
    Path {
        /// What it was to be.
        path: String,
    },
    /// The process cannot start another thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

impl Server {
    /// Listens and serves the store, until it is stopped. The store goes on when it is.
    pub async fn start(store: Store, options: ServerOptions) -> Result<Self, StartError> {
        if !options.path.starts_with('/') {
            return Err(StartError::Path { path: options.path });
        }
        let tls = options.tls.as_ref().map(tls).transpose()?;
        let listen = |source| StartError::Listen { host: options.host.clone(), port: options.port, source };
        let listener = TcpListener::bind((options.host.as_str(), options.port)).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let core = Arc::new(Core::new(store, options).map_err(StartError::Thread)?);
        let supervisor = supervisor(&core);
        let (stopping, stopped) = watch::channel(Phase::Open);
        let listening = Listener::new(Arc::clone(&core), supervisor.clone(), tls, stopped);
        let accepting = tokio::spawn(listening.run(listener));
        Ok(Self { core, supervisor, address, stopping, accepting: Some(accepting) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port that it listens on, which it may have picked itself.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        let scheme = if self.core.options.tls.is_some() { "wss" } else { "ws" };
        format!("{scheme}://{}{}", self.address, self.core.options.path)
    }

    /// How many clients are connected.
    pub fn connection_count(&self) -> usize {
        self.core.connection_count()
    }

    /// Whether clients are let in.
    pub fn is_running(&self) -> bool {
        *self.stopping.borrow() == Phase::Open
    }

    /// Who is connected, in the order of coming.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.core.rows()
    }

    /// How it is, and what it has done.
    pub fn stats(&self) -> ServerStats {
        metrics::stats(&self.core, self.address)
    }

    /// Ends every connection whose session is meant, with a notice, and lets their users log in again only after a while. Returns
    /// how many there were.
    ///
    /// ```no_run
    /// # fn revoke(server: &tidewire::Server) {
    /// server.revoke_sessions(|session| session.user_id == "mara");
    /// server.revoke_sessions(|session| session.roles.iter().any(|role| role == "writer"));
    /// # }
    /// ```
    pub fn revoke_sessions(&self, is_meant: impl Fn(&Session) -> bool) -> usize {
        self.core.revoke(is_meant)
    }

    /// Ends every connection of a user, who may log in again only after a while, whether or not there are any.
    pub fn revoke_user(&self, user_id: &str) -> usize {
        self.core.revocations.revoke(user_id, self.core.store.now());
        self.core.revoke(|session| session.user_id == user_id)
    }

    /// Lets nobody in any more, tells all who are there, serves them for the grace period or until they have left, and ends the
    /// connections that are left. Returns when there are none. If it is not waited for, the grace is over.
    pub async fn stop(mut self, grace: Duration) {
        self.stopping.send_replace(Phase::Stopping);
        let mut shutdown = Shutdown::default();
        (shutdown.grace, shutdown.deadline) = (grace, grace.saturating_add(LAST_WORDS));
        self.supervisor.shutdown(shutdown).await;
        let accepting = self.accepting.take();
        // Whoever accepts ends when it is dropped: also here, in place of whoever does not wait for the grace to pass.
        drop(self);
        if let Some(accepting) = accepting {
            // If it panicked, it has said so.
            let _ = accepting.await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Whoever accepts also ends the connections that are left.
        self.stopping.send_replace(Phase::Dropped);
    }
}

fn supervisor(core: &Arc<Core>) -> Supervisor<Wire> {
    let options = &core.options;
    let mut timeouts = Timeouts::default();
    timeouts.first_frame = None;
    timeouts.tick = Some(options.heartbeat.interval);
    let buffered = options.backpressure.max_buffered_bytes;
    let slots = options.connection_limits.max_subscriptions_per_connection.max(1);
    let per_address = options.max_connections_per_ip.unwrap_or(usize::MAX);
    Supervisor::with_protocol(Wire { core: Arc::clone(core) })
        .max_connections(options.max_connections)
        .max_connections_per_address(per_address)
        .max_in_flight(IN_FLIGHT)
        .push_capacities(URGENT, DELTAS)
        .push_bytes(buffered)
        .slot_capacities(slots, buffered)
        .timeouts(timeouts)
        .build()
}

/// What makes a socket of TLS out of one.
pub(crate) fn tls(files: &crate::TlsFiles) -> Result<TlsServer, StartError> {
    let read = |file: &PathBuf| std::fs::read(file).map_err(|source| StartError::Read { file: file.clone(), source });
    let identity = Identity::from_pem(&read(&files.certificate)?, &read(&files.key)?)?;
    let mut options = TlsServerOptions::default();
    options.alpn = vec![b"http/1.1".to_vec()];
    Ok(TlsServer::new(identity, options)?)
}
