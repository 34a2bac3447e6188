//! Sockets to a server, and the handshake on them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;

use crate::{
    Address, Credentials, Decoder, ErrorCode, Fault, Login, LoginError, Message, Options, ServerError, Value,
    encode_command,
};

/// A socket to a server that has let us in.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A conversation with a server that has let us in.
pub(crate) struct Entered {
    pub(crate) stream: Stream,
    /// What was read behind the last word of the handshake, as far as it was understood: a push may follow at once.
    pub(crate) input: BytesMut,
    pub(crate) decoder: Decoder,
}

/// Why there is none.
pub(crate) enum Refusal {
    /// It may be another time.
    Failed(Fault),
    /// The server does not let us in.
    Refused(Fault),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// Connects, and says who we are.
pub(crate) async fn connect(options: &Options) -> Result<Entered, Refusal> {
    // Asked first: a server drops those who connect and do not say who they are.
    let given = match &options.credentials {
        Some(credentials) => Some(login(credentials).await.map_err(|source| Refusal::Failed(Fault::NoLogin(source)))?),
        None => None,
    };
    let stream = match &options.address {
        Address::Tcp { host, port } => {
            let socket = TcpStream::connect((host.as_str(), *port)).await?;
            socket.set_nodelay(true)?;
            // The kernel looks at the user time-out when it asks, so it has to ask again soon.
            let keepalive =
                socket2::TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10));
            let socket_options = socket2::SockRef::from(&socket);
            socket_options.set_tcp_keepalive(&keepalive)?;
            #[cfg(target_os = "linux")]
            socket_options.set_tcp_user_timeout(Some(Duration::from_secs(30)))?;
            Stream::Tcp(socket)
        }
        Address::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
    };
    let mut entered = Entered { stream, input: BytesMut::new(), decoder: Decoder::new(options.decoder) };
    match entered.greet(options, given.as_ref().or(options.login.as_ref())).await {
        Ok(()) => Ok(entered),
        // The next time it may be somebody else.
        Err(Refusal::Refused(Fault::Refused(said))) if given.is_some() && is_of_login(&said) => {
            Err(Refusal::Failed(Fault::Refused(said)))
        }
        Err(refusal) => Err(refusal),
    }
}

/// Asks on a task of its own, which ends with this: a provider that panics makes an attempt fail, and not the client end.
async fn login(credentials: &Arc<dyn Credentials>) -> Result<Login, LoginError> {
    let mut asking = JoinSet::new();
    let credentials = Arc::clone(credentials);
    asking.spawn(async move { credentials.login().await });
    match asking.join_next().await {
        Some(Ok(login)) => login,
        Some(Err(panicked)) => Err(Arc::new(panicked)),
        None => Err(Arc::new(io::Error::from(io::ErrorKind::NotFound))),
    }
}

/// Not to be let in is for good, unless it is the server that is not ready: then it may be another time.
fn refusal(said: ServerError) -> Refusal {
    let is_full = said.code == ErrorCode::Err && said.message.starts_with("max number of clients");
    let is_for_now = is_full || said.code.is_temporary();
    let fault = Fault::Refused(said);
    if is_for_now { Refusal::Failed(fault) } else { Refusal::Refused(fault) }
}

/// Whether it is who we are that a server does not like, and not what we ask for.
fn is_of_login(said: &ServerError) -> bool {
    let is_old = said.message.starts_with("invalid password") || said.message.starts_with("AUTH");
    match said.code {
        ErrorCode::WrongPassword | ErrorCode::NoAuth | ErrorCode::NoPermission => true,
        ErrorCode::Err => is_old,
        _ => false,
    }
}

/// Whether a server does not know what was asked, or not this version of the protocol.
fn is_unknown(said: &ServerError) -> bool {
    let is_unknown = said.message.to_ascii_lowercase().starts_with("unknown command");
    said.code == ErrorCode::NoProtocol || said.code == ErrorCode::Err && is_unknown
}

impl Entered {
    /// Says who we are, in RESP3 if the server knows it.
    async fn greet(&mut self, options: &Options, login: Option<&Login>) -> Result<(), Refusal> {
        let mut hello: Vec<&str> = vec!["HELLO", "3"];
        let login = login.map(|login| (login.user.as_deref().unwrap_or("default"), &*login.password));
        if let Some((user, password)) = login {
            hello.extend(["AUTH", user, password]);
        }
        if let Some(name) = &options.name {
            hello.extend(["SETNAME", name]);
        }
        match self.ask(&hello).await? {
            Ok(_) => {}
            Err(error) if is_unknown(&error) => {
                if let Some((user, password)) = login {
                    // Servers that know no users know this.
                    let words = ["AUTH", user, password];
                    let without_user = ["AUTH", password];
                    self.demand(if user == "default" { &without_user } else { &words }).await?;
                }
                if let Some(name) = &options.name {
                    self.demand(&["CLIENT", "SETNAME", name]).await?;
                }
            }
            Err(error) => return Err(refusal(error)),
        }
        if options.database > 0 {
            self.demand(&["SELECT", &options.database.to_string()]).await?;
        }
        // Old servers do not know it, and nobody misses it.
        for (what, value) in [("LIB-NAME", "tidewire-redis"), ("LIB-VER", env!("CARGO_PKG_VERSION"))] {
            match self.ask(&["CLIENT", "SETINFO", what, value]).await? {
                // One that knows no `HELLO` may not have said before that it wants a password.
                Err(error) if error.code == ErrorCode::NoAuth => return Err(refusal(error)),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// What the server answers, which may be an error.
    async fn ask(&mut self, command: &[&str]) -> Result<Result<Value, ServerError>, Refusal> {
        let mut output = BytesMut::new();
        encode_command(command, &mut output);
        self.stream.write_all(&output).await?;
        loop {
            match self.decoder.decode(&mut self.input).map_err(|error| Refusal::Failed(error.into()))? {
                Some(Message::Reply(value)) => {
                    let refused = value.as_error().map(|text| ServerError::parse(text));
                    return Ok(refused.map_or(Ok(value), Err));
                }
                Some(Message::Push(_)) => {}
                None => {
                    if self.stream.read_buf(&mut self.input).await? == 0 {
                        return Err(Refusal::Failed(Fault::EndOfStream));
                    }
                }
            }
        }
    }

    /// The same, where an error means that we are not let in.
    async fn demand(&mut self, command: &[&str]) -> Result<Value, Refusal> {
        self.ask(command).await?.map_err(refusal)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
