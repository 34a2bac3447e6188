//! Sequences, sets and maps.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, Hash};

use super::FromValue;
use crate::error::ConversionError;
use crate::resp::Value;

impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::vec_from_value(value)
    }
}

impl<T: FromValue, const N: usize> FromValue for [T; N] {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        // Made first, because the conversion consumes the value.
        let error = ConversionError::new("an array of the requested length", &value);
        Self::try_from(T::vec_from_value(value)?).map_err(|_| error)
    }
}

impl<T: FromValue + Eq + Hash, S: BuildHasher + Default> FromValue for HashSet<T, S> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        elements(value)?.map(T::from_value).collect()
    }
}

impl<T: FromValue + Ord> FromValue for BTreeSet<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        elements(value)?.map(T::from_value).collect()
    }
}

impl<K: FromValue + Eq + Hash, V: FromValue, S: BuildHasher + Default> FromValue for HashMap<K, V, S> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let pairs = Pairs::new(value)?;
        let mut map = Self::with_capacity_and_hasher(pairs.len(), S::default());
        pairs.convert(|key, value| drop(map.insert(key, value)))?;
        Ok(map)
    }
}

impl<K: FromValue + Ord, V: FromValue> FromValue for BTreeMap<K, V> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let mut map = Self::new();
        Pairs::new(value)?.convert(|key, value| drop(map.insert(key, value)))?;
        Ok(map)
    }
}

/// Pairs come as a map, as an array of pairs, and in RESP2 also flat: `ZRANGE` with scores, `HGETALL`.
impl<A: FromValue, B: FromValue> FromValue for (A, B) {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let [first, second] = exactly(value, "an array of 2")?;
        Ok((A::from_value(first)?, B::from_value(second)?))
    }

    fn vec_from_value(value: Value) -> Result<Vec<Self>, ConversionError> {
        let pairs = Pairs::new(value)?;
        let mut converted = Vec::with_capacity(pairs.len());
        pairs.convert(|first, second| converted.push((first, second)))?;
        Ok(converted)
    }
}

/// Returns the elements of an array with exactly this number of them.
pub(super) fn exactly<const N: usize>(value: Value, expected: &'static str) -> Result<[Value; N], ConversionError> {
    match value.into_bare() {
        Value::Array(items) | Value::Set(items) => {
            <[Value; N]>::try_from(items).map_err(|items| ConversionError::new(expected, &Value::Array(items)))
        }
        other => Err(ConversionError::new(expected, &other)),
    }
}

fn elements(value: Value) -> Result<impl Iterator<Item = Value>, ConversionError> {
    match value.into_bare() {
        Value::Array(items) | Value::Set(items) => Ok(items.into_iter()),
        other => Err(ConversionError::new("a set or an array", &other)),
    }
}

/// Pairs in one of three forms.
pub(super) enum Pairs {
    Map(Vec<(Value, Value)>),
    /// Arrays of two. A flat array whose keys and values are all arrays of two is taken for this.
    Nested(Vec<Value>),
    /// Alternating keys and values.
    Flat(Vec<Value>),
}

const PAIRS: &str = "a map or an array of pairs";

impl Pairs {
    pub(super) fn new(value: Value) -> Result<Self, ConversionError> {
        match value.into_bare() {
            Value::Map(pairs) => Ok(Self::Map(pairs)),
            Value::Array(items) if items.iter().all(is_pair) => Ok(Self::Nested(items)),
            Value::Array(items) if items.len().is_multiple_of(2) => Ok(Self::Flat(items)),
            other => Err(ConversionError::new(PAIRS, &other)),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Map(pairs) => pairs.len(),
            Self::Nested(items) => items.len(),
            Self::Flat(items) => items.len() / 2,
        }
    }

    /// Calls `f` with each pair.
    pub(super) fn each(
        self,
        mut f: impl FnMut(Value, Value) -> Result<(), ConversionError>,
    ) -> Result<(), ConversionError> {
        match self {
            Self::Map(pairs) => pairs.into_iter().try_for_each(|(first, second)| f(first, second)),
            Self::Nested(items) => items.into_iter().try_for_each(|item| {
                let [first, second] = exactly(item, PAIRS)?;
                f(first, second)
            }),
            Self::Flat(items) => {
                let mut items = items.into_iter();
                while let (Some(first), Some(second)) = (items.next(), items.next()) {
                    f(first, second)?;
                }
                Ok(())
            }
        }
    }

    fn convert<A: FromValue, B: FromValue>(self, mut f: impl FnMut(A, B)) -> Result<(), ConversionError> {
        self.each(|first, second| {
            f(A::from_value(first)?, B::from_value(second)?);
            Ok(())
        })
    }
}

