//! HTTP on the ports of the server: `/health`, `/metrics`, and the upgrade to a WebSocket.
//!
//! After the upgrade the bare stream, and the bytes that were already read from it, go to a connection actor, which owns the socket
//! from then on. The buffers of HTTP are released.

use std::any::Any;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tidewire_conn::websocket::{self, ServerHandshakeError, check_upgrade};
use tidewire_conn::{AdmitError, Permit, Supervisor};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};

use crate::metrics;
use crate::protocol::disconnect::Disconnect;
use crate::session::address_limit::AddressPermit;
use crate::state::ServerState;
use crate::transport::admission::{Admission, SocketPermit, TooManySockets};
use crate::transport::forwarded::is_forwarded;
use crate::transport::listener::{ListenerPhase, stopped};
use crate::transport::log_limit::LogLimit;
use crate::transport::origin::{self, OriginRule};
use crate::transport::source::{Forwarding, RequestSource, Source};
use crate::transport::websocket::WebSocketProtocol;
use crate::transport::write_timeout::WriteTimeout;

/// The longest head of a request, and the most bytes that are buffered of a socket before it is upgraded.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// How long a client that is not admitted has to read its close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How many clients that are not admitted are sent a close frame at the same time. Others are disconnected without one.
const MAX_CLOSING: usize = 256;

/// A body that is complete.
type Body = Full<Bytes>;

/// A response in place of an upgrade.
type Refusal = Box<Response<Body>>;

/// Serves HTTP on accepted streams.
#[derive(Clone)]
pub(super) struct Http {
    server: Arc<ServerState>,
    supervisor: Supervisor<WebSocketProtocol>,
    pages: Pages,
    phase: watch::Receiver<ListenerPhase>,
    /// Permits for clients that are sent a close frame.
    closing: Arc<Semaphore>,
    log_limits: Arc<LogLimits>,
}

/// What is served on a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Everything: there is no port for administrators.
    All,
    /// The WebSocket, and whether the server works.
    Public,
    /// The pages for administrators, and no WebSocket.
    Admin,
}

/// The limits of log lines about requests, one for each kind.
#[derive(Default)]
struct LogLimits {
    origin: LogLimit,
    forwarded: LogLimit,
    untrusted: LogLimit,
}

impl Http {
    pub(super) fn new(
        server: Arc<ServerState>,
        supervisor: Supervisor<WebSocketProtocol>,
        pages: Pages,
        phase: watch::Receiver<ListenerPhase>,
    ) -> Self {
        let (closing, log_limits) = (Arc::new(Semaphore::new(MAX_CLOSING)), Arc::default());
        Self { server, supervisor, pages, phase, closing, log_limits }
    }

