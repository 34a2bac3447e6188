//! The rate limiter: a sliding log of the requests of each user and address.
//!
//! It is exact: no window of the configured length has more requests than allowed, and a request is not rejected for longer than
//! necessary. Rejected requests do not count.
//!
//! Keys that have been idle for a window are dropped without scanning all keys. There are two generations, and a key moves to the young one
//! when it is used. After each window the old generation is dropped and replaced by the young one, so every dropped key has been
//! idle for at least a window.
//!
//! Users and addresses have separate limits, so that a flood from many addresses does not evict users. If there are too many keys,
//! the generations rotate early: the keys that have been idle longest are evicted, and their number is counted. Rejecting new keys
//! instead would let a client with many addresses lock out all others.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::mem;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::RateLimit;

/// Limits the requests of users and addresses, over all connections.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    max_requests: usize,
    window_ms: u64,
    /// A key is always in the same shard. Clients cannot choose the shard, because the hasher is randomly seeded.
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    evicted: AtomicU64,
}

/// The owner of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RateKey<'a> {
    /// A user, on all connections.
    User(&'a str),
    /// The clients of one address that are not logged in.
    Address(IpAddr),
}

impl RateKey<'_> {
    /// Returns the key under which an owner is counted: an IPv4-mapped IPv6 address is the same host as the IPv4 address.
    fn canonical(self) -> Self {
        match self {
            Self::Address(address) => Self::Address(address.to_canonical()),
            user @ Self::User(_) => user,
        }
    }
}

impl RateLimiter {
    /// Limit of the number of users, and of addresses. Each uses 8 bytes per allowed request.
    pub(crate) const MAX_KEYS: usize = 100_000;
    const SHARDS: usize = 16;

    pub(crate) fn new(limit: RateLimit) -> Self {
        Self::with_shards(limit, Self::SHARDS, Self::MAX_KEYS)
    }

    fn with_shards(limit: RateLimit, shards: usize, max_keys: usize) -> Self {
        let window_ms = u64::try_from(limit.window.as_millis()).unwrap_or(u64::MAX);
        // Half of the keys, since there are two generations.
        let max_young = (max_keys / shards / 2).max(1);
        Self {
            max_requests: limit.max_requests,
            window_ms,
            shards: (0..shards).map(|_| Mutex::new(Shard::new(max_young))).collect(),
            hasher: RandomState::new(),
            evicted: AtomicU64::new(0),
        }
    }

    /// Counts a request. If the limit is exceeded, returns the number of milliseconds until a request is allowed again.
    ///
    /// `now_ms` should be monotonic. If it goes back by at most a window, the latest time seen is used instead. If it goes back
    /// further, the clock was set, and all counts are reset.
    pub(crate) fn try_acquire(&self, key: RateKey<'_>, now_ms: u64) -> Result<(), u64> {
        let key = key.canonical();
        let (mut shard, attempt) = self.start_attempt(key, now_ms);
        let (result, evicted) = match key {
            RateKey::User(user) => shard.users.try_acquire(user, attempt),
            RateKey::Address(address) => shard.addresses.try_acquire(&address, attempt),
        };
        if evicted > 0 {
            self.evicted.fetch_add(evicted, Ordering::Relaxed);
        }
        result
    }

    /// Checks whether a request would be allowed, without counting it.
    pub(crate) fn check(&self, key: RateKey<'_>, now_ms: u64) -> Result<(), u64> {
        let key = key.canonical();
        let (mut shard, attempt) = self.start_attempt(key, now_ms);
        match key {
            RateKey::User(user) => shard.users.check(user, attempt),
            RateKey::Address(address) => shard.addresses.check(&address, attempt),
        }
    }

    /// Locks the shard of a key. Returns it, and the attempt with a time that never decreases.
    fn start_attempt(&self, key: RateKey<'_>, now_ms: u64) -> (MutexGuard<'_, Shard>, Attempt) {
        let shard = usize::try_from(self.hasher.hash_one(key)).unwrap_or(usize::MAX) % self.shards.len();
        let mut shard = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        let now = shard.monotonic(now_ms, self.window_ms);
        (shard, Attempt { now, max_requests: self.max_requests, window_ms: self.window_ms })
    }

