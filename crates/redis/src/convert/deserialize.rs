//! Conversion of replies to the caller's types, through serde.

use std::fmt::Display;
use std::vec;

use bytes::Bytes;
use serde::de::value::SeqDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;

use super::FromValue;
use super::collection::Pairs;
use crate::error::{ConversionError, shown};
use crate::resp::Value;

/// A reply that is deserialized: a struct from a hash, for instance. The values of a hash are strings; numbers are read from them.
///
/// ```
/// use serde::Deserialize;
/// use tidewire_redis::{FromValue, Serde, Value};
///
/// #[derive(Debug, PartialEq, Deserialize)]
/// struct Boat {
///     name: String,
///     draught: f32,
///     port: Option<String>,
/// }
///
/// let fields = || Value::Map(vec![("name".into(), "Tern".into()), ("draught".into(), "1.2".into())]);
/// let Serde(boat) = Serde::<Boat>::from_value(fields())?;
/// assert_eq!(boat, Boat { name: "Tern".into(), draught: 1.2, port: None });
///
/// // As XRANGE answers: an array of identifiers with fields.
/// let entries = Value::Array(vec![Value::Array(vec!["1-0".into(), fields()])]);
/// let Serde(entries) = Serde::<Vec<(String, Boat)>>::from_value(entries)?;
/// assert_eq!((&*entries[0].0, &*entries[0].1.name), ("1-0", "Tern"));
///
/// let wrong = Value::Map(vec![("name".into(), "Tern".into()), ("draught".into(), "deep".into())]);
/// let error = Serde::<Boat>::from_value(wrong).unwrap_err();
/// assert_eq!(error.place(), Some("draught"));
/// # Ok::<(), tidewire_redis::ConversionError>(())
/// ```
///
/// - Fields that the type does not know are skipped, and an `Option` may be missing.
/// - There are no empty hashes: of a key that does not exist, `HGETALL` answers that it has no fields. So an empty reply is `None`
///   if an `Option` as a whole was asked for: `Serde<Option<Boat>>`.
/// - Enums are read from the name of a variant that has no fields, booleans from 0 and 1, and `Vec<u8>` from a string.
/// - What is flattened or in an untagged enum is read without knowing its type. Numbers of a hash are strings there.
///
/// What is written with [`Fields`](crate::Fields) can be read with this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Serde<T>(pub T);

impl<T: DeserializeOwned> FromValue for Serde<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::deserialize(Source { value, is_whole: true }).map(Self)
    }
}

/// What serde says about a type, which has no value to show.
impl serde::de::Error for ConversionError {
    fn custom<T: Display>(message: T) -> Self {
        Self::with_text("what the type takes", message.to_string())
    }
}

struct Source {
    value: Value,
    /// Whether it is all of the reply.
    is_whole: bool,
}

impl From<Value> for Source {
    fn from(value: Value) -> Self {
        Self { value, is_whole: false }
    }
}

impl Source {
    /// Whether `None` is meant.
    fn is_none(&self) -> bool {
        match self.value.bare() {
            Value::Null => true,
            Value::Array(items) | Value::Set(items) => self.is_whole && items.is_empty(),
            Value::Map(pairs) => self.is_whole && pairs.is_empty(),
            _ => false,
        }
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
            visitor.$visit(<$type>::from_value(self.value)?)
        }
    )*};
}

