//! Parsing of client messages: requests and pongs.
//!
//! A message is scanned once. Its members remain slices of the text until an operation reads them, so that an unused member costs
//! only a syntax check, whatever its size or depth.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json};

use crate::ops::table::OperationId;
use crate::{Code, RequestError};

/// A message from a client.
#[derive(Debug)]
pub(crate) enum ClientMessage<'a> {
    /// The answer to the ping with this timestamp.
    Pong {
        timestamp: f64,
    },
    Request(Request<'a>),
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) id: Id,
    /// Its `type`.
    pub(crate) name: Cow<'a, str>,
    /// The operation of that name.
    pub(crate) operation: Option<OperationId>,
    pub(crate) params: Params<'a>,
    memory: OnceCell<usize>,
}

impl Request<'_> {
    /// Returns an upper estimate of the memory of the parsed parameters. A short value, such as a number in a long array, needs
    /// many times the memory of its text, so values are counted by their separators. For short texts the maximum is assumed
    /// instead, because counting would take as long as parsing.
    pub(crate) fn memory(&self) -> usize {
        const SHORT_TEXT_BYTES: usize = 512;
        *self.memory.get_or_init(|| {
            let is_separator = |byte: &u8| matches!(byte, b',' | b':' | b'[' | b'{');
            let memory_of = |text: &str| {
                let values = match text.len() {
                    len @ ..=SHORT_TEXT_BYTES => len / 2,
                    _ => text.bytes().filter(|byte| is_separator(byte)).count(),
                };
                text.len().saturating_add(values.saturating_mul(size_of::<Json>()))
            };
            self.params.0.iter().map(|(name, text)| name.len() + memory_of(text)).sum()
        })
    }
}

impl<'a> ClientMessage<'a> {
    /// Parses a message. The reply to an invalid message has the id 0.
    pub(crate) fn parse(text: &'a str) -> Result<Self, RequestError> {
        let parse_error = |error: serde_json::Error| {
            let message = format!("the message must be one JSON object: {error}");
            RequestError::new(Code::ParseError, message)
        };
        let mut reader = serde_json::Deserializer::from_str(text);
        let params = Params(reader.deserialize_any(MembersVisitor).map_err(parse_error)?);
        reader.end().map_err(parse_error)?;
        let invalid = |message| RequestError::new(Code::InvalidRequest, message);
        let Some(name) = params.raw("type").and_then(parse_string).filter(|name| !name.is_empty()) else {
            return Err(invalid("\"type\" must be a non-empty string, such as \"store.get\""));
        };
        if name == "pong" {
            let timestamp = params.raw("timestamp").and_then(parse_number);
            let timestamp =
                timestamp.ok_or_else(|| invalid("\"timestamp\" of a pong must be the number from the ping"))?;
            return Ok(Self::Pong { timestamp });
        }
        let id = params.raw("id").and_then(Id::parse);
        let id = id.ok_or_else(|| invalid("\"id\" must be a finite number; the reply has the same id"))?;
        let operation = OperationId::named(&name);
        Ok(Self::Request(Request { id, name, operation, params, memory: OnceCell::new() }))
    }
}

/// The id of a request: a number, as the client wrote it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    len: u8,
    text: [u8; Self::MAX_LEN],
}

impl Id {
    /// The id in the reply to a message without a valid id.
    pub(crate) const NONE: Self = Self::digit(b'0');
    /// Sufficient for the shortest decimal form of every double.
    const MAX_LEN: usize = 30;

    const fn digit(digit: u8) -> Self {
        let mut text = [0; Self::MAX_LEN];
        text[0] = digit;
        Self { len: 1, text }
    }

    fn parse(raw: &str) -> Option<Self> {
        // Most ids are short integers, which need no parsing to be finite.
        let is_short_integer = raw.len() <= 15 && raw.bytes().all(|byte| byte.is_ascii_digit());
        let rounded;
        let mut digits = raw;
        if !is_short_integer {
            let number = parse_number(raw)?;
            if digits.len() > Self::MAX_LEN {
                // Shortened to digits of the same double.
                rounded = serde_json::Number::from_f64(number)?.to_string();
                digits = &rounded;
            }
        }
        let mut text = [0; Self::MAX_LEN];
        text.get_mut(..digits.len())?.copy_from_slice(digits.as_bytes());
        Some(Self { len: u8::try_from(digits.len()).ok()?, text })
    }

