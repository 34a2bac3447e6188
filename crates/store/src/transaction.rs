//! Transactions: several operations that are all done, or none of them.
//!
//! They run one after the other on one draft, so each sees the effects of those before it, and no reader sees any effect before
//! all have succeeded.

use serde_json::{Map, Value as Json, json};

use crate::query::FilterError;
use crate::{Draft, Filter, Query, Row, StoreError};

/// One operation of a transaction.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Operation {
    /// The bucket.
    pub bucket: String,
    /// What to do there.
    pub action: Action,
    /// The version that the record of an update or delete must have, if it is given.
    pub version: Option<u64>,
    /// A filter that restricts the records it may touch.
    pub guard: Option<Filter>,
}

/// What an operation does.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Action {
    /// Reads a record. Returns the record or null.
    Get(Json),
    /// Inserts a record with a new key. Returns the record.
    Insert(Map<String, Json>),
    /// Merges fields into a record. Returns the record.
    Update(Json, Map<String, Json>),
    /// Deletes a record, if it exists.
    Delete(Json),
    /// Reads all records that match. Returns a list.
    Where(Filter),
    /// Reads the first record that matches. Returns the record or null.
    FindOne(Filter),
    /// Counts the records that match.
    Count(Filter),
}

/// Why a transaction was not done.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("operations[{place}]: {problem}")]
#[non_exhaustive]
pub struct TransactionError {
    /// The index of the operation that failed.
    pub place: usize,
    /// Why.
    #[source]
    pub problem: Box<Problem>,
}

/// Why an operation of a transaction failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It is not an operation.
    #[error("{what} must be {expected}")]
    Shape {
        /// The member that is wrong.
        what: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// Its filter is wrong.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A record with this key exists already.
    #[error("a record {key} exists in bucket \"{bucket}\" already")]
    Exists {
        /// The bucket.
        bucket: String,
        /// Its key.
        key: Json,
    },
    /// With what it returns, the results are too long.
    #[error("all results of a transaction together may have {max} bytes")]
    LongResults {
        /// How long they may be.
        max: usize,
    },
    /// The store refused it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl TransactionError {
    fn at(place: usize) -> impl FnOnce(Problem) -> Self {
        move |problem| Self { place, problem: Box::new(problem) }
    }
}

impl Operation {
    /// Parses a list of operations. The error names the first that is wrong.
    pub fn parse_all(json: &Json) -> Result<Vec<Self>, TransactionError> {
        let wrong = Problem::Shape { what: "operations", expected: "a list with something in it" };
        let Some(list) = json.as_array().filter(|list| !list.is_empty()) else {
            return Err(TransactionError::at(0)(wrong));
        };
        let parse = |(place, json)| Self::parse(json).map_err(TransactionError::at(place));
        list.iter().enumerate().map(parse).collect()
    }

    fn parse(json: &Json) -> Result<Self, Problem> {
        let shape = |what, expected| Problem::Shape { what, expected };
        let members = json.as_object().ok_or_else(|| shape("it", "an object"))?;
        let text = |name| members.get(name).and_then(Json::as_str);
        let bucket = text("bucket").filter(|name| !name.is_empty());
        let bucket = bucket.ok_or_else(|| shape("bucket", "the name of one"))?.to_owned();
        let key = || {
            members.get("key").filter(|key| !key.is_null()).cloned().ok_or_else(|| shape("key", "the key of a record"))
        };
        let data = || members.get("data").and_then(Json::as_object).cloned().ok_or_else(|| shape("data", "an object"));
        let version = || match members.get("version").filter(|version| !version.is_null()) {
            None => Ok(None),
            Some(version) => {
                version.as_u64().map(Some).ok_or_else(|| shape("version", "the version of a record: an integer"))
            }
        };
        let filter = |is_required: bool| match members.get("filter").filter(|filter| !filter.is_null()) {
            Some(filter) => Ok(Filter::parse(filter)?),
            None if is_required => Err(shape("filter", "an object")),
            None => Ok(Filter::everything()),
        };
        let action = match text("op") {
            Some("get") => Action::Get(key()?),
            Some("insert") => Action::Insert(data()?),
            Some("update") => Action::Update(key()?, data()?),
            Some("delete") => Action::Delete(key()?),
            Some("where") => Action::Where(filter(true)?),
            Some("findOne") => Action::FindOne(filter(true)?),
            Some("count") => Action::Count(filter(false)?),
            _ => return Err(shape("op", "get, insert, update, delete, where, findOne or count")),
        };
        let version = if matches!(action, Action::Update(..) | Action::Delete(_)) { version()? } else { None };
        Ok(Self { bucket, action, version, guard: None })
    }
}

