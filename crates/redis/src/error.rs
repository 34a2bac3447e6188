//! Errors of requests, and whether the server may have executed the request.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::command::CommandError;
use crate::credentials::LoginError;
use crate::resp::{DecodeError, Value};
#[cfg(feature = "tls")]
use crate::tls::{TlsError, TlsHandshakeError};

/// Why a request has no result.
///
/// [`outcome`](Self::outcome) says whether the server may have executed the command, and [`is_retryable`](Self::is_retryable)
/// whether it is safe and useful to send it again.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server answered with an error.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The reply could not be decoded. The connection is replaced.
    #[error("the reply could not be decoded, and the connection was closed: {0}")]
    Protocol(#[from] DecodeError),
    /// The reply does not convert to the requested type. The command was executed.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// The command cannot be sent, or not over a shared connection.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The deadline passed.
    #[error("timed out {phase}: {}", phase.outcome())]
    TimedOut {
        /// The phase that the request was in.
        phase: RequestPhase,
    },
    /// The client is closed, or was closed before the reply came.
    #[error("the client is closed: {outcome}; if it was not closed by the program, `Status::last_error` has the cause")]
    Closed {
        /// Whether the server may have executed the command.
        outcome: RequestOutcome,
    },
    /// The limit of commands or bytes in flight is reached, and [`WhenFull::Fail`](crate::WhenFull::Fail) is set.
    #[error(
        "too many commands or bytes are in flight: {}; send fewer at once, or raise `max_in_flight` and \
         `max_in_flight_bytes`",
        RequestOutcome::NeverSent
    )]
    QueueFull,
    /// There is no connection, or it was lost before the reply came.
    #[error("the connection is lost: {outcome}")]
    Lost {
        /// Whether the server may have executed the command.
        outcome: RequestOutcome,
        /// Why there is no connection.
        source: ConnectionError,
    },
}

/// Whether the server may have executed a command that has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// No byte of it was written. It can be sent again.
    NeverSent,
    /// At least one byte of it was written. The server may have executed it, or may still do so. Send it again only if executing it
    /// twice does no harm.
    MaybeExecuted,
}

/// The phases of a request, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RequestPhase {
    /// Waiting for a permit, or in the queue of an open connection.
    Queued,
    /// Waiting for a connection.
    Connecting,
    /// Partly written.
    Writing,
    /// Written, and waiting for the reply.
    Waiting,
}

