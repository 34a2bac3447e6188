//! HTTP: `/health`, `/metrics` and the WebSocket upgrade.
//!
//! After the upgrade, the stream and the bytes already read from it are passed to a connection actor, which owns the socket from
//! then on. The HTTP buffers are released.

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
use crate::transport::listener::{ListenerPhase, wait_until_stopped};
use crate::transport::log_limit::LogLimit;
use crate::transport::origin::{self, OriginRule};
use crate::transport::source::{Forwarding, RequestSource, SocketSource};
use crate::transport::websocket::WebSocketProtocol;
use crate::transport::write_timeout::WriteTimeout;

/// Limit of a request head, and of the bytes that are buffered from a socket before its upgrade.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Timeout of the close handshake with a rejected client.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit of the concurrent close handshakes with rejected clients. Further clients are disconnected without a close frame.
const MAX_CLOSING: usize = 256;

/// A complete body.
type Body = Full<Bytes>;

/// The response to a rejected request.
type RejectResponse = Box<Response<Body>>;

/// Serves HTTP on accepted streams.
#[derive(Clone)]
pub(super) struct Http {
    server: Arc<ServerState>,
    supervisor: Supervisor<WebSocketProtocol>,
    pages: Pages,
    phase: watch::Receiver<ListenerPhase>,
    /// Permits for close handshakes with rejected clients.
    closing: Arc<Semaphore>,
    log_limits: Arc<LogLimits>,
}

/// The pages that a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// All pages and the WebSocket, because there is no admin listener.
    All,
    /// The WebSocket, and `/health` without details.
    Public,
    /// `/health` with details and `/metrics`, but no WebSocket.
    Admin,
}

