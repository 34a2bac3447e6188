//! Pipelines: commands that are sent together, each with its own result.

use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;
use std::time::Duration;

use crate::command::{Command, CommandError};
use crate::connection::{ConnectionShared, PipelineReplies};
use crate::convert::FromValue;
use crate::error::{Error, RequestOutcome};
use crate::request::{Request, read_reply};
use crate::resp::Value;
use crate::sharing::{self, NotShareable};

/// Commands that are sent together. `S` is the type of their replies: a tuple of up to twelve types, or a `Vec` of one type.
///
/// It is not a transaction: the server may execute commands of other clients between them. Each command has its own result, and an
/// error of one does not affect the others.
///
/// ```
/// use tidewire_redis::{Pipeline, commands};
///
/// // Different types: the results are a tuple.
/// let fixed = Pipeline::new().then(commands::incr("visits")).then(commands::get("name").returning::<Option<String>>());
/// assert_eq!(fixed.len(), 2);
///
/// // One type: the results are a vector.
/// let vector: Pipeline<Vec<_>> = ["a", "b", "c"].into_iter().map(commands::get).collect();
/// assert_eq!(vector.len(), 3);
/// ```
#[must_use = "a pipeline does nothing until it is sent"]
pub struct Pipeline<S> {
    encoded: Vec<u8>,
    len: usize,
    error: Option<CommandError>,
    /// The `WAIT` or `WAITAOF` that ends the pipeline.
    wait: Option<FinalWait>,
    results: PhantomData<fn() -> S>,
}

/// The last command of a pipeline that waits for the writes before it.
#[derive(Clone, Copy)]
struct FinalWait {
    row: &'static NotShareable,
    /// For how long it waits. [`Duration::MAX`] means that there is no limit.
    timeout: Duration,
}

/// Memory to reserve for each command of an iterator, and for all of them.
const COMMAND_BYTES: usize = 40;
const MAX_RESERVED_BYTES: usize = 64 << 10;

/// The types of the replies to a pipeline: a tuple of up to twelve types, or a `Vec` of one type.
pub trait ReplyTypes {
    /// A `Result` for each command.
    type Results;

    /// Converts the replies, which `next` returns in the order of the commands. `len` is the number of commands.
    fn read(len: usize, next: impl FnMut() -> Result<Value, Error>) -> Self::Results;
}

/// A tuple of types to which another type can be appended.
pub trait Append<T> {
    /// The longer tuple.
    type Longer: ReplyTypes;
}

impl Pipeline<()> {
    /// Creates an empty pipeline, to which [`then`](Self::then) appends commands of different types.
    pub fn new() -> Self {
        Self::empty()
    }
}

impl Default for Pipeline<()> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<T> Pipeline<Vec<T>> {
    /// Creates an empty pipeline, to which [`push`](Self::push) appends commands of one type.
    pub fn vector() -> Self {
        Self::empty()
    }

    /// Appends a command.
    pub fn push(&mut self, request: impl Into<Request<T>>) {
        self.append(&request.into());
    }
}

impl<S> Pipeline<S> {
    /// Appends a command, and the type of its reply to the tuple.
    #[expect(clippy::needless_pass_by_value, reason = "requests are made in place")]
    pub fn then<T>(mut self, request: Request<T>) -> Pipeline<S::Longer>
    where
        S: Append<T>,
    {
        self.append(&request);
        Pipeline { encoded: self.encoded, len: self.len, error: self.error, wait: self.wait, results: PhantomData }
    }

    /// Returns the number of commands.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no commands.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the encoded commands.
    pub fn as_bytes(&self) -> &[u8] {
        &self.encoded
    }

    /// Returns the length of the encoded commands in bytes.
    pub fn size(&self) -> usize {
        self.encoded.len()
    }

