//! Encoding of replies.

use bytes::Bytes;
use serde_json::{Value as Json, json};
use tidewire_conn::websocket::{Message, Text};
use tidewire_store::Row;
use tidewire_store::transaction::OperationResult;

use super::request::Id;
use crate::RequestError;

/// The `data` of a result.
///
/// The writer thread returns the data of a write unencoded, and the thread that sends the reply encodes it.
#[derive(Debug)]
pub(crate) enum Data {
    /// A record. It is already JSON text.
    Row(Row),
    /// Records, sent as `{"records":[…]}`.
    Records(Vec<Row>),
    /// The results of a transaction, sent as `{"results":[{"index":0,"data":…},…]}`.
    Results(Vec<OperationResult>),
    Json(Json),
    /// JSON text, preceded by [`HEAD_CAPACITY`] spare bytes into which the head of the message is written. If the text is empty, the
    /// result has no `data`.
    Encoded(Vec<u8>),
}

/// Space for the longest head, `{"id":…,"type":"result","data":`.
const HEAD_CAPACITY: usize = 64;

impl Data {
    /// Creates data from the JSON text that `write` appends.
    pub(crate) fn encode_with(capacity: usize, write: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut text = Vec::with_capacity(HEAD_CAPACITY + capacity + 1);
        text.resize(HEAD_CAPACITY, b' ');
        write(&mut text);
        Self::Encoded(text)
    }

    /// Returns the memory of the text; 0 if it is not encoded yet.
    pub(crate) fn encoded_bytes(&self) -> usize {
        match self {
            Self::Encoded(text) => text.capacity(),
            _ => 0,
        }
    }

    /// Encodes a list of values between `before` and `after`. Stops with an error when it exceeds `max` bytes.
    pub(crate) fn list(
        before: &str,
        values: impl Iterator<Item = Json>,
        after: &str,
        max: usize,
    ) -> Result<Self, RequestError> {
        let mut is_within = true;
        let data = Self::encode_with(1024, |out| {
            let end = out.len().saturating_add(max);
            out.extend_from_slice(before.as_bytes());
            for (index, value) in values.enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                append_json(out, &value);
                if out.len() > end {
                    is_within = false;
                    return;
                }
            }
            out.extend_from_slice(after.as_bytes());
        });
        if is_within { data.encode_within(max) } else { Err(RequestError::too_large(max)) }
    }

    /// Creates data from JSON text.
    pub(crate) fn text(text: &str) -> Self {
        Self::encode_with(text.len(), |out| out.extend_from_slice(text.as_bytes()))
    }

    /// Encodes the data, unless it is a row.
    fn encode(self) -> Self {
        match self {
            Self::Json(value) => Self::encode_with(128, |out| append_json(out, &value)),
            Self::Records(rows) => {
                let size = rows.iter().map(|row| row.text_bytes().len() + 1).sum::<usize>();
                Self::encode_with(size + 16, |out| {
                    out.extend_from_slice(b"{\"records\":");
                    append_rows(out, rows.iter());
                    out.push(b'}');
                })
            }
            Self::Results(results) => Self::encode_with(256, |out| append_results(out, &results)),
            encoded => encoded,
        }
    }

    /// Encodes the data. Returns an error if it is larger than `max` bytes.
    pub(crate) fn encode_within(self, max: usize) -> Result<Self, RequestError> {
        let data = self.encode();
        if data.encoded_text().len() > max { Err(RequestError::too_large(max)) } else { Ok(data) }
    }

    /// Returns the JSON text of encoded data.
    fn encoded_text(&self) -> &[u8] {
        match self {
            Self::Row(row) => row.text_bytes(),
            Self::Encoded(text) => text.get(HEAD_CAPACITY..).unwrap_or_default(),
            Self::Json(_) | Self::Records(_) | Self::Results(_) => &[],
        }
    }

    /// Returns the JSON text; `None` if the result has no data.
    pub(crate) fn into_text(self) -> Option<Vec<u8>> {
        let text = self.encode().encoded_text().to_vec();
        (!text.is_empty()).then_some(text)
    }

    /// Returns the data as a value, to be stored with the idempotency key of the request.
    pub(crate) fn to_json(&self) -> Json {
        match self {
            Self::Row(row) => Json::Object(row.to_record()),
            Self::Records(rows) => {
                let records: Vec<Json> = rows.iter().map(|row| Json::Object(row.to_record())).collect();
                json!({"records": records})
            }
            Self::Results(results) => {
                let result =
                    |(index, result): (usize, &OperationResult)| json!({"index": index, "data": result.to_json()});
                json!({"results": results.iter().enumerate().map(result).collect::<Vec<_>>()})
            }
            Self::Json(value) => value.clone(),
            Self::Encoded(_) => serde_json::from_slice(self.encoded_text()).unwrap_or_default(),
        }
    }

    /// Encodes the result message.
    pub(crate) fn into_message(self, id: Id) -> Message {
        let mut text = match self.encode() {
            Self::Encoded(text) => text,
            Self::Row(row) => {
                let parts = ["{\"id\":", id.as_str(), ",\"type\":\"result\",\"data\":", row.text(), "}"];
                return Message::text(parts.concat());
            }
            Self::Json(_) | Self::Records(_) | Self::Results(_) => Vec::new(),
        };
        let has_data = text.len() > HEAD_CAPACITY;
        let end: &[u8] = if has_data { b",\"type\":\"result\",\"data\":" } else { b",\"type\":\"result\"" };
        let head = [b"{\"id\":", id.as_bytes(), end].concat();
        text.push(b'}');
        // The head is written directly before the data; spare bytes before the head are sliced off.
        let start = HEAD_CAPACITY.min(text.len()) - head.len();
        text[start..start + head.len()].copy_from_slice(&head);
        Message::Text(utf8(Bytes::from(text).slice(start..)))
    }
}

