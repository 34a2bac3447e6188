//! Optimistic concurrency: a transaction that is executed only if the keys that it depends on have not changed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::client::Client;
use crate::command::{Command, ToArgument};
use crate::connection::after;
use crate::convert::{FromValue, Ignore};
use crate::exclusive::Lease;
use crate::pipeline::{Pipeline, ReplyTypes};
use crate::request::{Request, read_reply};
use crate::{Error, Transaction, TransactionError};

/// The longest delay before the second attempt. It doubles with each further attempt.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(1);
/// The longest delay before any attempt.
const MAX_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Options of [`Client::watch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WatchOptions {
    /// How often the transaction is attempted. Zero counts as one. Default: 10, enough unless many clients change the same keys.
    pub max_attempts: u32,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self { max_attempts: 10 }
    }
}

impl WatchOptions {
    /// Sets [`max_attempts`](#structfield.max_attempts).
    #[must_use]
    pub fn max_attempts(mut self, max_attempts: u32) -> Self {
        self.max_attempts = max_attempts;
        self
    }
}

/// An exclusive connection with watched keys, for reading them. Made by [`Client::watch`].
///
/// Clones share the connection. It is kept until the last one is dropped.
#[derive(Debug, Clone)]
pub struct WatchedConnection {
    lease: Arc<Lease>,
    timeout: Duration,
}

impl Client {
    /// Watches keys, calls `body`, which reads them and returns a transaction, and executes it if the keys have not changed. If one has,
    /// all of it is repeated after a short random delay.
    ///
    /// It uses an exclusive connection. Read with the [`WatchedConnection`], so that the reads come after `WATCH`.
    ///
    /// ```
    /// use tidewire_redis::{Client, Options, Transaction, TransactionError, WatchOptions, commands};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let redis = tidewire_testkit::RedisServer::start();
    /// # let client = Client::start(Options::default().address(redis.addr()));
    /// client.set("tide", "low").await?;
    /// // Appends to the value, unless another client changes it meanwhile.
    /// let (set,) = client
    ///     .watch(["tide"], WatchOptions::default(), |watched| async move {
    ///         let tide: String = watched.send(commands::get("tide").returning()).await?;
    ///         Ok::<_, TransactionError>(Transaction::new().then(commands::set("tide", format!("{tide} water"))))
    ///     })
    ///     .await?;
    /// set?;
    /// assert_eq!(client.get::<String>("tide").await?, "low water");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The error of `body`, after which the transaction is not sent, or [`TransactionError::Changed`] after the last attempt.
    ///
    /// # Cancellation
    ///
    /// Dropping the future closes the exclusive connection. The transaction may have been executed.
    pub async fn watch<S, E, F>(
        &self,
        keys: impl IntoIterator<Item: ToArgument>,
        options: WatchOptions,
        mut body: impl FnMut(WatchedConnection) -> F,
    ) -> Result<S::Results, E>
    where
        S: ReplyTypes,
        E: From<TransactionError>,
        F: Future<Output = Result<Transaction<S>, E>>,
    {
        let watch = Command::new("WATCH").args(keys);
        let watched = WatchedConnection::open(self).await?;
        let mut attempt = 1;
        loop {
            watched.watch(&watch).await?;
            let transaction = match body(watched.clone()).await {
                Ok(transaction) => transaction,
                Err(error) => {
                    watched.unwatch().await;
                    return Err(error);
                }
            };
            match watched.execute(transaction).await {
                Err(TransactionError::Changed) if attempt < options.max_attempts => {}
                ended => return Ok(ended?),
            }
            let longest = MIN_RETRY_DELAY.saturating_mul(1 << (attempt - 1).min(20)).min(MAX_RETRY_DELAY);
            sleep(longest.mul_f64(fastrand::f64())).await;
            attempt += 1;
        }
    }
}

impl WatchedConnection {
    async fn open(client: &Client) -> Result<Self, TransactionError> {
        client.shared.check_multi(client.timeout).await?;
        let lease = client.shared.exclusive.lease(&client.shared, after(client.timeout)).await?;
        Ok(Self { lease: Arc::new(lease), timeout: client.timeout })
    }

    /// Sends a request and returns its reply.
    ///
    /// # Errors
    ///
    /// As of [`Client::send`]. A blocking command is rejected.
    pub async fn send<T: FromValue>(&self, request: impl Into<Request<T>>) -> Result<T, Error> {
        let command = request.into().into_command();
        command.check()?;
        read_reply(self.lease.connection().call(command.as_bytes(), self.timeout).await?)
    }

    /// Sends the commands of a pipeline together and returns a result for each.
    ///
    /// # Errors
    ///
    /// If a command cannot be sent. Then none is.
    pub async fn pipeline<S: ReplyTypes>(&self, pipeline: Pipeline<S>) -> Result<S::Results, Error> {
        pipeline.check_without_wait()?;
        Ok(pipeline.execute(self.lease.connection(), self.timeout).await)
    }

    async fn watch(&self, watch: &Command) -> Result<(), TransactionError> {
        watch.check_encoding()?;
        // The next caller must not find watched keys, even if this one goes away before the reply.
        self.lease.taint();
        read_reply::<Ignore>(self.lease.connection().call(watch.as_bytes(), self.timeout).await?)?;
        Ok(())
    }

    /// If it fails, the connection is closed.
    async fn unwatch(&self) {
        let replied = self.lease.connection().call(Command::new("UNWATCH").as_bytes(), self.timeout).await;
        if replied.and_then(read_reply::<Ignore>).is_ok() {
            self.lease.clear_taint();
        }
    }

    async fn execute<S: ReplyTypes>(&self, transaction: Transaction<S>) -> Result<S::Results, TransactionError> {
        let is_executed = !transaction.is_empty() && transaction.check().is_ok();
        let executed = transaction.execute(self.lease.connection(), self.timeout).await;
        if !is_executed {
            self.unwatch().await;
        } else if matches!(&executed, Ok(_) | Err(TransactionError::Changed | TransactionError::Aborted { .. })) {
            // `EXEC` forgets the watched keys, whatever its reply.
            self.lease.clear_taint();
        }
        executed
    }
}
