//! Credential providers, for logins that change.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::Login;
use crate::sync::{Mutex, lock};

/// Provides the user and password for every attempt to connect: for passwords that are rotated and tokens that expire.
///
/// With a provider, a rejected login is retried with backoff, because the provider may return another one. It is called in a
/// separate task, within [`connect_timeout`](crate::Options::connect_timeout), and must not block. A provider that panics fails
/// the attempt.
///
/// A provider that [announces changes](Self::changes) also changes the login of open connections. [`RotatingLogin`] is a provider
/// whose login the program sets.
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

    /// Returns a receiver that changes when the login has changed. Called once for each client, when it is created.
    ///
    /// After a change the provider is asked for the login, and each open connection sends `AUTH`, between two requests. A login that
    /// the server refuses is logged and counted ([`ClientStats::logins`](crate::observe::ClientStats::logins)), and the connection
    /// keeps the one it has. If the provider fails, it is asked again, with the delays of attempts to connect.
    ///
    /// Default: `None`. Changes take effect with the next connection.
    fn changes(&self) -> Option<watch::Receiver<()>> {
        None
    }
}

/// The future returned by [`Credentials::login`].
pub type LoginFuture<'a> = Pin<Box<dyn Future<Output = Result<Login, LoginError>> + Send + 'a>>;

/// The error of a provider.
pub type LoginError = Arc<dyn std::error::Error + Send + Sync>;

impl<C: Credentials + ?Sized> Credentials for Arc<C> {
    fn login(&self) -> LoginFuture<'_> {
        (**self).login()
    }

    fn changes(&self) -> Option<watch::Receiver<()>> {
        (**self).changes()
    }
}

/// A provider whose login is set by the program. Clones share it.
///
/// ```
/// use tidewire_redis::credentials::RotatingLogin;
/// use tidewire_redis::{Client, Login, Options};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let redis = tidewire_testkit::RedisServer::options().user("app", "on >first >second ~* +@all").start();
/// # let options = Options::default().address(redis.addr());
/// let login = RotatingLogin::new(Login::new("first").user("app"));
/// let client = Client::connect(options.credentials(login.clone())).await?;
/// // The open connections of the client send `AUTH`.
/// login.set(Login::new("second").user("app"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RotatingLogin(Arc<Rotating>);

struct Rotating {
    login: Mutex<Login>,
    changed: watch::Sender<()>,
}

impl RotatingLogin {
    /// Creates a provider of this login.
    pub fn new(login: Login) -> Self {
        Self(Arc::new(Rotating { login: Mutex::new(login), changed: watch::Sender::new(()) }))
    }

    /// Replaces the login, and announces it to all clients that use the provider.
    pub fn set(&self, login: Login) {
        *lock(&self.0.login) = login;
        self.0.changed.send_replace(());
    }
}

impl Credentials for RotatingLogin {
    fn login(&self) -> LoginFuture<'_> {
        Box::pin(std::future::ready(Ok(lock(&self.0.login).clone())))
    }

    fn changes(&self) -> Option<watch::Receiver<()>> {
        Some(self.0.changed.subscribe())
    }
}

impl fmt::Debug for RotatingLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RotatingLogin").finish_non_exhaustive()
    }
}

/// Calls a provider in a separate task, which is aborted with this future. A provider that panics fails one call and does not end
/// the client.
pub(crate) async fn ask(provider: &Arc<dyn Credentials>) -> Result<Login, LoginError> {
    let mut task = JoinSet::new();
    let provider = Arc::clone(provider);
    task.spawn(async move { provider.login().await });
    match task.join_next().await {
        Some(Ok(login)) => login,
        Some(Err(panicked)) => Err(Arc::new(panicked)),
        None => Err(Arc::new(io::Error::from(io::ErrorKind::NotFound))),
    }
}

/// Shows nothing of the provider, which has secrets.
impl fmt::Debug for dyn Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}
