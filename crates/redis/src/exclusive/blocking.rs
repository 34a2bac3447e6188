//! Blocking commands.
//!
//! A blocking command has an exclusive connection until its reply has come. If its caller goes away, its deadline passes or the client
//! is closed, the command may pop an element at the same moment. So the connection is not closed: `CLIENT UNBLOCK`, sent over the
//! shared connection, ends the command, and its reply says whether it has popped an element. An element that no caller waits for is
//! counted and given to [`Options::unclaimed_hook`](crate::Options::unclaimed_hook).
//!
//! A `CLIENT UNBLOCK` must not end the command of the next caller on the connection. So the connection is not used again before the reply
//! to each `CLIENT UNBLOCK` has come, and it is closed if one has none. The shared connection stays open for it while the client closes
//! ([`Hold`]).
//!
//! The entries of `XREAD` and `XREADGROUP` stay on the server, so those of a dropped call are read or claimed later.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::{Lease, UnclaimedReply};
use crate::connection::{Hold, ReplySender, after, later};
use crate::observe::{command_name, traced};
use crate::sharing;
use crate::{Client, Command, Error, RequestOutcome, RequestPhase, Value};

/// The delay before `CLIENT UNBLOCK` is repeated: the first one has no effect if it overtakes the command.
const UNBLOCK_INTERVAL: Duration = Duration::from_millis(50);

/// Sends a command that blocks for up to `block` over an exclusive connection.
pub(crate) async fn call(client: &Client, command: &Command, block: Duration) -> Result<Value, Error> {
    let call = async {
        let begin = Instant::now();
        let limit = block.saturating_add(client.timeout);
        let lease = client.shared.exclusive.lease(&client.shared, later(begin, client.timeout)).await?;
        BlockingCall::start(lease, command.as_bytes())?.finish(later(begin, limit)).await
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
        let hold = Hold::new(&lease.client().connection);
        let leaves_entries = sharing::leaves_entries(command);
        let command = command_name(command).into();
        Ok(Self(Some(Pending { lease, _hold: hold, receiver, command, leaves_entries, has_ended: false })))
    }

    /// Waits for the reply until the deadline, or until the client is closed.
    async fn finish(mut self, deadline: Instant) -> Result<Value, Error> {
        let Some(pending) = &mut self.0 else { return Err(closed(RequestOutcome::MaybeExecuted)) };
        let client = pending.lease.client().clone();
        tokio::select! {
            biased;
            replied = pending.reply() => return replied,
            () = client.exclusive.closed() => {
                return match pending.end().await {
                    Ok(Value::Null) => Err(closed(RequestOutcome::NeverSent)),
                    replied => replied,
                };
            }
            () = tokio::time::sleep_until(deadline) => {}
        }
        let phase = if pending.lease.connection().is_connected() {
            RequestPhase::Waiting
        } else {
            // Whether the command was sent is certain once the connection has ended.
            pending.lease.connection().queue.close(Instant::now());
            match pending.reply().await {
                Err(error) if error.outcome() == Some(RequestOutcome::NeverSent) => RequestPhase::Connecting,
                Err(error) => {
                    pending.claim(Err(error));
                    RequestPhase::Waiting
                }
                replied => return replied,
            }
        };
        client.connection.counters.count_timeout(phase);
        Err(Error::TimedOut { phase })
    }
}

impl Drop for BlockingCall {
    fn drop(&mut self) {
        if let Some(mut pending) = self.0.take_if(|pending| !pending.has_ended) {
            let tasks = pending.lease.client().tasks.clone();
            tasks.spawn(async move {
                let replied = pending.end().await;
                pending.claim(replied);
            });
        }
    }
}

/// A command that is queued or sent. If it is dropped before its reply has come, the outcome is counted as unknown.
struct Pending {
    lease: Lease,
    _hold: Hold,
    receiver: oneshot::Receiver<Result<Value, Error>>,
    command: Box<str>,
    /// Whether the server still has what the reply has.
    leaves_entries: bool,
    has_ended: bool,
}

impl Pending {
    /// Waits for the reply. It is cancellation safe.
    async fn reply(&mut self) -> Result<Value, Error> {
        let replied = (&mut self.receiver).await;
        self.has_ended = true;
        replied.unwrap_or_else(|_| Err(closed(RequestOutcome::MaybeExecuted)))
    }

    /// Ends the command on the server, or its connection if that is not possible, and returns the reply.
    ///
    /// The future can be dropped: the connection is closed then, unless another call has ended the command.
    async fn end(&mut self) -> Result<Value, Error> {
        let client = self.lease.client().clone();
        let options = &client.connection.options;
        let deadline = after(options.timeout.min(options.connect_timeout));
        // While it connects, it is not certain whether the command will be sent.
        let _ = timeout_at(deadline, self.lease.connection().attempted()).await;
        if let Some(id) = self.lease.connection().client_id() {
            let unblock = Command::new("CLIENT").arg("UNBLOCK").arg(id);
            while Instant::now() < deadline {
                // The reply may be here already.
                if let Ok(replied) = timeout_at(Instant::now(), self.reply()).await {
                    return replied;
                }
                // Also if the future is dropped before the reply.
                let was_tainted = self.lease.taint();
                let unblocked = client.connection.call_own(unblock.as_bytes(), deadline).await;
                let is_pending =
                    matches!(&unblocked, Err(error) if error.outcome() == Some(RequestOutcome::MaybeExecuted));
                if !is_pending && !was_tainted {
                    self.lease.clear_taint();
                }
                // The user may not use it, or the client has ended.
                if matches!(&unblocked, Ok(reply) if reply.as_error().is_some())
                    || matches!(unblocked, Err(Error::Closed { .. }))
                {
                    break;
                }
                if let Ok(replied) = timeout_at(deadline.min(after(UNBLOCK_INTERVAL)), self.reply()).await {
                    return replied;
                }
            }
        }
        self.lease.connection().queue.close(Instant::now());
        self.reply().await
    }

    /// Counts a reply that has no caller, and gives an element to the hook.
    fn claim(&self, replied: Result<Value, Error>) {
        let client = self.lease.client();
        match replied {
            Ok(reply) if self.leaves_entries || reply.as_error().is_some() || *reply.bare() == Value::Null => {}
            Ok(reply) => {
                client.exclusive.count(|stats| stats.unclaimed += 1);
                let command = self.command.clone();
                if let Some(hook) = &client.connection.options.unclaimed_hook {
                    hook.call(UnclaimedReply { command, reply });
                } else {
                    tracing::warn!(%command, "the reply to a cancelled blocking command was dropped");
                }
            }
            Err(error) if self.leaves_entries || error.outcome() == Some(RequestOutcome::NeverSent) => {}
            Err(error) => {
                client.exclusive.count(|stats| stats.unknown += 1);
                tracing::warn!(command = %self.command, %error, "a cancelled blocking command has no reply");
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.has_ended {
            self.has_ended = true;
            let replied = self.receiver.try_recv().unwrap_or(Err(closed(RequestOutcome::MaybeExecuted)));
            self.claim(replied);
        }
    }
}

fn closed(outcome: RequestOutcome) -> Error {
    Error::Closed { outcome }
}
