//! The listener: accepts sockets, determines their source, performs TLS handshakes, and passes the streams to HTTP.

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
use crate::transport::source::SocketSource;
use crate::transport::websocket::WebSocketProtocol;

/// Delay after a failed accept, which usually means that the process has too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Limit of the sockets of the admin listener. It is separate from that of clients, so that the admin listener responds while the
/// client port is flooded, and small enough for the reserved descriptors.
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
    /// The limit of sockets per address.
    socket_limit: SocketLimit,
    http: Http,
    /// The rate limit of log lines about the PROXY protocol.
    log_limit: Arc<LogLimit>,
}

/// The phase of a server, as seen by its listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerPhase {
    Open,
    /// No more connections are accepted.
    Stopping,
    /// The server has been dropped, or its graceful shutdown has ended.
    Dropped,
}

/// Waits until the server or its phase sender is dropped.
async fn wait_until_dropped(mut phase: watch::Receiver<ListenerPhase>) {
    let _ = phase.wait_for(|phase| *phase == ListenerPhase::Dropped).await;
}

/// Waits until the server is stopping or its phase sender is dropped.
pub(super) async fn wait_until_stopped(phase: &mut watch::Receiver<ListenerPhase>) {
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
        // The admin listener has no limit per address.
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

    /// Accepts connections until the server is stopped. When it has been dropped, closes the remaining connections.
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
                () = wait_until_stopped(&mut phase) => break,
            }
        }
        drop(listener);
        // No connections remain after a graceful shutdown, unless it was cancelled.
        wait_until_dropped(phase).await;
        self.supervisor.shutdown(Shutdown::default()).await;
    }

    /// Serves a socket on a separate task if a permit is available, otherwise rejects it.
    fn accept(&self, socket: TcpStream, peer: SocketAddr) {
        let Ok(permit) = Arc::clone(&self.sockets).try_acquire_owned() else {
            tracing::info!(%peer, "socket rejected: too many sockets");
            return self.reject(&socket, "503 Service Unavailable");
        };
        let address = peer.ip().to_canonical();
        let socket_permit = if is_trusted(&self.server.options.trusted_proxies, address) {
            Some(self.socket_limit.accept_proxy())
        } else {
            self.socket_limit.accept(address)
        };
        let Some(socket_permit) = socket_permit else {
            tracing::debug!(%peer, "socket rejected: too many sockets from its address");
            return self.reject(&socket, "429 Too Many Requests");
        };
        // This fails if the peer has already disconnected.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%peer, %error, "cannot set TCP_NODELAY");
        }
        let listener = self.clone();
        let dropped = wait_until_dropped(self.phase.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = listener.serve(socket, peer, socket_permit) => {}
                // A slow handshake must not outlive the server.
                () = dropped => {}
            }
            drop(permit);
        });
    }

    /// Sends an error response to a socket that is closed without being read. Best effort: the send buffer of a new socket is empty,
    /// so the response fits.
    fn reject(&self, socket: &TcpStream, status: &str) {
        self.server.counters.rejected_sockets.fetch_add(1, Relaxed);
        let response = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        let _ = socket.try_write(response.as_bytes());
    }

    /// Performs the TLS handshake, if TLS is enabled, and serves HTTP until the socket is closed or upgraded.
    async fn serve(&self, mut socket: TcpStream, peer: SocketAddr, socket_permit: SocketPermit) {
        let source = match self.pages {
            Pages::Admin => Ok(SocketSource::direct(peer)),
            Pages::All | Pages::Public => SocketSource::detect(&mut socket, peer, &self.server.options).await,
        };
        let source = match source {
            Ok(source) => source,
            Err(error) => return self.reject_proxy_header(peer, &error),
        };
        let Some(tls) = &self.tls else { return self.http.serve(socket, source, socket_permit).await };
        match tokio::time::timeout(self.server.options.handshake_timeout, tls.accept(socket)).await {
            Ok(Ok(stream)) => self.http.serve(stream, source, socket_permit).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
        }
    }

    /// Counts and logs a socket that is closed because of the PROXY protocol.
    fn reject_proxy_header(&self, peer: SocketAddr, error: &ProxyHeaderError) {
        if let ProxyHeaderError::Io(error) = error {
            return tracing::debug!(%peer, %error, "socket closed before the first bytes");
        }
        self.server.counters.rejected_proxy_headers.fetch_add(1, Relaxed);
        if self.log_limit.allows(Instant::now()) {
            let settings = "trustedProxies, proxyProtocol";
            tracing::warn!(%peer, %error, settings, "socket rejected because of its PROXY protocol header");
        }
    }
}
