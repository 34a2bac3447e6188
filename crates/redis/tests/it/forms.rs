//! Replies of RESP2 and RESP3 convert to the same values.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use tidewire_redis::resp::{Decoder, Message, Version};
use tidewire_redis::{FromValue, Serde, Value};

/// Returns the value after encoding and decoding in this version.
fn over(version: Version, value: &Value) -> Value {
    let mut bytes = BytesMut::new();
    value.encode(version, &mut bytes).expect("it can be said");
    match Decoder::default().decode(&mut bytes) {
        Ok(Some(Message::Reply(value))) => value,
        other => panic!("not a reply: {other:?}"),
    }
}

fn becomes<T: FromValue + PartialEq + Debug>(said: &Value, expected: &T) -> Result<(), TestCaseError> {
    for version in [Version::Resp2, Version::Resp3] {
        let converted = T::from_value(over(version, said));
        prop_assert_eq!(converted.as_ref(), Ok(expected), "{:?}: {:?}", version, said);
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
        becomes(&Value::Boolean(truth), &truth)?;
        becomes(&Value::Boolean(truth), &i32::from(truth))?;
        becomes(&Value::Boolean(truth), &f64::from(u8::from(truth)))?;
        becomes(&Value::Boolean(truth), &u8::from(truth).to_string())?;
        becomes(&integer.into(), &integer)?;
        becomes(&integer.into(), &integer.to_string())?;
        becomes(&Value::BigNumber(integer.to_string().into()), &integer)?;
        becomes(&Value::Double(double), &double)?;
        becomes(&Value::Double(double), &Serde(double))?;
        becomes(&text(&word), &word)?;
        becomes(&Value::Verbatim(*b"txt", word.clone().into()), &Some(word))?;
        becomes(&Value::Bulk(bytes.clone().into()), &bytes)?;
        becomes(&Value::Null, &None::<String>)?;
        becomes(&Value::Null, &Serde(None::<String>))?;
    }

    #[test]
    fn maps(map in prop::collection::btree_map("[a-z]{0,3}", number(), 0..9)) {
        let said = Value::Map(map.iter().map(|(key, value)| (text(key), Value::Double(*value))).collect());
        becomes(&said, &map)?;
        becomes(&said, &map.clone().into_iter().collect::<HashMap<_, _>>())?;
        becomes(&said, &map.clone().into_iter().collect::<Vec<_>>())?;
        becomes(&said, &Serde(map))?;
    }

    #[test]
    fn sets(set in prop::collection::btree_set(any::<u16>(), 0..9)) {
        let said = Value::Set(set.iter().map(|member| i64::from(*member).into()).collect());
        becomes::<BTreeSet<u16>>(&said, &set)?;
        becomes::<Vec<u16>>(&said, &set.iter().copied().collect())?;
        becomes(&said, &Serde(set))?;
    }

    /// As streams are: maps of sequences of pairs of a name and a flat sequence.
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
        let said = Value::Map(streams.iter().map(|(stream, list)| (text(stream), entries(list))).collect());
        becomes::<Streams>(&said, &streams)?;
        becomes(&said, &Some(streams.into_iter().collect::<Vec<_>>()))?;
    }
}
