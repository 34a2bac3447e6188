//! Errors of requests, by kind, and whether the server may have executed the request.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::command::CommandError;
use crate::credentials::LoginError;
use crate::resp::{DecodeError, Value};

/// Why a request has no result. It can be cloned, so that all who waited can be told the same.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server answered with an error.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// What came instead of the reply is not RESP. The connection is given up.
    #[error("the reply cannot be read, and the connection is given up: {0}")]
    Protocol(#[from] DecodeError),
    /// The reply is not of the type that was asked for. The command was executed.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// The command cannot be sent: to no server, or not over a connection that others share.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The deadline passed.
    #[error("the deadline passed {phase}: {}", phase.outcome())]
    TimedOut {
        /// What the request waited for when it passed.
        phase: Phase,
    },
    /// The client is closed, or was closed before the reply came.
    #[error("the client is closed: {outcome}; the last error in its status says why, if nobody closed it")]
    Closed {
        /// Whether the server may have executed the command.
        outcome: Outcome,
    },
    /// There are as many requests or bytes in flight as the budget allows.
    #[error("too many requests or bytes are in flight: {}; send less at once or raise the budget", Outcome::NeverSent)]
    QueueFull,
    /// There is no connection, or it broke before the reply came.
    #[error("the connection is lost: {outcome}")]
    Lost {
        /// Whether the server may have executed the command.
        outcome: Outcome,
        /// What happened to the connection.
        source: Fault,
    },
}

/// Whether the server may have executed a command that has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// No byte of it was written. It can be sent again.
    NeverSent,
    /// Some of it was written. The server may have executed it, or may still do so. Send it again only if that does no harm.
    MaybeExecuted,
}

/// What a request waits for, in the order in which it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// For room in the budget or for those before it.
    Queued,
    /// For a connection.
    Connecting,
    /// For the rest of it to be written.
    Writing,
    /// For the reply.
    Waiting,
}

/// What happens to connections.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Connecting, reading or writing failed.
    #[error("{0}")]
    Io(#[source] Arc<io::Error>),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    EndOfStream,
    /// What came is not RESP.
    #[error("the server does not keep to the protocol: {0}")]
    Protocol(#[source] DecodeError),
    /// A reply came that nobody asked for.
    #[error("the server sent a reply that nobody asked for")]
    StrayReply,
    /// The server refused the handshake.
    #[error("the server refused the handshake: {0}")]
    Refused(#[source] ServerError),
    /// Connecting and the handshake took too long.
    #[error("there was no connection within the time for connecting")]
    ConnectTimedOut,
    /// Nobody could say who logs in.
    #[error("nobody could say who logs in: {0}")]
    NoLogin(LoginError),
    /// Nothing was heard for too long, not even the reply to a `PING`.
    #[error("the server is silent: it did not even answer a PING")]
    Silent,
}

/// An error that the server answered with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ServerError {
    /// The first word of it.
    pub code: ErrorCode,
    /// What follows the first word.
    pub message: Box<str>,
}

/// The first word of an error, which says what kind of error it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// `ERR`: anything that has no code of its own.
    Err,
    /// `WRONGTYPE`: the key holds a value of another type.
    WrongType,
    /// `NOSCRIPT`: the server does not have the script.
    NoScript,
    /// `MOVED`: the slot of the key is on another node.
    Moved,
    /// `ASK`: the key may be on another node, for this once.
    Ask,
    /// `OOM`: the server is at its limit of memory.
    OutOfMemory,
    /// `READONLY`: the server is a replica.
    ReadOnly,
    /// `NOAUTH`: nobody is logged in.
    NoAuth,
    /// `WRONGPASS`: the user or the password is wrong.
    WrongPassword,
    /// `NOPERM`: the user may not do this.
    NoPermission,
    /// `BUSY`: a script has been running for too long.
    Busy,
    /// `BUSYGROUP`: the consumer group exists.
    BusyGroup,
    /// `BUSYKEY`: the target exists.
    BusyKey,
    /// `NOGROUP`: there is no such stream or consumer group.
    NoGroup,
    /// `LOADING`: the server is reading its data from disk.
    Loading,
    /// `MASTERDOWN`: the replica has lost its primary.
    MasterDown,
    /// `CLUSTERDOWN`: the cluster does not serve this slot.
    ClusterDown,
    /// `TRYAGAIN`: the keys are being moved to another node.
    TryAgain,
    /// `CROSSSLOT`: the keys are of different slots.
    CrossSlot,
    /// `EXECABORT`: a command of the transaction was refused, so none was executed.
    ExecAbort,
    /// `NOPROTO`: the server does not speak this version of the protocol.
    NoProtocol,
    /// `NOREPLICAS`: too few replicas for a write.
    NoReplicas,
    /// `UNKILLABLE`: the script has written something.
    Unkillable,
    /// `NOTBUSY`: no script is running.
    NotBusy,
    /// `MISCONF`: the server cannot persist, so it does not write.
    Misconfigured,
    /// Another word.
    Other(Box<str>),
}

/// A reply is not what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the reply is not {expected} but {found}{place}: the command was executed, ask for another type")]
#[non_exhaustive]
pub struct ConversionError {
    /// What was asked for.
    pub expected: &'static str,
    /// What came, in short.
    pub found: Box<str>,
    place: Place,
}

/// Where in a reply, if it is known. It is one word long, as errors are moved with every reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Place(#[expect(clippy::box_collection, reason = "for its size")] Option<Box<String>>);

