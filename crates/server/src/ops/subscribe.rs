//! `store.subscribe` and `store.unsubscribe`.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value as Json};
use tidewire_live::{First, Mark, Mode, QueryResult, SubscribeOptions, Subscription as LiveSubscription};
use tidewire_store::query::Parameters;
use tidewire_store::{Filter, Query, StoreError};
use tracing::Instrument as _;

use super::store_reads::query_params;
use super::table::OperationId;
use super::{Call, HandlerReply, HandlerResult, ReplyResult, Target, authorize, check_conditions};
use crate::protocol::reply::{Data, append_string};
use crate::protocol::request::Params;
use crate::push::permit::SubscriptionPermit;
use crate::push::subscription::{NewSubscription, QuerySource, Reopening, Subscription};
use crate::session::caller::Caller;
use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

pub(super) fn subscribe(call: &Call<'_>) -> HandlerResult {
    let subscribe = Subscribe::parse(call.params)?;
    if let SubscribeQuery::Inline(query) = &subscribe.query {
        check_conditions(call.server, &query.filter)?;
    }
    let row_filter = authorize_query(call.server, &call.caller, call.operation, subscribe.query.target())
        .inspect_err(|_| call.progress.set(super::Progress::Denied))?;
    call.admit()?;
    let (connection, caller, operation) = (Arc::clone(call.connection), call.caller.clone(), call.operation);
    Ok(HandlerReply::pending(async move { open(&connection, subscribe, &caller, operation, row_filter).await }))
}

pub(super) fn unsubscribe(call: &Call<'_>) -> HandlerResult {
    let id = call.params.text("subscriptionId")?;
    call.admit()?;
    let number = id.strip_prefix("sub-").and_then(|number| number.parse().ok());
    // Only the canonical form is an id: not `sub-01` or `sub-+1`.
    let number = number.filter(|number: &u64| *id == format!("sub-{number}"));
    let (connection, shown) = (Arc::clone(call.connection), id.chars().take(64).collect::<String>());
    // Deferred, because this may run on the worker pool, and only the task that owns the connection may remove subscriptions.
    Ok(HandlerReply::pending(async move {
        if number.is_some_and(|number| connection.unsubscribe(number)) {
            return Ok(Data::text("{\"unsubscribed\":true}"));
        }
        Err(RequestError::new(Code::NotFound, format!("this connection has no subscription \"{shown}\"")))
    }))
}

/// The parameters of `store.subscribe`.
struct Subscribe {
    query: SubscribeQuery,
    mode: Mode,
    /// The position from which to resume.
    since: Option<String>,
    /// Whether the client opted in to positions and to a last push with the reason for the end.
    is_extended: bool,
}

/// The query to subscribe to.
pub(super) enum SubscribeQuery {
    Named { name: String, params: Map<String, Json> },
    Inline(Box<Query>),
}

/// The target of the permission check for a query.
#[derive(Debug, Clone, Copy)]
pub(super) enum QueryTarget<'a> {
    Bucket(&'a str),
    Named(&'a str),
}

impl SubscribeQuery {
    fn target(&self) -> QueryTarget<'_> {
        match self {
            Self::Inline(query) => QueryTarget::Bucket(&query.bucket),
            Self::Named { name, .. } => QueryTarget::Named(name),
        }
    }
}

impl<'a> From<&'a QuerySource> for QueryTarget<'a> {
    fn from(source: &'a QuerySource) -> Self {
        match source {
            QuerySource::Inline(query) => Self::Bucket(&query.bucket),
            QuerySource::Named { name, .. } | QuerySource::Programmatic { name, .. } => Self::Named(name),
        }
    }
}

impl From<&QuerySource> for SubscribeQuery {
    fn from(source: &QuerySource) -> Self {
        match source {
            QuerySource::Inline(query) => Self::Inline(query.clone()),
            QuerySource::Named { name, params, .. } => {
                Self::Named { name: name.to_string(), params: params.iter().cloned().collect() }
            }
            QuerySource::Programmatic { name, params } => {
                Self::Named { name: name.to_string(), params: (**params).clone() }
            }
        }
    }
}

impl Subscribe {
    fn parse(params: &Params<'_>) -> Result<Self, RequestError> {
        let query = match params.non_null("config") {
            None => SubscribeQuery::Named { name: params.text("query")?.into_owned(), params: query_params(params)? },
            Some(_) if params.non_null("query").is_some() => {
                let message = "\"query\" and \"config\" cannot be combined; give the name of a query or its definition";
                return Err(RequestError::invalid(message));
            }
            Some(_) => {
                let config = Json::Object(params.object("config")?);
                let values = query_params(params)?;
                let query = Query::parse_with(&config, &Parameters::from(&values)).map_err(RequestError::invalid)?;
                SubscribeQuery::Inline(Box::new(query))
            }
        };
        let mode = match params.optional_text("mode")?.as_deref() {
            None | Some("whole" | "full") => Mode::Snapshot,
            Some("delta") => Mode::Delta,
            Some(other) => {
                let message = format!("\"mode\" must be \"whole\" or \"delta\", got {other:?}");
                return Err(RequestError::invalid(message));
            }
        };
        let since = params.any_text("since")?.map(Cow::into_owned);
        let is_extended = params.flag("pos")? || since.is_some() || params.non_null("mode").is_some();
        Ok(Self { query, mode, since, is_extended })
    }
}

