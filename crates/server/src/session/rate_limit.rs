//! How many requests somebody may make: the times of the last ones, for each user and address.
//!
//! It is exact: in no span of the window's length are more requests let through than there may be, and one that is let through
//! never waits longer than it must. A request that is turned away does not count.
//!
//! Those who have been quiet for a window are forgotten without being searched for. There are two generations: whoever asks moves
//! to the younger one; after a window the older one is dropped whole, the younger one becomes the older one, and who was in the
//! dropped one has not asked for a window.
//!
//! Users and addresses are bounded on their own, so that a flood from many addresses makes no user forgotten. When there are too
//! many, the generations change early: those who have been quiet longest begin anew, and are counted as forgotten. Turning
//! newcomers away instead would let whoever has many addresses lock everybody else out.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::mem;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::RateLimit;

/// How many requests users and addresses may make. All connections share it.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    max_requests: usize,
    window: u64,
    /// A key is always in the same one; nobody who does not know the hasher's keys can choose which.
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    forgotten: AtomicU64,
}

/// Whose requests are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RateKey<'a> {
    /// Those of a user, on all connections.
    User(&'a str),
    /// Those of who is not logged in, from one address.
    Address(IpAddr),
}

impl RateLimiter {
    /// How many users are remembered, and how many addresses. Each takes 8 bytes for every request that it may make.
    pub(crate) const MAX_KEYS: usize = 100_000;
    const SHARDS: usize = 16;

    pub(crate) fn new(limit: RateLimit) -> Self {
        Self::with(limit, Self::SHARDS, Self::MAX_KEYS)
    }

    fn with(limit: RateLimit, shards: usize, max_keys: usize) -> Self {
        let window = u64::try_from(limit.window.as_millis()).unwrap_or(u64::MAX);
        // There are two generations.
        let max_young = (max_keys / shards / 2).max(1);
        Self {
            max_requests: limit.max_requests,
            window,
            shards: (0..shards).map(|_| Mutex::new(Shard::new(max_young))).collect(),
            hasher: RandomState::new(),
            forgotten: AtomicU64::new(0),
        }
    }

    /// Counts a request, or says after how many milliseconds it is worth trying again.
    ///
    /// `now_ms` should never go back. If it does by no more than a window, it is taken for the latest time that was seen; if by more,
    /// a clock was set, and the counts begin anew.
    pub(crate) fn take(&self, key: RateKey<'_>, now_ms: u64) -> Result<(), u64> {
        let key = match key {
            // The same host, whichever kind of socket it came in by.
            RateKey::Address(address) => RateKey::Address(address.to_canonical()),
            user @ RateKey::User(_) => user,
        };
        let shard = usize::try_from(self.hasher.hash_one(key)).unwrap_or(usize::MAX) % self.shards.len();
        let mut shard = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        let now = shard.at(now_ms, self.window);
        let ask = Ask { now, max_requests: self.max_requests, window: self.window };
        let (taken, forgotten) = match key {
            RateKey::User(user) => shard.users.take(user, ask),
            RateKey::Address(address) => shard.addresses.take(&address, ask),
        };
        if forgotten > 0 {
            self.forgotten.fetch_add(forgotten, Ordering::Relaxed);
        }
        taken
    }

    /// How many users and addresses began anew because there were too many.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }
}

/// One part of the users and addresses.
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

    /// The time, which does not go back here: what it orders would be in no order.
    fn at(&mut self, now: u64, window: u64) -> u64 {
        if now.saturating_add(window) < self.latest {
            // Those who wait would wait for a time that is far away.
            (self.latest, self.users, self.addresses) = (now, self.users.anew(now), self.addresses.anew(now));
        }
        self.latest = self.latest.max(now);
        self.latest
    }
}

/// One request, and what is allowed.
#[derive(Debug, Clone, Copy)]
struct Ask {
    now: u64,
    max_requests: usize,
    window: u64,
}

/// Who has asked since the generations changed, and who only before.
#[derive(Debug)]
struct Generations<K> {
    young: HashMap<K, Log>,
    old: HashMap<K, Log>,
    changed_at: u64,
    max_young: usize,
}

