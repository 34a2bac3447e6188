//! Opens a socket to a server and does the handshake.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
#[cfg(feature = "tls")]
use tidewire_conn::tls::{TlsClientStream, TlsHandshakeError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use crate::credentials;
use crate::resp::{Decoder, Message, encode_command};
use crate::{Address, ConnectionError, ErrorCode, Login, Options, ServerError, Value};

/// A socket to a server.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    #[cfg(feature = "tls")]
    Tls(Box<TlsClientStream<Self>>),
}

/// Bytes that one write gives to TLS, the limit of its own buffer.
#[cfg(feature = "tls")]
const MAX_TLS_WRITE_BYTES: usize = 64 * 1024;

/// A connection after its handshake.
pub(crate) struct Established {
    pub(crate) stream: Stream,
    /// Input after the last reply of the handshake: a push may follow at once.
    pub(crate) input: BytesMut,
    pub(crate) decoder: Decoder,
    /// The ID of the connection on the server, if the server sends it.
    pub(crate) client_id: Option<i64>,
    pub(crate) is_resp3: bool,
    /// Whether the server tracks the keys that the connection reads, if it was asked to.
    pub(super) tracked: Option<Result<(), ServerError>>,
}

/// Why there is no connection.
pub(crate) enum ConnectError {
    /// Another attempt may succeed.
    Failed(ConnectionError),
    /// The server has refused the login or the database, and would do so again.
    Refused(ConnectionError),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        #[cfg(feature = "tls")]
        let error = TlsHandshakeError::from(error);
        Self::Failed(error.into())
    }
}

/// Connects and does the handshake.
pub(crate) async fn connect(options: &Options) -> Result<Established, ConnectError> {
    // Before the socket is opened: servers drop connections that do not authenticate for long.
    let provided = match &options.credentials {
        Some(provider) => Some(
            credentials::ask(provider)
                .await
                .map_err(|error| ConnectError::Failed(ConnectionError::Credentials(error)))?,
        ),
        None => None,
    };
    #[cfg(feature = "tls")]
    let tls = match &options.tls {
        Some(tls) => Some(options.shared_tls.client(options, tls).await.map_err(|error| match error {
            ConnectionError::TlsOptions(_) => ConnectError::Refused(error),
            error => ConnectError::Failed(error),
        })?),
        None => None,
    };
    let stream = match &options.address {
        Address::Tcp { host, port } => {
            let socket = TcpStream::connect((host.as_str(), *port)).await?;
            socket.set_nodelay(true)?;
            // The kernel checks the user timeout when it sends a probe, so the interval of probes has to be short.
            let keepalive =
                socket2::TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10));
            let socket_options = socket2::SockRef::from(&socket);
            socket_options.set_tcp_keepalive(&keepalive)?;
            #[cfg(target_os = "linux")]
            socket_options.set_tcp_user_timeout(Some(user_timeout(options.tcp_user_timeout)))?;
            Stream::Tcp(socket)
        }
        Address::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
    };
    #[cfg(feature = "tls")]
    let stream = match tls {
        Some(tls) => {
            Stream::Tls(Box::new(tls.connect(stream).await.map_err(|error| ConnectError::Failed(error.into()))?))
        }
        None => stream,
    };
    let mut established = Established {
        stream,
        input: BytesMut::new(),
        decoder: Decoder::new(options.decoder),
        client_id: None,
        is_resp3: false,
        tracked: None,
    };
    match established.handshake(options, provided.as_ref().or(options.login.as_ref())).await {
        Ok(()) => Ok(established),
        // The provider may return another login the next time.
        Err(ConnectError::Refused(ConnectionError::Refused(error))) if provided.is_some() && is_about_login(&error) => {
            Err(ConnectError::Failed(ConnectionError::Refused(error)))
        }
        Err(error) => Err(error),
    }
}

/// Rounds up to milliseconds, the unit of the kernel, so that a short timeout is not zero. The kernel takes no more than `i32::MAX`.
#[cfg(target_os = "linux")]
fn user_timeout(timeout: Duration) -> Duration {
    let millis = timeout.as_nanos().div_ceil(1_000_000);
    Duration::from_millis(millis.min(0x7fff_ffff) as u64)
}

/// A refused handshake is final, unless the server is not ready or has too many clients.
fn refused(error: ServerError) -> ConnectError {
    let is_full = error.code == ErrorCode::Err && error.message.starts_with("max number of clients");
    let is_temporary = is_full || error.code.is_temporary();
    let error = ConnectionError::Refused(error);
    if is_temporary { ConnectError::Failed(error) } else { ConnectError::Refused(error) }
}

/// Whether the server refused the user or the password, and not the name or the database.
fn is_about_login(error: &ServerError) -> bool {
    match error.code {
        ErrorCode::WrongPassword | ErrorCode::NoAuth | ErrorCode::NoPermission => true,
        // Before Redis 6.
        ErrorCode::Err => error.message.starts_with("invalid password") || error.message.starts_with("AUTH"),
        _ => false,
    }
}

/// Whether the server does not know `HELLO`, or not RESP3.
fn is_unknown_command(error: &ServerError) -> bool {
    let is_unknown = error.message.to_ascii_lowercase().starts_with("unknown command");
    error.code == ErrorCode::NoProtocol || error.code == ErrorCode::Err && is_unknown
}

