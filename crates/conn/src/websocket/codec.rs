//! The codec of an established WebSocket.
//!
//! A message in one frame becomes a slice of the input. While the message is incomplete, it stays in the input, where each byte is
//! unmasked and validated once, on arrival. Fragments are collected in a separate buffer as they arrive.
//!
//! Closing handshake: one side sends a close frame and then nothing more; the other side replies with its own close frame, and the
//! connection is closed. Input that follows the peer's close frame or a protocol error is discarded.

use std::borrow::Cow;
use std::{fmt, mem, str};

use bytes::{Buf, Bytes, BytesMut};

use super::header::{FrameRules, Header, MAX_CONTROL_BYTES, Opcode, PartialMessage};
use super::mask::{self, Key};
use super::utf8::{InvalidUtf8, Utf8};
use super::{CloseCode, CloseFrame, Message, Text, WebSocketError};
use crate::Frame;
use crate::codec::{Batch, Codec, grow_input};

/// The codec of a WebSocket connection, after the handshake.
///
/// The codec answers pings and close frames itself, through [`encode_control`](Codec::encode_control). Pings are not decoded to
/// messages; pongs and close frames are. After an error it sends a close frame with the [code](WebSocketError::close_code) of the
/// error.
///
/// After a close frame has been sent, no further message is encoded: later messages are dropped without an error, and input is
/// discarded up to the peer's close frame.
///
/// A message that was sent in one frame is a slice of the input, not a copy: keeping a small message keeps the whole read buffer in
/// memory. An incomplete message takes at most twice the bytes that have arrived, plus 4 KiB of read-ahead. Between messages the
/// codec holds no memory.
///
/// ```
/// use bytes::BytesMut;
/// use tidewire_conn::codec::{Batch, Codec};
/// use tidewire_conn::websocket::{Message, WebSocket, WebSocketOptions};
///
/// let mut server = WebSocket::server(WebSocketOptions::default());
/// let mut input = BytesMut::from(&b"\x81\x84\x01\x02\x03\x04ukga"[..]);
/// let message = server.decode(&mut input)?.expect("the message is complete");
/// assert_eq!(message.as_text(), Some("tide"));
///
/// let mut output = Batch::default();
/// server.encode(&message, &mut output)?;
/// assert_eq!(output.len(), 6);
/// # Ok::<(), tidewire_conn::websocket::WebSocketError>(())
/// ```
pub struct WebSocket {
    role: Role,
    options: WebSocketOptions,
    state: CloseState,
    /// The incomplete payload of a frame whose header has been taken from the input.
    payload: Option<Payload>,
    /// The message that is being assembled from fragments.
    message: Option<Box<Fragments>>,
    /// The number of fragmented messages that have begun.
    fragmented_messages: u64,
    /// The validator of the incomplete text in `payload` or `message`.
    utf8: Utf8,
    /// The payloads of unanswered pings, each after a byte with its length. At most [`MAX_PING_BYTES`].
    pings: Vec<u8>,
}

/// Limits of the input of a [`WebSocket`]. Output is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WebSocketOptions {
    /// Limit of a frame, in bytes. Default: 1 MiB, as for a message, because a message may be sent in one frame.
    pub max_frame: usize,
    /// Limit of a message with all its fragments, in bytes. Default: 1 MiB, far above a usual message, and a thousand peers that
    /// all send the largest message fit in 1 GiB.
    pub max_message: usize,
    /// Limit of the number of fragments of a message. Default: 1024, enough for the largest message in fragments of 1 KiB, and few
    /// enough to stop a peer that sends one byte per fragment.
    pub max_fragments: usize,
}

impl WebSocketOptions {
    /// Sets [`max_frame`](#structfield.max_frame).
    #[must_use]
    pub fn max_frame(mut self, max_frame: usize) -> Self {
        self.max_frame = max_frame;
        self
    }

    /// Sets [`max_message`](#structfield.max_message).
    #[must_use]
    pub fn max_message(mut self, max_message: usize) -> Self {
        self.max_message = max_message;
        self
    }

    /// Sets [`max_fragments`](#structfield.max_fragments).
    #[must_use]
    pub fn max_fragments(mut self, max_fragments: usize) -> Self {
        self.max_fragments = max_fragments;
        self
    }
}