impl<'de> Deserializer<'de> for Source {
    type Error = ConversionError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        match self.value.into_bare() {
            Value::Null => visitor.visit_unit(),
            Value::Boolean(value) => visitor.visit_bool(value),
            Value::Integer(integer) => visitor.visit_i64(integer),
            Value::Double(double) => visitor.visit_f64(double),
            Value::BigNumber(text) | Value::Simple(text) | Value::Bulk(text) | Value::Verbatim(_, text) => {
                match str::from_utf8(&text) {
                    Ok(text) => visitor.visit_str(text),
                    Err(_) => visitor.visit_bytes(&text),
                }
            }
            Value::Array(items) | Value::Set(items) => Elements::visit(items, visitor),
            Value::Map(pairs) => Entries::visit(pairs, visitor),
            other => Err(ConversionError::new("a value", &other)),
        }
    }

    numbers! {
        deserialize_bool visit_bool bool,
        deserialize_i8 visit_i8 i8,
        deserialize_i16 visit_i16 i16,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64,
        deserialize_i128 visit_i128 i128,
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_u128 visit_u128 u128,
        deserialize_f32 visit_f32 f32,
        deserialize_f64 visit_f64 f64,
        deserialize_string visit_string String,
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        self.deserialize_string(visitor)
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        self.deserialize_string(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_bytes(&Bytes::from_value(self.value)?)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_byte_buf(Bytes::from_value(self.value)?.into())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        if self.is_none() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ConversionError> {
        visitor.visit_newtype_struct(self)
    }

    /// Also from a string, as serde takes `Vec<u8>` for a sequence.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        match self.value.as_bytes() {
            Some(bytes) => {
                let mut bytes = SeqDeserializer::<_, ConversionError>::new(bytes.iter().copied());
                let visited = visitor.visit_seq(&mut bytes).and_then(|visited| bytes.end().map(|()| visited));
                visited.map_err(|_| ConversionError::new("an array", &self.value))
            }
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, ConversionError> {
        self.deserialize_seq(visitor)
    }

    /// Also from a flat array, as RESP2 has no maps.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        let mut all = Vec::new();
        Pairs::new(self.value)?.each(|key, value| {
            all.push((key, value));
            Ok(())
        })?;
        Entries::visit(all, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConversionError> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConversionError> {
        visitor.visit_enum(String::from_value(self.value)?.into_deserializer())
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! { unit unit_struct tuple_struct identifier }
}

/// The elements of an array. An error says in which it is.
struct Elements {
    rest: vec::IntoIter<Value>,
    taken: usize,
}

impl Elements {
    fn visit<'de, V: Visitor<'de>>(items: Vec<Value>, visitor: V) -> Result<V::Value, ConversionError> {
        let len = items.len();
        let mut elements = Self { rest: items.into_iter(), taken: 0 };
        let visited = visitor.visit_seq(&mut elements)?;
        match elements.rest.len() {
            0 => Ok(visited),
            _ => {
                Err(ConversionError::with_text("an array of the length that was asked for", format!("array of {len}")))
            }
        }
    }
}

impl<'de> SeqAccess<'de> for Elements {
    type Error = ConversionError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ConversionError> {
        let Some(value) = self.rest.next() else { return Ok(None) };
        self.taken += 1;
        let element = seed.deserialize(Source::from(value));
        element.map(Some).map_err(|error| error.within(&(self.taken - 1).to_string()))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// The pairs of a map. An error says in which it is.
struct Entries {
    rest: vec::IntoIter<(Value, Value)>,
    /// What was taken, and its value if that was not.
    taken: (Value, Option<Value>),
}

impl Entries {
    fn visit<'de, V: Visitor<'de>>(pairs: Vec<(Value, Value)>, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_map(Self { rest: pairs.into_iter(), taken: (Value::Null, None) })
    }
}

impl<'de> MapAccess<'de> for Entries {
    type Error = ConversionError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ConversionError> {
        let Some((key, value)) = self.rest.next() else { return Ok(None) };
        self.taken = (key.clone(), Some(value));
        seed.deserialize(Source::from(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ConversionError> {
        let (key, value) = &mut self.taken;
        let value = value.take().ok_or_else(|| serde::de::Error::custom("a value without its key"))?;
        seed.deserialize(Source::from(value)).map_err(|error| {
            let key = key.as_bytes().map_or_else(|| key.type_name().to_owned(), |key| shown(key).to_string());
            error.within(&key)
        })
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Clone, PartialEq, Deserialize)]
    struct Boat {
        name: String,
        crew: u8,
        kind: Kind,
        ready: bool,
        draught: Option<f64>,
        #[serde(default)]
        ports: Vec<Port>,
    }

    #[derive(Debug, Clone, PartialEq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Sloop,
        Ketch,
    }

    #[derive(Debug, Clone, PartialEq, Deserialize)]
    struct Port(String);

    fn fields() -> Vec<(Value, Value)> {
        vec![
            ("name".into(), "Tern".into()),
            ("crew".into(), "3".into()),
            ("kind".into(), "ketch".into()),
            ("unknown".into(), Value::Array(vec![1.into()])),
            ("ready".into(), "1".into()),
        ]
    }

    #[test]
    fn a_struct_is_read_from_both_protocols() {
        let expected =
            Boat { name: "Tern".into(), crew: 3, kind: Kind::Ketch, ready: true, draught: None, ports: vec![] };
        let flat = fields().into_iter().flat_map(|(key, value)| [key, value]).collect();
        for form in [Value::Map(fields()), Value::Array(flat)] {
            assert_eq!(Serde::<Boat>::from_value(form), Ok(Serde(expected.clone())));
        }
        let mut more = fields();
        more.push(("draught".into(), Value::Double(1.5)));
        more.push(("ports".into(), Value::Array(vec!["Hull".into()])));
        let Serde(boat) = Serde::<Boat>::from_value(Value::Map(more)).expect("a boat");
        assert_eq!((boat.draught, boat.ports), (Some(1.5), vec![Port("Hull".into())]));
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let mut bad = fields();
        bad[1].1 = "many".into();
        let error = Serde::<Boat>::from_value(Value::Map(bad)).expect_err("not a number");
        assert_eq!((error.expected, &*error.found), ("an integer that fits u8", "bulk string \"many\""));
        assert!(error.to_string().contains("but bulk string \"many\" at crew: "), "{error}");
        let error = Serde::<Boat>::from_value(Value::Map(vec![])).expect_err("no name");
        assert!(error.found.contains("missing field `name`"), "{error}");
        assert!(Serde::<Boat>::from_value(Value::Null).is_err());
        assert!(Serde::<Vec<i64>>::from_value(Value::SimpleError("ERR".into())).is_err());
    }

    #[test]
    fn maps_options_and_tuples() {
        let flat = Value::Array(vec!["a".into(), "1".into()]);
        assert_eq!(
            Serde::<BTreeMap<String, i32>>::from_value(flat.clone()),
            Ok(Serde(BTreeMap::from([("a".into(), 1)])))
        );
        assert_eq!(Serde::<(String, i32)>::from_value(flat.clone()), Ok(Serde(("a".into(), 1))));
        assert!(Serde::<(String,)>::from_value(flat).is_err());
        assert_eq!(Serde::<Option<i32>>::from_value(Value::Null), Ok(Serde(None)));
        assert_eq!(Serde::<Option<i32>>::from_value(7.into()), Ok(Serde(Some(7))));
    }
}
