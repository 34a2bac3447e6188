//! The budget of a pool, in messages and bytes, and the submitters that wait for it.
//!
//! Messages and bytes are one number in one atomic, so taking both is one step.
//!
//! No wake-up is lost. A waiter registers itself and then *modifies* `held`, by adding zero. Returning budget modifies `held` and then
//! checks for waiters. Modifications of one atomic are ordered: if the waiter's comes first, the other thread sees its registration;
//! if the return comes first, the waiter finds the budget when it tries again.

use std::collections::BTreeMap;
use std::task::Waker;

use crate::Key;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering::SeqCst, Padded, lock};

/// The number of bits for the bytes of an [`Amount`].
const BYTE_BITS: u32 = 40;

/// The largest configurable bound: half of the range of the counter.
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
pub(crate) enum Scope {
    Total,
    Key(Key),
}

#[derive(Debug)]
pub(crate) struct Budget {
    limit: Amount,
    /// The budget in use. Written with every submission, so it has its own cache line.
    held: Padded<AtomicU64>,
    /// The number of `waiters`, which can be read without their lock.
    waiting: AtomicUsize,
    waiters: Mutex<Waiters>,
}

#[derive(Debug)]
struct Waiters {
    /// The wakers, by bound and ticket, and the [`SENTINEL`]. A waiter keeps its ticket for as long as it waits.
    wakers: BTreeMap<(Scope, u64), Waker>,
    tickets: u64,
}

/// An entry that is never woken. It prevents the map from freeing its memory when the last waiter is removed, so that occasional
/// waiting does not allocate.
const SENTINEL: (Scope, u64) = (Scope::Total, u64::MAX);

impl Default for Waiters {
    fn default() -> Self {
        Self { wakers: BTreeMap::from([(SENTINEL, Waker::noop().clone())]), tickets: 0 }
    }
}

impl Budget {
    pub(crate) fn new(messages: usize, bytes: usize) -> Self {
        Self {
            limit: Amount::new(messages, bytes),
            held: Padded(AtomicU64::new(0)),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        }
    }

    pub(crate) fn limit(&self) -> Amount {
        self.limit
    }

    pub(crate) fn held(&self) -> Amount {
        Amount(self.held.load(SeqCst))
    }

    /// Returns the budget in use, read by a modification: for a waiter that has registered itself, see the module documentation.
    pub(crate) fn held_now(&self) -> Amount {
        Amount(self.held.fetch_add(0, SeqCst))
    }

    /// Takes budget, if there are enough messages and bytes left.
    pub(crate) fn try_take(&self, amount: Amount) -> bool {
        let mut held = self.held.load(SeqCst);
        while self.allows(Amount(held) + amount) {
            match self.held.compare_exchange_weak(held, (Amount(held) + amount).0, SeqCst, SeqCst) {
                Ok(_) => return true,
                Err(other) => held = other,
            }
        }
        false
    }

    /// Returns whether there are enough messages and bytes left.
    pub(crate) fn fits(&self, amount: Amount) -> bool {
        self.allows(self.held() + amount)
    }

    fn allows(&self, held: Amount) -> bool {
        held.messages() <= self.limit.messages() && held.bytes() <= self.limit.bytes()
    }

    /// Returns budget to the pool. Returns the amount that is still in use.
    pub(crate) fn give_back(&self, amount: Amount) -> Amount {
        let left = Amount(self.held.fetch_sub(amount.0, SeqCst) - amount.0);
        if self.waiting.load(SeqCst) > 0 {
            self.wake(Scope::Total, amount.messages().max(1));
        }
        left
    }

    /// Returns whether there are waiters, for any bound.
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub(crate) fn ticket(&self) -> u64 {
        let mut waiters = lock(&self.waiters);
        waiters.tickets += 1;
        waiters.tickets
    }

    /// Registers a waiter, which must then try once more before it waits to be woken.
    pub(crate) fn register(&self, scope: Scope, ticket: u64, waker: &Waker) {
        let mut waiters = lock(&self.waiters);
        if waiters.wakers.insert((scope, ticket), waker.clone()).is_none() {
            self.waiting.fetch_add(1, SeqCst);
        }
        self.held_now();
    }

    /// Removes a waiter that has its budget or has been cancelled. Wakes the next one, because this waiter may have been woken for
    /// budget that it did not use.
    pub(crate) fn unregister(&self, scope: Scope, ticket: u64) {
        let mut waiters = lock(&self.waiters);
        if waiters.wakers.remove(&(scope, ticket)).is_some() {
            self.waiting.fetch_sub(1, SeqCst);
        }
        drop(waiters);
        self.wake(scope, 1);
    }

    /// Wakes up to `at_most` waiters that have waited longest for this bound.
    pub(crate) fn wake(&self, scope: Scope, at_most: usize) {
        for _ in 0..at_most {
            let mut waiters = lock(&self.waiters);
            let first = waiters.wakers.range((scope, 0)..(scope, u64::MAX)).next().map(|(&entry, _)| entry);
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
