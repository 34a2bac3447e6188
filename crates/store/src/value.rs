//! Values of rows: slices of JSON text, read without parsing a tree.

use std::borrow::Cow;
use std::cmp::Ordering;

/// A JSON value, where it lies in a row.
///
/// Numbers are what JSON readers everywhere take them for, 64-bit floats: integers are exact up to 2^53. Arrays and objects are
/// told apart, and are never equal to anything: filters look at scalars.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// Any number.
    Number(f64),
    /// A string, without its escapes.
    String(Cow<'a, str>),
    /// An array, as text.
    Array(&'a str),
    /// An object, as text.
    Object(&'a str),
}

impl<'a> Value<'a> {
    /// The value of compact, valid JSON text.
    pub(crate) fn of_text(text: &'a str) -> Self {
        match text.as_bytes() {
            [b'"', .., b'"'] => Self::String(unescape(&text[1..text.len() - 1])),
            [b'{', ..] => Self::Object(text),
            [b'[', ..] => Self::Array(text),
            b"true" => Self::Bool(true),
            b"false" => Self::Bool(false),
            // Rows hold valid JSON, in which all that is left but `null` are numbers.
            _ => text.parse().map_or(Self::Null, Self::Number),
        }
    }

    /// The value of a parsed one.
    pub(crate) fn of_json(json: &'a serde_json::Value) -> Option<Self> {
        Some(match json {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(flag) => Self::Bool(*flag),
            serde_json::Value::Number(number) => Self::Number(number.as_f64()?),
            serde_json::Value::String(text) => Self::String(Cow::Borrowed(text)),
            serde_json::Value::Array(_) | serde_json::Value::Object(_) => return None,
        })
    }

    /// Whether it equals another one as filters mean it: of the same type, and no array or object.
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

    /// How it compares to another one in order tests, which hold between two numbers or two strings only.
    pub fn compare(&self, other: &Value<'_>) -> Option<Ordering> {
        match (self, other) {
            (Self::Number(one), Value::Number(two)) => one.partial_cmp(two),
            (Self::String(one), Value::String(two)) => Some(one.cmp(two)),
            _ => None,
        }
    }

    /// In which order results are sorted: booleans, numbers, strings, then what has no order of its own, in which all are alike.
    /// `Null` is for the caller to place, since it comes last in both directions.
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

/// The text of a string literal, which borrows if it has no escapes.
fn unescape(literal: &str) -> Cow<'_, str> {
    if !literal.contains('\\') {
        return Cow::Borrowed(literal);
    }
    // Rows hold valid JSON; were it not, the literal would stand for itself.
    let unescaped = serde_json::from_str::<String>(&format!("\"{literal}\""));
    unescaped.map_or(Cow::Borrowed(literal), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_what_it_says() {
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
    fn equality_is_strict_and_only_of_scalars() {
        let one = Value::of_text("1");
        assert!(one.strictly_equals(&Value::of_text("1.0")));
        assert!(!one.strictly_equals(&Value::of_text("\"1\"")));
        assert!(!Value::of_text("[]").strictly_equals(&Value::of_text("[]")));
        assert!(Value::Null.strictly_equals(&Value::Null));
    }

    #[test]
    fn order_tests_hold_within_a_type() {
        assert_eq!(Value::of_text("2").compare(&Value::of_text("10")), Some(Ordering::Less));
        assert_eq!(Value::of_text("\"2\"").compare(&Value::of_text("\"10\"")), Some(Ordering::Greater));
        assert_eq!(Value::of_text("2").compare(&Value::of_text("\"10\"")), None);
        assert_eq!(Value::Null.compare(&Value::Null), None);
        assert_eq!(Value::of_text("true").compare(&Value::of_text("false")), None);
    }
}