impl Default for WebSocketOptions {
    fn default() -> Self {
        Self { max_frame: 1 << 20, max_message: 1 << 20, max_fragments: 1024 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    Client,
}

/// The state of the closing handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CloseState {
    Open,
    /// Our close frame has been encoded, and the peer's has not arrived.
    CloseSent,
    /// The peer's close frame has arrived, or the peer violated the protocol. Our close frame has this code.
    CloseReceived(Option<CloseCode>),
    Closed,
}

/// The incomplete payload of a data frame.
#[derive(Debug)]
struct Payload {
    is_text: bool,
    /// The frame is the last of its message.
    fin: bool,
    /// The key for the first byte that is not unmasked.
    key: Option<Key>,
    /// The number of payload bytes that are at the front of the input or still missing.
    len: usize,
    /// The number of bytes at the front of the input that are unmasked and validated.
    processed: usize,
}

/// A decoded message. It is cheaper to move than a [`Message`], which has space for a head.
enum Decoded {
    /// The body of a text message has been validated.
    Data {
        is_text: bool,
        body: Bytes,
    },
    Pong(Bytes),
    Close(Option<CloseFrame>),
}

/// An incomplete message in fragments.
struct Fragments {
    is_text: bool,
    /// The number of fragments that have begun.
    count: usize,
    bytes: Vec<u8>,
}

/// Limit of unanswered pings, in bytes: the size of the read buffer. Above it only the newest pings are answered, as RFC 6455
/// (5.5.3) allows, so that a peer which sends pings and does not read cannot use more memory.
const MAX_PING_BYTES: usize = 16 * 1024;

/// The size of the chunks in which payloads are masked, a multiple of the key size.
const MASK_CHUNK_BYTES: usize = 256;

impl WebSocket {
    /// Creates the codec of a server: frames of the client must be masked, and its own are not.
    pub fn server(options: WebSocketOptions) -> Self {
        Self::new(Role::Server, options)
    }

    /// Creates the codec of a client: it masks each frame with a random key, and frames of the server must not be masked.
    pub fn client(options: WebSocketOptions) -> Self {
        Self::new(Role::Client, options)
    }

    fn new(role: Role, options: WebSocketOptions) -> Self {
        Self {
            role,
            options,
            state: CloseState::Open,
            payload: None,
            message: None,
            fragmented_messages: 0,
            utf8: Utf8::default(),
            pings: Vec::new(),
        }
    }

    /// Returns the capacity of the buffer for a message in fragments.
    #[cfg(test)]
    pub(super) fn message_capacity(&self) -> usize {
        self.message.as_ref().map_or(0, |message| message.bytes.capacity())
    }

    /// Whether frames are still decoded.
    fn may_receive(&self) -> bool {
        matches!(self.state, CloseState::Open | CloseState::CloseSent)
    }

    /// Whether frames may still be sent.
    fn may_send(&self) -> bool {
        matches!(self.state, CloseState::Open | CloseState::CloseReceived(_))
    }

    /// Decodes the header at the front of the input.
    #[inline]
    fn header(&self, input: &[u8]) -> Result<Option<Header>, WebSocketError> {
        let message = self.message.as_ref();
        let partial = message.map(|message| PartialMessage { fragments: message.count, len: message.bytes.len() });
        Header::read(input, &FrameRules { must_mask: self.role == Role::Server, options: &self.options, partial })
    }

    /// Decodes up to the end of the next message, pong or close frame.
    #[inline]
    fn decode_next(&mut self, input: &mut BytesMut) -> Result<Option<Decoded>, WebSocketError> {
        while self.may_receive() {
            let close_sent = self.state == CloseState::CloseSent;
            let decoded = if let Some(payload) = self.payload.take() {
                let decoded = self.resume(payload, input)?;
                if self.payload.is_some() {
                    return Ok(None);
                }
                decoded
            } else {
                let Some(header) = self.header(input)? else { return Ok(None) };
                if header.opcode.is_control() {
                    if input.len() < header.end() {
                        return Ok(None);
                    }
                    let payload = &mut input[header.size..header.end()];
                    unmask(payload, header.key);
                    let decoded = self.handle_control(header.opcode, payload)?;
                    input.advance(header.end());
                    decoded
                } else if header.fin && self.message.is_none() && header.end() <= input.len() {
                    Some(decode_whole(&header, input)?)
                } else {
                    input.advance(header.size);
                    self.begin(&header);
                    continue;
                }
            };
            match decoded {
                Some(decoded) if !close_sent || matches!(decoded, Decoded::Close(_)) => return Ok(Some(decoded)),
                _ => {}
            }
        }
        input.clear();
        Ok(None)
    }

