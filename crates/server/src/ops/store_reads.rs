//! Reads of records. They are answered at once, from the newest committed snapshot.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Bucket, Filter, Parameters, Query, Row, Snapshot};

use super::{Answer, Call, Handled, Target};
use crate::RequestError;
use crate::protocol::reply::{Data, append_rows};
use crate::protocol::request::Params;

pub(super) fn get(call: &Call<'_>) -> Handled {
    let (bucket, key) = (call.params.text("bucket")?, call.params.value("key")?);
    let read = Read::of(call, &bucket)?;
    let row = read.bucket(&bucket)?.record(&key, || read.now());
    read.one(row.filter(|row| read.row_filter.as_ref().is_none_or(|filter| filter.matches(row))))
}

pub(super) fn all(call: &Call<'_>) -> Handled {
    let bucket = call.params.text("bucket")?;
    select(call, bucket, Filter::everything())
}

pub(super) fn find(call: &Call<'_>) -> Handled {
    let (bucket, filter) = (call.params.text("bucket")?, filter(call.params)?);
    select(call, bucket, filter)
}

fn select(call: &Call<'_>, bucket: Cow<'_, str>, filter: Filter) -> Handled {
    let read = Read::of(call, &bucket)?;
    let query = read.restrict(matching(bucket, filter));
    read.list(&query.rows(read.bucket(&query.bucket)?, read.now()))
}

pub(super) fn find_one(call: &Call<'_>) -> Handled {
    let (bucket, filter) = (call.params.text("bucket")?, filter(call.params)?);
    let read = Read::of(call, &bucket)?;
    let mut query = read.restrict(matching(bucket, filter));
    query.limit = Some(1);
    let rows = query.rows(read.bucket(&query.bucket)?, read.now());
    read.one(rows.first().copied())
}

pub(super) fn count(call: &Call<'_>) -> Handled {
    let (bucket, filter) = (call.params.text("bucket")?, optional_filter(call.params)?);
    let read = Read::of(call, &bucket)?;
    let query = read.restrict(matching(bucket, filter));
    Ok(Json::from(query.count(read.bucket(&query.bucket)?, read.now())).into())
}

pub(super) fn first(call: &Call<'_>) -> Handled {
    let (bucket, count) = (call.params.text("bucket")?, call.params.count("n")?);
    let read = Read::of(call, &bucket)?;
    read.list(&read.bucket(&bucket)?.first(count, &read.visible(), read.now()))
}

pub(super) fn last(call: &Call<'_>) -> Handled {
    let (bucket, count) = (call.params.text("bucket")?, call.params.count("n")?);
    let read = Read::of(call, &bucket)?;
    read.list(&read.bucket(&bucket)?.last(count, &read.visible(), read.now()))
}

pub(super) fn paginate(call: &Call<'_>) -> Handled {
    let (bucket, limit) = (call.params.text("bucket")?, call.params.count("limit")?);
    // A cursor of null is a cursor: no record has that key, so the page is empty.
    let after = call.params.raw("after").map(|_| call.params.value("after").unwrap_or_default());
    let read = Read::of(call, &bucket)?;
    let page = read.bucket(&bucket)?.page(after.as_ref(), limit, &read.visible(), read.now());
    let size = read.size_of(&page.rows)?;
    let data = Data::written(size + 64, |out| {
        out.extend_from_slice(b"{\"records\":");
        append_rows(out, page.rows.iter().copied());
        out.extend_from_slice(if page.has_more { b",\"hasMore\":true" } else { b",\"hasMore\":false" });
        if let Some(cursor) = page.next_cursor {
            out.extend_from_slice(b",\"nextCursor\":");
            out.extend_from_slice(cursor.as_bytes());
        }
        out.push(b'}');
    });
    read.bounded(data)
}

pub(super) fn sum(call: &Call<'_>) -> Handled {
    aggregate(call, "sum")
}

pub(super) fn avg(call: &Call<'_>) -> Handled {
    aggregate(call, "avg")
}

pub(super) fn min(call: &Call<'_>) -> Handled {
    aggregate(call, "min")
}

pub(super) fn max(call: &Call<'_>) -> Handled {
    aggregate(call, "max")
}

fn aggregate(call: &Call<'_>, function: &str) -> Handled {
    let params = call.params;
    let (bucket, field, filter) = (params.text("bucket")?, params.text("field")?, optional_filter(params)?);
    let config = json!({"bucket": bucket, "aggregate": {"function": function, "field": field}});
    let mut query = Query::parse(&config, &Map::new()).map_err(RequestError::invalid)?;
    query.filter = filter;
    let read = Read::of(call, &bucket)?;
    let (has_value, data) = read.answer(query)?;
    if has_value { read.bounded(data) } else { Ok(Data::text("null").into()) }
}

