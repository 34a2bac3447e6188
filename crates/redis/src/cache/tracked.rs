//! The cache of a client, which its callers share with the connection.

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use hashbrown::DefaultHashBuilder;
use tokio::time::Instant;

use super::load::Load;
use super::shard::{Contents, ENTRY_BYTES, Found, Read, Reply, Shard};
use super::{CacheOptions, CacheStats, stored};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::tasks::Tasks;
use crate::{ServerError, Value};

/// The maximum number of shards.
const MAX_SHARDS: usize = 16;
/// A shard is not smaller, unless the cache is.
const MIN_SHARD_BYTES: usize = 1 << 20;
/// Entries that are dropped at once. More are dropped by a background task, a part at a time.
const MAX_DROPPED: usize = 256;

/// The cache of a client. The shard of an entry depends on its key.
pub(crate) struct Cache {
    shards: Box<[Mutex<Shard<Arc<Load>>>]>,
    /// Seeded at random.
    hasher: DefaultHashBuilder,
    max_entry_bytes: usize,
    max_age: Duration,
    /// A [`Tracking`].
    tracking: AtomicU8,
    bypassed: AtomicU64,
    flushes: AtomicU64,
    tasks: Tasks,
}

/// Whether the server tracks the keys that the open connection reads.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Tracking {
    /// There is no connection.
    Unknown,
    On,
    Refused,
}

/// What a caller gets that does not send the command.
pub(super) enum Joined {
    Reply(Arc<Value>),
    /// The load of the command, in which the caller is counted as waiting.
    Load(Arc<Load>),
}

impl Cache {
    pub(crate) fn new(options: &CacheOptions, tasks: Tasks) -> Self {
        let shards = (options.max_bytes / MIN_SHARD_BYTES).clamp(1, MAX_SHARDS);
        // The last power of two, because a shard is selected by some bits of a hash.
        let shards = 1 << shards.ilog2();
        let limit = options.max_bytes / shards;
        Self {
            shards: (0..shards).map(|_| Mutex::new(Shard::new(limit, options.max_entry_bytes))).collect(),
            hasher: DefaultHashBuilder::default(),
            max_entry_bytes: options.max_entry_bytes.min(limit),
            max_age: options.max_age,
            tracking: AtomicU8::new(Tracking::Unknown as u8),
            bypassed: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            tasks,
        }
    }

