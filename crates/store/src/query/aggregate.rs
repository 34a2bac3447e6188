//! Aggregates over records.

use std::collections::hash_map::Entry;

use serde_json::{Map, Number, Value as Json};

use super::QueryError;
use super::parse::{expected, names};
use crate::budget::{CONDITION_WORK, RECORD_WORK};
use crate::query::{Budget, Exceeded, IndexKey, Sum};
use crate::{Direction, Field, Query, Row, Value};

/// Memory of a group without its key: the result, the sums and the table entry.
const GROUP_BYTES: usize = 512;
/// Work of creating a group.
const NEW_GROUP_WORK: usize = 2000;
/// Work per byte of parsing JSON, and the approximate memory of the parsed tree per byte.
const PARSE_FACTOR: usize = 4;

/// A value that is computed from all records that match, or from each group of them.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Aggregate {
    /// The function.
    pub function: AggregateFunction,
    /// The field whose values are aggregated. `None` counts records.
    pub field: Option<Field>,
    /// The fields that records are grouped by. Default: none, so the result is one value.
    pub group_by: Vec<Field>,
}

/// The function of an [`Aggregate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AggregateFunction {
    /// The number of records, or of values other than null.
    Count,
    /// The sum of the numbers.
    Sum,
    /// The mean of the numbers, or zero without numbers.
    Avg,
    /// The smallest number.
    Min,
    /// The largest number.
    Max,
}

impl Aggregate {
    /// Creates an aggregate that counts records.
    pub fn count() -> Self {
        Self { function: AggregateFunction::Count, field: None, group_by: Vec::new() }
    }

    /// Creates an aggregate that counts the records in which a field has a value other than null.
    pub fn count_of(field: impl Into<String>) -> Self {
        Self { field: Some(Field::new(field)), ..Self::count() }
    }

    /// Creates an aggregate that adds the numbers of a field.
    pub fn sum(field: impl Into<String>) -> Self {
        Self { function: AggregateFunction::Sum, ..Self::count_of(field) }
    }

    /// Creates an aggregate that computes the mean of the numbers of a field.
    pub fn avg(field: impl Into<String>) -> Self {
        Self { function: AggregateFunction::Avg, ..Self::count_of(field) }
    }

    /// Creates an aggregate that finds the smallest number of a field.
    pub fn min(field: impl Into<String>) -> Self {
        Self { function: AggregateFunction::Min, ..Self::count_of(field) }
    }

    /// Creates an aggregate that finds the largest number of a field.
    pub fn max(field: impl Into<String>) -> Self {
        Self { function: AggregateFunction::Max, ..Self::count_of(field) }
    }

    /// Sets [`group_by`](#structfield.group_by).
    #[must_use]
    pub fn group_by(mut self, fields: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.group_by = fields.into_iter().map(Field::new).collect();
        self
    }

    pub(super) fn parse(json: &Json) -> Result<Self, QueryError> {
        let members = json.as_object().ok_or(expected("aggregate", "an object"))?;
        if let Some(option) = members.keys().find(|name| !["function", "field", "groupBy"].contains(&name.as_str())) {
            return Err(QueryError::UnknownOption { option: format!("aggregate.{option}") });
        }
        let function = match members.get("function").and_then(Json::as_str) {
            Some("count") => AggregateFunction::Count,
            Some("sum") => AggregateFunction::Sum,
            Some("avg") => AggregateFunction::Avg,
            Some("min") => AggregateFunction::Min,
            Some("max") => AggregateFunction::Max,
            _ => return Err(expected("aggregate.function", "count, sum, avg, min or max")),
        };
        let field = match members.get("field").filter(|field| !field.is_null()) {
            Some(Json::String(name)) => Some(Field::new(name)),
            None if function == AggregateFunction::Count => None,
            _ => return Err(expected("aggregate.field", "the name of a field")),
        };
        let group_by = match members.get("groupBy").filter(|fields| !fields.is_null()) {
            None => Vec::new(),
            Some(Json::String(name)) => vec![Field::new(name)],
            Some(list) => names(list, "aggregate.groupBy")?.into_iter().map(Field::new).collect(),
        };
        if group_by.len() > Query::MAX_GROUP_BY {
            return Err(expected("aggregate.groupBy", "a list of at most 32 field names"));
        }
        Ok(Self { function, field, group_by })
    }

