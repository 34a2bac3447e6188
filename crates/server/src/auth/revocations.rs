//! Revoked users, whose logins are rejected for some time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The revoked users, shared by all connections.
///
/// The number of entries is at most twice the number of users revoked within the time to live, plus [`MIN_THRESHOLD`]. No entry is removed
/// before it expires, because a revoked user could then log in again. Therefore clients may add at most [`Self::MAX_USERS`].
#[derive(Debug)]
pub(crate) struct Revocations {
    ttl_ms: u64,
    list: Mutex<RevocationList>,
}

#[derive(Debug, Default)]
struct RevocationList {
    /// The end of each revocation, in milliseconds since 1970.
    until: HashMap<Box<str>, u64>,
    /// Expired entries are removed when the list reaches this length.
    threshold: usize,
}

/// Minimum length of the list before expired entries are removed.
const MIN_THRESHOLD: usize = 64;

/// The limit of the users that clients may revoke is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyRevocations;

impl Revocations {
    /// Limit of the users that clients may add: far more than an administrator revokes within the time to live.
    pub(crate) const MAX_USERS: usize = 100_000;

    pub(crate) fn new(ttl: Duration) -> Self {
        Self { ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX), list: Mutex::default() }
    }

    /// Rejects logins of a user from `now` on for the time to live. A repeated revocation extends the time but never shortens it.
    pub(crate) fn revoke(&self, user_id: &str, now: u64) {
        self.lock().add(user_id, now.saturating_add(self.ttl_ms), now);
    }

    /// Like [`revoke`](Self::revoke), but limits the number of users. Returns the end of the revocation.
    pub(crate) fn revoke_for_client(&self, user_id: &str, now: u64) -> Result<u64, TooManyRevocations> {
        let mut list = self.lock();
        if list.until.len() >= Self::MAX_USERS && !list.until.contains_key(user_id) {
            list.remove_expired(now);
            if list.until.len() >= Self::MAX_USERS {
                return Err(TooManyRevocations);
            }
        }
        Ok(list.add(user_id, now.saturating_add(self.ttl_ms), now))
    }

    /// Adds a revocation that was stored before a restart.
    pub(crate) fn restore(&self, user_id: &str, until: u64, now: u64) {
        self.lock().add(user_id, until, now);
    }

    /// Returns whether the time to live is greater than zero.
    pub(crate) fn has_ttl(&self) -> bool {
        self.ttl_ms > 0
    }

    pub(crate) fn is_revoked(&self, user_id: &str, now: u64) -> bool {
        self.lock().until.get(user_id).is_some_and(|until| *until > now)
    }

    fn lock(&self) -> MutexGuard<'_, RevocationList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RevocationList {
    /// Adds or extends a revocation. Returns its end.
    fn add(&mut self, user_id: &str, until: u64, now: u64) -> u64 {
        // Only when the list has doubled, so that the amortized cost per entry is constant.
        if self.until.len() >= self.threshold.max(MIN_THRESHOLD) {
            self.remove_expired(now);
        }
        let entry = self.until.entry(user_id.into()).or_default();
        *entry = (*entry).max(until);
        *entry
    }

    fn remove_expired(&mut self, now: u64) {
        self.until.retain(|_, until| *until > now);
        self.until.shrink_to(MIN_THRESHOLD);
        self.threshold = self.until.len() * 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revocations() -> Revocations {
        Revocations::new(Duration::from_secs(1))
    }

    #[test]
    fn revocation_ends_after_its_time_to_live() {
        let revocations = revocations();
        revocations.revoke("ann", 100);
        assert!(revocations.is_revoked("ann", 100) && revocations.is_revoked("ann", 1099));
        assert!(!revocations.is_revoked("ann", 1100) && !revocations.is_revoked("bob", 100));
    }

    #[test]
    fn repeated_revocation_extends_and_never_shortens() {
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
            let unexpired = user.saturating_sub(99)..=user;
            assert!(unexpired.into_iter().all(|user| revocations.is_revoked(&user.to_string(), now)), "{user}");
        }
        let many = Revocations::new(Duration::from_secs(1));
        (0..1000).for_each(|user| many.revoke(&user.to_string(), 0));
        assert!((0..1000).all(|user| many.is_revoked(&user.to_string(), 999)));
    }

    #[test]
    fn clients_may_revoke_a_limited_number_of_users() {
        let revocations = revocations();
        (0..Revocations::MAX_USERS).for_each(|user| revocations.restore(&user.to_string(), 500, 0));
        assert_eq!(revocations.revoke_for_client("ann", 499), Err(TooManyRevocations));
        assert_eq!(revocations.revoke_for_client("7", 499), Ok(1499), "a listed user is extended");
        revocations.revoke("bob", 499);
        assert!(revocations.is_revoked("bob", 499) && !revocations.is_revoked("ann", 499));
        assert_eq!(revocations.revoke_for_client("ann", 500), Ok(1500), "the others have expired");
        assert_eq!(revocations.lock().until.len(), 3);
    }

    #[test]
    fn maximum_time_to_live_does_not_overflow() {
        let revocations = Revocations::new(Duration::MAX);
        revocations.revoke("ann", 5);
        assert!(revocations.is_revoked("ann", u64::MAX - 1));
    }
}