/// Why a connection was lost or could not be made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// Connecting, reading or writing failed.
    #[error("{0}")]
    Io(#[source] Arc<io::Error>),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    EndOfStream,
    /// The server closed the connection before it answered the first command of the handshake.
    #[error("the server closed the connection before it answered; check that it is Redis, and whether it expects TLS")]
    ClosedInHandshake,
    /// The server sent something that is not RESP, or a reply above the limits of [`Options::decoder`](crate::Options::decoder).
    #[error("the input could not be decoded: {0}")]
    Protocol(#[source] DecodeError),
    /// The server sent a reply that belongs to no request.
    #[error("the server sent a reply that belongs to no request; it must speak RESP with one reply for each command")]
    UnexpectedReply,
    /// The server refused the handshake: the login, the name or the database.
    #[error("the server refused the handshake: {0}")]
    Refused(#[source] ServerError),
    /// Connecting and the handshake took longer than [`Options::connect_timeout`](crate::Options::connect_timeout).
    #[error(
        "connecting took longer than `connect_timeout`; check the address, that the server is reachable, and whether it expects TLS"
    )]
    ConnectTimedOut,
    /// The TLS handshake with the server failed. Another attempt may succeed, for example with a renewed certificate.
    #[cfg(feature = "tls")]
    #[error("the TLS handshake failed: {0}")]
    Tls(#[source] Arc<TlsHandshakeError>),
    /// [`Options::tls`](crate::Options::tls) is invalid, and the client is closed. Nothing was sent.
    #[cfg(feature = "tls")]
    #[error("the TLS options are invalid: {0}")]
    TlsOptions(#[source] Arc<TlsError>),
    /// The [provider of credentials](crate::credentials::Credentials) failed.
    #[error("the credential provider failed: {0}")]
    Credentials(LoginError),
    /// The server did not answer a `PING` within [`Options::connect_timeout`](crate::Options::connect_timeout). It is sent when a reply
    /// is overdue, and when a pub/sub connection is idle.
    #[error("the server does not respond: a PING was not answered within `connect_timeout`")]
    Unresponsive,
    /// The server rejected a change of the subscriptions that it may accept on another connection.
    #[error("the server rejected a change of the subscriptions: {0}")]
    Subscriptions(#[source] Box<ServerError>),
}

/// An error reply of the server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ServerError {
    /// The code, which is the first word of the reply.
    pub code: ErrorCode,
    /// The text after the code.
    pub message: Box<str>,
}

/// The code of an error reply.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// `ERR`: an error without a code of its own.
    Err,
    /// `WRONGTYPE`: the key holds a value of another type.
    WrongType,
    /// `NOSCRIPT`: the server does not have the script.
    NoScript,
    /// `MOVED`: the slot of the key is on another node.
    Moved,
    /// `ASK`: the key may be on another node, for the next command only.
    Ask,
    /// `OOM`: the server has reached its memory limit.
    OutOfMemory,
    /// `READONLY`: the server is a replica.
    ReadOnly,
    /// `NOAUTH`: the connection is not authenticated.
    NoAuth,
    /// `WRONGPASS`: the user or the password is wrong.
    WrongPassword,
    /// `NOPERM`: the user has no permission for this.
    NoPermission,
    /// `BUSY`: a script has been running for too long.
    Busy,
    /// `BUSYGROUP`: the consumer group exists already.
    BusyGroup,
    /// `BUSYKEY`: the target key exists already.
    BusyKey,
    /// `NOGROUP`: the stream or consumer group does not exist.
    NoGroup,
    /// `LOADING`: the server is loading its data from disk.
    Loading,
    /// `MASTERDOWN`: the replica has lost its primary.
    MasterDown,
    /// `CLUSTERDOWN`: the cluster does not serve this slot.
    ClusterDown,
    /// `TRYAGAIN`: the keys are being moved to another node.
    TryAgain,
    /// `CROSSSLOT`: the keys are in different slots.
    CrossSlot,
    /// `EXECABORT`: a command of the transaction was rejected, so none was executed.
    ExecAbort,
    /// `NOPROTO`: the server does not support this version of the protocol.
    NoProtocol,
    /// `NOREPLICAS`: too few replicas are connected for a write.
    NoReplicas,
    /// `UNKILLABLE`: the script has written and cannot be killed.
    Unkillable,
    /// `NOTBUSY`: no script is running.
    NotBusy,
    /// `MISCONF`: the server cannot persist its data and rejects writes.
    Misconfigured,
    /// Any other code.
    Other(Box<str>),
}

/// A reply that does not convert to the requested type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, got {found}{path}; the command was executed, request another type")]
#[non_exhaustive]
pub struct ConversionError {
    /// The requested type.
    pub expected: &'static str,
    /// The reply, shortened.
    pub found: Box<str>,
    path: Path,
}

/// The position of the value in the reply, if it is known. It is one word long, because errors are moved with every reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Path(#[expect(clippy::box_collection, reason = "for its size")] Option<Box<String>>);

impl Error {
    /// Returns whether the server may have executed the command. `None` if it answered.
    pub fn outcome(&self) -> Option<RequestOutcome> {
        match self {
            Self::Server(_) | Self::Conversion(_) => None,
            Self::Command(_) | Self::QueueFull => Some(RequestOutcome::NeverSent),
            Self::Protocol(_) => Some(RequestOutcome::MaybeExecuted),
            Self::TimedOut { phase } => Some(phase.outcome()),
            Self::Closed { outcome } | Self::Lost { outcome, .. } => Some(*outcome),
        }
    }

    /// Returns whether the command was certainly not executed and may succeed later.
    ///
    /// True for requests that were [never sent](RequestOutcome::NeverSent), unless the client is closed, and for
    /// [temporary errors](ErrorCode::is_temporary) of the server.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Server(error) => error.code.is_temporary(),
            Self::Closed { .. } | Self::Command(_) => false,
            _ => self.outcome() == Some(RequestOutcome::NeverSent),
        }
    }

    /// Returns the code of an error reply.
    pub fn code(&self) -> Option<&ErrorCode> {
        if let Self::Server(error) = self { Some(&error.code) } else { None }
    }
}

