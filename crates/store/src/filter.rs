//! Filters: which rows are meant.
//!
//! A filter comes as JSON and is checked once, whole, with all its parameters in place; then it is asked of rows, many times.
//! The language is the same wherever records are chosen: queries, counts, aggregates, transactions, permissions.

use std::cmp::Ordering;

use serde_json::{Map, Value as Json};

use crate::{Field, Row, Value};

/// Which rows are meant.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter {
    /// Those for which all of these hold; without any, every row.
    All(Vec<Filter>),
    /// Those for which one of these holds; without any, no row.
    Any(Vec<Filter>),
    /// Those whose field passes a test.
    Test(Field, Test),
}

/// What is asked of a field. Null is a value, and an absent field is none.
#[derive(Debug, Clone, PartialEq)]
pub enum Test {
    /// It equals this, strictly.
    Equal(Scalar),
    /// It does not; an absent field does not either.
    NotEqual(Scalar),
    /// It is of the same type and comes before or after this one.
    Order(Comparison, Scalar),
    /// It equals one of these.
    In(Vec<Scalar>),
    /// It equals none of these.
    NotIn(Vec<Scalar>),
    /// It is a string that contains this one, whatever the case of either. Kept in lower case.
    Contains(String),
    /// It is a string that begins with this one.
    StartsWith(String),
    /// It is a string that ends with this one.
    EndsWith(String),
    /// It is there and not null, or the opposite.
    Exists(bool),
    /// It is of the same type as both, and neither before the first nor after the second.
    Between(Scalar, Scalar),
}

/// How a value is to stand to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// After it.
    Greater,
    /// After it, or equal.
    GreaterOrEqual,
    /// Before it.
    Less,
    /// Before it, or equal.
    LessOrEqual,
}

impl Comparison {
    fn holds(self, ordering: Ordering) -> bool {
        match self {
            Self::Greater => ordering.is_gt(),
            Self::GreaterOrEqual => ordering.is_ge(),
            Self::Less => ordering.is_lt(),
            Self::LessOrEqual => ordering.is_le(),
        }
    }
}

/// What a field is compared with. An array or object equals nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalar(Json);

impl Scalar {
    pub(crate) fn new(json: Json) -> Self {
        Self(json)
    }

    /// As rows hold it; none if it is an array or object.
    pub fn value(&self) -> Option<Value<'_>> {
        Value::of_json(&self.0)
    }

    fn equals(&self, value: Option<&Value<'_>>) -> bool {
        self.value().zip(value).is_some_and(|(own, value)| own.strictly_equals(value))
    }

    fn order(&self, value: Option<&Value<'_>>) -> Option<Ordering> {
        value?.compare(&self.value()?)
    }
}

/// What is wrong with a filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// It is not an object.
    #[error("a filter must be an object, and {at} is not")]
    NotAnObject {
        /// Where.
        at: String,
    },
    /// It has an operator that does not exist.
    #[error("unknown operator {operator} in {at}")]
    UnknownOperator {
        /// What it is called.
        operator: String,
        /// Where.
        at: String,
    },
    /// An operator has an operand that it cannot have.
    #[error("{operator} in {at} takes {expected}")]
    Operand {
        /// The operator.
        operator: &'static str,
        /// Where.
        at: String,
        /// What it takes.
        expected: &'static str,
    },
    /// A parameter has no value.
    #[error("the parameter {name} is not given")]
    MissingParameter {
        /// What it is called.
        name: String,
    },
    /// It is nested too deeply.
    #[error("a filter may be nested {max} deep, and this one is deeper")]
    TooDeep {
        /// How deep it may be.
        max: usize,
    },
    /// It has too many conditions.
    #[error("a filter may have {max} conditions, and this one has more")]
    TooLarge {
        /// How many it may have.
        max: usize,
    },
}

impl Filter {
    /// How deep filters may be nested.
    pub const MAX_DEPTH: usize = 32;
    /// How many conditions and operands a filter may have.
    pub const MAX_CONDITIONS: usize = 10_000;

    /// Every row.
    pub fn everything() -> Self {
        Self::All(Vec::new())
    }

    /// The filter that JSON describes. A string that is exactly `{{ params.x }}` stands for the parameter `x`, with its type.
    pub fn parse(json: &Json, params: &Map<String, Json>) -> Result<Self, FilterError> {
        Parser { params, left: Self::MAX_CONDITIONS }.filter(json, "the filter", 0)
    }