    /// Hashes a command. Returns `None` if it is not to be cached: the server does not track keys, or the command is too large.
    pub(super) fn read<'a>(&self, command: &'a [u8], key: Range<usize>) -> Option<Read<'a>> {
        if self.tracking.load(Relaxed) == Tracking::Refused as u8 || command.len() > self.max_entry_bytes {
            self.bypassed.fetch_add(1, Relaxed);
            return None;
        }
        let (command_hash, key_hash) = (self.hasher.hash_one(command), self.hasher.hash_one(&command[key.clone()]));
        Some(Read { command, key, command_hash, key_hash })
    }

    fn shard(&self, key_hash: u64) -> MutexGuard<'_, Shard<Arc<Load>>> {
        // The tables use the lowest bits and the seven highest.
        let index = usize::from((key_hash >> 48) as u16) & (self.shards.len() - 1);
        lock(&self.shards[index])
    }

    /// Returns the stored reply to a command.
    #[inline]
    pub(super) fn hit(&self, read: &Read<'_>, now: Instant) -> Option<Arc<Value>> {
        let mut shard = self.shard(read.key_hash);
        let Found::Reply(value) = shard.find(read, now) else { return None };
        shard.counts.hits += 1;
        Some(value)
    }

    /// Returns the stored reply to a command, or its load. If there is none, one begins.
    pub(super) fn join(&self, read: &Read<'_>, now: Instant) -> Joined {
        let mut shard = self.shard(read.key_hash);
        match shard.find(read, now) {
            Found::Reply(value) => {
                shard.counts.hits += 1;
                Joined::Reply(value)
            }
            Found::Load(load) => {
                shard.counts.coalesced += 1;
                load.add_waiter();
                Joined::Load(load)
            }
            Found::Nothing => {
                shard.counts.misses += 1;
                let load = Arc::new(Load::default());
                load.add_waiter();
                shard.begin(read, Arc::clone(&load));
                Joined::Load(load)
            }
        }
    }

    /// Removes a waiting caller. Returns whether it was the last one; then the next caller begins another load.
    pub(super) fn leave(&self, read: &Read<'_>, load: &Arc<Load>) -> bool {
        let mut shard = self.shard(read.key_hash);
        let is_last = load.remove_waiter();
        if is_last {
            shard.complete(read, |found| Arc::ptr_eq(found, load), None);
        }
        is_last
    }

    /// Ends a load without a reply.
    pub(super) fn fail(&self, read: &Read<'_>, load: &Arc<Load>) {
        self.shard(read.key_hash).complete(read, |found| Arc::ptr_eq(found, load), None);
    }

    /// Ends a load, and keeps its reply if it is not an error, not too large, and no invalidation has arrived since the load began.
    pub(super) fn complete(&self, read: &Read<'_>, load: &Arc<Load>, reply: Value, submitted: Instant) -> Arc<Value> {
        if reply.as_error().is_some() {
            self.fail(read, load);
            return Arc::new(reply);
        }
        let size = ENTRY_BYTES + read.command.len() + stored::size(&reply);
        let value = Arc::new(if size <= self.max_entry_bytes { stored::copy(&reply) } else { reply });
        let expires = crate::connection::later(submitted, self.max_age);
        let reply = Reply { value: Arc::clone(&value), size, expires };
        self.shard(read.key_hash).complete(read, |found| Arc::ptr_eq(found, load), Some(reply));
        value
    }

    /// Records that a connection opens, and whether the server tracks its keys.
    pub(crate) fn open(&self, tracked: Result<&(), &ServerError>) {
        let tracking = match tracked {
            Ok(&()) => Tracking::On,
            Err(error) => {
                tracing::warn!(%error, "server refused to track keys, reads are not cached");
                Tracking::Refused
            }
        };
        self.tracking.store(tracking as u8, SeqCst);
    }

    /// Empties the cache, because the open connection has ended. It has an effect once for each connection: loads that begin later are
    /// for the next one.
    pub(crate) fn close(&self) {
        if self.tracking.swap(Tracking::Unknown as u8, SeqCst) != Tracking::Unknown as u8 {
            self.flush();
        }
    }

    /// Handles a push. Only those about changed keys have an effect.
    pub(crate) fn handle_push(&self, push: &[Value]) {
        let [kind, arguments @ ..] = push else { return };
        if kind.as_bytes().is_none_or(|kind| kind != "invalidate") {
            return;
        }
        match arguments {
            [keys] if let Value::Array(keys) = keys.bare() => {
                for key in keys {
                    match key.as_bytes() {
                        Some(key) => {
                            let hash = self.hasher.hash_one(&key[..]);
                            self.shard(hash).invalidate(key, hash);
                        }
                        // It is unknown which key has changed.
                        None => return self.flush(),
                    }
                }
            }
            // Null means all keys. Of anything else it is unknown which keys have changed.
            _ => self.flush(),
        }
    }

    /// Removes all entries, also those that are being loaded: these loads keep nothing.
    pub(crate) fn flush(&self) {
        let mut removed: Vec<_> = self.shards.iter().map(|shard| lock(shard).clear()).collect();
        removed.retain(|contents| contents.slots() > 0);
        if !removed.is_empty() {
            self.flushes.fetch_add(1, Relaxed);
        }
        // The connection must not be delayed by it.
        if removed.iter().map(Contents::slots).sum::<usize>() > MAX_DROPPED {
            self.tasks.spawn(drop_in_parts(removed));
        }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            is_tracking: self.tracking.load(Relaxed) == Tracking::On as u8,
            bypassed: self.bypassed.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            let (counts, (entries, bytes)) = (shard.counts, shard.usage());
            stats.hits += counts.hits;
            stats.misses += counts.misses;
            stats.coalesced += counts.coalesced;
            stats.invalidated += counts.invalidated;
            stats.discarded += counts.discarded;
            stats.oversized += counts.oversized;
            stats.evicted += counts.evicted;
            stats.expired += counts.expired;
            stats.entries += entries;
            stats.bytes += bytes;
        }
        stats
    }
}

async fn drop_in_parts(mut removed: Vec<Contents<Arc<Load>>>) {
    while let Some(contents) = removed.last_mut() {
        match contents.slots() {
            0 => drop(removed.pop()),
            slots => contents.truncate(slots.saturating_sub(MAX_DROPPED)),
        }
        tokio::task::yield_now().await;
    }
}
