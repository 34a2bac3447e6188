//! Row filters of rules: filters with parameters that are resolved per session.
//!
//! A row filter must never match more rows than its author intended, so it is stricter than the filter of a query. Errors that can be
//! detected without a session are errors of the rule. If a session lacks a value of the filter, the filter matches no row. Null is
//! treated as a missing value, and so are lists and objects where a single value is required: they equal no value, so `$neq` would
//! match every row.

use serde_json::{Map, Value as Json};
use tidewire_store::Filter;
use tidewire_store::query::{Parameters, Scalar, Scalars, Test};

use super::{RuleError, Session};

const ROOT: &str = "session";

/// A checked filter with session parameters.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RowFilter(Json);

impl RowFilter {
    pub(super) fn new(json: Json) -> Result<Self, RuleError> {
        Filter::check_with(&json, &[ROOT])?;
        check_operands(&json)?;
        Ok(Self(json))
    }

    /// Returns the filter with its parameters.
    pub(super) fn json(&self) -> &Json {
        &self.0
    }

    /// Substitutes the values of a session. Returns a filter that matches nothing if a value is missing or of the wrong type.
    pub(super) fn resolve(&self, values: &SessionValues) -> Filter {
        match Filter::parse_with(&self.0, &Parameters::new().with(ROOT, &values.0)) {
            Ok(filter) if is_comparable(&filter) => filter,
            _ => Filter::nothing(),
        }
    }
}

/// The values of a session that row filters can refer to.
pub(super) struct SessionValues(Map<String, Json>);

impl SessionValues {
    pub(super) fn new(session: &Session) -> Self {
        let mut values = Map::new();
        values.insert("userId".to_owned(), session.user_id.clone().into());
        values.insert("roles".to_owned(), session.roles.clone().into());
        values.insert("metadata".to_owned(), Json::Object(without_nulls(&session.metadata)));
        Self(values)
    }
}

/// Removes nulls and lists that contain null, which are treated as missing values.
fn without_nulls(members: &Map<String, Json>) -> Map<String, Json> {
    let kept = members.iter().filter_map(|(name, value)| {
        let value = match value {
            Json::Null => return None,
            Json::Array(list) if list.contains(&Json::Null) => return None,
            Json::Object(inner) => Json::Object(without_nulls(inner)),
            value => value.clone(),
        };
        Some((name.clone(), value))
    });
    kept.collect()
}

/// Returns whether every operand is a value that a field can equal.
fn is_comparable(filter: &Filter) -> bool {
    let one = |scalar: &Scalar| scalar.value().is_some();
    let all = |scalars: &Scalars| scalars.list().iter().all(one);
    match filter {
        Filter::All(filters) | Filter::Any(filters) => filters.iter().all(is_comparable),
        Filter::Test(_, test) => match test {
            Test::Equal(scalar) | Test::NotEqual(scalar) | Test::Order(_, scalar) => one(scalar),
            Test::In(scalars) | Test::NotIn(scalars) => all(scalars),
            Test::Between(low, high) => one(low) && one(high),
            Test::Contains(_) | Test::StartsWith(_) | Test::EndsWith(_) | Test::Exists(_) => true,
        },
    }
}

/// The type of operand that an operator takes.
#[derive(Clone, Copy, PartialEq)]
enum OperandType {
    Value,
    Text,
    Boolean,
    List,
}

/// Checks the operands of a syntactically valid filter.
fn check_operands(filter: &Json) -> Result<(), RuleError> {
    for (name, json) in filter.as_object().into_iter().flatten() {
        if matches!(name.as_str(), "$or" | "$and") {
            json.as_array().into_iter().flatten().try_for_each(check_operands)?;
            continue;
        }
        let tests = json.as_object().filter(|tests| !tests.is_empty() && tests.keys().all(|key| key.starts_with('$')));
        let Some(tests) = tests else {
            check_operand(name, OperandType::Value, json)?;
            continue;
        };
        for (operator, operand) in tests {
            let operand_type = match operator.as_str() {
                "$in" | "$nin" | "$between" => OperandType::List,
                "$contains" | "$startsWith" | "$endsWith" => OperandType::Text,
                "$exists" => OperandType::Boolean,
                _ => OperandType::Value,
            };
            match operand.as_array().filter(|_| operand_type == OperandType::List) {
                Some(list) => list.iter().try_for_each(|value| check_operand(name, OperandType::Value, value))?,
                None => check_operand(name, operand_type, operand)?,
            }
        }
    }
    Ok(())
}