    /// Whether a row is meant.
    pub fn matches(&self, row: &Row) -> bool {
        match self {
            Self::All(filters) => filters.iter().all(|filter| filter.matches(row)),
            Self::Any(filters) => filters.iter().any(|filter| filter.matches(row)),
            Self::Test(field, test) => test.passes(row.get(field).as_ref()),
        }
    }

    /// Both this and another one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::All(mut one), Self::All(two)) => {
                one.extend(two);
                Self::All(one)
            }
            (Self::All(mut all), other) | (other, Self::All(mut all)) => {
                all.push(other);
                Self::All(all)
            }
            (one, two) => Self::All(vec![one, two]),
        }
    }
}

impl Test {
    /// Whether a value passes; none is that of an absent field.
    pub fn passes(&self, value: Option<&Value<'_>>) -> bool {
        let text = || match value {
            Some(Value::String(text)) => Some(&**text),
            _ => None,
        };
        match self {
            Self::Equal(scalar) => scalar.equals(value),
            Self::NotEqual(scalar) => !scalar.equals(value),
            Self::Order(comparison, scalar) => scalar.order(value).is_some_and(|order| comparison.holds(order)),
            Self::In(scalars) => scalars.iter().any(|scalar| scalar.equals(value)),
            Self::NotIn(scalars) => !scalars.iter().any(|scalar| scalar.equals(value)),
            Self::Contains(part) => text().is_some_and(|text| text.to_lowercase().contains(&**part)),
            Self::StartsWith(part) => text().is_some_and(|text| text.starts_with(&**part)),
            Self::EndsWith(part) => text().is_some_and(|text| text.ends_with(&**part)),
            Self::Exists(wanted) => !matches!(value, None | Some(Value::Null)) == *wanted,
            Self::Between(low, high) => {
                low.order(value).is_some_and(Ordering::is_ge) && high.order(value).is_some_and(Ordering::is_le)
            }
        }
    }
}

struct Parser<'a> {
    params: &'a Map<String, Json>,
    /// How many more conditions there may be.
    left: usize,
}

