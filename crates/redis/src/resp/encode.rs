//! The encoder: values to bytes.

use std::io::Write;

use bytes::{BufMut, BytesMut};

use super::line::is_big_number;
use super::value::{Message, Value};

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Version {
    /// RESP2, which every peer understands. Maps are encoded as arrays of twice the length, sets and pushes as arrays, doubles and
    /// big numbers as strings, booleans as 0 or 1. Attributes are omitted.
    Resp2,
    /// RESP3, which a peer understands after `HELLO 3`.
    #[default]
    Resp3,
}

/// Error of encoding a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// A simple string or error contains a line break.
    #[error("a simple string or error contains a CR or LF; use a bulk string or, in RESP3, a blob error")]
    LineBreak,
    /// A big number is not made of digits.
    #[error("invalid big number; expected digits")]
    BigNumber,
}

/// A buffer to encode to: `Vec<u8>` or `BytesMut`.
pub trait Output {
    /// Reserves memory for this number of bytes.
    fn reserve_bytes(&mut self, additional: usize);
    /// Appends bytes.
    fn append(&mut self, bytes: &[u8]);
}

impl Output for Vec<u8> {
    fn reserve_bytes(&mut self, additional: usize) {
        self.reserve(additional);
    }

    #[inline]
    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Output for BytesMut {
    fn reserve_bytes(&mut self, additional: usize) {
        self.reserve(additional);
    }

    #[inline]
    fn append(&mut self, bytes: &[u8]) {
        self.put_slice(bytes);
    }
}

/// Appends a command, whose first argument is its name. Memory is reserved once.
///
/// ```
/// let mut output = Vec::new();
/// tidewire_redis::resp::encode_command(&["SET", "k", ""], &mut output);
/// assert_eq!(output, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n");
/// ```
pub fn encode_command<A: AsRef<[u8]>>(arguments: &[A], output: &mut impl Output) {
    output.reserve_bytes(command_len(arguments));
    put_head(b'*', arguments.len(), output);
    for argument in arguments {
        encode_argument(argument.as_ref(), output);
    }
}

/// Returns the length of an encoded command.
fn command_len<A: AsRef<[u8]>>(arguments: &[A]) -> usize {
    let arguments_len = |argument: &A| {
        let len = argument.as_ref().len();
        head_len(len) + len + 2
    };
    head_len(arguments.len()) + arguments.iter().map(arguments_len).sum::<usize>()
}

/// Appends one argument of a command.
pub(crate) fn encode_argument(argument: &[u8], output: &mut impl Output) {
    put_blob(b'$', argument, output);
}

impl Value {
    /// Appends the encoded value. `output` is unchanged after an error.
    pub fn encode(&self, version: Version, output: &mut BytesMut) -> Result<(), EncodeError> {
        let before = output.len();
        let encoded = put_value(self, version, output);
        if encoded.is_err() {
            output.truncate(before);
        }
        encoded
    }
}

impl Message {
    /// Appends the encoded message. `output` is unchanged after an error.
    pub fn encode(&self, version: Version, output: &mut BytesMut) -> Result<(), EncodeError> {
        match self {
            Self::Reply(value) => value.encode(version, output),
            Self::Push(items) => {
                let before = output.len();
                put_head(if version == Version::Resp3 { b'>' } else { b'*' }, items.len(), output);
                let encoded = put_values(items, version, output);
                if encoded.is_err() {
                    output.truncate(before);
                }
                encoded
            }
        }
    }
}

/// Recursive, like dropping a value.
fn put_value(value: &Value, version: Version, output: &mut BytesMut) -> Result<(), EncodeError> {
    let is_new = version == Version::Resp3;
    match value {
        Value::Null => output.put_slice(if is_new { b"_\r\n" } else { b"$-1\r\n" }),
        Value::Boolean(value) if is_new => output.put_slice(if *value { b"#t\r\n" } else { b"#f\r\n" }),
        Value::Boolean(value) => put_line(b':', if *value { b"1" } else { b"0" }, output)?,
        Value::Integer(value) => put_line(b':', itoa::Buffer::new().format(*value).as_bytes(), output)?,
        Value::Double(value) => {
            let mut text = [0; 32];
            let text = double(*value, &mut text);
            if is_new { put_line(b',', text, output)? } else { put_blob(b'$', text, output) }
        }
        Value::BigNumber(digits) if !is_big_number(digits) => return Err(EncodeError::BigNumber),
        Value::BigNumber(digits) if is_new => put_line(b'(', digits, output)?,
        Value::Simple(text) => put_line(b'+', text, output)?,
        Value::BlobError(text) if is_new => put_blob(b'!', text, output),
        Value::SimpleError(text) | Value::BlobError(text) => put_line(b'-', text, output)?,
        Value::Verbatim(format, bytes) if is_new => {
            put_head(b'=', bytes.len() + 4, output);
            output.put_slice(format);
            output.put_slice(b":");
            output.put_slice(bytes);
            output.put_slice(b"\r\n");
        }
        Value::Bulk(bytes) | Value::Verbatim(_, bytes) | Value::BigNumber(bytes) => put_blob(b'$', bytes, output),
        Value::Array(items) => {
            put_head(b'*', items.len(), output);
            put_values(items, version, output)?;
        }
        Value::Set(items) => {
            put_head(if is_new { b'~' } else { b'*' }, items.len(), output);
            put_values(items, version, output)?;
        }
        Value::Map(pairs) => {
            let (first, len) = if is_new { (b'%', pairs.len()) } else { (b'*', pairs.len() * 2) };
            put_head(first, len, output);
            put_pairs(pairs, version, output)?;
        }
        Value::Attributed(attributed) => {
            if is_new {
                put_head(b'|', attributed.attributes.len(), output);
                put_pairs(&attributed.attributes, version, output)?;
            }
            put_value(&attributed.value, version, output)?;
        }
    }
    Ok(())
}

fn put_values(items: &[Value], version: Version, output: &mut BytesMut) -> Result<(), EncodeError> {
    items.iter().try_for_each(|item| put_value(item, version, output))
}

fn put_pairs(pairs: &[(Value, Value)], version: Version, output: &mut BytesMut) -> Result<(), EncodeError> {
    pairs.iter().try_for_each(|(key, value)| {
        put_value(key, version, output)?;
        put_value(value, version, output)
    })
}

fn put_line(first: u8, content: &[u8], output: &mut BytesMut) -> Result<(), EncodeError> {
    if memchr::memchr2(b'\r', b'\n', content).is_some() {
        return Err(EncodeError::LineBreak);
    }
    output.reserve(content.len() + 3);
    output.put_u8(first);
    output.put_slice(content);
    output.put_slice(b"\r\n");
    Ok(())
}

fn put_blob(first: u8, content: &[u8], output: &mut impl Output) {
    put_head(first, content.len(), output);
    output.append(content);
    output.append(b"\r\n");
}

fn put_head(first: u8, len: usize, output: &mut impl Output) {
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(len).as_bytes();
    // One append costs less than three.
    let mut head = [0; 24];
    let end = 1 + digits.len();
    head[0] = first;
    head[1..end].copy_from_slice(digits);
    head[end..end + 2].copy_from_slice(b"\r\n");
    output.append(&head[..end + 2]);
}

/// Returns the length of the header of a value of this length.
fn head_len(len: usize) -> usize {
    len.checked_ilog10().map_or(1, |log| log as usize + 1) + 3
}

/// Returns the shortest text that is parsed as the same number.
fn double(value: f64, text: &mut [u8; 32]) -> &[u8] {
    if value.is_nan() {
        return b"nan";
    }
    let mut rest = &mut text[..];
    // At most 24 bytes: a sign, 17 digits, a point and an exponent.
    let written = write!(rest, "{value:?}");
    debug_assert!(written.is_ok(), "{value} is longer than any double");
    let left = rest.len();
    &text[..32 - left]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reserved_exactly() {
        for arguments in [vec![], vec![vec![b'a'; 9], vec![b'b'; 10], vec![], vec![b'c'; 12_345]], vec![vec![]; 100]] {
            let mut output = Vec::new();
            encode_command(&arguments, &mut output);
            assert_eq!(output.len(), command_len(&arguments));
            let mut bytes = BytesMut::new();
            encode_command(&arguments, &mut bytes);
            assert_eq!(bytes, output);
        }
    }

    #[test]
    fn doubles_have_their_shortest_form() {
        for (value, expected) in [
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (1e300, "1e300"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (-f64::NAN, "nan"),
            (-f64::MIN_POSITIVE, "-2.2250738585072014e-308"),
        ] {
            assert_eq!(double(value, &mut [0; 32]), expected.as_bytes());
        }
    }
}
