//! The decoder: bytes to messages.
//!
//! It makes one pass: each byte is examined once, on arrival, however the input is split. Complete parts leave the input at once,
//! so an incomplete reply is a stack of open aggregates and at most one string or line in the input. Memory grows with the bytes
//! that have arrived: an announced length is compared with the limits, and is otherwise only a hint.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memchr2;

use super::error::{DecodeError, DecodeErrorKind as Kind};
use super::limits::DecoderOptions;
use super::line::{self, LINE_OVERHEAD, Length};
use super::open::{Aggregate, Closed, Open, Pairs};
use super::value::{Attributed, Message, Value};

/// A decoder of replies and pushes of RESP3 and RESP2.
///
/// The input can be split at any byte. Strings are split off the input without a copy, except strings in chunks. It also decodes
/// commands, which are arrays of strings.
///
/// ```
/// use bytes::BytesMut;
/// use tidewire_redis::resp::{DecodeErrorKind, Decoder};
///
/// let mut decoder = Decoder::default();
/// let error = decoder.decode(&mut BytesMut::from("HTTP/1.1 400 Bad Request\r\n")).unwrap_err();
/// assert_eq!(error.kind, DecodeErrorKind::UnknownType { byte: b'H' });
/// ```
#[derive(Debug, Default)]
pub struct Decoder {
    /// Clamped, so that no sum of lengths overflows.
    options: DecoderOptions,
    next: Next,
    /// Bytes at the front of the input that were searched for the end of a line. Zero at the beginning of a line.
    scanned: usize,
    /// The aggregates around the next value, the outermost first.
    open: Vec<Open>,
    /// Attributes of the next value. Empty if they are skipped.
    attributes: Option<Pairs>,
    /// The chunks of the current string.
    gathered: Vec<u8>,
    /// Elements of the current reply, including announced ones.
    elements: usize,
    /// Bytes taken from the input.
    offset: u64,
    failed: Option<DecodeError>,
}

/// The kind of data at the front of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Next {
    /// The first line of a value.
    #[default]
    Head,
    /// A string, after its length.
    Body(Blob, usize),
    /// The length of a chunk.
    ChunkHead,
    /// A chunk.
    Chunk(usize),
}

/// The strings that have a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blob {
    Bulk,
    Verbatim,
    Error,
}

enum Step {
    /// More input is needed.
    Starved,
    /// There is no complete value yet, but more input.
    Onward,
    Value(Value),
    Whole(Message),
}

const OK: &[u8] = b"+OK\r\n";
/// Bytes after a string: CR and LF.
const END: usize = 2;
/// Strings that are split off together.
const MAX_RUN: usize = 32;
/// Announced values to reserve memory for: usual replies fit, and nested announcements cost little.
const MAX_RESERVED_VALUES: usize = 1024;
/// Memory to reserve for an announced string. Beyond it, memory grows with the input.
const FIRST_READ_BYTES: usize = 64 << 10;
/// Memory reserved in addition, so that the end of a string is read together with what follows it.
const READ_AHEAD_BYTES: usize = 4 << 10;

impl Decoder {
    /// Creates a decoder at the beginning of a stream.
    pub fn new(options: DecoderOptions) -> Self {
        Self { options: options.clamped(), ..Self::default() }
    }