pub(super) fn query(call: &Call<'_>) -> Handled {
    let params = call.params;
    let mut config = Map::new();
    for name in ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"] {
        if params.given(name).is_some() {
            config.insert(name.to_owned(), params.value(name)?);
        }
    }
    let bucket = params.text("bucket")?;
    let query = Query::parse(&Json::Object(config), &query_params(params)?).map_err(RequestError::invalid)?;
    let read = Read::of(call, &bucket)?;
    let (_, data) = read.answer(query)?;
    read.bounded(data)
}

/// A read of one bucket, in one snapshot.
struct Read<'a> {
    call: &'a Call<'a>,
    snapshot: Arc<Snapshot>,
    /// The rows that the caller may see; none for all.
    row_filter: Option<Filter>,
}

impl<'a> Read<'a> {
    /// Admits a call that reads this bucket.
    fn of(call: &'a Call<'a>, bucket: &str) -> Result<Self, RequestError> {
        let row_filter = call.admit_to(Target::Bucket(bucket))?;
        Ok(Self { call, snapshot: call.server.store.snapshot(), row_filter })
    }

    fn bucket(&self, name: &str) -> Result<&Bucket, RequestError> {
        Ok(self.snapshot.state.bucket(name)?)
    }

    fn now(&self) -> u64 {
        self.call.server.store.now()
    }

    fn max_bytes(&self) -> usize {
        self.call.server.options.max_result_bytes
    }

    /// A filter that matches the rows that the caller may see.
    fn visible(&self) -> Cow<'_, Filter> {
        self.row_filter.as_ref().map_or_else(|| Cow::Owned(Filter::everything()), Cow::Borrowed)
    }

    fn restrict(&self, query: Query) -> Query {
        match &self.row_filter {
            Some(filter) => query.restrict(filter),
            None => query,
        }
    }

    /// The answer of a query, and whether there is any: the least or greatest of no numbers is none.
    fn answer(&self, query: Query) -> Result<(bool, Data), RequestError> {
        let query = self.restrict(query);
        let bucket = self.bucket(&query.bucket)?;
        let mut written = Ok(false);
        let data = Data::written(256, |out| {
            let max = out.len().saturating_add(self.max_bytes());
            written = query.write_answer_within(bucket, self.now(), out, max);
        });
        let has_value = written.map_err(|_| RequestError::too_large(self.max_bytes()))?;
        Ok((has_value, data))
    }

    fn one(&self, row: Option<&Row>) -> Handled {
        self.bounded(row.map_or_else(|| Data::text("null"), |row| Data::Row(row.clone())))
    }

    fn list(&self, rows: &[&Row]) -> Handled {
        let size = self.size_of(rows)?;
        Ok(Answer::Now(Data::written(size, |out| append_rows(out, rows.iter().copied()))))
    }

    /// The size of a list of rows, unless it is too large.
    fn size_of(&self, rows: &[&Row]) -> Result<usize, RequestError> {
        let size = rows.iter().map(|row| row.text_bytes().len() + 1).sum::<usize>() + 1;
        if size > self.max_bytes() { Err(RequestError::too_large(self.max_bytes())) } else { Ok(size) }
    }

    fn bounded(&self, data: Data) -> Handled {
        data.within(self.max_bytes()).map(Answer::Now)
    }
}

fn matching(bucket: Cow<'_, str>, filter: Filter) -> Query {
    let mut query = Query::all(bucket);
    query.filter = filter;
    query
}

fn filter(params: &Params<'_>) -> Result<Filter, RequestError> {
    let json = Json::Object(params.object("filter")?);
    // Outside of queries a string such as "{{ params.x }}" is only a string.
    Filter::parse_with(&json, &Parameters::new()).map_err(RequestError::invalid)
}

fn optional_filter(params: &Params<'_>) -> Result<Filter, RequestError> {
    if params.given("filter").is_some() { filter(params) } else { Ok(Filter::everything()) }
}

/// The parameters of a query. Anything but an object holds no parameter.
pub(super) fn query_params(params: &Params<'_>) -> Result<Map<String, Json>, RequestError> {
    match params.given("params") {
        Some(text) if text.starts_with('{') => params.object("params"),
        _ => Ok(Map::new()),
    }
}
