//! Messages of a WebSocket.

use std::borrow::Cow;
use std::fmt;
use std::str::{self, Utf8Error};

use bytes::Bytes;

use crate::{Frame, FrameLike, Head, HeadTooLong};

/// What a [`WebSocket`](crate::websocket::WebSocket) reads and writes.
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
    /// Text.
    Text(Text),
    /// Any bytes.
    Binary(Frame),
    /// Asks the peer for a [`Pong`](Self::Pong) with the same payload, of at most 125 bytes. To be sent only: one that is
    /// received is answered by the codec.
    Ping(Bytes),
    /// The answer to a ping, or, unasked for, a sign of life. At most 125 bytes.
    Pong(Bytes),
    /// The last message of either side. The codec answers one that is received; to answer it oneself, before that, is as good.
    Close(Option<CloseFrame>),
}

impl Message {
    /// A text message.
    pub fn text(text: impl Into<Text>) -> Self {
        Self::Text(text.into())
    }

    /// A binary message.
    pub fn binary(bytes: impl Into<Bytes>) -> Self {
        Self::Binary(Frame::from(bytes.into()))
    }

    /// A close with a code and a reason, of at most 123 bytes.
    pub fn close(code: CloseCode, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Close(Some(CloseFrame { code, reason: reason.into() }))
    }

    /// The text of a text message in one piece, as every received one is: without a head of its own.
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
/// A broadcast checks its body once, and gives every receiver a head:
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
    /// Head and body are valid UTF-8, each for itself. Nothing changes them.
    Frame,
);

impl Text {
    /// Text whose bytes have been checked.
    pub(super) fn checked(body: Bytes) -> Self {
        debug_assert!(str::from_utf8(&body).is_ok());
        Self(Frame::from(body))
    }

    /// The same body, shared, behind another head.
    pub fn with_head(self, head: &str) -> Result<Self, HeadTooLong> {
        Ok(Self(Frame::new(Head::new(head.as_bytes())?, self.0.body().clone())))
    }

    /// The part that comes first, empty in received text.
    pub fn head(&self) -> &str {
        // It is text, and too short for another check to matter.
        str::from_utf8(self.0.head()).unwrap_or_default()
    }

    /// The part that others may share, all of received text.
    pub fn body(&self) -> &str {
        // SAFETY: the body was checked when it arrived, or comes from a `str`, or passed `from_utf8`; and `Bytes` that can be
        // reached from here are not changed by anyone.
        unsafe { str::from_utf8_unchecked(self.0.body()) }
    }

    /// Its bytes.
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

/// A character that begins in the head must end there.
impl TryFrom<Frame> for Text {
    type Error = Utf8Error;

    fn try_from(frame: Frame) -> Result<Self, Utf8Error> {
        str::from_utf8(frame.head())?;
        str::from_utf8(frame.body())?;
        Ok(Self(frame))
    }
}

/// Why a side closes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseFrame {
    /// For programs.
    pub code: CloseCode,
    /// For people who read logs. At most 123 bytes.
    pub reason: Cow<'static, str>,
}

impl CloseFrame {
    /// The bytes of code and reason.
    pub(super) fn len(&self) -> usize {
        2 + self.reason.len()
    }
}

/// Why a side closes, for programs: a number with a [registry][iana] of meanings.
///
/// [iana]: https://www.iana.org/assignments/websocket
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CloseCode(u16);

impl CloseCode {
    /// The purpose is fulfilled.
    pub const NORMAL: Self = Self(1000);
    /// A server goes down, or a browser has left the page.
    pub const AWAY: Self = Self(1001);
    /// The peer broke the protocol.
    pub const PROTOCOL: Self = Self(1002);
    /// The peer sent a kind of message that is not accepted here.
    pub const UNSUPPORTED: Self = Self(1003);
    /// Never sent: stands for a close without a code.
    pub const NO_STATUS: Self = Self(1005);
    /// Never sent: stands for an end without a close.
    pub const ABNORMAL: Self = Self(1006);
    /// The peer sent what its kind of message cannot hold, such as text that is not UTF-8.
    pub const INVALID_DATA: Self = Self(1007);
    /// The peer broke a rule of the application.
    pub const POLICY: Self = Self(1008);
    /// The peer sent more than is accepted.
    pub const TOO_BIG: Self = Self(1009);
    /// A client misses an extension that it asked for.
    pub const MISSING_EXTENSION: Self = Self(1010);
    /// A server met with what it did not expect.
    pub const INTERNAL: Self = Self(1011);
    /// A server restarts: come back, after a random wait.
    pub const RESTART: Self = Self(1012);
    /// A server is overloaded: come back later, or elsewhere.
    pub const TRY_AGAIN: Self = Self(1013);
    /// A gateway got no proper answer from the server behind it.
    pub const BAD_GATEWAY: Self = Self(1014);
    /// Never sent: stands for a TLS handshake that failed.
    pub const TLS: Self = Self(1015);

    /// A code with this number, which need not be [sendable](Self::is_sendable).
    pub const fn new(code: u16) -> Self {
        Self(code)
    }

    /// Its number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether it may stand in a frame: it is registered, and not only as a name for what was not said, or it is left to
    /// libraries and frameworks (3000 to 3999) or applications (4000 to 4999).
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
    fn text_is_checked_in_both_parts() {
        let frame = |head: &[u8], body: &'static [u8]| Frame::new(Head::new(head).unwrap(), Bytes::from_static(body));
        let text = Text::try_from(frame("é".as_bytes(), "ü".as_bytes())).unwrap();
        assert_eq!((text.head(), text.body()), ("é", "ü"));
        assert_eq!(Message::Text(text.clone()).as_text(), None);
        assert_eq!(text, Text::from("éü"));
        // A character across both would be cut by another head.
        assert!(Text::try_from(frame(b"\xc3", b"\xa9")).is_err());
        assert!(Text::try_from(frame(b"ok", b"\xff")).is_err());
        assert!(Text::from("x").with_head(&"x".repeat(Head::CAPACITY + 1)).is_err());
    }

    #[test]
    fn sizes_are_those_of_payloads() {
        assert_eq!(Message::text("abc").size(), 3);
        assert_eq!(Message::Text(Text::from("abc").with_head("de").unwrap()).size(), 5);
        assert_eq!(Message::binary(vec![0; 9]).size(), 9);
        assert_eq!(Message::Ping(Bytes::from_static(b"p")).size(), 1);
        assert_eq!(Message::Close(None).size(), 0);
        assert_eq!(Message::close(CloseCode::AWAY, "bye").size(), 5);
    }

    #[test]
    fn sendable_codes() {
        let sendable: Vec<u16> = (0..=u16::MAX).filter(|&code| CloseCode::new(code).is_sendable()).collect();
        let expected: Vec<u16> = (1000..=1003).chain(1007..=1014).chain(3000..=4999).collect();
        assert_eq!(sendable, expected);
    }
}