    /// Returns whether the result is the number of matching records, which an index can provide.
    pub(super) fn is_plain_count(&self) -> bool {
        self.function == AggregateFunction::Count && self.field.is_none() && self.group_by.is_empty()
    }

    /// Returns the field of an ungrouped `min` or `max`, and the sort direction in which the result comes first.
    pub(super) fn min_or_max(&self) -> Option<(&Field, Direction)> {
        let direction = match self.function {
            AggregateFunction::Min => Direction::Asc,
            AggregateFunction::Max => Direction::Desc,
            _ => return None,
        };
        self.field.as_ref().filter(|_| self.group_by.is_empty()).map(|field| (field, direction))
    }

    /// Returns the key of a record's group.
    pub fn group_of(&self, row: &Row) -> IndexKey {
        let mut key = IndexKey::new();
        for field in &self.group_by {
            let value = row.get(field);
            key.push(value.as_ref());
            // Index keys do not distinguish arrays and objects, so their canonical text is added.
            if let Some(Value::Array(text) | Value::Object(text)) = value {
                let mut json: Json = serde_json::from_str(text).unwrap_or_default();
                json.sort_all_objects();
                key.push(Some(&Value::String(json.to_string().into())));
            }
        }
        key
    }

    /// Computes the aggregate of these records. Returns `None` for the minimum or maximum of no numbers.
    pub(super) fn of<'a>(
        &self,
        rows: impl Iterator<Item = Result<&'a Row, Exceeded>>,
        budget: &Budget,
    ) -> Result<Option<Json>, Exceeded> {
        if self.group_by.is_empty() {
            let mut tally = Tally::default();
            for row in rows {
                tally.add(row?, self.field.as_ref(), budget)?;
            }
            return Ok(tally.result(self.function));
        }
        // Groups are in the order of their first records.
        let mut groups: Vec<(Map<String, Json>, Tally)> = Vec::new();
        let mut indexes = std::collections::HashMap::new();
        for row in rows {
            let row = row?;
            let text = |field: &Field| row.text_of(field).map_or(0, str::len);
            let bytes = self.group_by.iter().map(text).sum::<usize>();
            budget.charge(self.group_by.len() * (CONDITION_WORK + row.member_count()) + bytes * PARSE_FACTOR)?;
            let index = match indexes.entry(self.group_of(row)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(vacant) => {
                    let member = |field: &Field| {
                        let value = row.text_of(field).and_then(|text| serde_json::from_str(text).ok());
                        (field.name().to_owned(), value.unwrap_or_default())
                    };
                    // The key is stored twice, as a key and as parsed JSON.
                    budget.charge(NEW_GROUP_WORK)?;
                    budget.hold(GROUP_BYTES + vacant.key().memory() + bytes * PARSE_FACTOR)?;
                    groups.push((self.group_by.iter().map(member).collect(), Tally::default()));
                    *vacant.insert(groups.len() - 1)
                }
            };
            groups[index].1.add(row, self.field.as_ref(), budget)?;
        }
        let groups = groups.into_iter().map(|(key, tally)| {
            let value = tally.result(self.function).unwrap_or_default();
            Json::Object(Map::from_iter([("key".to_owned(), Json::Object(key)), ("value".to_owned(), value)]))
        });
        Ok(Some(groups.collect()))
    }
}

/// The intermediate result of an aggregate.
#[derive(Debug, Default)]
struct Tally {
    rows: u64,
    numbers: u32,
    sum: Sum,
    least: Option<f64>,
    greatest: Option<f64>,
}

impl Tally {
    fn add(&mut self, row: &Row, field: Option<&Field>, budget: &Budget) -> Result<(), Exceeded> {
        budget.charge(RECORD_WORK + field.map_or(0, |_| CONDITION_WORK + row.member_count()))?;
        let value = field.and_then(|field| row.get(field));
        if field.is_none() || !matches!(value, None | Some(Value::Null)) {
            self.rows += 1;
        }
        let Some(Value::Number(number)) = value else { return Ok(()) };
        self.numbers = self.numbers.saturating_add(1);
        self.sum.add(number);
        self.least = Some(self.least.map_or(number, |least| least.min(number)));
        self.greatest = Some(self.greatest.map_or(number, |greatest| greatest.max(number)));
        Ok(())
    }

