//! The handle of a client.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::cache::Cache;
use crate::connection::{ConnectionShared, ConnectionState, PipelineReplies, after, later};
use crate::convert::Ignore;
use crate::driver::Connection;
use crate::exclusive::{ExclusiveSet, blocking};
use crate::health::Health;
use crate::observe::ClientStats;
use crate::pubsub::PubSub;
use crate::request::read_reply;
use crate::resp::encode_command;
use crate::rotation::{LoginPublisher, Rotation};
use crate::sharing::Route;
use crate::sync::{Mutex, lock};
use crate::tasks::Tasks;
use crate::{ConnectionError, Error, FromValue, Invocation, Options, Pipeline, ReplyTypes, Request, States, Status};

/// A handle to the connection to one server. Clones share the connection, and dropping the last one closes it.
///
/// Any number of tasks can use it at the same time. Requests are written in the order of their submission, except for those that have an
/// [exclusive connection](crate::sharing#blocking-commands).
#[derive(Debug)]
pub struct Client {
    pub(crate) shared: Arc<ClientShared>,
    /// The timeout of requests made with this handle.
    pub(crate) timeout: Duration,
}

/// What the handles of a client share with its driver.
pub(crate) struct ClientShared {
    /// The connection that all tasks share.
    pub(crate) connection: Arc<ConnectionShared>,
    pub(crate) exclusive: ExclusiveSet,
    pub(crate) pubsub: PubSub,
    pub(crate) health: Health,
    pub(crate) tasks: Tasks,
    /// The generation and the number of login changes of the shared connection on which the user may use `MULTI` and `EXEC`.
    may_use_multi: Mutex<Option<(u64, u64)>>,
    /// The number of handles. The last one closes the client.
    handles: AtomicUsize,
}

impl Client {
    /// Creates a client and the driver of its connection, which must be [run](Connection::run).
    ///
    /// Nothing is sent, and no deadline is kept, until the connection runs: requests and [`close`](Self::close) wait.
    pub fn new(options: Options) -> (Self, Connection) {
        Self::with_health_checks(options, None)
    }

    /// Creates a client whose connection is checked at this interval, and its driver.
    pub(crate) fn with_health_checks(mut options: Options, interval: Option<Duration>) -> (Self, Connection) {
        let publisher = LoginPublisher::of(&mut options);
        // The options may be a copy of those of another client.
        #[cfg(feature = "tls")]
        let options = Options { shared_tls: crate::tls::SharedTls::default(), ..options };
        let timeout = options.timeout;
        let (tasks, runner) = Tasks::new();
        let cache = options.cache.as_ref().map(|options| Cache::new(options, tasks.clone()));
        let shared = Arc::new(ClientShared {
            exclusive: ExclusiveSet::new(&options),
            pubsub: PubSub::default(),
            connection: Arc::new(ConnectionShared::shared(options).with_cache(cache)),
            health: Health::default(),
            tasks,
            may_use_multi: Mutex::default(),
            handles: AtomicUsize::new(1),
        });
        (Self { shared: Arc::clone(&shared), timeout }, Connection::new(shared, runner, publisher, interval))
    }

    /// Creates a client whose connection runs on a new task of the current tokio runtime, and waits for the first attempt to
    /// connect.
    ///
    /// The client can be used on other runtimes as well, as long as this one runs; when this one shuts down, the client is closed.
    /// Dropping the future closes the client.
    ///
    /// # Errors
    ///
    /// Why the attempt failed. The client is closed then: use [`start`](Self::start) if the server may be down.
    pub async fn connect(options: Options) -> Result<Self, ConnectionError> {
        let client = Self::start(options);
        client.first_attempt().await?;
        Ok(client)
    }

    /// Waits for the first attempt to connect, and returns why it failed.
    pub(crate) async fn first_attempt(&self) -> Result<(), ConnectionError> {
        self.shared.connection.attempted().await;
        let status = self.status().borrow().clone();
        match status.last_error {
            Some(error) if status.state != ConnectionState::Open => Err((*error).clone()),
            _ => Ok(()),
        }
    }

    /// Creates a client whose connection runs on a new task of the current tokio runtime.
    ///
    /// It connects in the background: the first requests wait for the connection. The client can be used on other runtimes as
    /// well, as long as this one runs; when this one shuts down, the client is closed.
    ///
    /// # Panics
    ///
    /// If it is called outside of a tokio runtime.
    pub fn start(options: Options) -> Self {
        let (client, connection) = Self::new(options);
        tokio::spawn(connection.run());
        client
    }