    /// Begins a data frame whose payload is decoded as it arrives.
    fn begin(&mut self, header: &Header) {
        let mut is_text = header.opcode == Opcode::Text;
        if let Some(message) = &mut self.message {
            is_text = message.is_text;
            message.count += 1;
        } else if !header.fin {
            self.fragmented_messages += 1;
            self.message = Some(Box::new(Fragments { is_text, count: 1, bytes: Vec::new() }));
        }
        self.payload = Some(Payload { is_text, fin: header.fin, key: header.key, len: header.len, processed: 0 });
    }

    /// Decodes the bytes of a payload that have arrived. Stores the payload if it is incomplete.
    fn resume(&mut self, mut payload: Payload, input: &mut BytesMut) -> Result<Option<Decoded>, WebSocketError> {
        let end = payload.len.min(input.len());
        let arrived = &mut input[payload.processed..end];
        let is_ascii = unmask(arrived, payload.key);
        if payload.is_text && !(is_ascii && self.utf8.is_complete()) {
            self.utf8.feed(arrived).map_err(|InvalidUtf8| WebSocketError::InvalidUtf8)?;
        }
        payload.key = payload.key.map(|key| mask::after(key, arrived.len()));

        let body = if let Some(message) = &mut self.message {
            message.bytes.extend_from_slice(arrived);
            input.advance(end);
            payload.len -= end;
            if payload.len > 0 {
                self.payload = Some(payload);
                return Ok(None);
            }
            if !payload.fin {
                return Ok(None);
            }
            Bytes::from(self.message.take().map(|message| message.bytes).unwrap_or_default())
        } else {
            if end < payload.len {
                grow_input(input, payload.len);
                payload.processed = end;
                self.payload = Some(payload);
                return Ok(None);
            }
            take(input, end)
        };
        if !self.utf8.is_complete() {
            return Err(WebSocketError::InvalidUtf8);
        }
        Ok(Some(Decoded::Data { is_text: payload.is_text, body }))
    }

    /// Handles a control frame.
    fn handle_control(&mut self, opcode: Opcode, payload: &[u8]) -> Result<Option<Decoded>, WebSocketError> {
        match opcode {
            Opcode::Ping => {
                if let (CloseState::Open, Ok(len)) = (self.state, u8::try_from(payload.len())) {
                    if self.pings.len() + 1 + payload.len() > MAX_PING_BYTES {
                        self.pings.clear();
                    }
                    self.pings.push(len);
                    self.pings.extend_from_slice(payload);
                }
                Ok(None)
            }
            Opcode::Close => {
                let close = read_close(payload)?;
                let code = close.as_ref().map(|close| close.code);
                self.message = None;
                self.utf8 = Utf8::default();
                self.state = if self.state == CloseState::CloseSent {
                    CloseState::Closed
                } else {
                    CloseState::CloseReceived(code)
                };
                Ok(Some(Decoded::Close(close)))
            }
            _ => Ok(Some(Decoded::Pong(Bytes::copy_from_slice(payload)))),
        }
    }

    /// Stops decoding after an error.
    #[cold]
    fn fail(&mut self, error: WebSocketError) {
        self.payload = None;
        self.message = None;
        self.utf8 = Utf8::default();
        self.state = if self.state == CloseState::CloseSent {
            CloseState::Closed
        } else {
            CloseState::CloseReceived(Some(error.close_code()))
        };
    }

    /// Returns a random masking key, or `None` for a server.
    #[inline]
    fn key(&self) -> Option<Key> {
        (self.role == Role::Client).then(rand::random)
    }

