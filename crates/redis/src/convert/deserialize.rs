//! Conversion of replies through serde.

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

/// A reply deserialized with serde, such as a struct from a hash. The values of a hash are strings, from which numbers are parsed.
///
/// ```
/// use serde::Deserialize;
/// use tidewire_redis::{FromValue, Serde, Value};
///
/// #[derive(Debug, PartialEq, Deserialize)]
/// struct Boat {
///     name: String,
///     width: f32,
///     port: Option<String>,
/// }
///
/// let fields = || Value::Map(vec![("name".into(), "Tern".into()), ("width".into(), "1.2".into())]);
/// let Serde(boat) = Serde::<Boat>::from_value(fields())?;
/// assert_eq!(boat, Boat { name: "Tern".into(), width: 1.2, port: None });
///
/// // The reply to XRANGE: an array of IDs with fields.
/// let entries = Value::Array(vec![Value::Array(vec!["1-0".into(), fields()])]);
/// let Serde(entries) = Serde::<Vec<(String, Boat)>>::from_value(entries)?;
/// assert_eq!((&*entries[0].0, &*entries[0].1.name), ("1-0", "Tern"));
///
/// let wrong = Value::Map(vec![("name".into(), "Tern".into()), ("width".into(), "deep".into())]);
/// let error = Serde::<Boat>::from_value(wrong).unwrap_err();
/// assert_eq!(error.path(), Some("width"));
/// # Ok::<(), tidewire_redis::ConversionError>(())
/// ```
///
/// - Unknown fields are skipped, and an `Option` may be missing.
/// - `HGETALL` of a key that does not exist replies with no fields. An empty reply is `None` for an `Option` as a whole:
///   `Serde<Option<Boat>>`.
/// - Enums are read from the name of a variant without fields, booleans from 0 and 1, and `Vec<u8>` from a string.
/// - Flattened fields and untagged enums are read without knowing their type, so numbers of a hash are strings there.
///
/// [`Fields`](crate::Fields) is the counterpart for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Serde<T>(pub T);

impl<T: DeserializeOwned> FromValue for Serde<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::deserialize(Source { value, is_whole: true }).map(Self)
    }
}

/// An error of serde, which has a message in place of the value.
impl serde::de::Error for ConversionError {
    fn custom<T: Display>(message: T) -> Self {
        Self::with_text("a value that the type accepts", message.to_string())
    }
}

struct Source {
    value: Value,
    /// Whether this is the whole reply and not an element of it.
    is_whole: bool,
}

impl From<Value> for Source {
    fn from(value: Value) -> Self {
        Self { value, is_whole: false }
    }
}

impl Source {
    /// Whether the value is `None`.
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

    /// Also from a string, because serde deserializes `Vec<u8>` as a sequence.
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

    /// Also from a flat array, because RESP2 has no maps.
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

/// The elements of an array. Errors have the index.
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
            _ => Err(ConversionError::with_text("an array of the requested length", format!("array of {len}"))),
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

/// The pairs of a map. Errors have the key.
struct Entries {
    rest: vec::IntoIter<(Value, Value)>,
    /// The current key, and its value until it is taken.
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
        width: Option<f64>,
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
    fn structs_are_deserialized_from_both_protocols() {
        let expected =
            Boat { name: "Tern".into(), crew: 3, kind: Kind::Ketch, ready: true, width: None, ports: vec![] };
        let flat = fields().into_iter().flat_map(|(key, value)| [key, value]).collect();
        for form in [Value::Map(fields()), Value::Array(flat)] {
            assert_eq!(Serde::<Boat>::from_value(form), Ok(Serde(expected.clone())));
        }
        let mut more = fields();
        more.push(("width".into(), Value::Double(1.5)));
        more.push(("ports".into(), Value::Array(vec!["Hull".into()])));
        let Serde(boat) = Serde::<Boat>::from_value(Value::Map(more)).expect("a boat");
        assert_eq!((boat.width, boat.ports), (Some(1.5), vec![Port("Hull".into())]));
    }

    #[test]
    fn errors_have_the_path_and_the_type() {
        let mut bad = fields();
        bad[1].1 = "many".into();
        let error = Serde::<Boat>::from_value(Value::Map(bad)).expect_err("not a number");
        assert_eq!((error.expected, &*error.found), ("an integer that fits u8", "bulk string \"many\""));
        assert!(error.to_string().contains("got bulk string \"many\" at crew; "), "{error}");
        let error = Serde::<Boat>::from_value(Value::Map(vec![])).expect_err("no name");
        assert!(error.found.contains("missing field `name`"), "{error}");
        assert!(Serde::<Boat>::from_value(Value::Null).is_err());
        assert!(Serde::<Vec<i64>>::from_value(Value::SimpleError("ERR".into())).is_err());
    }

    #[test]
    fn maps_options_and_tuples_are_deserialized() {
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