impl Parser<'_> {
    fn spend(&mut self) -> Result<(), FilterError> {
        self.left = self.left.checked_sub(1).ok_or(FilterError::TooLarge { max: Filter::MAX_CONDITIONS })?;
        Ok(())
    }

    fn filter(&mut self, json: &Json, at: &str, depth: usize) -> Result<Filter, FilterError> {
        if depth > Filter::MAX_DEPTH {
            return Err(FilterError::TooDeep { max: Filter::MAX_DEPTH });
        }
        let members = json.as_object().ok_or_else(|| FilterError::NotAnObject { at: at.to_owned() })?;
        let mut all = Vec::new();
        for (name, value) in members {
            match name.as_str() {
                "$or" => all.push(Filter::Any(self.filters("$or", value, at, depth)?)),
                "$and" => all.push(Filter::All(self.filters("$and", value, at, depth)?)),
                _ if name.starts_with('$') => {
                    return Err(FilterError::UnknownOperator { operator: name.clone(), at: at.to_owned() });
                }
                _ => self.field(name, value, &mut all)?,
            }
        }
        Ok(match <[Filter; 1]>::try_from(all) {
            Ok([only]) => only,
            Err(all) => Filter::All(all),
        })
    }

    fn filters(
        &mut self,
        operator: &'static str,
        json: &Json,
        at: &str,
        depth: usize,
    ) -> Result<Vec<Filter>, FilterError> {
        let wrong = || FilterError::Operand { operator, at: at.to_owned(), expected: "a list of filters" };
        let list = json.as_array().ok_or_else(wrong)?;
        let mut filters = Vec::with_capacity(list.len().min(16));
        for (place, filter) in list.iter().enumerate() {
            self.spend()?;
            filters.push(self.filter(filter, &format!("{operator}[{place}]"), depth + 1)?);
        }
        Ok(filters)
    }

    fn field(&mut self, name: &str, json: &Json, all: &mut Vec<Filter>) -> Result<(), FilterError> {
        let operators = json
            .as_object()
            .filter(|members| !members.is_empty() && members.keys().all(|operator| operator.starts_with('$')));
        let Some(operators) = operators else {
            self.spend()?;
            all.push(Filter::Test(Field::new(name), Test::Equal(self.scalar(json)?)));
            return Ok(());
        };
        for (operator, operand) in operators {
            self.spend()?;
            all.push(Filter::Test(Field::new(name), self.test(name, operator, operand)?));
        }
        Ok(())
    }

    fn test(&mut self, field: &str, operator: &str, operand: &Json) -> Result<Test, FilterError> {
        let order = |comparison, scalar| Ok(Test::Order(comparison, scalar));
        match operator {
            "$eq" => Ok(Test::Equal(self.scalar(operand)?)),
            "$neq" => Ok(Test::NotEqual(self.scalar(operand)?)),
            "$gt" => order(Comparison::Greater, self.scalar(operand)?),
            "$gte" => order(Comparison::GreaterOrEqual, self.scalar(operand)?),
            "$lt" => order(Comparison::Less, self.scalar(operand)?),
            "$lte" => order(Comparison::LessOrEqual, self.scalar(operand)?),
            "$in" => Ok(Test::In(self.scalars("$in", field, operand)?)),
            "$nin" => Ok(Test::NotIn(self.scalars("$nin", field, operand)?)),
            "$contains" => Ok(Test::Contains(self.text("$contains", field, operand)?.to_lowercase())),
            "$startsWith" => Ok(Test::StartsWith(self.text("$startsWith", field, operand)?)),
            "$endsWith" => Ok(Test::EndsWith(self.text("$endsWith", field, operand)?)),
            "$exists" => match self.scalar(operand)?.0 {
                Json::Bool(wanted) => Ok(Test::Exists(wanted)),
                _ => Err(wrong("$exists", field, "true or false")),
            },
            "$between" => match <[Scalar; 2]>::try_from(self.scalars("$between", field, operand)?) {
                Ok([low, high]) => Ok(Test::Between(low, high)),
                Err(_) => Err(wrong("$between", field, "a list of two values")),
            },
            _ => Err(FilterError::UnknownOperator { operator: operator.to_owned(), at: field.to_owned() }),
        }
    }

    fn text(&self, operator: &'static str, field: &str, operand: &Json) -> Result<String, FilterError> {
        match self.scalar(operand)?.0 {
            Json::String(text) => Ok(text),
            _ => Err(wrong(operator, field, "a string")),
        }
    }

    fn scalars(&mut self, operator: &'static str, field: &str, operand: &Json) -> Result<Vec<Scalar>, FilterError> {
        // The whole list may be a parameter.
        let Scalar(Json::Array(list)) = self.scalar(operand)? else {
            return Err(wrong(operator, field, "a list of values"));
        };
        list.iter()
            .map(|value| {
                self.spend()?;
                self.scalar(value)
            })
            .collect()
    }

    /// A value, with its parameter in place if it is one.
    fn scalar(&self, json: &Json) -> Result<Scalar, FilterError> {
        let Some(name) = json.as_str().and_then(parameter) else { return Ok(Scalar(json.clone())) };
        let value = self.params.get(name);
        value.cloned().map(Scalar).ok_or_else(|| FilterError::MissingParameter { name: name.to_owned() })
    }
}

fn wrong(operator: &'static str, field: &str, expected: &'static str) -> FilterError {
    FilterError::Operand { operator, at: field.to_owned(), expected }
}