    /// Returns the number of users and addresses that were evicted because the limit was reached.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }
}

/// A shard of the users and addresses.
#[derive(Debug)]
struct Shard {
    latest: u64,
    users: Generations<String>,
    addresses: Generations<IpAddr>,
}

impl Shard {
    fn new(max_young: usize) -> Self {
        Self { latest: 0, users: Generations::new(max_young), addresses: Generations::new(max_young) }
    }

    /// Returns a time that never decreases, so that the logs stay sorted. If the clock was set back by more than a window, resets the
    /// counts and returns the new time.
    fn monotonic(&mut self, now: u64, window: u64) -> u64 {
        if now.saturating_add(window) < self.latest {
            // Otherwise the limit would apply until the clock reaches the old time again.
            (self.latest, self.users, self.addresses) = (now, self.users.cleared(now), self.addresses.cleared(now));
        }
        self.latest = self.latest.max(now);
        self.latest
    }
}

/// An attempted request and the limit.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    now: u64,
    max_requests: usize,
    window_ms: u64,
}

/// The keys used since the last rotation, and those used only before it.
#[derive(Debug)]
struct Generations<K> {
    young: HashMap<K, Log>,
    old: HashMap<K, Log>,
    rotated_at: u64,
    max_young: usize,
}

impl<K: Hash + Eq> Generations<K> {
    fn new(max_young: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), rotated_at: 0, max_young }
    }

    fn cleared(&self, now: u64) -> Self {
        Self { rotated_at: now, ..Self::new(self.max_young) }
    }

    /// Counts a request. Also returns how many keys with requests in the window were evicted to make space for it.
    fn try_acquire<Q>(&mut self, key: &Q, attempt: Attempt) -> (Result<(), u64>, u64)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if attempt.now.saturating_sub(self.rotated_at) >= attempt.window_ms {
            self.rotate(attempt.now);
        }
        if let Some(log) = self.young.get_mut(key) {
            return (log.try_acquire(attempt), 0);
        }
        let mut log = self.old.remove(key).unwrap_or_default();
        let result = log.try_acquire(attempt);
        let mut evicted = 0;
        if self.young.len() >= self.max_young {
            let dropped = self.rotate(attempt.now);
            evicted = dropped.into_values().map(|mut log| u64::from(log.count(attempt) > 0)).sum();
        }
        self.young.insert(key.to_owned(), log);
        (result, evicted)
    }

    /// Checks whether a request would be allowed. This does not count as a use of the key.
    fn check<Q>(&mut self, key: &Q, attempt: Attempt) -> Result<(), u64>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let log = self.young.get_mut(key).or_else(|| self.old.get_mut(key));
        log.map_or_else(|| Log::default().check(attempt), |log| log.check(attempt))
    }

    /// Starts a new generation. Returns the old one, which is dropped.
    fn rotate(&mut self, now: u64) -> HashMap<K, Log> {
        self.rotated_at = now;
        let young = mem::take(&mut self.young);
        mem::replace(&mut self.old, young)
    }
}

/// The times of the allowed requests, oldest first.
#[derive(Debug, Default)]
struct Log(VecDeque<u64>);

impl Log {
    /// Returns the number of requests in the window.
    fn count(&mut self, attempt: Attempt) -> usize {
        while self.0.front().is_some_and(|then| then.saturating_add(attempt.window_ms) <= attempt.now) {
            self.0.pop_front();
        }
        self.0.len()
    }

    fn try_acquire(&mut self, attempt: Attempt) -> Result<(), u64> {
        self.check(attempt)?;
        self.0.push_back(attempt.now);
        Ok(())
    }