fn is_pair(value: &Value) -> bool {
    matches!(value.bare(), Value::Array(items) if items.len() == 2)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Value {
        Value::Bulk(Bytes::copy_from_slice(text.as_bytes()))
    }

    #[test]
    fn stream_is_the_same_in_both_protocols() {
        type Streams = Vec<(String, Vec<(String, Vec<(String, u8)>)>)>;
        let entries = || {
            let fields = Value::Array(vec![text("f"), text("1"), text("g"), text("2")]);
            Value::Array(vec![Value::Array(vec![text("1-1"), fields])])
        };
        let new = Value::Map(vec![(text("s"), entries())]);
        let old = Value::Array(vec![Value::Array(vec![text("s"), entries()])]);
        let expected = vec![("s".into(), vec![("1-1".into(), vec![("f".into(), 1), ("g".into(), 2)])])];
        assert_eq!(Streams::from_value(new), Ok(expected.clone()));
        assert_eq!(Streams::from_value(old), Ok(expected));
    }

    #[test]
    fn length_must_match() {
        let three = || Value::Array(vec![1.into(), 2.into(), 3.into()]);
        assert_eq!(<[u8; 3]>::from_value(Value::Bulk("abc".into())), Ok(*b"abc"));
        assert_eq!(<[i64; 3]>::from_value(three()), Ok([1, 2, 3]));
        let error = <[i64; 2]>::from_value(three()).expect_err("one too many");
        assert_eq!(&*error.found, "array of 3");
        assert!(<(i64, i64)>::from_value(three()).is_err());
        assert!(Vec::<(i64, i64)>::from_value(three()).is_err());
        assert!(HashMap::<i64, i64>::from_value(three()).is_err());
        assert_eq!(Vec::<(i64, i64)>::from_value(Value::Array(vec![])), Ok(vec![]));
        assert!(Vec::<i64>::from_value(Value::Null).is_err());
        assert_eq!(Option::<Vec<i64>>::from_value(Value::Null), Ok(None));
    }

    #[test]
    fn error_inside_a_reply_is_kept_or_reported() {
        let values = || Value::Array(vec![1.into(), Value::SimpleError("OOM no".into())]);
        let slots = Vec::<Result<i64, crate::ServerError>>::from_value(values()).expect("slots");
        assert!(matches!(&slots[..], [Ok(1), Err(error)] if error.to_string() == "OOM no"), "{slots:?}");
        let error = Vec::<i64>::from_value(values()).expect_err("no place");
        assert_eq!(&*error.found, "error \"OOM no\"");
    }

    proptest! {
        #[test]
        fn pairs_are_the_same_in_all_forms(pairs in prop::collection::vec(("[a-z]{0,4}", any::<f64>().prop_filter("", |f| !f.is_nan())), 0..9)) {
            let values = || pairs.iter().map(|(member, score)| (text(member), Value::Double(*score)));
            let written = |score: &f64| text(&score.to_string());
            let forms = || [
                Value::Map(values().collect()),
                Value::Array(values().map(|(member, score)| Value::Array(vec![member, score])).collect()),
                Value::Array(pairs.iter().flat_map(|(member, score)| [text(member), written(score)]).collect()),
            ];
            for form in forms() {
                prop_assert_eq!(Vec::<(String, f64)>::from_value(form), Ok(pairs.clone()));
            }
            let map: HashMap<_, _> = pairs.iter().cloned().collect();
            let sorted: BTreeMap<_, _> = pairs.iter().cloned().collect();
            for form in forms() {
                prop_assert_eq!(HashMap::<String, f64>::from_value(form.clone()), Ok(map.clone()));
                prop_assert_eq!(BTreeMap::<String, f64>::from_value(form), Ok(sorted.clone()));
            }
        }

        #[test]
        fn sets_are_the_same_in_both_forms(members in prop::collection::vec("[a-z]{0,2}", 0..9)) {
            let values: Vec<_> = members.iter().map(|member| text(member)).collect();
            let expected: BTreeSet<_> = members.iter().cloned().collect();
            for form in [Value::Set(values.clone()), Value::Array(values)] {
                prop_assert_eq!(BTreeSet::<String>::from_value(form.clone()), Ok(expected.clone()));
                let hashed: HashSet<String> = HashSet::from_value(form.clone()).expect("a set");
                prop_assert_eq!(hashed.into_iter().collect::<BTreeSet<_>>(), expected.clone());
                prop_assert_eq!(Vec::<String>::from_value(form), Ok(members.clone()));
            }
        }
    }
}