impl RequestPhase {
    /// Returns whether the server may have executed a request that timed out in this phase.
    pub fn outcome(self) -> RequestOutcome {
        match self {
            Self::Queued | Self::Connecting => RequestOutcome::NeverSent,
            Self::Writing | Self::Waiting => RequestOutcome::MaybeExecuted,
        }
    }
}

impl Display for RequestPhase {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queued => "in the queue",
            Self::Connecting => "waiting for a connection",
            Self::Writing => "while it was written",
            Self::Waiting => "waiting for the reply",
        })
    }
}

impl Display for RequestOutcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverSent => "the command was not sent",
            Self::MaybeExecuted => "the command may have been executed",
        })
    }
}

impl From<DecodeError> for ConnectionError {
    fn from(error: DecodeError) -> Self {
        Self::Protocol(error)
    }
}

#[cfg(feature = "tls")]
impl From<TlsHandshakeError> for ConnectionError {
    fn from(error: TlsHandshakeError) -> Self {
        match error {
            TlsHandshakeError::Io(error) => error.into(),
            error => Self::Tls(Arc::new(error)),
        }
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl ServerError {
    /// Parses the text of an error reply. Invalid UTF-8 is replaced.
    pub fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let (code, message) = text.trim_end().split_once(' ').unwrap_or((text.trim_end(), ""));
        Self { code: ErrorCode::parse(code), message: message.into() }
    }

    /// Returns the slot of a `MOVED` or `ASK` error, and the address of its node. An empty host means the host that answered.
    pub fn redirection(&self) -> Option<(u16, &str)> {
        if !matches!(self.code, ErrorCode::Moved | ErrorCode::Ask) {
            return None;
        }
        let (slot, address) = self.message.split_once(' ')?;
        Some((slot.parse().ok()?, address))
    }
}

impl Display for ServerError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.code.as_str())?;
        if self.message.is_empty() { Ok(()) } else { write!(f, " {}", self.message) }
    }
}

impl std::error::Error for ServerError {}

/// Defines the text of each code once, for parsing and for printing.
macro_rules! codes {
    ($($code:ident = $word:literal),* $(,)?) => {
        impl ErrorCode {
            fn parse(word: &str) -> Self {
                match word {
                    $($word => Self::$code,)*
                    _ => Self::Other(word.into()),
                }
            }

            /// Returns the code as the server wrote it.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$code => $word,)*
                    Self::Other(word) => word,
                }
            }
        }
    };
}

codes! {
    Err = "ERR",
    WrongType = "WRONGTYPE",
    NoScript = "NOSCRIPT",
    Moved = "MOVED",
    Ask = "ASK",
    OutOfMemory = "OOM",
    ReadOnly = "READONLY",
    NoAuth = "NOAUTH",
    WrongPassword = "WRONGPASS",
    NoPermission = "NOPERM",
    Busy = "BUSY",
    BusyGroup = "BUSYGROUP",
    BusyKey = "BUSYKEY",
    NoGroup = "NOGROUP",
    Loading = "LOADING",
    MasterDown = "MASTERDOWN",
    ClusterDown = "CLUSTERDOWN",
    TryAgain = "TRYAGAIN",
    CrossSlot = "CROSSSLOT",
    ExecAbort = "EXECABORT",
    NoProtocol = "NOPROTO",
    NoReplicas = "NOREPLICAS",
    Unkillable = "UNKILLABLE",
    NotBusy = "NOTBUSY",
    Misconfigured = "MISCONF",
}

impl ErrorCode {
    /// Returns whether the command was not executed and may succeed later without a change.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Busy | Self::Loading | Self::MasterDown | Self::ClusterDown | Self::TryAgain)
    }
}

impl Display for ErrorCode {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl ConversionError {
    /// Creates an error for a value of another type. `expected` has an article: "an integer".
    pub fn new(expected: &'static str, found: &Value) -> Self {
        Self::with_text(expected, describe(found))
    }

    /// Creates an error from a description of the value.
    pub(crate) fn with_text(expected: &'static str, found: String) -> Self {
        Self { expected, found: found.into(), path: Path::default() }
    }

    /// Returns where the value is in a reply that was read with [`Serde`](crate::Serde): fields and indexes, as in `3.ports.0.name`.
    pub fn path(&self) -> Option<&str> {
        self.path.0.as_ref().map(|path| path.as_str())
    }