    #[inline]
    fn put_data(&self, opcode: Opcode, frame: &Frame, output: &mut Batch) {
        let key = self.key();
        let (header, size) = Header::write(opcode, frame.len(), key);
        output.put(&header[..size]);
        if let Some(key) = key {
            put_masked(frame.head(), key, output);
            return put_masked(frame.body(), mask::after(key, frame.head().len()), output);
        }
        output.put(frame.head());
        // Small bodies are copied, not cloned: a clone would change the reference count that all receivers share.
        if frame.body().len() < Batch::MIN_SHARED_BYTES {
            output.put(frame.body());
        } else {
            output.put_shared(frame.body().clone());
        }
    }

    fn put_control(&self, opcode: Opcode, payload: &[u8], output: &mut Batch) {
        let key = self.key();
        let (header, size) = Header::write(opcode, payload.len(), key);
        output.put(&header[..size]);
        match key {
            Some(key) => put_masked(payload, key, output),
            None => output.put(payload),
        }
    }

    /// Encodes our close frame.
    fn put_close(&mut self, close: Option<(CloseCode, &str)>, output: &mut Batch) {
        let mut payload = Vec::new();
        if let Some((code, reason)) = close {
            payload.extend(code.get().to_be_bytes());
            payload.extend(reason.as_bytes());
        }
        self.put_control(Opcode::Close, &payload, output);
        self.state = if self.may_receive() { CloseState::CloseSent } else { CloseState::Closed };
    }

    /// Answers every ping, in order.
    #[cold]
    fn put_pongs(&mut self, output: &mut Batch) {
        let pings = mem::take(&mut self.pings);
        let mut rest = &pings[..];
        while let Some((&len, next)) = rest.split_first() {
            let (payload, next) = next.split_at(len.into());
            self.put_control(Opcode::Pong, payload, output);
            rest = next;
        }
    }
}

impl Codec for WebSocket {
    type Frame = Message;
    type Error = WebSocketError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Message>, WebSocketError> {
        match self.decode_next(input) {
            // Text was validated as it arrived.
            Ok(Some(Decoded::Data { is_text: true, body })) => Ok(Some(Message::Text(Text::from_validated(body)))),
            Ok(Some(Decoded::Data { is_text: false, body })) => Ok(Some(Message::Binary(Frame::from(body)))),
            Ok(Some(Decoded::Pong(payload))) => Ok(Some(Message::Pong(payload))),
            Ok(Some(Decoded::Close(close))) => Ok(Some(Message::Close(close))),
            Ok(None) => Ok(None),
            Err(error) => {
                self.fail(error);
                Err(error)
            }
        }
    }

    /// The stream may end only after the peer's close frame. All complete frames in `input` have been decoded before.
    fn finish(&mut self, input: &BytesMut) -> Result<(), WebSocketError> {
        if !self.may_receive() {
            return Ok(());
        }
        if let Some(payload) = &self.payload {
            return Err(WebSocketError::TruncatedFrame { missing: payload.len.saturating_sub(input.len()) });
        }
        if !input.is_empty() {
            let Some(header) = self.header(input)? else { return Err(WebSocketError::TruncatedHeader) };
            return Err(WebSocketError::TruncatedFrame { missing: header.end().saturating_sub(input.len()) });
        }
        Err(if self.message.is_some() { WebSocketError::TruncatedMessage } else { WebSocketError::NoClose })
    }

    /// Encodes a message. Does nothing after our close frame.
    fn encode(&mut self, message: &Message, output: &mut Batch) -> Result<(), WebSocketError> {
        if !self.may_send() {
            return Ok(());
        }
        let control = match message {
            Message::Text(_) | Message::Binary(_) => 0,
            Message::Ping(payload) | Message::Pong(payload) => payload.len(),
            Message::Close(close) => close.as_ref().map_or(0, CloseFrame::len),
        };
        if control > MAX_CONTROL_BYTES {
            return Err(WebSocketError::ControlTooLong { len: control });
        }
        if let Message::Close(Some(CloseFrame { code, .. })) = *message
            && !code.is_sendable()
        {
            return Err(WebSocketError::UnsendableCode { code });
        }
        if !self.pings.is_empty() {
            self.put_pongs(output);
        }
        match message {
            Message::Text(text) => self.put_data(Opcode::Text, text.as_frame(), output),
            Message::Binary(frame) => self.put_data(Opcode::Binary, frame, output),
            Message::Ping(payload) => self.put_control(Opcode::Ping, payload, output),
            Message::Pong(payload) => self.put_control(Opcode::Pong, payload, output),
            Message::Close(close) => {
                self.put_close(close.as_ref().map(|close| (close.code, &*close.reason)), output);
            }
        }
        Ok(())
    }

