//! Logins that change while connections are open.
//!
//! When the provider announces a change, one task of the client asks it for the login and publishes it. Each connection follows: it
//! queues `AUTH` as a request of its own, so that it comes between two submissions and never inside a pipeline or transaction. At most
//! one `AUTH` of a connection is in flight, and it is followed by the newest login only, so a connection that is blocked for long
//! gathers none. It needs no permit and has no deadline, because a blocking command may delay its reply.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::connection::{ConnectionShared, after};
use crate::credentials::{self, Credentials};
use crate::observe::LoginStats;
use crate::sync::{Mutex, lock};
use crate::{ConnectionState, Error, Login, Options, ServerError};

/// The newest login, for the connections of one client.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    /// `None` until the first change.
    newest: watch::Receiver<Option<Login>>,
    stats: Arc<Mutex<LoginStats>>,
}

/// Asks the provider after each change, and publishes the login.
pub(crate) struct LoginPublisher {
    provider: Arc<dyn Credentials>,
    changes: watch::Receiver<()>,
    newest: watch::Sender<Option<Login>>,
    stats: Arc<Mutex<LoginStats>>,
    options: Options,
}

impl LoginPublisher {
    /// Sets the rotation of a new client. Returns `None` if its provider announces no changes.
    pub(crate) fn of(options: &mut Options) -> Option<Self> {
        options.rotation = None;
        let provider = Arc::clone(options.credentials.as_ref()?);
        let changes = provider.changes()?;
        let newest = watch::Sender::new(None);
        let stats = Arc::default();
        options.rotation = Some(Rotation { newest: newest.subscribe(), stats: Arc::clone(&stats) });
        Some(Self { provider, changes, newest, stats, options: options.clone() })
    }

    /// Runs until the provider drops its sender.
    pub(crate) async fn run(mut self) {
        while self.changes.changed().await.is_ok() {
            let mut delay = self.options.min_backoff;
            loop {
                // Before the provider is asked, so that a later change is not missed.
                self.changes.mark_unchanged();
                match timeout(self.options.connect_timeout, credentials::ask(&self.provider)).await {
                    Ok(Ok(login)) => {
                        self.newest.send_replace(Some(login));
                        break;
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(error = &*error as &dyn std::error::Error, "the credential provider failed");
                    }
                    Err(_) => tracing::warn!("the credential provider did not return within `connect_timeout`"),
                }
                lock(&self.stats).provider_failures += 1;
                tokio::select! {
                    () = sleep(delay.mul_f64(fastrand::f64().mul_add(0.5, 0.5))) => {}
                    Ok(()) = self.changes.changed() => {}
                }
                delay = delay.saturating_mul(2).min(self.options.max_backoff);
            }
        }
    }
}

impl Rotation {
    /// Ignores earlier changes. Called before the provider is asked for the login of the first attempt.
    pub(crate) fn start(&mut self) {
        self.newest.mark_unchanged();
    }

    /// Sends `AUTH` with each new login, once the connection is open.
    pub(crate) async fn follow(mut self, connection: &ConnectionShared) -> Infallible {
        let mut status = connection.status.subscribe();
        loop {
            if self.newest.changed().await.is_err() {
                return pending().await;
            }
            loop {
                // Cannot fail, because `connection` owns the sender.
                let _ = status.wait_for(|status| status.state == ConnectionState::Open).await;
                let Some(login) = self.newest.borrow_and_update().clone() else { break };
                connection.login_changes.fetch_add(1, Relaxed);
                let replied = connection.call_own(&login.auth(), after(Duration::MAX)).await;
                connection.login_changes.fetch_add(1, Relaxed);
                match replied.map(|reply| reply.as_error().map(|text| ServerError::parse(text))) {
                    Ok(error) => {
                        self.count_reply(error.as_ref());
                        break;
                    }
                    Err(Error::Closed { .. }) => return pending().await,
                    // The connection was lost. The next one may have asked the provider before the change.
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        }
    }

    /// Waits for the next login, without end if there is no rotation. It is cancellation safe.
    pub(crate) async fn next(rotation: Option<&mut Self>) -> Login {
        let Some(Self { newest, .. }) = rotation else { return pending().await };
        while newest.changed().await.is_ok() {
            if let Some(login) = newest.borrow_and_update().clone() {
                return login;
            }
        }
        pending().await
    }

    /// Counts the reply to an `AUTH`.
    pub(crate) fn count_reply(&self, error: Option<&ServerError>) {
        if let Some(error) = error {
            lock(&self.stats).refused += 1;
            tracing::warn!(%error, "the server refused the changed login, and the connection keeps the previous one");
        } else {
            lock(&self.stats).changed += 1;
        }
    }

    pub(crate) fn stats(&self) -> LoginStats {
        *lock(&self.stats)
    }
}