    fn check(&mut self, attempt: Attempt) -> Result<(), u64> {
        if self.count(attempt) < attempt.max_requests {
            return Ok(());
        }
        let wait =
            self.0.front().map_or(attempt.window_ms, |oldest| oldest.saturating_add(attempt.window_ms) - attempt.now);
        Err(wait.max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::thread;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn limit(max_requests: usize, window: u64) -> RateLimit {
        RateLimit::new(max_requests, Duration::from_millis(window))
    }

    const ANN: RateKey<'_> = RateKey::User("ann");

    #[test]
    fn window_slides() {
        let limiter = RateLimiter::new(limit(2, 100));
        for (now, expected) in [
            (1000, Ok(())),
            (1030, Ok(())),
            (1030, Err(70)),
            // Rejected and not counted.
            (1099, Err(1)),
            (1100, Ok(())),
            (1100, Err(30)),
            (1130, Ok(())),
            (5000, Ok(())),
            (5000, Ok(())),
            (5000, Err(100)),
        ] {
            assert_eq!(limiter.try_acquire(ANN, now), expected, "{now}");
        }
    }

    #[test]
    fn users_and_addresses_are_separate_keys() {
        let limiter = RateLimiter::new(limit(1, 100));
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(limiter.try_acquire(RateKey::User("127.0.0.1"), 0), Ok(()));
        assert_eq!(limiter.try_acquire(RateKey::Address(address), 0), Ok(()));
        assert_eq!(limiter.try_acquire(RateKey::Address(address), 0), Err(100));
        let mapped = IpAddr::from(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
        assert_eq!(limiter.try_acquire(RateKey::Address(mapped), 0), Err(100));
        assert_eq!(limiter.try_acquire(RateKey::Address(Ipv6Addr::LOCALHOST.into()), 0), Ok(()));
        assert_eq!(limiter.try_acquire(RateKey::User(""), 0), Ok(()));
    }

    #[test]
    fn extreme_limits_are_enforced() {
        let none = RateLimiter::new(limit(0, 100));
        assert_eq!((none.try_acquire(ANN, 5), none.try_acquire(ANN, 5)), (Err(100), Err(100)));
        assert_eq!(RateLimiter::new(limit(0, 0)).try_acquire(ANN, 5), Err(1));
        let no_window = RateLimiter::new(limit(1, 0));
        assert!((0..9).all(|_| no_window.try_acquire(ANN, 5).is_ok()));
        let endless = RateLimiter::new(RateLimit::new(1, Duration::MAX));
        assert_eq!(endless.try_acquire(ANN, 5), Ok(()));
        assert_eq!(endless.try_acquire(ANN, 6), Err(u64::MAX - 6));
    }

    #[test]
    fn small_clock_step_back_is_ignored() {
        let limiter = RateLimiter::with_shards(limit(2, 100), 1, 100);
        assert_eq!(limiter.try_acquire(ANN, 1000), Ok(()));
        assert_eq!(limiter.try_acquire(ANN, 950), Ok(()));
        assert_eq!(limiter.try_acquire(ANN, 900), Err(100));
        assert_eq!(limiter.try_acquire(ANN, 1099), Err(1));
        assert_eq!(limiter.try_acquire(ANN, 1100), Ok(()));
    }

    #[test]
    fn large_clock_step_back_resets_the_counts() {
        let limiter = RateLimiter::with_shards(limit(1, 100), 1, 100);
        assert_eq!(limiter.try_acquire(ANN, 1_000_000), Ok(()));
        assert_eq!(limiter.try_acquire(ANN, 1000), Ok(()));
        assert_eq!(limiter.try_acquire(ANN, 1000), Err(100));
        assert_eq!(limiter.try_acquire(ANN, 1100), Ok(()));
    }

    fn key_count(limiter: &RateLimiter) -> usize {
        let of = |shard: &Shard| {
            let (users, addresses) = (&shard.users, &shard.addresses);
            users.young.len() + users.old.len() + addresses.young.len() + addresses.old.len()
        };
        limiter.shards.iter().map(|shard| of(&shard.lock().unwrap())).sum()
    }

    #[test]
    fn idle_keys_are_dropped() {
        let limiter = RateLimiter::with_shards(limit(5, 100), 1, 1_000_000);
        for now in 0..10_000 {
            limiter.try_acquire(RateKey::User(&now.to_string()), now).unwrap();
            assert!(key_count(&limiter) <= 201);
        }
        assert_eq!(limiter.evicted(), 0);
    }

    #[test]
    fn longest_idle_keys_are_evicted_and_counted() {
        let limiter = RateLimiter::with_shards(limit(1, 1000), 1, 20);
        let user = |n: u32| n.to_string();
        for n in 0..15 {
            assert_eq!(limiter.try_acquire(RateKey::User(&user(n)), 0), Ok(()));
        }
        // A used key stays, even if its request is rejected.
        assert_eq!(limiter.try_acquire(RateKey::User("0"), 1), Err(999));
        for n in 15..20 {
            assert_eq!(limiter.try_acquire(RateKey::User(&user(n)), 1), Ok(()));
        }
        assert_eq!(limiter.evicted(), 9);
        assert_eq!(limiter.try_acquire(RateKey::User("0"), 2), Err(998));
        assert_eq!(limiter.try_acquire(RateKey::User("1"), 2), Ok(()));
        for n in 0..1000 {
            let _ = limiter.try_acquire(RateKey::User(&user(n)), 3);
            assert!(key_count(&limiter) <= 20);
        }
    }

    #[test]
    fn many_addresses_do_not_evict_a_user() {
        let limiter = RateLimiter::with_shards(limit(1, 1000), 1, 20);
        assert_eq!(limiter.try_acquire(ANN, 0), Ok(()));
        for n in 0..1000_u32 {
            assert_eq!(limiter.try_acquire(RateKey::Address(Ipv4Addr::from(n).into()), 0), Ok(()));
        }
        assert_eq!(limiter.try_acquire(ANN, 1), Err(999));
        assert!(limiter.evicted() > 900);
    }

    #[test]
    fn threads_share_one_limit() {
        let limiter = RateLimiter::new(limit(1000, 100));
        let result: usize = thread::scope(|scope| {
            let work = || (0..500).filter(|_| limiter.try_acquire(ANN, 7).is_ok()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(result, 1000);
    }

    proptest! {
        #[test]
        fn limiter_agrees_with_a_plain_log(
            max_requests in 0_usize..5,
            window in 0_u64..30,
            shards in 1_usize..3,
            attempts in prop::collection::vec((0_u8..4, 0_u64..12), 0..200),
        ) {
            // Few shards, so that keys share them. A request of one key must not evict another.
            let limiter = RateLimiter::with_shards(limit(max_requests, window), shards, 100);
            let mut log: Vec<(u8, u64)> = Vec::new();
            let mut now = 0;
            for (who, later) in attempts {
                now += later;
                let own: Vec<u64> =
                    log.iter().filter(|(one, then)| *one == who && then + window > now).map(|(_, then)| *then).collect();
                let expected = if own.len() < max_requests {
                    log.push((who, now));
                    Ok(())
                } else {
                    Err(own.first().map_or(window, |oldest| oldest + window - now).max(1))
                };
                let name = who.to_string();
                let key = if who < 2 { RateKey::User(&name) } else { RateKey::Address(Ipv4Addr::new(0, 0, 0, who).into()) };
                prop_assert_eq!(limiter.check(key, now), expected);
                prop_assert_eq!(limiter.try_acquire(key, now), expected);
            }
        }

        #[test]
        fn arbitrary_times_do_not_panic(times in prop::collection::vec(any::<u64>(), 0..50), window in any::<u64>()) {
            let limiter = RateLimiter::with_shards(limit(2, window), 1, 2);
            for (n, now) in times.into_iter().enumerate() {
                let name = (n % 5).to_string();
                if let Err(wait) = limiter.try_acquire(RateKey::User(&name), now) {
                    prop_assert!(wait >= 1);
                }
            }
        }
    }
}