/// The parameter that a string stands for, if it is exactly one.
fn parameter(text: &str) -> Option<&str> {
    let name = text.strip_prefix("{{")?.strip_suffix("}}")?.trim().strip_prefix("params.")?;
    (!name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '{' || c == '}')).then_some(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    fn parse(json: &Json) -> Result<Filter, FilterError> {
        Filter::parse(json, &Map::new())
    }

    #[test]
    fn every_operator_means_what_it_says() {
        let record = json!({"n": 5, "s": "High Tide", "b": true, "z": null, "a": [1], "o": {"x": 1}});
        let row = row(&record);
        for (filter, expected) in [
            (json!({}), true),
            (json!({"n": 5}), true),
            (json!({"n": 5.0, "b": true}), true),
            (json!({"n": 5, "b": false}), false),
            (json!({"n": "5"}), false),
            // A stored null, and not an absent field.
            (json!({"z": null}), true),
            (json!({"absent": null}), false),
            (json!({"z": {"$exists": false}, "absent": {"$exists": false}, "a": {"$exists": true}}), true),
            // Arrays and objects equal nothing, not even themselves.
            (json!({"a": [1]}), false),
            (json!({"o": {"x": 1}}), false),
            (json!({"a": {"$neq": [1]}}), true),
            (json!({"n": {"$gt": 4, "$lt": 6}}), true),
            (json!({"n": {"$gte": 5, "$lte": 5}}), true),
            (json!({"n": {"$gt": 5}}), false),
            (json!({"n": {"$gt": "4"}}), false),
            (json!({"z": {"$lt": 1}}), false),
            (json!({"absent": {"$lt": 1}}), false),
            (json!({"s": {"$gt": "High"}}), true),
            (json!({"n": {"$in": [1, 5]}}), true),
            (json!({"n": {"$in": []}}), false),
            (json!({"n": {"$nin": [1, 2]}, "absent": {"$nin": [1]}}), true),
            (json!({"absent": {"$neq": 1}}), true),
            (json!({"s": {"$contains": "TIDE"}}), true),
            (json!({"s": {"$contains": "low"}}), false),
            (json!({"n": {"$contains": "5"}}), false),
            (json!({"s": {"$startsWith": "High"}}), true),
            (json!({"s": {"$startsWith": "high"}}), false),
            (json!({"s": {"$endsWith": "Tide"}}), true),
            (json!({"n": {"$between": [5, 6]}}), true),
            (json!({"n": {"$between": [6, 9]}}), false),
            (json!({"$or": [{"n": 1}, {"n": 5}]}), true),
            (json!({"$or": []}), false),
            (json!({"$and": [{"n": 5}, {"$or": [{"b": false}, {"s": {"$endsWith": "e"}}]}]}), true),
            (json!({"n": 5, "$or": [{"b": false}]}), false),
            // Not all of its keys begin with `$`: a plain object, which equals nothing.
            (json!({"n": {"$gt": 1, "x": 2}}), false),
            (json!({"n": {}}), false),
        ] {
            assert_eq!(parse(&filter).unwrap().matches(&row), expected, "{filter}");
        }
    }

    #[test]
    fn parameters_keep_their_type_wherever_they_stand() {
        let params = json!({"n": 5, "list": [5, 6], "flag": true});
        let params = params.as_object().unwrap();
        let row = row(&json!({"n": 5, "text": "{{ params.n }} "}));
        for filter in [
            json!({"n": "{{ params.n }}"}),
            json!({"n": {"$gte": "{{params.n}}"}}),
            json!({"n": {"$in": "{{ params.list }}"}}),
            json!({"n": {"$in": [1, "{{ params.n }}"]}}),
            json!({"n": {"$exists": "{{ params.flag }}"}}),
            // Not exactly a parameter.
            json!({"text": "{{ params.n }} "}),
        ] {
            assert!(Filter::parse(&filter, params).unwrap().matches(&row), "{filter}");
        }
        let missing = Filter::parse(&json!({"n": "{{ params.x }}"}), params);
        assert_eq!(missing, Err(FilterError::MissingParameter { name: "x".to_owned() }));
    }

    #[test]
    fn wrong_filters_say_what_is_wrong() {
        for (filter, error) in [
            (json!([]), "a filter must be an object, and the filter is not"),
            (json!({"$or": {}}), "$or in the filter takes a list of filters"),
            (json!({"$or": [1]}), "a filter must be an object, and $or[0] is not"),
            (json!({"$not": []}), "unknown operator $not in the filter"),
            (json!({"n": {"$regex": "x"}}), "unknown operator $regex in n"),
            (json!({"n": {"$in": 1}}), "$in in n takes a list of values"),
            (json!({"n": {"$between": [1]}}), "$between in n takes a list of two values"),
            (json!({"n": {"$exists": 1}}), "$exists in n takes true or false"),
            (json!({"n": {"$contains": 1}}), "$contains in n takes a string"),
        ] {
            assert_eq!(parse(&filter).unwrap_err().to_string(), error, "{filter}");
        }
        let mut deep = json!({});
        for _ in 0..100 {
            deep = json!({"$or": [deep]});
        }
        assert_eq!(parse(&deep), Err(FilterError::TooDeep { max: Filter::MAX_DEPTH }));
        let large = json!({"n": {"$in": vec![0; 20_000]}});
        assert_eq!(parse(&large), Err(FilterError::TooLarge { max: Filter::MAX_CONDITIONS }));
    }
}
