//! Keys and their expiry.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::{milliseconds, unix_milliseconds};
use crate::command::{Command, ToArgument};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// The condition for a new expiry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpireIf {
    /// The key has no expiry (`NX`).
    None,
    /// The key has an expiry (`XX`).
    Some,
    /// The new expiry is later. A key without one counts as the latest (`GT`).
    Longer,
    /// The new expiry is earlier (`LT`).
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

/// The time to live of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeToLive {
    /// The key does not exist.
    NoKey,
    /// The key does not expire.
    Never,
    /// The key expires after this time.
    In(Duration),
}

/// From milliseconds, as `PTTL` returns them.
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

/// One page of a scan: the cursor of the next page, and the elements. The last page has the cursor 0.
pub type Scanned<T> = (u64, Vec<T>);

/// Options of `SCAN`, `HSCAN`, `SSCAN` and `ZSCAN`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ScanOptions {
    /// Returns only elements that match this glob pattern. Default: all.
    pub pattern: Option<Bytes>,
    /// The approximate number of elements that one call examines. Default: that of the server, which is 10.
    pub count: Option<u32>,
    /// Returns only keys of this type, such as `string` or `hash`. It applies to `SCAN` only. Default: all.
    pub key_type: Option<Bytes>,
}

impl ScanOptions {
    /// Sets [`pattern`](#structfield.pattern).
    #[must_use]
    pub fn pattern(mut self, pattern: impl Into<Bytes>) -> Self {
        self.pattern = Some(pattern.into());
        self
    }

    /// Sets [`count`](#structfield.count).
    #[must_use]
    pub fn count(mut self, count: u32) -> Self {
        self.count = Some(count);
        self
    }

    /// Sets [`key_type`](#structfield.key_type).
    #[must_use]
    pub fn key_type(mut self, key_type: impl Into<Bytes>) -> Self {
        self.key_type = Some(key_type.into());
        self
    }

    pub(super) fn add_to(&self, command: Command) -> Command {
        command.option("MATCH", self.pattern.as_ref()).option("COUNT", self.count)
    }
}

/// Deletes keys and returns how many existed.
pub fn del(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("DEL").args(keys).returning()
}

/// Deletes keys and returns how many existed. Memory is freed in the background.
pub fn unlink(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("UNLINK").args(keys).returning()
}

/// Returns whether a key exists.
pub fn exists(key: impl ToArgument) -> Request<bool> {
    Command::new("EXISTS").arg(key).returning()
}

/// Returns how many of the keys exist.
pub fn exists_count(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("EXISTS").args(keys).returning()
}

/// Returns the type of a key, such as `string`, or `none` if it does not exist.
pub fn key_type(key: impl ToArgument) -> Request<String> {
    Command::new("TYPE").arg(key).returning()
}

/// Sets the time to live of a key. Returns false if it does not exist.
pub fn expire(key: impl ToArgument, after: Duration) -> Request<bool> {
    Command::new("PEXPIRE").arg(key).arg(milliseconds(after)).returning()
}

/// Sets the time to live of a key on a condition. Returns false if the key does not exist or the condition does not hold.
pub fn expire_if(key: impl ToArgument, after: Duration, condition: ExpireIf) -> Request<bool> {
    Command::new("PEXPIRE").arg(key).arg(milliseconds(after)).arg(condition.word()).returning()
}

/// Sets the time when a key expires. Returns false if it does not exist.
pub fn expire_at(key: impl ToArgument, time: SystemTime) -> Request<bool> {
    Command::new("PEXPIREAT").arg(key).arg(unix_milliseconds(time)).returning()
}

/// Sets the time when a key expires on a condition. Returns false if the key does not exist or the condition does not hold.
pub fn expire_at_if(key: impl ToArgument, time: SystemTime, condition: ExpireIf) -> Request<bool> {
    Command::new("PEXPIREAT").arg(key).arg(unix_milliseconds(time)).arg(condition.word()).returning()
}

/// Removes the expiry of a key. Returns false if the key does not exist or has none.
pub fn persist(key: impl ToArgument) -> Request<bool> {
    Command::new("PERSIST").arg(key).returning()
}

/// Returns the time to live of a key.
pub fn ttl(key: impl ToArgument) -> Request<TimeToLive> {
    Command::new("PTTL").arg(key).returning()
}

/// Renames a key, and overwrites an existing key of the new name.
pub fn rename(key: impl ToArgument, new: impl ToArgument) -> Request<()> {
    Command::new("RENAME").arg(key).arg(new).returning()
}

/// Renames a key. Returns false if a key of the new name exists.
pub fn renamenx(key: impl ToArgument, new: impl ToArgument) -> Request<bool> {
    Command::new("RENAMENX").arg(key).arg(new).returning()
}

/// Copies a key. Returns false if a key of the new name exists and `replace` is false.
pub fn copy(key: impl ToArgument, new: impl ToArgument, replace: bool) -> Request<bool> {
    Command::new("COPY").arg(key).arg(new).flag("REPLACE", replace).returning()
}

/// Updates the last access time of keys and returns how many exist.
pub fn touch(keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("TOUCH").args(keys).returning()
}

/// Returns some of the keys. Start with the cursor 0.
pub fn scan(cursor: u64, options: &ScanOptions) -> Request<Scanned<Bytes>> {
    options.add_to(Command::new("SCAN").arg(cursor)).option("TYPE", options.key_type.as_ref()).returning()
}

/// Returns a random key.
pub fn randomkey() -> Request<Option<Bytes>> {
    Command::new("RANDOMKEY").returning()
}

/// Returns the serialized value of a key, for [`restore`].
pub fn dump(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("DUMP").arg(key).returning()
}

/// Creates a key from a value that [`dump`] returned. Without a time to live it does not expire; zero is sent as one millisecond.
pub fn restore(key: impl ToArgument, after: Option<Duration>, dumped: impl ToArgument, replace: bool) -> Request<()> {
    // For the server, 0 means no expiry.
    let after = after.map_or(0, |after| milliseconds(after).max(1));
    Command::new("RESTORE").arg(key).arg(after).arg(dumped).flag("REPLACE", replace).returning()
}