    /// Serves HTTP/1.1 until the stream is closed or upgraded.
    pub(super) async fn serve<S>(&self, stream: S, source: Source, socket: SocketPermit)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let http = self.clone();
        let service = service_fn(move |request| {
            let response = http.clone().respond::<S>(request, source, &socket);
            async { Ok::<_, Infallible>(response) }
        });
        let mut builder = http1::Builder::new();
        let limit = self.server.options.handshake_timeout;
        builder.timer(TokioTimer::new()).header_read_timeout(limit).max_buf_size(MAX_HEAD_BYTES);
        let stream = TokioIo::new(WriteTimeout::new(stream, limit));
        let mut connection = std::pin::pin!(builder.serve_connection(stream, service).with_upgrades());
        let mut phase = self.phase.clone();
        let served = tokio::select! {
            served = connection.as_mut() => served,
            () = stopped(&mut phase) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            tracing::debug!(peer = %source.address, %error, "HTTP connection failed");
        }
    }

    fn respond<S>(self, mut request: Request<Incoming>, source: Source, socket: &SocketPermit) -> Response<Body>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let source = self.source_of(request.headers(), source);
        if let Err(refusal) = self.check_origin(request.headers(), &source) {
            return *refusal;
        }
        let peer = source.client;
        let counted = socket.admit(peer.ip());
        let is_socket_path = self.pages != Pages::Admin && request.uri().path() == self.server.options.path;
        if is_socket_path {
            match check_handshake(&request) {
                Err(ServerHandshakeError::NotUpgrade) => {}
                checked => {
                    return self.upgrade::<S>(&mut request, checked, peer, counted).unwrap_or_else(|refusal| *refusal);
                }
            }
        }
        if counted.is_err() {
            self.server.counters.refused_sockets.fetch_add(1, Relaxed);
            return *refuse(plain(StatusCode::TOO_MANY_REQUESTS, "too many connections from this address\n"));
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/health") => {
                let health = metrics::health(&self.server);
                let status = if health.is_ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                let json = if self.pages == Pages::Public { health.to_public_json() } else { health.to_json() };
                response(status, "application/json", json.to_string())
            }
            (&Method::GET | &Method::HEAD, "/metrics") if self.pages != Pages::Public => {
                let text = metrics::page::prometheus(&self.server, &self.supervisor.stats());
                response(StatusCode::OK, "text/plain; version=0.0.4", text)
            }
            _ if is_socket_path => {
                let mut response =
                    plain(StatusCode::UPGRADE_REQUIRED, "this path accepts WebSocket connections only\n");
                response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
                response
            }
            _ if self.pages == Pages::Public => {
                plain(StatusCode::NOT_FOUND, "not found; this port answers /health, and WebSocket clients\n")
            }
            _ => plain(StatusCode::NOT_FOUND, "not found; this server answers /health and /metrics\n"),
        }
    }

    /// Upgrades the connection to a WebSocket, or returns the response that refuses it. A client that is not admitted, because of its
    /// address or of a shutdown, is upgraded all the same: only a close frame can tell a browser why.
    fn upgrade<S>(
        self,
        request: &mut Request<Incoming>,
        checked: Result<String, ServerHandshakeError>,
        peer: SocketAddr,
        counted: Result<Option<AddressPermit>, TooManySockets>,
    ) -> Result<Response<Body>, Refusal>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let accept = checked.map_err(refuse_handshake)?;
        let accept = HeaderValue::try_from(accept).map_err(|_| refuse_handshake(ServerHandshakeError::InvalidKey))?;
        let admission = self.admission(counted, peer);
        let admitted = match admission.map(|admission| self.supervisor.admit(peer).map(|permit| (permit, admission))) {
            Some(Ok(admitted)) => Ok(admitted),
            Some(Err(refused @ AdmitError::TooManyConnections(_))) => {
                return Err(refuse(plain(StatusCode::SERVICE_UNAVAILABLE, format!("{refused}\n"))));
            }
            Some(Err(_)) => Err(Disconnect::SERVER_SHUTTING_DOWN),
            None => {
                self.server.counters.refused_connections.fetch_add(1, Relaxed);
                Err(Disconnect::TOO_MANY_CONNECTIONS)
            }
        };
        let upgrading = hyper::upgrade::on(request);
        let closing = Arc::clone(&self.closing);
        tokio::spawn(async move {
            let upgraded = match upgrading.await {
                Ok(upgraded) => upgraded,
                Err(error) => return tracing::debug!(%peer, %error, "upgrade failed"),
            };
            let Ok(parts) = upgraded.downcast::<TokioIo<WriteTimeout<S>>>() else {
                return tracing::error!(%peer, "upgrade returned a stream of another type");
            };
            let (stream, already_read) = (parts.io.into_inner().into_inner(), parts.read_buf.to_vec());
            match admitted {
                // On a task of its own, which is no larger than an actor.
                Ok((permit, admission)) => {
                    let admission: Box<dyn Any + Send> = Box::new(admission);
                    drop(tokio::spawn(Permit::run_with(permit, stream, already_read, Some(admission))));
                }
                Err(disconnect) => close(stream, disconnect, peer, &closing).await,
            }
        });
        let mut response = Response::new(Body::default());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        Ok(response)
    }

    /// Returns the permits of a connection, or none if its address has too many, in all or before their login.
    fn admission(&self, counted: Result<Option<AddressPermit>, TooManySockets>, peer: SocketAddr) -> Option<Admission> {
        let socket = counted.ok()?;
        let before_login = match &self.server.before_login {
            Some(limits) => Some(limits.admit(peer.ip())?),
            None => None,
        };
        Some(Admission { socket, before_login })
    }

    /// Finds the client of a request: the source of the socket, or the client that a trusted proxy names in its headers.
    fn source_of(&self, headers: &HeaderMap, source: Source) -> RequestSource {
        let Self { server, log_limits, .. } = self;
        let peer = source.address;
        if source.forwarding == Forwarding::Untrusted && is_forwarded(headers) {
            server.counters.forwarded_ignored.fetch_add(1, Relaxed);
            if log_limits.untrusted.allows(Instant::now()) {
                tracing::warn!(%peer, setting = "trustedProxies", "forwarding headers ignored: the peer is not a trusted proxy");
            }
        }
        source.of_request(headers, &server.options).unwrap_or_else(|error| {
            server.counters.forwarded_invalid.fetch_add(1, Relaxed);
            if log_limits.forwarded.allows(Instant::now()) {
                tracing::warn!(%peer, %error, "invalid forwarding headers: using the address of the proxy");
            }
            source.as_client()
        })
    }

    /// Refuses a request of a browser page that is not admitted. Clients other than browsers send no `Origin`.
    fn check_origin(&self, headers: &HeaderMap, source: &RequestSource) -> Result<(), Refusal> {
        let options = &self.server.options;
        let rule = match &options.allowed_origins {
            Some(allowed) => OriginRule::Listed(allowed),
            None if self.server.requires_auth() => OriginRule::Any,
            None => OriginRule::OwnHost { allowed_hosts: &options.allowed_hosts },
        };
        let origins: Vec<&[u8]> = headers.get_all(header::ORIGIN).iter().map(HeaderValue::as_bytes).collect();
        origin::check(rule, &origins, &source.hosts(headers)).map_err(|refused| {
            self.server.counters.bad_origins.fetch_add(1, Relaxed);
            if self.log_limits.origin.allows(Instant::now()) {
                let (peer, setting) = (source.client, refused.reason.setting());
                tracing::warn!(%peer, origin = refused.origin, host = refused.host, setting, "origin refused");
            }
            refuse(plain(StatusCode::FORBIDDEN, format!("{refused}\n")))
        })
    }
}

/// Returns the `Sec-WebSocket-Accept` of a request that is a WebSocket handshake.
fn check_handshake(request: &Request<Incoming>) -> Result<String, ServerHandshakeError> {
    let headers: Vec<(&str, &[u8])> =
        request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    check_upgrade(request.method().as_str(), request.version() == Version::HTTP_11, &headers)
}

/// Sends a client that is not admitted a close frame, unless too many others are being sent one.
async fn close<S>(stream: S, disconnect: Disconnect, peer: SocketAddr, closing: &Semaphore)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ok(_permit) = closing.try_acquire() else { return };
    if let Err(error) = websocket::close(stream, disconnect.close_code(), disconnect.reason, CLOSE_TIMEOUT).await {
        tracing::debug!(%peer, %error, "close frame not acknowledged");
    }
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    response(status, "text/plain; charset=utf-8", text)
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn refuse_handshake(error: ServerHandshakeError) -> Refusal {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    let mut response = refuse(plain(status, format!("{error}\n")));
    for (name, value) in error.headers() {
        response.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    response
}

/// Makes a response the last of its connection.
fn refuse(mut response: Response<Body>) -> Refusal {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Box::new(response)
}
