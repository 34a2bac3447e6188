//! A subscriber, as the driver knows it.

use std::sync::{Arc, LazyLock};

use tidewire_store::{BucketIdentity, Field, Position, Row, State, Value};
use tokio::sync::oneshot;

use crate::background::JobId;
use crate::live::LiveError;
use crate::mark::Mark;
use crate::rows::is_same;
use crate::subscription::{Inbox, Mode, Subscription};

static NAME: LazyLock<Field> = LazyLock::new(|| Field::new("name"));
static CONFIG: LazyLock<Field> = LazyLock::new(|| Field::new("config"));

/// A subscriber. It is in the matcher once its query is live.
pub(super) struct Subscriber {
    pub(super) inbox: Arc<Inbox>,
    pub(super) mode: Mode,
    /// The named query, if it has a name.
    pub(super) definition: Option<Definition>,
    /// Set until it has the first result of its query.
    pub(super) pending: Option<Box<PendingSubscriber>>,
}

/// A subscriber that waits for the first result of its query.
pub(super) struct PendingSubscriber {
    pub(super) recipient: Recipient,
    pub(super) stage: PendingStage,
    /// The position of the driver at the request.
    pub(super) requested: Position,
}

/// Where the first result goes.
pub(super) enum Recipient {
    /// To the caller, who has no subscription yet.
    Caller { reply: oneshot::Sender<Result<Subscription, LiveError>>, since: Option<Mark> },
    /// To the inbox: the query was replaced, or commits were missed. The bucket must still be this one.
    Inbox { bucket: BucketIdentity },
}

/// What a subscriber waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PendingStage {
    /// The evaluation of the query with this canonical form.
    Evaluation(Arc<[u8]>),
    /// A background thread that reads the history.
    History(JobId),
    /// The encoded result. The query is live.
    Result,
}

/// The definition of a named query when it was subscribed to. Subscribers share the record.
pub(super) struct Definition(pub(super) Row);

impl Definition {
    pub(super) fn has_name(&self, name: &str) -> bool {
        matches!(self.0.get(&NAME), Some(Value::String(own)) if own == name)
    }

    /// Whether the name still has the same definition.
    pub(super) fn is_in(&self, state: &State) -> bool {
        let Some(Value::String(name)) = self.0.get(&NAME) else { return false };
        let Ok(record) = state.query_record(&name) else { return false };
        let configs = record.text_of(&CONFIG).zip(self.0.text_of(&CONFIG));
        configs.is_some_and(|(is, was)| is_same(is, was))
    }
}

/// The name in the record of a named query.
pub(super) fn name_of(record: &Row) -> Option<String> {
    match record.get(&NAME)? {
        Value::String(name) => Some(name.into_owned()),
        _ => None,
    }
}
