//! Users who may not log in for a while.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Users who may not log in for a while. All connections share it.
///
/// It holds at most twice as many as were revoked in the last `ttl` (and a few): none is ever forgotten early, because that would
/// let somebody in again.
#[derive(Debug)]
pub(crate) struct Revocations {
    ttl: u64,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    /// Until when each may not.
    until: HashMap<Box<str>, u64>,
    /// With so many, those whose time is over are taken out.
    full: usize,
}

/// A list that is shorter is not worth the work.
const LEAST_FULL: usize = 64;

impl Revocations {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { ttl: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX), list: Mutex::default() }
    }

    /// From now on this user may not log in. A second time prolongs it, and never shortens it.
    pub(crate) fn revoke(&self, user_id: &str, now: u64) {
        let mut list = self.lock();
        // Only when it has doubled, so that each entry is looked at twice or so in its life.
        if list.until.len() >= list.full.max(LEAST_FULL) {
            list.until.retain(|_, until| *until > now);
            list.until.shrink_to(LEAST_FULL);
            list.full = list.until.len() * 2;
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
    fn a_revocation_holds_for_its_time() {
        let revocations = revocations();
        revocations.revoke("ann", 100);
        assert!(revocations.is_revoked("ann", 100) && revocations.is_revoked("ann", 1099));
        assert!(!revocations.is_revoked("ann", 1100) && !revocations.is_revoked("bob", 100));
    }

    #[test]
    fn a_second_one_prolongs_and_never_shortens() {
        let revocations = revocations();
        revocations.revoke("ann", 100);
        revocations.revoke("ann", 600);
        // The clock was set back.
        revocations.revoke("ann", 0);
        assert!(revocations.is_revoked("ann", 1599) && !revocations.is_revoked("ann", 1600));
    }

    #[test]
    fn what_is_over_is_forgotten_and_nothing_else() {
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
    fn for_ever_is_for_ever() {
        let revocations = Revocations::new(Duration::MAX);
        revocations.revoke("ann", 5);
        assert!(revocations.is_revoked("ann", u64::MAX - 1));
    }
}
