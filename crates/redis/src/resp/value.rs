//! Values of RESP, and the messages that carry them.

use std::fmt::{self, Debug, Formatter};

use bytes::Bytes;

/// A value of RESP3, which includes the values of RESP2.
///
/// Decoded strings are slices of the input: a string that is kept for long keeps the whole read in memory.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Null: `_`, and the null string and null array of RESP2.
    Null,
    /// `#t` or `#f`.
    Boolean(bool),
    /// An integer of 64 bits.
    Integer(i64),
    /// A floating point number, which may be infinite or not a number.
    Double(f64),
    /// An integer of any size, as decimal digits with an optional sign.
    BigNumber(Bytes),
    /// A simple string without line breaks, like `OK`.
    Simple(Bytes),
    /// A string of bytes, also one received in chunks.
    Bulk(Bytes),
    /// A string with a format of three letters: `txt` or `mkd`.
    Verbatim([u8; 3], Bytes),
    /// An error without line breaks. Its first word is its code.
    SimpleError(Bytes),
    /// An error of any bytes. Its first word is its code.
    BlobError(Bytes),
    /// Values in order.
    Array(Vec<Value>),
    /// Values that should be distinct, in the order of the reply.
    Set(Vec<Value>),
    /// Keys and values, in the order of the reply.
    Map(Vec<(Value, Value)>),
    /// A value with attributes, if the decoder [keeps them](super::DecoderOptions::keep_attributes).
    Attributed(Box<Attributed>),
}

/// A value with attributes.
#[derive(Debug, Clone, PartialEq)]
pub struct Attributed {
    /// The attributes.
    pub attributes: Vec<(Value, Value)>,
    /// The value. A decoder never nests [`Value::Attributed`].
    pub value: Value,
}

/// A message from a server: the reply to the oldest command in flight, or a push.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Message {
    /// A reply, which may be an error.
    Reply(Value),
    /// A push. Its first element is its kind: `message`, `invalidate`. Its attributes are skipped.
    Push(Vec<Value>),
}

impl Value {
    /// Returns the bytes of a simple, bulk or verbatim string.
    pub fn as_bytes(&self) -> Option<&Bytes> {
        match self.bare() {
            Self::Simple(bytes) | Self::Bulk(bytes) | Self::Verbatim(_, bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns the text of an error.
    pub fn as_error(&self) -> Option<&Bytes> {
        match self.bare() {
            Self::SimpleError(text) | Self::BlobError(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value without its attributes.
    pub fn bare(&self) -> &Self {
        let mut value = self;
        while let Self::Attributed(attributed) = value {
            value = &attributed.value;
        }
        value
    }

    /// Returns the value without its attributes.
    #[must_use]
    pub fn into_bare(self) -> Self {
        let mut value = self;
        while let Self::Attributed(attributed) = value {
            value = attributed.value;
        }
        value
    }

    /// Returns the name of the type, for messages.
    pub fn type_name(&self) -> &'static str {
        match self.bare() {
            Self::Null => "null",
            Self::Boolean(_) => "boolean",
            Self::Integer(_) => "integer",
            Self::Double(_) => "double",
            Self::BigNumber(_) => "big number",
            Self::Simple(_) => "simple string",
            Self::Bulk(_) => "bulk string",
            Self::Verbatim(..) => "verbatim string",
            Self::SimpleError(_) | Self::BlobError(_) => "error",
            Self::Array(_) => "array",
            Self::Set(_) => "set",
            Self::Map(_) => "map",
            Self::Attributed(_) => "value with attributes",
        }
    }
}

/// A bulk string.
impl From<Bytes> for Value {
    fn from(bytes: Bytes) -> Self {
        Self::Bulk(bytes)
    }
}

/// A bulk string.
impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Bulk(Bytes::from_static(text.as_bytes()))
    }
}

impl From<i64> for Value {
    fn from(integer: i64) -> Self {
        Self::Integer(integer)
    }
}

/// Similar to a Rust literal, with the type byte where types look alike. Long strings are cut.
impl Debug for Value {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Boolean(value) => Debug::fmt(value, f),
            Self::Integer(value) => Debug::fmt(value, f),
            Self::Double(value) => Debug::fmt(value, f),
            Self::BigNumber(digits) => write!(f, "({}", digits.escape_ascii()),
            Self::Simple(text) => write!(f, "+{}", text.escape_ascii()),
            Self::Bulk(bytes) => text(f, "", bytes),
            Self::Verbatim(format, bytes) => {
                write!(f, "={}:", format.escape_ascii())?;
                text(f, "", bytes)
            }
            Self::SimpleError(bytes) => text(f, "-", bytes),
            Self::BlobError(bytes) => text(f, "!", bytes),
            Self::Array(items) => f.debug_list().entries(items).finish(),
            Self::Set(items) => f.debug_set().entries(items).finish(),
            Self::Map(pairs) => f.debug_map().entries(pairs.iter().map(|(key, value)| (key, value))).finish(),
            Self::Attributed(attributed) => attributed.fmt(f),
        }
    }
}

/// Bytes of a string that are shown: enough for an error or a small record, and not too much for a log line.
const SHOWN: usize = 256;

fn text(f: &mut Formatter<'_>, sign: &str, bytes: &[u8]) -> fmt::Result {
    write!(f, "{sign}\"{}", bytes[..bytes.len().min(SHOWN)].escape_ascii())?;
    if bytes.len() > SHOWN { write!(f, "\"… ({} bytes)", bytes.len()) } else { f.write_str("\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_small() {
        assert!(size_of::<Value>() <= 40, "{}", size_of::<Value>());
        assert!(size_of::<Message>() <= 40, "{}", size_of::<Message>());
        assert!(size_of::<Option<Message>>() <= 40, "{}", size_of::<Option<Message>>());
    }

    #[test]
    fn debug_is_short() {
        let map = Value::Map(vec![
            ("k\n".into(), Value::Array(vec![1.into(), Value::Null, Value::Double(0.5), Value::Boolean(true)])),
            (Value::Simple("OK".into()), Value::SimpleError("ERR no".into())),
            (Value::BlobError("X".into()), Value::Verbatim(*b"txt", "v".into())),
            (Value::BigNumber("-12".into()), Value::Set(vec![])),
        ]);
        let shown = r#"{"k\n": [1, null, 0.5, true], +OK: -"ERR no", !"X": =txt:"v", (-12: {}}"#;
        assert_eq!(format!("{map:?}"), shown);

        let long = format!("{:?}", Value::from(Bytes::from(vec![b'a'; 100_000])));
        assert!(long.len() < 300 && long.ends_with("a\"… (100000 bytes)"), "{long}");
    }

    #[test]
    fn accessors_skip_attributes() {
        let attributed = |value| Value::Attributed(Box::new(Attributed { attributes: vec![], value }));
        let string = attributed(attributed("a".into()));
        assert_eq!(string.as_bytes().map(|bytes| &bytes[..]), Some(&b"a"[..]));
        assert_eq!((string.type_name(), string.into_bare()), ("bulk string", "a".into()));
        let error = attributed(Value::BlobError("E".into()));
        assert_eq!((error.as_error().is_some(), error.as_bytes()), (true, None));
    }
}
