//! Parses JSON into a tree with origins. Duplicate keys are kept; the caller reports them.
//!
//! `serde_json` has no spans, but a [`RawValue`] borrows from the text, so its address gives its offset. Each level of nesting scans its
//! text again; the limit of nesting bounds this cost.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::location::{Origin, SourceFile, SyntaxError};
use super::tree::{Member, Node, Value};

/// The limit of nesting, in levels.
const MAX_DEPTH: usize = 64;

pub(super) fn parse(source: &Arc<SourceFile>) -> Result<Node, SyntaxError> {
    // Parsed once as a whole, because these errors are more precise than those of a scan for raw values, and have positions in the file.
    let invalid = |error| syntax_error(&source.text, &error);
    serde_json::from_str::<Json>(&source.text).map_err(invalid)?;
    node(source, serde_json::from_str(&source.text).map_err(invalid)?, 0)
}

fn node(source: &Arc<SourceFile>, raw: &RawValue, depth: usize) -> Result<Node, SyntaxError> {
    let text = raw.get();
    let offset_of = |raw: &RawValue| raw.get().as_ptr() as usize - source.text.as_ptr() as usize;
    let origin_of = |raw: &RawValue| Origin::Text { source: Arc::clone(source), offset: offset_of(raw) };
    if depth > MAX_DEPTH {
        let message = format!("nested more than {MAX_DEPTH} levels deep");
        return Err(SyntaxError { offset: offset_of(raw), message });
    }
    let invalid = |error| syntax_error(text, &error);
    let value = match text.as_bytes().first() {
        Some(b'{') => {
            let Members(members) = serde_json::from_str(text).map_err(invalid)?;
            let member = |(key, value): (&RawValue, &RawValue)| {
                let name = serde_json::from_str(key.get()).map_err(invalid)?;
                Ok(Member { key: name, origin: origin_of(key), value: node(source, value, depth + 1)? })
            };
            Value::Object(members.into_iter().map(member).collect::<Result<_, _>>()?)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(invalid)?;
            Value::Array(items.into_iter().map(|item| node(source, item, depth + 1)).collect::<Result<_, _>>()?)
        }
        _ => match serde_json::from_str(text).map_err(invalid)? {
            Json::String(text) => Value::String(text),
            Json::Number(number) => Value::Number(number),
            Json::Bool(flag) => Value::Bool(flag),
            _ => Value::Null,
        },
    };
    Ok(Node { value, origin: origin_of(raw) })
}

/// The keys and values of an object, in order.
struct Members<'a>(Vec<(&'a RawValue, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}

/// Converts the line and column of an error to an offset, and adds a hint about syntax that JSON does not support.
fn syntax_error(text: &str, error: &serde_json::Error) -> SyntaxError {
    let line_start: usize = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    let offset = if error.is_eof() { text.len() } else { (line_start + error.column()).saturating_sub(1) };
    let hint = match text.as_bytes().get(offset) {
        Some(b'/') => "; JSON has no comments, use a key \"comment\"",
        Some(b'\'') => "; strings need double quotes",
        _ => "",
    };
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    SyntaxError { offset, message: format!("{message}{hint}") }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;
    use serde_json::Value as Json;

    use super::*;

    fn parsed(text: &str) -> Result<Json, SyntaxError> {
        parse(&Arc::new(SourceFile { file: PathBuf::new(), text: text.to_owned() })).map(|node| node.json())
    }

    #[test]
    fn valid_json_is_parsed() {
        for text in [
            "null",
            " [ ] ",
            "{}",
            "[1, -0, 0.5, -1.25e+3, 1E-2, 18446744073709551615, -9223372036854775808, 123456789012345678901234567890]",
            r#"{"a": {"b": [true, false, null, "x"]}, "c": ""}"#,
            r#""\" \\ \/ \b \f \n \r \t \u0041 \u00e9 \ud83d\ude00 é 😀 \u0000""#,
            "\r\n\t{ \"a\" :\n1 }\n",
        ] {
            assert_eq!(parsed(text), Ok(serde_json::from_str::<Json>(text).unwrap()), "{text}");
        }
    }

    #[test]
    fn invalid_json_is_rejected_with_its_offset() {
        let comment = "key must be a string; JSON has no comments, use a key \"comment\"";
        let control = "control character (\\u0000-\\u001F) found while parsing a string";
        for (text, offset, message) in [
            ("", 0, "EOF while parsing a value"),
            ("{} x", 3, "trailing characters"),
            ("{\"a\": 1,}", 8, "trailing comma"),
            ("[1 2]", 3, "expected `,` or `]`"),
            ("{a: 1}", 1, "key must be a string"),
            ("{'a': 1}", 1, "key must be a string; strings need double quotes"),
            ("{\"a\" 1}", 5, "expected `:`"),
            ("{\"a\":", 5, "EOF while parsing a value"),
            ("{\n  // x\n  \"a\": 1}", 4, comment),
            ("01", 1, "invalid number"),
            ("1e+", 3, "EOF while parsing a value"),
            ("[1,\n1e999]", 8, "number out of range"),
            ("[NaN]", 1, "expected value"),
            ("\"a", 2, "EOF while parsing a string"),
            ("\"a\nb\"", 2, control),
            ("\"\t\"", 1, control),
            ("\"\\x\"", 2, "invalid escape"),
            ("\"\\ude00\\ud83d\"", 6, "lone leading surrogate in hex escape"),
            ("[\"é\", x]", 7, "expected value"),
        ] {
            assert_eq!(parsed(text), Err(SyntaxError { offset, message: message.to_owned() }), "{text}");
        }
    }

    #[test]
    fn nesting_depth_is_limited() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parsed(&nested(MAX_DEPTH)).is_ok());
        let error = parsed(&nested(MAX_DEPTH + 2)).unwrap_err();
        assert_eq!((error.offset, &*error.message), (MAX_DEPTH + 1, "nested more than 64 levels deep"));
        assert_eq!(parsed(&nested(100_000)).unwrap_err().message, "recursion limit exceeded");
    }

    fn any_json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            any::<u64>().prop_map(Json::from),
            any::<f64>().prop_map(Json::from),
            any::<String>().prop_map(Json::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
                prop::collection::vec((any::<String>(), inner), 0..4).prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    proptest! {
        /// The parser returns the same values as `serde_json`, and rejects the same texts after random edits.
        #[test]
        fn parser_agrees_with_serde_json(
            json in any_json(),
            pretty in any::<bool>(),
            at in any::<prop::sample::Index>(),
            edit in "[\\[\\]{}:,\"\\\\ud8cDC0-9eE+. \\n\\-tfnx\u{7f}é]{0,3}",
        ) {
            let text = if pretty { format!("{json:#}") } else { json.to_string() };
            prop_assert_eq!(parsed(&text), Ok(json));
            let position = text.floor_char_boundary(at.index(text.len() + 1));
            let after = text[position..].chars().next().map_or(position, |c| position + c.len_utf8());
            for edited in [
                format!("{}{edit}{}", &text[..position], &text[position..]),
                format!("{}{edit}{}", &text[..position], &text[after..]),
            ] {
                prop_assert_eq!(parsed(&edited).ok(), serde_json::from_str::<Json>(&edited).ok(), "{}", edited);
            }
        }
    }
}
