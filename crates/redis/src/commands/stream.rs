//! Streams.

use std::fmt::{self, Display, Formatter};

use bytes::Bytes;

use crate::command::{Command, ToArgument, ToPair};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// Where an entry is in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId {
    /// When it was added, by the clock of the server.
    pub milliseconds: u64,
    /// Which of those that were added in the same millisecond it is.
    pub sequence: u64,
}

/// An entry of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamEntry {
    /// Where it is.
    pub id: StreamId,
    /// What it says, in the order in which it was written. Nothing if it was deleted while it was pending.
    pub fields: Vec<(Bytes, Bytes)>,
}

/// Entries by stream.
pub type Streams = Vec<(Bytes, Vec<StreamEntry>)>;

/// What is to be removed from the beginning of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trim {
    /// What is more than about so many entries. That costs much less than exactly so many.
    ToAbout(u64),
    /// What is more than so many entries.
    To(u64),
    /// What is before about this entry.
    BeforeAbout(StreamId),
    /// What is before this entry.
    Before(StreamId),
}

/// Options of `XADD`. By default the server makes the identifier and the stream, and removes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct XaddOptions {
    /// Where the entry is to be. It must be after the last.
    pub id: Option<StreamId>,
    /// What is to be removed.
    pub trim: Option<Trim>,
    /// Only if there is such a stream.
    pub only_existing: bool,
}

impl StreamId {
    /// Before every entry.
    pub const ZERO: Self = Self { milliseconds: 0, sequence: 0 };

    /// After every entry.
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

impl FromValue for StreamId {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let id = value.as_bytes().and_then(|bytes| {
            let (milliseconds, sequence) = str::from_utf8(bytes).ok()?.split_once('-')?;
            Some(Self { milliseconds: milliseconds.parse().ok()?, sequence: sequence.parse().ok()? })
        });
        id.ok_or_else(|| ConversionError::new("the identifier of an entry", &value))
    }
}

impl FromValue for StreamEntry {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let (id, fields) = <(StreamId, Option<_>)>::from_value(value)?;
        Ok(Self { id, fields: fields.unwrap_or_default() })
    }
}

impl XaddOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Where the entry is to be.
    #[must_use]
    pub fn id(mut self, id: StreamId) -> Self {
        self.id = Some(id);
        self
    }

    /// What is to be removed.
    #[must_use]
    pub fn trim(mut self, trim: Trim) -> Self {
        self.trim = Some(trim);
        self
    }

    /// Only if there is such a stream.
    #[must_use]
    pub fn only_existing(mut self) -> Self {
        self.only_existing = true;
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

/// Adds an entry, and returns its identifier. `None` if there is no such stream and none is to be made.
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

/// How many entries there are.
pub fn xlen(key: impl ToArgument) -> Request<u64> {
    Command::new("XLEN").arg(key).returning()
}

/// Entries from one to another, at most so many. Both are in it.
pub fn xrange(key: impl ToArgument, first: StreamId, last: StreamId, count: Option<u64>) -> Request<Vec<StreamEntry>> {
    Command::new("XRANGE").arg(key).arg(first).arg(last).option("COUNT", count).returning()
}

/// Entries from one back to another, at most so many. Both are in it.
pub fn xrevrange(
    key: impl ToArgument,
    last: StreamId,
    first: StreamId,
    count: Option<u64>,
) -> Request<Vec<StreamEntry>> {
    Command::new("XREVRANGE").arg(key).arg(last).arg(first).option("COUNT", count).returning()
}

/// Entries of streams after these, at most so many of each. `None` if there are none. It does not wait for any.
pub fn xread<K: ToArgument>(
    streams: impl IntoIterator<Item = (K, StreamId)>,
    count: Option<u64>,
) -> Request<Option<Streams>> {
    let (keys, ids): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    Command::new("XREAD").option("COUNT", count).arg("STREAMS").args(keys).args(ids).returning()
}

/// Deletes entries, and returns how many there were.
pub fn xdel(key: impl ToArgument, ids: impl IntoIterator<Item = StreamId>) -> Request<u64> {
    Command::new("XDEL").arg(key).args(ids).returning()
}

/// Removes entries from the beginning, and returns how many.
pub fn xtrim(key: impl ToArgument, trim: Trim) -> Request<u64> {
    trim.add_to(Command::new("XTRIM").arg(key)).returning()
}
