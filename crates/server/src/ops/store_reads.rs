//! Reads of records, from the newest committed snapshot: at once if they are cheap, else on the pool.

use std::sync::Arc;

use serde_json::{Map, Value as Json};
use tidewire_store::query::{Budget, Exceeded, Parameters};
use tidewire_store::{Aggregate, Bucket, Filter, Query, Row, Snapshot};

use super::{Answer, Call, Handled, Target, check_conditions, on_pool};
use crate::RequestError;
use crate::protocol::reply::{Data, append_rows};
use crate::protocol::request::Params;
use crate::work::INLINE_WORK;

pub(super) fn get(call: &Call<'_>) -> Handled {
    let (bucket, key) = (call.params.text("bucket")?, call.params.value("key")?);
    let row_filter = call.admit_to(Target::Bucket(&bucket))?;
    let snapshot = call.server.store.snapshot();
    let row = snapshot.state.bucket(&bucket)?.record(&key, || call.server.store.now());
    let row = row.filter(|row| row_filter.as_ref().is_none_or(|filter| filter.matches(row)));
    one(row).within(call.server.options.max_result_bytes).map(Answer::Now)
}

pub(super) fn all(call: &Call<'_>) -> Handled {
    let query = Query::new(call.params.text("bucket")?);
    read(call, query, |read, query| read.list(&query.rows(read.bucket, read.now, read.budget)?))
}

pub(super) fn find(call: &Call<'_>) -> Handled {
    let query = matching(call, filter(call)?)?;
    read(call, query, |read, query| read.list(&query.rows(read.bucket, read.now, read.budget)?))
}

pub(super) fn find_one(call: &Call<'_>) -> Handled {
    let mut query = matching(call, filter(call)?)?;
    query.limit = Some(1);
    read(call, query, |read, query| Ok(one(query.rows(read.bucket, read.now, read.budget)?.first().copied())))
}

pub(super) fn count(call: &Call<'_>) -> Handled {
    let query = matching(call, optional_filter(call)?)?;
    read(call, query, |read, query| Ok(Json::from(query.count(read.bucket, read.now, read.budget)?).into()))
}

pub(super) fn first(call: &Call<'_>) -> Handled {
    let (query, count) = (Query::new(call.params.text("bucket")?), call.params.count("n")?);
    read(call, query, move |read, query| read.list(&read.bucket.first(count, &query.filter, read.now, read.budget)?))
}

pub(super) fn last(call: &Call<'_>) -> Handled {
    let (query, count) = (Query::new(call.params.text("bucket")?), call.params.count("n")?);
    read(call, query, move |read, query| read.list(&read.bucket.last(count, &query.filter, read.now, read.budget)?))
}

