//! Transactions: lists of operations that take effect together or not at all.
//!
//! The operations run in order on one draft. Each sees the effects of the previous ones. Readers see no effect until all operations
//! have succeeded.

use serde_json::{Map, Value as Json, json};

use crate::query::FilterError;
use crate::{Draft, Filter, Query, Row, StoreError};

/// One operation of a transaction.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Operation {
    /// The bucket.
    pub bucket: String,
    /// The action.
    pub action: Action,
    /// The version that the record of an update or delete must have. `None` accepts any version.
    pub version: Option<u64>,
    /// The filter that records must match to be read or written. `None` permits all records.
    pub row_filter: Option<Filter>,
}

/// The action of an [`Operation`].
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

/// The error of a failed transaction. None of its operations has an effect.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("operations[{index}]: {problem}")]
#[non_exhaustive]
pub struct TransactionError {
    /// The index of the operation that failed.
    pub index: usize,
    /// The error of the operation.
    #[source]
    pub problem: Box<OperationError>,
}

/// The error of a failed operation of a transaction.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// A member of the operation is missing or invalid.
    #[error("{member} must be {expected}")]
    Invalid {
        /// The member.
        member: &'static str,
        /// The expected value.
        expected: &'static str,
    },
    /// The filter is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A record with this key already exists.
    #[error("record {key} already exists in bucket \"{bucket}\"")]
    Exists {
        /// The bucket.
        bucket: String,
        /// The key.
        key: Json,
    },
    /// The results of the transaction are too large.
    #[error("the results of the transaction are larger than {max} bytes")]
    LongResults {
        /// The limit in bytes.
        max: usize,
    },
    /// The store rejected the operation.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl TransactionError {
    fn at(index: usize) -> impl FnOnce(OperationError) -> Self {
        move |problem| Self { index, problem: Box::new(problem) }
    }
}

impl Operation {
    /// Parses a list of operations. The error has the index of the first invalid operation.
    pub fn parse_all(json: &Json) -> Result<Vec<Self>, TransactionError> {
        let wrong = OperationError::Invalid { member: "operations", expected: "a non-empty list" };
        let Some(list) = json.as_array().filter(|list| !list.is_empty()) else {
            return Err(TransactionError::at(0)(wrong));
        };
        let parse = |(index, json)| Self::parse(json).map_err(TransactionError::at(index));
        list.iter().enumerate().map(parse).collect()
    }

    fn parse(json: &Json) -> Result<Self, OperationError> {
        let invalid = |member, expected| OperationError::Invalid { member, expected };
        let members = json.as_object().ok_or_else(|| invalid("an operation", "an object"))?;
        let text = |name| members.get(name).and_then(Json::as_str);
        let bucket = text("bucket").filter(|name| !name.is_empty());
        let bucket = bucket.ok_or_else(|| invalid("bucket", "a non-empty string"))?.to_owned();
        let key = || {
            members
                .get("key")
                .filter(|key| !key.is_null())
                .cloned()
                .ok_or_else(|| invalid("key", "the key of a record"))
        };
        let data =
            || members.get("data").and_then(Json::as_object).cloned().ok_or_else(|| invalid("data", "an object"));
        let version = || match members.get("version").filter(|version| !version.is_null()) {
            None => Ok(None),
            Some(version) => version.as_u64().map(Some).ok_or_else(|| invalid("version", "a non-negative integer")),
        };
        let filter = |is_required: bool| match members.get("filter").filter(|filter| !filter.is_null()) {
            Some(filter) => Ok(Filter::parse(filter)?),
            None if is_required => Err(invalid("filter", "an object")),
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
            _ => return Err(invalid("op", "get, insert, update, delete, where, findOne or count")),
        };
        let version = if matches!(action, Action::Update(..) | Action::Delete(_)) { version()? } else { None };
        Ok(Self { bucket, action, version, row_filter: None })
    }
}

/// The result of an operation of a transaction. Records are rows and not parsed JSON, so that the writer thread does not parse.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum OperationResult {
    /// The record that was read, inserted or updated. `None` if a read found none.
    Record(Option<Row>),
    /// The records that match.
    Records(Vec<Row>),
    /// A record was deleted, if it existed.
    Deleted,
    /// The number of records that match.
    Count(usize),
}

impl OperationResult {
    /// Returns the result as JSON.
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
    /// Runs operations in order. If an operation fails, none of them has an effect. Returns the result of each.
    pub fn transact(&mut self, operations: &[Operation]) -> Result<Vec<OperationResult>, TransactionError> {
        self.transact_within(operations, usize::MAX)
    }

    /// Like [`transact`](Self::transact), with a limit of the bytes of all results. A transaction that exceeds it fails.
    pub fn transact_within(
        &mut self,
        operations: &[Operation],
        max_bytes: usize,
    ) -> Result<Vec<OperationResult>, TransactionError> {
        let mut budget = ResultBudget { max: self.limits().max_result_bytes.min(max_bytes), used: 0 };
        self.atomically(|draft| {
            let run = |(index, operation): (usize, &Operation)| {
                let done = match &operation.row_filter {
                    None => draft.run(operation, &mut budget),
                    Some(filter) => draft.with_row_filter(filter, |draft| draft.run(operation, &mut budget)),
                };
                done.map_err(TransactionError::at(index))
            };
            operations.iter().enumerate().map(run).collect()
        })
    }

