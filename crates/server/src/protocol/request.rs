//! Requests: what a client sends, before anybody asks what it means.
//!
//! The text is read once. Parameters stay slices of it until a [command](crate::ops::command::Command) wants them, so what nobody asks
//! for is checked for its form and nothing else, whatever its size or depth.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json};

use crate::{Code, RequestError};

/// What a client sends.
#[derive(Debug)]
pub(crate) enum Incoming<'a> {
    /// It is alive, and has seen the ping of that time.
    Pong { timestamp: f64 },
    /// It wants something.
    Request(Request<'a>),
}

/// Something that a client wants.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) id: Id,
    /// Its `type`.
    pub(crate) name: Cow<'a, str>,
    pub(crate) params: Params<'a>,
}

impl<'a> Incoming<'a> {
    /// Reads a message. What is wrong with one that is none has no id to be told with.
    pub(crate) fn parse(text: &'a str) -> Result<Self, RequestError> {
        let parse_error = |error: serde_json::Error| {
            let message = format!("the message must be one JSON object: {error}");
            RequestError::new(Code::ParseError, message)
        };
        let mut reader = serde_json::Deserializer::from_str(text);
        let params = Params(reader.deserialize_any(Members).map_err(parse_error)?);
        reader.end().map_err(parse_error)?;
        let invalid = |message| RequestError::new(Code::InvalidRequest, message);
        let Some(name) = params.raw("type").and_then(string).filter(|name| !name.is_empty()) else {
            return Err(invalid("\"type\" must be a non-empty string, such as \"store.get\""));
        };
        if name == "pong" {
            let timestamp = params.raw("timestamp").and_then(finite);
            let timestamp = timestamp.ok_or_else(|| invalid("the \"timestamp\" of a pong must be that of its ping"))?;
            return Ok(Self::Pong { timestamp });
        }
        let id = params.raw("id").and_then(Id::of);
        let id = id.ok_or_else(|| invalid("\"id\" must be a finite number; it comes back with the reply"))?;
        Ok(Self::Request(Request { id, name, params }))
    }
}

/// The id of a request, as it was written: a number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    len: u8,
    text: [u8; Self::LONGEST],
}

impl Id {
    /// What is replied to something that had no id.
    pub(crate) const NONE: Self = Self::digit(b'0');
    /// As long as a number is that needs no rounding.
    const LONGEST: usize = 30;

    const fn digit(digit: u8) -> Self {
        let mut text = [0; Self::LONGEST];
        text[0] = digit;
        Self { len: 1, text }
    }

    fn of(raw: &str) -> Option<Self> {
        let number = finite(raw)?;
        let rounded;
        let mut digits = raw;
        if digits.len() > Self::LONGEST {
            // It is the same number to whoever reads it as one.
            rounded = serde_json::Number::from_f64(number)?.to_string();
            digits = &rounded;
        }
        let mut text = [0; Self::LONGEST];
        text.get_mut(..digits.len())?.copy_from_slice(digits.as_bytes());
        Some(Self { len: u8::try_from(digits.len()).ok()?, text })
    }

    /// The digits.
    pub(crate) fn as_str(&self) -> &str {
        // They are digits and signs.
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// The same, as bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.text[..usize::from(self.len)]
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The members of a request. Of those with the same name the last one counts.
#[derive(Debug)]
pub(crate) struct Params<'a>(Vec<(Cow<'a, str>, &'a str)>);

impl<'a> Params<'a> {
    /// The JSON text of a parameter.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(known, _)| known == name).map(|(_, text)| *text)
    }

    /// The same, and none if it is null.
    pub(crate) fn given(&self, name: &str) -> Option<&'a str> {
        self.raw(name).filter(|text| *text != "null")
    }