fn check_operand(field: &str, operand_type: OperandType, json: &Json) -> Result<(), RuleError> {
    let text = match json {
        Json::Array(_) | Json::Object(_) => return Err(RuleError::NotComparable { field: field.to_owned() }),
        Json::String(text) if text.contains("{{") => text,
        _ => return Ok(()),
    };
    let mismatch =
        |expected| Err(RuleError::ParameterType { parameter: text.clone(), field: field.to_owned(), expected });
    let name = text.strip_prefix("{{").and_then(|text| text.strip_suffix("}}")).map(str::trim);
    match (name.and_then(|name| name.strip_prefix("session.")), operand_type) {
        (Some("userId"), OperandType::Value | OperandType::Text) | (Some("roles"), OperandType::List) => Ok(()),
        (Some("userId"), OperandType::List) => mismatch("a list such as [VALUE]"),
        (Some("roles"), OperandType::Value) => mismatch("a single value, or $in for a list,"),
        (Some("roles"), OperandType::Text) => mismatch("a string, or $in for a list,"),
        (Some("userId" | "roles"), OperandType::Boolean) => mismatch("true or false"),
        (Some(name), _) if name.strip_prefix("metadata.").is_some_and(is_path) => Ok(()),
        _ => Err(RuleError::UnknownParameter { text: text.clone() }),
    }
}