impl<K: Hash + Eq> Generations<K> {
    fn new(max_young: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), changed_at: 0, max_young }
    }

    fn anew(&self, now: u64) -> Self {
        Self { changed_at: now, ..Self::new(self.max_young) }
    }

    /// Counts a request, and how many were forgotten for it although they had made some in the window.
    fn take<Q>(&mut self, key: &Q, ask: Ask) -> (Result<(), u64>, u64)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if ask.now.saturating_sub(self.changed_at) >= ask.window {
            self.change(ask.now);
        }
        if let Some(log) = self.young.get_mut(key) {
            return (log.take(ask), 0);
        }
        let mut log = self.old.remove(key).unwrap_or_default();
        let taken = log.take(ask);
        let mut forgotten = 0;
        if self.young.len() >= self.max_young {
            let dropped = self.change(ask.now);
            forgotten = dropped.into_values().map(|mut log| u64::from(log.count(ask) > 0)).sum();
        }
        self.young.insert(key.to_owned(), log);
        (taken, forgotten)
    }

    /// Gives those that are dropped.
    fn change(&mut self, now: u64) -> HashMap<K, Log> {
        self.changed_at = now;
        let young = mem::take(&mut self.young);
        mem::replace(&mut self.old, young)
    }
}

/// When requests were let through, the oldest first.
#[derive(Debug, Default)]
struct Log(VecDeque<u64>);

impl Log {
    /// How many there are in the window.
    fn count(&mut self, ask: Ask) -> usize {
        while self.0.front().is_some_and(|then| then.saturating_add(ask.window) <= ask.now) {
            self.0.pop_front();
        }
        self.0.len()
    }