    /// Checks whether the commands can be sent. Returns the error of the first that cannot.
    pub fn check(&self) -> Result<(), CommandError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Checks whether the commands can be sent together where `WAIT` and `WAITAOF` are not possible.
    pub(crate) fn check_without_wait(&self) -> Result<(), CommandError> {
        self.check()?;
        self.wait.map_or(Ok(()), |wait| Err(CommandError::NotShareable(wait.row)))
    }

    fn empty() -> Self {
        Self::starting_with(Vec::new())
    }

    /// An empty pipeline whose encoded bytes begin with these.
    pub(crate) fn starting_with(encoded: Vec<u8>) -> Self {
        Self { encoded, len: 0, error: None, wait: None, results: PhantomData }
    }

    /// Returns the encoded commands.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.encoded
    }

    /// Returns for how long the last command waits, if it is `WAIT` or `WAITAOF`.
    pub(crate) fn final_wait(&self) -> Option<Duration> {
        self.wait.map(|wait| wait.timeout)
    }

    /// Checks whether a command can be appended.
    fn check_next(&mut self, command: &Command) -> Result<(), CommandError> {
        if let Some(wait) = &self.wait {
            return Err(CommandError::NotShareable(wait.row));
        }
        match command.check() {
            Err(CommandError::NotShareable(row)) => match sharing::final_wait(row, command.as_bytes()) {
                Some(timeout) => self.wait = Some(FinalWait { row, timeout }),
                None => return Err(CommandError::NotShareable(row)),
            },
            checked => return checked,
        }
        Ok(())
    }

    fn append<T>(&mut self, request: &Request<T>) {
        let command = request.command();
        if let Err(error) = self.check_next(command) {
            self.error.get_or_insert(error);
        }
        self.encoded.extend_from_slice(command.as_bytes());
        self.len += 1;
    }
}

impl<S: ReplyTypes> Pipeline<S> {
    /// Sends the commands over a connection. If the connection is lost, the commands without a reply have the error.
    pub(crate) async fn execute(&self, connection: &ConnectionShared, timeout: Duration) -> S::Results {
        let called = match self.len() {
            0 => Ok(PipelineReplies { values: Vec::new(), error: None }),
            len => connection.call_all(self.as_bytes(), len, timeout).await,
        };
        self.read(called)
    }

    /// Reads the replies. Those that are missing have the error.
    pub(crate) fn read(&self, called: Result<PipelineReplies, Error>) -> S::Results {
        let PipelineReplies { values, error } =
            called.unwrap_or_else(|error| PipelineReplies { values: Vec::new(), error: Some(error) });
        // There are as many values as commands, unless there is an error.
        let missing = || error.clone().unwrap_or(Error::Closed { outcome: RequestOutcome::MaybeExecuted });
        let mut values = values.into_iter();
        S::read(self.len, || values.next().ok_or_else(missing))
    }
}

impl<T> FromIterator<Request<T>> for Pipeline<Vec<T>> {
    fn from_iter<I: IntoIterator<Item = Request<T>>>(requests: I) -> Self {
        let requests = requests.into_iter();
        let mut pipeline = Self::empty();
        pipeline.encoded.reserve(requests.size_hint().0.saturating_mul(COMMAND_BYTES).min(MAX_RESERVED_BYTES));
        for request in requests {
            pipeline.append(&request);
        }
        pipeline
    }
}

impl<S> Clone for Pipeline<S> {
    fn clone(&self) -> Self {
        Self {
            encoded: self.encoded.clone(),
            len: self.len,
            error: self.error.clone(),
            wait: self.wait,
            results: PhantomData,
        }
    }
}

/// Does not show the arguments, which may be secret.
impl<S> Debug for Pipeline<S> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").field("len", &self.len).field("size", &self.size()).finish_non_exhaustive()
    }
}

impl<T: FromValue> ReplyTypes for Vec<T> {
    type Results = Vec<Result<T, Error>>;

    fn read(len: usize, mut next: impl FnMut() -> Result<Value, Error>) -> Self::Results {
        (0..len).map(|_| next().and_then(read_reply)).collect()
    }
}