    /// Returns a handle to the same connection whose requests have this timeout, from their submission.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let mut client = self.clone();
        client.timeout = timeout;
        client
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.connection.options
    }

    /// Sends a request and returns its reply, converted to `T`.
    ///
    /// Functions in [`commands`](crate::commands) choose a type; [`returning`](Request::returning) chooses another. A
    /// [`Command`](crate::Command) takes the type that the result is assigned to.
    ///
    /// A [blocking command](crate::sharing#blocking-commands) is sent over an exclusive connection, so that it delays no other task.
    ///
    /// # Errors
    ///
    /// [`Error::outcome`] says whether the server may have executed the command.
    ///
    /// # Cancellation
    ///
    /// Dropping the future does not affect other requests. A request that is not written yet may still be sent; its reply is then
    /// dropped. A blocking command is unblocked; see [`Options::unclaimed_hook`] for an element that it has already popped.
    pub async fn send<T: FromValue>(&self, request: impl Into<Request<T>>) -> Result<T, Error> {
        let command = request.into().into_command();
        let reply = match command.route()? {
            Route::Shared => self.shared.connection.call(command.as_bytes(), self.timeout).await,
            // Boxed, so that the future of other requests stays small.
            Route::Exclusive(block) => Box::pin(blocking::call(self, &command, block)).await,
        };
        read_reply(reply?)
    }

    /// Sends the commands of a pipeline together and returns a result for each.
    ///
    /// No request of this client comes between them, but requests of other clients may: it is not a transaction. An error of one
    /// command does not affect the others. If the connection is lost, the commands without a reply have the error.
    ///
    /// A pipeline that ends with `WAIT` or `WAITAOF` is sent over an exclusive connection, because these wait for the writes of their own
    /// connection.
    ///
    /// # Errors
    ///
    /// If a command cannot be sent. Then none is.
    pub async fn pipeline<S: ReplyTypes>(&self, pipeline: Pipeline<S>) -> Result<S::Results, Error> {
        pipeline.check()?;
        let Some(block) = pipeline.final_wait() else {
            return Ok(pipeline.execute(&self.shared.connection, self.timeout).await);
        };
        // Boxed, so that the future of other pipelines stays small.
        Box::pin(async {
            let begin = Instant::now();
            match self.shared.exclusive.lease(&self.shared, later(begin, self.timeout)).await {
                Ok(lease) => {
                    let timeout = block.saturating_add(self.timeout).saturating_sub(begin.elapsed());
                    Ok(pipeline.execute(lease.connection(), timeout).await)
                }
                Err(error) => Ok(pipeline.read(Err(error))),
            }
        })
        .await
    }

    /// Runs a script by its digest, and sends its source if the server does not have it. Both have one deadline.
    pub async fn invoke<T: FromValue>(&self, invocation: &Invocation<T>) -> Result<T, Error> {
        let deadline = after(self.timeout);
        match self.send(invocation.by_digest().returning::<T>()).await {
            Err(error) => match invocation.fallback(&error) {
                Some(command) => {
                    let rest = self.with_timeout(deadline.saturating_duration_since(Instant::now()));
                    rest.send(command.returning::<T>()).await
                }
                None => Err(error),
            },
            done => done,
        }
    }

    /// Returns a receiver of the newest status of the shared connection.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.shared.connection.status.subscribe()
    }

    /// Returns a stream of all states of the shared connection, starting with the current one.
    pub fn states(&self) -> States {
        self.shared.connection.status.states()
    }

    /// Returns the statistics of the client.
    pub fn stats(&self) -> ClientStats {
        ClientStats {
            exclusive: self.shared.exclusive.stats(),
            logins: self.options().rotation.as_ref().map(Rotation::stats).unwrap_or_default(),
            pubsub: self.shared.pubsub.stats(),
            ..self.shared.connection.stats()
        }
    }

    /// Closes the client: rejects new requests, waits for the replies to those in flight, and closes all its connections.
    ///
    /// Blocking commands are ended at once, with [`Error::Closed`] unless they have popped an element. After `grace`, all requests
    /// still in flight end with [`Error::Closed`]. Attempts to connect are interrupted. If the client is closed several times, the
    /// shortest time counts.
    pub async fn close(&self, grace: Duration) {
        self.shared.close(after(grace));
        let mut status = self.status();
        // Cannot fail, because `shared` owns the sender.
        let _ = status.wait_for(|status| status.state == ConnectionState::Closed).await;
    }
}

impl ClientShared {
    /// Closes all connections. Each must have ended by this deadline, or by an earlier one that was set before.
    pub(crate) fn close(&self, deadline: Instant) {
        self.pubsub.close();
        self.exclusive.close(deadline);
        self.connection.queue.close(deadline);
        // After the queue has closed, so that no load begins that would be kept.
        if let Some(cache) = &self.connection.cache {
            cache.flush();
        }
    }

    /// Checks once for each shared connection, and after each change of its login, that the user may use `MULTI` and `EXEC`.
    pub(crate) async fn check_multi(&self, timeout: Duration) -> Result<(), Error> {
        // The first connection has generation 1.
        let version = || {
            let logins = self.connection.login_changes.load(Relaxed);
            (self.connection.status.generation().max(1), logins)
        };
        let begin = version();
        if *lock(&self.may_use_multi) == Some(begin) && self.connection.is_connected() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        encode_command(&["MULTI"], &mut bytes);
        encode_command(&["EXEC"], &mut bytes);
        let PipelineReplies { values, error } = self.connection.call_all(&bytes, 2, timeout).await?;
        error.map_or(Ok(()), Err)?;
        for reply in values {
            read_reply::<Ignore>(reply)?;
        }
        // Unless it may have been another connection or login that was checked.
        if version() == begin {
            *lock(&self.may_use_multi) = Some(begin);
        }
        Ok(())
    }
}

impl fmt::Debug for ClientShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientShared").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Clone for Client {
    fn clone(&self) -> Self {
        self.shared.handles.fetch_add(1, SeqCst);
        Self { shared: Arc::clone(&self.shared), timeout: self.timeout }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.shared.handles.fetch_sub(1, SeqCst) == 1 {
            self.shared.close(after(self.options().timeout));
        }
    }
}
