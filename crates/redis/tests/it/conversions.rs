//! Replies of RESP2 and RESP3 convert to the same values.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use tidewire_redis::resp::{Decoder, Message, Version};
use tidewire_redis::{FromValue, Serde, Value};

/// Encodes a value in this version of the protocol, and decodes it.
fn round_trip(version: Version, value: &Value) -> Value {
    let mut bytes = BytesMut::new();
    value.encode(version, &mut bytes).expect("the value can be encoded");
    match Decoder::default().decode(&mut bytes) {
        Ok(Some(Message::Reply(value))) => value,
        other => panic!("not a reply: {other:?}"),
    }
}

fn converts_to<T: FromValue + PartialEq + Debug>(value: &Value, expected: &T) -> Result<(), TestCaseError> {
    for version in [Version::Resp2, Version::Resp3] {
        let converted = T::from_value(round_trip(version, value));
        prop_assert_eq!(converted.as_ref(), Ok(expected), "{:?}: {:?}", version, value);
    }
    Ok(())
}

fn text(text: &str) -> Value {
    Value::Bulk(Bytes::copy_from_slice(text.as_bytes()))
}

fn number() -> impl Strategy<Value = f64> {
    any::<f64>().prop_filter("it equals itself", |number| !number.is_nan())
}

proptest! {
    #[test]
    fn scalars(truth: bool, integer: i64, double in number(), word in ".{0,9}", bytes: Vec<u8>) {
        converts_to(&Value::Boolean(truth), &truth)?;
        converts_to(&Value::Boolean(truth), &i32::from(truth))?;
        converts_to(&Value::Boolean(truth), &f64::from(u8::from(truth)))?;
        converts_to(&Value::Boolean(truth), &u8::from(truth).to_string())?;
        converts_to(&integer.into(), &integer)?;
        converts_to(&integer.into(), &integer.to_string())?;
        converts_to(&Value::BigNumber(integer.to_string().into()), &integer)?;
        converts_to(&Value::Double(double), &double)?;
        converts_to(&Value::Double(double), &Serde(double))?;
        converts_to(&text(&word), &word)?;
        converts_to(&Value::Verbatim(*b"txt", word.clone().into()), &Some(word))?;
        converts_to(&Value::Bulk(bytes.clone().into()), &bytes)?;
        converts_to(&Value::Null, &None::<String>)?;
        converts_to(&Value::Null, &Serde(None::<String>))?;
    }

    #[test]
    fn maps(map in prop::collection::btree_map("[a-z]{0,3}", number(), 0..9)) {
        let value = Value::Map(map.iter().map(|(key, value)| (text(key), Value::Double(*value))).collect());
        converts_to(&value, &map)?;
        converts_to(&value, &map.clone().into_iter().collect::<HashMap<_, _>>())?;
        converts_to(&value, &map.clone().into_iter().collect::<Vec<_>>())?;
        converts_to(&value, &Serde(map))?;
    }

    #[test]
    fn sets(set in prop::collection::btree_set(any::<u16>(), 0..9)) {
        let value = Value::Set(set.iter().map(|member| i64::from(*member).into()).collect());
        converts_to::<BTreeSet<u16>>(&value, &set)?;
        converts_to::<Vec<u16>>(&value, &set.iter().copied().collect())?;
        converts_to(&value, &Serde(set))?;
    }

    /// Like the reply to `XREAD`: streams with entries, which have an ID and a flat sequence of fields.
    #[test]
    fn nested(streams in prop::collection::btree_map(
        "[a-z]{1,3}",
        prop::collection::vec(("[a-z]{1,3}", prop::collection::vec(("[a-z]{0,3}", any::<u8>()), 1..4)), 0..4),
        0..4,
    )) {
        type Streams = BTreeMap<String, Vec<(String, Vec<(String, u8)>)>>;
        let fields = |fields: &[(String, u8)]| {
            Value::Array(fields.iter().flat_map(|(field, value)| [text(field), text(&value.to_string())]).collect())
        };
        let entries = |entries: &[(String, Vec<(String, u8)>)]| {
            Value::Array(entries.iter().map(|(id, pairs)| Value::Array(vec![text(id), fields(pairs)])).collect())
        };
        let value = Value::Map(streams.iter().map(|(stream, list)| (text(stream), entries(list))).collect());
        converts_to::<Streams>(&value, &streams)?;
        converts_to(&value, &Some(streams.into_iter().collect::<Vec<_>>()))?;
    }
}
