//! Whose token it is.

use std::pin::Pin;

use super::Session;

/// What a validator says, when it has found out.
pub type Validation<'a> = Pin<Box<dyn Future<Output = Result<Option<Session>, ValidatorFailed>> + Send + 'a>>;

/// Knows whose token it is.
pub trait TokenValidator: Send + Sync + 'static {
    /// Who has this token; nobody if it is unknown, forged or over. `now` is in milliseconds since 1970.
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a>;
}

/// A validator could not find out, and is at fault itself.
#[derive(Debug, thiserror::Error)]
#[error("whose token it is could not be found out")]
pub struct ValidatorFailed(#[source] pub Box<dyn std::error::Error + Send + Sync>);
