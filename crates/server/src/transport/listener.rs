//! The listener: accepts sockets, finds out where they come from, does TLS handshakes, and hands the streams to HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tidewire_conn::tls::TlsServer;
use tidewire_conn::{Shutdown, Supervisor};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::state::ServerState;
use crate::transport::admission::{SocketLimit, SocketPermit};
use crate::transport::forwarded::is_trusted;
use crate::transport::http::{Http, Pages};
use crate::transport::log_limit::LogLimit;
use crate::transport::proxy_protocol::ProxyHeaderError;
use crate::transport::source::Source;
use crate::transport::websocket::WebSocketProtocol;

/// Pause after a failed accept, which usually means that the process has too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Sockets of the port for administrators: few, so that they fit the descriptors that are reserved, and apart from those of clients,
/// so that the port answers while the other one is flooded.
const MAX_ADMIN_SOCKETS: usize = 32;

/// Accepts connections until the server is stopped.
#[derive(Clone)]
pub(crate) struct Listener {
    server: Arc<ServerState>,
    supervisor: Supervisor<WebSocketProtocol>,
    tls: Option<TlsServer>,
    phase: watch::Receiver<ListenerPhase>,
    pages: Pages,
    /// Permits for sockets that have not been upgraded.
    sockets: Arc<Semaphore>,
    /// The limit of sockets of one address.
    socket_limit: SocketLimit,
    http: Http,
    /// The limit of log lines about the PROXY protocol.
    log_limit: Arc<LogLimit>,
}

/// The life of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerPhase {
    Open,
    /// No connection is accepted any more.
    Stopping,
    /// The server has been dropped, or its graceful shutdown has ended.
    Dropped,
}

/// Waits until the server has been dropped. A sender that is gone means the same.
async fn dropped(mut phase: watch::Receiver<ListenerPhase>) {
    let _ = phase.wait_for(|phase| *phase == ListenerPhase::Dropped).await;
}

/// Waits until the server is stopped. A sender that is gone means the same.
pub(super) async fn stopped(phase: &mut watch::Receiver<ListenerPhase>) {
    let _ = phase.wait_for(|phase| *phase != ListenerPhase::Open).await;
}

impl Listener {
    pub(crate) fn new(
        server: Arc<ServerState>,
        supervisor: Supervisor<WebSocketProtocol>,
        tls: Option<TlsServer>,
        pages: Pages,
        phase: watch::Receiver<ListenerPhase>,
    ) -> Self {
        // Administrators are not limited by their address.
        let (max_sockets, max_per_address) = match pages {
            Pages::Admin => (MAX_ADMIN_SOCKETS, None),
            Pages::All | Pages::Public => (Semaphore::MAX_PERMITS, server.options.max_connections_per_ip),
        };
        let sockets = server.options.max_connections.clamp(1, max_sockets);
        let http = Http::new(Arc::clone(&server), supervisor.clone(), pages, phase.clone());
        let (sockets, log_limit) = (Arc::new(Semaphore::new(sockets)), Arc::default());
        let socket_limit = SocketLimit::new(max_per_address);
        Self { server, supervisor, tls, phase, pages, sockets, socket_limit, http, log_limit }
    }

    /// Accepts connections until the server is stopped. Once it has been dropped, ends the connections that are left.
    pub(crate) async fn run(self, listener: TcpListener) {
        let mut phase = self.phase.clone();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => self.accept(socket, peer),
                    Err(error) => {
                        tracing::warn!(%error, "accept failed");
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
                () = stopped(&mut phase) => break,
            }
        }
        drop(listener);
        // A graceful shutdown has ended all connections by then. One that was given up has not.
        dropped(phase).await;
        self.supervisor.shutdown(Shutdown::default()).await;
    }

    /// Serves a socket on a task of its own, if there is a permit for it.
    fn accept(&self, socket: TcpStream, peer: SocketAddr) {
        let Ok(permit) = Arc::clone(&self.sockets).try_acquire_owned() else {
            tracing::info!(%peer, "socket refused: too many sockets");
            return self.refuse(&socket, "503 Service Unavailable");
        };
        let address = peer.ip().to_canonical();
        let counted = if is_trusted(&self.server.options.trusted_proxies, address) {
            Some(self.socket_limit.accept_proxy())
        } else {
            self.socket_limit.accept(address)
        };
        let Some(counted) = counted else {
            tracing::debug!(%peer, "socket refused: too many sockets from its address");
            return self.refuse(&socket, "429 Too Many Requests");
        };
        // It fails when the peer has already left.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%peer, %error, "TCP_NODELAY not set");
        }
        let listener = self.clone();
        let dropped = dropped(self.phase.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = listener.serve(socket, peer, counted) => {}
                // A slow peer does not outlive the server.
                () = dropped => {}
            }
            drop(permit);
        });
    }

    /// Answers a socket that is closed without being read. Best effort: the send buffer of a new socket is empty, so the response
    /// fits.
    fn refuse(&self, socket: &TcpStream, status: &str) {
        self.server.counters.refused_sockets.fetch_add(1, Relaxed);
        let response = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        let _ = socket.try_write(response.as_bytes());
    }

    /// Does the TLS handshake, if there is one, and serves HTTP until the socket is closed or upgraded.
    async fn serve(&self, mut socket: TcpStream, peer: SocketAddr, counted: SocketPermit) {
        let source = match self.pages {
            Pages::Admin => Ok(Source::direct(peer)),
            Pages::All | Pages::Public => Source::of(&mut socket, peer, &self.server.options).await,
        };
        let source = match source {
            Ok(source) => source,
            Err(error) => return self.refuse_proxy_header(peer, &error),
        };
        let Some(tls) = &self.tls else { return self.http.serve(socket, source, counted).await };
        match tokio::time::timeout(self.server.options.handshake_timeout, tls.accept(socket)).await {
            Ok(Ok(stream)) => self.http.serve(stream, source, counted).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
        }
    }

    /// Counts and logs a socket that is closed because of the PROXY protocol.
    fn refuse_proxy_header(&self, peer: SocketAddr, error: &ProxyHeaderError) {
        if let ProxyHeaderError::Io(error) = error {
            return tracing::debug!(%peer, %error, "socket closed before its first bytes");
        }
        self.server.counters.proxy_headers_refused.fetch_add(1, Relaxed);
        if self.log_limit.allows(Instant::now()) {
            let settings = "trustedProxies, proxyProtocol";
            tracing::warn!(%peer, %error, settings, "socket refused because of the PROXY protocol");
        }
    }
}
