//! A decoder for comparison that is as simple as possible: recursive, on the whole input, with copies.

use bytes::Bytes;
use tidewire_redis::Value;
use tidewire_redis::resp::{Attributed, DecodeErrorKind as Kind, DecoderOptions, Message};

/// Decodes a whole stream. Returns its messages and how it ended.
pub(crate) fn decode(options: DecoderOptions, wire: &[u8]) -> (Vec<Message>, Result<(), Kind>) {
    let (mut decoder, mut messages) = (ReferenceDecoder { options, rest: wire, elements: 0 }, Vec::new());
    while !decoder.rest.is_empty() {
        decoder.elements = 0;
        match decoder.message() {
            Ok(message) => messages.push(message),
            Err(kind) => return (messages, Err(kind)),
        }
    }
    (messages, Ok(()))
}

struct ReferenceDecoder<'a> {
    options: DecoderOptions,
    rest: &'a [u8],
    elements: usize,
}

enum Item {
    Value(Value),
    Push(Vec<Value>),
    End,
}

impl<'a> ReferenceDecoder<'a> {
    fn message(&mut self) -> Result<Message, Kind> {
        match self.item(0)? {
            Item::Value(value) => Ok(Message::Reply(value)),
            Item::Push(items) => Ok(Message::Push(items)),
            Item::End => Err(Kind::StrayEnd),
        }
    }

    fn item(&mut self, depth: usize) -> Result<Item, Kind> {
        let mut attributes: Option<Vec<(Value, Value)>> = None;
        let item = loop {
            match self.rest.first() {
                Some(b'|') => {
                    let first = self.rest[0];
                    let Some(len) = self.length()? else { return Err(Kind::Length { first }) };
                    self.count(len.saturating_mul(2).saturating_add(1))?;
                    self.nest(depth)?;
                    let pairs = attributes.get_or_insert_default();
                    for _ in 0..len {
                        pairs.push((self.value(depth + 1)?, self.value(depth + 1)?));
                    }
                }
                _ => break self.bare(depth)?,
            }
        };
        match (item, attributes) {
            (Item::Value(value), Some(attributes)) if self.options.keep_attributes => {
                Ok(Item::Value(Value::Attributed(Box::new(Attributed { attributes, value }))))
            }
            (Item::End, Some(_)) if depth > 0 => Err(Kind::StrayAttributes),
            (item, _) => Ok(item),
        }
    }

    /// Decodes a required value.
    fn value(&mut self, depth: usize) -> Result<Value, Kind> {
        match self.item(depth) {
            Ok(Item::Value(value)) => Ok(value),
            // An unexpected end is reported before missing attributes.
            Ok(_) | Err(Kind::StrayAttributes) => Err(Kind::StrayEnd),
            Err(kind) => Err(kind),
        }
    }

