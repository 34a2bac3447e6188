//! Writes: what is done to the store on its writer's thread, and what is replied when it is kept.

use serde_json::{Map, Value as Json, json};
use tidewire_store::{Action, Draft, Filter, Operation as Step, Row, StoreError};

use crate::ops::command::{Change, Once, Write};
use crate::ops::store_reads::append_rows;
use crate::protocol::reply::Data;

/// What came of a write.
#[derive(Debug)]
pub(crate) enum Done {
    Row(Row),
    Rows(Vec<Row>),
    Value(Json),
}

/// Does a write for somebody, who may touch only some rows, and is given so many bytes of them at most.
pub(crate) fn run(
    write: Write,
    user: &str,
    rows: Option<&Filter>,
    max_bytes: usize,
    draft: &mut Draft,
) -> Result<Done, StoreError> {
    let Write { change, once } = write;
    let shown = if once.is_some() { Shown::of(&change, rows) } else { Vec::new() };
    let guarded = |draft: &mut Draft| match rows {
        Some(rows) => draft.guarded(rows, |draft| change.run(max_bytes, draft)),
        None => change.run(max_bytes, draft),
    };
    match once {
        None => guarded(draft),
        Some(Once { key, request }) => {
            let reply = draft.once(user, &key, &request, |draft| guarded(draft).map(Done::into_json))?;
            shown.iter().try_for_each(|shown| shown.check(&reply))?;
            Ok(Done::Value(reply))
        }
    }
}

/// Records in a reply that only some may see. A reply that is given again may be of a time when its user was allowed more.
struct Shown {
    bucket: String,
    rows: Filter,
    /// Where they are in it.
    pointer: String,
}

impl Shown {
    fn of(change: &Change, rows: Option<&Filter>) -> Vec<Self> {
        let shown = |bucket: &str, rows: Option<&Filter>, pointer: String| {
            rows.map(|rows| Self { bucket: bucket.to_owned(), rows: rows.clone(), pointer })
        };
        match change {
            Change::Insert { bucket, .. } | Change::Upsert { bucket, .. } | Change::Update { bucket, .. } => {
                shown(bucket, rows, String::new()).into_iter().collect()
            }
            Change::InsertMany { bucket, .. } => shown(bucket, rows, "/records".to_owned()).into_iter().collect(),
            Change::Transaction(steps) => {
                let has_records = |step: &Step| !matches!(step.action, Action::Delete(_) | Action::Count(_));
                let steps = steps.iter().enumerate().filter(|(_, step)| has_records(step));
                let step = |(place, step): (usize, &Step)| {
                    shown(&step.bucket, step.guard.as_ref(), format!("/results/{place}/data"))
                };
                steps.filter_map(step).collect()
            }
            _ => Vec::new(),
        }
    }

    fn check(&self, reply: &Json) -> Result<(), StoreError> {
        let records = match reply.pointer(&self.pointer) {
            Some(Json::Array(records)) => records,
            Some(record) => std::slice::from_ref(record),
            None => &[],
        };
        let may_see = |record: &Map<String, Json>| Row::new(record).is_ok_and(|row| self.rows.matches(&row));
        if records.iter().filter_map(Json::as_object).all(may_see) {
            Ok(())
        } else {
            Err(StoreError::Forbidden { bucket: self.bucket.clone() })
        }
    }
}

impl Change {
    fn run(self, max_bytes: usize, draft: &mut Draft) -> Result<Done, StoreError> {
        Ok(match self {
            Self::Insert { bucket, data } => Done::Row(draft.insert(&bucket, data)?),
            Self::InsertMany { bucket, data } => Done::Rows(draft.insert_many(&bucket, data)?),
            Self::Upsert { bucket, data } => Done::Row(draft.upsert(&bucket, data)?),
            Self::Update { bucket, key, data, version } => Done::Row(draft.update(&bucket, &key, data, version)?),
            Self::Delete { bucket, key, version } => {
                draft.delete(&bucket, &key, version)?;
                Done::Value(json!({"deleted": true}))
            }
            Self::Clear { bucket } => {
                draft.clear(&bucket)?;
                Done::Value(json!({"cleared": true}))
            }
            Self::Transaction(steps) => {
                let results = draft.transact_within(&steps, max_bytes)?;
                let result = |(index, data)| json!({"index": index, "data": data});
                Done::Value(json!({"results": results.into_iter().enumerate().map(result).collect::<Vec<_>>()}))
            }
            Self::DefineBucket { name, config } => {
                draft.define_bucket(&name, &config)?;
                Done::Value(json!({"name": name, "created": true}))
            }
            Self::DropBucket { name } => {
                draft.drop_bucket(&name)?;
                Done::Value(json!({"name": name, "dropped": true}))
            }
            Self::UpdateBucket { name, updates } => {
                draft.update_bucket(&name, &updates)?;
                Done::Value(json!({"name": name, "updated": true}))
            }
            Self::DefineQuery { name, config } => {
                draft.define_query(&name, &config)?;
                Done::Value(json!({"name": name, "defined": true}))
            }
            Self::UndefineQuery { name } => {
                draft.undefine_query(&name)?;
                Done::Value(json!({"name": name, "undefined": true}))
            }
        })
    }
}

impl Done {
    fn into_json(self) -> Json {
        match self {
            Self::Row(row) => Json::Object(row.to_record()),
            Self::Rows(rows) => {
                let records: Vec<Json> = rows.iter().map(|row| Json::Object(row.to_record())).collect();
                json!({"records": records})
            }
            Self::Value(value) => value,
        }
    }

    /// What is replied.
    pub(crate) fn data(&self) -> Data {
        match self {
            Self::Row(row) => Data::Row(row.clone()),
            Self::Rows(rows) => Data::written(64, |out| {
                let rows: Vec<&Row> = rows.iter().collect();
                out.extend_from_slice(b"{\"records\":");
                append_rows(out, &rows);
                out.push(b'}');
            }),
            Self::Value(value) => Data::json(value),
        }
    }
}