    /// Takes the next message from the front of `input`. Returns `None` if it is incomplete.
    ///
    /// The complete parts of an incomplete message are taken from the input, too. So one decoder must see the whole stream, and
    /// nothing else may take bytes from the input.
    ///
    /// A full `input` is grown for the rest of a long string. To let the decoder limit the memory, a reader should read into the free
    /// capacity, and reserve memory itself only if the capacity is exhausted.
    ///
    /// # Errors
    ///
    /// If the input is not RESP or exceeds a limit. The stream cannot be decoded further: every later call returns the same error.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Message>, DecodeError> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        if self.is_at_head()
            && self.open.is_empty()
            && let Some(value) = self.usual(input)
        {
            return Ok(Some(Message::Reply(value)));
        }
        self.run(input).map_err(|kind| {
            let failed = DecodeError { kind, offset: self.offset };
            // Frees the incomplete message.
            *self = Self { options: self.options, failed: Some(failed), ..Self::default() };
            failed
        })
    }

    /// Returns whether the last [`decode`](Self::decode) ended inside a message. `input` is as it was left.
    pub fn is_midway(&self, input: &BytesMut) -> bool {
        !input.is_empty() || self.next != Next::Head || !self.open.is_empty() || self.attributes.is_some()
    }

    /// Checks that the stream may end here. `input` is as the last [`decode`](Self::decode) left it.
    ///
    /// # Errors
    ///
    /// If the stream ends inside a message, or had an error before.
    pub fn finish(&self, input: &BytesMut) -> Result<(), DecodeError> {
        match self.failed {
            Some(failed) => Err(failed),
            None if self.is_midway(input) => Err(DecodeError { kind: Kind::Truncated, offset: self.offset }),
            None => Ok(()),
        }
    }

    /// Whether nothing of the next value was seen yet.
    fn is_at_head(&self) -> bool {
        self.next == Next::Head && self.scanned == 0 && self.attributes.is_none()
    }

    fn run(&mut self, input: &mut BytesMut) -> Result<Option<Message>, Kind> {
        loop {
            if self.is_at_head() && !self.open.is_empty() {
                self.strings(input);
            }
            let mut step = match self.next {
                Next::Head => self.head(input)?,
                Next::Body(blob, len) => self.body(input, blob, len)?,
                Next::ChunkHead => self.chunk_head(input)?,
                Next::Chunk(len) => self.chunk(input, len)?,
            };
            while let Step::Value(value) = step {
                step = self.place(value)?;
            }
            match step {
                Step::Starved => return Ok(None),
                Step::Whole(message) => {
                    self.elements = 0;
                    return Ok(Some(message));
                }
                Step::Onward | Step::Value(_) => {}
            }
        }
    }

    /// Decodes the most frequent replies: a string, a number, OK. All others, also invalid ones, are left to [`run`](Self::run).
    #[inline]
    fn usual(&mut self, input: &mut BytesMut) -> Option<Value> {
        match input.first()? {
            b'$' => {
                let (head, len) = self.string(input)?;
                Some(Value::Bulk(self.split(input, head, len)))
            }
            b':' => {
                let (number, head) = self.short(input)?;
                self.skip(input, head);
                Some(Value::Integer(number.cast_signed()))
            }
            b'+' if input.starts_with(OK) && self.options.max_line >= 2 => {
                self.skip(input, OK.len());
                Some(Value::Simple(Bytes::from_static(b"OK")))
            }
            _ => None,
        }
    }

    /// Returns the position of the content of a string, and its length, if the string is complete and valid.
    #[inline]
    fn string(&self, input: &[u8]) -> Option<(usize, usize)> {
        if input.first() != Some(&b'$') {
            return None;
        }
        let (len, head) = line::short(input)?;
        let len = usize::try_from(len).ok()?;
        let is_fitting = len <= self.options.max_bulk && head - LINE_OVERHEAD <= self.options.max_line;
        let is_whole = is_fitting && input.get(head + len..head + len + END)? == b"\r\n";
        is_whole.then_some((head, len))
    }

    /// Takes a run of strings of the innermost aggregate, except its last element. Splitting them off together costs half as much as
    /// separately.
    fn strings(&mut self, input: &mut BytesMut) {
        if input.first() != Some(&b'$') {
            return;
        }
        let Some(mut open) = self.open.pop() else { return };
        let mut found = [(0, 0); MAX_RUN];
        loop {
            let most = open.known_left().saturating_sub(1).min(MAX_RUN);
            let (mut count, mut end) = (0, 0);
            while count < most
                && let Some((head, len)) = self.string(&input[end..])
            {
                found[count] = (end + head, len);
                end += head + len + END;
                count += 1;
            }
            if count == 0 {
                break;
            }
            let run = input.split_to(end).freeze();
            self.offset += end as u64;
            open.push_all(found[..count].iter().map(|&(start, len)| Value::Bulk(run.slice(start..start + len))));
        }
        self.open.push(open);
    }

    fn head(&mut self, input: &mut BytesMut) -> Result<Step, Kind> {
        let Some(&first) = input.first() else { return Ok(Step::Starved) };
        match first {
            b'$' => self.blob(input, Blob::Bulk),
            b'*' => self.aggregate(input, Aggregate::Array),
            b':' => self.integer(input),
            b'%' => self.aggregate(input, Aggregate::Map),
            b'~' => self.aggregate(input, Aggregate::Set),
            b'>' if self.open.is_empty() => self.aggregate(input, Aggregate::Push),
            b'>' => Err(Kind::NestedPush),
            b'|' => self.aggregate(input, Aggregate::Attributes),
            b'=' => self.blob(input, Blob::Verbatim),
            b'!' => self.blob(input, Blob::Error),
            b'+' | b'-' | b'(' | b',' | b'#' | b'_' | b'.' => match self.line(input)? {
                None => Ok(Step::Starved),
                Some(len) if first == b'.' => self.end(input, len),
                Some(len) => self.scalar(input, first, len).map(Step::Value),
            },
            b';' => Err(Kind::StrayChunk),
            byte => Err(Kind::UnknownType { byte }),
        }
    }

    /// Decodes a value of one line with `len` bytes of content.
    fn scalar(&mut self, input: &mut BytesMut, first: u8, len: usize) -> Result<Value, Kind> {
        let content = &input[1..=len];
        let value = match first {
            // Frequent strings are static and keep no input alive.
            b'+' if content == b"OK" => Value::Simple(Bytes::from_static(b"OK")),
            b'+' if content == b"QUEUED" => Value::Simple(Bytes::from_static(b"QUEUED")),
            b'+' => return Ok(Value::Simple(self.split(input, 1, len))),
            b'-' => return Ok(Value::SimpleError(self.split(input, 1, len))),
            b'(' if line::is_big_number(content) => return Ok(Value::BigNumber(self.split(input, 1, len))),
            b'(' => return Err(Kind::BigNumber),
            b',' => Value::Double(line::double(content)?),
            b'#' => match content {
                b"t" => Value::Boolean(true),
                b"f" => Value::Boolean(false),
                _ => return Err(Kind::Boolean),
            },
            _ if content.is_empty() => Value::Null,
            _ => return Err(Kind::Null),
        };
        self.skip(input, len + LINE_OVERHEAD);
        Ok(value)
    }

    fn integer(&mut self, input: &mut BytesMut) -> Result<Step, Kind> {
        let (integer, head) = match self.short(input) {
            Some((number, head)) => (number.cast_signed(), head),
            None => match self.line(input)? {
                None => return Ok(Step::Starved),
                Some(len) => (line::integer(&input[1..=len])?, len + LINE_OVERHEAD),
            },
        };
        self.skip(input, head);
        Ok(Step::Value(Value::Integer(integer)))
    }

    fn blob(&mut self, input: &mut BytesMut, blob: Blob) -> Result<Step, Kind> {
        let Some((length, head)) = self.length(input)? else { return Ok(Step::Starved) };
        let len = match length {
            Length::Of(len) => self.fitting(len)?,
            Length::Null if blob == Blob::Bulk => {
                self.skip(input, head);
                return Ok(Step::Value(Value::Null));
            }
            Length::Streamed if blob == Blob::Bulk => {
                self.skip(input, head);
                self.next = Next::ChunkHead;
                return Ok(Step::Onward);
            }
            _ => return Err(Kind::Length { first: input[0] }),
        };
        if blob == Blob::Verbatim && len < 4 {
            return Err(Kind::Verbatim);
        }
        if input.len() >= head + len + END {
            return self.take(input, head, blob, len).map(Step::Value);
        }
        self.skip(input, head);
        self.next = Next::Body(blob, len);
        grow(input, len + END);
        Ok(Step::Starved)
    }

    fn body(&mut self, input: &mut BytesMut, blob: Blob, len: usize) -> Result<Step, Kind> {
        if input.len() < len + END {
            grow(input, len + END);
            return Ok(Step::Starved);
        }
        self.next = Next::Head;
        self.take(input, 0, blob, len).map(Step::Value)
    }

    /// Takes a complete string, after `head` bytes.
    fn take(&mut self, input: &mut BytesMut, head: usize, blob: Blob, len: usize) -> Result<Value, Kind> {
        let body = &input[head..];
        if body[len..len + END] != *b"\r\n" {
            self.offset += (head + len) as u64;
            return Err(Kind::BulkEnd);
        }
        match (blob, body) {
            (Blob::Bulk, _) => Ok(Value::Bulk(self.split(input, head, len))),
            (Blob::Error, _) => Ok(Value::BlobError(self.split(input, head, len))),
            (Blob::Verbatim, &[a, b, c, b':', ..]) => {
                Ok(Value::Verbatim([a, b, c], self.split(input, head + 4, len - 4)))
            }
            (Blob::Verbatim, _) => {
                self.offset += head as u64;
                Err(Kind::Verbatim)
            }
        }
    }

    fn chunk_head(&mut self, input: &mut BytesMut) -> Result<Step, Kind> {
        match input.first() {
            None => return Ok(Step::Starved),
            Some(b';') => {}
            Some(&byte) => return Err(Kind::ChunkExpected { byte }),
        }
        let Some((length, head)) = self.length(input)? else { return Ok(Step::Starved) };
        let Length::Of(len) = length else { return Err(Kind::Length { first: b';' }) };
        let whole = self.fitting(len.saturating_add(self.gathered.len() as u64))?;
        self.skip(input, head);
        if len == 0 {
            self.next = Next::Head;
            return Ok(Step::Value(Value::Bulk(std::mem::take(&mut self.gathered).into())));
        }
        self.next = Next::Chunk(whole - self.gathered.len());
        Ok(Step::Onward)
    }

    fn chunk(&mut self, input: &mut BytesMut, len: usize) -> Result<Step, Kind> {
        if input.len() < len + END {
            grow(input, len + END);
            return Ok(Step::Starved);
        }
        if input[len..len + END] != *b"\r\n" {
            self.offset += len as u64;
            return Err(Kind::BulkEnd);
        }
        self.gathered.extend_from_slice(&input[..len]);
        self.skip(input, len + END);
        self.next = Next::ChunkHead;
        Ok(Step::Onward)
    }

    fn aggregate(&mut self, input: &mut BytesMut, aggregate: Aggregate) -> Result<Step, Kind> {
        let Some((length, head)) = self.length(input)? else { return Ok(Step::Starved) };
        let left = match length {
            Length::Of(len) => {
                let values = usize::try_from(len).unwrap_or(usize::MAX).saturating_mul(aggregate.width());
                // Attributes count even if they are empty, because they could follow each other without end.
                let extra = usize::from(aggregate == Aggregate::Attributes);
                self.count(values.saturating_add(extra))?;
                Some(values)
            }
            Length::Null if aggregate == Aggregate::Array => {
                self.skip(input, head);
                return Ok(Step::Value(Value::Null));
            }
            Length::Streamed if aggregate.may_be_streamed() => None,
            _ => return Err(Kind::Length { first: input[0] }),
        };
        if self.open.len() == self.options.max_depth {
            return Err(Kind::TooDeep { max: self.options.max_depth });
        }
        self.skip(input, head);
        // No value is shorter than three bytes, so this is enough for those that have arrived.
        let capacity = left.unwrap_or(0).min(MAX_RESERVED_VALUES).min(input.len() / LINE_OVERHEAD + 1);
        let open = Open::new(aggregate, left, capacity, self.attributes.take());
        if left == Some(0) {
            return Ok(self.close(open));
        }
        self.open.push(open);
        Ok(Step::Onward)
    }

    /// Ends a streamed aggregate.
    fn end(&mut self, input: &mut BytesMut, len: usize) -> Result<Step, Kind> {
        let Some(open) = self.open.pop_if(|open| open.is_streamed() && len == 0) else { return Err(Kind::StrayEnd) };
        if self.attributes.is_some() {
            return Err(Kind::StrayAttributes);
        }
        if open.is_odd() {
            return Err(Kind::OddMap);
        }
        self.skip(input, LINE_OVERHEAD);
        Ok(self.close(open))
    }

    /// Adds a value to the innermost aggregate, or returns it as a message.
    fn place(&mut self, mut value: Value) -> Result<Step, Kind> {
        if let Some(attributes) = self.attributes.take()
            && self.options.keep_attributes
        {
            value = Value::Attributed(Box::new(Attributed { attributes, value }));
        }
        let Some(open) = self.open.last_mut() else { return Ok(Step::Whole(Message::Reply(value))) };
        let is_streamed = open.is_streamed();
        if open.push(value)
            && let Some(open) = self.open.pop()
        {
            return Ok(self.close(open));
        }
        if is_streamed {
            self.count(1)?;
        }
        Ok(Step::Onward)
    }

    fn close(&mut self, mut open: Open) -> Step {
        let before = open.attributes.take();
        match open.close() {
            Closed::Value(value) => {
                self.attributes = before;
                Step::Value(value)
            }
            Closed::Push(items) => Step::Whole(Message::Push(items)),
            Closed::Attributes(pairs) => {
                let mut all = before.unwrap_or_default();
                if self.options.keep_attributes {
                    all.extend(pairs);
                }
                self.attributes = Some(all);
                Step::Onward
            }
        }
    }

    /// Counts elements of the current reply.
    fn count(&mut self, elements: usize) -> Result<(), Kind> {
        let max = self.options.max_elements;
        self.elements = self.elements.saturating_add(elements);
        if self.elements > max { Err(Kind::TooManyElements { max }) } else { Ok(()) }
    }

    /// Checks the length of a string against the limit.
    fn fitting(&self, len: u64) -> Result<usize, Kind> {
        let max = self.options.max_bulk;
        usize::try_from(len).ok().filter(|&len| len <= max).ok_or(Kind::BulkTooLong { len, max })
    }

    /// Parses the line at the front as a length. Also returns the length of the line itself.
    #[inline]
    fn length(&mut self, input: &[u8]) -> Result<Option<(Length, usize)>, Kind> {
        if let Some((len, head)) = self.short(input) {
            return Ok(Some((Length::Of(len), head)));
        }
        let Some(len) = self.line(input)? else { return Ok(None) };
        let length = line::length(&input[1..=len]).ok_or(Kind::Length { first: input[0] })?;
        Ok(Some((length, len + LINE_OVERHEAD)))
    }

    /// Parses the line at the front as a short number, if it is complete and was not searched before.
    #[inline]
    fn short(&self, input: &[u8]) -> Option<(u64, usize)> {
        if self.scanned > 0 {
            return None;
        }
        line::short(input).filter(|(_, head)| head - LINE_OVERHEAD <= self.options.max_line)
    }

    /// Returns the length of the content of the line at the front, once it is complete.
    fn line(&mut self, input: &[u8]) -> Result<Option<usize>, Kind> {
        let max = self.options.max_line;
        let from = self.scanned.max(1);
        let end = line_break(&input[from..]).map(|at| from + at);
        let seen = end.unwrap_or(input.len());
        if seen - 1 > max {
            return Err(Kind::LineTooLong { max });
        }
        match end.map(|end| (input[end], input.get(end + 1))) {
            Some((b'\r', Some(b'\n'))) => {
                self.scanned = 0;
                Ok(Some(seen - 1))
            }
            None | Some((b'\r', None)) => {
                self.scanned = seen;
                Ok(None)
            }
            Some(_) => Err(Kind::LineBreak),
        }
    }

    fn skip(&mut self, input: &mut BytesMut, len: usize) {
        input.advance(len);
        self.offset += len as u64;
    }

    /// Takes `len` bytes after `before` bytes without a copy, and skips the bytes around them.
    #[inline]
    fn split(&mut self, input: &mut BytesMut, before: usize, len: usize) -> Bytes {
        let whole = before + len + END;
        if len == 0 {
            self.skip(input, whole);
            return Bytes::new();
        }
        let mut bytes = input.split_to(whole).freeze();
        self.offset += whole as u64;
        bytes.advance(before);
        bytes.truncate(len);
        bytes
    }
}

