//! Replies and pushes, as text.

use bytes::Bytes;
use serde_json::{Value as Json, json};
use tidewire_conn::{Message, Text};
use tidewire_store::Row;

use crate::RequestError;
use crate::protocol::request::Id;

/// What a request is answered with, or why it is not.
pub(crate) type Outcome = Result<Data, RequestError>;

/// The data of a result.
#[derive(Debug)]
pub(crate) enum Data {
    /// A record, which is text already.
    Row(Row),
    /// JSON text, with room before and behind it for the rest of the message.
    Written(Vec<u8>),
}

/// Longer than `{"id":…,"type":"result","data":`.
const FRONT: usize = 64;

impl Data {
    /// What `write` appends. If that is nothing, the result has no data.
    pub(crate) fn written(capacity: usize, write: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut text = Vec::with_capacity(FRONT + capacity + 1);
        text.resize(FRONT, b' ');
        write(&mut text);
        Self::Written(text)
    }

    /// A value.
    pub(crate) fn json(value: &Json) -> Self {
        Self::written(128, |out| append_json(out, value))
    }

    /// Text that is JSON already.
    pub(crate) fn text(text: &str) -> Self {
        Self::written(text.len(), |out| out.extend_from_slice(text.as_bytes()))
    }

    /// The bytes of the data alone.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Row(row) => row.text().len(),
            Self::Written(text) => text.len().saturating_sub(FRONT),
        }
    }

    /// The same, unless it is too long.
    pub(crate) fn within(self, max: usize) -> Outcome {
        if self.len() > max { Err(RequestError::too_large(max)) } else { Ok(self) }
    }

    /// The whole message.
    pub(crate) fn into_result(self, id: Id) -> Message {
        let mut text = match self {
            Self::Written(text) => text,
            Self::Row(row) => {
                let parts = ["{\"id\":", id.as_str(), ",\"type\":\"result\",\"data\":", row.text(), "}"];
                return Message::text(parts.concat());
            }
        };
        let is_nothing = text.len() <= FRONT;
        let end: &[u8] = if is_nothing { b",\"type\":\"result\"" } else { b",\"type\":\"result\",\"data\":" };
        let head = [b"{\"id\":", id.as_bytes(), end].concat();
        text.push(b'}');
        // The head stands right before the data, and what is left of the room before it is not sent.
        let start = FRONT.min(text.len()) - head.len();
        text[start..start + head.len()].copy_from_slice(&head);
        message(Bytes::from(text).slice(start..))
    }
}

/// An error, as a message.
pub(crate) fn error(id: Id, error: &RequestError, with_details: bool) -> Message {
    let mut out = Vec::with_capacity(96 + error.message.len());
    out.extend_from_slice(b"{\"id\":");
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(b",\"type\":\"error\",");
    append_error(&mut out, error, with_details);
    out.push(b'}');
    message(Bytes::from(out))
}

fn append_error(out: &mut Vec<u8>, error: &RequestError, with_details: bool) {
    out.extend_from_slice(b"\"code\":\"");
    out.extend_from_slice(error.code.as_str().as_bytes());
    out.extend_from_slice(b"\",\"message\":");
    append_string(out, &error.message);
    if let Some(details) = error.details.as_ref().filter(|_| with_details) {
        out.extend_from_slice(b",\"details\":");
        append_json(out, details);
    }
}

/// What all subscribers of a query are pushed of a change: all but what comes before it, which names their subscription.
pub(crate) fn push_body(data: Option<&[u8]>, wrap: Wrap, position: Option<&str>) -> Text {
    let data = data.unwrap_or_default();
    let mut out = Vec::with_capacity(data.len() + 128);
    out.extend_from_slice(b"\"type\":\"push\",\"channel\":\"subscription\"");
    if let Some(position) = position {
        out.extend_from_slice(b",\"pos\":\"");
        out.extend_from_slice(position.as_bytes());
        out.push(b'"');
    }
    if !data.is_empty() {
        out.extend_from_slice(b",\"data\":");
        if wrap == Wrap::Reset {
            out.extend_from_slice(b"{\"reset\":");
        }
        out.extend_from_slice(data);
        if wrap == Wrap::Reset {
            out.push(b'}');
        }
    }
    out.push(b'}');
    checked(Bytes::from(out))
}

/// How a whole result is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrap {
    /// As it is.
    Plain,
    /// To somebody who follows deltas: in place of all that is known.
    Reset,
}

