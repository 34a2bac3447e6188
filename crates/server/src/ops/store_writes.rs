//! Writes of records. They run on the writer thread of the store in request order, and are acknowledged with the configured
//! durability.

use std::borrow::Cow;

use serde_json::{Map, Value as Json, json};
use tidewire_store::transaction::{Action, Operation as TransactionStep};
use tidewire_store::{Cause, Draft, Filter, ReferenceFilter, Row, StoreError, WriteOptions};
use tracing::Instrument as _;

use super::table::OperationId;
use super::{Call, HandlerReply, HandlerResult, Target, check_conditions};
use crate::RequestError;
use crate::protocol::reply::Data;
use crate::protocol::request::Params;
use crate::session::address_limit::network;
use crate::session::decision::Denial;
use crate::session::rate_limit::RateKey;

pub(super) fn insert(call: &Call<'_>) -> HandlerResult {
    let (bucket, data) = (bucket(call.params)?, call.params.object("data")?);
    write_rows(call, bucket, Some(""), |draft, bucket| Ok(Data::Row(draft.insert(bucket, data)?)))
}

pub(super) fn insert_many(call: &Call<'_>) -> HandlerResult {
    let (bucket, records) = (bucket(call.params)?, records(call.params)?);
    write_rows(call, bucket, Some("/records"), |draft, bucket| Ok(Data::Records(draft.insert_many(bucket, records)?)))
}

pub(super) fn update(call: &Call<'_>) -> HandlerResult {
    let params = call.params;
    let (bucket, key, data) = (bucket(params)?, params.value("key")?, params.object("data")?);
    let version = params.version("version")?;
    write_rows(call, bucket, Some(""), move |draft, bucket| Ok(Data::Row(draft.update(bucket, &key, data, version)?)))
}

pub(super) fn upsert(call: &Call<'_>) -> HandlerResult {
    let (bucket, data) = (bucket(call.params)?, call.params.object("data")?);
    write_rows(call, bucket, Some(""), |draft, bucket| Ok(Data::Row(draft.upsert(bucket, data)?)))
}

pub(super) fn delete(call: &Call<'_>) -> HandlerResult {
    let params = call.params;
    let (bucket, key, version) = (bucket(params)?, params.value("key")?, params.version("version")?);
    write_rows(call, bucket, None, move |draft, bucket| {
        draft.delete(bucket, &key, version)?;
        Ok(json!({"deleted": true}).into())
    })
}

pub(super) fn clear(call: &Call<'_>) -> HandlerResult {
    let bucket = bucket(call.params)?;
    write_rows(call, bucket, None, |draft, bucket| {
        draft.clear(bucket)?;
        Ok(json!({"cleared": true}).into())
    })
}

pub(super) fn transaction(call: &Call<'_>) -> HandlerResult {
    let mut steps = steps(call.params)?;
    let idempotency = Idempotency::parse(call)?;
    for step in &mut steps {
        if let Action::Where(filter) | Action::FindOne(filter) | Action::Count(filter) = &step.action {
            check_conditions(call.server, filter)?;
        }
        step.row_filter = authorize_step(call, step)?;
    }
    call.admit()?;
    let reply_records = steps.iter().enumerate().filter_map(|(index, step)| {
        let has_records = !matches!(step.action, Action::Delete(_) | Action::Count(_));
        let row_filter = step.row_filter.clone().filter(|_| has_records)?;
        let pointer = Cow::Owned(format!("/results/{index}/data"));
        Some(ReplyRecords { bucket: step.bucket.clone(), row_filter, pointer })
    });
    let reply_records = if idempotency.is_some() { reply_records.collect() } else { Vec::new() };
    let max_bytes = call.server.options.max_result_bytes;
    let references = call.caller.reference_filter();
    Ok(write(call, idempotency, reply_records, move |draft| {
        with_reference_filter(draft, references.as_ref(), |draft| {
            Ok(Data::Results(draft.transact_within(&steps, max_bytes)?))
        })
    }))
}

