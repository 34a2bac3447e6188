//! Consumer groups of streams.

use std::time::Duration;

use bytes::Bytes;

use super::milliseconds;
use super::stream::{StreamEntry, StreamId, Streams};
use crate::command::{Command, ToArgument};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// Which entries a new group is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupStart {
    /// All.
    Beginning,
    /// Those that are added from now on.
    Now,
    /// Those after this.
    After(StreamId),
}

/// Which entries a consumer wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupRead {
    /// Those that nobody was given.
    New,
    /// Those after this that it was given and has not acknowledged.
    Pending(StreamId),
}

/// Options of `XREADGROUP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct XreadgroupOptions {
    /// At most so many of each stream. By default all.
    pub count: Option<u64>,
    /// Entries are acknowledged as they are given. They are lost if the reply is.
    pub no_ack: bool,
}

/// An entry that was given and not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// Where it is.
    pub id: StreamId,
    /// Who has it.
    pub consumer: Bytes,
    /// Since when.
    pub idle: Duration,
    /// How often it was given.
    pub deliveries: u64,
}

/// How much a group has not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingSummary {
    /// How many entries.
    pub count: u64,
    /// The first and the last.
    pub range: Option<(StreamId, StreamId)>,
    /// How many each consumer has.
    pub consumers: Vec<(Bytes, u64)>,
}

/// What [`xautoclaim`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// Where to go on. [`StreamId::ZERO`] if all were looked at.
    pub next: StreamId,
    /// What the consumer has now.
    pub entries: Vec<StreamEntry>,
    /// What is not in the stream any more. Before Redis 7 it is not told.
    pub deleted: Vec<StreamId>,
}

impl XreadgroupOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// At most so many of each stream.
    #[must_use]
    pub fn count(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }

    /// Acknowledge entries as they are given.
    #[must_use]
    pub fn no_ack(mut self) -> Self {
        self.no_ack = true;
        self
    }
}

impl ToArgument for GroupStart {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::Beginning => f(b"0"),
            Self::Now => f(b"$"),
            Self::After(id) => id.with_bytes(f),
        }
    }
}

impl ToArgument for GroupRead {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::New => f(b">"),
            Self::Pending(id) => id.with_bytes(f),
        }
    }
}

impl FromValue for Pending {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let (id, consumer, idle, deliveries) = FromValue::from_value(value)?;
        Ok(Self { id, consumer, idle: Duration::from_millis(idle), deliveries })
    }
}

impl FromValue for PendingSummary {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        type Reply = (u64, Option<StreamId>, Option<StreamId>, Option<Vec<(Bytes, u64)>>);
        let (count, first, last, consumers) = Reply::from_value(value)?;
        Ok(Self { count, range: first.zip(last), consumers: consumers.unwrap_or_default() })
    }
}

impl FromValue for Claimed {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let is_old = matches!(value.bare(), Value::Array(items) if items.len() == 2);
        let (next, entries, deleted) = if is_old {
            let (next, entries) = FromValue::from_value(value)?;
            (next, entries, Vec::new())
        } else {
            FromValue::from_value(value)?
        };
        Ok(Self { next, entries: without_nulls(entries), deleted })
    }
}

/// Before Redis 7, null stands for entries that were deleted.
fn without_nulls(entries: Vec<Option<StreamEntry>>) -> Vec<StreamEntry> {
    entries.into_iter().flatten().collect()
}

/// Makes a group. It is an error with the code [`BusyGroup`](crate::ErrorCode::BusyGroup) if there is one.
pub fn xgroup_create(
    key: impl ToArgument,
    group: impl ToArgument,
    start: GroupStart,
    make_stream: bool,
) -> Request<()> {
    Command::new("XGROUP").arg("CREATE").arg(key).arg(group).arg(start).flag("MKSTREAM", make_stream).returning()
}

/// Sets which entries a group is given next.
pub fn xgroup_setid(key: impl ToArgument, group: impl ToArgument, start: GroupStart) -> Request<()> {
    Command::new("XGROUP").arg("SETID").arg(key).arg(group).arg(start).returning()
}

/// Removes a group. False if there is none.
pub fn xgroup_destroy(key: impl ToArgument, group: impl ToArgument) -> Request<bool> {
    Command::new("XGROUP").arg("DESTROY").arg(key).arg(group).returning()
}

/// Makes a consumer. False if there is one.
pub fn xgroup_createconsumer(key: impl ToArgument, group: impl ToArgument, consumer: impl ToArgument) -> Request<bool> {
    Command::new("XGROUP").arg("CREATECONSUMER").arg(key).arg(group).arg(consumer).returning()
}

/// Removes a consumer, and returns how many entries it has not acknowledged. Nobody can claim them any more.
pub fn xgroup_delconsumer(key: impl ToArgument, group: impl ToArgument, consumer: impl ToArgument) -> Request<u64> {
    Command::new("XGROUP").arg("DELCONSUMER").arg(key).arg(group).arg(consumer).returning()
}

/// Gives entries to a consumer. `None` if there are none. It does not wait for any.
pub fn xreadgroup<K: ToArgument>(
    group: impl ToArgument,
    consumer: impl ToArgument,
    streams: impl IntoIterator<Item = (K, GroupRead)>,
    options: XreadgroupOptions,
) -> Request<Option<Streams>> {
    let (keys, reads): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    Command::new("XREADGROUP")
        .arg("GROUP")
        .arg(group)
        .arg(consumer)
        .option("COUNT", options.count)
        .flag("NOACK", options.no_ack)
        .arg("STREAMS")
        .args(keys)
        .args(reads)
        .returning()
}

/// Acknowledges entries, and returns how many were pending.
pub fn xack(key: impl ToArgument, group: impl ToArgument, ids: impl IntoIterator<Item = StreamId>) -> Request<u64> {
    Command::new("XACK").arg(key).arg(group).args(ids).returning()
}

/// How much is not acknowledged.
pub fn xpending(key: impl ToArgument, group: impl ToArgument) -> Request<PendingSummary> {
    Command::new("XPENDING").arg(key).arg(group).returning()
}

/// What is not acknowledged for at least so long, from one entry to another, at most so many.
pub fn xpending_range(
    key: impl ToArgument,
    group: impl ToArgument,
    idle: Duration,
    (first, last): (StreamId, StreamId),
    count: u64,
) -> Request<Vec<Pending>> {
    let command = Command::new("XPENDING").arg(key).arg(group).arg("IDLE").arg(milliseconds(idle));
    command.arg(first).arg(last).arg(count).returning()
}

/// Gives entries to another consumer that were not acknowledged for at least so long.
pub fn xclaim(
    key: impl ToArgument,
    group: impl ToArgument,
    consumer: impl ToArgument,
    idle: Duration,
    ids: impl IntoIterator<Item = StreamId>,
) -> Request<Vec<Option<StreamEntry>>> {
    Command::new("XCLAIM").arg(key).arg(group).arg(consumer).arg(milliseconds(idle)).args(ids).returning()
}

/// Gives entries to another consumer that were not acknowledged for at least so long, from one on.
pub fn xautoclaim(
    key: impl ToArgument,
    group: impl ToArgument,
    consumer: impl ToArgument,
    idle: Duration,
    start: StreamId,
    count: Option<u64>,
) -> Request<Claimed> {
    let command = Command::new("XAUTOCLAIM").arg(key).arg(group).arg(consumer).arg(milliseconds(idle)).arg(start);
    command.option("COUNT", count).returning()
}