/// The result of an operation of a transaction. Records are not parsed: the writer has other writes to do.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum OperationResult {
    /// The record that was read, inserted or updated; none if there is none.
    Record(Option<Row>),
    /// The records that match.
    Records(Vec<Row>),
    /// A record was deleted, if it existed.
    Deleted,
    /// The number of records that match.
    Count(usize),
}

impl OperationResult {
    /// The result as JSON.
    pub fn to_json(&self) -> Json {
        match self {
            Self::Record(row) => row.as_ref().map_or(Json::Null, |row| Json::Object(row.to_record())),
            Self::Records(rows) => rows.iter().map(|row| Json::Object(row.to_record())).collect(),
            Self::Deleted => json!({"deleted": true}),
            Self::Count(count) => json!(count),
        }
    }
}

impl Draft {
    /// Runs operations one after the other: all of them, or none. Returns the result of each.
    pub fn transact(&mut self, operations: &[Operation]) -> Result<Vec<OperationResult>, TransactionError> {
        self.transact_within(operations, usize::MAX)
    }

    /// Like [`transact`](Self::transact), with a limit of the bytes of all results. Above it, nothing is done.
    pub fn transact_within(
        &mut self,
        operations: &[Operation],
        max_bytes: usize,
    ) -> Result<Vec<OperationResult>, TransactionError> {
        let mut room = Room { max: self.limits().max_result_bytes.min(max_bytes), taken: 0 };
        self.atomically(|draft| {
            let run = |(place, operation): (usize, &Operation)| {
                let done = match &operation.guard {
                    None => draft.run(operation, &mut room),
                    Some(guard) => draft.guarded(guard, |draft| draft.run(operation, &mut room)),
                };
                done.map_err(TransactionError::at(place))
            };
            operations.iter().enumerate().map(run).collect()
        })
    }

    fn run(&mut self, operation: &Operation, room: &mut Room) -> Result<OperationResult, Problem> {
        let Operation { bucket, action, version, .. } = operation;
        let query = |filter: &Filter, limit| Query { filter: filter.clone(), limit, ..Query::new(bucket) };
        Ok(match action {
            Action::Get(key) => OperationResult::Record(room.take_one(self.get(bucket, key)?)?),
            Action::Insert(record) => {
                // A key that was not given may be another record's as well.
                let record = self.fill(bucket, record.clone())?;
                let key_field = self.bucket(bucket)?.definition().key.clone();
                let exists = |key: &Json| Problem::Exists { bucket: bucket.clone(), key: key.clone() };
                if let Some(given) = record.get(&key_field)
                    && self.get(bucket, given)?.is_some()
                {
                    return Err(exists(given));
                }
                let inserted = self.insert(bucket, record).map_err(|error| match error {
                    // The key of a hidden record. What else is wrong comes first, as if the record were not there.
                    StoreError::NotUnique { source, .. } if source.field == key_field => exists(&source.value),
                    error => error.into(),
                });
                OperationResult::Record(room.take_one(Some(&inserted?))?)
            }
            Action::Update(key, patch) => {
                OperationResult::Record(room.take_one(Some(&self.update(bucket, key, patch.clone(), *version)?))?)
            }
            Action::Delete(key) => {
                self.delete(bucket, key, *version)?;
                OperationResult::Deleted
            }
            Action::Where(filter) => {
                let rows = self.rows(&query(filter, None))?;
                OperationResult::Records(rows.into_iter().map(|row| room.take(row)).collect::<Result<_, _>>()?)
            }
            Action::FindOne(filter) => {
                let first = self.rows(&query(filter, Some(1)))?.pop();
                OperationResult::Record(room.take_one(first)?)
            }
            Action::Count(filter) => OperationResult::Count(self.count(&query(filter, None))?),
        })
    }
}

/// Room for the records that a transaction returns: every operation may return all of a bucket.
struct Room {
    max: usize,
    taken: usize,
}

impl Room {
    /// A row, if there is room for it.
    fn take(&mut self, row: &Row) -> Result<Row, Problem> {
        self.taken = self.taken.saturating_add(row.text_bytes().len());
        if self.taken > self.max {
            return Err(Problem::LongResults { max: self.max });
        }
        Ok(row.clone())
    }

