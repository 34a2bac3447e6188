//! The requests of a worker to its consumer group.
//!
//! Scripts check that an entry is still pending for this consumer and change it in one step. So an entry that another consumer has
//! claimed is not taken back, and a request that is repeated after a lost reply changes nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use bytes::Bytes;

use super::held::{EntryKey, Gone};
use super::{Delivery, WorkerOptions};
use crate::commands::{self, GroupRead, Pending, StreamEntry, StreamId, StreamStart, XreadgroupOptions};
use crate::{Client, Error, ErrorCode, Invocation, Script};

/// Entries of one call of a script, so that no call keeps the server busy for long.
const MAX_SCRIPT_ENTRIES: usize = 256;

/// Transfers entries that have been idle for long enough, or that are pending for one consumer, and counts another delivery. Acknowledges
/// those that were deleted.
///
/// Arguments: group, consumer, idle time in milliseconds, the current consumer or an empty string, IDs.
static TAKE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local entries, deliveries, deleted = {}, {}, {}
for i = 5, #ARGV do
    local query = {'XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], ARGV[i], ARGV[i], 1}
    if ARGV[4] ~= '' then query[9] = ARGV[4] end
    local pending = redis.call(unpack(query))[1]
    if pending then
        local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i])[1]
        if entry then
            table.insert(entries, entry)
            table.insert(deliveries, pending[4] + 1)
        else
            redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
            table.insert(deleted, ARGV[i])
        end
    end
end
return {entries, deliveries, deleted}",
    )
});

/// Resets the idle time of entries that are pending for the consumer. Returns for each: 0 if it is, 1 if it is not, 2 if it was deleted.
///
/// Arguments: group, consumer, IDs.
static EXTEND: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local states = {}
for i = 3, #ARGV do
    local state = 1
    if redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', 0, ARGV[i], ARGV[i], 1, ARGV[2])[1] then
        local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
        state = claimed[1] and 0 or 2
    end
    table.insert(states, state)
end
return states",
    )
});

/// Undoes the delivery of entries that are pending for the consumer: other consumers can claim them at once, and it does not count.
///
/// Arguments: group, consumer, the idle time after which entries are claimed, pairs of an ID and a number of deliveries.
static RELEASE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "for i = 4, #ARGV, 2 do
    if redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', 0, ARGV[i], ARGV[i], 1, ARGV[2])[1] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[i + 1], 'JUSTID')
    end
end
return #ARGV",
    )
});

/// Moves an entry to the dead-letter stream if it is pending for the consumer. Returns whether it was. An error of `XADD` ends the script
/// before `XACK`. A function of Lua takes less than 8000 arguments, so the fields are split.
///
/// Arguments: group, consumer, ID, deliveries, error, fields and values.
static BURY: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if not redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', 0, ARGV[3], ARGV[3], 1, ARGV[2])[1] then return 0 end
local first = 6
repeat
    local last = math.min(first + 5999, #ARGV)
    redis.call('XADD', KEYS[2], '*', 'dead_letter.stream', KEYS[1], 'dead_letter.group', ARGV[1], 'dead_letter.id', ARGV[3],
        'dead_letter.deliveries', ARGV[4], 'dead_letter.error', ARGV[5], unpack(ARGV, first, last))
    first = last + 1
until first > #ARGV
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
return 1",
    )
});

/// The consumer group of a worker.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) client: Client,
    pub(super) streams: Vec<Stream>,
    pub(super) options: WorkerOptions,
}

/// A stream that a worker reads.
#[derive(Debug)]
pub(super) struct Stream {
    key: Bytes,
    /// The last entry when the worker started, which is where [`StreamStart::Now`] begins.
    last_at_start: OnceLock<StreamId>,
}

/// Entries that a worker has taken, because their handlers failed, their consumers have ended, or their deliveries were lost.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) entries: Vec<(EntryKey, Delivery)>,
    pub(super) deleted: Vec<EntryKey>,
    /// Whether there may be more to take.
    pub(super) has_more: bool,
}

/// The pending entries to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Those of this consumer.
    Own,
    /// Those that have been idle for `min_idle`, of any consumer.
    Stale,
}

impl Taken {
    /// Returns whether nothing was pending any more.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.deleted.is_empty()
    }
}

