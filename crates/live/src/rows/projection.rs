//! The fields of a row that are in the result, as JSON text.

use std::collections::HashSet;

use tidewire_store::{Field, Row};

/// The fields of a row that are in the result.
#[derive(Debug)]
pub(crate) struct Projection {
    /// `None` means all fields.
    fields: Option<Box<[ProjectedField]>>,
}

#[derive(Debug)]
struct ProjectedField {
    field: Field,
    /// The name as a JSON string, with a colon.
    encoded_name: Box<str>,
}

impl Projection {
    pub(crate) fn new(fields: Option<&[Field]>) -> Self {
        let fields = fields.map(|fields| {
            let mut known = HashSet::new();
            let named = |field: &Field| {
                let encoded_name = serde_json::Value::from(field.name()).to_string() + ":";
                ProjectedField { field: field.clone(), encoded_name: encoded_name.into() }
            };
            fields.iter().filter(|field| known.insert(*field)).map(named).collect()
        });
        Self { fields }
    }

    /// Returns whether a field is in the result.
    pub(crate) fn includes(&self, name: &str) -> bool {
        self.fields.as_ref().is_none_or(|fields| fields.iter().any(|named| named.field.name() == name))
    }

    /// Appends the projection of a row.
    pub(crate) fn write(&self, row: &Row, text: &mut Vec<u8>) {
        match &self.fields {
            None => text.extend(row.text().as_bytes()),
            Some(fields) => {
                let present =
                    fields.iter().filter_map(|named| Some((&*named.encoded_name, row.text_of(&named.field)?)));
                write(present, text);
            }
        }
    }

    /// Appends all fields of the projection, with null for absent ones.
    pub(crate) fn write_all(&self, row: &Row, text: &mut Vec<u8>) {
        let fields = self.fields.iter().flatten();
        write(fields.map(|named| (&*named.encoded_name, row.text_of(&named.field).unwrap_or("null"))), text);
    }

    /// Returns whether two rows have equal projections.
    pub(crate) fn is_same(&self, one: &Row, two: &Row) -> bool {
        match &self.fields {
            None => is_same(one.text(), two.text()),
            Some(fields) => {
                fields.iter().all(|ProjectedField { field, .. }| match (one.text_of(field), two.text_of(field)) {
                    (Some(one), Some(two)) => is_same(one, two),
                    (one, two) => one.is_none() && two.is_none(),
                })
            }
        }
    }
}

fn write<'a>(members: impl Iterator<Item = (&'a str, &'a str)>, text: &mut Vec<u8>) {
    text.push(b'{');
    for (index, (name, value)) in members.enumerate() {
        if index > 0 {
            text.push(b',');
        }
        text.extend(name.as_bytes());
        text.extend(value.as_bytes());
    }
    text.push(b'}');
}

/// Returns whether two JSON texts without whitespace are equal, ignoring the order of members.
pub(crate) fn is_same(one: &str, two: &str) -> bool {
    let sum = |text: &str| text.bytes().map(u64::from).sum::<u64>();
    let tree = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
    // Reordered members have the same length and the same sum of bytes, so most unequal texts are not parsed.
    one == two || one.len() == two.len() && sum(one) == sum(two) && tree(one) == tree(two)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn row(json: &Json) -> Row {
        Row::new(json.as_object().unwrap()).unwrap()
    }

    #[test]
    fn projection_writes_only_its_fields() {
        let row = row(&json!({"b": [1, {"x": "y"}], "a": "é\"", "c\"": null}));
        let written = |fields: Option<&[&str]>| {
            let fields = fields.map(|names| names.iter().map(|name| Field::new(*name)).collect::<Vec<_>>());
            let mut text = Vec::new();
            Projection::new(fields.as_deref()).write(&row, &mut text);
            String::from_utf8(text).unwrap()
        };
        assert_eq!(written(None), row.text());
        assert_eq!(written(Some(&["c\"", "x", "a", "a"])), r#"{"c\"":null,"a":"é\""}"#);
        assert_eq!(written(Some(&[])), "{}");
    }

    #[test]
    fn order_of_members_is_ignored() {
        let all = Projection::new(None);
        let one = row(&json!({"a": 1, "b": {"c": 1, "d": 2}}));
        assert!(all.is_same(&one, &row(&json!({"b": {"d": 2, "c": 1}, "a": 1}))));
        assert!(!all.is_same(&one, &row(&json!({"b": {"d": 1, "c": 2}, "a": 1}))));
        let some = Projection::new(Some(&[Field::new("b"), Field::new("x")]));
        assert!(some.is_same(&one, &row(&json!({"b": {"d": 2, "c": 1}, "a": 7}))));
        assert!(!some.is_same(&one, &row(&json!({"b": {"d": 2, "c": 1}, "x": null}))));
    }
}