    fn has_partial_frame(&self, input: &BytesMut) -> bool {
        self.payload.is_some() || !input.is_empty()
    }

    fn partial_message(&self) -> Option<u64> {
        self.message.as_ref().map(|_| self.fragmented_messages)
    }

    fn is_closing(&self) -> bool {
        matches!(self.state, CloseState::CloseReceived(_) | CloseState::Closed)
    }

    fn encode_control(&mut self, output: &mut Batch, is_last: bool) {
        if !self.pings.is_empty() {
            self.put_pongs(output);
        }
        if let (CloseState::CloseReceived(code), true) = (self.state, is_last) {
            self.put_close(code.map(|code| (code, "")), output);
        }
    }

    fn held_bytes(&self) -> usize {
        self.message.as_ref().map_or(0, |message| message.bytes.capacity()) + self.pings.capacity()
    }

    /// Sets the limits of a frame and of a message. A frame whose header has been decoded is not affected.
    fn set_max_frame(&mut self, bytes: usize) {
        (self.options.max_frame, self.options.max_message) = (bytes, bytes);
    }

    /// Whether our close frame has been encoded. The connection waits for the peer's close frame while it lingers.
    fn is_closed(&self) -> bool {
        matches!(self.state, CloseState::CloseSent | CloseState::Closed)
    }
}

impl fmt::Debug for WebSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebSocket").field("role", &self.role).field("state", &self.state).finish_non_exhaustive()
    }
}

/// Unmasks a masked payload in place. Returns whether the result is known to be ASCII.
fn unmask(bytes: &mut [u8], key: Option<Key>) -> bool {
    key.is_some_and(|key| mask::apply(bytes, key))
}

/// Decodes the message in a complete, unfragmented frame.
#[inline]
fn decode_whole(header: &Header, input: &mut BytesMut) -> Result<Decoded, WebSocketError> {
    let is_text = header.opcode == Opcode::Text;
    let payload = &mut input[header.size..header.end()];
    let is_ascii = unmask(payload, header.key);
    if is_text && !is_ascii && str::from_utf8(payload).is_err() {
        return Err(WebSocketError::InvalidUtf8);
    }
    let mut body = take(input, header.end());
    body.advance(header.size);
    Ok(Decoded::Data { is_text, body })
}

/// Takes `n` bytes from the front of `input`, without copying them.
fn take(input: &mut BytesMut, n: usize) -> Bytes {
    // If the frame fills the buffer, the buffer itself is taken, which avoids a reference count.
    if n == input.capacity() { mem::take(input).freeze() } else { input.split_to(n).freeze() }
}

/// Decodes the payload of a close frame.
fn read_close(payload: &[u8]) -> Result<Option<CloseFrame>, WebSocketError> {
    let Some((code, reason)) = payload.split_first_chunk() else {
        return if payload.is_empty() { Ok(None) } else { Err(WebSocketError::ShortClose) };
    };
    let code = CloseCode::new(u16::from_be_bytes(*code));
    if !code.is_sendable() {
        return Err(WebSocketError::InvalidCloseCode { code });
    }
    let reason = str::from_utf8(reason).map_err(|_| WebSocketError::InvalidCloseReason)?;
    Ok(Some(CloseFrame { code, reason: Cow::Owned(reason.to_owned()) }))
}

/// Appends a masked copy of `bytes`.
fn put_masked(bytes: &[u8], key: Key, output: &mut Batch) {
    if bytes.len() >= Batch::MIN_SHARED_BYTES {
        let mut masked = bytes.to_vec();
        mask::apply(&mut masked, key);
        return output.put_shared(masked.into());
    }
    let mut chunk = [0; MASK_CHUNK_BYTES];
    for bytes in bytes.chunks(MASK_CHUNK_BYTES) {
        let masked = &mut chunk[..bytes.len()];
        masked.copy_from_slice(bytes);
        mask::apply(masked, key);
        output.put(masked);
    }
}