pub(super) fn paginate(call: &Call<'_>) -> Handled {
    let (query, limit) = (Query::new(call.params.text("bucket")?), call.params.count("limit")?);
    // A cursor of null is a cursor: no record has that key, so the page is empty.
    let after = call.params.raw("after").map(|_| call.params.value("after").unwrap_or_default());
    read(call, query, move |read, query| {
        let page = read.bucket.page(after.as_ref(), limit, &query.filter, read.now, read.budget)?;
        let size = read.size_of(&page.rows)?;
        Ok(Data::written(size + 64, |out| {
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

pub(super) fn sum(call: &Call<'_>) -> Handled {
    aggregate(call, Aggregate::sum)
}

pub(super) fn avg(call: &Call<'_>) -> Handled {
    aggregate(call, Aggregate::avg)
}

pub(super) fn min(call: &Call<'_>) -> Handled {
    aggregate(call, Aggregate::min)
}

pub(super) fn max(call: &Call<'_>) -> Handled {
    aggregate(call, Aggregate::max)
}

fn aggregate(call: &Call<'_>, function: fn(String) -> Aggregate) -> Handled {
    let params = call.params;
    let (bucket, field, filter) = (params.text("bucket")?, params.text("field")?, optional_filter(call)?);
    let mut query = Query::new(bucket).aggregate(function(field.into_owned()));
    query.filter = filter;
    read(call, query, |read, query| {
        let (has_value, data) = read.answer(query)?;
        // The least or greatest of no numbers is null here, and absent in a query.
        Ok(if has_value { data } else { Data::text("null") })
    })
}

pub(super) fn query(call: &Call<'_>) -> Handled {
    let params = call.params;
    let mut config = Map::new();
    for name in ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"] {
        if params.given(name).is_some() {
            config.insert(name.to_owned(), params.value(name)?);
        }
    }
    // The bucket has the error of a parameter.
    params.text("bucket")?;
    let values = query_params(params)?;
    let query = Query::parse_with(&Json::Object(config), &Parameters::from(&values)).map_err(RequestError::invalid)?;
    check_conditions(call.server, &query.filter)?;
    read(call, query, |read, query| Ok(read.answer(query)?.1))
}

/// A read of one bucket, in one snapshot.
struct Read<'a> {
    bucket: &'a Bucket,
    now: u64,
    budget: &'a Budget,
    /// The limit of the bytes of the result.
    max_bytes: usize,
}

/// Why a read has no result.
enum Failed {
    Exceeded(Exceeded),
    Request(RequestError),
}

impl From<Exceeded> for Failed {
    fn from(exceeded: Exceeded) -> Self {
        Self::Exceeded(exceeded)
    }
}

impl From<RequestError> for Failed {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl Read<'_> {
    /// The answer of a query, and whether there is any: the least or greatest of no numbers is none.
    fn answer(&self, query: &Query) -> Result<(bool, Data), Failed> {
        let mut written = Ok(false);
        let data = Data::written(256, |out| {
            written = query.write_answer(self.bucket, self.now, out, self.max_bytes, self.budget);
        });
        Ok((written?, data))
    }

    fn list(&self, rows: &[&Row]) -> Result<Data, Failed> {
        let size = self.size_of(rows)?;
        Ok(Data::written(size, |out| append_rows(out, rows.iter().copied())))
    }

    /// The size of a list of rows, unless it is too large. Copying it is work.
    fn size_of(&self, rows: &[&Row]) -> Result<usize, Failed> {
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

/// Admits a call that reads a bucket, and runs it: on this thread if that takes little work, else on the pool.
fn read(
    call: &Call<'_>,
    query: Query,
    run: impl Fn(&Read<'_>, &Query) -> Result<Data, Failed> + Send + 'static,
) -> Handled {
    let row_filter = call.admit_to(Target::Bucket(&query.bucket))?;
    let query = match &row_filter {
        Some(filter) => query.restrict(filter),
        None => query,
    };
    let (snapshot, now) = (call.server.store.snapshot(), call.server.store.now());
    let max_bytes = call.server.options.max_result_bytes;
    match run_within(&run, &query, &snapshot, now, max_bytes, Budget::unlimited().max_work(INLINE_WORK)) {
        Err(Failed::Exceeded(Exceeded::Work)) => {}
        done => return Ok(Answer::Now(done?)),
    }
    Ok(on_pool(call, move |_, cancelled| {
        let cancelled = cancelled.clone();
        let budget = Budget::unlimited().stop_when(move || cancelled.is_cancelled());
        run_within(&run, &query, &snapshot, now, max_bytes, budget).map_err(RequestError::from)
    }))
}

/// The memory that a read may take besides its result, as a multiple of the limit of the result, and at least.
const MEMORY_FACTOR: usize = 4;
const MIN_MEMORY: usize = 1 << 20;

fn run_within(
    run: &impl Fn(&Read<'_>, &Query) -> Result<Data, Failed>,
    query: &Query,
    snapshot: &Arc<Snapshot>,
    now: u64,
    max_bytes: usize,
    budget: Budget,
) -> Result<Data, Failed> {
    let bucket = snapshot.state.bucket(&query.bucket).map_err(RequestError::from)?;
    let budget = budget.max_bytes(max_bytes.saturating_mul(MEMORY_FACTOR).max(MIN_MEMORY));
    let data = run(&Read { bucket, now, budget: &budget, max_bytes }, query)?;
    Ok(data.within(max_bytes)?)
}

impl From<Failed> for RequestError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Exceeded(exceeded) => Self::from(exceeded),
            Failed::Request(error) => error,
        }
    }
}

fn one(row: Option<&Row>) -> Data {
    row.map_or_else(|| Data::text("null"), |row| Data::Row(row.clone()))
}

/// A query for the records of the bucket of this call that match a filter.
fn matching(call: &Call<'_>, filter: Filter) -> Result<Query, RequestError> {
    let mut query = Query::new(call.params.text("bucket")?);
    query.filter = filter;
    Ok(query)
}

fn filter(call: &Call<'_>) -> Result<Filter, RequestError> {
    // The bucket is checked first.
    call.params.text("bucket")?;
    let json = Json::Object(call.params.object("filter")?);
    // Outside of queries a string such as "{{ params.x }}" is only a string.
    let filter = Filter::parse(&json).map_err(RequestError::invalid)?;
    check_conditions(call.server, &filter)?;
    Ok(filter)
}

fn optional_filter(call: &Call<'_>) -> Result<Filter, RequestError> {
    if call.params.given("filter").is_some() { filter(call) } else { Ok(Filter::everything()) }
}

/// The parameters of a query. Anything but an object holds no parameter.
pub(super) fn query_params(params: &Params<'_>) -> Result<Map<String, Json>, RequestError> {
    match params.given("params") {
        Some(text) if text.starts_with('{') => params.object("params"),
        _ => Ok(Map::new()),
    }
}
