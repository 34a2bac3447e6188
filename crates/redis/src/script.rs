//! Lua scripts, which a server caches by their digest.

use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::command::{Arguments, Command, ToArgument};
use crate::error::{Error, ErrorCode};
use crate::request::Request;

/// A Lua script. [`Client::invoke`](crate::Client::invoke) sends its digest, and its source only if the server does not have it.
///
/// ```
/// use tidewire_redis::Script;
///
/// let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
/// let invocation = script.returning::<i64>().key("visits").arg(2);
/// assert!(invocation.by_digest().as_bytes().starts_with(b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n"));
/// ```
#[derive(Debug, Clone)]
pub struct Script(Arc<ScriptInner>);

#[derive(Debug)]
struct ScriptInner {
    source: Box<str>,
    digest: Box<str>,
}

/// A call of a script, with keys and arguments, whose reply is converted to `T`.
///
/// [`Client::invoke`](crate::Client::invoke) sends [`by_digest`](Self::by_digest) first, and then the
/// [`fallback`](Self::fallback) if there is one.
#[must_use = "a script does nothing until it is sent"]
pub struct Invocation<T> {
    script: Script,
    keys: Arguments,
    arguments: Arguments,
    is_read_only: bool,
    result: PhantomData<fn() -> T>,
}

impl Script {
    /// Creates a script and computes its digest. Keep it to invoke it several times.
    pub fn new(source: impl Into<Box<str>>) -> Self {
        let source = source.into();
        let digest = sha1_smol::Sha1::from(source.as_bytes()).digest().to_string().into();
        Self(Arc::new(ScriptInner { source, digest }))
    }

    /// Returns the source of the script.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// Returns the SHA-1 digest of the source, in hexadecimal digits.
    pub fn digest(&self) -> &str {
        &self.0.digest
    }

    /// Makes a call whose reply is converted to `T`.
    pub fn returning<T>(&self) -> Invocation<T> {
        Invocation {
            script: self.clone(),
            keys: Arguments::new(),
            arguments: Arguments::new(),
            is_read_only: false,
            result: PhantomData,
        }
    }

    /// Loads the script into the server. The reply is its digest.
    pub fn load(&self) -> Request<String> {
        Command::new("SCRIPT").arg("LOAD").arg(self.source()).returning()
    }
}

impl<T> Clone for Invocation<T> {
    fn clone(&self) -> Self {
        Self {
            script: self.script.clone(),
            keys: self.keys.clone(),
            arguments: self.arguments.clone(),
            is_read_only: self.is_read_only,
            result: PhantomData,
        }
    }
}

/// Does not show the keys and arguments, which may be secret.
impl<T> Debug for Invocation<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invocation")
            .field("digest", &self.script.digest())
            .field("keys", &self.keys.len())
            .field("arguments", &self.arguments.len())
            .finish_non_exhaustive()
    }
}

impl<T> Invocation<T> {
    /// Appends a key, as one of `KEYS`.
    pub fn key(mut self, key: impl ToArgument) -> Self {
        self.keys.push(key);
        self
    }

    /// Appends an argument, as one of `ARGV`.
    pub fn arg(mut self, argument: impl ToArgument) -> Self {
        self.arguments.push(argument);
        self
    }

    /// Appends keys.
    pub fn keys(self, keys: impl IntoIterator<Item: ToArgument>) -> Self {
        keys.into_iter().fold(self, Self::key)
    }

    /// Appends arguments.
    pub fn args(self, arguments: impl IntoIterator<Item: ToArgument>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    /// Declares that the script does not write, so that a replica can run it. It needs Redis 7.
    pub fn read_only(mut self) -> Self {
        self.is_read_only = true;
        self
    }

    /// Returns the command that runs the script by its digest.
    pub fn by_digest(&self) -> Command {
        self.command(if self.is_read_only { "EVALSHA_RO" } else { "EVALSHA" }, self.script.digest())
    }

    /// Returns the command that runs the script by its source. The server caches it.
    pub fn by_source(&self) -> Command {
        self.command(if self.is_read_only { "EVAL_RO" } else { "EVAL" }, self.script.source())
    }

    /// Returns the command to send after [`by_digest`](Self::by_digest) failed with this error: the source, if the server does not
    /// have the script. Returns `None` for any other error, because the script may have been executed.
    pub fn fallback(&self, error: &Error) -> Option<Command> {
        (error.code() == Some(&ErrorCode::NoScript)).then(|| self.by_source())
    }

    fn command(&self, name: &str, script: &str) -> Command {
        let mut command = Command::new(name).arg(script).arg(self.keys.len());
        command.append_arguments(&self.keys);
        command.append_arguments(&self.arguments);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{RequestOutcome, RequestPhase, ServerError};

    fn text(command: &Command) -> String {
        String::from_utf8_lossy(command.as_bytes()).replace("\r\n", " ")
    }

    #[test]
    fn keys_come_before_arguments_in_any_order_of_calls() {
        let script = Script::new("return 1");
        assert_eq!(script.digest(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
        let invocation = script.returning::<i64>().arg("x").key("a").arg(2).keys(["b"]);
        let rest = "$1 2 $1 a $1 b $1 x $1 2 ";
        assert_eq!(text(&invocation.by_digest()), format!("*7 $7 EVALSHA $40 {} {rest}", script.digest()));
        assert_eq!(text(&invocation.by_source()), format!("*7 $4 EVAL $8 return 1 {rest}"));
        let invocation = script.returning::<i64>().read_only();
        assert_eq!(text(&invocation.by_source()), "*3 $7 EVAL_RO $8 return 1 $1 0 ");
    }

    #[test]
    fn only_a_missing_script_has_a_fallback() {
        let invocation = Script::new("return 1").returning::<i64>();
        let server = |text: &str| Error::from(ServerError::parse(text.as_bytes()));
        let fallback = |error| invocation.fallback(&error).map(|command| command.name().to_owned());
        assert_eq!(fallback(server("NOSCRIPT No matching script.")).as_deref(), Some("EVAL"));
        for error in [
            server("ERR NOSCRIPT"),
            server("NOSCRIPTS"),
            server("BUSY x"),
            Error::TimedOut { phase: RequestPhase::Queued },
            Error::Closed { outcome: RequestOutcome::NeverSent },
        ] {
            assert_eq!(fallback(error), None);
        }
    }
}