/// Checks the permission for a step of a transaction: the caller needs permission for both `store.transaction` and the operation of
/// the step. Returns the filter of the rows that it may access; `None` for all rows.
fn authorize_step(call: &Call<'_>, step: &TransactionStep) -> Result<Option<Filter>, RequestError> {
    let target = Target::Bucket(&step.bucket);
    let transaction_filter = call.authorize(target)?;
    let operation = operation_name(&step.action).and_then(OperationId::named);
    let operation = operation.ok_or_else(|| Denial::Default.error(call.operation.name, &step.bucket))?;
    let step_filter = call.authorize_operation(operation, target)?;
    Ok(match (transaction_filter, step_filter) {
        (Some(one), Some(other)) if one != other => Some(one.and(other)),
        (one, other) => one.or(other),
    })
}

/// Returns the name of the operation that is equivalent to a step of a transaction.
fn operation_name(action: &Action) -> Option<&'static str> {
    Some(match action {
        Action::Get(_) => "store.get",
        Action::Insert(_) => "store.insert",
        Action::Update(..) => "store.update",
        Action::Delete(_) => "store.delete",
        Action::Where(_) => "store.where",
        Action::FindOne(_) => "store.findOne",
        Action::Count(_) => "store.count",
        _ => return None,
    })
}

fn bucket(params: &Params<'_>) -> Result<String, RequestError> {
    params.text("bucket").map(Cow::into_owned)
}

/// Admits a write to rows of one bucket, and submits it to the writer. `pointer` is the JSON pointer of the records in the reply.
fn write_rows(
    call: &Call<'_>,
    bucket: String,
    pointer: Option<&'static str>,
    work: impl FnOnce(&mut Draft, &str) -> Result<Data, StoreError> + Send + 'static,
) -> HandlerResult {
    let idempotency = Idempotency::parse(call)?;
    let row_filter = call.admit_to(Target::Bucket(&bucket))?;
    let references = call.caller.reference_filter();
    let work = move |draft: &mut Draft, bucket: &str| {
        with_reference_filter(draft, references.as_ref(), |draft| work(draft, bucket))
    };
    let Some(row_filter) = row_filter else {
        return Ok(write(call, idempotency, Vec::new(), move |draft| work(draft, &bucket)));
    };
    let reply_records = pointer.filter(|_| idempotency.is_some()).map(|pointer| ReplyRecords {
        bucket: bucket.clone(),
        row_filter: row_filter.clone(),
        pointer: Cow::Borrowed(pointer),
    });
    Ok(write(call, idempotency, reply_records.into_iter().collect(), move |draft| {
        draft.with_row_filter(&row_filter, |draft| work(draft, &bucket))
    }))
}

/// Runs `work` with a restriction of the records that it may refer to; `None` for no restriction.
fn with_reference_filter<T>(
    draft: &mut Draft,
    references: Option<&ReferenceFilter>,
    work: impl FnOnce(&mut Draft) -> T,
) -> T {
    match references {
        Some(references) => draft.with_reference_filter(references, work),
        None => work(draft),
    }
}

/// Submits an admitted write to the writer. Its order among the writes of the connection is fixed when this returns. The future
/// completes when the store acknowledges the write.
pub(super) fn write(
    call: &Call<'_>,
    idempotency: Option<Idempotency>,
    reply_records: Vec<ReplyRecords>,
    work: impl FnOnce(&mut Draft) -> Result<Data, StoreError> + Send + 'static,
) -> HandlerReply {
    let bytes = call.request.memory() + idempotency.as_ref().map_or(0, |idempotency| idempotency.request.len());
    let cause = Cause::of(call.connection.number);
    let options = WriteOptions::default().cause(cause).owner(write_owner(call)).bytes(bytes);
    let pending = match idempotency {
        None => call.server.store.write_with(options, work),
        Some(idempotency) => {
            let owner = idempotency_owner(call);
            call.server.store.write_with(options, move |draft| idempotency.run(&owner, &reply_records, work, draft))
        }
    };
    let span = tracing::debug_span!(target: "tidewire::request", "store_commit");
    HandlerReply::pending(async move { pending.instrument(span).await.map_err(RequestError::from) })
}