impl Stream {
    pub(super) fn new(key: Bytes) -> Self {
        Self { key, last_at_start: OnceLock::new() }
    }
}

impl Group {
    pub(super) fn has_stream(&self, key: &Bytes) -> bool {
        self.streams.iter().any(|stream| stream.key == *key)
    }

    /// Creates the group for every stream that does not have it, and the streams that do not exist.
    pub(super) async fn create(&self) -> Result<(), Error> {
        for stream in &self.streams {
            let start = match self.options.start {
                StreamStart::Now => self.now(stream).await?,
                start => start,
            };
            let created =
                self.client.send(commands::xgroup_create(&stream.key, &self.options.group, start, true)).await;
            match created {
                Ok(()) => {
                    let (stream, group) = (stream.key.escape_ascii(), &self.options.group);
                    tracing::info!(%stream, group, "consumer group created");
                }
                Err(error) if error.code() == Some(&ErrorCode::BusyGroup) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the last entry at the start of the worker, or the beginning if the stream was replaced since.
    async fn now(&self, stream: &Stream) -> Result<StreamStart, Error> {
        let last = commands::xrevrange(&stream.key, StreamId::MAX, StreamId::ZERO, Some(1));
        let last = self.client.send(last).await?.first().map_or(StreamId::ZERO, |entry| entry.id);
        let at_start = *stream.last_at_start.get_or_init(|| last);
        Ok(if last < at_start { StreamStart::Beginning } else { StreamStart::After(at_start) })
    }

    /// Reads new entries. Waits for them on the server.
    pub(super) async fn read(&self) -> Result<Vec<(EntryKey, Delivery)>, Error> {
        let count = (self.options.batch / self.streams.len()).max(1);
        let options = XreadgroupOptions::default().count(count as u64).block(self.options.block);
        let streams = self.streams.iter().map(|stream| (&stream.key, GroupRead::New));
        let read = commands::xreadgroup(&self.options.group, &self.options.consumer, streams, options);
        let mut entries = Vec::new();
        for (name, read) in self.client.send(read).await?.unwrap_or_default() {
            // A server returns only what was requested.
            let Some(index) = self.streams.iter().position(|stream| stream.key == name) else { continue };
            entries.extend(read.into_iter().map(|entry| self.delivered(index, entry, 1)));
        }
        Ok(entries)
    }

    /// Takes pending entries that are not held, up to a batch.
    pub(super) async fn claim(&self, claim: Claim, held: &HashSet<EntryKey>) -> Result<Taken, Error> {
        let mut taken = Taken::default();
        // No stream is always the first.
        let offset = fastrand::usize(..self.streams.len());
        for index in (offset..self.streams.len()).chain(0..offset) {
            let room = self.options.batch - taken.entries.len();
            if room == 0 {
                taken.has_more = true;
                break;
            }
            let pending = self.pending(index, claim, room + held.len()).await?;
            let mut keys: Vec<_> =
                pending.into_iter().map(|entry| (index, entry.id)).filter(|key| !held.contains(key)).collect();
            taken.has_more |= keys.len() >= room;
            keys.truncate(room);
            let more = self.take(claim, &keys).await?;
            taken.entries.extend(more.entries);
            taken.deleted.extend(more.deleted);
        }
        Ok(taken)
    }

    /// Returns the first pending entries of a stream.
    async fn pending(&self, stream: usize, claim: Claim, count: usize) -> Result<Vec<Pending>, Error> {
        let (idle, consumer) = match claim {
            Claim::Own => (Duration::ZERO, Some(&self.options.consumer)),
            Claim::Stale => (self.options.min_idle, None),
        };
        let key = &self.streams[stream].key;
        let range = commands::xpending_range(
            key,
            &self.options.group,
            idle,
            StreamId::ZERO,
            StreamId::MAX,
            count.try_into().unwrap_or(u64::MAX),
        );
        self.client.send(range.into_command().args(consumer).returning::<Vec<Pending>>()).await
    }

    /// Takes entries of one stream.
    pub(super) async fn take(&self, claim: Claim, keys: &[EntryKey]) -> Result<Taken, Error> {
        let Some((stream, _)) = keys.first().copied() else { return Ok(Taken::default()) };
        let (idle, consumer) = match claim {
            Claim::Own => (Duration::ZERO, &*self.options.consumer),
            Claim::Stale => (self.options.min_idle, ""),
        };
        let mut taken = Taken::default();
        for keys in keys.chunks(MAX_SCRIPT_ENTRIES) {
            let take = self.script::<(Vec<StreamEntry>, Vec<u64>, Vec<StreamId>)>(&TAKE, stream);
            let take = take.arg(idle.as_millis()).arg(consumer).args(keys.iter().map(|(_, id)| *id));
            let (entries, deliveries, deleted) = self.client.invoke(&take).await?;
            let entries = entries.into_iter().zip(deliveries);
            taken.entries.extend(entries.map(|(entry, deliveries)| self.delivered(stream, entry, deliveries)));
            taken.deleted.extend(deleted.into_iter().map(|id| (stream, id)));
        }
        Ok(taken)
    }

    /// Resets the idle times of entries. Returns those that are no longer pending for this worker.
    pub(super) async fn extend(&self, keys: Vec<EntryKey>) -> Result<Vec<(EntryKey, Gone)>, Error> {
        let mut gone = Vec::new();
        for (stream, keys) in by_stream(keys, |key| *key) {
            for keys in keys.chunks(MAX_SCRIPT_ENTRIES) {
                let extend = self.script::<Vec<i64>>(&EXTEND, stream).args(keys.iter().map(|(_, id)| *id));
                let states = self.client.invoke(&extend).await?;
                gone.extend(keys.iter().zip(states).filter_map(|(key, state)| match state {
                    0 => None,
                    2 => Some((*key, Gone::Deleted)),
                    _ => Some((*key, Gone::Lost)),
                }));
            }
        }
        Ok(gone)
    }

    /// Undoes the delivery of entries, which are given with their number of deliveries.
    pub(super) async fn release(&self, entries: Vec<(EntryKey, u64)>) -> Result<(), Error> {
        for (stream, entries) in by_stream(entries, |(key, _)| *key) {
            for entries in entries.chunks(MAX_SCRIPT_ENTRIES) {
                let mut release = self.script::<u64>(&RELEASE, stream).arg(self.options.min_idle.as_millis());
                for ((_, id), deliveries) in entries {
                    release = release.arg(*id).arg(deliveries.saturating_sub(1));
                }
                self.client.invoke(&release).await?;
            }
        }
        Ok(())
    }

    /// Acknowledges an entry.
    pub(super) async fn acknowledge(&self, (stream, id): EntryKey) -> Result<(), Error> {
        self.client.send(commands::xack(&self.streams[stream].key, &self.options.group, [id])).await?;
        Ok(())
    }

    /// Moves an entry to the dead-letter stream. Returns false if it is no longer pending for this worker.
    pub(super) async fn bury(
        &self,
        stream: usize,
        entry: &Delivery,
        deliveries: u64,
        error: &str,
    ) -> Result<bool, Error> {
        let target = match &self.options.dead_letter_stream {
            Some(name) => name.as_bytes().to_vec(),
            None => [&self.streams[stream].key[..], b":dead"].concat(),
        };
        let mut bury = self.script::<bool>(&BURY, stream).key(target).arg(entry.id).arg(deliveries).arg(error);
        for (field, value) in &entry.fields {
            bury = bury.arg(field).arg(value);
        }
        self.client.invoke(&bury).await
    }

    /// Makes a call of a script for one stream, with the group and the consumer as the first arguments.
    fn script<T>(&self, script: &Script, stream: usize) -> Invocation<T> {
        script.returning().key(&self.streams[stream].key).arg(&self.options.group).arg(&self.options.consumer)
    }

    fn delivered(&self, stream: usize, entry: StreamEntry, deliveries: u64) -> (EntryKey, Delivery) {
        let StreamEntry { id, fields } = entry;
        ((stream, id), Delivery { stream: self.streams[stream].key.clone(), id, fields, deliveries })
    }
}

/// Groups entries by their stream.
fn by_stream<T>(entries: Vec<T>, key: impl Fn(&T) -> EntryKey) -> BTreeMap<usize, Vec<T>> {
    let mut streams: BTreeMap<usize, Vec<T>> = BTreeMap::new();
    for entry in entries {
        streams.entry(key(&entry).0).or_default().push(entry);
    }
    streams
}
