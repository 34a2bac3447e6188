//! The driver's state of a subscriber.

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

/// A subscriber. It is added to the matcher when its query is live.
pub(super) struct Subscriber {
    pub(super) inbox: Arc<Inbox>,
    pub(super) mode: Mode,
    /// The definition of its named query, if it has one.
    pub(super) definition: Option<Definition>,
    /// Set while it waits for the first result of its query.
    pub(super) pending: Option<Box<PendingSubscriber>>,
}

/// A subscriber that waits for the first result of its query.
pub(super) struct PendingSubscriber {
    pub(super) recipient: Recipient,
    pub(super) stage: PendingStage,
    /// The position of the driver at the time of the request.
    pub(super) requested: Position,
}

/// The recipient of the first result.
pub(super) enum Recipient {
    /// The caller, which has no subscription yet.
    Caller { reply: oneshot::Sender<Result<Subscription, LiveError>>, since: Option<Mark> },
    /// The inbox, when the query is evaluated again after missed commits. The subscription ends if the bucket is another one by then.
    Inbox { bucket: BucketIdentity },
}

/// The step that a pending subscriber waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PendingStage {
    /// The evaluation of the query with this canonical form.
    Evaluation(Arc<[u8]>),
    /// The history, which a background job reads.
    History(JobId),
    /// The encoding of the result. The query is live.
    Result,
}

/// The definition of a named query at the time of the subscription.
pub(super) struct Definition(pub(super) Row);

impl Definition {
    pub(super) fn has_name(&self, name: &str) -> bool {
        matches!(self.0.get(&NAME), Some(Value::String(own)) if own == name)
    }

    /// Returns whether the definition is unchanged in this state.
    pub(super) fn is_in(&self, state: &State) -> bool {
        let Some(Value::String(name)) = self.0.get(&NAME) else { return false };
        let Ok(record) = state.query_record(&name) else { return false };
        let configs = record.text_of(&CONFIG).zip(self.0.text_of(&CONFIG));
        configs.is_some_and(|(is, was)| is_same(is, was))
    }
}

/// Returns the name in the record of a named query.
pub(super) fn name_of(record: &Row) -> Option<String> {
    match record.get(&NAME)? {
        Value::String(name) => Some(name.into_owned()),
        _ => None,
    }
}