/// Returns the owner to which the store charges a write: the user, or without a login the client's address. For an in-process client
/// without a login it is the embedding program.
pub(super) fn write_owner(call: &Call<'_>) -> u64 {
    match call.caller.user_id() {
        None if call.connection.is_local() => WriteOptions::default().owner,
        None => call.server.hash_owner(RateKey::Address(network(call.connection.address))),
        Some(user) => call.server.hash_owner(RateKey::User(user)),
    }
}

/// Returns the owner of idempotency keys: the user, or without a login the client's address, so that clients do not receive replies
/// to each other's writes. For an in-process client without a login it is the embedding program.
fn idempotency_owner(call: &Call<'_>) -> String {
    /// Prefix of owners other than users.
    const NO_USER: char = '\0';
    match call.caller.user_id() {
        None if call.connection.is_local() => format!("{NO_USER}program"),
        None => format!("{NO_USER}address {}", call.connection.address),
        // A user id can be any string. The prefix prevents collisions with the other owners.
        Some(user) if user.starts_with(NO_USER) => format!("{NO_USER}{user}"),
        Some(user) => user.to_owned(),
    }
}

/// The idempotency key of a write.
pub(super) struct Idempotency {
    key: String,
    /// The operation and parameters. They must be equal in every request with this key.
    request: String,
}

impl Idempotency {
    pub(super) fn parse(call: &Call<'_>) -> Result<Option<Self>, RequestError> {
        const COMPARED_PARAMS: [&str; 8] =
            ["bucket", "name", "key", "data", "version", "operations", "config", "updates"];
        let key = call.params.optional_text("idempotencyKey")?;
        Ok(key.map(|key| {
            let name = call.operation.name.to_owned();
            let request = COMPARED_PARAMS.iter().fold(name, |text, name| text + "\n" + &call.params.compact(name));
            Self { key: key.into_owned(), request }
        }))
    }

    /// Runs a write, or returns the stored reply if the key was used before.
    fn run(
        self,
        owner: &str,
        reply_records: &[ReplyRecords],
        work: impl FnOnce(&mut Draft) -> Result<Data, StoreError>,
        draft: &mut Draft,
    ) -> Result<Data, StoreError> {
        let reply = draft.once(owner, &self.key, &self.request, |draft| work(draft).map(|data| data.to_json()))?;
        reply_records.iter().try_for_each(|records| records.check(&reply))?;
        Ok(reply.into())
    }
}

/// The records in the reply to a write with an idempotency key. A stored reply may contain rows that the user may no longer see, so
/// they are checked before it is sent again.
pub(super) struct ReplyRecords {
    bucket: String,
    row_filter: Filter,
    /// The JSON pointer of the records in the reply.
    pointer: Cow<'static, str>,
}

impl ReplyRecords {
    /// Fails if a record in a reply does not match the row filter.
    fn check(&self, reply: &Json) -> Result<(), StoreError> {
        let records = match reply.pointer(&self.pointer) {
            Some(Json::Array(records)) => records,
            Some(record) => std::slice::from_ref(record),
            None => &[],
        };
        let may_see = |record: &Map<String, Json>| Row::new(record).is_ok_and(|row| self.row_filter.matches(&row));
        if records.iter().filter_map(Json::as_object).all(may_see) {
            Ok(())
        } else {
            Err(StoreError::Forbidden { bucket: self.bucket.clone() })
        }
    }
}

/// Returns the records of `store.insertMany`.
fn records(params: &Params<'_>) -> Result<Vec<Map<String, Json>>, RequestError> {
    let record = |(index, record)| match record {
        Json::Object(record) => Ok(record),
        _ => Err(RequestError::invalid(format!("\"data[{index}]\" must be an object"))),
    };
    params.array("data")?.into_iter().enumerate().map(record).collect()
}

/// Returns the operations of a transaction.
fn steps(params: &Params<'_>) -> Result<Vec<TransactionStep>, RequestError> {
    let expected = "a non-empty array of operations";
    if !params.raw("operations").is_some_and(|text| text.starts_with('[')) {
        return Err(params.invalid_param("operations", expected));
    }
    let operations = params.array("operations")?;
    if operations.is_empty() {
        return Err(RequestError::invalid(format!("\"operations\" must be {expected}, got an empty array")));
    }
    TransactionStep::parse_all(&Json::Array(operations)).map_err(RequestError::invalid)
}