    /// Returns the text of the number.
    pub(crate) fn as_str(&self) -> &str {
        // A number is ASCII.
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// Returns the text of the number as bytes.
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

/// The members of a request. If a name occurs more than once, the last one wins.
#[derive(Debug)]
pub(crate) struct Params<'a>(Vec<(Cow<'a, str>, &'a str)>);

impl<'a> Params<'a> {
    /// Returns the JSON text of a parameter.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(known, _)| known == name).map(|(_, text)| *text)
    }

    /// Returns the JSON text of a parameter, unless it is null.
    pub(crate) fn non_null(&self, name: &str) -> Option<&'a str> {
        self.raw(name).filter(|text| *text != "null")
    }

    /// Returns a required, non-empty string.
    pub(crate) fn text(&self, name: &str) -> Result<Cow<'a, str>, RequestError> {
        let text = self.raw(name).and_then(parse_string).filter(|text| !text.is_empty());
        text.ok_or_else(|| self.invalid_param(name, "a non-empty string"))
    }

    /// Returns an optional, non-empty string.
    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<Cow<'a, str>>, RequestError> {
        self.non_null(name).map(|_| self.text(name)).transpose()
    }

    /// Returns an optional string, which may be empty.
    pub(crate) fn any_text(&self, name: &str) -> Result<Option<Cow<'a, str>>, RequestError> {
        self.non_null(name)
            .map(|text| parse_string(text).ok_or_else(|| self.invalid_param(name, "a string")))
            .transpose()
    }

    /// Returns a required value other than null.
    pub(crate) fn value(&self, name: &str) -> Result<Json, RequestError> {
        match self.non_null(name) {
            Some(text) => parse(name, text),
            None => Err(self.invalid_param(name, "a value other than null")),
        }
    }

    /// Returns a required object.
    pub(crate) fn object(&self, name: &str) -> Result<Map<String, Json>, RequestError> {
        match self.raw(name).filter(|text| text.starts_with('{')) {
            Some(text) => parse(name, text),
            None => Err(self.invalid_param(name, "an object")),
        }
    }

    /// Returns a required array.
    pub(crate) fn array(&self, name: &str) -> Result<Vec<Json>, RequestError> {
        match self.raw(name).filter(|text| text.starts_with('[')) {
            Some(text) => parse(name, text),
            None => Err(self.invalid_param(name, "an array")),
        }
    }

    /// Returns a required integer of at least 1.
    pub(crate) fn count(&self, name: &str) -> Result<usize, RequestError> {
        let expected = "an integer of at least 1";
        let number = self.raw(name).and_then(parse_number).ok_or_else(|| self.invalid_param(name, expected))?;
        if number < 1.0 || number.fract() != 0.0 {
            return Err(self.invalid_param(name, expected));
        }
        // A count above `usize::MAX` saturates, which means all records.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
        Ok(number as usize)
    }

    /// Returns the optional version of a record.
    pub(crate) fn version(&self, name: &str) -> Result<Option<u64>, RequestError> {
        let version =
            |text: &str| text.parse().map_err(|_| self.invalid_param(name, "the version of a record (an integer)"));
        self.non_null(name).map(version).transpose()
    }

    /// Returns an optional boolean; the default is false.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, RequestError> {
        match self.non_null(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(self.invalid_param(name, "true or false")),
        }
    }

    /// Returns the W3C trace context of the request, if it is well-formed.
    pub(crate) fn traceparent(&self) -> Option<Cow<'a, str>> {
        self.raw("traceparent").and_then(parse_string).filter(|text| is_traceparent(text))
    }

    /// Returns the compact JSON text of a parameter, to compare two requests.
    pub(crate) fn compact(&self, name: &str) -> String {
        let text = self.raw(name).unwrap_or_default();
        serde_json::from_str(text).map_or_else(|_| text.to_owned(), |value: Json| value.to_string())
    }

    /// Returns the error for a missing or invalid parameter.
    pub(crate) fn invalid_param(&self, name: &str, expected: &str) -> RequestError {
        RequestError::invalid(match self.raw(name) {
            None => format!("\"{name}\" is missing; expected {expected}"),
            Some(text) => {
                let found = if is_short_number(text) { text } else { type_name(text) };
                format!("\"{name}\" must be {expected}, got {found}")
            }
        })
    }
}

/// Reads the members of an object as slices of its text.
struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Vec<(Cow<'de, str>, &'de str)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::with_capacity(6);
        while let Some(name) = map.next_key_seed(MemberName)? {
            let value: &'de RawValue = map.next_value()?;
            members.push((name, value.get()));
        }
        Ok(members)
    }
}

/// Reads the name of a member, borrowed if it has no escapes.
struct MemberName;

