//! A command and the type of its reply.

use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;

use crate::command::Command;
use crate::convert::FromValue;
use crate::error::{Error, ServerError};
use crate::resp::Value;

/// A command whose reply is converted to `T`. Made by the functions in [`commands`](crate::commands), and by
/// [`Command::returning`].
#[must_use = "a request does nothing until it is sent"]
pub struct Request<T> {
    command: Command,
    result: PhantomData<fn() -> T>,
}

impl<T> Request<T> {
    /// Makes a request from a command.
    pub fn new(command: Command) -> Self {
        Self { command, result: PhantomData }
    }

    /// Converts the reply to another type.
    ///
    /// ```
    /// use tidewire_redis::{Request, commands};
    ///
    /// let get: Request<Option<String>> = commands::get("name").returning();
    /// ```
    pub fn returning<U>(self) -> Request<U> {
        Request::new(self.command)
    }

    /// Returns the command.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Returns the command.
    pub fn into_command(self) -> Command {
        self.command
    }
}

impl<T> Clone for Request<T> {
    fn clone(&self) -> Self {
        Self::new(self.command.clone())
    }
}

impl<T> Debug for Request<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Request").field(&self.command).finish()
    }
}

impl<T> From<Command> for Request<T> {
    fn from(command: Command) -> Self {
        Self::new(command)
    }
}

/// Converts a reply. An error reply is [`Error::Server`], unless `T` can hold it.
pub(crate) fn read_reply<T: FromValue>(reply: Value) -> Result<T, Error> {
    match reply.as_error() {
        Some(text) if !T::TAKES_ERRORS => Err(ServerError::parse(text).into()),
        _ => Ok(T::from_value(reply)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::Ignore;

    #[test]
    fn error_reply_is_an_error_unless_the_type_can_hold_it() {
        let error = || Value::SimpleError("WRONGTYPE no".into());
        let server = ServerError::parse(b"WRONGTYPE no");
        assert!(matches!(read_reply::<i64>(error()), Err(Error::Server(found)) if found == server));
        assert!(matches!(read_reply::<Ignore>(error()), Err(Error::Server(found)) if found == server));
        assert!(matches!(read_reply::<Value>(error()), Err(Error::Server(found)) if found == server));
        assert!(matches!(read_reply::<Option<i64>>(error()), Err(Error::Server(found)) if found == server));
        assert!(matches!(read_reply::<Result<i64, ServerError>>(error()), Ok(Err(found)) if found == server));
        assert!(
            matches!(read_reply::<Option<Result<i64, ServerError>>>(error()), Ok(Some(Err(found))) if found == server)
        );
    }
}