    /// A string that is not empty.
    pub(crate) fn text(&self, name: &str) -> Result<Cow<'a, str>, RequestError> {
        let text = self.raw(name).and_then(string).filter(|text| !text.is_empty());
        text.ok_or_else(|| self.wrong(name, "a non-empty string"))
    }

    /// A string, or nothing.
    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<Cow<'a, str>>, RequestError> {
        self.given(name).map(|_| self.text(name)).transpose()
    }

    /// Any value but null.
    pub(crate) fn value(&self, name: &str) -> Result<Json, RequestError> {
        match self.given(name) {
            Some(text) => read(name, text),
            None => Err(self.wrong(name, "a value that is not null")),
        }
    }

    /// An object.
    pub(crate) fn object(&self, name: &str) -> Result<Map<String, Json>, RequestError> {
        match self.raw(name).filter(|text| text.starts_with('{')) {
            Some(text) => read(name, text),
            None => Err(self.wrong(name, "an object")),
        }
    }

    /// An array.
    pub(crate) fn array(&self, name: &str) -> Result<Vec<Json>, RequestError> {
        match self.raw(name).filter(|text| text.starts_with('[')) {
            Some(text) => read(name, text),
            None => Err(self.wrong(name, "an array")),
        }
    }

    /// A count of at least one.
    pub(crate) fn count(&self, name: &str) -> Result<usize, RequestError> {
        let expected = "an integer of at least 1";
        let number = self.raw(name).and_then(finite).ok_or_else(|| self.wrong(name, expected))?;
        if number < 1.0 || number.fract() != 0.0 {
            return Err(self.wrong(name, expected));
        }
        // What is more than there can be is as good as all.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
        Ok(number as usize)
    }

    /// The version of a record, or none.
    pub(crate) fn version(&self, name: &str) -> Result<Option<u64>, RequestError> {
        let version = |text: &str| text.parse().map_err(|_| self.wrong(name, "the version of a record: an integer"));
        self.given(name).map(version).transpose()
    }

    /// A flag; false if it is not there.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, RequestError> {
        match self.given(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    /// A parameter as it is written without spaces, so that what is said twice can be compared.
    pub(crate) fn compact(&self, name: &str) -> String {
        let text = self.raw(name).unwrap_or_default();
        serde_json::from_str(text).map_or_else(|_| text.to_owned(), |value: Json| value.to_string())
    }

    /// What is said of a parameter that is not as it has to be.
    pub(crate) fn wrong(&self, name: &str, expected: &str) -> RequestError {
        let found = self.raw(name).map_or("missing", |text| if is_short_number(text) { text } else { kind(text) });
        RequestError::new(Code::ValidationError, format!("\"{name}\" must be {expected}, and is {found}"))
    }
}

/// The members of an object as slices of its text.
struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(Cow<'de, str>, &'de str)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::with_capacity(6);
        while let Some(name) = map.next_key_seed(Name)? {
            let value: &'de RawValue = map.next_value()?;
            members.push((name, value.get()));
        }
        Ok(members)
    }
}

/// The name of a member, borrowed if it has no escapes.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Name {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

/// The string that valid JSON text stands for, if it is one that can be held.
fn string(text: &str) -> Option<Cow<'_, str>> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') { serde_json::from_str(text).ok().map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
}

/// The number that valid JSON text stands for.
fn finite(text: &str) -> Option<f64> {
    let is_number = text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
    text.parse().ok().filter(|number: &f64| is_number && number.is_finite())
}

/// What valid JSON text stands for. It may still be too deep, or have numbers or characters that nothing can hold.
fn read<T: serde::de::DeserializeOwned>(name: &str, text: &str) -> Result<T, RequestError> {
    serde_json::from_str(text).map_err(|error| {
        RequestError::new(Code::ValidationError, format!("\"{name}\" cannot be taken: {}", without_place(&error)))
    })
}

/// What is wrong, without a line and column that nobody can look up.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// Whether a number says more about itself than that it is one.
fn is_short_number(text: &str) -> bool {
    kind(text) == "a number" && text.len() <= 24
}