/// Whether the server has closed the connection.
fn is_end(error: &ConnectionError) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    match error {
        ConnectionError::EndOfStream => true,
        ConnectionError::Io(error) => matches!(error.kind(), BrokenPipe | ConnectionReset),
        _ => false,
    }
}

/// Returns the ID of the connection in the reply to `HELLO`.
fn client_id(hello: &Value) -> Option<i64> {
    let Value::Map(properties) = hello.bare() else { return None };
    properties.iter().find_map(|(name, value)| match value {
        Value::Integer(id) if name.as_bytes().is_some_and(|name| name == "id") => Some(*id),
        _ => None,
    })
}

impl Established {
    /// Authenticates, sets the name and the database, and switches to RESP3 if the server supports it.
    async fn handshake(&mut self, options: &Options, login: Option<&Login>) -> Result<(), ConnectError> {
        let mut hello: Vec<&str> = vec!["HELLO", "3"];
        let login = login.map(|login| (login.user.as_deref().unwrap_or("default"), &*login.password));
        if let Some((user, password)) = login {
            hello.extend(["AUTH", user, password]);
        }
        if let Some(name) = &options.name {
            hello.extend(["SETNAME", name]);
        }
        let replied = self.call(&hello).await.map_err(|error| match error {
            ConnectError::Failed(error) if self.input.is_empty() && is_end(&error) => {
                ConnectError::Failed(ConnectionError::ClosedInHandshake)
            }
            error => error,
        });
        match replied? {
            Ok(reply) => (self.client_id, self.is_resp3) = (client_id(&reply), true),
            Err(error) if is_unknown_command(&error) => {
                if let Some((user, password)) = login {
                    // Servers without users take the password alone.
                    let with_user = ["AUTH", user, password];
                    let without_user = ["AUTH", password];
                    self.require(if user == "default" { &without_user } else { &with_user }).await?;
                }
                if let Some(name) = &options.name {
                    self.require(&["CLIENT", "SETNAME", name]).await?;
                }
                // Servers before Redis 5 do not know it.
                if let Ok(Value::Integer(id)) = self.call(&["CLIENT", "ID"]).await? {
                    self.client_id = Some(id);
                }
            }
            Err(error) => return Err(refused(error)),
        }
        if options.database > 0 {
            self.require(&["SELECT", &options.database.to_string()]).await?;
        }
        if options.no_evict {
            self.require(&["CLIENT", "NO-EVICT", "ON"]).await?;
        }
        if options.no_touch {
            self.require(&["CLIENT", "NO-TOUCH", "ON"]).await?;
        }
        // Servers before Redis 7.2 do not know it. It is a label for `CLIENT LIST`, so an error does no harm.
        for (attribute, value) in [("LIB-NAME", "tidewire-redis"), ("LIB-VER", env!("CARGO_PKG_VERSION"))] {
            match self.call(&["CLIENT", "SETINFO", attribute, value]).await? {
                // A server without `HELLO` may not have asked for a password before.
                Err(error) if error.code == ErrorCode::NoAuth => return Err(refused(error)),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Sends a command and returns its reply, which may be an error of the server.
    pub(super) async fn call(&mut self, command: &[&str]) -> Result<Result<Value, ServerError>, ConnectError> {
        let mut output = BytesMut::new();
        encode_command(command, &mut output);
        // If the server has ended the connection, it may have sent the reason before.
        let written = async {
            self.stream.write_all(&output).await?;
            self.stream.flush().await
        }
        .await;
        loop {
            match self.decoder.decode(&mut self.input).map_err(|error| ConnectError::Failed(error.into()))? {
                Some(Message::Reply(value)) => {
                    let error = value.as_error().map(|text| ServerError::parse(text));
                    return Ok(error.map_or(Ok(value), Err));
                }
                Some(Message::Push(_)) => {}
                None => {
                    if self.stream.read_buf(&mut self.input).await? == 0 {
                        written?;
                        return Err(ConnectError::Failed(ConnectionError::EndOfStream));
                    }
                }
            }
        }
    }

    /// Sends a command for which an error of the server means that the handshake is refused.
    async fn require(&mut self, command: &[&str]) -> Result<Value, ConnectError> {
        self.call(command).await?.map_err(refused)
    }
}

impl Stream {
    /// Returns how many of these bytes may have been sent by a write that failed.
    pub(super) fn sent_by_failed_write(&self, len: usize) -> usize {
        len.min(match self {
            Self::Tcp(_) | Self::Unix(_) => 0,
            // TLS fails after it has sent a part, and does not say how much.
            #[cfg(feature = "tls")]
            Self::Tls(_) => MAX_TLS_WRITE_BYTES,
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            // The end of a reply is known without the end of TLS, which many servers do not send.
            #[cfg(feature = "tls")]
            Self::Tls(stream) => match Pin::new(stream).poll_read(context, buffer) {
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
                polled => polled,
            },
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            #[cfg(feature = "tls")]
            Self::Tls(stream) => Pin::new(stream).poll_write(context, &bytes[..bytes.len().min(MAX_TLS_WRITE_BYTES)]),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            #[cfg(feature = "tls")]
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            #[cfg(feature = "tls")]
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
