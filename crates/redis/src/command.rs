//! Commands, encoded while they are built.

use std::borrow::Cow;
use std::fmt::{self, Debug, Formatter};
use std::io::Write;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::buffer::Buffer;
use crate::cache::NotCacheable;
use crate::request::Request;
use crate::sharing::{self, NotShareable, Route};

/// A command with its arguments.
///
/// It is encoded while it is built. An error, such as a name of two words, is reported when the command is sent.
///
/// ```
/// use tidewire_redis::Command;
///
/// let command = Command::new("CLIENT").arg("UNBLOCK").arg(17);
/// assert_eq!(command.as_bytes(), b"*3\r\n$6\r\nCLIENT\r\n$7\r\nUNBLOCK\r\n$2\r\n17\r\n");
/// ```
#[derive(Clone)]
pub struct Command {
    /// The encoded command, from `start` on. The bytes before it are reserved for a longer header.
    buffer: Buffer,
    start: usize,
    arguments: usize,
    /// The first error, reported when the command is sent.
    error: Option<CommandError>,
}

/// Why a command cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The name is empty or more than one word.
    #[error(
        "expected one word as the name of a command, got \"{}\"; pass a subcommand as an argument, as in \
         Command::new(\"CLIENT\").arg(\"INFO\")",
        name.escape_debug()
    )]
    Name {
        /// The name.
        name: Box<str>,
    },
    /// An argument is longer than servers accept. They would close the connection.
    #[error("an argument has {len} bytes, but servers accept at most {}; split the value", Command::MAX_ARGUMENT_BYTES)]
    ArgumentTooLong {
        /// The length in bytes.
        len: usize,
    },
    /// There are more arguments than servers accept. They would close the connection.
    #[error("servers accept at most {} arguments; use several commands", Command::MAX_ARGUMENTS)]
    TooManyArguments,
    /// A value cannot be written as [`Fields`](crate::Fields).
    #[error("{} cannot be written as a field of a hash: {problem}", FieldName(field.as_deref()))]
    Fields {
        /// The path of the field, or `None` for the value as a whole.
        field: Option<Box<str>>,
        /// Why it cannot be written.
        problem: Box<str>,
    },
    /// The command cannot be sent over a connection that other tasks share.
    #[error("{0}")]
    NotShareable(&'static NotShareable),
    /// The reply to the command cannot be [cached](crate::cache).
    #[error("{0}")]
    NotCacheable(NotCacheable),
    /// A subscription names no channel and no pattern.
    #[error("expected at least one channel or pattern to subscribe to, got none")]
    NoChannels,
    /// The shard channels of a subscription are in different hash slots, which are on different nodes of a cluster.
    #[error(
        "the shard channels \"{}\" and \"{}\" are in different hash slots; subscribe to those of each slot separately, or give them a \
         common {{tag}}",
        channels[0],
        channels[1]
    )]
    ShardChannelSlots {
        /// Two channels in different slots.
        channels: Box<[String; 2]>,
    },
}

/// Names the field in an error.
struct FieldName<'a>(Option<&'a str>);

impl fmt::Display for FieldName<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "`{name}`"),
            None => f.write_str("the value"),
        }
    }
}

/// A type that can be an argument of a command: strings, bytes and numbers.
///
/// `bool` is not one, because commands have different words for true and false. [`Command::args`] takes any number of arguments,
/// and also an `Option`.
pub trait ToArgument {
    /// Calls `f` with the bytes of the argument.
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R;
}

/// A type that can be two arguments, such as a field and its value.
pub trait ToPair {
    /// Appends both arguments.
    fn add_to(&self, command: &mut Command);
}

impl Command {
    /// The maximum length of an argument in bytes, which is the default limit of servers.
    pub const MAX_ARGUMENT_BYTES: usize = 512 * 1024 * 1024;

    /// The maximum number of arguments, including the name, which is the limit of older servers.
    pub const MAX_ARGUMENTS: usize = 1024 * 1024;

