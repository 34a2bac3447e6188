//! Consumer groups of streams.

use std::time::Duration;

use bytes::Bytes;

use super::blocking::block_milliseconds;
use super::milliseconds;
use super::stream::{StreamEntry, StreamId, StreamStart, Streams};
use crate::command::{Command, ToArgument};
use crate::convert::FromValue;
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// The entries that a consumer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupRead {
    /// Entries that were not delivered to any consumer.
    New,
    /// Entries after this ID that were delivered to the consumer and are not acknowledged.
    Pending(StreamId),
}

/// Options of `XREADGROUP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct XreadgroupOptions {
    /// The largest number of entries of each stream. Default: all.
    pub count: Option<u64>,
    /// Acknowledges entries when they are delivered, so that they are lost if the reply is. Default: false.
    pub no_ack: bool,
    /// For how long the command blocks while there are no entries; zero means without a limit. It applies to [`GroupRead::New`] only.
    /// Default: it does not block.
    pub block: Option<Duration>,
}

/// An entry that was delivered and is not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// The ID.
    pub id: StreamId,
    /// The consumer it was delivered to.
    pub consumer: Bytes,
    /// The time since it was last delivered.
    pub idle: Duration,
    /// How often it was delivered.
    pub deliveries: u64,
}

/// A summary of the pending entries of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingSummary {
    /// The number of pending entries.
    pub count: u64,
    /// The smallest and the largest ID.
    pub range: Option<(StreamId, StreamId)>,
    /// The number of pending entries of each consumer.
    pub consumers: Vec<(Bytes, u64)>,
}

/// The reply to [`xautoclaim`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// The start of the next call. [`StreamId::ZERO`] if all entries were examined.
    pub next: StreamId,
    /// The entries that were transferred.
    pub entries: Vec<StreamEntry>,
    /// The IDs of entries that no longer exist. Empty before Redis 7.
    pub deleted: Vec<StreamId>,
}

impl XreadgroupOptions {
    /// Sets [`count`](#structfield.count).
    #[must_use]
    pub fn count(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }

    /// Sets [`no_ack`](#structfield.no_ack).
    #[must_use]
    pub fn no_ack(mut self, no_ack: bool) -> Self {
        self.no_ack = no_ack;
        self
    }

    /// Sets [`block`](#structfield.block).
    #[must_use]
    pub fn block(mut self, block: Duration) -> Self {
        self.block = Some(block);
        self
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

/// Before Redis 7, null stands for a deleted entry.
fn without_nulls(entries: Vec<Option<StreamEntry>>) -> Vec<StreamEntry> {
    entries.into_iter().flatten().collect()
}

/// Creates a consumer group. If it exists, the error code is [`BusyGroup`](crate::ErrorCode::BusyGroup).
pub fn xgroup_create(
    key: impl ToArgument,
    group: impl ToArgument,
    start: StreamStart,
    make_stream: bool,
) -> Request<()> {
    Command::new("XGROUP").arg("CREATE").arg(key).arg(group).arg(start).flag("MKSTREAM", make_stream).returning()
}

/// Sets the entries that a group delivers next.
pub fn xgroup_setid(key: impl ToArgument, group: impl ToArgument, start: StreamStart) -> Request<()> {
    Command::new("XGROUP").arg("SETID").arg(key).arg(group).arg(start).returning()
}

/// Deletes a group. Returns false if it does not exist.
pub fn xgroup_destroy(key: impl ToArgument, group: impl ToArgument) -> Request<bool> {
    Command::new("XGROUP").arg("DESTROY").arg(key).arg(group).returning()
}

/// Creates a consumer. Returns false if it exists.
pub fn xgroup_createconsumer(key: impl ToArgument, group: impl ToArgument, consumer: impl ToArgument) -> Request<bool> {
    Command::new("XGROUP").arg("CREATECONSUMER").arg(key).arg(group).arg(consumer).returning()
}

/// Deletes a consumer and returns the number of its pending entries, which can no longer be claimed.
pub fn xgroup_delconsumer(key: impl ToArgument, group: impl ToArgument, consumer: impl ToArgument) -> Request<u64> {
    Command::new("XGROUP").arg("DELCONSUMER").arg(key).arg(group).arg(consumer).returning()
}

/// Delivers entries to a consumer. Returns `None` if there are no entries.
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
        .option("BLOCK", options.block.map(block_milliseconds))
        .flag("NOACK", options.no_ack)
        .arg("STREAMS")
        .args(keys)
        .args(reads)
        .returning()
}

/// Acknowledges entries and returns how many were pending.
pub fn xack(key: impl ToArgument, group: impl ToArgument, ids: impl IntoIterator<Item = StreamId>) -> Request<u64> {
    Command::new("XACK").arg(key).arg(group).args(ids).returning()
}

/// Returns a summary of the pending entries.
pub fn xpending(key: impl ToArgument, group: impl ToArgument) -> Request<PendingSummary> {
    Command::new("XPENDING").arg(key).arg(group).returning()
}

/// Returns the pending entries from `start` to `end`, both inclusive, that are idle for at least `idle`, and at most `count` of
/// them.
pub fn xpending_range(
    key: impl ToArgument,
    group: impl ToArgument,
    idle: Duration,
    start: StreamId,
    end: StreamId,
    count: u64,
) -> Request<Vec<Pending>> {
    let command = Command::new("XPENDING").arg(key).arg(group).arg("IDLE").arg(milliseconds(idle));
    command.arg(start).arg(end).arg(count).returning()
}

/// Transfers pending entries that are idle for at least `idle` to another consumer. `None` stands for an entry that was deleted.
pub fn xclaim(
    key: impl ToArgument,
    group: impl ToArgument,
    consumer: impl ToArgument,
    idle: Duration,
    ids: impl IntoIterator<Item = StreamId>,
) -> Request<Vec<Option<StreamEntry>>> {
    Command::new("XCLAIM").arg(key).arg(group).arg(consumer).arg(milliseconds(idle)).args(ids).returning()
}

/// Transfers pending entries that are idle for at least `idle` to another consumer, beginning at `start`.
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