macro_rules! tuples {
    ($($name:ident)*) => {
        impl<$($name: FromValue),*> ReplyTypes for ($($name,)*) {
            type Results = ($(Result<$name, Error>,)*);

            #[allow(clippy::unused_unit, unused_mut, unused_variables, reason = "for the empty tuple")]
            fn read(_: usize, mut next: impl FnMut() -> Result<Value, Error>) -> Self::Results {
                ($(next().and_then(read_reply::<$name>),)*)
            }
        }
    };
}

macro_rules! extensions {
    ($($name:ident)*) => {
        impl<$($name: FromValue,)* Last: FromValue> Append<Last> for ($($name,)*) {
            type Longer = ($($name,)* Last,);
        }
    };
}

macro_rules! each {
    ($macro:ident: $($first:ident $($rest:ident)*)?) => {
        $macro! { $($first $($rest)*)? }
        $(each! { $macro: $($rest)* })?
    };
}

each! { tuples: A B C D E F G H I J K L }
each! { extensions: A B C D E F G H I J K }

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command;
    use crate::error::ErrorCode;

    fn replies(values: Vec<Value>) -> impl FnMut() -> Result<Value, Error> {
        let mut values = values.into_iter();
        move || values.next().ok_or(Error::QueueFull)
    }

    #[test]
    fn each_command_has_its_own_result() {
        fn read<S: ReplyTypes>(pipeline: &Pipeline<S>, values: Vec<Value>) -> S::Results {
            S::read(pipeline.len(), replies(values))
        }
        let pipeline = Pipeline::new()
            .then(Command::new("A").returning::<i64>())
            .then(Command::new("B").arg("x").returning::<String>())
            .then(Command::new("C").returning::<bool>());
        assert_eq!(pipeline.as_bytes(), b"*1\r\n$1\r\nA\r\n*2\r\n$1\r\nB\r\n$1\r\nx\r\n*1\r\n$1\r\nC\r\n");
        let (first, second, third) = read(&pipeline, vec![7.into(), Value::SimpleError("OOM no".into()), "no".into()]);
        assert_eq!(first.ok(), Some(7));
        assert_eq!(second.err().and_then(|error| error.code().cloned()), Some(ErrorCode::OutOfMemory));
        assert!(matches!(third, Err(Error::Conversion(_))));
    }

    #[test]
    fn vector_has_a_result_for_each_command() {
        let mut pipeline = Pipeline::<Vec<i64>>::vector();
        pipeline.push(Command::new("A"));
        pipeline.push(Command::new("B").returning());
        let results = <Vec<i64> as ReplyTypes>::read(pipeline.len(), replies(vec![1.into()]));
        assert!(matches!(results[..], [Ok(1), Err(Error::QueueFull)]), "{results:?}");
    }

    #[test]
    fn only_the_last_command_can_wait_for_the_writes() {
        let wait = |timeout: &str| Command::new("WAIT").arg(1).arg(timeout).returning::<i64>();
        let write = || Command::new("INCR").arg("a").returning::<i64>();
        let pipeline = Pipeline::new().then(write()).then(wait("1500"));
        assert_eq!((pipeline.check(), pipeline.final_wait()), (Ok(()), Some(Duration::from_millis(1500))));
        assert_eq!(Pipeline::new().then(write()).then(wait("0")).final_wait(), Some(Duration::MAX));
        assert_eq!(Pipeline::new().then(write()).final_wait(), None);
        let not_last = Pipeline::new().then(wait("0")).then(write());
        assert!(matches!(not_last.check(), Err(CommandError::NotShareable(row)) if row.name == "WAIT"));
    }

    #[test]
    fn invalid_command_is_reported() {
        let bad = Command::new("A B").returning::<i64>();
        let pipeline =
            Pipeline::new().then(Command::new("A").returning::<i64>()).then(bad).then(Command::new("C").into());
        let _: &Pipeline<(i64, i64, i64)> = &pipeline;
        assert_eq!(pipeline.check(), Err(CommandError::Name { name: "A B".into() }));
    }
}
