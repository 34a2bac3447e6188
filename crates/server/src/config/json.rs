//! Parses JSON (RFC 8259, without extensions) into a tree with origins. Duplicate keys are kept; the caller reports them.

use std::sync::Arc;

use super::location::{Origin, SourceFile, SyntaxError};
use super::tree::{Member, Node, Value};

/// The limit of nesting, in levels.
const MAX_DEPTH: usize = 64;

pub(super) fn parse(source: &Arc<SourceFile>) -> Result<Node, SyntaxError> {
    let mut parser = Parser { source, offset: 0 };
    parser.skip_space();
    let node = parser.value(0)?;
    parser.skip_space();
    match parser.peek() {
        None => Ok(node),
        Some(_) => Err(parser.expected("the end of the file")),
    }
}

struct Parser<'s> {
    source: &'s Arc<SourceFile>,
    /// Always on a character boundary.
    offset: usize,
}

impl<'s> Parser<'s> {
    fn rest(&self) -> &'s str {
        &self.source.text[self.offset..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, text: &str) -> bool {
        let is_next = self.rest().starts_with(text);
        if is_next {
            self.offset += text.len();
        }
        is_next
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.offset += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    }

    fn origin(&self, offset: usize) -> Origin {
        Origin::Text { source: Arc::clone(self.source), offset }
    }

    fn error(&self, message: impl Into<String>) -> SyntaxError {
        SyntaxError { offset: self.offset, message: message.into() }
    }

