//! TOML with places.

use std::ops::Range;
use std::sync::Arc;

use ::toml::Spanned;
use ::toml::de::{DeInteger, DeTable, DeValue};
use serde_json::Number;

use super::node::{Member, Node, Value};
use super::place::{Origin, Source, Wrong};

/// The table of a file, or all that is wrong with its text.
pub(super) fn parse(source: &Arc<Source>) -> Result<Node, Vec<Wrong>> {
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    let mut wrong: Vec<Wrong> = errors.iter().map(|error| wrong_at(error.span(), error.message())).collect();
    let node = Node { value: members(source, table.get_ref(), &mut wrong), origin: origin(source, 0) };
    if wrong.is_empty() { Ok(node) } else { Err(wrong) }
}

fn wrong_at(span: Option<Range<usize>>, what: &str) -> Wrong {
    Wrong { offset: span.map_or(0, |span| span.start), what: what.trim().replace('\n', ", ") }
}

fn origin(source: &Arc<Source>, offset: usize) -> Origin {
    Origin::Text { source: Arc::clone(source), offset }
}

fn members(source: &Arc<Source>, table: &DeTable<'_>, wrong: &mut Vec<Wrong>) -> Value {
    let mut entries: Vec<(&Spanned<_>, &Spanned<DeValue<'_>>)> = table.iter().collect();
    // The table is sorted by its keys. The order of the file means something, such as what a query sorts by first.
    entries.sort_by_key(|(key, _)| key.span().start);
    let members = entries.into_iter().map(|(key, value)| Member {
        key: key.get_ref().to_string(),
        origin: origin(source, key.span().start),
        value: node(source, value, wrong),
    });
    Value::Object(members.collect())
}

fn node(source: &Arc<Source>, value: &Spanned<DeValue<'_>>, wrong: &mut Vec<Wrong>) -> Node {
    let number = |number: Option<Number>, text: &str, wrong: &mut Vec<Wrong>| {
        if number.is_none() {
            wrong.push(wrong_at(Some(value.span()), &format!("{text} is not a number that can be used")));
        }
        number.map_or(Value::Null, Value::Number)
    };
    let value_of = match value.get_ref() {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(integer) => number(whole(integer), &integer.to_string(), wrong),
        DeValue::Float(float) => number(float.as_str().parse().ok().and_then(Number::from_f64), float.as_str(), wrong),
        DeValue::Boolean(value) => Value::Bool(*value),
        // JSON has no moments: they are strings there.
        DeValue::Datetime(moment) => Value::String(moment.to_string()),
        DeValue::Array(items) => Value::Array(items.iter().map(|item| node(source, item, wrong)).collect()),
        DeValue::Table(table) => members(source, table, wrong),
    };
    Node { value: value_of, origin: origin(source, value.span().start) }
}

fn whole(integer: &DeInteger<'_>) -> Option<Number> {
    let (text, radix) = (integer.as_str(), integer.radix());
    let positive = u64::from_str_radix(text, radix).ok().map(Number::from);
    positive.or_else(|| i64::from_str_radix(text, radix).ok().map(Number::from))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn source(text: &str) -> Arc<Source> {
        Arc::new(Source { file: PathBuf::from("f"), text: text.to_owned() })
    }

    #[test]
    fn values_are_those_of_json_and_keep_their_order() {
        let text = "z = 1\na = -2.5\nhex = 0xf_f\nlong = 18446744073709551615\nday = 1979-05-27\n\
                    list = [true, \"x\"]\n[t.u]\ny.b = 1\ny.a = 'q'\n[[rows]]\nn = 1\n[[rows]]\nn = 2\n";
        let node = parse(&source(text)).map_err(|_| "it is right").unwrap();
        let expected = json!({
            "z": 1, "a": -2.5, "hex": 255, "long": u64::MAX, "day": "1979-05-27", "list": [true, "x"],
            "t": {"u": {"y": {"b": 1, "a": "q"}}}, "rows": [{"n": 1}, {"n": 2}],
        });
        assert_eq!(node.json().to_string(), expected.to_string());
    }

    #[test]
    fn all_that_is_wrong_is_said() {
        let offsets = |text: &str| -> Vec<usize> {
            parse(&source(text)).err().unwrap_or_default().iter().map(|wrong| wrong.offset).collect()
        };
        assert_eq!(offsets("a = 1\nb = \nc = 2\na = 3\n"), [10, 17]);
        assert_eq!(offsets("a = inf\nb = 99999999999999999999\n"), [4, 12]);
    }

    #[test]
    fn it_is_not_nested_without_end() {
        for text in [
            format!("a = {}1{}", "[".repeat(100_000), "]".repeat(100_000)),
            format!("{}a = 1", "a.".repeat(100_000)),
            format!("[{}a]", "a.".repeat(100_000)),
        ] {
            assert!(parse(&source(&text)).is_err());
        }
    }
}
