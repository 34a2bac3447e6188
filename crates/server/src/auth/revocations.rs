//! Revoked users, who are barred from logging in for some time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The revoked users, shared by all connections.
///
/// Holds at most twice as many entries as users were revoked in the last `ttl`, plus [`MIN_THRESHOLD`]. No entry is dropped before
/// it expires, because that would let a revoked user in again.
#[derive(Debug)]
pub(crate) struct Revocations {
    ttl: u64,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    /// The end of each revocation, in milliseconds since 1970.
    until: HashMap<Box<str>, u64>,
    /// Expired entries are removed when the list reaches this length.
    threshold: usize,
}

/// Shorter lists are not searched for expired entries.
const MIN_THRESHOLD: usize = 64;

impl Revocations {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { ttl: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX), list: Mutex::default() }
    }

    /// Bars a user from logging in for the time to live from `now` on. Repeating it extends the time and never shortens it.
    pub(crate) fn revoke(&self, user_id: &str, now: u64) {
        let mut list = self.lock();
        // Only when the list has doubled, so that the amortized cost of an entry is constant.
        if list.until.len() >= list.threshold.max(MIN_THRESHOLD) {
            list.until.retain(|_, until| *until > now);
            list.until.shrink_to(MIN_THRESHOLD);
            list.threshold = list.until.len() * 2;
        }
        let until = list.until.entry(user_id.into()).or_default();
        *until = (*until).max(now.saturating_add(self.ttl));
    }

    pub(crate) fn is_revoked(&self, user_id: &str, now: u64) -> bool {
        self.lock().until.get(user_id).is_some_and(|until| *until > now)
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revocations() -> Revocations {
        Revocations::new(Duration::from_secs(1))
    }

    #[test]
    fn a_revocation_ends_after_its_time_to_live() {
        let revocations = revocations();
        revocations.revoke("ann", 100);
        assert!(revocations.is_revoked("ann", 100) && revocations.is_revoked("ann", 1099));
        assert!(!revocations.is_revoked("ann", 1100) && !revocations.is_revoked("bob", 100));
    }

    #[test]
    fn repeating_a_revocation_extends_and_never_shortens_it() {
        let revocations = revocations();
        revocations.revoke("ann", 100);
        revocations.revoke("ann", 600);
        // The clock was set back.
        revocations.revoke("ann", 0);
        assert!(revocations.is_revoked("ann", 1599) && !revocations.is_revoked("ann", 1600));
    }

    #[test]
    fn only_expired_entries_are_removed() {
        let revocations = revocations();
        for user in 0..2000_u64 {
            let now = user * 10;
            revocations.revoke(&user.to_string(), now);
            let held = revocations.lock().until.len();
            assert!(held <= 200, "{held}");
            let not_over = user.saturating_sub(99)..=user;
            assert!(not_over.into_iter().all(|user| revocations.is_revoked(&user.to_string(), now)), "{user}");
        }
        let many = Revocations::new(Duration::from_secs(1));
        (0..1000).for_each(|user| many.revoke(&user.to_string(), 0));
        assert!((0..1000).all(|user| many.is_revoked(&user.to_string(), 999)));
    }

    #[test]
    fn the_longest_time_to_live_does_not_overflow() {
        let revocations = Revocations::new(Duration::MAX);
        revocations.revoke("ann", 5);
        assert!(revocations.is_revoked("ann", u64::MAX - 1));
    }
}