fn is_path(path: &str) -> bool {
    let is_name = |name: &str| !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '{' || c == '}');
    path.split('.').all(is_name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewire_store::Row;

    use super::*;

    fn session(metadata: &Json) -> Session {
        Session::new("ann", ["member", "editor"]).metadata(metadata.as_object().unwrap().clone())
    }

    fn resolved(filter: Json, metadata: &Json) -> Filter {
        RowFilter::new(filter).unwrap().resolve(&SessionValues::new(&session(metadata)))
    }

    fn matches(filter: &Filter, record: &Json) -> bool {
        filter.matches(&Row::new(record.as_object().unwrap()).unwrap())
    }

    #[test]
    fn parameters_are_resolved_from_the_session() {
        let metadata = json!({"team": 7, "org": {"id": "o"}, "teams": [1, 7], "on": true, "https://a.b/c": 3});
        let record = json!({"owner": "ann", "role": "editor", "team": 7, "org": "o"});
        for filter in [
            json!({"owner": "{{ session.userId }}"}),
            json!({"owner": "{{session.userId}}"}),
            json!({"owner": {"$in": ["{{ session.userId }}", "everybody"]}}),
            json!({"owner": {"$startsWith": "{{ session.userId }}"}}),
            json!({"role": {"$in": "{{ session.roles }}"}}),
            json!({"team": "{{ session.metadata.team }}"}),
            json!({"team": {"$in": "{{ session.metadata.teams }}"}}),
            json!({"team": {"$between": [1, "{{ session.metadata.team }}"]}}),
            json!({"team": {"$exists": "{{ session.metadata.on }}"}}),
            json!({"$or": [{"x": 1}, {"$and": [{"org": "{{ session.metadata.org.id }}"}]}]}),
            json!({"x": {"$neq": "{{ session.metadata.https://a.b/c }}"}}),
        ] {
            let filter = resolved(filter, &metadata);
            assert!(matches(&filter, &record), "{filter:?}");
        }
        let others = json!({"owner": "bob", "role": "owner", "team": 8, "org": "p"});
        assert!(!matches(&resolved(json!({"owner": "{{ session.userId }}"}), &metadata), &others));
        assert!(!matches(&resolved(json!({"role": {"$in": "{{ session.roles }}"}}), &metadata), &others));
    }

    #[test]
    fn missing_value_matches_no_row() {
        let parameter = "{{ session.metadata.org.team }}";
        let filters = [
            json!({"team": parameter}),
            json!({"team": {"$eq": parameter}}),
            json!({"team": {"$neq": parameter}}),
            json!({"team": {"$gt": parameter}}),
            json!({"team": {"$lte": parameter}}),
            json!({"team": {"$in": parameter}}),
            json!({"team": {"$in": [parameter, 1]}}),
            json!({"team": {"$nin": parameter}}),
            json!({"team": {"$nin": [parameter]}}),
            json!({"team": {"$exists": parameter}}),
            json!({"team": {"$contains": parameter}}),
            json!({"team": {"$startsWith": parameter}}),
            json!({"team": {"$endsWith": parameter}}),
            json!({"team": {"$between": parameter}}),
            json!({"team": {"$between": [0, parameter]}}),
            // Not even the alternative without the parameter matches.
            json!({"$or": [{"team": 1}, {"team": {"$neq": parameter}}]}),
        ];
        let without = [
            json!({}),
            json!({"org": null}),
            json!({"org": {}}),
            json!({"org": {"team": null}}),
            json!({"org": {"team": {}}}),
            json!({"org": {"team": {"$gt": 0}}}),
            json!({"org": {"team": [[]]}}),
            json!({"org": {"team": [null]}}),
            json!({"org": {"team": [1, null]}}),
            json!({"org": "team"}),
            json!({"org": ["team"]}),
            json!({"org.team": null}),
        ];
        for (filter, metadata) in filters.iter().flat_map(|filter| without.iter().map(move |one| (filter, one))) {
            assert_eq!(resolved(filter.clone(), metadata), Filter::nothing(), "{filter} {metadata}");
        }
    }

    #[test]
    fn list_instead_of_a_value_matches_no_row() {
        for filter in [
            json!({"team": {"$neq": "{{ session.metadata.team }}"}}),
            json!({"team": {"$nin": ["{{ session.metadata.team }}"]}}),
        ] {
            assert_eq!(resolved(filter.clone(), &json!({"team": [1, 2]})), Filter::nothing());
            let one = resolved(filter, &json!({"team": 1}));
            assert!(matches(&one, &json!({"team": 2})) && !matches(&one, &json!({"team": 1})));
        }
    }

    #[test]
    fn session_values_are_not_interpreted_as_parameters() {
        let metadata = json!({"a": "{{ session.userId }}", "b": ["{{ session.userId }}"]});
        assert!(!matches(&resolved(json!({"o": "{{ session.metadata.a }}"}), &metadata), &json!({"o": "ann"})));
        assert!(!matches(
            &resolved(json!({"o": {"$in": "{{ session.metadata.b }}"}}), &metadata),
            &json!({"o": "ann"})
        ));
    }

    #[test]
    fn invalid_filters_are_errors_when_the_rule_is_created() {
        let unknown = |parameter: &str| {
            format!(
                "unknown parameter {parameter}; use {{{{ session.userId }}}}, {{{{ session.roles }}}} or \
                 {{{{ session.metadata.NAME }}}} as the whole string"
            )
        };
        for filter in [
            json!([]),
            json!({"n": {"$regex": "x"}}),
            json!({"$not": {}}),
            json!({"n": {"$in": 1}}),
            json!({"n": "{{ user.id }}"}),
        ] {
            assert!(matches!(RowFilter::new(filter.clone()), Err(RuleError::Filter(_))), "{filter}");
        }
        for (filter, error) in [
            (json!({"n": "{{ session.user }}"}), unknown("{{ session.user }}")),
            (json!({"n": "{{ session.userId.x }}"}), unknown("{{ session.userId.x }}")),
            (json!({"n": "{{ session.metadata }}"}), unknown("{{ session.metadata }}")),
            (json!({"n": "{{ session.metadata.a..b }}"}), unknown("{{ session.metadata.a..b }}")),
            (json!({"n": "{{ userId }}"}), unknown("{{ userId }}")),
            (json!({"n": {"$neq": "u-{{ session.userId }}"}}), unknown("u-{{ session.userId }}")),
            (json!({"$and": [{"$or": [{"n": {"$nin": [1, "{{ session.x }}"]}}]}]}), unknown("{{ session.x }}")),
            (
                json!({"n": "{{ session.roles }}"}),
                "expected a single value, or $in for a list, for `n`, got {{ session.roles }}".to_owned(),
            ),
            (
                json!({"n": {"$in": "{{ session.userId }}"}}),
                "expected a list such as [VALUE] for `n`, got {{ session.userId }}".to_owned(),
            ),
            (
                json!({"n": {"$exists": "{{ session.userId }}"}}),
                "expected true or false for `n`, got {{ session.userId }}".to_owned(),
            ),
            (json!({"n": [1]}), "expected a string, number, boolean or null for `n`, got a list or object".to_owned()),
            (
                json!({"n": {"$neq": {"x": 1}}}),
                "expected a string, number, boolean or null for `n`, got a list or object".to_owned(),
            ),
            (
                json!({"n": {"$gt": 1, "x": 2}}),
                "expected a string, number, boolean or null for `n`, got a list or object".to_owned(),
            ),
            (
                json!({"n": {"$nin": [[]]}}),
                "expected a string, number, boolean or null for `n`, got a list or object".to_owned(),
            ),
        ] {
            assert_eq!(RowFilter::new(filter.clone()).unwrap_err().to_string(), error, "{filter}");
        }
    }
}