/// Checks whether a caller may subscribe to a named query. Returns the filter of the rows that it may see; `None` for all rows.
pub(super) fn authorize_named(
    server: &ServerState,
    caller: &Caller,
    name: &str,
) -> Result<Option<Filter>, RequestError> {
    authorize_query(server, caller, OperationId::subscribe(), QueryTarget::Named(name))
}

/// Checks whether a caller may subscribe to a query. Returns the filter of the rows that it may see; `None` for all rows.
pub(super) fn authorize_query(
    server: &ServerState,
    caller: &Caller,
    operation: OperationId,
    target: QueryTarget<'_>,
) -> Result<Option<Filter>, RequestError> {
    let name = match target {
        QueryTarget::Bucket(bucket) => return authorize(caller, operation, Target::Bucket(bucket)),
        QueryTarget::Named(name) => name,
    };
    if let Some(buckets) = server.programmatic.buckets(name) {
        if buckets.is_empty() {
            return authorize(caller, operation, Target::Query { name, bucket: None }).map(|_| None);
        }
        for bucket in buckets {
            authorize(caller, operation, Target::Query { name, bucket: Some(bucket) })?;
        }
        return Ok(None);
    }
    match server.bucket_of_query(name) {
        Some(bucket) => authorize(caller, operation, Target::Query { name, bucket: Some(&bucket) }),
        // A caller without any permission to subscribe must not learn which queries exist.
        None => caller.may_ever(operation.name, name).map(|()| None),
    }
}

async fn open(
    connection: &Arc<Connection>,
    subscribe: Subscribe,
    caller: &Caller,
    operation: OperationId,
    row_filter: Option<Filter>,
) -> ReplyResult {
    let server = &connection.server;
    let Subscribe { query, mode, since, is_extended } = subscribe;
    let permit = SubscriptionPermit::acquire(connection)?;
    let number = server.next_subscription();
    if let SubscribeQuery::Named { name, params } = &query
        && server.programmatic.contains(name)
    {
        let source = QuerySource::Programmatic { name: name.as_str().into(), params: Box::new(params.clone()) };
        let new_subscription = NewSubscription { number, source, mode, is_extended, row_filter: None, permit };
        return open_programmatic(connection, new_subscription, since.is_some(), caller).await;
    }
    let span = tracing::debug_span!(target: "tidewire::request", "live_evaluation");
    // An invalid position is treated like one that the history no longer covers.
    let mark: Option<Mark> = since.as_deref().and_then(|since| since.parse().ok());
    let options = SubscribeOptions::from(mode).since(mark).owner(connection.number);
    let evaluated = evaluate(server, &query, options, caller, operation, row_filter);
    let (mut events, row_filter) = evaluated.instrument(span).await?;
    let members = ReplyMembers {
        number,
        key: is_extended.then(|| key_field(server, &query)).flatten(),
        is_aggregate: resolve_query(server, &query).is_ok_and(|query| query.aggregate.is_some()),
        position: is_extended.then(|| events.mark().to_string()),
        resumed: since.is_some().then(|| matches!(events.first(), First::Resumed(_))),
    };
    let data = members.encode(events.take_first(), server.options.max_result_bytes)?;
    let source = match query {
        SubscribeQuery::Named { name, params } => {
            // If the query was removed concurrently, the subscription is about to end.
            let bucket = server.bucket_of_query(&name).unwrap_or_default().into();
            QuerySource::Named { name: name.into(), bucket, params: params.into_iter().collect() }
        }
        SubscribeQuery::Inline(query) => QuerySource::Inline(query),
    };
    let new_subscription = NewSubscription { number, source, mode, is_extended, row_filter, permit };
    let subscription = Subscription::live(new_subscription, connection, events);
    connection.add_subscription(&subscription)?;
    // Changes since the first result are polled after the reply.
    connection.sink.wake(number);
    Ok(data)
}

/// Starts a live query, restricted by the row filter of the caller. If a named query is redefined during the evaluation, evaluates it
/// again with the row filter of its new bucket. Returns the subscription and the row filter that was used.
async fn evaluate(
    server: &ServerState,
    query: &SubscribeQuery,
    options: SubscribeOptions,
    caller: &Caller,
    operation: OperationId,
    mut row_filter: Option<Filter>,
) -> Result<(LiveSubscription, Option<Filter>), RequestError> {
    loop {
        let events = match query {
            SubscribeQuery::Inline(query) => {
                server.live.subscribe(restrict((**query).clone(), row_filter.as_ref()), options).await?
            }
            SubscribeQuery::Named { name, params } => {
                server.live.subscribe_named(name, params.clone(), row_filter.clone(), options).await?
            }
        };
        let current_filter = authorize_query(server, caller, operation, query.target())?;
        if current_filter == row_filter {
            return Ok((events, row_filter));
        }
        // The name was redefined as another query concurrently.
        row_filter = current_filter;
    }
}

