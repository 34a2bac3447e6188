//! The actor of the pub/sub connection: it connects, restores the subscriptions, and reconnects.
//!
//! It runs while there are subscriptions. The decision to end is made in the critical section in which a new subscription would
//! find out that it has to start another actor, so exactly one runs.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, Waker};

use tokio::time::{Instant, sleep, timeout};

use super::PubSub;
use super::registry::Registry;
use super::serving::{Serving, ServingEnd};
use crate::client::ClientShared;
use crate::connection::transport::{self, ConnectError};
use crate::sync::lock;
use crate::{ConnectionError, Options};

/// The actor. Dropping it before it has ended closes the registry.
pub(super) struct Actor {
    client: Arc<ClientShared>,
    has_ended: bool,
}

enum AttemptEnd {
    /// The client was closed.
    Closed,
    /// There are no subscriptions any more.
    Unused,
    /// Another attempt may succeed.
    Failed(ConnectionError),
    /// Another attempt would fail in the same way.
    Refused(ConnectionError),
}

impl Actor {
    pub(super) fn new(client: Arc<ClientShared>) -> Self {
        Self { client, has_ended: false }
    }

    pub(super) async fn run(mut self) {
        self.run_until_unused().await;
        self.has_ended = true;
    }

    async fn run_until_unused(&self) {
        while self.pubsub().update(Registry::begin_attempt) {
            let (failure, is_final) = match self.connect_and_serve().await {
                AttemptEnd::Closed => return self.pubsub().update(Registry::closed),
                AttemptEnd::Unused => return,
                AttemptEnd::Failed(failure) => (failure, !self.options().reconnect),
                AttemptEnd::Refused(failure) => (failure, true),
            };
            self.log(&failure, is_final);
            let while_down = self.options().while_down;
            self.pubsub().update(|registry| registry.lost(&failure, is_final, while_down));
            if is_final {
                return;
            }
            let delay = self.pubsub().update(|registry| registry.backoff.next_delay(self.options()));
            if self.unless_closed(sleep(delay)).await.is_none() {
                return;
            }
        }
    }

    async fn connect_and_serve(&self) -> AttemptEnd {
        self.pubsub().counters.connect_attempts.fetch_add(1, Relaxed);
        let options = self.options();
        let mut rotation = options.rotation.clone();
        if let Some(rotation) = &mut rotation {
            rotation.start();
        }
        let established = match self.unless_closed(timeout(options.connect_timeout, transport::connect(options))).await
        {
            None => return AttemptEnd::Closed,
            Some(Ok(Ok(established))) => established,
            Some(Ok(Err(ConnectError::Failed(error)))) => return AttemptEnd::Failed(error),
            Some(Ok(Err(ConnectError::Refused(error)))) => return AttemptEnd::Refused(error),
            Some(Err(_)) => return AttemptEnd::Failed(ConnectionError::ConnectTimedOut),
        };
        let since = Instant::now();
        self.pubsub().update(Registry::connected);
        let end = Serving::new(established, &self.client).run(rotation).await;
        self.pubsub().update(|registry| registry.backoff.record_open(since.elapsed(), options));
        match end {
            ServingEnd::Closed => AttemptEnd::Closed,
            ServingEnd::Unused => AttemptEnd::Unused,
            ServingEnd::Lost(error) => {
                self.pubsub().counters.connections_lost.fetch_add(1, Relaxed);
                AttemptEnd::Failed(error)
            }
        }
    }

    /// Waits for `work` while there is no connection. Returns `None` as soon as the client is closed.
    async fn unless_closed<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|context| {
            if self.pubsub().watch(context.waker()) {
                return Poll::Ready(None);
            }
            work.as_mut().poll(context).map(Some)
        })
        .await
    }

    fn log(&self, failure: &ConnectionError, is_final: bool) {
        let (address, error) = (&self.options().address, failure as &dyn std::error::Error);
        if is_final {
            tracing::warn!(?address, error, "pub/sub connection to Redis failed, subscriptions ended");
        } else {
            tracing::debug!(?address, error, "pub/sub connection to Redis failed");
        }
    }

    fn pubsub(&self) -> &PubSub {
        &self.client.pubsub
    }

    fn options(&self) -> &Options {
        &self.client.connection.options
    }
}

impl PubSub {
    /// Wakes this task at the next change. Returns whether the client is closed.
    pub(super) fn watch(&self, waker: &Waker) -> bool {
        let waker = waker.clone();
        let (old, is_closed) = {
            let mut registry = lock(&self.registry);
            (registry.set_waker(waker), registry.is_closed())
        };
        drop(old);
        is_closed
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        if !self.has_ended {
            self.client.pubsub.close();
            self.client.pubsub.update(Registry::closed);
        }
    }
}