    /// Creates a command without arguments. The name is one word; a subcommand is the first argument.
    pub fn new(name: &str) -> Self {
        let mut command = Self { buffer: Buffer::new(), start: Buffer::HEAD, arguments: 0, error: None };
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) && !is_word(name) {
            command.fail(CommandError::Name { name: name.into() });
        }
        command.push(name);
        command
    }

    /// Appends an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl ToArgument) -> Self {
        self.push(argument);
        self
    }

    /// Appends arguments. An `Option` is one or none.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item: ToArgument>) -> Self {
        for argument in arguments {
            self.add(argument);
        }
        self.start = self.buffer.write_head(self.arguments);
        self
    }

    /// Appends pairs of arguments, from a map or a slice of tuples.
    #[must_use]
    pub fn pairs(mut self, pairs: impl IntoIterator<Item: ToPair>) -> Self {
        for pair in pairs {
            pair.add_to(&mut self);
        }
        self
    }

    /// Appends a word if `is_set`.
    #[must_use]
    pub fn flag(self, word: &str, is_set: bool) -> Self {
        self.args(is_set.then_some(word))
    }

    /// Appends a word and its value, if there is a value.
    #[must_use]
    pub fn option(self, word: &str, value: Option<impl ToArgument>) -> Self {
        match value {
            Some(value) => self.arg(word).arg(value),
            None => self,
        }
    }

    /// Appends an argument in place.
    pub fn push(&mut self, argument: impl ToArgument) {
        self.add(argument);
        self.start = self.buffer.write_head(self.arguments);
    }

    /// Appends an argument without updating the header.
    fn add(&mut self, argument: impl ToArgument) {
        argument.with_bytes(|bytes| {
            if bytes.len() > Self::MAX_ARGUMENT_BYTES {
                self.fail(CommandError::ArgumentTooLong { len: bytes.len() });
            } else if self.count(1) {
                self.buffer.push(bytes);
            }
        });
    }

    /// Makes a request whose reply is converted to `T`.
    pub fn returning<T>(self) -> Request<T> {
        Request::new(self)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        let word = self.buffer.as_slice()[Buffer::HEAD..].split(|byte| *byte == b'\n').nth(1).unwrap_or_default();
        // Only an invalid name contains line breaks, and is truncated here.
        str::from_utf8(word.trim_ascii_end()).unwrap_or("")
    }

    /// Returns the encoded command.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer.as_slice()[self.start..]
    }

    /// Returns the length of the encoded command in bytes.
    pub fn size(&self) -> usize {
        self.as_bytes().len()
    }

    /// Checks whether the command can be sent over a shared connection.
    pub fn check(&self) -> Result<(), CommandError> {
        self.check_encoding()?;
        sharing::find_unshareable(self.as_bytes()).map_or(Ok(()), |row| Err(CommandError::NotShareable(row)))
    }

    /// Returns the connection that the command is sent over, or why it cannot be sent.
    pub(crate) fn route(&self) -> Result<Route, CommandError> {
        self.check_encoding()?;
        sharing::route(self.as_bytes()).map_err(CommandError::NotShareable)
    }

    /// Checks the name and the lengths, but not whether the command can be shared.
    pub(crate) fn check_encoding(&self) -> Result<(), CommandError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Appends encoded arguments.
    pub(crate) fn append_arguments(&mut self, other: &Arguments) {
        if let Some(error) = &other.0.error {
            self.fail(error.clone());
        } else if self.count(other.0.arguments) {
            self.buffer.append(&other.0.buffer);
            self.start = self.buffer.write_head(self.arguments);
        }
    }

    /// Keeps the first error.
    fn fail(&mut self, error: CommandError) {
        self.error.get_or_insert(error);
    }

    /// Counts arguments. Returns false if there are too many.
    fn count(&mut self, more: usize) -> bool {
        if self.arguments + more > Self::MAX_ARGUMENTS {
            self.fail(CommandError::TooManyArguments);
            return false;
        }
        self.arguments += more;
        true
    }
}

/// Whether a name that is not ASCII is one word.
#[cold]
fn is_word(name: &str) -> bool {
    !name.contains(|c: char| c.is_whitespace() || c.is_control())
}

/// Does not show the arguments, which may be secret.
impl Debug for Command {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Command")
            .field("name", &self.name())
            .field("arguments", &(self.arguments - 1))
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

/// Encoded arguments without a command.
#[derive(Clone)]
pub(crate) struct Arguments(Command);

impl Arguments {
    pub(crate) fn new() -> Self {
        Self(Command { buffer: Buffer::new(), start: Buffer::HEAD, arguments: 0, error: None })
    }

    pub(crate) fn push(&mut self, argument: impl ToArgument) {
        self.0.push(argument);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.arguments
    }
}

macro_rules! argument_as_bytes {
    ($([$($generics:tt)*] $type:ty),* $(,)?) => {$(
        impl<$($generics)*> ToArgument for $type {
            fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
                f(self.as_ref())
            }
        }
    )*};
}

argument_as_bytes! { [] str, [] [u8], [const N: usize] [u8; N], [] Vec<u8>, [] Bytes, [] BytesMut }

macro_rules! argument_as_str {
    ($($type:ty),* $(,)?) => {$(
        impl ToArgument for $type {
            fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
                f(self.as_bytes())
            }
        }
    )*};
}

argument_as_str! { String, Box<str>, Arc<str>, Cow<'_, str> }

impl ToArgument for Cow<'_, [u8]> {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        f(self)
    }
}

macro_rules! argument_as_digits {
    ($($type:ty),* $(,)?) => {$(
        impl ToArgument for $type {
            fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
                f(itoa::Buffer::new().format(*self).as_bytes())
            }
        }
    )*};
}

argument_as_digits! { i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize }

/// The longest double in bytes: a sign, `0.`, and at most 1074 decimals, of which the shortest form has 324 or fewer.
const MAX_DOUBLE_BYTES: usize = 352;

macro_rules! argument_as_decimal {
    ($($type:ty),* $(,)?) => {$(
        /// The shortest decimal that is parsed as the same number, without an exponent: `1e21` has all its zeros.
        impl ToArgument for $type {
            fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
                let mut text = [0; MAX_DOUBLE_BYTES];
                let mut rest = &mut text[..];
                let written = write!(rest, "{self}");
                debug_assert!(written.is_ok(), "{self} is longer than any double");
                let len = MAX_DOUBLE_BYTES - rest.len();
                f(&text[..len])
            }
        }
    )*};
}

argument_as_decimal! { f32, f64 }

impl<T: ToArgument + ?Sized> ToArgument for &T {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        T::with_bytes(self, f)
    }
}

impl<A: ToArgument, B: ToArgument> ToPair for (A, B) {
    fn add_to(&self, command: &mut Command) {
        command.push(&self.0);
        command.push(&self.1);
    }
}

impl<T: ToPair> ToPair for &T {
    fn add_to(&self, command: &mut Command) {
        T::add_to(self, command);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::resp::encode_command;

    fn text(command: &Command) -> String {
        String::from_utf8_lossy(command.as_bytes()).replace("\r\n", " ")
    }

    fn argument(argument: impl ToArgument) -> String {
        argument.with_bytes(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    #[test]
    fn arguments_of_all_types_are_encoded() {
        let command = Command::new("X")
            .arg(b"\x01")
            .arg(-5)
            .args(["a", "b"])
            .args(None::<&str>)
            .args(Some(1.5))
            .pairs(&[("f", 1)])
            .flag("NO", false)
            .flag("YES", true)
            .option("EX", Some(3))
            .option("PX", None::<u8>);
        let expected = "*11 $1 X $1 \x01 $2 -5 $1 a $1 b $3 1.5 $1 f $1 1 $3 YES $2 EX $1 3 ";
        assert_eq!((text(&command).as_str(), command.size()), (expected, command.as_bytes().len()));
        assert_eq!(command.check(), Ok(()));
    }

    #[test]
    fn doubles_have_no_exponent() {
        assert_eq!(
            (argument(1.0), argument(-0.1_f32), argument(1e21)),
            ("1".into(), "-0.1".into(), format!("1{:021}", 0))
        );
        assert_eq!((argument(f64::INFINITY), argument(f64::NEG_INFINITY)), ("inf".into(), "-inf".into()));
        for extreme in
            [f64::MAX, f64::MIN, f64::MIN_POSITIVE, -f64::from_bits(1), f64::from_bits(0x000f_ffff_ffff_ffff)]
        {
            assert_eq!(argument(extreme).parse(), Ok(extreme));
        }
    }

    #[test]
    fn name_must_be_one_word() {
        for name in ["", "CLIENT INFO", "GET\r\n", "A\tB", "A\0"] {
            let command = Command::new(name).arg("x");
            assert_eq!(command.check(), Err(CommandError::Name { name: name.into() }));
        }
        assert_eq!(Command::new("JSON.SET").arg("a b\r\n").check(), Ok(()));
    }

    #[test]
    fn too_many_arguments_are_rejected() {
        let command = Command::new("DEL").args(std::iter::repeat_n("", Command::MAX_ARGUMENTS - 1));
        assert_eq!(command.check(), Ok(()));
        assert!(command.as_bytes().starts_with(b"*1048576\r\n$3\r\nDEL\r\n"));
        assert_eq!(command.arg("").check(), Err(CommandError::TooManyArguments));
    }

    #[test]
    fn too_long_argument_is_rejected_and_not_copied() {
        // The memory is not touched, so the kernel does not provide it.
        let len = Command::MAX_ARGUMENT_BYTES + 1;
        let command = Command::new("SET").arg("k").arg(vec![0; len]);
        assert_eq!(command.check(), Err(CommandError::ArgumentTooLong { len }));
        assert!(command.size() < 100);
    }

    #[test]
    fn debug_does_not_show_arguments() {
        let shown = format!("{:?}", Command::new("AUTH").arg("hunter2"));
        assert_eq!(shown, "Command { name: \"AUTH\", arguments: 1, size: 27, .. }");
    }

    proptest! {
        #[test]
        fn command_is_encoded_like_by_the_codec(arguments in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..120)) {
            let mut all = vec![b"NAME".to_vec()];
            all.extend(arguments.iter().cloned());
            let mut expected = Vec::new();
            encode_command(&all, &mut expected);
            let command = Command::new("NAME").args(&arguments);
            prop_assert_eq!(command.as_bytes(), &expected[..]);
            prop_assert_eq!(command.name(), "NAME");
        }
    }
}