/// Subscribes to a programmatic query. It has no history, so a resumed subscription starts with a snapshot.
async fn open_programmatic(
    connection: &Arc<Connection>,
    new_subscription: NewSubscription,
    is_resumed: bool,
    caller: &Caller,
) -> ReplyResult {
    let server = &connection.server;
    if new_subscription.mode == Mode::Delta {
        return Err(RequestError::invalid("a programmatic query does not support deltas; subscribe without \"mode\""));
    }
    let QuerySource::Programmatic { name, params } = &new_subscription.source else {
        return Err(RequestError::new(Code::QueryNotDefined, "the query is not defined"));
    };
    // The code of the embedding program may block.
    let (state, name, params, query_caller) = (Arc::clone(server), name.clone(), params.clone(), caller.clone());
    let computed = tokio::task::spawn_blocking(move || state.programmatic.compute(&name, &params, &query_caller)).await;
    let computed = computed.map_err(|error| RequestError::internal(&error))??;
    let members = ReplyMembers {
        number: new_subscription.number,
        key: None,
        is_aggregate: true,
        position: new_subscription.is_extended.then(|| computed.position()),
        resumed: is_resumed.then_some(false),
    };
    let snapshot = First::Snapshot(QueryResult::Json(computed.json.clone()));
    let data = members.encode(snapshot, server.options.max_result_bytes)?;
    let subscription = Subscription::programmatic(new_subscription, connection, computed.json);
    connection.add_subscription(&subscription)?;
    server.programmatic.subscribe(&subscription, caller.clone());
    // Computed once more, so that a commit since the first result is not missed. Not awaited: if the request timed out here, the
    // client would not know the id of its subscription.
    server.schedule_computation(subscription.number);
    Ok(data)
}

/// Evaluates the query of a subscription again for another caller.
pub(super) fn reopen(
    connection: &Connection,
    query: SubscribeQuery,
    mode: Mode,
    caller: Caller,
    row_filter: Option<Filter>,
) -> Reopening {
    let (server, owner) = (Arc::clone(&connection.server), connection.number);
    Reopening::new(async move {
        let options = SubscribeOptions::from(mode).owner(owner);
        evaluate(&server, &query, options, &caller, OperationId::subscribe(), row_filter).await
    })
}

/// Returns the key field of the records of a query.
fn key_field(server: &ServerState, query: &SubscribeQuery) -> Option<String> {
    let query = resolve_query(server, query).ok()?;
    let snapshot = server.store.snapshot();
    snapshot.state.bucket(&query.bucket).ok().map(|bucket| bucket.definition().key.clone())
}

fn resolve_query(server: &ServerState, query: &SubscribeQuery) -> Result<Query, StoreError> {
    match query {
        SubscribeQuery::Inline(query) => Ok((**query).clone()),
        SubscribeQuery::Named { name, params } => server.store.snapshot().state.query(name, params),
    }
}

fn restrict(query: Query, row_filter: Option<&Filter>) -> Query {
    match row_filter {
        Some(filter) => query.restrict(filter),
        None => query,
    }
}

/// The members of the reply to `store.subscribe` other than the first result.
struct ReplyMembers {
    number: u64,
    /// The key field of the records, for extended subscriptions.
    key: Option<String>,
    /// Whether the result is a value instead of a list of records.
    is_aggregate: bool,
    position: Option<String>,
    resumed: Option<bool>,
}

impl ReplyMembers {
    /// Encodes the reply with the first result. Fails if the result is larger than `max` bytes.
    fn encode(self, first: First, max: usize) -> ReplyResult {
        let result = match first {
            First::Snapshot(QueryResult::Json(json)) => json,
            First::Resumed(Some(delta)) => delta.encoded_within(max).ok_or_else(|| RequestError::too_large(max))?,
            First::Resumed(None) if !self.is_aggregate => {
                Bytes::from_static(b"{\"added\":[],\"changed\":[],\"removed\":[]}")
            }
            // An aggregate without a value, or one that has not changed.
            _ => Bytes::new(),
        };
        if result.len() > max {
            return Err(RequestError::too_large(max));
        }
        Ok(Data::encode_with(result.len() + 160, |out| {
            out.extend_from_slice(format!("{{\"subscriptionId\":\"sub-{}\"", self.number).as_bytes());
            if let Some(key) = &self.key {
                out.extend_from_slice(b",\"key\":");
                append_string(out, key);
            }
            if let Some(position) = self.position {
                out.extend_from_slice(format!(",\"pos\":\"{position}\"").as_bytes());
            }
            if let Some(resumed) = self.resumed {
                out.extend_from_slice(format!(",\"resumed\":{resumed}").as_bytes());
            }
            if !result.is_empty() {
                out.extend_from_slice(b",\"data\":");
                out.extend_from_slice(&result);
            }
            out.push(b'}');
        }))
    }
}
