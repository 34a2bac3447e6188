//! JSON with places: RFC 8259, and nothing beside it. Keys that are there twice are kept, for somebody else to find.

use std::sync::Arc;

use super::node::{Member, Node, Value};
use super::place::{Origin, Source, Wrong};

/// How deep values may be nested.
const MAX_DEPTH: usize = 64;

pub(super) fn parse(source: &Arc<Source>) -> Result<Node, Wrong> {
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
    source: &'s Arc<Source>,
    /// Always at the beginning of a character.
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
        let is_there = self.rest().starts_with(text);
        if is_there {
            self.offset += text.len();
        }
        is_there
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.offset += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    }

    fn origin(&self, offset: usize) -> Origin {
        Origin::Text { source: Arc::clone(self.source), offset }
    }

    fn wrong(&self, what: impl Into<String>) -> Wrong {
        Wrong { offset: self.offset, what: what.into() }
    }

    fn expected(&self, what: &str) -> Wrong {
        let hint = match self.peek() {
            Some('/') => "; JSON has no comments, but any object may have a key \"comment\"",
            Some('\'') => "; strings are in double quotes",
            _ => "",
        };
        match self.peek() {
            Some(found) => self.wrong(format!("expected {what}, found {found:?}{hint}")),
            None => self.wrong(format!("expected {what}, found the end of the file")),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, Wrong> {
        if depth > MAX_DEPTH {
            return Err(self.wrong(format!("it is nested too deeply: {MAX_DEPTH} levels are allowed")));
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

    fn members(&mut self, depth: usize) -> Result<Vec<Member>, Wrong> {
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

    fn items(&mut self, depth: usize) -> Result<Vec<Node>, Wrong> {
        let mut items = Vec::new();
        self.list(['[', ']'], |parser| {
            items.push(parser.value(depth + 1)?);
            Ok(())
        })?;
        Ok(items)
    }

    /// What is between two brackets, with commas.
    fn list(
        &mut self,
        [open, close]: [char; 2],
        mut item: impl FnMut(&mut Self) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
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
                return Err(Wrong { offset: comma, what: format!("there is a comma before '{close}'") });
            }
        }
    }

    fn number(&mut self) -> Result<Value, Wrong> {
        let start = self.offset;
        self.take("-");
        if self.digits() == 0 {
            return Err(self.expected("a digit"));
        }
        let whole = self.source.text[start..self.offset].trim_start_matches('-');
        if whole.len() > 1 && whole.starts_with('0') {
            return Err(Wrong { offset: start, what: "a number does not begin with 0".to_owned() });
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
        number.map(Value::Number).map_err(|_| Wrong { offset: start, what: "the number is too large".to_owned() })
    }

    fn digits(&mut self) -> usize {
        let rest = self.rest();
        let count = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        self.offset += count;
        count
    }

    fn string(&mut self) -> Result<String, Wrong> {
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
                    return Err(Wrong { offset: start, what: "the string does not end in its line".to_owned() });
                }
                Some(_) => return Err(self.wrong("control characters in strings are written as \\u and four digits")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, Wrong> {
        let start = self.offset;
        let wrong = |what: &str| Wrong { offset: start, what: what.to_owned() };
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
                let alone = || wrong("half of a surrogate pair stands for no character");
                let unit = self.unit().ok_or_else(|| wrong("\\u has four hexadecimal digits"))?;
                if !(0xD800..0xE000).contains(&unit) {
                    return char::from_u32(unit).ok_or_else(alone);
                }
                let second = if self.take("\\u") { self.unit() } else { None };
                let pair = second.filter(|second| unit < 0xDC00 && (0xDC00..0xE000).contains(second));
                let code = pair.map(|second| 0x1_0000 + ((unit - 0xD800) << 10) + (second - 0xDC00));
                code.and_then(char::from_u32).ok_or_else(alone)?
            }
            _ => return Err(wrong("there is no such escape; a backslash is written as \\\\")),
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

    fn parsed(text: &str) -> Result<Json, Wrong> {
        parse(&Arc::new(Source { file: PathBuf::new(), text: text.to_owned() })).map(|node| node.json())
    }

    #[test]
    fn it_reads_what_any_parser_reads() {
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
    fn it_refuses_all_else_and_says_where() {
        for (text, offset, what) in [
            ("", 0, "expected a value, found the end of the file"),
            ("{} x", 3, "expected the end of the file, found 'x'"),
            ("{\"a\": 1,}", 7, "there is a comma before '}'"),
            ("[1 2]", 3, "expected ',' or ']', found '2'"),
            ("{a: 1}", 1, "expected a key in double quotes, found 'a'"),
            ("{'a': 1}", 1, "expected a key in double quotes, found '\\''; strings are in double quotes"),
            ("{\"a\" 1}", 5, "expected ':', found '1'"),
            ("{\"a\":", 5, "expected a value, found the end of the file"),
            (
                "// x\n1",
                0,
                "expected a value, found '/'; JSON has no comments, but any object may have a key \"comment\"",
            ),
            ("01", 0, "a number does not begin with 0"),
            ("-", 1, "expected a digit, found the end of the file"),
            ("1.", 2, "expected a digit, found the end of the file"),
            ("1e+", 3, "expected a digit, found the end of the file"),
            ("1e999", 0, "the number is too large"),
            ("+1", 0, "expected a value, found '+'"),
            ("[NaN]", 1, "expected a value, found 'N'"),
            ("\"a", 0, "the string does not end in its line"),
            ("\"a\nb\"", 0, "the string does not end in its line"),
            ("\"\t\"", 1, "control characters in strings are written as \\u and four digits"),
            ("\"\\x\"", 1, "there is no such escape; a backslash is written as \\\\"),
            ("\"\\u00g0\"", 1, "\\u has four hexadecimal digits"),
            ("\"\\u+123\"", 1, "\\u has four hexadecimal digits"),
            ("\"\\ud800\"", 1, "half of a surrogate pair stands for no character"),
            ("\"\\ude00\\ud83d\"", 1, "half of a surrogate pair stands for no character"),
            ("\u{a0}1", 0, "expected a value, found '\\u{a0}'"),
        ] {
            assert_eq!(parsed(text), Err(Wrong { offset, what: what.to_owned() }), "{text}");
            assert!(serde_json::from_str::<Json>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn it_is_not_nested_without_end() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parsed(&nested(MAX_DEPTH)).is_ok());
        let wrong = parsed(&nested(100_000)).unwrap_err();
        assert_eq!((wrong.offset, &*wrong.what), (MAX_DEPTH + 1, "it is nested too deeply: 64 levels are allowed"));
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
        /// Also of texts in which something was changed, another parser makes the same.
        #[test]
        fn it_agrees_with_another_parser(
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
