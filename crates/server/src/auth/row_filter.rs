//! The rows that a rule is about: a filter that speaks of the session.
//!
//! It must never mean more than its author meant. So it is stricter than other filters: what can be known to be wrong is an error
//! when the rule is made, and a session that lacks what the filter speaks of gets no row. That holds for null as for what is
//! missing, and for lists and objects where a single value belongs: they equal nothing, so that `$neq` would let everything pass.

use serde_json::{Map, Value as Json};
use tidewire_store::{Filter, Parameters, Scalar, Scalars, Test};

use super::{RuleError, Session};

const ROOT: &str = "session";

/// A filter that speaks of a session, checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rows(Json);

impl Rows {
    pub(super) fn new(json: Json) -> Result<Self, RuleError> {
        Filter::check_with(&json, &[ROOT])?;
        check(&json)?;
        Ok(Self(json))
    }

    /// Those of a session.
    pub(super) fn of(&self, known: &Known) -> Filter {
        match Filter::parse_with(&self.0, &Parameters::new().with(ROOT, &known.0)) {
            Ok(filter) if is_comparable(&filter) => filter,
            // A value is missing, or is not what its operator takes.
            _ => Filter::nothing(),
        }
    }
}

/// What filters may know about a session.
pub(super) struct Known(Map<String, Json>);

impl Known {
    pub(super) fn new(session: &Session) -> Self {
        let mut known = Map::new();
        known.insert("userId".to_owned(), session.user_id.clone().into());
        known.insert("roles".to_owned(), session.roles.clone().into());
        known.insert("metadata".to_owned(), Json::Object(without_nulls(&session.metadata)));
        Self(known)
    }
}

/// Null says that there is nothing, and is taken for it; so is a list with null in it, which says neither who is in nor who is not.
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

/// Whether everything in it is compared with values that something can equal.
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

/// What an operator takes.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Value,
    Text,
    Flag,
    List,
}

/// Walks a filter that is one, and looks at what fields are compared with.
fn check(filter: &Json) -> Result<(), RuleError> {
    for (name, json) in filter.as_object().into_iter().flatten() {
        if matches!(name.as_str(), "$or" | "$and") {
            json.as_array().into_iter().flatten().try_for_each(check)?;
            continue;
        }
        let tests = json.as_object().filter(|tests| !tests.is_empty() && tests.keys().all(|key| key.starts_with('$')));
        let Some(tests) = tests else {
            check_operand(name, Place::Value, json)?;
            continue;
        };
        for (operator, operand) in tests {
            let place = match operator.as_str() {
                "$in" | "$nin" | "$between" => Place::List,
                "$contains" | "$startsWith" | "$endsWith" => Place::Text,
                "$exists" => Place::Flag,
                _ => Place::Value,
            };
            match operand.as_array().filter(|_| place == Place::List) {
                Some(list) => list.iter().try_for_each(|value| check_operand(name, Place::Value, value))?,
                None => check_operand(name, place, operand)?,
            }
        }
    }
    Ok(())
}

