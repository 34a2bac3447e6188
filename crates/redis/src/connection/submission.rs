//! A request in flight: from the handle that submits it to its reply.

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::budget::Weight;
use crate::{Error, Value};

/// A request, wherever it is. It ends once: with its replies, or with an error, or because nobody waits for it any more.
pub(crate) struct Submission {
    /// How many bytes it is. They are where it is.
    pub(super) len: usize,
    /// How many replies are still to come.
    pub(super) left: usize,
    /// The room that it takes.
    pub(super) weight: Weight,
    pub(super) submitted: Instant,
    pub(super) deadline: Instant,
    /// Who waits for the replies. There may be nobody any more, and they come nevertheless.
    pub(super) reply: Option<Reply>,
}

/// Who waits for replies.
pub(crate) enum Reply {
    One(oneshot::Sender<Result<Value, Error>>),
    Many(Box<Many>),
}

/// Who waits for the replies to several commands, and what came so far.
pub(crate) struct Many {
    values: Vec<Value>,
    sender: oneshot::Sender<Replies>,
}

/// The replies to several commands: as many as came, and why no more did.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) values: Vec<Value>,
    pub(crate) fault: Option<Error>,
}

/// The room that is made for replies at once. Beyond it, room grows with what arrives.
const ROOM: usize = 1024;

impl Submission {
    /// Whether somebody waits for it.
    pub(super) fn is_wanted(&self) -> bool {
        match &self.reply {
            Some(Reply::One(sender)) => !sender.is_closed(),
            Some(Reply::Many(many)) => !many.sender.is_closed(),
            None => false,
        }
    }

    /// Whether it is a question that nobody asked but ourselves, and that takes no room.
    pub(super) fn is_ours(&self) -> bool {
        self.weight == Weight::default()
    }

    pub(super) fn fail(self, error: Error) {
        if let Some(reply) = self.reply {
            reply.fail(error);
        }
    }
}

impl Reply {
    /// Who waits for one reply.
    pub(crate) fn one() -> (Self, oneshot::Receiver<Result<Value, Error>>) {
        let (sender, receiver) = oneshot::channel();
        (Self::One(sender), receiver)
    }

    /// Who waits for so many.
    pub(crate) fn many(count: usize) -> (Self, oneshot::Receiver<Replies>) {
        let (sender, receiver) = oneshot::channel();
        (Self::Many(Box::new(Many { values: Vec::with_capacity(count.min(ROOM)), sender })), receiver)
    }

    pub(super) fn fail(self, error: Error) {
        match self {
            // Whoever has gone away does not want to know.
            Self::One(sender) => drop(sender.send(Err(error))),
            Self::Many(many) => drop(many.sender.send(Replies { values: many.values, fault: Some(error) })),
        }
    }

    /// Gives the last reply.
    pub(super) fn answer(self, value: Value) {
        match self {
            Self::One(sender) => drop(sender.send(Ok(value))),
            Self::Many(mut many) => {
                many.values.push(value);
                drop(many.sender.send(Replies { values: many.values, fault: None }));
            }
        }
    }

    /// Keeps a reply that is not the last.
    pub(super) fn keep(&mut self, value: Value) {
        if let Self::Many(many) = self {
            many.values.push(value);
        }
    }
}
