//! Pushes, as text.
//!
//! A push is a head that names the subscription, and a body that all subscribers of a query share.

use bytes::Bytes;
use tidewire_conn::websocket::{Message, Text};

use super::reply::{append_error, utf8};
use crate::RequestError;

/// How a result is pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrap {
    /// As `data`.
    Plain,
    /// As `data.reset`: a delta subscriber replaces its whole result.
    Reset,
}

/// The body of a push. `data` is JSON text; if it is empty, the push has no `data`.
pub(crate) fn body(data: &[u8], wrap: Wrap, position: Option<&str>) -> Text {
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
    utf8(Bytes::from(out))
}

/// The body of the last push of a subscription, which says why it has ended.
pub(crate) fn end_body(error: &RequestError, with_details: bool) -> Text {
    let mut out = b"\"type\":\"push\",\"channel\":\"subscription\",\"error\":{".to_vec();
    append_error(&mut out, error, with_details);
    out.extend_from_slice(b"}}");
    utf8(Bytes::from(out))
}

/// The push of a body to one subscription.
pub(crate) fn message(subscription: u64, body: Text) -> Message {
    let mut head = [0; 48];
    let len = {
        use std::io::Write as _;
        let mut rest = &mut head[..];
        // The largest number fits.
        let _ = write!(rest, "{{\"subscriptionId\":\"sub-{subscription}\",");
        48 - rest.len()
    };
    let head = std::str::from_utf8(&head[..len]).unwrap_or_default();
    // It is shorter than the longest head that a text may have.
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
    fn a_push_names_its_subscription_before_the_shared_body() {
        assert_eq!(
            text(&message(u64::MAX, body(b"[1]", Wrap::Reset, Some("p")))),
            r#"{"subscriptionId":"sub-18446744073709551615","type":"push","channel":"subscription","pos":"p","data":{"reset":[1]}}"#
        );
        assert_eq!(
            text(&message(1, body(b"", Wrap::Plain, None))),
            r#"{"subscriptionId":"sub-1","type":"push","channel":"subscription"}"#
        );
        let error = RequestError::new(Code::NotFound, "no \"x\"").with_details(json!({"a": 1}));
        assert_eq!(
            text(&message(7, end_body(&error, false))),
            r#"{"subscriptionId":"sub-7","type":"push","channel":"subscription","error":{"code":"NOT_FOUND","message":"no \"x\""}}"#
        );
    }
}
