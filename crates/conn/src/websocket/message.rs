//! Messages of a WebSocket.

use std::borrow::Cow;
use std::fmt;
use std::str::{self, Utf8Error};

use bytes::Bytes;

use crate::{Frame, FrameLike, Head, HeadTooLong};

/// A message or control frame of a [`WebSocket`](crate::websocket::WebSocket).
///
/// ```
/// use tidewire_conn::websocket::{CloseCode, Message};
///
/// assert_eq!(Message::text("the tide is up").as_text(), Some("the tide is up"));
/// assert_eq!(Message::binary(vec![1, 2]).as_text(), None);
/// assert_eq!(Message::close(CloseCode::NORMAL, "done"), Message::close(CloseCode::NORMAL, String::from("done")));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// A text message.
    Text(Text),
    /// A binary message.
    Binary(Frame),
    /// A ping, which the peer answers with a [`Pong`](Self::Pong) of the same payload, at most 125 bytes. Only sent: the codec answers
    /// received pings itself.
    Ping(Bytes),
    /// The reply to a ping, or an unsolicited heartbeat. At most 125 bytes.
    Pong(Bytes),
    /// The last message of either side. The codec answers a received close frame, unless the application sends one first.
    Close(Option<CloseFrame>),
}

impl Message {
    /// Creates a text message.
    pub fn text(text: impl Into<Text>) -> Self {
        Self::Text(text.into())
    }

    /// Creates a binary message.
    pub fn binary(bytes: impl Into<Bytes>) -> Self {
        Self::Binary(Frame::from(bytes.into()))
    }

    /// Creates a close frame with a code and a reason of at most 123 bytes.
    pub fn close(code: CloseCode, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Close(Some(CloseFrame { code, reason: reason.into() }))
    }

    /// Returns the text of a text message without a head. Received messages have no head.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) if text.0.head().is_empty() => Some(text.body()),
            _ => None,
        }
    }
}

impl FrameLike for Message {
    fn size(&self) -> usize {
        match self {
            Self::Text(text) => text.0.len(),
            Self::Binary(frame) => frame.len(),
            Self::Ping(payload) | Self::Pong(payload) => payload.len(),
            Self::Close(None) => 0,
            Self::Close(Some(close)) => close.len(),
        }
    }
}

/// A [`Frame`] that is text: its head and its body are each valid UTF-8. Received text has no head.
///
/// A broadcast validates its body once and adds a head for each receiver:
///
/// ```
/// use bytes::Bytes;
/// use tidewire_conn::websocket::Text;
///
/// let news = Text::try_from(Bytes::from_static(br#"{"tide":"up"}"#))?;
/// let one = news.clone().with_head("7:")?;
/// let two = news.with_head("8:")?;
/// assert_eq!((one.head(), two.head()), ("7:", "8:"));
/// assert_eq!(one.body().as_ptr(), two.body().as_ptr());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(
    /// Head and body are each valid UTF-8, and are never changed.
    Frame,
);

impl Text {
    /// Creates a text from bytes that the caller has validated.
    pub(super) fn from_validated(body: Bytes) -> Self {
        debug_assert!(str::from_utf8(&body).is_ok());
        Self(Frame::from(body))
    }

    /// Returns a text with this head, which shares the body.
    pub fn with_head(self, head: &str) -> Result<Self, HeadTooLong> {
        Ok(Self(Frame::new(Head::new(head.as_bytes())?, self.0.body().clone())))
    }

    /// Returns the head, which comes first. Empty in received text.
    pub fn head(&self) -> &str {
        // Always valid. Checking again is cheap, because a head is short.
        str::from_utf8(self.0.head()).unwrap_or_default()
    }

    /// Returns the body, which other messages may share. The body of received text is the whole text.
    pub fn body(&self) -> &str {
        // SAFETY: the body was validated when it arrived, or comes from a `str`, or passed `from_utf8`; and the contents of
        // `Bytes` never change.
        unsafe { str::from_utf8_unchecked(self.0.body()) }
    }

    /// Returns the text as a frame.
    pub fn as_frame(&self) -> &Frame {
        &self.0
    }
}

impl From<Text> for Frame {
    fn from(text: Text) -> Self {
        text.0
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(Frame::from(Bytes::from(text)))
    }
}

impl From<&'static str> for Text {
    fn from(text: &'static str) -> Self {
        Self(Frame::from(Bytes::from_static(text.as_bytes())))
    }
}

impl TryFrom<Bytes> for Text {
    type Error = Utf8Error;

    fn try_from(body: Bytes) -> Result<Self, Utf8Error> {
        Self::try_from(Frame::from(body))
    }
}

