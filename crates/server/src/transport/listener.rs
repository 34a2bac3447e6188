//! The port: accepts sockets, answers HTTP, and makes a WebSocket of those that ask for it.
//!
//! A socket speaks HTTP until it is upgraded; then its stream, and what was read of it already, goes to an actor of its own.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Body as _;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tidewire_conn::{CloseCode, Permit, Refused, Shutdown, Supervisor, TlsServer, accept_key};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::metrics;
use crate::state::Core;
use crate::transport::websocket::Wire;
use crate::transport::write_timeout::Patient;

/// The longest head of a request, and the most bytes that are held of what a socket sends before it is upgraded.
const MAX_HEAD: usize = 16 * 1024;
/// How long a failed accept waits: it mostly means that the process has too many files open.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a client that is sent away has to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// How many clients may be sent away at once; others are cut off.
const FAREWELLS: usize = 256;

/// Whoever accepts.
#[derive(Clone)]
pub(crate) struct Listening {
    core: Arc<Core>,
    supervisor: Supervisor<Wire>,
    tls: Option<TlsServer>,
    stopped: watch::Receiver<Phase>,
    /// How many more sockets may speak HTTP.
    sockets: Arc<Semaphore>,
    farewells: Arc<Semaphore>,
}

/// How far a server is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// Nobody is let in any more.
    Stopping,
    /// Whoever had it has let it go.
    Dropped,
}

/// Until nobody needs the server any more. That nobody can say so is as good.
async fn until_dropped(mut phase: watch::Receiver<Phase>) {
    let _ = phase.wait_for(|phase| *phase == Phase::Dropped).await;
}

async fn until_stopped(phase: &mut watch::Receiver<Phase>) {
    // That nobody can say so any more is as good.
    let _ = phase.wait_for(|phase| *phase != Phase::Open).await;
}

/// A body that is all there.
type Body = Full<Bytes>;

/// What is answered in place of an upgrade.
type Refusal = Box<Response<Body>>;

