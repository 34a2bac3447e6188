//! Credential providers, for logins that change.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use crate::Login;

/// Provides the user and password for every attempt to connect: for passwords that are rotated and tokens that expire.
///
/// With a provider, a rejected login is retried with backoff, because the provider may return another one. It is called in a
/// separate task, within [`connect_timeout`](crate::Options::connect_timeout), and must not block. A provider that panics fails
/// the attempt.
///
/// ```
/// use std::sync::Arc;
/// use tidewire_redis::credentials::{Credentials, LoginError, LoginFuture};
/// use tidewire_redis::{Login, Options};
///
/// struct Environment;
///
/// impl Credentials for Environment {
///     fn login(&self) -> LoginFuture<'_> {
///         Box::pin(async {
///             let password = std::env::var("REDIS_PASSWORD").map_err(|error| Arc::new(error) as LoginError)?;
///             Ok(Login::new(password))
///         })
///     }
/// }
///
/// let options = Options::default().credentials(Environment);
/// ```
pub trait Credentials: Send + Sync {
    /// Returns the login for the next attempt. An error fails this attempt, as
    /// [`ConnectionError::Credentials`](crate::ConnectionError::Credentials).
    fn login(&self) -> LoginFuture<'_>;
}

/// The future returned by [`Credentials::login`].
pub type LoginFuture<'a> = Pin<Box<dyn Future<Output = Result<Login, LoginError>> + Send + 'a>>;

/// The error of a provider.
pub type LoginError = Arc<dyn std::error::Error + Send + Sync>;

impl<C: Credentials + ?Sized> Credentials for Arc<C> {
    fn login(&self) -> LoginFuture<'_> {
        (**self).login()
    }
}

/// Shows nothing of the provider, which has secrets.
impl fmt::Debug for dyn Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}