/// What valid JSON text stands for, in a word.
fn kind(text: &str) -> &'static str {
    match text.as_bytes() {
        b"\"\"" => "empty",
        [b'"', ..] if string(text).is_none() => "a string with half a character",
        [b'"', ..] => "a string",
        [b'{', ..] => "an object",
        [b'[', ..] => "an array",
        [b't' | b'f', ..] => "a boolean",
        [b'n', ..] => "null",
        _ => "a number",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Option<Code> {
        Incoming::parse(text).err().map(|error| error.code)
    }

    fn id(text: &str) -> String {
        match Incoming::parse(&format!(r#"{{"type":"x","id":{text}}}"#)).unwrap() {
            Incoming::Request(request) => request.id.to_string(),
            Incoming::Pong { .. } => unreachable!(),
        }
    }

    #[test]
    fn what_is_no_request_says_so() {
        for text in ["", "{", "[]", "null", "7", "\"x\"", "{} {}", "{\"a\":1,}", "{\"a\":01}", "{\"a\":\u{1}}"] {
            assert_eq!(code(text), Some(Code::ParseError), "{text}");
        }
        for text in [
            "{}",
            r#"{"type":"","id":1}"#,
            r#"{"type":7,"id":1}"#,
            r#"{"type":"\ud800","id":1}"#,
            r#"{"type":"x"}"#,
            r#"{"type":"x","id":"1"}"#,
            r#"{"type":"x","id":1e400}"#,
            r#"{"type":"x","id":null}"#,
            r#"{"type":"pong"}"#,
            r#"{"type":"pong","timestamp":"1"}"#,
        ] {
            assert_eq!(code(text), Some(Code::InvalidRequest), "{text}");
        }
    }

    #[test]
    fn an_id_comes_back_as_the_same_number() {
        for text in ["0", "-7", "1.5", "1e3", "9007199254740991"] {
            assert_eq!(id(text), text);
        }
        assert_eq!(id(&format!("1.{}", "0".repeat(1000))), "1.0");
        assert_eq!(Id::NONE.to_string(), "0");
    }

    #[test]
    fn the_last_of_equal_names_counts_and_names_may_be_escaped() {
        let Incoming::Request(request) = Incoming::parse(r#"{"id":1,"type":"x","a":1,"\u0061":2}"#).unwrap() else {
            unreachable!()
        };
        assert_eq!(request.params.raw("a"), Some("2"));
    }

    #[test]
    fn depth_matters_only_where_it_is_looked_at() {
        let deep = format!(r#"{{"id":1,"type":"x","deep":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let Incoming::Request(request) = Incoming::parse(&deep).unwrap() else { unreachable!() };
        let error = request.params.value("deep").unwrap_err();
        assert_eq!(error.code, Code::ValidationError);
        assert_eq!(error.message, "\"deep\" cannot be taken: recursion limit exceeded");
    }

    #[test]
    fn a_wrong_parameter_is_named_with_what_was_expected() {
        let text = r#"{"id":1,"type":"x","s":"","n":0,"f":1.5,"o":[],"v":"1","b":1}"#;
        let Incoming::Request(Request { params, .. }) = Incoming::parse(text).unwrap() else { unreachable!() };
        let message = |error: RequestError| error.message.into_owned();
        assert_eq!(message(params.text("s").unwrap_err()), "\"s\" must be a non-empty string, and is empty");
        assert_eq!(message(params.text("n").unwrap_err()), "\"n\" must be a non-empty string, and is 0");
        assert_eq!(message(params.text("q").unwrap_err()), "\"q\" must be a non-empty string, and is missing");
        assert_eq!(message(params.count("n").unwrap_err()), "\"n\" must be an integer of at least 1, and is 0");
        assert!(params.count("f").is_err() && params.object("o").is_err() && params.version("v").is_err());
        assert!(params.flag("b").is_err() && params.value("q").is_err() && params.array("s").is_err());
    }
}