impl Listening {
    pub(crate) fn new(
        core: Arc<Core>,
        supervisor: Supervisor<Wire>,
        tls: Option<TlsServer>,
        stopped: watch::Receiver<Phase>,
    ) -> Self {
        let sockets = core.options.max_connections.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            core,
            supervisor,
            tls,
            stopped,
            sockets: Arc::new(Semaphore::new(sockets)),
            farewells: Arc::new(Semaphore::new(FAREWELLS)),
        }
    }

    /// Accepts until the server is stopped, and sees that all connections end then.
    pub(crate) async fn run(self, listener: TcpListener) {
        let mut stopped = self.stopped.clone();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => self.take(socket, peer),
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(PAUSE).await;
                    }
                },
                // The server was stopped, or dropped.
                () = until_stopped(&mut stopped) => break,
            }
        }
        drop(listener);
        // Who stops it in order has ended all connections by then; who gives up on that has not.
        until_dropped(stopped).await;
        self.supervisor.shutdown(Shutdown::default()).await;
    }

    fn take(&self, socket: TcpStream, peer: SocketAddr) {
        let Ok(place) = Arc::clone(&self.sockets).try_acquire_owned() else {
            self.core.counters.refused_sockets.fetch_add(1, Relaxed);
            tracing::info!(%peer, "a socket was refused: there are too many");
            // It is one small write to a socket that nothing was written to.
            let _ =
                socket.try_write(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
            return;
        };
        // It fails when the peer has already left, which is that connection's affair.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%peer, %error, "small writes may be delayed");
        }
        let listening = self.clone();
        let dropped = until_dropped(self.stopped.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = listening.talk(socket, peer) => {}
                // Whoever is slow to say what they want does not hold a server that has ended.
                () = dropped => {}
            }
            drop(place);
        });
    }

    async fn talk(&self, socket: TcpStream, peer: SocketAddr) {
        let Some(tls) = &self.tls else { return self.speak_http(socket, peer).await };
        match tokio::time::timeout(self.core.options.handshake_timeout, tls.accept(socket)).await {
            Ok(Ok(stream)) => self.speak_http(stream, peer).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "a TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
        }
    }

    async fn speak_http<S>(&self, stream: S, peer: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let listening = self.clone();
        let service = service_fn(move |request| {
            let response = listening.clone().answer::<S>(request, peer);
            async { Ok::<_, Infallible>(response) }
        });
        let mut http = http1::Builder::new();
        let limit = self.core.options.handshake_timeout;
        http.timer(TokioTimer::new()).header_read_timeout(limit).max_buf_size(MAX_HEAD);
        let stream = TokioIo::new(Patient::new(stream, limit));
        let mut connection = std::pin::pin!(http.serve_connection(stream, service).with_upgrades());
        let mut stopped = self.stopped.clone();
        let served = tokio::select! {
            served = connection.as_mut() => served,
            () = until_stopped(&mut stopped) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            tracing::debug!(%peer, %error, "a socket did not speak HTTP to its end");
        }
    }

    /// What a request is answered.
    fn answer<S>(self, mut request: Request<hyper::body::Incoming>, peer: SocketAddr) -> Response<Body>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let is_socket_path = request.uri().path() == self.core.options.path;
        if is_socket_path && wants_websocket(request.headers()) {
            return self.upgrade::<S>(&mut request, peer).unwrap_or_else(|refusal| *refusal);
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/health") => {
                let health = metrics::health(&self.core);
                let status = if health.is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                respond(status, "application/json", health.to_json().to_string())
            }
            (&Method::GET | &Method::HEAD, "/metrics") => {
                let text = metrics::prometheus(&self.core, &self.supervisor.stats());
                respond(StatusCode::OK, "text/plain; version=0.0.4", text)
            }
            _ if is_socket_path => {
                let mut response =
                    plain(StatusCode::UPGRADE_REQUIRED, "this is a WebSocket: connect with a WebSocket client\n");
                response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
                response
            }
            _ => plain(StatusCode::NOT_FOUND, "there is nothing here: /health and /metrics are answered\n"),
        }
    }

    /// Makes a WebSocket of the connection, or says why not.
    fn upgrade<S>(
        self,
        request: &mut Request<hyper::body::Incoming>,
        peer: SocketAddr,
    ) -> Result<Response<Body>, Refusal>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.check_origin(request.headers())?;
        let accept = handshake(request)?;
        let admitted = match self.supervisor.admit(peer) {
            Ok(permit) => Ok(permit),
            Err(refused @ Refused::TooMany(_)) => {
                return Err(last(plain(StatusCode::SERVICE_UNAVAILABLE, format!("{refused}\n"))));
            }
            Err(Refused::ShuttingDown) => Err((CloseCode::AWAY, "server_shutting_down")),
            Err(_) => Err((CloseCode::new(4003), "too_many_connections")),
        };
        let upgrading = hyper::upgrade::on(request);
        let farewells = Arc::clone(&self.farewells);
        tokio::spawn(async move {
            let upgraded = match upgrading.await {
                Ok(upgraded) => upgraded,
                Err(error) => return tracing::debug!(%peer, %error, "a connection was not upgraded"),
            };
            let Ok(parts) = upgraded.downcast::<TokioIo<Patient<S>>>() else {
                return tracing::error!(%peer, "an upgrade gave another stream than it was given");
            };
            let (stream, already_read) = (parts.io.into_inner().into_inner(), parts.read_buf.to_vec());
            match admitted {
                // On a task of its own, which is no larger than an actor.
                Ok(permit) => drop(tokio::spawn(Permit::run(permit, stream, already_read))),
                Err((code, reason)) => part(stream, code, reason, &farewells).await,
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

    /// A page of another origin may not connect in the name of whoever looks at it. Programs that are no browsers have none.
    fn check_origin(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(allowed) = &self.core.options.allowed_origins else { return Ok(()) };
        let is_allowed = |origin: &HeaderValue| allowed.iter().any(|allowed| origin.as_bytes() == allowed.as_bytes());
        if headers.get_all(header::ORIGIN).iter().all(is_allowed) {
            return Ok(());
        }
        self.core.counters.bad_origins.fetch_add(1, Relaxed);
        Err(last(plain(StatusCode::FORBIDDEN, "this origin is not allowed\n")))
    }
}

/// Whether the fields of this name, which are lists, contain a word.
fn has_word(headers: &HeaderMap, name: header::HeaderName, word: &str) -> bool {
    let mut words =
        headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    words.any(|known| known.trim().eq_ignore_ascii_case(word))
}

fn wants_websocket(headers: &HeaderMap) -> bool {
    has_word(headers, header::UPGRADE, "websocket")
}

/// What the key of a handshake is answered with, if the request is one.
fn handshake(request: &Request<hyper::body::Incoming>) -> Result<HeaderValue, Refusal> {
    let headers = request.headers();
    let bad = |what: &'static str| last(plain(StatusCode::BAD_REQUEST, what));
    if !request.body().is_end_stream() {
        // Whoever stands in between takes it for a body, and here it would be messages.
        return Err(bad("a WebSocket handshake has no body\n"));
    }
    let is_get = request.method() == Method::GET && request.version() == Version::HTTP_11;
    if !is_get || !has_word(headers, header::CONNECTION, "upgrade") {
        return Err(bad("a WebSocket handshake is a GET of HTTP/1.1 with \"Connection: Upgrade\"\n"));
    }
    if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version.as_bytes() != b"13") {
        let mut response =
            last(plain(StatusCode::UPGRADE_REQUIRED, "version 13 of the WebSocket protocol is spoken here\n"));
        response.headers_mut().insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        return Err(response);
    }
    let mut keys = headers.get_all(header::SEC_WEBSOCKET_KEY).iter();
    let key = keys.next().filter(|_| keys.next().is_none()).and_then(|key| key.to_str().ok());
    let key = key.filter(|key| STANDARD.decode(key).is_ok_and(|key| key.len() == 16));
    let key = key.ok_or_else(|| bad("a WebSocket handshake has one Sec-WebSocket-Key of 16 bytes in base64\n"))?;
    HeaderValue::from_str(&accept_key(key)).map_err(|_| bad("the Sec-WebSocket-Key cannot be answered\n"))
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    respond(status, "text/plain; charset=utf-8", text)
}

fn respond(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// The connection ends with this response.
fn last(mut response: Response<Body>) -> Refusal {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Box::new(response)
}

/// Sends a client away that is a WebSocket already: with a close frame, and a moment to read it.
async fn part<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, code: CloseCode, reason: &str, farewells: &Semaphore) {
    let Ok(_place) = farewells.try_acquire() else { return };
    let mut frame = vec![0x88, u8::try_from(2 + reason.len()).unwrap_or(2)];
    frame.extend_from_slice(&code.get().to_be_bytes());
    frame.extend_from_slice(reason.as_bytes());
    let farewell = async {
        stream.write_all(&frame).await?;
        stream.shutdown().await?;
        // Until it has closed its side: what it has sent meanwhile would otherwise cost it our last word.
        let mut rest = [0; 512];
        while stream.read(&mut rest).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    // It is told, or it is gone.
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
}
