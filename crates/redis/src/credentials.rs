//! Credential providers, for logins that change.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use crate::Login;

/// Says who logs in, anew for every attempt to connect: for passwords that are rotated, and tokens that end.
///
/// With one a refused login is tried again after a pause, because the next one may be another. It is asked on a task of its own, and
/// its time is a part of [`connect_timeout`](crate::Options::connect_timeout), after which it is asked anew: it must not block. One
/// that panics has failed.
///
/// ```
/// use std::sync::Arc;
/// use tidewire_redis::{Credentials, Login, LoginError, LoginFuture, Options};
///
/// struct Environment;
///
/// impl Credentials for Environment {
///     fn login(&self) -> LoginFuture<'_> {
///         Box::pin(async {
///             let password = std::env::var("REDIS_PASSWORD").map_err(|error| Arc::new(error) as LoginError)?;
///             Ok(Login { user: None, password })
///         })
///     }
/// }
///
/// let mut options = Options::default();
/// options.credentials = Some(Arc::new(Environment));
/// ```
pub trait Credentials: Send + Sync {
    /// Who logs in now. A failure is a failed attempt, and is its source.
    fn login(&self) -> LoginFuture<'_>;
}

/// What [`Credentials::login`] returns.
pub type LoginFuture<'a> = Pin<Box<dyn Future<Output = Result<Login, LoginError>> + Send + 'a>>;

/// Why [`Credentials`] have nothing to say.
pub type LoginError = Arc<dyn std::error::Error + Send + Sync>;

/// Without a word: whatever is in there is secret.
impl fmt::Debug for dyn Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}
