//! Reads of records from the newest committed snapshot: on the I/O thread if they are cheap, otherwise on the pool.

use std::sync::Arc;

use serde_json::{Map, Value as Json};
use tidewire_store::query::{Budget, Exceeded, Parameters};
use tidewire_store::{Aggregate, Bucket, Filter, Query, Row, Snapshot};

use super::{Call, HandlerReply, HandlerResult, Target, check_conditions, run_on_pool};
use crate::RequestError;
use crate::protocol::reply::{Data, append_rows};
use crate::protocol::request::Params;
use crate::work::MAX_INLINE_WORK;

pub(super) fn get(call: &Call<'_>) -> HandlerResult {
    let (bucket, key) = (call.params.text("bucket")?, call.params.value("key")?);
    let row_filter = call.admit_to(Target::Bucket(&bucket))?;
    let snapshot = call.server.store.snapshot();
    let row = snapshot.state.bucket(&bucket)?.record(&key, || call.server.store.now());
    let row = row.filter(|row| row_filter.as_ref().is_none_or(|filter| filter.matches(row)));
    row_or_null(row).encode_within(call.server.options.max_result_bytes).map(HandlerReply::Ready)
}

pub(super) fn all(call: &Call<'_>) -> HandlerResult {
    let query = Query::new(call.params.text("bucket")?);
    read(call, query, |read, query| read.list(&query.rows(read.bucket, read.now, read.budget)?))
}

pub(super) fn find(call: &Call<'_>) -> HandlerResult {
    let query = query_matching(call, filter(call)?)?;
    read(call, query, |read, query| read.list(&query.rows(read.bucket, read.now, read.budget)?))
}

pub(super) fn find_one(call: &Call<'_>) -> HandlerResult {
    let mut query = query_matching(call, filter(call)?)?;
    query.limit = Some(1);
    read(call, query, |read, query| Ok(row_or_null(query.rows(read.bucket, read.now, read.budget)?.first().copied())))
}

pub(super) fn count(call: &Call<'_>) -> HandlerResult {
    let query = query_matching(call, optional_filter(call)?)?;
    read(call, query, |read, query| Ok(Json::from(query.count(read.bucket, read.now, read.budget)?).into()))
}

pub(super) fn first(call: &Call<'_>) -> HandlerResult {
    let (query, count) = (Query::new(call.params.text("bucket")?), call.params.count("n")?);
    read(call, query, move |read, query| read.list(&read.bucket.first(count, &query.filter, read.now, read.budget)?))
}

pub(super) fn last(call: &Call<'_>) -> HandlerResult {
    let (query, count) = (Query::new(call.params.text("bucket")?), call.params.count("n")?);
    read(call, query, move |read, query| read.list(&read.bucket.last(count, &query.filter, read.now, read.budget)?))
}

pub(super) fn paginate(call: &Call<'_>) -> HandlerResult {
    let (query, limit) = (Query::new(call.params.text("bucket")?), call.params.count("limit")?);
    // `null` is a valid cursor. No record has that key, so the page is empty.
    let after = call.params.raw("after").map(|_| call.params.value("after").unwrap_or_default());
    read(call, query, move |read, query| {
        let page = read.bucket.page(after.as_ref(), limit, &query.filter, read.now, read.budget)?;
        let size = read.size_of(&page.rows)?;
        Ok(Data::encode_with(size + 64, |out| {
            out.extend_from_slice(b"{\"records\":");
            append_rows(out, page.rows.iter().copied());
            out.extend_from_slice(if page.has_more { b",\"hasMore\":true" } else { b",\"hasMore\":false" });
            if let Some(cursor) = page.next_cursor {
                out.extend_from_slice(b",\"nextCursor\":");
                out.extend_from_slice(cursor.as_bytes());
            }
            out.push(b'}');
        }))
    })
}

pub(super) fn sum(call: &Call<'_>) -> HandlerResult {
    aggregate(call, Aggregate::sum)
}

pub(super) fn avg(call: &Call<'_>) -> HandlerResult {
    aggregate(call, Aggregate::avg)
}

pub(super) fn min(call: &Call<'_>) -> HandlerResult {
    aggregate(call, Aggregate::min)
}

pub(super) fn max(call: &Call<'_>) -> HandlerResult {
    aggregate(call, Aggregate::max)
}

fn aggregate(call: &Call<'_>, function: fn(String) -> Aggregate) -> HandlerResult {
    let params = call.params;
    let (bucket, field, filter) = (params.text("bucket")?, params.text("field")?, optional_filter(call)?);
    let mut query = Query::new(bucket).aggregate(function(field.into_owned()));
    query.filter = filter;
    read(call, query, |read, query| {
        let (has_value, data) = read.run_query(query)?;
        // The minimum or maximum of no numbers is null here, but absent in the result of a query.
        Ok(if has_value { data } else { Data::text("null") })
    })
}

pub(super) fn query(call: &Call<'_>) -> HandlerResult {
    let params = call.params;
    let mut config = Map::new();
    for name in ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"] {
        if params.non_null(name).is_some() {
            config.insert(name.to_owned(), params.value(name)?);
        }
    }
    // Checked here, so that an invalid bucket has the same error as in other operations.
    params.text("bucket")?;
    let values = query_params(params)?;
    let query = Query::parse_with(&Json::Object(config), &Parameters::from(&values)).map_err(RequestError::invalid)?;
    check_conditions(call.server, &query.filter)?;
    read(call, query, |read, query| Ok(read.run_query(query)?.1))
}