/// The rate limits of log lines about requests.
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
    pub(super) async fn serve<S>(&self, stream: S, source: SocketSource, socket: SocketPermit)
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
            () = wait_until_stopped(&mut phase) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            tracing::debug!(peer = %source.address, %error, "HTTP connection failed");
        }
    }

    fn respond<S>(self, mut request: Request<Incoming>, source: SocketSource, socket: &SocketPermit) -> Response<Body>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let source = self.request_source(request.headers(), source);
        if let Err(response) = self.check_origin(request.headers(), &source) {
            return *response;
        }
        let peer = source.client;
        let address_permit = socket.admit(peer.ip());
        let is_websocket_path = self.pages != Pages::Admin && request.uri().path() == self.server.options.path;
        if is_websocket_path {
            match check_handshake(&request) {
                Err(ServerHandshakeError::NotUpgrade) => {}
                checked => {
                    return self
                        .upgrade::<S>(&mut request, checked, peer, address_permit)
                        .unwrap_or_else(|response| *response);
                }
            }
        }
        if address_permit.is_err() {
            self.server.counters.rejected_sockets.fetch_add(1, Relaxed);
            return *reject(plain_text(StatusCode::TOO_MANY_REQUESTS, "too many connections from this address\n"));
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
            _ if is_websocket_path => {
                let mut response =
                    plain_text(StatusCode::UPGRADE_REQUIRED, "this path accepts WebSocket connections only\n");
                response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
                response
            }
            _ if self.pages == Pages::Public => {
                plain_text(StatusCode::NOT_FOUND, "not found; this port serves /health and WebSocket connections\n")
            }
            _ => plain_text(StatusCode::NOT_FOUND, "not found; this server serves /health and /metrics\n"),
        }
    }

    /// Upgrades the connection to a WebSocket, or returns an error response. A client that is rejected because of its address or a
    /// shutdown is upgraded nevertheless, because browsers expose the reason only from a close frame.
    fn upgrade<S>(
        self,
        request: &mut Request<Incoming>,
        checked: Result<String, ServerHandshakeError>,
        peer: SocketAddr,
        address_permit: Result<Option<AddressPermit>, TooManySockets>,
    ) -> Result<Response<Body>, RejectResponse>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let accept = checked.map_err(reject_handshake)?;
        let accept = HeaderValue::try_from(accept).map_err(|_| reject_handshake(ServerHandshakeError::InvalidKey))?;
        let admission = self.admission(address_permit, peer);
        let admitted = match admission.map(|admission| self.supervisor.admit(peer).map(|permit| (permit, admission))) {
            Some(Ok(admitted)) => Ok(admitted),
            Some(Err(error @ AdmitError::TooManyConnections(_))) => {
                return Err(reject(plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))));
            }
            Some(Err(_)) => Err(Disconnect::SERVER_SHUTTING_DOWN),
            None => {
                self.server.counters.rejected_connections.fetch_add(1, Relaxed);
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
                return tracing::error!(%peer, "upgrade returned an unexpected stream type");
            };
            let (stream, already_read) = (parts.io.into_inner().into_inner(), parts.read_buf.to_vec());
            match admitted {
                // The actor gets its own task, so that the memory of this one is released.
                Ok((permit, admission)) => {
                    let admission: Box<dyn Any + Send> = Box::new(admission);
                    drop(tokio::spawn(Permit::run_with(permit, stream, already_read, Some(admission))));
                }
                Err(disconnect) => close_rejected(stream, disconnect, peer, &closing).await,
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

    /// Returns the permits of a connection, or `None` if its address has too many connections, in total or before login.
    fn admission(
        &self,
        address_permit: Result<Option<AddressPermit>, TooManySockets>,
        peer: SocketAddr,
    ) -> Option<Admission> {
        let socket = address_permit.ok()?;
        let before_login = match &self.server.before_login {
            Some(limits) => Some(limits.admit(peer.ip())?),
            None => None,
        };
        Some(Admission { socket, before_login })
    }

    /// Returns the client of a request: the source of the socket, or the client in the forwarding headers of a trusted proxy.
    fn request_source(&self, headers: &HeaderMap, source: SocketSource) -> RequestSource {
        let Self { server, log_limits, .. } = self;
        let peer = source.address;
        if source.forwarding == Forwarding::Untrusted && is_forwarded(headers) {
            server.counters.forwarded_ignored.fetch_add(1, Relaxed);
            if log_limits.untrusted.allows(Instant::now()) {
                tracing::warn!(%peer, setting = "trustedProxies", "ignored forwarding headers from an untrusted peer");
            }
        }
        source.of_request(headers, &server.options).unwrap_or_else(|error| {
            server.counters.forwarded_invalid.fetch_add(1, Relaxed);
            if log_limits.forwarded.allows(Instant::now()) {
                tracing::warn!(%peer, %error, "invalid forwarding headers, using the address of the proxy");
            }
            source.as_client()
        })
    }

    /// Rejects a request from a browser page whose origin is not allowed. Clients other than browsers send no `Origin`.
    fn check_origin(&self, headers: &HeaderMap, source: &RequestSource) -> Result<(), RejectResponse> {
        let options = &self.server.options;
        let rule = match &options.allowed_origins {
            Some(allowed) => OriginRule::Listed(allowed),
            None if self.server.requires_auth() => OriginRule::Any,
            None => OriginRule::OwnHost { allowed_hosts: &options.allowed_hosts },
        };
        let origins: Vec<&[u8]> = headers.get_all(header::ORIGIN).iter().map(HeaderValue::as_bytes).collect();
        origin::check(rule, &origins, &source.hosts(headers)).map_err(|error| {
            self.server.counters.rejected_origins.fetch_add(1, Relaxed);
            if self.log_limits.origin.allows(Instant::now()) {
                let (peer, setting) = (source.client, error.problem.setting());
                tracing::warn!(%peer, origin = error.origin, host = error.host, setting, "origin rejected");
            }
            reject(plain_text(StatusCode::FORBIDDEN, format!("{error}\n")))
        })
    }
}

/// Checks a WebSocket handshake. Returns the value of `Sec-WebSocket-Accept`.
fn check_handshake(request: &Request<Incoming>) -> Result<String, ServerHandshakeError> {
    let headers: Vec<(&str, &[u8])> =
        request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    check_upgrade(request.method().as_str(), request.version() == Version::HTTP_11, &headers)
}

/// Performs the close handshake with a rejected client, unless too many others are in progress.
async fn close_rejected<S>(stream: S, disconnect: Disconnect, peer: SocketAddr, closing: &Semaphore)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ok(_permit) = closing.try_acquire() else { return };
    if let Err(error) = websocket::close(stream, disconnect.close_code(), disconnect.reason, CLOSE_TIMEOUT).await {
        tracing::debug!(%peer, %error, "close frame not acknowledged");
    }
}

fn plain_text(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    response(status, "text/plain; charset=utf-8", text)
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn reject_handshake(error: ServerHandshakeError) -> RejectResponse {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    let mut response = reject(plain_text(status, format!("{error}\n")));
    for (name, value) in error.headers() {
        response.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    response
}

/// Adds `Connection: close` to the response of a rejected request.
fn reject(mut response: Response<Body>) -> RejectResponse {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Box::new(response)
}
