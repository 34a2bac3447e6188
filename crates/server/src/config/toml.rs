//! Parses TOML into a tree with origins.

use std::ops::Range;
use std::sync::Arc;

use ::toml::Spanned;
use ::toml::de::{DeInteger, DeTable, DeValue};
use serde_json::Number;

use super::location::{Origin, SourceFile, SyntaxError};
use super::tree::{Member, Node, Value};

/// Parses a file. Returns all syntax errors, not only the first.
pub(super) fn parse(source: &Arc<SourceFile>) -> Result<Node, Vec<SyntaxError>> {
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    let mut errors: Vec<SyntaxError> = errors.iter().map(|error| error_at(error.span(), error.message())).collect();
    let node = Node { value: members(source, table.get_ref(), &mut errors), origin: origin(source, 0) };
    if errors.is_empty() { Ok(node) } else { Err(errors) }
}

fn error_at(span: Option<Range<usize>>, message: &str) -> SyntaxError {
    SyntaxError { offset: span.map_or(0, |span| span.start), message: message.trim().replace('\n', ", ") }
}

fn origin(source: &Arc<SourceFile>, offset: usize) -> Origin {
    Origin::Text { source: Arc::clone(source), offset }
}

fn members(source: &Arc<SourceFile>, table: &DeTable<'_>, errors: &mut Vec<SyntaxError>) -> Value {
    let mut entries: Vec<(&Spanned<_>, &Spanned<DeValue<'_>>)> = table.iter().collect();
    // The parser sorts tables by key, but the file order matters, for example in the sort of a query.
    entries.sort_by_key(|(key, _)| key.span().start);
    let members = entries.into_iter().map(|(key, value)| Member {
        key: key.get_ref().to_string(),
        origin: origin(source, key.span().start),
        value: node(source, value, errors),
    });
    Value::Object(members.collect())
}

fn node(source: &Arc<SourceFile>, value: &Spanned<DeValue<'_>>, errors: &mut Vec<SyntaxError>) -> Node {
    let number = |number: Option<Number>, text: &str, errors: &mut Vec<SyntaxError>| {
        if number.is_none() {
            errors.push(error_at(Some(value.span()), &format!("{text} is out of range")));
        }
        number.map_or(Value::Null, Value::Number)
    };
    let value_of = match value.get_ref() {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(integer) => number(integer_of(integer), &integer.to_string(), errors),
        DeValue::Float(float) => number(float.as_str().parse().ok().and_then(Number::from_f64), float.as_str(), errors),
        DeValue::Boolean(value) => Value::Bool(*value),
        // JSON has no dates; they become strings.
        DeValue::Datetime(date) => Value::String(date.to_string()),
        DeValue::Array(items) => Value::Array(items.iter().map(|item| node(source, item, errors)).collect()),
        DeValue::Table(table) => members(source, table, errors),
    };
    Node { value: value_of, origin: origin(source, value.span().start) }
}

fn integer_of(integer: &DeInteger<'_>) -> Option<Number> {
    let (text, radix) = (integer.as_str(), integer.radix());
    let positive = u64::from_str_radix(text, radix).ok().map(Number::from);
    positive.or_else(|| i64::from_str_radix(text, radix).ok().map(Number::from))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn source(text: &str) -> Arc<SourceFile> {
        Arc::new(SourceFile { file: PathBuf::from("f"), text: text.to_owned() })
    }

    #[test]
    fn values_become_json_in_file_order() {
        let text = "z = 1\na = -2.5\nhex = 0xf_f\nlong = 18446744073709551615\nday = 1979-05-27\n\
                    list = [true, \"x\"]\n[t.u]\ny.b = 1\ny.a = 'q'\n[[rows]]\nn = 1\n[[rows]]\nn = 2\n";
        let node = parse(&source(text)).map_err(|_| "valid TOML").unwrap();
        let expected = json!({
            "z": 1, "a": -2.5, "hex": 255, "long": u64::MAX, "day": "1979-05-27", "list": [true, "x"],
            "t": {"u": {"y": {"b": 1, "a": "q"}}}, "rows": [{"n": 1}, {"n": 2}],
        });
        assert_eq!(node.json().to_string(), expected.to_string());
    }

    #[test]
    fn all_syntax_errors_are_reported() {
        let offsets = |text: &str| -> Vec<usize> {
            parse(&source(text)).err().unwrap_or_default().iter().map(|error| error.offset).collect()
        };
        assert_eq!(offsets("a = 1\nb = \nc = 2\na = 3\n"), [10, 17]);
        assert_eq!(offsets("a = inf\nb = 99999999999999999999\n"), [4, 12]);
    }

    #[test]
    fn nesting_depth_is_limited() {
        for text in [
            format!("a = {}1{}", "[".repeat(100_000), "]".repeat(100_000)),
            format!("{}a = 1", "a.".repeat(100_000)),
            format!("[{}a]", "a.".repeat(100_000)),
        ] {
            assert!(parse(&source(&text)).is_err());
        }
    }
}
