//! Removes the key `comment` from definitions, but not fields that are named `comment`.

use serde_json::{Map, Value as Json};

const COMMENT: &str = "comment";

/// Removes the comments of a bucket: from its options, from the options of its fields, and a string from its schema.
pub(super) fn strip_bucket(config: &mut Map<String, Json>) {
    config.shift_remove(COMMENT);
    if let Some(schema) = config.get_mut("schema") {
        strip_fields(schema);
    }
}

/// Removes the comments from the options of a query. Its filter and sort are keyed by field names and are not changed.
pub(super) fn strip_query(config: &mut Map<String, Json>) {
    config.shift_remove(COMMENT);
    if let Some(Json::Object(aggregate)) = config.get_mut("aggregate") {
        aggregate.shift_remove(COMMENT);
    }
}

fn strip_fields(fields: &mut Json) {
    let Json::Object(fields) = fields else { return };
    if fields.get(COMMENT).is_some_and(Json::is_string) {
        fields.shift_remove(COMMENT);
    }
    fields.values_mut().for_each(strip_field);
}

fn strip_field(rule: &mut Json) {
    let Json::Object(options) = rule else { return };
    options.shift_remove(COMMENT);
    if let Some(properties) = options.get_mut("properties") {
        strip_fields(properties);
    }
    if let Some(items) = options.get_mut("items") {
        strip_field(items);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stripped(strip: fn(&mut Map<String, Json>), mut config: Json) -> Json {
        strip(config.as_object_mut().unwrap());
        config
    }

    #[test]
    fn comments_are_removed_but_fields_named_comment_stay() {
        let field = json!({"type": "string"});
        let bucket = json!({
            "comment": "posts", "key": "id",
            "schema": {
                "comment": "what a post has",
                "id": {"type": "string", "comment": ["given", "by us"]},
                "meta": {"type": "object", "properties": {"comment": field, "by": {"type": "string", "comment": 1}}},
                "tags": {"type": "array", "items": {"type": "string", "comment": "lower case"}},
            },
        });
        let expected = json!({
            "key": "id",
            "schema": {
                "id": field,
                "meta": {"type": "object", "properties": {"comment": field, "by": field}},
                "tags": {"type": "array", "items": field},
            },
        });
        assert_eq!(stripped(strip_bucket, bucket), expected);
        let named = json!({"key": "comment", "schema": {"comment": field}});
        assert_eq!(stripped(strip_bucket, named.clone()), named);
    }

    #[test]
    fn filters_and_sorts_keep_fields_named_comment() {
        let query = json!({
            "comment": 1, "bucket": "b", "filter": {"comment": "x"}, "sort": {"comment": "asc"},
            "aggregate": {"comment": "?", "function": "count"},
        });
        let expected = json!({
            "bucket": "b", "filter": {"comment": "x"}, "sort": {"comment": "asc"}, "aggregate": {"function": "count"},
        });
        assert_eq!(stripped(strip_query, query), expected);
    }
}
