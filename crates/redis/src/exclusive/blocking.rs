//! Blocking commands.
//!
//! A blocking command has an exclusive connection until its reply has come. If its caller goes away or its deadline passes, the
//! command may pop an element at the same moment. So the connection is not closed at once: `CLIENT UNBLOCK`, sent over the shared
//! connection, ends the command, and its reply says whether it has popped an element. If there is one, it is counted and given to
//! [`Options::unclaimed_hook`]. If there is no reply within [`Options::timeout`], the connection is closed, and the outcome is counted
//! as unknown.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{Lease, UnclaimedReply};
#[cfg(doc)]
use crate::Options;
use crate::connection::{ReplySender, after, later};
use crate::observe::{command_name, traced};
use crate::{Client, Command, Error, RequestOutcome, RequestPhase, Value};

/// The delay before `CLIENT UNBLOCK` is repeated: the first one has no effect if it overtakes the command.
const UNBLOCK_INTERVAL: Duration = Duration::from_millis(50);

/// Sends a command that blocks for up to `block`, or without a limit, over an exclusive connection.
pub(crate) async fn call(client: &Client, command: &Command, block: Option<Duration>) -> Result<Value, Error> {
    let call = async {
        let lease = client.shared.exclusive.lease(&client.shared, after(client.timeout)).await?;
        let deadline = block.map_or(after(Duration::MAX), |block| later(after(block), client.timeout));
        BlockingCall::start(lease, command.as_bytes())?.finish(deadline).await
    };
    traced(client.options(), command.as_bytes(), 1, call).await
}

/// A command whose caller waits for the reply. If it is dropped before, a background task ends the command.
struct BlockingCall(Option<Pending>);

impl BlockingCall {
    fn start(lease: Lease, command: &[u8]) -> Result<Self, Error> {
        let (reply, receiver) = ReplySender::one();
        // The connection has no deadline for it, because the reply must not be dropped.
        let rejected = lease.connection().submit(command, 1, Duration::MAX, reply)?;
        // Nothing else is in flight, and a request that is larger than the limit gets all of it.
        debug_assert!(rejected.is_none(), "an exclusive connection has a permit");
        let command = command_name(command).into();
        Ok(Self(Some(Pending { lease, receiver, command, has_ended: false })))
    }

    /// Waits for the reply until the deadline.
    async fn finish(mut self, deadline: Instant) -> Result<Value, Error> {
        let Some(pending) = &mut self.0 else { return Err(closed()) };
        if let Ok(replied) = timeout_at(deadline, pending.reply()).await {
            return replied;
        }
        let phase = if pending.lease.connection().is_open() {
            RequestPhase::Waiting
        } else {
            // Whether the command was sent is certain once the connection has ended.
            pending.lease.connection().queue.close(Instant::now());
            match pending.reply().await {
                Err(error) if error.outcome() == Some(RequestOutcome::NeverSent) => RequestPhase::Connecting,
                Err(_) => RequestPhase::Waiting,
                replied => return replied,
            }
        };
        pending.lease.client().connection.counters.count_timeout(phase);
        Err(Error::TimedOut { phase })
    }
}

impl Drop for BlockingCall {
    fn drop(&mut self) {
        if let Some(pending) = self.0.take_if(|pending| !pending.has_ended) {
            let tasks = pending.lease.client().tasks.clone();
            tasks.spawn(pending.end());
        }
    }
}

/// A command that is queued or sent. If it is dropped before its reply has come, the outcome is counted as unknown.
struct Pending {
    lease: Lease,
    receiver: oneshot::Receiver<Result<Value, Error>>,
    command: Box<str>,
    has_ended: bool,
}

impl Pending {
    /// Waits for the reply. It is cancellation safe.
    async fn reply(&mut self) -> Result<Value, Error> {
        let replied = (&mut self.receiver).await;
        self.has_ended = true;
        replied.unwrap_or_else(|_| Err(closed()))
    }

    /// Ends the command on the server, or its connection, and claims the reply.
    async fn end(mut self) {
        let client = self.lease.client().clone();
        let timeout = client.connection.options.timeout;
        if self.lease.connection().is_open() {
            let deadline = after(timeout);
            let unblock = self
                .lease
                .connection()
                .client_id()
                .map(|id| Command::new("CLIENT").arg("UNBLOCK").arg(id).as_bytes().to_vec());
            let unblock = async {
                if let Some(command) = unblock {
                    // If it fails, the connection is closed at the deadline.
                    while client.connection.call(&command, timeout).await.is_ok() {
                        sleep(UNBLOCK_INTERVAL).await;
                    }
                }
                sleep_until(deadline).await;
            };
            let ended = tokio::select! {
                biased;
                replied = self.reply() => Some(replied),
                () = unblock => None,
                () = sleep_until(deadline) => None,
            };
            if let Some(replied) = ended {
                return self.claim(replied);
            }
        }
        self.lease.connection().queue.close(Instant::now());
        let replied = self.reply().await;
        self.claim(replied);
    }

    /// Counts what the caller would have received, and gives an element to the hook.
    fn claim(&self, replied: Result<Value, Error>) {
        let client = self.lease.client();
        // `XREAD` removes nothing.
        let is_read = self.command.eq_ignore_ascii_case("XREAD");
        match replied {
            Ok(reply) if is_read || reply.as_error().is_some() || *reply.bare() == Value::Null => {}
            Ok(reply) => {
                client.exclusive.count(|stats| stats.unclaimed += 1);
                let command = self.command.clone();
                match &client.connection.options.unclaimed_hook {
                    Some(hook) => hook.call(UnclaimedReply { command, reply }),
                    None => tracing::warn!(%command, "an element that a cancelled command had popped was dropped"),
                }
            }
            Err(error) if is_read || error.outcome() == Some(RequestOutcome::NeverSent) => {}
            Err(error) => {
                client.exclusive.count(|stats| stats.unknown += 1);
                tracing::warn!(command = %self.command, %error, "a cancelled command may have popped an element");
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.has_ended {
            self.has_ended = true;
            let replied = self.receiver.try_recv().unwrap_or_else(|_| Err(closed()));
            self.claim(replied);
        }
    }
}

fn closed() -> Error {
    Error::Closed { outcome: RequestOutcome::MaybeExecuted }
}
