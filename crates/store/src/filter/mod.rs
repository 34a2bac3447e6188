//! Filters: conditions that a row must match.
//!
//! A filter is parsed from JSON and checked once, with the values of its parameters, and then evaluated for many rows. Queries,
//! aggregates, transactions and permissions use the same language.

mod evaluation;
mod json;
mod parameters;
mod parser;
mod scalars;

use std::borrow::Cow;
use std::cmp::Ordering;

use serde_json::{Number, Value as Json};

use self::evaluation::Evaluation;
use self::parameters::ParameterSource;
pub use self::parameters::Parameters;
use self::parser::Parser;
pub use self::scalars::Scalars;
use crate::query::{Budget, Exceeded};
use crate::{Field, Row, Value};

/// A condition on rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter {
    /// All of these filters match. An empty list matches every row.
    All(Vec<Filter>),
    /// At least one of these filters matches. An empty list matches no row.
    Any(Vec<Filter>),
    /// The field passes the test.
    Test(Field, Test),
}

/// A test of a field's value. Null is a value; an absent field has none.
#[derive(Debug, Clone, PartialEq)]
pub enum Test {
    /// The value is strictly equal.
    Equal(Scalar),
    /// The value is not equal, or the field is absent.
    NotEqual(Scalar),
    /// The value has the same type, and the comparison holds.
    Order(Comparison, Scalar),
    /// The value is equal to one of these.
    In(Scalars),
    /// The value is not equal to any of these, or the field is absent.
    NotIn(Scalars),
    /// The value is a string that contains this string, ignoring case. Stored in lower case.
    Contains(String),
    /// The value is a string that begins with this string.
    StartsWith(String),
    /// The value is a string that ends with this string.
    EndsWith(String),
    /// Whether the field is present and not null.
    Exists(bool),
    /// The value has the type of both bounds and is between them, inclusive.
    Between(Scalar, Scalar),
}

/// A comparison operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// `$gt`.
    Greater,
    /// `$gte`.
    GreaterOrEqual,
    /// `$lt`.
    Less,
    /// `$lte`.
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

/// An operand of a test. An array or object is not equal to any value.
#[derive(Debug, Clone, PartialEq)]
pub struct Scalar(Operand);

/// The value of a [`Scalar`]. It takes a third of the memory of [`Json`], because each subscription stores its filter.
#[derive(Debug, Clone, PartialEq)]
enum Operand {
    Null,
    Bool(bool),
    Number(Number),
    String(Box<str>),
    /// An array or object.
    Other(Box<Json>),
}

impl Scalar {
    pub(crate) fn new(json: impl Into<Json>) -> Self {
        Self(match json.into() {
            Json::Null => Operand::Null,
            Json::Bool(flag) => Operand::Bool(flag),
            Json::Number(number) => Operand::Number(number),
            Json::String(text) => Operand::String(text.into()),
            other @ (Json::Array(_) | Json::Object(_)) => Operand::Other(Box::new(other)),
        })
    }

    /// Returns the value, or `None` for an array or object.
    pub fn value(&self) -> Option<Value<'_>> {
        Some(match &self.0 {
            Operand::Null => Value::Null,
            Operand::Bool(flag) => Value::Bool(*flag),
            Operand::Number(number) => Value::Number(number.as_f64()?),
            Operand::String(text) => Value::String(Cow::Borrowed(text)),
            Operand::Other(_) => return None,
        })
    }

    fn equals(&self, value: Option<&Value<'_>>) -> bool {
        self.value().zip(value).is_some_and(|(own, value)| own.strictly_equals(value))
    }

    fn order(&self, value: Option<&Value<'_>>) -> Option<Ordering> {
        value?.compare(&self.value()?)
    }
}

/// An error in a filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// A filter is not an object.
    #[error("{at} must be an object")]
    NotAnObject {
        /// The location in the filter.
        at: String,
    },
    /// The operator does not exist.
    #[error("unknown operator {operator} in {at}")]
    UnknownOperator {
        /// The operator.
        operator: String,
        /// The location in the filter.
        at: String,
    },
    /// The operand of an operator is invalid.
    #[error("{operator} in {at} must be {expected}")]
    Operand {
        /// The operator.
        operator: &'static str,
        /// The location in the filter.
        at: String,
        /// The expected operand.
        expected: &'static str,
    },
    /// A parameter has no value.
    #[error("missing parameter {name}")]
    MissingParameter {
        /// The name of the parameter, with its root.
        name: String,
    },
    /// The root of a parameter is unknown.
    #[error("unknown parameter {{{{ {name} }}}}: expected a name that begins with {known}")]
    UnknownParameter {
        /// The name of the parameter, with its root.
        name: String,
        /// The known roots.
        known: String,
    },
    /// The filter is nested too deeply.
    #[error("the filter is nested more than {max} levels deep")]
    TooDeep {
        /// The limit.
        max: usize,
    },
    /// The filter has too many conditions.
    #[error("the filter has more than {max} conditions")]
    TooLarge {
        /// The limit.
        max: usize,
    },
}

