//! Strings.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::{milliseconds, unix_milliseconds};
use crate::command::{Command, ToArgument, ToPair};
use crate::request::Request;

/// How long a key is to live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expiry {
    /// From now on.
    In(Duration),
    /// Until then, by the clock of the server.
    At(SystemTime),
    /// As long as before. Without this, a `SET` makes a key live for ever.
    Keep,
    /// For ever. Only [`getex`] needs to be told.
    Never,
}

/// Options of `SET`. By default the key is set in any case and lives for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SetOptions {
    /// Only if there is such a key, or only if there is none.
    pub condition: Option<Existence>,
    /// How long it is to live.
    pub expiry: Option<Expiry>,
}

/// Whether something has to exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existence {
    /// Only if there is none.
    Absent,
    /// Only if there is one.
    Present,
}

impl SetOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only if there is no such key.
    #[must_use]
    pub fn if_absent(mut self) -> Self {
        self.condition = Some(Existence::Absent);
        self
    }

    /// Only if there is such a key.
    #[must_use]
    pub fn if_present(mut self) -> Self {
        self.condition = Some(Existence::Present);
        self
    }

    /// Let it live for so long.
    #[must_use]
    pub fn expire_in(mut self, duration: Duration) -> Self {
        self.expiry = Some(Expiry::In(duration));
        self
    }

    /// Let it live until then.
    #[must_use]
    pub fn expire_at(mut self, time: SystemTime) -> Self {
        self.expiry = Some(Expiry::At(time));
        self
    }

    /// Let it live as long as it would have.
    #[must_use]
    pub fn keep_ttl(mut self) -> Self {
        self.expiry = Some(Expiry::Keep);
        self
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

/// The value of a key.
pub fn get(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("GET").arg(key).returning()
}

/// The value of a key, whose life is changed.
pub fn getex(key: impl ToArgument, expiry: Expiry) -> Request<Option<Bytes>> {
    let command = Command::new("GETEX").arg(key);
    // It keeps the time to live when nothing is said.
    if expiry == Expiry::Keep { command } else { expiry.add_to(command) }.returning()
}

/// The value of a key, which is deleted.
pub fn getdel(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("GETDEL").arg(key).returning()
}

/// Sets a key, for ever.
pub fn set(key: impl ToArgument, value: impl ToArgument) -> Request<()> {
    Command::new("SET").arg(key).arg(value).returning()
}

/// Sets a key. False if the condition does not hold.
pub fn set_with(key: impl ToArgument, value: impl ToArgument, options: SetOptions) -> Request<bool> {
    set_command(key, value, options, false).returning()
}

/// Sets a key, and returns what it was before. With a condition, this does not say whether the key was set.
pub fn set_get(key: impl ToArgument, value: impl ToArgument, options: SetOptions) -> Request<Option<Bytes>> {
    set_command(key, value, options, true).returning()
}

fn set_command(key: impl ToArgument, value: impl ToArgument, options: SetOptions, get: bool) -> Command {
    let command = Command::new("SET").arg(key).arg(value).args(options.condition.map(Existence::word)).flag("GET", get);
    match options.expiry {
        // For ever is what it does when nothing is said.
        None | Some(Expiry::Never) => command,
        Some(expiry) => expiry.add_to(command),
    }
}

/// The values of keys, in their order.
pub fn mget(keys: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<Bytes>>> {
    Command::new("MGET").args(keys).returning()
}

/// Sets keys, all at once.
pub fn mset(pairs: impl IntoIterator<Item: ToPair>) -> Request<()> {
    Command::new("MSET").pairs(pairs).returning()
}

/// Sets keys if none of them exists.
pub fn msetnx(pairs: impl IntoIterator<Item: ToPair>) -> Request<bool> {
    Command::new("MSETNX").pairs(pairs).returning()
}

/// Adds one, and returns the sum.
pub fn incr(key: impl ToArgument) -> Request<i64> {
    Command::new("INCR").arg(key).returning()
}

/// Adds, and returns the sum.
pub fn incrby(key: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("INCRBY").arg(key).arg(by).returning()
}

/// Adds, and returns the sum.
pub fn incrbyfloat(key: impl ToArgument, by: f64) -> Request<f64> {
    Command::new("INCRBYFLOAT").arg(key).arg(by).returning()
}

/// Subtracts one, and returns the difference.
pub fn decr(key: impl ToArgument) -> Request<i64> {
    Command::new("DECR").arg(key).returning()
}

/// Subtracts, and returns the difference.
pub fn decrby(key: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("DECRBY").arg(key).arg(by).returning()
}

/// Appends, and returns the new length.
pub fn append(key: impl ToArgument, value: impl ToArgument) -> Request<u64> {
    Command::new("APPEND").arg(key).arg(value).returning()
}

/// The length of a value, which is 0 if there is none.
pub fn strlen(key: impl ToArgument) -> Request<u64> {
    Command::new("STRLEN").arg(key).returning()
}

/// A part of a value, from one byte to another. Both are in it; negative ones count from the end.
pub fn getrange(key: impl ToArgument, first: i64, last: i64) -> Request<Bytes> {
    Command::new("GETRANGE").arg(key).arg(first).arg(last).returning()
}

/// Overwrites a part of a value, and returns the new length.
pub fn setrange(key: impl ToArgument, offset: u64, value: impl ToArgument) -> Request<u64> {
    Command::new("SETRANGE").arg(key).arg(offset).arg(value).returning()
}

/// A bit of a value.
pub fn getbit(key: impl ToArgument, offset: u64) -> Request<bool> {
    Command::new("GETBIT").arg(key).arg(offset).returning()
}

/// Sets a bit of a value, and returns what it was.
pub fn setbit(key: impl ToArgument, offset: u64, bit: bool) -> Request<bool> {
    Command::new("SETBIT").arg(key).arg(offset).arg(u8::from(bit)).returning()
}

/// How many bits are set.
pub fn bitcount(key: impl ToArgument) -> Request<u64> {
    Command::new("BITCOUNT").arg(key).returning()
}
