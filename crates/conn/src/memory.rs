//! Memory accounts of connections, and a limit on their sum.
//!
//! Each connection has an account. The actor records the bytes that it holds: unhandled input, replies and output. The outbox
//! records queued pushes. The application records bytes that it holds on behalf of the connection, such as requests in flight, with
//! [`MemoryAccount::hold`]. A body that several connections share counts for each of them.
//!
//! **Cost.** The actor and the outbox record multiples of [`STEP_BYTES`], the actor at most once per poll. An account changes the
//! shared total only when it crosses a multiple, so small messages that are written at once do not change the total.
//!
//! **Closing.** When the total exceeds the limit, the connection with the largest account is closed, then the next one, until the
//! remaining accounts are below the limit. An account that is being closed has a flag in the atomic word that also holds its bytes, so
//! the bytes that it is about to release are known exactly, and no other connection is closed for them. Until these bytes are
//! released, every actor takes one turn per poll instead of many, so that the other connections read little meanwhile.

use std::fmt;
use std::sync::atomic::{AtomicIsize, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use crate::ConnectionId;
use crate::session::ConnectionInfo;
use crate::sync::lock;

/// The total counts each account as a multiple of this size, rounded down.
pub(crate) const STEP_BYTES: usize = 4096;

/// Flag in the word of an account: the connection is being closed.
const CLOSING: usize = 1 << (usize::BITS - 1);

/// A limit on the memory that connections hold together. Clones refer to the same limit, and several supervisors can share it.
///
/// The limit covers input, queued requests, replies and pushes, and the bytes that the application
/// [holds](MemoryAccount::hold). It does not cover the fixed size of a connection, which is about a kilobyte.
///
/// ```
/// use tidewire_conn::MemoryLimit;
///
/// let limit = MemoryLimit::new(256 << 20);
/// assert_eq!((limit.used(), limit.max_bytes(), limit.closed()), (0, 256 << 20, 0));
/// ```
#[derive(Clone)]
pub struct MemoryLimit(Arc<Total>);

struct Total {
    max_bytes: usize,
    /// The sum of all accounts, each rounded down to a multiple of [`STEP_BYTES`].
    used: AtomicIsize,
    /// The part of `used` in accounts that are being closed.
    closing: AtomicIsize,
    closed: AtomicU64,
    /// The supervisors that share the limit. Locked while connections are selected for closing.
    supervisors: Mutex<Vec<Weak<dyn Accounts>>>,
}

/// A set of connections with accounts.
pub(crate) trait Accounts: Send + Sync {
    /// Appends the connections whose account is not empty.
    fn append_to(&self, holders: &mut Vec<Arc<dyn Holder>>);
}

/// A connection with an account.
pub(crate) trait Holder: Send + Sync {
    /// Returns the id and the account of the connection. `None` for bare queues, which have no connection.
    fn account(&self) -> Option<(ConnectionId, &Account)>;

    /// Asks the actor to close the connection because of the limit.
    fn close_for_memory(&self);
}

impl MemoryLimit {
    /// Creates a limit of `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self(Arc::new(Total {
            max_bytes,
            used: AtomicIsize::new(0),
            closing: AtomicIsize::new(0),
            closed: AtomicU64::new(0),
            supervisors: Mutex::default(),
        }))
    }

    /// Returns the bytes that all connections hold. An account counts in multiples of 4 KiB, rounded down.
    pub fn used(&self) -> usize {
        usize::try_from(self.0.used.load(SeqCst)).unwrap_or(0)
    }

    /// Returns the limit.
    pub fn max_bytes(&self) -> usize {
        self.0.max_bytes
    }

    /// Returns the number of connections that were closed because of the limit.
    pub fn closed(&self) -> u64 {
        self.0.closed.load(SeqCst)
    }

    pub(crate) fn register(&self, supervisor: Weak<dyn Accounts>) {
        let mut supervisors = lock(&self.0.supervisors);
        supervisors.retain(|supervisor| supervisor.strong_count() > 0);
        supervisors.push(supervisor);
    }

    /// Whether a further connection must be closed: the accounts that are not being closed exceed the limit.
    fn must_close_another(&self) -> bool {
        let remaining = self.0.used.load(SeqCst).saturating_sub(self.0.closing.load(SeqCst));
        usize::try_from(remaining).is_ok_and(|remaining| remaining > self.0.max_bytes)
    }

    /// Closes the connections with the largest accounts until the others are below the limit. Must not be called while the lock of
    /// an outbox is held.
    pub(crate) fn enforce(&self) {
        if self.must_close_another() {
            self.close_largest();
        }
    }

    #[cold]
    fn close_largest(&self) {
        let supervisors = lock(&self.0.supervisors);
        let mut holders = Vec::new();
        if self.must_close_another() {
            supervisors.iter().filter_map(Weak::upgrade).for_each(|supervisor| supervisor.append_to(&mut holders));
        }
        let bytes = |holder: &Arc<dyn Holder>| holder.account().map_or(0, |(_, account)| account.bytes());
        holders.sort_by_cached_key(|holder| std::cmp::Reverse(bytes(holder)));
        let mut selected = Vec::new();
        for holder in &holders {
            if !self.must_close_another() {
                break;
            }
            if let Some((connection, account)) = holder.account()
                && let Some(held_bytes) = account.mark_closing()
            {
                selected.push((holder, connection, held_bytes));
            }
        }
        drop(supervisors);
        // Not under the lock, because a woken task may run immediately.
        for (holder, connection, held_bytes) in selected {
            self.0.closed.fetch_add(1, SeqCst);
            let (used_bytes, max_bytes) = (self.used(), self.max_bytes());
            tracing::warn!(%connection, held_bytes, used_bytes, max_bytes, "connection closed: memory limit exceeded");
            holder.close_for_memory();
        }
    }
}

