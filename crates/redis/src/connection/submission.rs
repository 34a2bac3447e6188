//! A request on its way: from the handle that submits it to its reply.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use crate::{Error, Fault, Outcome, Value};

/// A request, wherever it is. It ends once: with its replies, or with an error, or because nobody waits for it any more.
pub(crate) struct Submission {
    /// One command or several, as they are written.
    pub(crate) bytes: Bytes,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
    reply: Reply,
    _charge: Charge,
}

/// Who waits for the replies.
pub(crate) enum Reply {
    One(oneshot::Sender<Result<Value, Error>>),
    Many { left: usize, values: Vec<Value>, sender: oneshot::Sender<Replies> },
}

/// The replies to several commands: as many as came, and why no more did.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) values: Vec<Value>,
    pub(crate) fault: Option<Error>,
}

/// The room that a request takes until it has ended.
pub(crate) struct Charge {
    budget: Arc<Budget>,
    requests: u32,
    bytes: u32,
}

/// How much may be under way.
#[derive(Debug)]
pub(crate) struct Budget {
    requests: Semaphore,
    bytes: Semaphore,
    max_requests: u32,
    max_bytes: u32,
}

impl Budget {
    pub(crate) fn new(requests: usize, bytes: usize) -> Self {
        let bound = |wanted: usize| u32::try_from(wanted.clamp(1, Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
        let (max_requests, max_bytes) = (bound(requests), bound(bytes));
        Self {
            requests: Semaphore::new(max_requests as usize),
            bytes: Semaphore::new(max_bytes as usize),
            max_requests,
            max_bytes,
        }
    }

    /// What a request takes. One that is larger than all the room has it to itself.
    fn weight(&self, requests: usize, bytes: usize) -> (u32, u32) {
        let bound = |wanted, max: u32| u32::try_from(wanted).unwrap_or(max).min(max);
        (bound(requests, self.max_requests), bound(bytes, self.max_bytes))
    }

    /// How many requests are under way, and how many bytes.
    pub(crate) fn used(&self) -> (usize, usize) {
        let used = |max: u32, free: usize| (max as usize).saturating_sub(free);
        (
            used(self.max_requests, self.requests.available_permits()),
            used(self.max_bytes, self.bytes.available_permits()),
        )
    }

    /// Takes room, if there is any.
    pub(crate) fn try_charge(self: &Arc<Self>, requests: usize, bytes: usize) -> Option<Charge> {
        let (requests, bytes) = self.weight(requests, bytes);
        let taken = self.requests.try_acquire_many(requests).ok()?;
        self.bytes.try_acquire_many(bytes).ok()?.forget();
        taken.forget();
        Some(Charge { budget: Arc::clone(self), requests, bytes })
    }

    /// Takes room when there is some.
    pub(crate) async fn charge(self: &Arc<Self>, requests: usize, bytes: usize) -> Option<Charge> {
        let (requests, bytes) = self.weight(requests, bytes);
        let taken = self.requests.acquire_many(requests).await.ok()?;
        self.bytes.acquire_many(bytes).await.ok()?.forget();
        taken.forget();
        Some(Charge { budget: Arc::clone(self), requests, bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.requests.add_permits(self.requests as usize);
        self.budget.bytes.add_permits(self.bytes as usize);
    }
}

impl Submission {
    pub(crate) fn new(bytes: Bytes, submitted: Instant, deadline: Instant, reply: Reply, charge: Charge) -> Self {
        Self { bytes, submitted, deadline, reply, _charge: charge }
    }

    /// Whether nobody waits for it any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        match &self.reply {
            Reply::One(sender) => sender.is_closed(),
            Reply::Many { sender, .. } => sender.is_closed(),
        }
    }

    /// How many replies it waits for.
    pub(crate) fn left(&self) -> usize {
        match &self.reply {
            Reply::One(_) => 1,
            Reply::Many { left, .. } => *left,
        }
    }

    /// Takes in a reply; gives itself back if it waits for more.
    pub(crate) fn answer(mut self, value: Value) -> Option<Self> {
        match self.reply {
            // Whoever has gone away does not want to know.
            Reply::One(sender) => drop(sender.send(Ok(value))),
            Reply::Many { left, mut values, sender } => {
                values.push(value);
                if left > 1 {
                    self.reply = Reply::Many { left: left - 1, values, sender };
                    return Some(self);
                }
                drop(sender.send(Replies { values, fault: None }));
            }
        }
        None
    }

    pub(crate) fn fail(self, error: Error) {
        match self.reply {
            Reply::One(sender) => drop(sender.send(Err(error))),
            Reply::Many { values, sender, .. } => drop(sender.send(Replies { values, fault: Some(error) })),
        }
    }

    pub(crate) fn close(self, outcome: Outcome) {
        self.fail(Error::Closed { outcome });
    }
}

/// A fault of a connection, for a request that it has met there.
pub(super) fn befallen(fault: &Error, outcome: Outcome) -> Error {
    let source = match fault {
        Error::Lost { source, .. } => source.clone(),
        Error::Protocol(error) => Fault::Protocol(*error),
        Error::Server(error) => Fault::Refused(error.clone()),
        // No other fault ends a connection, or keeps it from beginning.
        _ => Fault::ConnectTimedOut,
    };
    Error::Lost { outcome, source }
}
