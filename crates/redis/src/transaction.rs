//! Transactions: commands that the server executes together, with no other command in between.
//!
//! `MULTI`, the commands and `EXEC` are one submission, so on the shared connection nothing of other tasks or of the client itself is
//! written between them.

use std::fmt::{self, Debug, Formatter};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::Client;
use crate::command::CommandError;
use crate::connection::{ConnectionShared, PipelineReplies, after};
use crate::error::{ConversionError, ErrorCode, ServerError};
use crate::pipeline::{Append, Pipeline, ReplyTypes};
use crate::request::Request;
use crate::resp::{Value, encode_command};
use crate::{Error, RequestOutcome};

/// Commands that the server executes together (`MULTI`, `EXEC`). `S` is the type of their replies, as of a [`Pipeline`].
///
/// The server executes all of them, with no command of another client in between, or none. An error of one command, such as one on a
/// key of the wrong type, does not undo the others: each command has its own result.
///
/// ```
/// use tidewire_redis::{Client, Options, Transaction, commands};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let redis = tidewire_testkit::RedisServer::start();
/// # let client = Client::start(Options::default().address(redis.addr()));
/// let transfer = Transaction::new().then(commands::decrby("tern", 5)).then(commands::incrby("petrel", 5));
/// let (tern, petrel) = client.transaction(transfer).await?;
/// assert_eq!((tern?, petrel?), (-5, 5));
/// # Ok(())
/// # }
/// ```
#[must_use = "a transaction does nothing until it is sent"]
pub struct Transaction<S> {
    /// The encoded bytes begin with `MULTI`.
    commands: Pipeline<S>,
}

/// Why a transaction has no results.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// The server refused a command when it was queued, so it executed none.
    #[error("the server executed no command of the transaction: {reason}{}", FirstRefused(refused))]
    Aborted {
        /// The reply of the server to `EXEC`.
        reason: ServerError,
        /// The commands that it refused, by their position from 0, and why. None if it refused `EXEC` itself.
        refused: Vec<(usize, ServerError)>,
    },
    /// A watched key was changed by another client, so the server executed none. Try again with the new value.
    #[error("a watched key was changed, so the server executed no command of the transaction; read it and try again")]
    Changed,
    /// The server refused `MULTI` and executed the commands one by one. It can only happen if the permissions of the user change while
    /// the connection is open, because the client checks them before the first transaction on it and after a change of the login.
    #[error("the server refused MULTI, so it executed the commands one by one: {0}")]
    NotAtomic(#[source] ServerError),
    /// The transaction was not sent, or has no reply. [`Error::outcome`] says whether the server may have executed it.
    #[error(transparent)]
    Request(#[from] Error),
}

impl TransactionError {
    /// Returns whether the transaction was certainly not executed and may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Changed => true,
            Self::Aborted { reason, refused } => match &refused[..] {
                // `EXECABORT Transaction discarded because of: ` and the error of `EXEC`.
                [] => (reason.message.split_once("because of: "))
                    .is_some_and(|(_, error)| ServerError::parse(error.as_bytes()).code.is_temporary()),
                refused => refused.iter().all(|(_, error)| error.code.is_temporary()),
            },
            Self::NotAtomic(_) => false,
            Self::Request(error) => error.is_retryable(),
        }
    }
}

impl From<CommandError> for TransactionError {
    fn from(error: CommandError) -> Self {
        Self::Request(error.into())
    }
}

/// Names the first command that was refused.
struct FirstRefused<'a>(&'a [(usize, ServerError)]);

impl fmt::Display for FirstRefused<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0.first() {
            Some((position, error)) => write!(f, "; it refused command {} with {error}", position + 1),
            None => Ok(()),
        }
    }
}

impl Transaction<()> {
    /// Creates an empty transaction, to which [`then`](Self::then) appends commands of different types.
    pub fn new() -> Self {
        Self { commands: Pipeline::starting_with(multi()) }
    }
}

impl Default for Transaction<()> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Transaction<Vec<T>> {
    /// Creates an empty transaction, to which [`push`](Self::push) appends commands of one type.
    pub fn vector() -> Self {
        Self { commands: Pipeline::starting_with(multi()) }
    }

    /// Appends a command.
    pub fn push(&mut self, request: impl Into<Request<T>>) {
        self.commands.push(request);
    }
}