impl From<Json> for Data {
    fn from(value: Json) -> Self {
        Self::Json(value)
    }
}

/// Encodes an error message.
pub(crate) fn error(id: Id, error: &RequestError, with_details: bool) -> Message {
    let mut out = Vec::with_capacity(96 + error.message.len());
    out.extend_from_slice(b"{\"id\":");
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(b",\"type\":\"error\",");
    append_error(&mut out, error, with_details);
    out.push(b'}');
    Message::Text(utf8(Bytes::from(out)))
}

/// Appends the members of an error.
pub(super) fn append_error(out: &mut Vec<u8>, error: &RequestError, with_details: bool) {
    out.extend_from_slice(b"\"code\":\"");
    out.extend_from_slice(error.code.as_str().as_bytes());
    out.extend_from_slice(b"\",\"message\":");
    append_string(out, &error.message);
    if let Some(details) = error.details.as_ref().filter(|_| with_details) {
        out.extend_from_slice(b",\"details\":");
        append_json(out, details);
    }
}

/// Appends the results of a transaction.
fn append_results(out: &mut Vec<u8>, results: &[OperationResult]) {
    out.extend_from_slice(b"{\"results\":[");
    for (index, result) in results.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        out.extend_from_slice(format!("{comma}{{\"index\":{index},\"data\":").as_bytes());
        match result {
            OperationResult::Record(Some(row)) => out.extend_from_slice(row.text_bytes()),
            OperationResult::Records(rows) => append_rows(out, rows.iter()),
            small => append_json(out, &small.to_json()),
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
}

/// Appends a list of rows.
pub(crate) fn append_rows<'a>(out: &mut Vec<u8>, rows: impl Iterator<Item = &'a Row>) {
    out.push(b'[');
    for (index, row) in rows.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(row.text_bytes());
    }
    out.push(b']');
}

pub(crate) fn append_json(out: &mut Vec<u8>, value: &Json) {
    // Writing a JSON value to memory does not fail.
    let _ = serde_json::to_writer(out, value);
}

pub(crate) fn append_string(out: &mut Vec<u8>, text: &str) {
    let _ = serde_json::to_writer(out, text);
}

/// Converts encoded bytes to text. They are always UTF-8: both rows and the output of serde are.
pub(super) fn utf8(text: Bytes) -> Text {
    Text::try_from(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;
    use crate::protocol::request::{ClientMessage, Request};

    fn id(text: &str) -> Id {
        match ClientMessage::parse(&format!(r#"{{"type":"x","id":{text}}}"#)).unwrap() {
            ClientMessage::Request(Request { id, .. }) => id,
            ClientMessage::Pong { .. } => unreachable!(),
        }
    }

    fn text(message: &Message) -> &str {
        message.as_text().unwrap()
    }

    #[test]
    fn result_message_wraps_its_data() {
        let longest = "-1.2345678901234567890123456e10";
        for id_text in ["0", "12", &longest[..30]] {
            let with_data = Data::text("[1]").into_message(id(id_text));
            assert_eq!(text(&with_data), format!(r#"{{"id":{id_text},"type":"result","data":[1]}}"#));
            let without = Data::encode_with(0, |_| ()).into_message(id(id_text));
            assert_eq!(text(&without), format!(r#"{{"id":{id_text},"type":"result"}}"#));
        }
        let row = Row::new(json!({"a": 1}).as_object().unwrap()).unwrap();
        for (data, expected) in [
            (Data::Row(row.clone()), r#"{"a":1}"#),
            (Data::Records(vec![row.clone(), row]), r#"{"records":[{"a":1},{"a":1}]}"#),
            (Data::from(json!([null])), "[null]"),
        ] {
            assert_eq!(data.to_json().to_string(), expected);
            assert_eq!(text(&data.into_message(id("1"))), format!(r#"{{"id":1,"type":"result","data":{expected}}}"#));
        }
    }

    #[test]
    fn data_above_the_limit_is_rejected() {
        assert!(Data::text("[12]").encode_within(4).is_ok());
        assert_eq!(Data::text("[123]").encode_within(4).unwrap_err().code, Code::TooLarge);
        assert_eq!(Data::from(json!("12345")).encode_within(6).unwrap_err().code, Code::TooLarge);
    }

    #[test]
    fn error_details_are_sent_only_if_exposed() {
        let failed = RequestError::new(Code::NotFound, "no \"x\"").with_details(json!({"a": 1}));
        let expected = r#"{"id":1,"type":"error","code":"NOT_FOUND","message":"no \"x\"""#;
        assert_eq!(text(&error(id("1"), &failed, true)), format!("{expected},\"details\":{{\"a\":1}}}}"));
        assert_eq!(text(&error(id("1"), &failed, false)), format!("{expected}}}"));
    }
}