    fn take(&mut self, ask: Ask) -> Result<(), u64> {
        if self.count(ask) < ask.max_requests {
            self.0.push_back(ask.now);
            return Ok(());
        }
        let wait = self.0.front().map_or(ask.window, |oldest| oldest.saturating_add(ask.window) - ask.now);
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
    fn the_window_slides() {
        let limiter = RateLimiter::new(limit(2, 100));
        for (now, expected) in [
            (1000, Ok(())),
            (1030, Ok(())),
            (1030, Err(70)),
            // Turned away, and not counted.
            (1099, Err(1)),
            (1100, Ok(())),
            (1100, Err(30)),
            (1130, Ok(())),
            (5000, Ok(())),
            (5000, Ok(())),
            (5000, Err(100)),
        ] {
            assert_eq!(limiter.take(ANN, now), expected, "{now}");
        }
    }

    #[test]
    fn a_user_named_like_an_address_is_not_that_address() {
        let limiter = RateLimiter::new(limit(1, 100));
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(limiter.take(RateKey::User("127.0.0.1"), 0), Ok(()));
        assert_eq!(limiter.take(RateKey::Address(address), 0), Ok(()));
        assert_eq!(limiter.take(RateKey::Address(address), 0), Err(100));
        let mapped = IpAddr::from(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
        assert_eq!(limiter.take(RateKey::Address(mapped), 0), Err(100));
        assert_eq!(limiter.take(RateKey::Address(Ipv6Addr::LOCALHOST.into()), 0), Ok(()));
        assert_eq!(limiter.take(RateKey::User(""), 0), Ok(()));
    }

    #[test]
    fn limits_without_sense_do_what_they_say() {
        let none = RateLimiter::new(limit(0, 100));
        assert_eq!((none.take(ANN, 5), none.take(ANN, 5)), (Err(100), Err(100)));
        assert_eq!(RateLimiter::new(limit(0, 0)).take(ANN, 5), Err(1));
        let no_window = RateLimiter::new(limit(1, 0));
        assert!((0..9).all(|_| no_window.take(ANN, 5).is_ok()));
        let for_ever = RateLimiter::new(RateLimit::new(1, Duration::MAX));
        assert_eq!(for_ever.take(ANN, 5), Ok(()));
        assert_eq!(for_ever.take(ANN, 6), Err(u64::MAX - 6));
    }

    #[test]
    fn time_that_goes_back_a_little_stands_still() {
        let limiter = RateLimiter::with(limit(2, 100), 1, 100);
        assert_eq!(limiter.take(ANN, 1000), Ok(()));
        assert_eq!(limiter.take(ANN, 950), Ok(()));
        assert_eq!(limiter.take(ANN, 900), Err(100));
        assert_eq!(limiter.take(ANN, 1099), Err(1));
        assert_eq!(limiter.take(ANN, 1100), Ok(()));
    }

    #[test]
    fn a_clock_that_is_set_back_locks_nobody_out() {
        let limiter = RateLimiter::with(limit(1, 100), 1, 100);
        assert_eq!(limiter.take(ANN, 1_000_000), Ok(()));
        assert_eq!(limiter.take(ANN, 1000), Ok(()));
        assert_eq!(limiter.take(ANN, 1000), Err(100));
        assert_eq!(limiter.take(ANN, 1100), Ok(()));
    }

    fn held(limiter: &RateLimiter) -> usize {
        let of = |shard: &Shard| {
            let (users, addresses) = (&shard.users, &shard.addresses);
            users.young.len() + users.old.len() + addresses.young.len() + addresses.old.len()
        };
        limiter.shards.iter().map(|shard| of(&shard.lock().unwrap())).sum()
    }

    #[test]
    fn who_is_quiet_for_a_window_is_forgotten() {
        let limiter = RateLimiter::with(limit(5, 100), 1, 1_000_000);
        for now in 0..10_000 {
            limiter.take(RateKey::User(&now.to_string()), now).unwrap();
            assert!(held(&limiter) <= 201);
        }
        assert_eq!(limiter.forgotten(), 0);
    }

    #[test]
    fn with_too_many_the_quietest_begin_anew_and_are_counted() {
        let limiter = RateLimiter::with(limit(1, 1000), 1, 20);
        let user = |n: u32| n.to_string();
        for n in 0..15 {
            assert_eq!(limiter.take(RateKey::User(&user(n)), 0), Ok(()));
        }
        // One that asks stays, even in vain.
        assert_eq!(limiter.take(RateKey::User("0"), 1), Err(999));
        for n in 15..20 {
            assert_eq!(limiter.take(RateKey::User(&user(n)), 1), Ok(()));
        }
        assert_eq!(limiter.forgotten(), 9);
        assert_eq!(limiter.take(RateKey::User("0"), 2), Err(998));
        assert_eq!(limiter.take(RateKey::User("1"), 2), Ok(()));
        for n in 0..1000 {
            let _ = limiter.take(RateKey::User(&user(n)), 3);
            assert!(held(&limiter) <= 20);
        }
    }

    #[test]
    fn many_addresses_make_no_user_forgotten() {
        let limiter = RateLimiter::with(limit(1, 1000), 1, 20);
        assert_eq!(limiter.take(ANN, 0), Ok(()));
        for n in 0..1000_u32 {
            assert_eq!(limiter.take(RateKey::Address(Ipv4Addr::from(n).into()), 0), Ok(()));
        }
        assert_eq!(limiter.take(ANN, 1), Err(999));
        assert!(limiter.forgotten() > 900);
    }

    #[test]
    fn threads_share_a_budget() {
        let limiter = RateLimiter::new(limit(1000, 100));
        let taken: usize = thread::scope(|scope| {
            let work = || (0..500).filter(|_| limiter.take(ANN, 7).is_ok()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(taken, 1000);
    }

    proptest! {
        #[test]
        fn it_does_what_a_plain_log_does(
            max_requests in 0_usize..5,
            window in 0_u64..30,
            shards in 1_usize..3,
            asks in prop::collection::vec((0_u8..4, 0_u64..12), 0..200),
        ) {
            // Few, so that keys meet: what one asks must not make another one forgotten.
            let limiter = RateLimiter::with(limit(max_requests, window), shards, 100);
            let mut log: Vec<(u8, u64)> = Vec::new();
            let mut now = 0;
            for (who, later) in asks {
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
                prop_assert_eq!(limiter.take(key, now), expected);
            }
        }

        #[test]
        fn no_times_make_it_panic(times in prop::collection::vec(any::<u64>(), 0..50), window in any::<u64>()) {
            let limiter = RateLimiter::with(limit(2, window), 1, 2);
            for (n, now) in times.into_iter().enumerate() {
                let name = (n % 5).to_string();
                if let Err(wait) = limiter.take(RateKey::User(&name), now) {
                    prop_assert!(wait >= 1);
                }
            }
        }
    }
}