/// A read of one bucket in one snapshot.
struct Read<'a> {
    bucket: &'a Bucket,
    now: u64,
    budget: &'a Budget,
    /// The limit of the result.
    max_bytes: usize,
}

/// Why a read failed.
enum ReadError {
    Exceeded(Exceeded),
    Request(RequestError),
}

impl From<Exceeded> for ReadError {
    fn from(exceeded: Exceeded) -> Self {
        Self::Exceeded(exceeded)
    }
}

impl From<RequestError> for ReadError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl Read<'_> {
    /// Runs a query. Returns whether the result has a value, and the encoded result. The minimum or maximum of no numbers has no value.
    fn run_query(&self, query: &Query) -> Result<(bool, Data), ReadError> {
        let mut written = Ok(false);
        let data = Data::encode_with(256, |out| {
            written = query.write_result(self.bucket, self.now, out, self.max_bytes, self.budget);
        });
        Ok((written?, data))
    }

    fn list(&self, rows: &[&Row]) -> Result<Data, ReadError> {
        let size = self.size_of(rows)?;
        Ok(Data::encode_with(size, |out| append_rows(out, rows.iter().copied())))
    }

    /// Returns the encoded size of a list of rows, and charges it to the work budget.
    fn size_of(&self, rows: &[&Row]) -> Result<usize, ReadError> {
        let mut size = 1;
        for row in rows {
            size += row.text_bytes().len() + 1;
            if size > self.max_bytes {
                return Err(RequestError::too_large(self.max_bytes).into());
            }
        }
        self.budget.charge(size)?;
        Ok(size)
    }
}

/// Admits a call that reads a bucket, and runs it: on this thread within a small work budget, otherwise on the pool.
fn read(
    call: &Call<'_>,
    query: Query,
    run: impl Fn(&Read<'_>, &Query) -> Result<Data, ReadError> + Send + 'static,
) -> HandlerResult {
    let row_filter = call.admit_to(Target::Bucket(&query.bucket))?;
    let query = match &row_filter {
        Some(filter) => query.restrict(filter),
        None => query,
    };
    let (snapshot, now) = (call.server.store.snapshot(), call.server.store.now());
    let max_bytes = call.server.options.max_result_bytes;
    match run_with_budget(&run, &query, &snapshot, now, max_bytes, Budget::unlimited().max_work(MAX_INLINE_WORK)) {
        Err(ReadError::Exceeded(Exceeded::Work)) => {}
        done => return Ok(HandlerReply::Ready(done?)),
    }
    Ok(run_on_pool(call, move |_, cancelled| {
        let cancelled = cancelled.clone();
        let budget = Budget::unlimited().stop_when(move || cancelled.is_cancelled());
        run_with_budget(&run, &query, &snapshot, now, max_bytes, budget).map_err(RequestError::from)
    }))
}

/// Limit of the working memory of a read, as a multiple of the limit of its result.
const MEMORY_FACTOR: usize = 4;
/// Lower bound of the limit of the working memory of a read.
const MIN_MEMORY_BYTES: usize = 1 << 20;

fn run_with_budget(
    run: &impl Fn(&Read<'_>, &Query) -> Result<Data, ReadError>,
    query: &Query,
    snapshot: &Arc<Snapshot>,
    now: u64,
    max_bytes: usize,
    budget: Budget,
) -> Result<Data, ReadError> {
    let bucket = snapshot.state.bucket(&query.bucket).map_err(RequestError::from)?;
    let budget = budget.max_bytes(max_bytes.saturating_mul(MEMORY_FACTOR).max(MIN_MEMORY_BYTES));
    let data = run(&Read { bucket, now, budget: &budget, max_bytes }, query)?;
    Ok(data.encode_within(max_bytes)?)
}

impl From<ReadError> for RequestError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Exceeded(exceeded) => Self::from(exceeded),
            ReadError::Request(error) => error,
        }
    }
}

fn row_or_null(row: Option<&Row>) -> Data {
    row.map_or_else(|| Data::text("null"), |row| Data::Row(row.clone()))
}

/// Returns a query for the records of the call's bucket that match a filter.
fn query_matching(call: &Call<'_>, filter: Filter) -> Result<Query, RequestError> {
    let mut query = Query::new(call.params.text("bucket")?);
    query.filter = filter;
    Ok(query)
}

fn filter(call: &Call<'_>) -> Result<Filter, RequestError> {
    // Checked first, so that a missing bucket is reported before an invalid filter.
    call.params.text("bucket")?;
    let json = Json::Object(call.params.object("filter")?);
    // Outside of queries, a string such as "{{ params.x }}" is a plain string.
    let filter = Filter::parse(&json).map_err(RequestError::invalid)?;
    check_conditions(call.server, &filter)?;
    Ok(filter)
}

fn optional_filter(call: &Call<'_>) -> Result<Filter, RequestError> {
    if call.params.non_null("filter").is_some() { filter(call) } else { Ok(Filter::everything()) }
}

/// Returns the parameters of a query. A value other than an object is ignored.
pub(super) fn query_params(params: &Params<'_>) -> Result<Map<String, Json>, RequestError> {
    match params.non_null("params") {
        Some(text) if text.starts_with('{') => params.object("params"),
        _ => Ok(Map::new()),
    }
}
