//! Types of users, through serde.

use std::fmt::Display;

use bytes::Bytes;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::FromValue;
use super::collection::Pairs;
use crate::error::ConversionError;
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
/// }
///
/// let reply = Value::Map(vec![("name".into(), "Tern".into()), ("draught".into(), "1.2".into())]);
/// let Serde(boat) = Serde::<Boat>::from_value(reply)?;
/// assert_eq!(boat, Boat { name: "Tern".into(), draught: 1.2 });
/// # Ok::<(), tidewire_redis::ConversionError>(())
/// ```
///
/// Enums are read from the name of a variant that has no fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Serde<T>(pub T);

impl<T: DeserializeOwned> FromValue for Serde<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::deserialize(Source(value)).map(Self)
    }
}

/// What serde says about a type, which has no value to show.
impl serde::de::Error for ConversionError {
    fn custom<T: Display>(message: T) -> Self {
        Self { expected: "what the type takes", found: message.to_string().into() }
    }
}

struct Source(Value);

impl IntoDeserializer<'_, ConversionError> for Source {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
            visitor.$visit(<$type>::from_value(self.0)?)
        }
    )*};
}

impl<'de> Deserializer<'de> for Source {
    type Error = ConversionError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        match self.0.into_bare() {
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
            Value::Array(items) | Value::Set(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(Source));
                let visited = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(visited)
            }
            Value::Map(pairs) => visit_pairs(pairs, visitor),
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
        visitor.visit_bytes(&Bytes::from_value(self.0)?)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_byte_buf(Bytes::from_value(self.0)?.into())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        if *self.0.bare() == Value::Null { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ConversionError> {
        visitor.visit_newtype_struct(self)
    }

    /// Also from a flat array, as RESP2 has no maps.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        let mut all = Vec::new();
        Pairs::new(self.0)?.each(|key, value| {
            all.push((key, value));
            Ok(())
        })?;
        visit_pairs(all, visitor)
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
        visitor.visit_enum(String::from_value(self.0)?.into_deserializer())
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConversionError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! { unit unit_struct seq tuple tuple_struct identifier }
}

fn visit_pairs<'de, V: Visitor<'de>>(pairs: Vec<(Value, Value)>, visitor: V) -> Result<V::Value, ConversionError> {
    let mut pairs = MapDeserializer::new(pairs.into_iter().map(|(key, value)| (Source(key), Source(value))));
    let visited = visitor.visit_map(&mut pairs)?;
    pairs.end()?;
    Ok(visited)
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
