//! Values of rows: slices of JSON text, read without parsing a tree.

use std::borrow::Cow;
use std::cmp::Ordering;

/// A JSON value that borrows from the text of a row.
///
/// Numbers are 64-bit floats, so integers are exact up to 2^53. Filters compare scalars, so arrays and objects are not equal to any
/// value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// Any number.
    Number(f64),
    /// A string, unescaped.
    String(Cow<'a, str>),
    /// An array, as text.
    Array(&'a str),
    /// An object, as text.
    Object(&'a str),
}

impl<'a> Value<'a> {
    /// Reads a value from compact, valid JSON text.
    pub(crate) fn of_text(text: &'a str) -> Self {
        match text.as_bytes() {
            [b'"', .., b'"'] => Self::String(unescape(&text[1..text.len() - 1])),
            [b'{', ..] => Self::Object(text),
            [b'[', ..] => Self::Array(text),
            b"true" => Self::Bool(true),
            b"false" => Self::Bool(false),
            // Rows have valid JSON, so this is a number or `null`.
            _ => text.parse().map_or(Self::Null, Self::Number),
        }
    }

    /// Converts a parsed value. Returns `None` for an array or object.
    pub(crate) fn of_json(json: &'a serde_json::Value) -> Option<Self> {
        Some(match json {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(flag) => Self::Bool(*flag),
            serde_json::Value::Number(number) => Self::Number(number.as_f64()?),
            serde_json::Value::String(text) => Self::String(Cow::Borrowed(text)),
            serde_json::Value::Array(_) | serde_json::Value::Object(_) => return None,
        })
    }

    /// Returns whether two values are equal in a filter: both have the same type, and are not an array or object.
    #[expect(clippy::float_cmp, reason = "the numbers were parsed, not computed")]
    pub(crate) fn strictly_equals(&self, other: &Value<'_>) -> bool {
        match (self, other) {
            (Self::Null, Value::Null) => true,
            (Self::Bool(one), Value::Bool(two)) => one == two,
            (Self::Number(one), Value::Number(two)) => one == two,
            (Self::String(one), Value::String(two)) => one == two,
            _ => false,
        }
    }

    /// Compares two numbers or two strings, as the comparison operators do. Returns `None` for other types.
    pub fn compare(&self, other: &Value<'_>) -> Option<Ordering> {
        match (self, other) {
            (Self::Number(one), Value::Number(two)) => one.partial_cmp(two),
            (Self::String(one), Value::String(two)) => Some(one.cmp(two)),
            _ => None,
        }
    }

    /// Compares two values in the sort order: booleans, numbers, strings, then arrays and objects, which are all equal. The caller
    /// handles `Null`, which comes last in both directions.
    #[cfg(test)]
    pub(crate) fn sort_order(&self, other: &Value<'_>) -> Ordering {
        fn rank(value: &Value<'_>) -> u8 {
            match value {
                Value::Null => 0,
                Value::Bool(_) => 1,
                Value::Number(_) => 2,
                Value::String(_) => 3,
                Value::Array(_) | Value::Object(_) => 4,
            }
        }
        match (self, other) {
            (Self::Bool(one), Value::Bool(two)) => one.cmp(two),
            _ => self.compare(other).unwrap_or_else(|| rank(self).cmp(&rank(other))),
        }
    }
}

/// Unescapes a string literal. Borrows if it has no escapes.
fn unescape(literal: &str) -> Cow<'_, str> {
    if !literal.contains('\\') {
        return Cow::Borrowed(literal);
    }
    // Rows have valid JSON, so the fallback is never used.
    let unescaped = serde_json::from_str::<String>(&format!("\"{literal}\""));
    unescaped.map_or(Cow::Borrowed(literal), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_from_text() {
        let string = |text: &'static str| Value::String(Cow::Borrowed(text));
        for (text, value) in [
            ("null", Value::Null),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("-0.5e3", Value::Number(-500.0)),
            ("\"\"", string("")),
            ("\"tide\"", string("tide")),
            (r#""a\"b\u00e9\n""#, string("a\"bé\n")),
            ("[1]", Value::Array("[1]")),
            ("{}", Value::Object("{}")),
        ] {
            assert_eq!(Value::of_text(text), value, "{text}");
        }
    }

    #[test]
    fn equality_is_strict_and_limited_to_scalars() {
        let one = Value::of_text("1");
        assert!(one.strictly_equals(&Value::of_text("1.0")));
        assert!(!one.strictly_equals(&Value::of_text("\"1\"")));
        assert!(!Value::of_text("[]").strictly_equals(&Value::of_text("[]")));
        assert!(Value::Null.strictly_equals(&Value::Null));
    }

    #[test]
    fn comparison_requires_the_same_type() {
        assert_eq!(Value::of_text("2").compare(&Value::of_text("10")), Some(Ordering::Less));
        assert_eq!(Value::of_text("\"2\"").compare(&Value::of_text("\"10\"")), Some(Ordering::Greater));
        assert_eq!(Value::of_text("2").compare(&Value::of_text("\"10\"")), None);
        assert_eq!(Value::Null.compare(&Value::Null), None);
        assert_eq!(Value::of_text("true").compare(&Value::of_text("false")), None);
    }
}