/// Head and body must each be valid UTF-8: a character must not extend from the head into the body.
impl TryFrom<Frame> for Text {
    type Error = Utf8Error;

    fn try_from(frame: Frame) -> Result<Self, Utf8Error> {
        str::from_utf8(frame.head())?;
        str::from_utf8(frame.body())?;
        Ok(Self(frame))
    }
}

/// The payload of a close frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseFrame {
    /// The status code.
    pub code: CloseCode,
    /// The reason, for logs. At most 123 bytes.
    pub reason: Cow<'static, str>,
}

impl CloseFrame {
    /// Returns the size of code and reason, in bytes.
    pub(super) fn len(&self) -> usize {
        2 + self.reason.len()
    }
}

/// The status code of a close frame: see the [registry][iana].
///
/// [iana]: https://www.iana.org/assignments/websocket
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CloseCode(u16);

impl CloseCode {
    /// Normal closure.
    pub const NORMAL: Self = Self(1000);
    /// Going away: the server shuts down, or the browser leaves the page.
    pub const AWAY: Self = Self(1001);
    /// Protocol error.
    pub const PROTOCOL: Self = Self(1002);
    /// Unsupported type of message.
    pub const UNSUPPORTED: Self = Self(1003);
    /// The close frame had no code. Never sent.
    pub const NO_STATUS: Self = Self(1005);
    /// The connection ended without a close frame. Never sent.
    pub const ABNORMAL: Self = Self(1006);
    /// Invalid payload, such as text that is not valid UTF-8.
    pub const INVALID_DATA: Self = Self(1007);
    /// Policy violation.
    pub const POLICY: Self = Self(1008);
    /// The message is too big.
    pub const TOO_BIG: Self = Self(1009);
    /// The server did not accept an extension that the client requires.
    pub const MISSING_EXTENSION: Self = Self(1010);
    /// Internal server error.
    pub const INTERNAL: Self = Self(1011);
    /// The server restarts. Clients reconnect after a random delay.
    pub const RESTART: Self = Self(1012);
    /// The server is overloaded. Clients reconnect later, or to another server.
    pub const TRY_AGAIN: Self = Self(1013);
    /// A gateway received an invalid response from its upstream server.
    pub const BAD_GATEWAY: Self = Self(1014);
    /// The TLS handshake failed. Never sent.
    pub const TLS: Self = Self(1015);

    /// Creates a code with this number, which need not be [sendable](Self::is_sendable).
    pub const fn new(code: u16) -> Self {
        Self(code)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether the code may be sent: it is registered and not reserved for local use, or it is in the range of libraries and
    /// frameworks (3000 to 3999) or of applications (4000 to 4999).
    pub const fn is_sendable(self) -> bool {
        matches!(self.0, 1000..=1003 | 1007..=1014 | 3000..=4999)
    }
}

impl fmt::Display for CloseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u16> for CloseCode {
    fn from(code: u16) -> Self {
        Self(code)
    }
}

impl From<CloseCode> for u16 {
    fn from(code: CloseCode) -> Self {
        code.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_head_and_body_are_validated_separately() {
        let frame = |head: &[u8], body: &'static [u8]| Frame::new(Head::new(head).unwrap(), Bytes::from_static(body));
        let text = Text::try_from(frame("é".as_bytes(), "ü".as_bytes())).unwrap();
        assert_eq!((text.head(), text.body()), ("é", "ü"));
        assert_eq!(Message::Text(text.clone()).as_text(), None);
        assert_eq!(text, Text::from("éü"));
        // A character that extends into the body would be cut by a different head.
        assert!(Text::try_from(frame(b"\xc3", b"\xa9")).is_err());
        assert!(Text::try_from(frame(b"ok", b"\xff")).is_err());
        assert!(Text::from("x").with_head(&"x".repeat(Head::CAPACITY + 1)).is_err());
    }

    #[test]
    fn size_is_the_size_of_the_payload() {
        assert_eq!(Message::text("abc").size(), 3);
        assert_eq!(Message::Text(Text::from("abc").with_head("de").unwrap()).size(), 5);
        assert_eq!(Message::binary(vec![0; 9]).size(), 9);
        assert_eq!(Message::Ping(Bytes::from_static(b"p")).size(), 1);
        assert_eq!(Message::Close(None).size(), 0);
        assert_eq!(Message::close(CloseCode::AWAY, "bye").size(), 5);
    }

    #[test]
    fn only_registered_and_application_codes_are_sendable() {
        let sendable: Vec<u16> = (0..=u16::MAX).filter(|&code| CloseCode::new(code).is_sendable()).collect();
        let expected: Vec<u16> = (1000..=1003).chain(1007..=1014).chain(3000..=4999).collect();
        assert_eq!(sendable, expected);
    }
}
