//! Client-side caching: replies to reads are kept in memory until the server reports that their key has changed.
//!
//! [`Client::cached`](crate::Client::cached) reads through the cache, if [`Options::cache`](crate::Options::cache) is set. A hit is
//! answered from memory. A miss sends the command, and the server remembers that this connection has read the key (`CLIENT TRACKING`
//! with `OPTIN`). When the key changes, expires or is evicted, the server sends an invalidation, and all replies that were read from the
//! key are removed.
//!
//! # Guarantees
//!
//! - A hit is never older than an invalidation that the client has received. Pushes and replies are handled in the order in which they
//!   were received, so after [`Client::send`](crate::Client::send) has read a value over the shared connection,
//!   [`Client::cached`](crate::Client::cached) does not return an older one.
//! - A reply is kept only if no invalidation of its key has arrived since the command was submitted. A command that is being loaded has an
//!   entry in the cache, which an invalidation removes; a load without an entry keeps nothing.
//! - When the connection is lost or the client is closed, the cache is emptied before the new state is published. Loads that began before
//!   keep nothing.
//! - Concurrent calls with the same command wait for one load. If the caller that sent it goes away, another one receives the reply.
//! - Errors are not kept. Null is.
//!
//! The server sends the invalidation of a write after the reply to it. So a read that follows a write of the same client can return the
//! old value for as long as the invalidation is under way. Read with [`Client::send`](crate::Client::send) if that matters.
//!
//! # Memory
//!
//! The entries have a limit in bytes, [`CacheOptions::max_bytes`]. Above it, entries that were not read again since they were last considered
//! are evicted (SIEVE). Strings are copied out of the input, so an entry keeps no more than itself in memory.

mod load;
mod read;
mod shard;
mod stored;
mod tracked;

use std::time::Duration;

pub use self::read::NotCacheable;
pub(crate) use self::tracked::Cache;

/// The settings of the cache of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// The memory for entries in bytes: commands, replies, 40 bytes for each element of a reply, and 320 bytes for each entry. Default:
    /// 64 MiB, which is about 170 000 short strings.
    pub max_bytes: usize,
    /// The size of the largest entry in bytes. A larger reply is returned and not kept. Default: 1 MiB, so that a few large replies do not
    /// evict everything else. The memory is divided into up to 16 equal parts of at least 1 MiB, and an entry is
    /// not larger than a part.
    pub max_entry_bytes: usize,
    /// The age at which an entry is read again. It limits how long an old value is returned if the connection hangs and no invalidation
    /// arrives: the next read then fails, and the connection is replaced. Default: 5 minutes.
    pub max_age: Duration,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { max_bytes: 64 << 20, max_entry_bytes: 1 << 20, max_age: Duration::from_mins(5) }
    }
}

impl CacheOptions {
    /// Sets [`max_bytes`](#structfield.max_bytes).
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// Sets [`max_entry_bytes`](#structfield.max_entry_bytes).
    #[must_use]
    pub fn max_entry_bytes(mut self, max_entry_bytes: usize) -> Self {
        self.max_entry_bytes = max_entry_bytes;
        self
    }

    /// Sets [`max_age`](#structfield.max_age).
    #[must_use]
    pub fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = max_age;
        self
    }
}

/// Statistics of the cache of a client. All are zero if [`Options::cache`](crate::Options::cache) is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Whether the server sends invalidations on the open connection. If it is false, reads are not cached.
    pub is_tracking: bool,
    /// Reads answered from memory.
    pub hits: u64,
    /// Reads that started a load.
    pub misses: u64,
    /// Reads that waited for the load of another caller.
    pub coalesced: u64,
    /// Reads sent without the cache: the server does not track keys, or the command is larger than
    /// [`CacheOptions::max_entry_bytes`].
    pub bypassed: u64,
    /// Entries removed because their key had changed.
    pub invalidated: u64,
    /// Replies not kept because their key changed, or the connection was lost, while they were loaded.
    pub discarded: u64,
    /// Replies not kept because they were larger than [`CacheOptions::max_entry_bytes`].
    pub oversized: u64,
    /// Entries removed because the cache was full.
    pub evicted: u64,
    /// Entries removed because of their age.
    pub expired: u64,
    /// Times that all entries were removed at once: by `FLUSHALL` and `FLUSHDB`, when the connection was lost or closed, or by an
    /// invalidation without valid keys.
    pub flushes: u64,
    /// Entries now.
    pub entries: usize,
    /// Their size now, as [`CacheOptions::max_bytes`] counts it.
    pub bytes: usize,
}
