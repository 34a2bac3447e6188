//! Scripts, which a server caches by their digest.

use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::command::{Arguments, Command, ToArgument};
use crate::error::{Error, ErrorCode};
use crate::request::Request;

/// A script in Lua. It is sent by its digest, and as a whole only to a server that does not have it.
///
/// ```
/// use tidewire_redis::Script;
///
/// let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
/// let invocation = script.returning::<i64>().key("visits").arg(2);
/// assert!(invocation.by_digest().as_bytes().starts_with(b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n"));
/// ```
#[derive(Debug, Clone)]
pub struct Script(Arc<Source>);

#[derive(Debug)]
struct Source {
    text: Box<str>,
    digest: Box<str>,
}

/// A script with keys and arguments, and the type of its result.
///
/// Whoever sends it sends [`by_digest`](Self::by_digest) first, and [`after`](Self::after) says whether to send anything else.
#[must_use = "a script does nothing until it is sent"]
pub struct Invocation<T> {
    script: Script,
    keys: Arguments,
    arguments: Arguments,
    is_read_only: bool,
    result: PhantomData<fn() -> T>,
}

impl Script {
    /// A script. Its digest is computed here, so keep it.
    pub fn new(text: impl Into<Box<str>>) -> Self {
        let text = text.into();
        let digest = sha1_smol::Sha1::from(text.as_bytes()).digest().to_string().into();
        Self(Arc::new(Source { text, digest }))
    }

    /// What the script is.
    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// The SHA-1 of the script, in hexadecimal digits.
    pub fn digest(&self) -> &str {
        &self.0.digest
    }

    /// Begins a call whose reply becomes a `T`.
    pub fn returning<T>(&self) -> Invocation<T> {
        Invocation {
            script: self.clone(),
            keys: Arguments::new(),
            arguments: Arguments::new(),
            is_read_only: false,
            result: PhantomData,
        }
    }

    /// Makes the server have the script. The reply is its digest.
    pub fn load(&self) -> Request<String> {
        Command::new("SCRIPT").arg("LOAD").arg(self.text()).returning()
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

/// Without the keys and arguments: they may be secret.
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
    /// Adds a key, one of `KEYS`.
    pub fn key(mut self, key: impl ToArgument) -> Self {
        self.keys.push(key);
        self
    }

    /// Adds an argument, one of `ARGV`.
    pub fn arg(mut self, argument: impl ToArgument) -> Self {
        self.arguments.push(argument);
        self
    }

    /// Adds keys.
    pub fn keys(self, keys: impl IntoIterator<Item: ToArgument>) -> Self {
        keys.into_iter().fold(self, Self::key)
    }

    /// Adds arguments.
    pub fn args(self, arguments: impl IntoIterator<Item: ToArgument>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    /// The script writes nothing, so a replica can run it, too. It needs Redis 7.
    pub fn read_only(mut self) -> Self {
        self.is_read_only = true;
        self
    }

    /// What to send first.
    pub fn by_digest(&self) -> Command {
        self.command(if self.is_read_only { "EVALSHA_RO" } else { "EVALSHA" }, self.script.digest())
    }

    /// The script as a whole. The server has it from then on.
    pub fn as_a_whole(&self) -> Command {
        self.command(if self.is_read_only { "EVAL_RO" } else { "EVAL" }, self.script.text())
    }

    /// What to send after this error of [`by_digest`](Self::by_digest): the script if the server does not have it, and after any
    /// other error nothing, as it may have been executed.
    pub fn after(&self, error: &Error) -> Option<Command> {
        (error.code() == Some(&ErrorCode::NoScript)).then(|| self.as_a_whole())
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
    use crate::error::{Outcome, Phase, ServerError};

    fn text(command: &Command) -> String {
        String::from_utf8_lossy(command.as_bytes()).replace("\r\n", " ")
    }

    #[test]
    fn keys_stand_before_arguments_whatever_the_order() {
        let script = Script::new("return 1");
        assert_eq!(script.digest(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
        let invocation = script.returning::<i64>().arg("x").key("a").arg(2).keys(["b"]);
        let rest = "$1 2 $1 a $1 b $1 x $1 2 ";
        assert_eq!(text(&invocation.by_digest()), format!("*7 $7 EVALSHA $40 {} {rest}", script.digest()));
        assert_eq!(text(&invocation.as_a_whole()), format!("*7 $4 EVAL $8 return 1 {rest}"));
        let invocation = script.returning::<i64>().read_only();
        assert_eq!(text(&invocation.as_a_whole()), "*3 $7 EVAL_RO $8 return 1 $1 0 ");
    }

    #[test]
    fn only_a_missing_script_is_sent() {
        let invocation = Script::new("return 1").returning::<i64>();
        let server = |text: &str| Error::from(ServerError::parse(text.as_bytes()));
        let after = |error| invocation.after(&error).map(|command| command.name().to_owned());
        assert_eq!(after(server("NOSCRIPT No matching script.")).as_deref(), Some("EVAL"));
        for error in [
            server("ERR NOSCRIPT"),
            server("NOSCRIPTS"),
            server("BUSY x"),
            Error::TimedOut { phase: Phase::Queued },
            Error::Closed { outcome: Outcome::NeverSent },
        ] {
            assert_eq!(after(error), None);
        }
    }
}