    fn expected(&self, expected: &str) -> SyntaxError {
        let hint = match self.peek() {
            Some('/') => "; JSON has no comments, use a key \"comment\"",
            Some('\'') => "; strings need double quotes",
            _ => "",
        };
        match self.peek() {
            Some(found) => self.error(format!("expected {expected}, got {found:?}{hint}")),
            None => self.error(format!("expected {expected}, got the end of the file")),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, SyntaxError> {
        if depth > MAX_DEPTH {
            return Err(self.error(format!("nested more than {MAX_DEPTH} levels deep")));
        }
        let origin = self.origin(self.offset);
        let value = match self.peek() {
            Some('{') => Value::Object(self.members(depth)?),
            Some('[') => Value::Array(self.items(depth)?),
            Some('"') => Value::String(self.string()?),
            Some('-' | '0'..='9') => self.number()?,
            _ if self.take("true") => Value::Bool(true),
            _ if self.take("false") => Value::Bool(false),
            _ if self.take("null") => Value::Null,
            _ => return Err(self.expected("a value")),
        };
        Ok(Node { value, origin })
    }

    fn members(&mut self, depth: usize) -> Result<Vec<Member>, SyntaxError> {
        let mut members = Vec::new();
        self.list(['{', '}'], |parser| {
            if parser.peek() != Some('"') {
                return Err(parser.expected("a key in double quotes"));
            }
            let origin = parser.origin(parser.offset);
            let key = parser.string()?;
            parser.skip_space();
            if !parser.take(":") {
                return Err(parser.expected("':'"));
            }
            parser.skip_space();
            members.push(Member { key, origin, value: parser.value(depth + 1)? });
            Ok(())
        })?;
        Ok(members)
    }

    fn items(&mut self, depth: usize) -> Result<Vec<Node>, SyntaxError> {
        let mut items = Vec::new();
        self.list(['[', ']'], |parser| {
            items.push(parser.value(depth + 1)?);
            Ok(())
        })?;
        Ok(items)
    }

    /// Parses a comma-separated list in brackets.
    fn list(
        &mut self,
        [open, close]: [char; 2],
        mut item: impl FnMut(&mut Self) -> Result<(), SyntaxError>,
    ) -> Result<(), SyntaxError> {
        self.offset += open.len_utf8();
        self.skip_space();
        if self.peek() == Some(close) {
            self.offset += close.len_utf8();
            return Ok(());
        }
        loop {
            item(self)?;
            self.skip_space();
            if self.peek() == Some(close) {
                self.offset += close.len_utf8();
                return Ok(());
            }
            let comma = self.offset;
            if !self.take(",") {
                return Err(self.expected(&format!("',' or '{close}'")));
            }
            self.skip_space();
            if self.peek() == Some(close) {
                return Err(SyntaxError { offset: comma, message: format!("trailing comma before '{close}'") });
            }
        }
    }

    fn number(&mut self) -> Result<Value, SyntaxError> {
        let start = self.offset;
        self.take("-");
        if self.digits() == 0 {
            return Err(self.expected("a digit"));
        }
        let integer = self.source.text[start..self.offset].trim_start_matches('-');
        if integer.len() > 1 && integer.starts_with('0') {
            return Err(SyntaxError { offset: start, message: "a number must not begin with 0".to_owned() });
        }
        if self.take(".") && self.digits() == 0 {
            return Err(self.expected("a digit"));
        }
        if self.take("e") || self.take("E") {
            let _ = self.take("+") || self.take("-");
            if self.digits() == 0 {
                return Err(self.expected("a digit"));
            }
        }
        let number = self.source.text[start..self.offset].parse();
        number.map(Value::Number).map_err(|_| SyntaxError { offset: start, message: "number out of range".to_owned() })
    }

    fn digits(&mut self) -> usize {
        let rest = self.rest();
        let count = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        self.offset += count;
        count
    }

    fn string(&mut self) -> Result<String, SyntaxError> {
        let start = self.offset;
        self.offset += 1;
        let mut text = String::new();
        loop {
            let rest = self.rest();
            let plain = rest.find(|c: char| c == '"' || c == '\\' || c < ' ').unwrap_or(rest.len());
            text.push_str(&rest[..plain]);
            self.offset += plain;
            match self.peek() {
                Some('"') => {
                    self.offset += 1;
                    return Ok(text);
                }
                Some('\\') => text.push(self.escape()?),
                Some('\n' | '\r') | None => {
                    return Err(SyntaxError { offset: start, message: "unterminated string".to_owned() });
                }
                Some(_) => {
                    return Err(
                        self.error("control character in a string; write it as \\u and four hexadecimal digits")
                    );
                }
            }
        }
    }

    fn escape(&mut self) -> Result<char, SyntaxError> {
        let start = self.offset;
        let error = |message: &str| SyntaxError { offset: start, message: message.to_owned() };
        self.offset += 1;
        let escaped = self.peek();
        self.offset += escaped.map_or(0, char::len_utf8);
        Ok(match escaped {
            Some(plain @ ('"' | '\\' | '/')) => plain,
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => {
                let unpaired = || error("unpaired surrogate");
                let unit = self.unit().ok_or_else(|| error("\\u needs four hexadecimal digits"))?;
                if !(0xD800..0xE000).contains(&unit) {
                    return char::from_u32(unit).ok_or_else(unpaired);
                }
                let second = if self.take("\\u") { self.unit() } else { None };
                let pair = second.filter(|second| unit < 0xDC00 && (0xDC00..0xE000).contains(second));
                let code = pair.map(|second| 0x1_0000 + ((unit - 0xD800) << 10) + (second - 0xDC00));
                code.and_then(char::from_u32).ok_or_else(unpaired)?
            }
            _ => return Err(error("unknown escape; write a backslash as \\\\")),
        })
    }

    fn unit(&mut self) -> Option<u32> {
        let digits = self.rest().get(..4).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        self.offset += 4;
        u32::from_str_radix(digits, 16).ok()
    }
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
        for (text, offset, message) in [
            ("", 0, "expected a value, got the end of the file"),
            ("{} x", 3, "expected the end of the file, got 'x'"),
            ("{\"a\": 1,}", 7, "trailing comma before '}'"),
            ("[1 2]", 3, "expected ',' or ']', got '2'"),
            ("{a: 1}", 1, "expected a key in double quotes, got 'a'"),
            ("{'a': 1}", 1, "expected a key in double quotes, got '\\''; strings need double quotes"),
            ("{\"a\" 1}", 5, "expected ':', got '1'"),
            ("{\"a\":", 5, "expected a value, got the end of the file"),
            ("// x\n1", 0, "expected a value, got '/'; JSON has no comments, use a key \"comment\""),
            ("01", 0, "a number must not begin with 0"),
            ("-", 1, "expected a digit, got the end of the file"),
            ("1.", 2, "expected a digit, got the end of the file"),
            ("1e+", 3, "expected a digit, got the end of the file"),
            ("1e999", 0, "number out of range"),
            ("+1", 0, "expected a value, got '+'"),
            ("[NaN]", 1, "expected a value, got 'N'"),
            ("\"a", 0, "unterminated string"),
            ("\"a\nb\"", 0, "unterminated string"),
            ("\"\t\"", 1, "control character in a string; write it as \\u and four hexadecimal digits"),
            ("\"\\x\"", 1, "unknown escape; write a backslash as \\\\"),
            ("\"\\u00g0\"", 1, "\\u needs four hexadecimal digits"),
            ("\"\\u+123\"", 1, "\\u needs four hexadecimal digits"),
            ("\"\\ud800\"", 1, "unpaired surrogate"),
            ("\"\\ude00\\ud83d\"", 1, "unpaired surrogate"),
            ("\u{a0}1", 0, "expected a value, got '\\u{a0}'"),
        ] {
            assert_eq!(parsed(text), Err(SyntaxError { offset, message: message.to_owned() }), "{text}");
            assert!(serde_json::from_str::<Json>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn nesting_depth_is_limited() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parsed(&nested(MAX_DEPTH)).is_ok());
        let error = parsed(&nested(100_000)).unwrap_err();
        assert_eq!((error.offset, &*error.message), (MAX_DEPTH + 1, "nested more than 64 levels deep"));
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
        /// Accepts and rejects the same texts as `serde_json`, also after random edits.
        #[test]
        fn it_agrees_with_serde_json(
            json in any_json(),
            pretty in any::<bool>(),
            at in any::<prop::sample::Index>(),
            edit in "[\\[\\]{}:,\"\\\\ud8cDC0-9eE+. \\n\\-tfnx\u{7f}é]{0,3}",
        ) {
            let text = if pretty { format!("{json:#}") } else { json.to_string() };
            prop_assert_eq!(parsed(&text), Ok(json));
            let place = text.floor_char_boundary(at.index(text.len() + 1));
            let after = text[place..].chars().next().map_or(place, |c| place + c.len_utf8());
            for edited in [
                format!("{}{edit}{}", &text[..place], &text[place..]),
                format!("{}{edit}{}", &text[..place], &text[after..]),
            ] {
                prop_assert_eq!(parsed(&edited).ok(), serde_json::from_str::<Json>(&edited).ok(), "{}", edited);
            }
        }
    }
}