impl Filter {
    /// Limit of the nesting depth.
    pub const MAX_DEPTH: usize = 32;
    /// Limit of the number of conditions and operands.
    pub const MAX_CONDITIONS: usize = 10_000;

    /// Returns a filter that matches every row.
    pub fn everything() -> Self {
        Self::All(Vec::new())
    }

    /// Returns a filter that matches no row.
    pub fn nothing() -> Self {
        Self::Any(Vec::new())
    }

    /// Returns a filter that matches a row if one of these filters does. Without filters, it matches no row.
    ///
    /// ```
    /// use serde_json::json;
    /// use tidewire_store::Filter;
    ///
    /// let rules = [json!({"owner": "mara"}), json!({"public": true})];
    /// let rules = rules.iter().map(|rule| Filter::parse(rule));
    /// let visible = Filter::any_of(rules.collect::<Result<Vec<_>, _>>()?);
    /// assert_eq!(Filter::any_of([visible, Filter::everything()]), Filter::everything());
    /// assert_eq!(Filter::any_of([]), Filter::nothing());
    /// # Ok::<(), tidewire_store::query::FilterError>(())
    /// ```
    pub fn any_of(filters: impl IntoIterator<Item = Self>) -> Self {
        let mut any = Vec::new();
        for filter in filters {
            match filter {
                filter if filter.is_everything() => return Self::everything(),
                Self::Any(filters) => any.extend(filters),
                filter => any.push(filter),
            }
        }
        if any.len() == 1 { any.remove(0) } else { Self::Any(any) }
    }

    /// Returns whether the filter trivially matches every row.
    pub fn is_everything(&self) -> bool {
        match self {
            Self::All(filters) => filters.iter().all(Self::is_everything),
            Self::Any(filters) => filters.iter().any(Self::is_everything),
            Self::Test(..) => false,
        }
    }

    /// Parses a filter without parameters: a string such as `{{ params.x }}` is an ordinary string.
    pub fn parse(json: &Json) -> Result<Self, FilterError> {
        Self::parse_with(json, &Parameters::new())
    }

    /// Parses a filter with parameters. A string that is exactly `{{ params.x }}` is replaced by the value of the parameter, with
    /// its type.
    pub fn parse_with(json: &Json, parameters: &Parameters<'_>) -> Result<Self, FilterError> {
        Parser::new(ParameterSource::Values(parameters)).filter(json, "the filter", 0)
    }

    /// Parses a filter whose `params` have no values yet. A placeholder replaces each parameter.
    pub(crate) fn template(json: &Json) -> Result<Self, FilterError> {
        Parser::new(ParameterSource::Deferred(&["params"])).filter(json, "the filter", 0)
    }

    /// Checks a filter before its parameters have values. The names of the parameters must begin with one of these roots.
    pub fn check_with(json: &Json, roots: &[&str]) -> Result<(), FilterError> {
        Parser::new(ParameterSource::Deferred(roots)).filter(json, "the filter", 0).map(drop)
    }

    /// Returns whether a row matches.
    pub fn matches(&self, row: &Row) -> bool {
        // A budget without limits is not exceeded.
        self.matches_within(row, &Budget::unlimited()).unwrap_or(false)
    }

    /// Returns whether a row matches, within a budget.
    pub fn matches_within(&self, row: &Row, budget: &Budget) -> Result<bool, Exceeded> {
        self.evaluate(&mut Evaluation::new(row, budget))
    }