    fn run(&mut self, operation: &Operation, budget: &mut ResultBudget) -> Result<OperationResult, OperationError> {
        let Operation { bucket, action, version, .. } = operation;
        let query = |filter: &Filter, limit| Query { filter: filter.clone(), limit, ..Query::new(bucket) };
        Ok(match action {
            Action::Get(key) => OperationResult::Record(budget.charge_one(self.get(bucket, key)?)?),
            Action::Insert(record) => {
                // A generated key or a default may collide with an existing key.
                let record = self.fill(bucket, record.clone())?;
                let key_field = self.bucket(bucket)?.definition().key.clone();
                let exists = |key: &Json| OperationError::Exists { bucket: bucket.clone(), key: key.clone() };
                if let Some(given) = record.get(&key_field)
                    && self.get(bucket, given)?.is_some()
                {
                    return Err(exists(given));
                }
                let inserted = self.insert(bucket, record).map_err(|error| match error {
                    // The key belongs to a record that the row filter hides. Other errors are reported first, so that they do not
                    // reveal the record.
                    StoreError::NotUnique { source, .. } if source.field == key_field => exists(&source.value),
                    error => error.into(),
                });
                OperationResult::Record(budget.charge_one(Some(&inserted?))?)
            }
            Action::Update(key, patch) => OperationResult::Record(budget.charge_one(Some(&self.update(
                bucket,
                key,
                patch.clone(),
                *version,
            )?))?),
            Action::Delete(key) => {
                self.delete(bucket, key, *version)?;
                OperationResult::Deleted
            }
            Action::Where(filter) => {
                let rows = self.rows(&query(filter, None))?;
                OperationResult::Records(rows.into_iter().map(|row| budget.charge(row)).collect::<Result<_, _>>()?)
            }
            Action::FindOne(filter) => {
                let first = self.rows(&query(filter, Some(1)))?.pop();
                OperationResult::Record(budget.charge_one(first)?)
            }
            Action::Count(filter) => OperationResult::Count(self.count(&query(filter, None))?),
        })
    }
}

/// A limit on the bytes of the records that a transaction returns. Without it, each operation could return all records of a bucket.
struct ResultBudget {
    max: usize,
    used: usize,
}

impl ResultBudget {
    /// Charges a row and returns a clone of it.
    fn charge(&mut self, row: &Row) -> Result<Row, OperationError> {
        self.used = self.used.saturating_add(row.text_bytes().len());
        if self.used > self.max {
            return Err(OperationError::LongResults { max: self.max });
        }
        Ok(row.clone())
    }

    fn charge_one(&mut self, row: Option<&Row>) -> Result<Option<Row>, OperationError> {
        row.map(|row| self.charge(row)).transpose()
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
        assert_eq!((error.index, *error.problem), (1, OperationError::LongResults { max: 300 }));
        assert_eq!(draft.state().bucket("b").unwrap().len(), 0, "the insert was undone");
        assert!(draft.transact_within(&operations, 600).is_ok());
    }

    #[test]
    fn empty_bucket_name_is_rejected() {
        let error = Operation::parse_all(&json!([{"op": "count", "bucket": ""}])).unwrap_err();
        assert_eq!(error.to_string(), "operations[0]: bucket must be a non-empty string");
    }

    #[test]
    fn operation_sees_effects_of_earlier_operations() {
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
    fn failed_transaction_has_no_effect_and_reports_the_operation() {
        let mut draft = draft();
        draft.insert("b", json!({"id": 1, "name": "a"})).unwrap();
        let first = json!({"op": "insert", "bucket": "b", "data": {"id": 7}});
        for (second, error) in [
            (json!({"op": "insert", "bucket": "b", "data": {"id": 1}}), "record 1 already exists in bucket \"b\""),
            (
                json!({"op": "insert", "bucket": "b", "data": {"id": 2, "name": "a"}}),
                "bucket \"b\": a record with name = \"a\" already exists",
            ),
            (json!({"op": "update", "bucket": "b", "key": 9, "data": {}}), "record 9 not found in bucket \"b\""),
            (json!({"op": "count", "bucket": "x"}), "bucket \"x\" is not defined"),
            (json!({"op": "frob", "bucket": "b"}), "op must be get, insert, update, delete, where, findOne or count"),
            (json!({"op": "get", "bucket": "b"}), "key must be the key of a record"),
            (json!({"op": "where", "bucket": "b"}), "filter must be an object"),
            (json!({"op": "where", "bucket": "b", "filter": {"$x": 1}}), "unknown operator $x in the filter"),
            (json!({"op": "insert", "bucket": "b", "data": []}), "data must be an object"),
            (json!(1), "an operation must be an object"),
        ] {
            let refused = transact(&mut draft, &json!([first, second])).unwrap_err();
            assert_eq!(refused.to_string(), format!("operations[1]: {error}"));
            assert_eq!(draft.state().bucket("b").unwrap().len(), 1);
        }
        assert!(transact(&mut draft, &json!([])).is_err());
    }
}
