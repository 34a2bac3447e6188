//! Keys and their expiry.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::{milliseconds, unix_milliseconds};
use crate::command::{Command, ToArgument};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// When a new time to live is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpireIf {
    /// The key has none (`NX`).
    None,
    /// The key has one (`XX`).
    Some,
    /// It is longer than that of the key. For ever is the longest (`GT`).
    Longer,
    /// It is shorter than that of the key (`LT`).
    Shorter,
}

impl ExpireIf {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::None => "NX",
            Self::Some => "XX",
            Self::Longer => "GT",
            Self::Shorter => "LT",
        }
    }
}

/// How long a key will live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeToLive {
    /// There is no such key.
    NoKey,
    /// For ever.
    Never,
    /// For so long.
    In(Duration),
}

/// Milliseconds, as `PTTL` returns them.
impl FromValue for TimeToLive {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let error = ConversionError::new("a time to live", &value);
        match i64::from_value(value)? {
            -2 => Ok(Self::NoKey),
            -1 => Ok(Self::Never),
            other => Ok(Self::In(Duration::from_millis(u64::try_from(other).map_err(|_| error)?))),
        }
    }
}

/// A part of a scan: where to go on, and what was found. The scan ends with a part whose cursor is 0.
pub type Scanned<T> = (u64, Vec<T>);

/// Options of `SCAN` and its relatives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ScanOptions {
    /// Only what matches this pattern. By default everything.
    pub pattern: Option<Bytes>,
    /// About how many to look at in one call. The default is that of the server: 10.
    pub count: Option<u32>,
    /// Only keys of this type. `SCAN` alone knows it.
    pub kind: Option<Bytes>,
}

impl ScanOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only what matches.
    #[must_use]
    pub fn matching(mut self, pattern: impl Into<Bytes>) -> Self {
        self.pattern = Some(pattern.into());
        self
    }

    /// Look at about so many in one call.
    #[must_use]
    pub fn count(mut self, count: u32) -> Self {
        self.count = Some(count);
        self
    }

    /// Only keys of this type: `string`, `hash`.
    #[must_use]
    pub fn kind(mut self, kind: impl Into<Bytes>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    pub(super) fn add_to(&self, command: Command) -> Command {
        command.option("MATCH", self.pattern.as_ref()).option("COUNT", self.count)
    }
}

/// Deletes keys, and returns how many there were.
pub fn del(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("DEL").args(keys).returning()
}

/// Deletes keys, and returns how many there were. Their memory is freed in the background.
pub fn unlink(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("UNLINK").args(keys).returning()
}

/// Whether there is such a key.
pub fn exists(key: impl ToArgument) -> Request<bool> {
    Command::new("EXISTS").arg(key).returning()
}

/// How many of the keys there are.
pub fn exists_count(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("EXISTS").args(keys).returning()
}

/// The type of a key: `string`, `none`.
pub fn key_type(key: impl ToArgument) -> Request<String> {
    Command::new("TYPE").arg(key).returning()
}

/// Lets a key live for so long. False if there is none.
pub fn expire(key: impl ToArgument, after: Duration) -> Request<bool> {
    Command::new("PEXPIRE").arg(key).arg(milliseconds(after)).returning()
}

/// Lets a key live for so long. False if there is none, or the condition does not hold.
pub fn expire_if(key: impl ToArgument, after: Duration, condition: ExpireIf) -> Request<bool> {
    Command::new("PEXPIRE").arg(key).arg(milliseconds(after)).arg(condition.word()).returning()
}

/// Lets a key live until then. False if there is none.
pub fn expire_at(key: impl ToArgument, time: SystemTime) -> Request<bool> {
    Command::new("PEXPIREAT").arg(key).arg(unix_milliseconds(time)).returning()
}

/// Lets a key live until then. False if there is none, or the condition does not hold.
pub fn expire_at_if(key: impl ToArgument, time: SystemTime, condition: ExpireIf) -> Request<bool> {
    Command::new("PEXPIREAT").arg(key).arg(unix_milliseconds(time)).arg(condition.word()).returning()
}

/// Lets a key live for ever. False if there is none, or it does so already.
pub fn persist(key: impl ToArgument) -> Request<bool> {
    Command::new("PERSIST").arg(key).returning()
}

/// How long a key will live.
pub fn ttl(key: impl ToArgument) -> Request<TimeToLive> {
    Command::new("PTTL").arg(key).returning()
}

/// Renames a key, and overwrites what has the new name.
pub fn rename(key: impl ToArgument, new: impl ToArgument) -> Request<()> {
    Command::new("RENAME").arg(key).arg(new).returning()
}

/// Renames a key. False if there is one of the new name.
pub fn renamenx(key: impl ToArgument, new: impl ToArgument) -> Request<bool> {
    Command::new("RENAMENX").arg(key).arg(new).returning()
}

/// Copies a key. False if there is one of the new name and it is not to be replaced.
pub fn copy(key: impl ToArgument, new: impl ToArgument, replace: bool) -> Request<bool> {
    Command::new("COPY").arg(key).arg(new).flag("REPLACE", replace).returning()
}

/// Marks keys as used, and returns how many there are.
pub fn touch(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("TOUCH").args(keys).returning()
}

/// Some of the keys. Begin with the cursor 0.
pub fn scan(cursor: u64, options: &ScanOptions) -> Request<Scanned<Bytes>> {
    options.add_to(Command::new("SCAN").arg(cursor)).option("TYPE", options.kind.as_ref()).returning()
}

/// Any key.
pub fn randomkey() -> Request<Option<Bytes>> {
    Command::new("RANDOMKEY").returning()
}

/// The value of a key, for [`restore`].
pub fn dump(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("DUMP").arg(key).returning()
}

/// Makes a key of what [`dump`] returned. It lives for ever if no time is given; no time at all is a millisecond.
pub fn restore(key: impl ToArgument, after: Option<Duration>, dumped: impl ToArgument, replace: bool) -> Request<()> {
    // For the server 0 is for ever.
    let after = after.map_or(0, |after| milliseconds(after).max(1));
    Command::new("RESTORE").arg(key).arg(after).arg(dumped).flag("REPLACE", replace).returning()
}
