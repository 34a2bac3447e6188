//! The interface of token validation.

use std::pin::Pin;
use std::sync::Arc;

use super::Session;

/// The future result of [`TokenValidator::validate`].
pub type Validation<'a> = Pin<Box<dyn Future<Output = Result<Option<Session>, ValidatorFailed>> + Send + 'a>>;

/// Validates the tokens of logins.
pub trait TokenValidator: Send + Sync + 'static {
    /// Returns the session of a token, or `None` if the token is unknown, forged or expired. `now` is in milliseconds since 1970.
    ///
    /// # Errors
    ///
    /// Returns [`ValidatorFailed`] if the validator itself failed, for example because its database is unreachable.
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a>;

    /// Returns whether a session from a previous validator remains valid after a [reload](crate::Server::reload). This is also called
    /// for the sessions of in-process clients. The default implementation returns true.
    fn still_accepts(&self, session: &Session) -> bool {
        let _ = session;
        true
    }
}

impl<V: TokenValidator + ?Sized> TokenValidator for Arc<V> {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        (**self).validate(token, now)
    }

    fn still_accepts(&self, session: &Session) -> bool {
        (**self).still_accepts(session)
    }
}

/// The validator failed, so the validity of the token is unknown.
#[derive(Debug, thiserror::Error)]
#[error("the token validator failed")]
pub struct ValidatorFailed(#[source] pub Box<dyn std::error::Error + Send + Sync>);