    fn result(&self, function: AggregateFunction) -> Option<Json> {
        let sum = self.sum.total();
        match function {
            AggregateFunction::Count => Some(Json::from(self.rows)),
            AggregateFunction::Sum => Some(json(sum)),
            AggregateFunction::Avg if self.numbers == 0 => Some(json(0.0)),
            AggregateFunction::Avg => Some(json(sum / f64::from(self.numbers))),
            AggregateFunction::Min => self.least.map(json),
            AggregateFunction::Max => self.greatest.map(json),
        }
    }
}

/// Converts a number to JSON: integers without a fraction, infinity as null.
fn json(number: f64) -> Json {
    #[expect(clippy::cast_possible_truncation, reason = "an integer below 2^53 is exact")]
    if number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0 {
        return Json::from(number as i64);
    }
    Number::from_f64(number).map_or(Json::Null, Json::Number)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn compute(aggregate: &Json, rows: &[Json]) -> Option<Json> {
        let rows: Vec<Row> = rows.iter().map(|row| Row::new(row.as_object().unwrap()).unwrap()).collect();
        Aggregate::parse(aggregate).unwrap().of(rows.iter().map(Ok), &Budget::unlimited()).unwrap()
    }

    #[test]
    fn functions_compute_expected_values() {
        let rows = [json!({"n": 1}), json!({"n": 2.5}), json!({"n": "3"}), json!({"n": null}), json!({})];
        let of = |function: &str| compute(&json!({"function": function, "field": "n"}), &rows);
        assert_eq!(of("count"), Some(json!(3)));
        assert_eq!(compute(&json!({"function": "count"}), &rows), Some(json!(5)));
        assert_eq!((of("sum"), of("avg")), (Some(json!(3.5)), Some(json!(1.75))));
        assert_eq!((of("min"), of("max")), (Some(json!(1)), Some(json!(2.5))));
        let nothing = |function: &str| compute(&json!({"function": function, "field": "x"}), &rows);
        assert_eq!((nothing("sum"), nothing("avg"), nothing("min")), (Some(json!(0)), Some(json!(0)), None));
    }

    #[test]
    fn integers_are_summed_exactly() {
        let rows: Vec<Json> = (0..1000).map(|_| json!({"n": 9_007_199_254_740_991_i64})).collect();
        let zeroed: Vec<Json> =
            rows.iter().cloned().chain((0..1000).map(|_| json!({"n": -9_007_199_254_740_991_i64}))).collect();
        assert_eq!(compute(&json!({"function": "sum", "field": "n"}), &zeroed), Some(json!(0)));
    }

    #[test]
    fn arrays_and_objects_form_groups() {
        let rows = [json!({"g": [1]}), json!({"g": [2]}), json!({"g": "[1]"}), json!({"g": null}), json!({"g": [1]})];
        let counts = compute(&json!({"function": "count", "groupBy": ["g"]}), &rows).unwrap();
        let expected = json!([
            {"key": {"g": [1]}, "value": 2}, {"key": {"g": [2]}, "value": 1}, {"key": {"g": "[1]"}, "value": 1},
            {"key": {"g": null}, "value": 1},
        ]);
        assert_eq!(counts, expected);
    }

    #[test]
    fn sum_of_floats_does_not_depend_on_order() {
        let sum = |numbers: &[f64]| {
            let rows: Vec<Json> = numbers.iter().map(|number| json!({"n": number})).collect();
            compute(&json!({"function": "sum", "field": "n"}), &rows)
        };
        assert_eq!(sum(&[0.1; 10]), Some(json!(1)));
        assert_eq!(sum(&[1e300, 0.25, -1e300]), Some(json!(0.25)));
        assert_eq!(sum(&[0.25, -1e300, 1e300]), Some(json!(0.25)));
    }

    #[test]
    fn groups_are_in_the_order_of_their_first_records() {
        let rows = [json!({"g": "b", "n": 1}), json!({"g": "a", "n": 2}), json!({"n": 3}), json!({"g": "b", "n": 4})];
        let sums = compute(&json!({"function": "sum", "field": "n", "groupBy": "g"}), &rows).unwrap();
        let expected = json!([
            {"key": {"g": "b"}, "value": 5}, {"key": {"g": "a"}, "value": 2}, {"key": {"g": null}, "value": 3},
        ]);
        assert_eq!(sums, expected);
    }
}