impl fmt::Debug for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLimit").field("used", &self.used()).field("max_bytes", &self.max_bytes()).finish()
    }
}

/// The account of one connection.
pub(crate) struct Account {
    limit: MemoryLimit,
    /// The number of bytes, and the flag [`CLOSING`].
    state: AtomicUsize,
}

impl Account {
    pub(crate) fn new(limit: MemoryLimit) -> Self {
        Self { limit, state: AtomicUsize::new(0) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.state.load(SeqCst) & !CLOSING
    }

    /// Records that the connection holds more or fewer bytes. If it returns true, the caller must [enforce](Self::enforce) the limit.
    #[must_use]
    pub(crate) fn change(&self, by: isize) -> bool {
        // The bytes never fall below zero, so the flag is not touched.
        let before = self.state.fetch_add(by.cast_unsigned(), SeqCst);
        let (is_closing, before) = (before & CLOSING != 0, before & !CLOSING);
        let steps = (before.wrapping_add_signed(by) / STEP_BYTES).cast_signed() - (before / STEP_BYTES).cast_signed();
        if steps == 0 {
            return false;
        }
        let counted = steps * STEP_BYTES.cast_signed();
        self.limit.0.used.fetch_add(counted, SeqCst);
        if is_closing {
            self.limit.0.closing.fetch_add(counted, SeqCst);
        }
        steps > 0
    }

    /// Enforces the limit: see [`MemoryLimit::enforce`].
    pub(crate) fn enforce(&self) {
        self.limit.enforce();
    }

    /// Whether all accounts together exceed the limit, including those that are being closed.
    pub(crate) fn is_limit_exceeded(&self) -> bool {
        self.limit.used() > self.limit.max_bytes()
    }

    /// Sets [`CLOSING`]. Returns the bytes of the account, or `None` if the flag was set or the account is too small to count.
    fn mark_closing(&self) -> Option<usize> {
        let before = self.state.fetch_update(SeqCst, SeqCst, |state| {
            (state & CLOSING == 0 && state >= STEP_BYTES).then_some(state | CLOSING)
        });
        let bytes = before.ok()?;
        self.limit.0.closing.fetch_add((bytes / STEP_BYTES * STEP_BYTES).cast_signed(), SeqCst);
        Some(bytes)
    }
}

/// The memory account of one connection: see [`MemoryLimit`]. Clones refer to the same account and do not keep the connection
/// alive.
#[derive(Clone)]
pub struct MemoryAccount(pub(crate) Arc<ConnectionInfo>);

impl MemoryAccount {
    /// Records that the application holds `bytes` on behalf of the connection, until the returned value is dropped.
    pub fn hold(&self, bytes: usize) -> MemoryHold {
        // Larger than any allocation, and small enough that the sum does not overflow.
        let bytes = bytes.min(isize::MAX.cast_unsigned() / 2);
        let held = MemoryHold { account: self.clone(), bytes };
        if self.0.account.change(bytes.cast_signed()) {
            self.0.account.enforce();
        }
        held
    }

    /// Returns the bytes that the connection holds. Those of its actor and its outbox count in multiples of 4 KiB, rounded down.
    pub fn bytes(&self) -> usize {
        self.0.account.bytes()
    }
}

impl fmt::Debug for MemoryAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAccount").field("bytes", &self.bytes()).finish()
    }
}

/// Bytes that the application holds on behalf of a connection: see [`MemoryAccount::hold`]. Dropping the value releases them.
#[derive(Debug)]
#[must_use = "dropping a `MemoryHold` releases its bytes"]
pub struct MemoryHold {
    account: MemoryAccount,
    bytes: usize,
}

impl Drop for MemoryHold {
    fn drop(&mut self) {
        // Releasing bytes never exceeds the limit.
        let _ = self.account.0.account.change(-self.bytes.cast_signed());
    }
}
