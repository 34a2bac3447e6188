//! Takes comments out of definitions. A bucket may have a field that is called `comment`, so who does it must know where keys are
//! names and where they are options.

use serde_json::{Map, Value as Json};

const COMMENT: &str = "comment";

/// Of a bucket: beside its options, beside those of its fields, and texts among its fields.
pub(super) fn of_bucket(config: &mut Map<String, Json>) {
    config.shift_remove(COMMENT);
    if let Some(schema) = config.get_mut("schema") {
        of_fields(schema);
    }
}

/// Of a query: beside its options. Its filter and sort are made of names of fields.
pub(super) fn of_query(config: &mut Map<String, Json>) {
    config.shift_remove(COMMENT);
    if let Some(Json::Object(aggregate)) = config.get_mut("aggregate") {
        aggregate.shift_remove(COMMENT);
    }
}

fn of_fields(fields: &mut Json) {
    let Json::Object(fields) = fields else { return };
    if fields.get(COMMENT).is_some_and(Json::is_string) {
        fields.shift_remove(COMMENT);
    }
    fields.values_mut().for_each(of_field);
}

fn of_field(rule: &mut Json) {
    let Json::Object(options) = rule else { return };
    options.shift_remove(COMMENT);
    if let Some(properties) = options.get_mut("properties") {
        of_fields(properties);
    }
    if let Some(items) = options.get_mut("items") {
        of_field(items);
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
    fn options_have_comments_and_fields_keep_their_names() {
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
        assert_eq!(stripped(of_bucket, bucket), expected);
        let named = json!({"key": "comment", "schema": {"comment": field}});
        assert_eq!(stripped(of_bucket, named.clone()), named);
    }

    #[test]
    fn filters_and_sorts_keep_fields_of_that_name() {
        let query = json!({
            "comment": 1, "bucket": "b", "filter": {"comment": "x"}, "sort": {"comment": "asc"},
            "aggregate": {"comment": "?", "function": "count"},
        });
        let expected = json!({
            "bucket": "b", "filter": {"comment": "x"}, "sort": {"comment": "asc"}, "aggregate": {"function": "count"},
        });
        assert_eq!(stripped(of_query, query), expected);
    }
}
