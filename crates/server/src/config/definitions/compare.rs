//! Whether two definitions say the same, and what of one is lacking to become the other.

use std::fmt;

use serde_json::{Map, Value as Json, json};
use tidewire_store::BucketDefinition;

/// A part in which what is stored and what the file says differ.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Difference {
    /// Which part, with the keys that lead to it.
    pub key: String,
    /// What is stored, if anything.
    pub stored: Option<Json>,
    /// What the file says, if anything.
    pub file: Option<Json>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |json: &Option<Json>| json.as_ref().map_or("nothing".to_owned(), Json::to_string);
        write!(f, "{}: stored is {}, the file says {}", self.key, text(&self.stored), text(&self.file))
    }
}

/// What it takes for a bucket to become another.
#[derive(Debug, PartialEq)]
pub(super) enum Change {
    None,
    /// An update that the store can make.
    Update(Json),
    Impossible(Vec<Difference>),
}

pub(super) fn buckets(stored: &BucketDefinition, wanted: &BucketDefinition) -> Change {
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
    let (old, new) = (schema(stored), schema(wanted));
    for (field, old) in &old {
        diff(&format!("schema.{field}"), Some(old), new.get(field), &mut differences);
    }
    // As they were given, not as they are compared.
    let added: Map<String, Json> = new
        .keys()
        .filter(|field| !old.contains_key(*field))
        .map(|field| (field.clone(), wanted.config["schema"][field.as_str()].clone()))
        .collect();
    if !added.is_empty() {
        updates.insert("addFields".to_owned(), Json::Object(added));
    }

    let gone = stored.indexes.iter().filter(|index| !wanted.indexes.contains(index));
    differences.extend(gone.map(|index| Difference {
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

/// An index as people write it.
fn index_json(fields: &[String]) -> Json {
    match fields {
        [field] => json!(field),
        fields => json!(fields),
    }
}

/// Whether two queries are the same. Of a sort, the order counts.
pub(super) fn are_same_queries(one: &Json, two: &Json) -> bool {
    let sort = |query: &Json| query["sort"].to_string();
    let options = |query: &Json| -> Json {
        let options = query.as_object().into_iter().flatten();
        // Null is as good as nothing.
        let given = options.filter(|(_, value)| !value.is_null());
        Json::Object(given.map(|(option, value)| (option.clone(), value.clone())).collect())
    };
    sort(one) == sort(two) && is_same(&options(one), &options(two))
}

/// The rules of all fields, without what says nothing.
fn schema(definition: &BucketDefinition) -> Map<String, Json> {
    fields(&definition.config["schema"])
}

fn fields(schema: &Json) -> Map<String, Json> {
    let fields = schema.as_object().into_iter().flatten();
    fields.map(|(name, options)| (name.clone(), rule(options))).collect()
}

/// What a field's options say: those that say what is so without them are left out.
fn rule(options: &Json) -> Json {
    let says_something = |(option, value): &(&String, &Json)| match option.as_str() {
        // A null that is filled in is another record than one without the field.
        "default" => true,
        "required" | "unique" => **value == json!(true),
        "onDelete" => !value.is_null() && **value != json!("restrict"),
        _ => !value.is_null(),
    };
    let options = options.as_object().into_iter().flatten().filter(says_something).map(|(option, value)| {
        let value = match option.as_str() {
            "properties" => Json::Object(fields(value)),
            "items" => rule(value),
            _ => value.clone(),
        };
        (option.clone(), value)
    });
    Json::Object(options.collect())
}

/// The smallest parts that differ.
fn diff(key: &str, stored: Option<&Json>, file: Option<&Json>, differences: &mut Vec<Difference>) {
    match (stored, file) {
        (Some(Json::Object(old)), Some(Json::Object(new))) => {
            for (name, value) in old {
                diff(&format!("{key}.{name}"), Some(value), new.get(name), differences);
            }
            for (name, value) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
                diff(&format!("{key}.{name}"), None, Some(value), differences);
            }
        }
        (Some(old), Some(new)) if is_same(old, new) => {}
        (None, None) => {}
        _ => differences.push(Difference { key: key.to_owned(), stored: stored.cloned(), file: file.cloned() }),
    }
}

/// Whether two values are the same. 1 and 1.0 are: formats write numbers in their own way.
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
        buckets(&BucketDefinition::parse(stored).unwrap(), &BucketDefinition::parse(wanted).unwrap())
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
    fn what_is_written_otherwise_is_the_same() {
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
    fn what_can_be_added_is_an_update() {
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
    fn what_cannot_be_is_told_part_by_part() {
        for (wanted, lines) in [
            (with("", "key", json!("age")), &["key: stored is \"id\", the file says \"age\""][..]),
            (with("", "maxSize", json!(5)), &["maxSize: stored is nothing, the file says 5"]),
            (with("", "persistent", json!(false)), &["persistent: stored is true, the file says false"]),
            (with("", "etsType", json!("ordered_set")), &["etsType: stored is \"set\", the file says \"ordered_set\""]),
            (with("", "indexes", json!(["id"])), &["indexes: stored is \"age\", the file says nothing"]),
            (
                with("/schema", "age", json!({"type": "string", "minLength": 2})),
                &[
                    "schema.age.type: stored is \"number\", the file says \"string\"",
                    "schema.age.min: stored is 0, the file says nothing",
                    "schema.age.minLength: stored is nothing, the file says 2",
                ],
            ),
            (
                with("/schema/age", "default", json!(null)),
                &["schema.age.default: stored is nothing, the file says null"],
            ),
            (
                with("/schema/meta", "properties", json!({})),
                &["schema.meta.properties.by: stored is {\"type\":\"string\"}, the file says nothing"],
            ),
        ] {
            let Change::Impossible(differences) = compared(&base(), &wanted) else { panic!("{wanted}") };
            let told: Vec<String> = differences.iter().map(ToString::to_string).collect();
            assert_eq!(told, lines, "{wanted}");
        }
    }

    #[test]
    fn the_order_of_a_sort_makes_another_query() {
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