/// The last push of a subscription: why there are no more.
pub(crate) fn end_body(error: &RequestError, with_details: bool) -> Text {
    let mut out = b"\"type\":\"push\",\"channel\":\"subscription\",\"error\":{".to_vec();
    append_error(&mut out, error, with_details);
    out.extend_from_slice(b"}}");
    checked(Bytes::from(out))
}

/// A push to one subscription. All that have the same body share it.
pub(crate) fn push(subscription: u64, body: Text) -> Message {
    let mut head = [0; 48];
    let len = {
        use std::io::Write as _;
        let mut room = &mut head[..];
        // It has room for the largest number.
        let _ = write!(room, "{{\"subscriptionId\":\"sub-{subscription}\",");
        48 - room.len()
    };
    let head = std::str::from_utf8(&head[..len]).unwrap_or_default();
    // It is shorter than the longest head.
    body.with_head(head).map_or_else(|_| Message::text(""), Message::Text)
}

/// The first message of all.
pub(crate) fn welcome(now: u64, requires_auth: bool) -> Message {
    of_json(&json!({"type": "welcome", "version": "1.0.0", "serverTime": now, "requiresAuth": requires_auth}))
}

/// Asks for a pong.
pub(crate) fn ping(now: u64) -> Message {
    of_json(&json!({"type": "ping", "timestamp": now}))
}

/// The server is about to end.
pub(crate) fn shutdown(grace_ms: u64) -> Message {
    of_json(&json!({"type": "system", "event": "shutdown", "gracePeriodMs": grace_ms}))
}

/// Somebody is to be logged in no longer.
pub(crate) fn session_revoked() -> Message {
    of_json(&json!({"type": "system", "event": "session_revoked", "reason": "Session revoked by administrator"}))
}

fn of_json(value: &Json) -> Message {
    Message::text(value.to_string())
}

fn message(text: Bytes) -> Message {
    Message::Text(checked(text))
}

/// All that is put together here is text: rows are, and so is what serde writes.
fn checked(text: Bytes) -> Text {
    Text::try_from(text).unwrap_or_default()
}

pub(crate) fn append_json(out: &mut Vec<u8>, value: &Json) {
    // Writing to memory does not fail, and neither do values without types of their own.
    let _ = serde_json::to_writer(out, value);
}

pub(crate) fn append_string(out: &mut Vec<u8>, text: &str) {
    let _ = serde_json::to_writer(out, text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;
    use crate::protocol::request::{Incoming, Request};

    fn id(text: &str) -> Id {
        match Incoming::parse(&format!(r#"{{"type":"x","id":{text}}}"#)).unwrap() {
            Incoming::Request(Request { id, .. }) => id,
            Incoming::Pong { .. } => unreachable!(),
        }
    }

    fn whole(message: &Message) -> String {
        match message {
            Message::Text(text) => format!("{}{}", text.head(), text.body()),
            _ => unreachable!(),
        }
    }

    #[test]
    fn a_result_is_put_together_around_its_data() {
        let longest = "-1.2345678901234567890123456e10";
        for text in ["0", "12", &longest[..30]] {
            let message = Data::text("[1]").into_result(id(text));
            assert_eq!(whole(&message), format!(r#"{{"id":{text},"type":"result","data":[1]}}"#));
            assert_eq!(
                whole(&Data::written(0, |_| ()).into_result(id(text))),
                format!(r#"{{"id":{text},"type":"result"}}"#)
            );
        }
    }

    #[test]
    fn errors_and_pushes() {
        let failed = RequestError::new(Code::NotFound, "no \"x\"").with_details(json!({"a": 1}));
        let expected = r#"{"id":1,"type":"error","code":"NOT_FOUND","message":"no \"x\"""#;
        assert_eq!(whole(&error(id("1"), &failed, true)), format!("{expected},\"details\":{{\"a\":1}}}}"));
        assert_eq!(whole(&error(id("1"), &failed, false)), format!("{expected}}}"));
        let pushed = push(u64::MAX, push_body(Some(b"[1]"), Wrap::Reset, Some("p")));
        assert_eq!(
            whole(&pushed),
            r#"{"subscriptionId":"sub-18446744073709551615","type":"push","channel":"subscription","pos":"p","data":{"reset":[1]}}"#
        );
        let ended = push(7, end_body(&failed, false));
        assert_eq!(
            whole(&ended),
            r#"{"subscriptionId":"sub-7","type":"push","channel":"subscription","error":{"code":"NOT_FOUND","message":"no \"x\""}}"#
        );
    }
}