impl<S> Transaction<S> {
    /// Appends a command, and the type of its reply to the tuple.
    pub fn then<T>(self, request: Request<T>) -> Transaction<S::Longer>
    where
        S: Append<T>,
    {
        Transaction { commands: self.commands.then(request) }
    }

    /// Returns the number of commands, without `MULTI` and `EXEC`.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    /// Returns whether there are no commands.
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Checks whether the commands can be sent. Returns the error of the first that cannot.
    pub fn check(&self) -> Result<(), CommandError> {
        self.commands.check_without_wait()
    }
}

impl<T> FromIterator<Request<T>> for Transaction<Vec<T>> {
    fn from_iter<I: IntoIterator<Item = Request<T>>>(requests: I) -> Self {
        let mut transaction = Self::vector();
        for request in requests {
            transaction.push(request);
        }
        transaction
    }
}

impl<S> Clone for Transaction<S> {
    fn clone(&self) -> Self {
        Self { commands: self.commands.clone() }
    }
}

/// Does not show the arguments, which may be secret.
impl<S> Debug for Transaction<S> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<S: ReplyTypes> Transaction<S> {
    /// Sends the transaction over a connection.
    pub(crate) async fn execute(
        self,
        connection: &ConnectionShared,
        timeout: Duration,
    ) -> Result<S::Results, TransactionError> {
        self.check()?;
        let len = self.len();
        if len == 0 {
            return Ok(S::read(0, || Err(unanswered())));
        }
        let mut bytes = self.commands.into_bytes();
        encode_command(&["EXEC"], &mut bytes);
        let replies = connection.call_all(&bytes, len + 2, timeout).await?;
        read(replies, len).map(|values| {
            let mut values = values.into_iter();
            S::read(len, || values.next().ok_or_else(unanswered))
        })
    }
}

/// Reads the replies to `MULTI`, to `len` commands, and to `EXEC`. Returns those of the commands.
fn read(PipelineReplies { values, error }: PipelineReplies, len: usize) -> Result<Vec<Value>, TransactionError> {
    if let Some(error) = error {
        return Err(error.into());
    }
    let mut values = values.into_iter();
    let multi = values.next().ok_or_else(unanswered)?;
    if let Some(text) = multi.as_error() {
        let error = ServerError::parse(text);
        let is_executed = values.take(len).any(|reply| reply.as_error().is_none());
        return Err(if is_executed { TransactionError::NotAtomic(error) } else { Error::Server(error).into() });
    }
    let refused: Vec<_> = (values.by_ref().take(len).enumerate())
        .filter_map(|(position, reply)| Some((position, ServerError::parse(reply.as_error()?))))
        .collect();
    match values.next().ok_or_else(unanswered)?.into_bare() {
        Value::Array(replies) if replies.len() == len => Ok(replies),
        Value::Null => Err(TransactionError::Changed),
        other => match other.as_error().map(|text| ServerError::parse(text)) {
            Some(reason) if reason.code == ErrorCode::ExecAbort => Err(TransactionError::Aborted { reason, refused }),
            Some(error) => Err(Error::Server(error).into()),
            None => {
                Err(Error::Conversion(ConversionError::new("a reply for each command of a transaction", &other)).into())
            }
        },
    }
}

fn unanswered() -> Error {
    Error::Closed { outcome: RequestOutcome::MaybeExecuted }
}

fn multi() -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_command(&["MULTI"], &mut bytes);
    bytes
}

impl Client {
    /// Sends a transaction and returns a result for each of its commands.
    ///
    /// It is one submission on the shared connection. Before the first transaction on a connection, the client checks that the user may
    /// use `MULTI`: otherwise the server would execute the commands one by one.
    ///
    /// # Errors
    ///
    /// [`TransactionError`] says whether the server executed the transaction. An error of a single command is in its own result.
    pub async fn transaction<S: ReplyTypes>(
        &self,
        transaction: Transaction<S>,
    ) -> Result<S::Results, TransactionError> {
        transaction.check()?;
        let deadline = after(self.timeout);
        self.shared.check_multi(self.timeout).await?;
        let rest = deadline.saturating_duration_since(Instant::now());
        transaction.execute(&self.shared.connection, rest).await
    }
}