impl Error {
    /// Whether the server may have executed the command. `None` where it answered.
    pub fn outcome(&self) -> Option<Outcome> {
        match self {
            Self::Server(_) | Self::Conversion(_) => None,
            Self::Command(_) | Self::QueueFull => Some(Outcome::NeverSent),
            Self::Protocol(_) => Some(Outcome::MaybeExecuted),
            Self::TimedOut { phase } => Some(phase.outcome()),
            Self::Closed { outcome } | Self::Lost { outcome, .. } => Some(*outcome),
        }
    }

    /// Whether the same command was surely not executed and may succeed later.
    ///
    /// That is so for what was [never sent](Outcome::NeverSent) by a client that is not closed, and for
    /// [errors that pass](ErrorCode::is_temporary).
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Server(error) => error.code.is_temporary(),
            Self::Closed { .. } | Self::Command(_) => false,
            _ => self.outcome() == Some(Outcome::NeverSent),
        }
    }

    /// The code of an error of the server.
    pub fn code(&self) -> Option<&ErrorCode> {
        if let Self::Server(error) = self { Some(&error.code) } else { None }
    }
}

impl Phase {
    /// Whether the server may have executed what waits for this.
    pub fn outcome(self) -> Outcome {
        match self {
            Self::Queued | Self::Connecting => Outcome::NeverSent,
            Self::Writing | Self::Waiting => Outcome::MaybeExecuted,
        }
    }
}

impl Display for Phase {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queued => "in the queue",
            Self::Connecting => "before there was a connection",
            Self::Writing => "while the command was being written",
            Self::Waiting => "before the reply came",
        })
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverSent => "the command was not sent",
            Self::MaybeExecuted => "the command may have been executed",
        })
    }
}

impl From<DecodeError> for Fault {
    fn from(error: DecodeError) -> Self {
        Self::Protocol(error)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl ServerError {
    /// From what stands in the reply. Bytes that are not UTF-8 are replaced.
    pub fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let (code, message) = text.trim_end().split_once(' ').unwrap_or((text.trim_end(), ""));
        Self { code: ErrorCode::parse(code), message: message.into() }
    }

    /// Where `MOVED` and `ASK` point to: a slot, and a host and port. The host may be empty: the one that answered.
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

/// Each code once, so that reading and writing cannot differ.
macro_rules! codes {
    ($($code:ident = $word:literal),* $(,)?) => {
        impl ErrorCode {
            fn parse(word: &str) -> Self {
                match word {
                    $($word => Self::$code,)*
                    _ => Self::Other(word.into()),
                }
            }

            /// The word.
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
    /// Whether the server did nothing, and may do it later without anybody's help.
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
    /// That `found` is not what was expected, which is said with its article: "an integer".
    pub fn new(expected: &'static str, found: &Value) -> Self {
        Self::with_text(expected, describe(found))
    }

    /// The same, in words.
    pub(crate) fn with_text(expected: &'static str, found: String) -> Self {
        Self { expected, found: found.into(), place: Place::default() }
    }

    /// Where it is in what was read with [`Serde`](crate::Serde): fields and the numbers of elements, as in `3.ports.0.name`.
    pub fn place(&self) -> Option<&str> {
        self.place.0.as_ref().map(|place| place.as_str())
    }

    /// The same error, in this field or element.
    pub(crate) fn within(mut self, step: &str) -> Self {
        let place = self.place().map_or_else(|| step.to_owned(), |place| format!("{step}.{place}"));
        self.place = Place(Some(Box::new(place)));
        self
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |place| write!(f, " at {place}"))
    }
}

/// What of a string stands in an error.
const SHOWN: usize = 80;

/// The beginning of a string, without what would disturb a terminal.
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
    fn an_error_is_its_code_and_the_rest() {
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
    fn a_redirection_is_read() {
        assert_eq!(ServerError::parse(b"MOVED 3999 10.0.0.1:6381").redirection(), Some((3999, "10.0.0.1:6381")));
        assert_eq!(ServerError::parse(b"ASK 1 :6381").redirection(), Some((1, ":6381")));
        for text in ["MOVED", "MOVED x 10.0.0.1:1", "MOVED 70000 a:1", "ERR 1 a:1"] {
            assert_eq!(ServerError::parse(text.as_bytes()).redirection(), None, "{text}");
        }
    }

    #[test]
    fn the_outcome_is_that_of_the_phase() {
        let at = |phase| Error::TimedOut { phase };
        for (error, outcome, again) in [
            (at(Phase::Queued), Some(Outcome::NeverSent), true),
            (at(Phase::Connecting), Some(Outcome::NeverSent), true),
            (at(Phase::Writing), Some(Outcome::MaybeExecuted), false),
            (at(Phase::Waiting), Some(Outcome::MaybeExecuted), false),
            (Error::QueueFull, Some(Outcome::NeverSent), true),
            (Error::Closed { outcome: Outcome::NeverSent }, Some(Outcome::NeverSent), false),
            (ServerError::parse(b"LOADING wait").into(), None, true),
            (ServerError::parse(b"OOM no").into(), None, false),
        ] {
            assert_eq!((error.outcome(), error.is_retryable()), (outcome, again), "{error}");
        }
    }

    #[test]
    fn messages_say_what_happened() {
        let lost = Error::Lost { outcome: Outcome::MaybeExecuted, source: Fault::EndOfStream };
        assert_eq!(lost.to_string(), "the connection is lost: the command may have been executed");
        let source = std::error::Error::source(&lost).map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("the server closed the connection"));
        let long = ConversionError::new("an integer", &Value::Bulk(vec![b'a'; 5000].into()));
        assert!(long.to_string().len() < 200, "{long}");
    }

    #[test]
    fn an_error_is_small() {
        assert!(size_of::<Error>() <= 48, "{}", size_of::<Error>());
    }
}