    fn bare(&mut self, depth: usize) -> Result<Item, Kind> {
        let first = *self.rest.first().ok_or(Kind::Truncated)?;
        let value = match first {
            b'$' | b'!' | b'=' => return self.blob(first).map(Item::Value),
            b'>' if depth > 0 => return Err(Kind::NestedPush),
            b'*' | b'~' | b'%' | b'>' => return self.aggregate(first, depth),
            b'+' => Value::Simple(copied(self.line()?)),
            b'-' => Value::SimpleError(copied(self.line()?)),
            b'.' => {
                return if self.line()?.is_empty() { Ok(Item::End) } else { Err(Kind::StrayEnd) };
            }
            b'_' if self.line()?.is_empty() => Value::Null,
            b'_' => return Err(Kind::Null),
            b'#' => match self.line()? {
                b"t" => Value::Boolean(true),
                b"f" => Value::Boolean(false),
                _ => return Err(Kind::Boolean),
            },
            b':' => {
                let line = self.text(Kind::Integer)?;
                let digits = line.strip_prefix(['+', '-']).unwrap_or(line);
                if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(Kind::Integer);
                }
                Value::Integer(line.parse().map_err(|_| Kind::IntegerRange)?)
            }
            b',' => {
                let line = self.text(Kind::Double)?;
                let name = line.strip_prefix(['+', '-']).unwrap_or(line).to_ascii_lowercase();
                let value: f64 = line.parse().map_err(|_| Kind::Double)?;
                if !value.is_finite() && name != "inf" && name != "nan" {
                    return Err(Kind::Double);
                }
                Value::Double(value)
            }
            b'(' => {
                let line = self.text(Kind::BigNumber)?;
                let digits = line.strip_prefix(['+', '-']).unwrap_or(line);
                if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(Kind::BigNumber);
                }
                Value::BigNumber(copied(line.as_bytes()))
            }
            b';' => return Err(Kind::StrayChunk),
            byte => return Err(Kind::UnknownType { byte }),
        };
        Ok(Item::Value(value))
    }

    fn blob(&mut self, first: u8) -> Result<Value, Kind> {
        if first == b'$' && self.peek()? == b"-1" {
            self.line()?;
            return Ok(Value::Null);
        }
        if first == b'$' && self.peek()? == b"?" {
            self.line()?;
            let mut all = Vec::new();
            loop {
                match self.rest.first() {
                    None => return Err(Kind::Truncated),
                    Some(b';') => {}
                    Some(&byte) => return Err(Kind::ChunkExpected { byte }),
                }
                let Some(len) = self.length()? else { return Err(Kind::Length { first: b';' }) };
                self.fits((len as u64).saturating_add(all.len() as u64))?;
                if len == 0 {
                    return Ok(Value::Bulk(all.into()));
                }
                all.extend_from_slice(self.body(len)?);
            }
        }
        let Some(len) = self.length()? else { return Err(Kind::Length { first }) };
        self.fits(len as u64)?;
        if first == b'=' && len < 4 {
            return Err(Kind::Verbatim);
        }
        let body = self.body(len)?;
        match (first, body) {
            (b'$', _) => Ok(Value::Bulk(copied(body))),
            (b'!', _) => Ok(Value::BlobError(copied(body))),
            (_, [a, b, c, b':', rest @ ..]) => Ok(Value::Verbatim([*a, *b, *c], copied(rest))),
            _ => Err(Kind::Verbatim),
        }
    }

    fn aggregate(&mut self, first: u8, depth: usize) -> Result<Item, Kind> {
        if first == b'*' && self.peek()? == b"-1" {
            self.line()?;
            return Ok(Item::Value(Value::Null));
        }
        let width = if first == b'%' { 2 } else { 1 };
        let mut items = Vec::new();
        if first != b'>' && self.peek()? == b"?" {
            self.line()?;
            self.nest(depth)?;
            while let Item::Value(value) = self.item(depth + 1)? {
                self.count(1)?;
                items.push(value);
            }
            if items.len() % width != 0 {
                return Err(Kind::OddMap);
            }
        } else {
            let Some(len) = self.length()? else { return Err(Kind::Length { first }) };
            self.count(len.saturating_mul(width))?;
            self.nest(depth)?;
            for _ in 0..len * width {
                items.push(self.value(depth + 1)?);
            }
        }
        Ok(match first {
            b'*' => Item::Value(Value::Array(items)),
            b'~' => Item::Value(Value::Set(items)),
            b'>' => Item::Push(items),
            _ => {
                let pairs = items.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                Item::Value(Value::Map(pairs.collect()))
            }
        })
    }

    fn count(&mut self, elements: usize) -> Result<(), Kind> {
        let max = self.options.max_elements;
        self.elements = self.elements.saturating_add(elements);
        if self.elements > max { Err(Kind::TooManyElements { max }) } else { Ok(()) }
    }

    fn nest(&self, depth: usize) -> Result<(), Kind> {
        let max = self.options.max_depth;
        if depth >= max { Err(Kind::TooDeep { max }) } else { Ok(()) }
    }

    fn fits(&self, len: u64) -> Result<(), Kind> {
        let max = self.options.max_bulk;
        if len > max as u64 { Err(Kind::BulkTooLong { len, max }) } else { Ok(()) }
    }

    /// Parses a numeric length.
    fn length(&mut self) -> Result<Option<usize>, Kind> {
        let line = self.line()?;
        if line.is_empty() || !line.iter().all(u8::is_ascii_digit) {
            return Ok(None);
        }
        Ok(Some(std::str::from_utf8(line).unwrap().parse().unwrap_or(usize::MAX)))
    }

    fn text(&mut self, kind: Kind) -> Result<&'a str, Kind> {
        std::str::from_utf8(self.line()?).map_err(|_| kind)
    }

    fn body(&mut self, len: usize) -> Result<&'a [u8], Kind> {
        if self.rest.len() < len + 2 {
            return Err(Kind::Truncated);
        }
        let (body, rest) = self.rest.split_at(len);
        self.rest = rest.strip_prefix(b"\r\n").ok_or(Kind::BulkEnd)?;
        Ok(body)
    }

    fn peek(&self) -> Result<&'a [u8], Kind> {
        ReferenceDecoder { rest: self.rest, ..*self }.line()
    }

    /// Returns the content of the next line.
    fn line(&mut self) -> Result<&'a [u8], Kind> {
        let max = self.options.max_line;
        let end = self.rest.iter().position(|byte| b"\r\n".contains(byte));
        if end.unwrap_or(self.rest.len()) - 1 > max {
            return Err(Kind::LineTooLong { max });
        }
        let end = end.ok_or(Kind::Truncated)?;
        let (line, rest) = self.rest.split_at(end);
        match rest {
            [b'\r', b'\n', rest @ ..] => self.rest = rest,
            [b'\r'] => return Err(Kind::Truncated),
            _ => return Err(Kind::LineBreak),
        }
        Ok(&line[1..])
    }
}

fn copied(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
