//! Streams.

use std::fmt::{self, Display, Formatter};

use bytes::Bytes;

use crate::command::{Command, ToArgument, ToPair};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// The ID of an entry of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId {
    /// When the entry was added, by the clock of the server, in milliseconds since 1970.
    pub milliseconds: u64,
    /// The number of the entry within its millisecond.
    pub sequence: u64,
}

/// The first entry that is read or delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamStart {
    /// The first one of the stream.
    Beginning,
    /// The next one that is added.
    Now,
    /// The first one after this ID.
    After(StreamId),
}

/// An entry of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamEntry {
    /// The ID.
    pub id: StreamId,
    /// The fields, in the order in which they were written. Empty if the entry was deleted while it was pending.
    pub fields: Vec<(Bytes, Bytes)>,
}

/// Entries by stream.
pub type Streams = Vec<(Bytes, Vec<StreamEntry>)>;

/// Which of the oldest entries of a stream are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trim {
    /// Entries in excess of about this number. It costs much less than the exact number.
    ToAbout(u64),
    /// Entries in excess of this number.
    To(u64),
    /// Entries before about this ID.
    BeforeAbout(StreamId),
    /// Entries before this ID.
    Before(StreamId),
}

/// Options of `XADD`. By default the server chooses the ID, creates the stream if it does not exist, and removes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct XaddOptions {
    /// The ID of the entry, which must be larger than that of the last one. Default: chosen by the server.
    pub id: Option<StreamId>,
    /// Removes old entries. Default: none.
    pub trim: Option<Trim>,
    /// Adds the entry only if the stream exists. Default: false.
    pub only_existing: bool,
}

impl StreamId {
    /// The smallest ID, before every entry.
    pub const ZERO: Self = Self { milliseconds: 0, sequence: 0 };

    /// The largest ID.
    pub const MAX: Self = Self { milliseconds: u64::MAX, sequence: u64::MAX };
}

impl Display for StreamId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.milliseconds, self.sequence)
    }
}

impl ToArgument for StreamId {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        let mut text = [0; 41];
        let mut len = 0;
        let mut put = |part: &[u8]| {
            text[len..len + part.len()].copy_from_slice(part);
            len += part.len();
        };
        put(itoa::Buffer::new().format(self.milliseconds).as_bytes());
        put(b"-");
        put(itoa::Buffer::new().format(self.sequence).as_bytes());
        f(&text[..len])
    }
}

impl ToArgument for StreamStart {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::Beginning => f(b"0"),
            Self::Now => f(b"$"),
            Self::After(id) => id.with_bytes(f),
        }
    }
}

impl FromValue for StreamId {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let id = value.as_bytes().and_then(|bytes| {
            let (milliseconds, sequence) = str::from_utf8(bytes).ok()?.split_once('-')?;
            Some(Self { milliseconds: milliseconds.parse().ok()?, sequence: sequence.parse().ok()? })
        });
        id.ok_or_else(|| ConversionError::new("the ID of an entry", &value))
    }
}

impl FromValue for StreamEntry {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let (id, fields) = <(StreamId, Option<_>)>::from_value(value)?;
        Ok(Self { id, fields: fields.unwrap_or_default() })
    }
}

impl XaddOptions {
    /// Sets [`id`](#structfield.id).
    #[must_use]
    pub fn id(mut self, id: StreamId) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets [`trim`](#structfield.trim).
    #[must_use]
    pub fn trim(mut self, trim: Trim) -> Self {
        self.trim = Some(trim);
        self
    }

    /// Sets [`only_existing`](#structfield.only_existing).
    #[must_use]
    pub fn only_existing(mut self, only_existing: bool) -> Self {
        self.only_existing = only_existing;
        self
    }
}

impl Trim {
    fn add_to(self, command: Command) -> Command {
        match self {
            Self::ToAbout(count) => command.arg("MAXLEN").arg("~").arg(count),
            Self::To(count) => command.arg("MAXLEN").arg(count),
            Self::BeforeAbout(id) => command.arg("MINID").arg("~").arg(id),
            Self::Before(id) => command.arg("MINID").arg(id),
        }
    }
}

/// Appends an entry and returns its ID. `None` if the stream does not exist and `only_existing` is set.
pub fn xadd(
    key: impl ToArgument,
    fields: impl IntoIterator<Item: ToPair>,
    options: XaddOptions,
) -> Request<Option<StreamId>> {
    let mut command = Command::new("XADD").arg(key).flag("NOMKSTREAM", options.only_existing);
    if let Some(trim) = options.trim {
        command = trim.add_to(command);
    }
    match options.id {
        Some(id) => command.push(id),
        None => command.push("*"),
    }
    command.pairs(fields).returning()
}

/// Returns the number of entries.
pub fn xlen(key: impl ToArgument) -> Request<u64> {
    Command::new("XLEN").arg(key).returning()
}

/// Returns the entries from `start` to `end`, both inclusive, and at most `count` of them.
pub fn xrange(key: impl ToArgument, start: StreamId, end: StreamId, count: Option<u64>) -> Request<Vec<StreamEntry>> {
    Command::new("XRANGE").arg(key).arg(start).arg(end).option("COUNT", count).returning()
}

/// Returns the entries from `end` back to `start`, both inclusive, and at most `count` of them.
pub fn xrevrange(
    key: impl ToArgument,
    end: StreamId,
    start: StreamId,
    count: Option<u64>,
) -> Request<Vec<StreamEntry>> {
    Command::new("XREVRANGE").arg(key).arg(end).arg(start).option("COUNT", count).returning()
}

/// Returns entries after the given IDs, at most `count` of each stream. `None` if there are no entries. It does not block.
pub fn xread<K: ToArgument>(
    streams: impl IntoIterator<Item = (K, StreamId)>,
    count: Option<u64>,
) -> Request<Option<Streams>> {
    let (keys, ids): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    Command::new("XREAD").option("COUNT", count).arg("STREAMS").args(keys).args(ids).returning()
}

/// Deletes entries and returns how many existed.
pub fn xdel(key: impl ToArgument, ids: impl IntoIterator<Item = StreamId>) -> Request<u64> {
    Command::new("XDEL").arg(key).args(ids).returning()
}

/// Removes the oldest entries and returns how many.
pub fn xtrim(key: impl ToArgument, trim: Trim) -> Request<u64> {
    trim.add_to(Command::new("XTRIM").arg(key)).returning()
}
