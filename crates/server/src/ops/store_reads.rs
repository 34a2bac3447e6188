//! Reads: answered at once, from what the store has published.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Filter, Query, Row, Snapshot, Store, StoreStats};

use crate::RequestError;
use crate::ops::command::Read;
use crate::protocol::reply::{Data, Outcome};

/// What reads look at.
pub(crate) struct Reading<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) store: &'a Store,
    /// Which rows may be seen; all if there is no filter.
    pub(crate) rows: Option<Filter>,
    /// The longest answer.
    pub(crate) max_bytes: usize,
}

impl Reading<'_> {
    pub(crate) fn answer(self, read: Read<'_>) -> Outcome {
        let state = &self.snapshot.state;
        match read {
            Read::Get { bucket, key } => {
                let row = state.bucket(&bucket)?.record(&key, || self.now()).filter(|row| self.may_see(row));
                self.bounded(row.map_or_else(|| Data::text("null"), |row| Data::Row(row.clone())))
            }
            Read::Find { bucket, filter, is_one } => {
                let mut query = Query::all(bucket);
                query.filter = filter;
                query.limit = is_one.then_some(1);
                let query = self.restricted(query);
                let rows = query.rows(state.bucket(&query.bucket)?, self.now());
                if is_one {
                    self.bounded(rows.first().map_or_else(|| Data::text("null"), |row| Data::Row((*row).clone())))
                } else {
                    self.list(&rows)
                }
            }
            Read::Count { bucket, filter } => {
                let mut query = Query::all(bucket);
                query.filter = filter;
                let query = self.restricted(query);
                let count = query.count(state.bucket(&query.bucket)?, self.now());
                Ok(Data::json(&Json::from(count)))
            }
            Read::Some { bucket, count, is_last } => {
                let (bucket, everything) = (state.bucket(&bucket)?, Filter::everything());
                let seen = self.rows.as_ref().unwrap_or(&everything);
                let rows =
                    if is_last { bucket.last(count, seen, self.now()) } else { bucket.first(count, seen, self.now()) };
                self.list(&rows)
            }
            Read::Page { bucket, limit, after } => {
                let (bucket, everything) = (state.bucket(&bucket)?, Filter::everything());
                let seen = self.rows.as_ref().unwrap_or(&everything);
                let page = bucket.page(after.as_ref(), limit, seen, self.now());
                let room = self.room_for(&page.rows)?;
                let data = Data::written(room + 64, |out| {
                    out.extend_from_slice(b"{\"records\":");
                    append_rows(out, &page.rows);
                    out.extend_from_slice(if page.has_more { b",\"hasMore\":true" } else { b",\"hasMore\":false" });
                    if let Some(cursor) = page.next_cursor {
                        out.extend_from_slice(b",\"nextCursor\":");
                        out.extend_from_slice(cursor.as_bytes());
                    }
                    out.push(b'}');
                });
                self.bounded(data)
            }
            Read::Aggregate(query) => {
                let data = self.query(*query)?;
                Ok(if data.len() == 0 { Data::text("null") } else { data })
            }
            Read::Query(query) => self.query(*query),
            Read::Buckets => {
                let names: Vec<&str> = state.names().collect();
                self.bounded(Data::json(&json!({"count": names.len(), "names": names})))
            }
            Read::Schema { name } => {
                let config = &state.bucket(&name)?.definition().config;
                self.bounded(Data::json(&json!({"name": name, "config": config})))
            }
            // These look at more than the data, and are answered by the server.
            Read::Stats | Read::Queries => Ok(Data::text("null")),
        }
    }

    /// What a query returns.
    fn query(&self, query: Query) -> Outcome {
        let query = self.restricted(query);
        let bucket = self.snapshot.state.bucket(&query.bucket)?;
        let mut is_short = true;
        let data = Data::written(256, |out| {
            let max = out.len().saturating_add(self.max_bytes);
            is_short = query.write_answer_within(bucket, self.now(), out, max).is_ok();
        });
        if is_short { self.bounded(data) } else { Err(RequestError::too_large(self.max_bytes)) }
    }

    fn now(&self) -> u64 {
        self.store.now()
    }

    fn may_see(&self, row: &Row) -> bool {
        self.rows.as_ref().is_none_or(|rows| rows.matches(row))
    }

    fn restricted(&self, query: Query) -> Query {
        match &self.rows {
            Some(rows) => query.restrict(rows),
            None => query,
        }
    }

    fn list(&self, rows: &[&Row]) -> Outcome {
        let room = self.room_for(rows)?;
        Ok(Data::written(room, |out| append_rows(out, rows)))
    }

    /// What rows take in a list, if that is not too much.
    fn room_for(&self, rows: &[&Row]) -> Result<usize, RequestError> {
        let room = rows.iter().map(|row| row.text().len() + 1).sum::<usize>() + 1;
        if room > self.max_bytes { Err(RequestError::too_large(self.max_bytes)) } else { Ok(room) }
    }

    fn bounded(&self, data: Data) -> Outcome {
        data.within(self.max_bytes)
    }
}

/// A list of rows, as JSON text.
pub(crate) fn append_rows<'a>(out: &mut Vec<u8>, rows: impl IntoIterator<Item = &'a &'a Row>) {
    out.push(b'[');
    for (place, row) in rows.into_iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        out.extend_from_slice(row.text().as_bytes());
    }
    out.push(b']');
}

/// How the store is, as clients are told.
pub(crate) fn store_stats(name: &str, stats: &StoreStats, programmatic: usize, subscriptions: usize) -> Json {
    let per_bucket = |count: fn(&tidewire_store::BucketStats) -> usize| -> Map<String, Json> {
        stats.buckets.iter().map(|bucket| (bucket.name.clone(), Json::from(count(bucket)))).collect()
    };
    let total = |count: fn(&tidewire_store::BucketStats) -> usize| stats.buckets.iter().map(count).sum::<usize>();
    let names: Vec<&str> = stats.buckets.iter().map(|bucket| bucket.name.as_str()).collect();
    let interval = stats.sweep_interval.map_or(0, |interval| interval.as_millis());
    json!({
        "name": name,
        "buckets": {"count": names.len(), "names": names},
        "records": {"total": total(|bucket| bucket.records), "perBucket": per_bucket(|bucket| bucket.records)},
        "indexes": {"total": total(|bucket| bucket.indexes), "perBucket": per_bucket(|bucket| bucket.indexes)},
        "queries": {"defined": stats.queries + programmatic, "activeSubscriptions": subscriptions},
        "persistence": {"enabled": stats.is_persistent},
        "ttl": {"enabled": stats.sweep_interval.is_some(), "checkIntervalMs": u64::try_from(interval).unwrap_or(u64::MAX)},
    })
}