    /// Prepends a field or index to the path.
    pub(crate) fn within(mut self, step: &str) -> Self {
        let path = self.path().map_or_else(|| step.to_owned(), |path| format!("{step}.{path}"));
        self.path = Path(Some(Box::new(path)));
        self
    }
}

impl Display for Path {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |path| write!(f, " at {path}"))
    }
}

/// The bytes of a string that an error shows.
const SHOWN: usize = 80;

/// Returns the beginning of a string, escaped.
pub(crate) fn shown(bytes: &[u8]) -> impl Display {
    bytes[..bytes.len().min(SHOWN)].escape_ascii()
}

fn describe(value: &Value) -> String {
    let value = value.bare();
    let name = value.type_name();
    let text = |bytes: &Bytes| {
        let rest = if bytes.len() > SHOWN { "…" } else { "" };
        format!("{name} \"{}\"{rest}", shown(bytes))
    };
    match value {
        Value::Null => "null".to_owned(),
        Value::SimpleError(bytes)
        | Value::BlobError(bytes)
        | Value::Simple(bytes)
        | Value::Bulk(bytes)
        | Value::Verbatim(_, bytes)
        | Value::BigNumber(bytes) => text(bytes),
        Value::Array(items) | Value::Set(items) => format!("{name} of {}", items.len()),
        Value::Map(pairs) => format!("{name} of {}", pairs.len()),
        other => format!("{name} {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_reply_has_a_code_and_a_message() {
        let text = "WRONGTYPE Operation against a key holding the wrong kind of value";
        let error = ServerError::parse(text.as_bytes());
        assert_eq!((&error.code, error.to_string().as_str()), (&ErrorCode::WrongType, text));

        let error = ServerError::parse(b"BUSYGROUPS");
        assert_eq!((&error.code, &*error.message), (&ErrorCode::Other("BUSYGROUPS".into()), ""));
        assert_eq!(error.to_string(), "BUSYGROUPS");
        assert_eq!(ServerError::parse(b"").to_string(), "");
        assert_eq!(ServerError::parse(b"E \xff").to_string(), "E \u{fffd}");
    }

    #[test]
    fn redirections_are_parsed() {
        assert_eq!(ServerError::parse(b"MOVED 3999 10.0.0.1:6381").redirection(), Some((3999, "10.0.0.1:6381")));
        assert_eq!(ServerError::parse(b"ASK 1 :6381").redirection(), Some((1, ":6381")));
        for text in ["MOVED", "MOVED x 10.0.0.1:1", "MOVED 70000 a:1", "ERR 1 a:1"] {
            assert_eq!(ServerError::parse(text.as_bytes()).redirection(), None, "{text}");
        }
    }

    #[test]
    fn outcome_depends_on_the_phase() {
        let at = |phase| Error::TimedOut { phase };
        for (error, outcome, again) in [
            (at(RequestPhase::Queued), Some(RequestOutcome::NeverSent), true),
            (at(RequestPhase::Connecting), Some(RequestOutcome::NeverSent), true),
            (at(RequestPhase::Writing), Some(RequestOutcome::MaybeExecuted), false),
            (at(RequestPhase::Waiting), Some(RequestOutcome::MaybeExecuted), false),
            (Error::QueueFull, Some(RequestOutcome::NeverSent), true),
            (Error::Closed { outcome: RequestOutcome::NeverSent }, Some(RequestOutcome::NeverSent), false),
            (ServerError::parse(b"LOADING wait").into(), None, true),
            (ServerError::parse(b"OOM no").into(), None, false),
        ] {
            assert_eq!((error.outcome(), error.is_retryable()), (outcome, again), "{error}");
        }
    }

    #[test]
    fn messages_state_the_outcome_and_are_short() {
        let lost = Error::Lost { outcome: RequestOutcome::MaybeExecuted, source: ConnectionError::EndOfStream };
        assert_eq!(lost.to_string(), "the connection is lost: the command may have been executed");
        let source = std::error::Error::source(&lost).map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("the server closed the connection"));
        let long = ConversionError::new("an integer", &Value::Bulk(vec![b'a'; 5000].into()));
        assert!(long.to_string().len() < 200, "{long}");
    }

    #[test]
    fn error_is_small() {
        assert!(size_of::<Error>() <= 48, "{}", size_of::<Error>());
    }
}
