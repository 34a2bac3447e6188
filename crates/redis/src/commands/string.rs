//! Strings.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::{milliseconds, unix_milliseconds};
use crate::command::{Command, ToArgument, ToPair};
use crate::request::Request;

/// The expiry of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expiry {
    /// After this time.
    In(Duration),
    /// At this time, by the clock of the server.
    At(SystemTime),
    /// As before. Without it, `SET` removes the expiry.
    Keep,
    /// Never. This is the default of `SET`, so only [`getex`] needs it.
    Never,
}

/// Options of `SET`. By default it sets the key unconditionally and without an expiry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SetOptions {
    /// Sets the key only if it exists, or only if it does not. Default: none.
    pub condition: Option<Existence>,
    /// The expiry of the key. Default: none, which is [`Expiry::Never`].
    pub expiry: Option<Expiry>,
}

/// Whether a key or member must exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existence {
    /// It must not exist (`NX`).
    Absent,
    /// It must exist (`XX`).
    Present,
}

impl SetOptions {
    /// Sets [`condition`](#structfield.condition).
    #[must_use]
    pub fn condition(mut self, condition: Existence) -> Self {
        self.condition = Some(condition);
        self
    }

    /// Sets [`expiry`](#structfield.expiry).
    #[must_use]
    pub fn expiry(mut self, expiry: Expiry) -> Self {
        self.expiry = Some(expiry);
        self
    }

    /// Sets the key only if it does not exist.
    #[must_use]
    pub fn if_absent(self) -> Self {
        self.condition(Existence::Absent)
    }

    /// Sets the key only if it exists.
    #[must_use]
    pub fn if_present(self) -> Self {
        self.condition(Existence::Present)
    }

    /// Sets the expiry to a time from now.
    #[must_use]
    pub fn expire_in(self, duration: Duration) -> Self {
        self.expiry(Expiry::In(duration))
    }
}

impl Existence {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Absent => "NX",
            Self::Present => "XX",
        }
    }
}

impl Expiry {
    pub(super) fn add_to(self, command: Command) -> Command {
        match self {
            Self::In(duration) => command.arg("PX").arg(milliseconds(duration)),
            Self::At(time) => command.arg("PXAT").arg(unix_milliseconds(time)),
            Self::Keep => command.arg("KEEPTTL"),
            Self::Never => command.arg("PERSIST"),
        }
    }
}

/// Returns the value of a key.
pub fn get(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("GET").arg(key).returning()
}

/// Returns the value of a key and sets its expiry.
pub fn getex(key: impl ToArgument, expiry: Expiry) -> Request<Option<Bytes>> {
    let command = Command::new("GETEX").arg(key);
    // GETEX without an option keeps the expiry.
    if expiry == Expiry::Keep { command } else { expiry.add_to(command) }.returning()
}

/// Returns the value of a key and deletes it.
pub fn getdel(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("GETDEL").arg(key).returning()
}

/// Sets the value of a key, without an expiry.
pub fn set(key: impl ToArgument, value: impl ToArgument) -> Request<()> {
    Command::new("SET").arg(key).arg(value).returning()
}

/// Sets the value of a key. Returns false if the condition does not hold.
pub fn set_with(key: impl ToArgument, value: impl ToArgument, options: SetOptions) -> Request<bool> {
    set_command(key, value, options, false).returning()
}

/// Sets the value of a key and returns its previous value. With a condition, the reply does not say whether the key was set.
pub fn set_get(key: impl ToArgument, value: impl ToArgument, options: SetOptions) -> Request<Option<Bytes>> {
    set_command(key, value, options, true).returning()
}

fn set_command(key: impl ToArgument, value: impl ToArgument, options: SetOptions, get: bool) -> Command {
    let command = Command::new("SET").arg(key).arg(value).args(options.condition.map(Existence::word)).flag("GET", get);
    match options.expiry {
        // SET without an option removes the expiry.
        None | Some(Expiry::Never) => command,
        Some(expiry) => expiry.add_to(command),
    }
}

/// Returns the values of keys, in the order of the keys.
pub fn mget(keys: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<Bytes>>> {
    Command::new("MGET").args(keys).returning()
}

/// Sets several keys atomically.
pub fn mset(pairs: impl IntoIterator<Item: ToPair>) -> Request<()> {
    Command::new("MSET").pairs(pairs).returning()
}

/// Sets several keys atomically if none of them exists.
pub fn msetnx(pairs: impl IntoIterator<Item: ToPair>) -> Request<bool> {
    Command::new("MSETNX").pairs(pairs).returning()
}

/// Increments a number by one and returns the result.
pub fn incr(key: impl ToArgument) -> Request<i64> {
    Command::new("INCR").arg(key).returning()
}

/// Increments a number and returns the result.
pub fn incrby(key: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("INCRBY").arg(key).arg(by).returning()
}

/// Increments a floating point number and returns the result.
pub fn incrbyfloat(key: impl ToArgument, by: f64) -> Request<f64> {
    Command::new("INCRBYFLOAT").arg(key).arg(by).returning()
}

/// Decrements a number by one and returns the result.
pub fn decr(key: impl ToArgument) -> Request<i64> {
    Command::new("DECR").arg(key).returning()
}

/// Decrements a number and returns the result.
pub fn decrby(key: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("DECRBY").arg(key).arg(by).returning()
}

/// Appends to a value and returns its new length.
pub fn append(key: impl ToArgument, value: impl ToArgument) -> Request<u64> {
    Command::new("APPEND").arg(key).arg(value).returning()
}

/// Returns the length of a value in bytes, or 0 if the key does not exist.
pub fn strlen(key: impl ToArgument) -> Request<u64> {
    Command::new("STRLEN").arg(key).returning()
}

/// Returns the bytes of a value from `start` to `stop`, both inclusive. Negative positions count from the end.
pub fn getrange(key: impl ToArgument, start: i64, stop: i64) -> Request<Bytes> {
    Command::new("GETRANGE").arg(key).arg(start).arg(stop).returning()
}

/// Overwrites a part of a value and returns its new length.
pub fn setrange(key: impl ToArgument, offset: u64, value: impl ToArgument) -> Request<u64> {
    Command::new("SETRANGE").arg(key).arg(offset).arg(value).returning()
}

/// Returns a bit of a value.
pub fn getbit(key: impl ToArgument, offset: u64) -> Request<bool> {
    Command::new("GETBIT").arg(key).arg(offset).returning()
}

/// Sets a bit of a value and returns its previous state.
pub fn setbit(key: impl ToArgument, offset: u64, bit: bool) -> Request<bool> {
    Command::new("SETBIT").arg(key).arg(offset).arg(u8::from(bit)).returning()
}

/// Returns the number of bits that are set.
pub fn bitcount(key: impl ToArgument) -> Request<u64> {
    Command::new("BITCOUNT").arg(key).returning()
}
