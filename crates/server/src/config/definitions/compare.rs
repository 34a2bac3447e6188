//! Compares the stored definition of a bucket or query with that of the file, and computes the update.

use std::fmt;

use serde_json::{Map, Value as Json, json};
use tidewire_store::schema::BucketDefinition;

/// A difference between the stored definition and the file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Difference {
    /// The path of the differing key, such as `schema.name.type`.
    pub key: String,
    /// The stored value, if present.
    pub stored: Option<Json>,
    /// The value of the file, if present.
    pub file: Option<Json>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |json: &Option<Json>| json.as_ref().map_or("absent".to_owned(), Json::to_string);
        write!(f, "{}: stored {}, file {}", self.key, text(&self.stored), text(&self.file))
    }
}

/// The change from a stored bucket definition to that of the file.
#[derive(Debug, PartialEq)]
pub(super) enum Change {
    None,
    /// The argument of `store.updateBucket`.
    Update(Json),
    Impossible(Vec<Difference>),
}

pub(super) fn compare_buckets(stored: &BucketDefinition, wanted: &BucketDefinition) -> Change {
    let mut differences = Vec::new();
    let mut differ = |key: &str, stored: Option<Json>, file: Option<Json>| {
        if stored != file {
            differences.push(Difference { key: key.to_owned(), stored, file });
        }
    };
    let set = |is_ordered: bool| Some(json!(if is_ordered { "ordered_set" } else { "set" }));
    differ("key", Some(json!(stored.key)), Some(json!(wanted.key)));
    differ("etsType", set(stored.ordered), set(wanted.ordered));
    differ("persistent", Some(json!(stored.persistent)), Some(json!(wanted.persistent)));
    differ("maxSize", stored.max_size.map(Json::from), wanted.max_size.map(Json::from));

    let mut updates = Map::new();
    let (old, new) = (normalized_schema(stored), normalized_schema(wanted));
    for (field, old) in &old {
        collect_differences(&format!("schema.{field}"), Some(old), new.get(field), &mut differences);
    }
    // Taken from the file, because the normalized form omits defaults.
    let added: Map<String, Json> = new
        .keys()
        .filter(|field| !old.contains_key(*field))
        .map(|field| (field.clone(), wanted.config["schema"][field.as_str()].clone()))
        .collect();
    if !added.is_empty() {
        updates.insert("addFields".to_owned(), Json::Object(added));
    }

    let removed = stored.indexes.iter().filter(|index| !wanted.indexes.contains(index));
    differences.extend(removed.map(|index| Difference {
        key: "indexes".to_owned(),
        stored: Some(index_json(index)),
        file: None,
    }));
    let added: Vec<Json> =
        wanted.indexes.iter().filter(|index| !stored.indexes.contains(index)).map(|index| index_json(index)).collect();
    if !added.is_empty() {
        updates.insert("addIndexes".to_owned(), Json::Array(added));
    }
    if stored.ttl != wanted.ttl {
        updates.insert("ttl".to_owned(), wanted.config.get("ttl").cloned().unwrap_or_default());
    }

    match (differences.is_empty(), updates.is_empty()) {
        (false, _) => Change::Impossible(differences),
        (true, false) => Change::Update(Json::Object(updates)),
        (true, true) => Change::None,
    }
}

/// Formats an index as in a definition: a single field as a string.
fn index_json(fields: &[String]) -> Json {
    match fields {
        [field] => json!(field),
        fields => json!(fields),
    }
}

/// Returns whether two queries are the same. The order of keys matters only in `sort`.
pub(super) fn are_same_queries(one: &Json, two: &Json) -> bool {
    let sort = |query: &Json| query["sort"].to_string();
    let options = |query: &Json| -> Json {
        let options = query.as_object().into_iter().flatten();
        // A null option is the same as a missing one.
        let given = options.filter(|(_, value)| !value.is_null());
        Json::Object(given.map(|(option, value)| (option.clone(), value.clone())).collect())
    };
    sort(one) == sort(two) && is_same(&options(one), &options(two))
}

/// Returns the normalized options of all fields.
fn normalized_schema(definition: &BucketDefinition) -> Map<String, Json> {
    normalize_fields(&definition.config["schema"])
}

fn normalize_fields(schema: &Json) -> Map<String, Json> {
    let fields = schema.as_object().into_iter().flatten();
    fields.map(|(name, options)| (name.clone(), normalize_field(options))).collect()
}

/// Normalizes the options of a field: options with their default value are omitted.
fn normalize_field(options: &Json) -> Json {
    let is_relevant = |(option, value): &(&String, &Json)| match option.as_str() {
        // A default of null adds the field to a record, so it differs from no default.
        "default" => true,
        "required" | "unique" => **value == json!(true),
        "onDelete" => !value.is_null() && **value != json!("restrict"),
        _ => !value.is_null(),
    };
    let options = options.as_object().into_iter().flatten().filter(is_relevant).map(|(option, value)| {
        let value = match option.as_str() {
            "properties" => Json::Object(normalize_fields(value)),
            "items" => normalize_field(value),
            _ => value.clone(),
        };
        (option.clone(), value)
    });
    Json::Object(options.collect())
}