fn check_operand(field: &str, place: Place, json: &Json) -> Result<(), RuleError> {
    let text = match json {
        Json::Array(_) | Json::Object(_) => return Err(RuleError::NotComparable { field: field.to_owned() }),
        Json::String(text) if text.contains("{{") => text,
        _ => return Ok(()),
    };
    let unfit =
        |expected| Err(RuleError::UnfitParameter { parameter: text.clone(), field: field.to_owned(), expected });
    let name = text.strip_prefix("{{").and_then(|text| text.strip_suffix("}}")).map(str::trim);
    match (name.and_then(|name| name.strip_prefix("session.")), place) {
        (Some("userId"), Place::Value | Place::Text) | (Some("roles"), Place::List) => Ok(()),
        (Some("userId"), Place::List) => unfit("a list, and this is one value: put it into brackets"),
        (Some("roles"), Place::Value) => unfit("one value, and this is a list: use $in"),
        (Some("roles"), Place::Text) => unfit("a string, and this is a list: use $in"),
        (Some("userId" | "roles"), Place::Flag) => unfit("true or false"),
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
        let mut session = Session::new("ann", ["member", "editor"]);
        session.metadata = metadata.as_object().unwrap().clone();
        session
    }

    fn rows(filter: Json, metadata: &Json) -> Filter {
        Rows::new(filter).unwrap().of(&Known::new(&session(metadata)))
    }

    fn meant(filter: &Filter, record: &Json) -> bool {
        filter.matches(&Row::new(record.as_object().unwrap()).unwrap())
    }

    #[test]
    fn a_filter_speaks_of_the_session() {
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
            let filter = rows(filter, &metadata);
            assert!(meant(&filter, &record), "{filter:?}");
        }
        let others = json!({"owner": "bob", "role": "owner", "team": 8, "org": "p"});
        assert!(!meant(&rows(json!({"owner": "{{ session.userId }}"}), &metadata), &others));
        assert!(!meant(&rows(json!({"role": {"$in": "{{ session.roles }}"}}), &metadata), &others));
    }

    #[test]
    fn who_lacks_what_it_speaks_of_gets_nothing() {
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
            // Not even what does not speak of it.
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
            assert_eq!(rows(filter.clone(), metadata), Filter::nothing(), "{filter} {metadata}");
        }
    }

    #[test]
    fn a_list_where_one_value_belongs_is_nothing_and_not_everything() {
        for filter in [
            json!({"team": {"$neq": "{{ session.metadata.team }}"}}),
            json!({"team": {"$nin": ["{{ session.metadata.team }}"]}}),
        ] {
            assert_eq!(rows(filter.clone(), &json!({"team": [1, 2]})), Filter::nothing());
            let one = rows(filter, &json!({"team": 1}));
            assert!(meant(&one, &json!({"team": 2})) && !meant(&one, &json!({"team": 1})));
        }
    }

    #[test]
    fn values_of_a_session_are_no_filters() {
        let metadata = json!({"a": "{{ session.userId }}", "b": ["{{ session.userId }}"]});
        assert!(!meant(&rows(json!({"o": "{{ session.metadata.a }}"}), &metadata), &json!({"o": "ann"})));
        assert!(!meant(&rows(json!({"o": {"$in": "{{ session.metadata.b }}"}}), &metadata), &json!({"o": "ann"})));
    }

    #[test]
    fn wrong_filters_are_errors_when_the_rule_is_made() {
        let known = "is no parameter here: there are {{ session.userId }}, {{ session.roles }} and \
                     {{ session.metadata.NAME }}, each the whole of its string";
        for (filter, error) in [
            (json!([]), "a filter must be an object, and the filter is not".to_owned()),
            (json!({"n": {"$regex": "x"}}), "unknown operator $regex in n".to_owned()),
            (json!({"$not": {}}), "unknown operator $not in the filter".to_owned()),
            (json!({"n": {"$in": 1}}), "$in in n takes a list of values".to_owned()),
            (json!({"n": "{{ user.id }}"}), "{{ user.id }} is no parameter here: they begin with session".to_owned()),
            (json!({"n": "{{ session.user }}"}), format!("{{{{ session.user }}}} {known}")),
            (json!({"n": "{{ session.userId.x }}"}), format!("{{{{ session.userId.x }}}} {known}")),
            (json!({"n": "{{ session.metadata }}"}), format!("{{{{ session.metadata }}}} {known}")),
            (json!({"n": "{{ session.metadata.a..b }}"}), format!("{{{{ session.metadata.a..b }}}} {known}")),
            (json!({"n": "{{ userId }}"}), format!("{{{{ userId }}}} {known}")),
            (json!({"n": {"$neq": "u-{{ session.userId }}"}}), format!("u-{{{{ session.userId }}}} {known}")),
            (
                json!({"$and": [{"$or": [{"n": {"$nin": [1, "{{ session.x }}"]}}]}]}),
                format!("{{{{ session.x }}}} {known}"),
            ),
            (
                json!({"n": "{{ session.roles }}"}),
                "n is compared with {{ session.roles }}, where it takes one value, and this is a list: use $in"
                    .to_owned(),
            ),
            (
                json!({"n": {"$in": "{{ session.userId }}"}}),
                "n is compared with {{ session.userId }}, where it takes a list, and this is one value: put it \
                 into brackets"
                    .to_owned(),
            ),
            (
                json!({"n": {"$exists": "{{ session.userId }}"}}),
                "n is compared with {{ session.userId }}, where it takes true or false".to_owned(),
            ),
            (json!({"n": [1]}), "n is compared with a list or object, which equals nothing".to_owned()),
            (json!({"n": {"$neq": {"x": 1}}}), "n is compared with a list or object, which equals nothing".to_owned()),
            (json!({"n": {"$gt": 1, "x": 2}}), "n is compared with a list or object, which equals nothing".to_owned()),
            (json!({"n": {"$nin": [[]]}}), "n is compared with a list or object, which equals nothing".to_owned()),
        ] {
            assert_eq!(Rows::new(filter.clone()).unwrap_err().to_string(), error, "{filter}");
        }
    }
}