impl<'de> DeserializeSeed<'de> for MemberName {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for MemberName {
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

/// Returns the value of a JSON string; `None` if it has an unpaired surrogate.
fn parse_string(text: &str) -> Option<Cow<'_, str>> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') { serde_json::from_str(text).ok().map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
}

/// Returns the value of a JSON number.
fn parse_number(text: &str) -> Option<f64> {
    let is_number = text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
    text.parse().ok().filter(|number: &f64| is_number && number.is_finite())
}

/// Parses the JSON text of a parameter. This can still fail: nesting, numbers and escapes have not been checked yet.
fn parse<T: serde::de::DeserializeOwned>(name: &str, text: &str) -> Result<T, RequestError> {
    serde_json::from_str(text).map_err(|error| {
        RequestError::new(Code::ValidationError, format!("\"{name}\" is not valid: {}", without_position(&error)))
    })
}

/// Removes the line and column from an error, because they are relative to the parameter and not to the message.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// Returns whether a text is a W3C `traceparent`: version, trace id, parent id and flags in lowercase hexadecimal. The version `ff`
/// and ids of all zeros are invalid.
fn is_traceparent(text: &str) -> bool {
    let mut parts = text.split('-');
    let mut part = |len: usize, invalid: u8| {
        parts.next().is_some_and(|part| {
            let is_hex = part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            part.len() == len && is_hex && part.bytes().any(|byte| byte != invalid)
        })
    };
    // Flags may have any value.
    part(2, b'f') && part(32, b'0') && part(16, b'0') && part(2, b' ') && parts.next().is_none()
}

/// Returns whether errors should quote the number itself.
fn is_short_number(text: &str) -> bool {
    type_name(text) == "a number" && text.len() <= 24
}

/// Returns the type of a JSON value, for errors.
fn type_name(text: &str) -> &'static str {
    match text.as_bytes() {
        b"\"\"" => "an empty string",
        [b'"', ..] if parse_string(text).is_none() => "a string with an unpaired surrogate",
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
        ClientMessage::parse(text).err().map(|error| error.code)
    }

    fn id(text: &str) -> String {
        match ClientMessage::parse(&format!(r#"{{"type":"x","id":{text}}}"#)).unwrap() {
            ClientMessage::Request(request) => request.id.to_string(),
            ClientMessage::Pong { .. } => unreachable!(),
        }
    }

    #[test]
    fn invalid_messages_are_rejected() {
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
    fn ids_are_echoed_as_sent() {
        for text in ["0", "-7", "1.5", "1e3", "9007199254740991"] {
            assert_eq!(id(text), text);
        }
        assert_eq!(id(&format!("1.{}", "0".repeat(1000))), "1.0");
        assert_eq!(Id::NONE.to_string(), "0");
    }

    #[test]
    fn last_of_duplicate_members_wins() {
        let ClientMessage::Request(request) = ClientMessage::parse(r#"{"id":1,"type":"x","a":1,"\u0061":2}"#).unwrap()
        else {
            unreachable!()
        };
        assert_eq!(request.params.raw("a"), Some("2"));
    }

    #[test]
    fn nesting_limit_applies_only_to_members_that_are_read() {
        let deep = format!(r#"{{"id":1,"type":"x","deep":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let ClientMessage::Request(request) = ClientMessage::parse(&deep).unwrap() else { unreachable!() };
        let error = request.params.value("deep").unwrap_err();
        assert_eq!(error.code, Code::ValidationError);
        assert_eq!(error.message, "\"deep\" is not valid: recursion limit exceeded");
    }

    #[test]
    fn errors_state_parameter_expectation_and_value() {
        let text = r#"{"id":1,"type":"x","s":"","n":0,"f":1.5,"o":[],"v":"1","b":1}"#;
        let ClientMessage::Request(Request { params, .. }) = ClientMessage::parse(text).unwrap() else {
            unreachable!()
        };
        let message = |error: RequestError| error.message.into_owned();
        assert_eq!(message(params.text("s").unwrap_err()), "\"s\" must be a non-empty string, got an empty string");
        assert_eq!(message(params.text("n").unwrap_err()), "\"n\" must be a non-empty string, got 0");
        assert_eq!(message(params.text("q").unwrap_err()), "\"q\" is missing; expected a non-empty string");
        assert_eq!(message(params.count("n").unwrap_err()), "\"n\" must be an integer of at least 1, got 0");
        assert!(params.count("f").is_err() && params.object("o").is_err() && params.version("v").is_err());
        assert!(params.flag("b").is_err() && params.value("q").is_err() && params.array("s").is_err());
    }
}
