//! Encoding of pushes.
//!
//! A push consists of a head with the subscription id, and a body that is shared by all subscribers of a query.

use bytes::Bytes;
use tidewire_conn::websocket::{Message, Text};

use super::reply::{append_error, utf8};
use crate::RequestError;

/// Where the payload of a push is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PushLayout {
    /// In `data`.
    Plain,
    /// In `data.reset`: a snapshot that replaces the result of a delta subscriber.
    Reset,
}

/// Encodes the body of a push. `data` is JSON text; if it is empty, the push has no `data`.
pub(crate) fn body(data: &[u8], layout: PushLayout, position: Option<&str>) -> Text {
    let mut out = Vec::with_capacity(data.len() + 128);
    out.extend_from_slice(b"\"type\":\"push\",\"channel\":\"subscription\"");
    if let Some(position) = position {
        out.extend_from_slice(b",\"pos\":\"");
        out.extend_from_slice(position.as_bytes());
        out.push(b'"');
    }
    if !data.is_empty() {
        out.extend_from_slice(b",\"data\":");
        if layout == PushLayout::Reset {
            out.extend_from_slice(b"{\"reset\":");
        }
        out.extend_from_slice(data);
        if layout == PushLayout::Reset {
            out.push(b'}');
        }
    }
    out.push(b'}');
    utf8(Bytes::from(out))
}

/// Encodes the body of the last push of a subscription, with the reason for its end.
pub(crate) fn end_body(error: &RequestError, with_details: bool) -> Text {
    let mut out = b"\"type\":\"push\",\"channel\":\"subscription\",\"error\":{".to_vec();
    append_error(&mut out, error, with_details);
    out.extend_from_slice(b"}}");
    utf8(Bytes::from(out))
}

/// Combines the head for a subscription with a shared body.
pub(crate) fn message(subscription: u64, body: Text) -> Message {
    let mut head = [0; 48];
    let len = {
        use std::io::Write as _;
        let mut rest = &mut head[..];
        // Even the largest number fits.
        let _ = write!(rest, "{{\"subscriptionId\":\"sub-{subscription}\",");
        48 - rest.len()
    };
    let head = std::str::from_utf8(&head[..len]).unwrap_or_default();
    // The head is shorter than the limit of `with_head`.
    body.with_head(head).map_or_else(|_| Message::text(""), Message::Text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Code;

    fn text(message: &Message) -> String {
        match message {
            Message::Text(text) => format!("{}{}", text.head(), text.body()),
            _ => unreachable!(),
        }
    }

    #[test]
    fn push_has_subscription_id_before_shared_body() {
        assert_eq!(
            text(&message(u64::MAX, body(b"[1]", PushLayout::Reset, Some("p")))),
            r#"{"subscriptionId":"sub-18446744073709551615","type":"push","channel":"subscription","pos":"p","data":{"reset":[1]}}"#
        );
        assert_eq!(
            text(&message(1, body(b"", PushLayout::Plain, None))),
            r#"{"subscriptionId":"sub-1","type":"push","channel":"subscription"}"#
        );
        let error = RequestError::new(Code::NotFound, "no \"x\"").with_details(json!({"a": 1}));
        assert_eq!(
            text(&message(7, end_body(&error, false))),
            r#"{"subscriptionId":"sub-7","type":"push","channel":"subscription","error":{"code":"NOT_FOUND","message":"no \"x\""}}"#
        );
    }
}