/// Collects the innermost differences.
fn collect_differences(key: &str, stored: Option<&Json>, file: Option<&Json>, differences: &mut Vec<Difference>) {
    match (stored, file) {
        (Some(Json::Object(old)), Some(Json::Object(new))) => {
            for (name, value) in old {
                collect_differences(&format!("{key}.{name}"), Some(value), new.get(name), differences);
            }
            for (name, value) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
                collect_differences(&format!("{key}.{name}"), None, Some(value), differences);
            }
        }
        (Some(old), Some(new)) if is_same(old, new) => {}
        (None, None) => {}
        _ => differences.push(Difference { key: key.to_owned(), stored: stored.cloned(), file: file.cloned() }),
    }
}

/// Returns whether two values are equal. 1 equals 1.0, because JSON and TOML format numbers differently.
fn is_same(one: &Json, two: &Json) -> bool {
    match (one, two) {
        (Json::Number(one), Json::Number(two)) => one == two || one.as_f64() == two.as_f64(),
        (Json::Array(one), Json::Array(two)) => {
            one.len() == two.len() && one.iter().zip(two).all(|(one, two)| is_same(one, two))
        }
        (Json::Object(one), Json::Object(two)) => {
            one.len() == two.len() && one.iter().all(|(name, one)| two.get(name).is_some_and(|two| is_same(one, two)))
        }
        _ => one == two,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(stored: &Json, wanted: &Json) -> Change {
        compare_buckets(&BucketDefinition::parse(stored).unwrap(), &BucketDefinition::parse(wanted).unwrap())
    }

    fn base() -> Json {
        json!({
            "key": "id", "indexes": ["age"], "ttl": "1h",
            "schema": {
                "id": {"type": "string", "generated": "uuid"},
                "age": {"type": "number", "min": 0},
                "meta": {"type": "object", "properties": {"by": {"type": "string"}}},
            },
        })
    }

    fn with(pointer: &str, key: &str, value: Json) -> Json {
        let mut config = base();
        config.pointer_mut(pointer).unwrap().as_object_mut().unwrap().insert(key.to_owned(), value);
        config
    }

    #[test]
    fn equivalent_definitions_are_no_change() {
        for same in [
            base(),
            with("", "ttl", json!(3_600_000)),
            with("", "indexes", json!([["age"]])),
            with("", "etsType", json!("set")),
            with("", "persistent", json!(true)),
            with("", "maxSize", json!(null)),
            with("/schema/age", "min", json!(0.0)),
            with("/schema/age", "required", json!(false)),
            with("/schema/age", "max", json!(null)),
            with("/schema/meta/properties/by", "unique", json!(false)),
        ] {
            assert_eq!(compared(&base(), &same), Change::None, "{same}");
            assert_eq!(compared(&same, &base()), Change::None, "{same}");
        }
    }

    #[test]
    fn new_fields_new_indexes_and_ttl_are_an_update() {
        let name = json!({"type": "string", "required": null});
        for (wanted, updates) in [
            (with("/schema", "name", name.clone()), json!({"addFields": {"name": name}})),
            (with("", "indexes", json!(["age", ["age", "id"]])), json!({"addIndexes": [["age", "id"]]})),
            (with("", "ttl", json!("2h")), json!({"ttl": "2h"})),
            (with("", "ttl", json!(null)), json!({"ttl": null})),
        ] {
            assert_eq!(compared(&base(), &wanted), Change::Update(updates), "{wanted}");
        }
    }

    #[test]
    fn incompatible_changes_are_listed_by_key() {
        for (wanted, lines) in [
            (with("", "key", json!("age")), &["key: stored \"id\", file \"age\""][..]),
            (with("", "maxSize", json!(5)), &["maxSize: stored absent, file 5"]),
            (with("", "persistent", json!(false)), &["persistent: stored true, file false"]),
            (with("", "etsType", json!("ordered_set")), &["etsType: stored \"set\", file \"ordered_set\""]),
            (with("", "indexes", json!(["id"])), &["indexes: stored \"age\", file absent"]),
            (
                with("/schema", "age", json!({"type": "string", "minLength": 2})),
                &[
                    "schema.age.type: stored \"number\", file \"string\"",
                    "schema.age.min: stored 0, file absent",
                    "schema.age.minLength: stored absent, file 2",
                ],
            ),
            (with("/schema/age", "default", json!(null)), &["schema.age.default: stored absent, file null"]),
            (
                with("/schema/meta", "properties", json!({})),
                &["schema.meta.properties.by: stored {\"type\":\"string\"}, file absent"],
            ),
        ] {
            let Change::Impossible(differences) = compared(&base(), &wanted) else { panic!("{wanted}") };
            let printed: Vec<String> = differences.iter().map(ToString::to_string).collect();
            assert_eq!(printed, lines, "{wanted}");
        }
    }

    #[test]
    fn order_of_sort_keys_matters() {
        let query = |text: &str| serde_json::from_str::<Json>(text).unwrap();
        let one = query(r#"{"bucket": "b", "sort": {"a": "asc", "b": "desc"}, "limit": 3}"#);
        assert!(are_same_queries(
            &one,
            &query(r#"{"limit": 3.0, "filter": null, "sort": {"a": "asc", "b": "desc"}, "bucket": "b"}"#)
        ));
        assert!(!are_same_queries(&one, &query(r#"{"bucket": "b", "sort": {"b": "desc", "a": "asc"}, "limit": 3}"#)));
        assert!(!are_same_queries(&one, &query(r#"{"bucket": "b", "sort": {"a": "asc", "b": "desc"}}"#)));
    }
}
