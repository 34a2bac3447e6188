//! A validator that can be replaced while the server is running.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::{Session, TokenValidator, Validation};

/// Delegates to a validator that can be replaced.
pub(crate) struct ReloadableValidator {
    current: RwLock<Arc<dyn TokenValidator>>,
}

impl ReloadableValidator {
    pub(crate) fn new(validator: Arc<dyn TokenValidator>) -> Self {
        Self { current: RwLock::new(validator) }
    }

    /// Replaces the validator for all later logins.
    pub(crate) fn replace(&self, validator: Arc<dyn TokenValidator>) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let previous = std::mem::replace(&mut *current, validator);
        // Its `drop` may be code of the embedding program, so it must not run under the lock.
        drop(current);
        drop(previous);
    }

    fn current(&self) -> Arc<dyn TokenValidator> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl TokenValidator for ReloadableValidator {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        let current = self.current();
        Box::pin(async move { current.validate(token, now).await })
    }

    fn still_accepts(&self, session: &Session) -> bool {
        self.current().still_accepts(session)
    }
}

impl fmt::Debug for ReloadableValidator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReloadableValidator").finish_non_exhaustive()
    }
}