    fn evaluate<'f>(&'f self, row: &mut Evaluation<'_, 'f>) -> Result<bool, Exceeded> {
        match self {
            Self::All(filters) => {
                for filter in filters {
                    if !filter.evaluate(row)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Self::Any(filters) => {
                for filter in filters {
                    if filter.evaluate(row)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Self::Test(field, test) => row.passes(field, test),
        }
    }

    /// Returns the number of conditions. `$in` counts as one, because it uses binary search.
    pub fn conditions(&self) -> usize {
        match self {
            Self::All(filters) | Self::Any(filters) => filters.iter().map(Self::conditions).sum(),
            Self::Test(..) => 1,
        }
    }

    /// Returns a filter that matches if both filters match.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (everything, other) | (other, everything) if everything.is_everything() => other,
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
    /// Returns whether a value passes the test. `None` stands for an absent field.
    pub fn passes(&self, value: Option<&Value<'_>>) -> bool {
        let text = || match value {
            Some(Value::String(text)) => Some(&**text),
            _ => None,
        };
        match self {
            Self::Equal(scalar) => scalar.equals(value),
            Self::NotEqual(scalar) => !scalar.equals(value),
            Self::Order(comparison, scalar) => scalar.order(value).is_some_and(|order| comparison.holds(order)),
            Self::In(scalars) => scalars.contains(value),
            Self::NotIn(scalars) => !scalars.contains(value),
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    /// Parses a filter with an empty set of `params`.
    fn parse(json: &Json) -> Result<Filter, FilterError> {
        Filter::parse_with(json, &Parameters::from(&serde_json::Map::new()))
    }

    #[test]
    fn operators_match_as_documented() {
        let record = json!({"n": 5, "s": "High Tide", "b": true, "z": null, "a": [1], "o": {"x": 1}});
        let row = row(&record);
        for (filter, expected) in [
            (json!({}), true),
            (json!({"n": 5}), true),
            (json!({"n": 5.0, "b": true}), true),
            (json!({"n": 5, "b": false}), false),
            (json!({"n": "5"}), false),
            // Null equals a stored null, but not an absent field.
            (json!({"z": null}), true),
            (json!({"absent": null}), false),
            (json!({"z": {"$exists": false}, "absent": {"$exists": false}, "a": {"$exists": true}}), true),
            // Arrays and objects are never equal.
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
            // An object with a key that does not begin with `$` is an operand, which is never equal.
            (json!({"n": {"$gt": 1, "x": 2}}), false),
            (json!({"n": {}}), false),
        ] {
            assert_eq!(parse(&filter).unwrap().matches(&row), expected, "{filter}");
        }
    }

    #[test]
    fn parameters_keep_their_type() {
        let params = json!({"n": 5, "list": [5, 6], "flag": true});
        let params = &Parameters::from(params.as_object().unwrap());
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
            assert!(Filter::parse_with(&filter, params).unwrap().matches(&row), "{filter}");
        }
        let missing = Filter::parse_with(&json!({"n": "{{ params.x }}"}), params);
        assert_eq!(missing, Err(FilterError::MissingParameter { name: "params.x".to_owned() }));
    }

    #[test]
    fn parameter_values_are_not_expanded_again() {
        let params = json!({"n": 5, "list": ["{{ params.n }}", "{{ other.n }}"], "test": {"$gt": 0}});
        let params = &Parameters::from(params.as_object().unwrap());
        let parse = |filter: &Json| Filter::parse_with(filter, params).unwrap();
        let in_list = parse(&json!({"v": {"$in": "{{ params.list }}"}}));
        assert!(in_list.matches(&row(&json!({"v": "{{ params.n }}"}))));
        assert!(!in_list.matches(&row(&json!({"v": 5}))));
        assert!(!parse(&json!({"v": "{{ params.test }}"})).matches(&row(&json!({"v": 5}))));
    }

    #[test]
    fn parameters_can_have_other_roots() {
        let session = json!({"userId": 7, "roles": ["a", "b"], "metadata": {"org": {"id": 3}, "a.b": 4}});
        let parameters = Parameters::new().with("session", session.as_object().unwrap());
        let row = row(&json!({"owner": 7, "role": "b", "org": 3, "dotted": 4}));
        for filter in [
            json!({"owner": "{{ session.userId }}"}),
            json!({"role": {"$in": "{{session.roles}}"}}),
            json!({"org": "{{ session.metadata.org.id }}"}),
            json!({"dotted": "{{ session.metadata.a.b }}"}),
        ] {
            assert!(Filter::parse_with(&filter, &parameters).unwrap().matches(&row), "{filter}");
            assert_eq!(Filter::check_with(&filter, &["session"]), Ok(()), "{filter}");
        }
        let name = "session.metadata.team".to_owned();
        let missing = Filter::parse_with(&json!({"n": "{{ session.metadata.team }}"}), &parameters);
        assert_eq!(missing, Err(FilterError::MissingParameter { name }));
        // An unknown root is an error with and without values.
        let foreign = json!({"$or": [{"n": {"$in": ["{{ params.n }}"]}}]});
        let error = "unknown parameter {{ params.n }}: expected a name that begins with session";
        assert_eq!(Filter::parse_with(&foreign, &parameters).unwrap_err().to_string(), error);
        assert_eq!(Filter::check_with(&foreign, &["session"]).unwrap_err().to_string(), error);
    }

    #[test]
    fn malformed_parameter_is_plain_text() {
        for text in ["{{ n }}", "{{ params. }}", "{{ .n }}", "{{ a b.c }}", "{{ {x}.y }}", "x{{ params.n }}", "{{}}"] {
            assert!(parse(&json!({"s": text})).unwrap().matches(&row(&json!({"s": text}))), "{text}");
        }
        // Without parameters, all strings are plain text.
        for text in ["{{ params.n }}", "{{ session.userId }}"] {
            let filter = Filter::parse(&json!({"s": text})).unwrap();
            assert!(filter.matches(&row(&json!({"s": text}))), "{text}");
        }
    }

    #[test]
    fn template_is_checked_without_parameter_values() {
        for filter in [
            json!({"n": "{{ params.n }}", "m": {"$gt": "{{ params.n }}", "$exists": "{{ params.flag }}"}}),
            json!({"n": {"$in": "{{ params.list }}", "$between": "{{ params.range }}"}}),
            json!({"n": {"$between": ["{{ params.low }}", 9]}}),
            json!({"s": {"$contains": "{{ params.s }}", "$startsWith": "{{ params.s }}", "$endsWith": "{{ params.s }}"}}),
        ] {
            assert!(Filter::template(&filter).is_ok(), "{filter}");
            assert!(parse(&filter).is_err(), "{filter}");
        }
    }

    #[test]
    fn filters_are_combined() {
        let of = |json: &Json| parse(json).unwrap();
        let (one, two) = (of(&json!({"a": 1})), of(&json!({"b": 2})));
        let (everything, nothing) = (Filter::everything(), Filter::nothing());
        let rows = [json!({}), json!({"a": 1}), json!({"b": 2}), json!({"a": 1, "b": 2})];
        let matches = |filter: &Filter| rows.iter().map(|json| filter.matches(&row(json))).collect::<Vec<_>>();
        assert_eq!(matches(&one.clone().and(two.clone())), [false, false, false, true]);
        let either = Filter::any_of([one.clone(), two.clone()]);
        assert_eq!(matches(&either), [false, true, true, true]);
        assert_eq!(Filter::any_of([nothing.clone(), one.clone()]), one);
        assert_eq!(Filter::any_of([either.clone(), nothing.clone()]), either);
        assert_eq!(Filter::any_of([one.clone(), everything.clone(), two]), everything);
        assert_eq!(one.clone().and(everything.clone()), one);
        assert_eq!(everything.and(one.clone()), one);
        assert_eq!(matches(&one.and(nothing)), [false; 4]);
    }

    #[test]
    fn invalid_filter_is_rejected_with_a_specific_error() {
        for (filter, error) in [
            (json!([]), "the filter must be an object"),
            (json!({"$or": {}}), "$or in the filter must be a list of filters"),
            (json!({"$or": [1]}), "$or[0] must be an object"),
            (json!({"$not": []}), "unknown operator $not in the filter"),
            (json!({"n": {"$regex": "x"}}), "unknown operator $regex in n"),
            (json!({"n": {"$in": 1}}), "$in in n must be a list of values"),
            (json!({"n": {"$between": [1]}}), "$between in n must be a list of two values"),
            (json!({"n": {"$exists": 1}}), "$exists in n must be true or false"),
            (json!({"n": {"$contains": 1}}), "$contains in n must be a string"),
            (json!({"n": "{{ other.n }}"}), "unknown parameter {{ other.n }}: expected a name that begins with params"),
        ] {
            assert_eq!(parse(&filter).unwrap_err().to_string(), error, "{filter}");
            assert_eq!(Filter::template(&filter).unwrap_err().to_string(), error, "{filter}");
        }
        let mut deep = json!({});
        for _ in 0..100 {
            deep = json!({"$or": [deep]});
        }
        assert_eq!(parse(&deep), Err(FilterError::TooDeep { max: Filter::MAX_DEPTH }));
        assert_eq!(Filter::template(&deep), Err(FilterError::TooDeep { max: Filter::MAX_DEPTH }));
        let large = json!({"n": {"$in": vec![0; 20_000]}});
        assert_eq!(parse(&large), Err(FilterError::TooLarge { max: Filter::MAX_CONDITIONS }));
    }
}
