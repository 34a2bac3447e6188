//! The budget of a pool, in messages and bytes, and the submitters that wait for it.
//!
//! The messages and bytes in use are one number in one atomic, so both are acquired in one step.
//!
//! No wake-up is lost. A waiter registers itself and then *modifies* `used`, by adding zero. Releasing budget modifies `used` and then
//! checks for waiters. Modifications of one atomic are ordered: if the waiter's comes first, the other thread sees its registration;
//! if the release comes first, the waiter finds the budget when it tries again.

use std::collections::BTreeMap;
use std::task::Waker;

use crate::Key;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering::SeqCst, Padded, lock};

/// The number of bits for the bytes of an [`Amount`].
const BYTE_BITS: u32 = 40;

/// The largest configurable bound on messages: half of the range of the counter.
pub(crate) const MAX_MESSAGES: usize = 1 << 23;
/// The largest configurable bound on bytes: half of the range of the counter.
pub(crate) const MAX_BYTES: usize = 1 << 39;

/// A number of messages and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Amount(u64);

impl Amount {
    pub(crate) fn new(messages: usize, bytes: usize) -> Self {
        Self((messages as u64) << BYTE_BITS | bytes as u64)
    }

    pub(crate) fn messages(self) -> usize {
        usize::try_from(self.0 >> BYTE_BITS).unwrap_or(usize::MAX)
    }

    pub(crate) fn bytes(self) -> usize {
        usize::try_from(self.0 & ((1 << BYTE_BITS) - 1)).unwrap_or(usize::MAX)
    }
}

impl std::ops::Add for Amount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

/// The bound that a submission exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bound {
    Total,
    Key(Key),
}

/// The budget of a pool, and the submitters that wait for it.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: Amount,
    /// The [`Amount`] in use. Every submission writes it, so it has its own cache line.
    used: Padded<AtomicU64>,
    /// The number of `waiters`, to be read without their lock.
    waiting: AtomicUsize,
    waiters: Mutex<Waiters>,
}

#[derive(Debug)]
struct Waiters {
    /// The wakers, by bound and ticket, and the [`SENTINEL`]. A waiter keeps its ticket for as long as it waits.
    wakers: BTreeMap<(Bound, u64), Waker>,
    tickets: u64,
}

/// An entry that is never woken. It prevents the map from freeing its memory when the last waiter is removed, so that occasional
/// waiting does not allocate.
const SENTINEL: (Bound, u64) = (Bound::Total, u64::MAX);

impl Default for Waiters {
    fn default() -> Self {
        Self { wakers: BTreeMap::from([(SENTINEL, Waker::noop().clone())]), tickets: 0 }
    }
}

impl Budget {
    pub(crate) fn new(messages: usize, bytes: usize) -> Self {
        Self {
            limit: Amount::new(messages, bytes),
            used: Padded(AtomicU64::new(0)),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        }
    }

    pub(crate) fn limit(&self) -> Amount {
        self.limit
    }

    pub(crate) fn used(&self) -> Amount {
        Amount(self.used.load(SeqCst))
    }

    /// Returns the budget in use, ordered with the modifications of other threads. See the module documentation.
    pub(crate) fn used_ordered(&self) -> Amount {
        Amount(self.used.fetch_add(0, SeqCst))
    }

    /// Acquires budget, if there are enough messages and bytes left.
    pub(crate) fn try_acquire(&self, amount: Amount) -> bool {
        let mut used = self.used.load(SeqCst);
        while self.is_within_limit(Amount(used) + amount) {
            match self.used.compare_exchange_weak(used, (Amount(used) + amount).0, SeqCst, SeqCst) {
                Ok(_) => return true,
                Err(other) => used = other,
            }
        }
        false
    }

    /// Returns whether there are enough messages and bytes left.
    pub(crate) fn can_acquire(&self, amount: Amount) -> bool {
        self.is_within_limit(self.used() + amount)
    }

    fn is_within_limit(&self, used: Amount) -> bool {
        used.messages() <= self.limit.messages() && used.bytes() <= self.limit.bytes()
    }

    /// Releases budget. Returns the amount that is still in use.
    pub(crate) fn release(&self, amount: Amount) -> Amount {
        let left = Amount(self.used.fetch_sub(amount.0, SeqCst) - amount.0);
        if self.waiting.load(SeqCst) > 0 {
            self.wake(Bound::Total, amount.messages().max(1));
        }
        left
    }

    /// Returns whether there are waiters, for any bound.
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    /// Returns the ticket of a new waiter.
    pub(crate) fn ticket(&self) -> u64 {
        let mut waiters = lock(&self.waiters);
        waiters.tickets += 1;
        waiters.tickets
    }

    /// Registers a waiter. It must try once more to acquire budget before it waits.
    pub(crate) fn register(&self, bound: Bound, ticket: u64, waker: &Waker) {
        let mut waiters = lock(&self.waiters);
        if waiters.wakers.insert((bound, ticket), waker.clone()).is_none() {
            self.waiting.fetch_add(1, SeqCst);
        }
        self.used_ordered();
    }

    /// Removes a waiter that has its budget or has been cancelled. Wakes the next one, because this waiter may have been woken for
    /// budget that it did not use.
    pub(crate) fn unregister(&self, bound: Bound, ticket: u64) {
        let mut waiters = lock(&self.waiters);
        if waiters.wakers.remove(&(bound, ticket)).is_some() {
            self.waiting.fetch_sub(1, SeqCst);
        }
        drop(waiters);
        self.wake(bound, 1);
    }

    /// Wakes the waiters that have waited longest for a bound, up to `at_most`.
    pub(crate) fn wake(&self, bound: Bound, at_most: usize) {
        for _ in 0..at_most {
            let mut waiters = lock(&self.waiters);
            let first = waiters.wakers.range((bound, 0)..(bound, u64::MAX)).next().map(|(&entry, _)| entry);
            let Some(waker) = first.and_then(|entry| waiters.wakers.remove(&entry)) else { return };
            self.waiting.fetch_sub(1, SeqCst);
            drop(waiters);
            waker.wake();
        }
    }

    /// Wakes all waiters, because the pool has closed.
    pub(crate) fn wake_all(&self) {
        let mut all = std::mem::replace(&mut lock(&self.waiters).wakers, Waiters::default().wakers);
        all.remove(&SENTINEL);
        self.waiting.fetch_sub(all.len(), SeqCst);
        all.into_values().for_each(Waker::wake);
    }
}
