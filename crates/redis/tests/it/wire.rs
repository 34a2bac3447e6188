//! Helpers that decode streams in pieces, generate values, and encode them in all forms of RESP3.

use bytes::{BufMut, Bytes, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;
use tidewire_redis::Value;
use tidewire_redis::resp::{Attributed, DecodeError, Decoder, DecoderOptions, Message, Version};

/// The messages of a stream, and the error or the result of `finish`.
pub(crate) type Received = (Vec<Message>, Result<(), DecodeError>);

/// Decodes `wire` in pieces of these sizes, repeated. Without sizes, all at once.
pub(crate) fn decode_pieces(options: DecoderOptions, wire: &[u8], sizes: &[usize]) -> Received {
    let (mut decoder, mut input, mut messages) = (Decoder::new(options), BytesMut::new(), Vec::new());
    let (mut rest, mut sizes) = (wire, sizes.iter().cycle());
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(sizes.next().map_or(rest.len(), |&size| size.clamp(1, rest.len())));
        input.put_slice(piece);
        rest = after;
        loop {
            match decoder.decode(&mut input) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.decode(&mut BytesMut::from("+OK\r\n")), Err(error), "an error is final");
                    assert_eq!(decoder.finish(&BytesMut::new()), Err(error));
                    return (messages, Err(error));
                }
            }
        }
        assert_eq!(decoder.is_midway(&input), decoder.finish(&input).is_err());
    }
    (messages, decoder.finish(&input))
}

/// Options that keep attributes.
pub(crate) fn keeping_attributes() -> DecoderOptions {
    DecoderOptions::default().keep_attributes(true)
}

/// Encodes a message.
pub(crate) fn encoded(message: &Message) -> Vec<u8> {
    let mut output = BytesMut::new();
    message.encode(Version::Resp3, &mut output).unwrap();
    output.to_vec()
}

pub(crate) fn any_message() -> impl Strategy<Value = Message> {
    prop_oneof![
        4 => any_value().prop_map(Message::Reply),
        1 => vec(any_value(), 0..4).prop_map(Message::Push),
    ]
}

pub(crate) fn any_value() -> impl Strategy<Value = Value> {
    let bytes = || vec(any::<u8>(), 0..12).prop_map(Bytes::from);
    let line = || bytes().prop_map(|bytes| bytes.iter().filter(|byte| !b"\r\n".contains(byte)).copied().collect());
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Boolean),
        any::<i64>().prop_map(Value::Integer),
        (-20_i64..2000).prop_map(Value::Integer),
        any::<f64>().prop_filter("not equal to itself", |value| !value.is_nan()).prop_map(Value::Double),
        any::<i128>().prop_map(|number| Value::BigNumber(number.to_string().into())),
        line().prop_map(Value::Simple),
        line().prop_map(Value::SimpleError),
        bytes().prop_map(Value::Bulk),
        bytes().prop_map(Value::BlobError),
        (any::<[u8; 3]>(), bytes()).prop_map(|(format, bytes)| Value::Verbatim(format, bytes)),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        let pairs = || vec((inner.clone(), inner.clone()), 0..3);
        prop_oneof![
            vec(inner.clone(), 0..5).prop_map(Value::Array),
            vec(inner.clone(), 0..5).prop_map(Value::Set),
            pairs().prop_map(Value::Map),
            (pairs(), inner.clone()).prop_map(|(attributes, value)| {
                Value::Attributed(Box::new(Attributed { attributes, value: value.into_bare() }))
            }),
        ]
    })
}

/// Encodes values in valid forms that servers rarely use. `choices` decide which.
pub(crate) struct UnusualEncoder<'a> {
    pub(crate) choices: std::iter::Cycle<std::slice::Iter<'a, u8>>,
    pub(crate) output: Vec<u8>,
}

impl UnusualEncoder<'_> {
    pub(crate) fn message(&mut self, message: &Message) {
        match message {
            Message::Reply(value) => self.value(value),
            Message::Push(items) => {
                self.line(format!(">{}", items.len()));
                for item in items {
                    self.value(item);
                }
            }
            other => panic!("unknown kind of message: {other:?}"),
        }
    }

    fn choice(&mut self, of: u8) -> u8 {
        self.choices.next().map_or(0, |choice| choice % of)
    }

    fn line(&mut self, line: impl AsRef<[u8]>) {
        self.output.extend_from_slice(line.as_ref());
        self.output.extend_from_slice(b"\r\n");
    }

    /// Returns whether the aggregate needs an end.
    fn head(&mut self, first: char, len: usize) -> bool {
        let is_streamed = self.choice(2) == 0;
        self.line(if is_streamed { format!("{first}?") } else { format!("{first}{len:03}") });
        is_streamed
    }

    fn value(&mut self, value: &Value) {
        match value {
            Value::Null => {
                let null = ["_", "$-1", "*-1"][usize::from(self.choice(3))];
                self.line(null);
            }
            Value::Integer(value) if *value >= 0 => {
                let form = self.choice(2);
                self.line(if form == 0 { format!(":+{value}") } else { format!(":{value:030}") });
            }
            Value::Double(value) if value.is_finite() => self.line(format!(",{value:+e}")),
            Value::Bulk(bytes) if self.choice(2) == 0 => {
                self.line("$?");
                for chunk in bytes.chunks(usize::from(self.choice(3)) + 1) {
                    self.line(format!(";{}", chunk.len()));
                    self.line(chunk);
                }
                self.line(";0");
            }
            Value::Array(items) => self.items('*', items),
            Value::Set(items) => self.items('~', items),
            Value::Map(pairs) => {
                let is_streamed = self.head('%', pairs.len());
                self.pairs(pairs);
                if is_streamed {
                    self.line(".");
                }
            }
            // Attributes in several parts, of which the first is empty.
            Value::Attributed(attributed) => {
                self.line("|0");
                for pair in attributed.attributes.chunks(1) {
                    self.line("|1");
                    self.pairs(pair);
                }
                self.value(&attributed.value);
            }
            usual => self.output.extend(encoded(&Message::Reply(usual.clone()))),
        }
    }

    fn items(&mut self, first: char, items: &[Value]) {
        let is_streamed = self.head(first, items.len());
        for item in items {
            self.value(item);
        }
        if is_streamed {
            self.line(".");
        }
    }

    fn pairs(&mut self, pairs: &[(Value, Value)]) {
        for (key, value) in pairs {
            self.value(key);
            self.value(value);
        }
    }
}
