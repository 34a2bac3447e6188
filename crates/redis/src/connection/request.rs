//! A request inside the connection: from the handle that submits it to its last reply.

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::gate::Permit;
use crate::{Error, Value};

/// A request without its bytes, which are in the batch or in the output. It ends once: with its replies, with an error, or because
/// its caller has gone away.
pub(crate) struct PendingRequest {
    /// The number of its bytes.
    pub(super) len: usize,
    /// The number of replies still to come.
    pub(super) replies_left: usize,
    /// What it needs of the budget, and holds once it is admitted.
    pub(super) permit: Permit,
    pub(super) submitted: Instant,
    pub(super) deadline: Instant,
    /// `None` once the request has timed out after it was written: its replies still come and are dropped.
    pub(super) reply: Option<ReplySender>,
}

/// Delivers the replies to the caller.
pub(crate) enum ReplySender {
    One(oneshot::Sender<Result<Value, Error>>),
    Pipeline(Box<PipelineSender>),
}

/// The replies to a pipeline so far, and where they go.
pub(crate) struct PipelineSender {
    values: Vec<Value>,
    sender: oneshot::Sender<PipelineReplies>,
}

/// The replies to a pipeline. If they are fewer than its commands, the error says why.
#[derive(Debug)]
pub(crate) struct PipelineReplies {
    pub(crate) values: Vec<Value>,
    pub(crate) error: Option<Error>,
}

/// Replies to reserve memory for. Beyond it, memory grows as replies arrive.
const MAX_RESERVED_REPLIES: usize = 1024;

impl PendingRequest {
    /// A request of `len` bytes with this number of commands.
    pub(crate) fn new(len: usize, commands: usize, submitted: Instant, deadline: Instant, reply: ReplySender) -> Self {
        let permit = Permit { commands, bytes: len };
        Self { len, replies_left: commands, permit, submitted, deadline, reply: Some(reply) }
    }

    /// A request of the client itself, with one command and no permit. Without a sender its reply is dropped.
    pub(super) fn own(len: usize, submitted: Instant, deadline: Instant, reply: Option<ReplySender>) -> Self {
        Self { len, replies_left: 1, permit: Permit::default(), submitted, deadline, reply }
    }

    /// Whether it is a request of the client itself.
    pub(super) fn is_own(&self) -> bool {
        self.permit == Permit::default()
    }

    /// Whether a caller waits for the reply.
    pub(super) fn has_caller(&self) -> bool {
        match &self.reply {
            Some(ReplySender::One(sender)) => !sender.is_closed(),
            Some(ReplySender::Pipeline(pipeline)) => !pipeline.sender.is_closed(),
            None => false,
        }
    }
}

impl ReplySender {
    /// For a request with one command.
    pub(crate) fn one() -> (Self, oneshot::Receiver<Result<Value, Error>>) {
        let (sender, receiver) = oneshot::channel();
        (Self::One(sender), receiver)
    }

    /// For a pipeline with this number of commands.
    pub(crate) fn pipeline(commands: usize) -> (Self, oneshot::Receiver<PipelineReplies>) {
        let (sender, receiver) = oneshot::channel();
        let values = Vec::with_capacity(commands.min(MAX_RESERVED_REPLIES));
        (Self::Pipeline(Box::new(PipelineSender { values, sender })), receiver)
    }

    /// Ends the request with an error. A caller that has gone away is normal, here and in `finish`.
    pub(super) fn fail(self, error: Error) {
        match self {
            Self::One(sender) => drop(sender.send(Err(error))),
            Self::Pipeline(pipeline) => {
                drop(pipeline.sender.send(PipelineReplies { values: pipeline.values, error: Some(error) }));
            }
        }
    }

    /// Ends the request with its last reply.
    pub(super) fn finish(self, value: Value) {
        match self {
            Self::One(sender) => drop(sender.send(Ok(value))),
            Self::Pipeline(mut pipeline) => {
                pipeline.values.push(value);
                drop(pipeline.sender.send(PipelineReplies { values: pipeline.values, error: None }));
            }
        }
    }

    /// Stores a reply that is not the last one.
    pub(super) fn push(&mut self, value: Value) {
        if let Self::Pipeline(pipeline) = self {
            pipeline.values.push(value);
        }
    }
}