/// Returns the position of the first CR or LF.
#[inline]
fn line_break(bytes: &[u8]) -> Option<usize> {
    // Most lines are too short for a vectorized search to pay.
    let near = bytes.len().min(16);
    match bytes[..near].iter().position(|&byte| byte == b'\r' || byte == b'\n') {
        None => memchr2(b'\r', b'\n', &bytes[near..]).map(|at| near + at),
        found => found,
    }
}

/// Grows a full `input` that will hold `whole` bytes: to twice its length, but at most to the bytes needed plus the read-ahead.
/// `BytesMut::reserve` would double beyond that.
fn grow(input: &mut BytesMut, whole: usize) {
    if input.len() < input.capacity() {
        return;
    }
    let target = whole.min(input.len().saturating_mul(2).max(FIRST_READ_BYTES)).saturating_add(READ_AHEAD_BYTES);
    if !input.try_reclaim(target - input.len()) {
        let mut larger = BytesMut::with_capacity(target);
        larger.extend_from_slice(input);
        *input = larger;
    }
}

#[cfg(test)]
mod tests {
    use bytes::BufMut;

    use super::*;

    #[test]
    fn line_is_searched_once() {
        for first in [b'+', b'-', b':', b'(', b',', b'$', b'*', b'%'] {
            let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
            input.put_u8(first);
            for len in 1..1000 {
                assert_eq!(decoder.decode(&mut input), Ok(None));
                assert_eq!(decoder.scanned, len);
                input.put_u8(b'0');
            }
            input.put_u8(b'\r');
            assert_eq!(decoder.decode(&mut input), Ok(None));
            assert_eq!(decoder.scanned, input.len() - 1);
            input.put_u8(b'\n');
            let _ = decoder.decode(&mut input).unwrap();
            assert_eq!(decoder.scanned, 0);
        }
    }

    /// Only the beginning of an incomplete string stays in the input.
    #[test]
    fn complete_parts_leave_the_input() {
        let (mut decoder, mut input) = (Decoder::default(), BytesMut::from("*3\r\n%1\r\n+k\r\n:1\r\n$5\r\nab"));
        assert_eq!(decoder.decode(&mut input), Ok(None));
        assert_eq!(input, "ab");
    }
}