    fn take_one(&mut self, row: Option<&Row>) -> Result<Option<Row>, Problem> {
        row.map(|row| self.take(row)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::State;

    fn draft() -> Draft {
        let mut draft = Draft::new(State::new(), 1000);
        let definition = json!({"key": "id", "schema": {
            "id": {"type": "number"}, "name": {"type": "string", "unique": true}, "n": {"type": "number"},
        }});
        draft.define_bucket("b", &definition).unwrap();
        draft
    }

    fn transact(draft: &mut Draft, operations: &Json) -> Result<Vec<Json>, TransactionError> {
        let results = draft.transact(&Operation::parse_all(operations)?)?;
        Ok(results.iter().map(OperationResult::to_json).collect())
    }

    #[test]
    fn results_above_the_limit_of_the_caller_fail_the_transaction() {
        let mut draft = draft();
        let insert = json!({"op": "insert", "bucket": "b", "data": {"id": 1, "name": "x".repeat(100)}});
        let get = json!({"op": "get", "bucket": "b", "key": 1});
        let operations = Operation::parse_all(&json!([insert, get])).unwrap();
        let error = draft.transact_within(&operations, 300).unwrap_err();
        assert_eq!((error.place, *error.problem), (1, Problem::LongResults { max: 300 }));
        assert_eq!(draft.state().bucket("b").unwrap().len(), 0, "nothing of it was done");
        assert!(draft.transact_within(&operations, 600).is_ok());
    }

    #[test]
    fn a_bucket_without_a_name_is_none() {
        let error = Operation::parse_all(&json!([{"op": "count", "bucket": ""}])).unwrap_err();
        assert_eq!(error.to_string(), "operations[0]: bucket must be the name of one");
    }

    #[test]
    fn each_sees_what_those_before_it_did() {
        let mut draft = draft();
        let results = transact(
            &mut draft,
            &json!([
                {"op": "insert", "bucket": "b", "data": {"id": 1, "n": 1}},
                {"op": "insert", "bucket": "b", "data": {"id": 2, "n": 2}},
                {"op": "update", "bucket": "b", "key": 1, "data": {"n": 5}},
                {"op": "get", "bucket": "b", "key": 1},
                {"op": "where", "bucket": "b", "filter": {"n": {"$gt": 1}}},
                {"op": "delete", "bucket": "b", "key": 2},
                {"op": "delete", "bucket": "b", "key": 2},
                {"op": "findOne", "bucket": "b", "filter": {"id": 2}},
                {"op": "count", "bucket": "b"},
            ]),
        )
        .unwrap();
        assert_eq!((&results[3]["n"], &results[3]["_version"]), (&json!(5), &json!(2)));
        assert_eq!(results[4].as_array().unwrap().len(), 2);
        assert_eq!(results[5..], [json!({"deleted": true}), json!({"deleted": true}), Json::Null, json!(1)]);
    }

    #[test]
    fn what_fails_leaves_nothing_and_is_named() {
        let mut draft = draft();
        draft.insert("b", json!({"id": 1, "name": "a"})).unwrap();
        let first = json!({"op": "insert", "bucket": "b", "data": {"id": 7}});
        for (second, error) in [
            (json!({"op": "insert", "bucket": "b", "data": {"id": 1}}), "a record 1 exists in bucket \"b\" already"),
            (
                json!({"op": "insert", "bucket": "b", "data": {"id": 2, "name": "a"}}),
                "bucket \"b\": a record with name = \"a\" exists already",
            ),
            (json!({"op": "update", "bucket": "b", "key": 9, "data": {}}), "there is no record 9 in bucket \"b\""),
            (json!({"op": "count", "bucket": "x"}), "bucket \"x\" is not defined"),
            (json!({"op": "frob", "bucket": "b"}), "op must be get, insert, update, delete, where, findOne or count"),
            (json!({"op": "get", "bucket": "b"}), "key must be the key of a record"),
            (json!({"op": "where", "bucket": "b"}), "filter must be an object"),
            (json!({"op": "where", "bucket": "b", "filter": {"$x": 1}}), "unknown operator $x in the filter"),
            (json!({"op": "insert", "bucket": "b", "data": []}), "data must be an object"),
            (json!(1), "it must be an object"),
        ] {
            let refused = transact(&mut draft, &json!([first, second])).unwrap_err();
            assert_eq!(refused.to_string(), format!("operations[1]: {error}"));
            assert_eq!(draft.state().bucket("b").unwrap().len(), 1);
        }
        assert!(transact(&mut draft, &json!([])).is_err());
    }
}
