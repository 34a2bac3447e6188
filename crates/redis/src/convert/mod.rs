//! Conversion of replies to types. Replies in RESP2 and in RESP3 convert to the same values.

mod collection;
mod deserialize;
mod scalar;
mod tuple;

use crate::error::{ConversionError, ServerError};
use crate::resp::Value;

pub use deserialize::Serde;

/// What a reply can become.
///
/// | type | from |
/// |---|---|
/// | `()` | `OK` |
/// | `bool` | a boolean; 0 or 1; `OK` is true and null is false, as `SET` with `NX` answers |
/// | integers | an integer, a boolean, a double without a fraction, digits in a string; it must fit |
/// | `f32`, `f64` | a double, an integer, a boolean, a number in a string |
/// | `String`, `Vec<u8>`, [`Bytes`](bytes::Bytes) | a string, a number, a boolean as 0 or 1; `Bytes` copies nothing |
/// | `Option<T>` | null is `None` |
/// | `Vec<T>`, sets, `[T; N]` | an array or set; a map is an array of pairs |
/// | maps, `Vec<(K, V)>` | a map, an array of pairs, an array of keys and values in turn |
/// | tuples of up to eight | an array of this length |
/// | `Result<T, ServerError>` | an error, or what `T` takes |
/// | [`Serde<T>`] | whatever can be deserialized to `T` |
/// | [`Ignore`], [`Value`] | anything |
///
/// An error is none of these: it is [`Error::Server`](crate::Error::Server), and a [`ConversionError`] where it stands within
/// a reply. Attributes are skipped.
pub trait FromValue: Sized {
    /// Whether an error is a value of this type.
    const TAKES_ERRORS: bool = false;

    /// Converts one value.
    fn from_value(value: Value) -> Result<Self, ConversionError>;

    /// Converts a value to several of this type. Two types have their own way: bytes come as a string, and pairs may come flat.
    fn vec_from_value(value: Value) -> Result<Vec<Self>, ConversionError> {
        match value.into_bare() {
            Value::Array(elements) | Value::Set(elements) => elements.into_iter().map(Self::from_value).collect(),
            Value::Map(pairs) => {
                pairs.into_iter().map(|(key, value)| Self::from_value(Value::Array(vec![key, value]))).collect()
            }
            other => Err(ConversionError::new("an array", &other)),
        }
    }
}

/// Anything but an error, and nothing of it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ignore;

impl FromValue for Ignore {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        if value.as_error().is_some() { Err(ConversionError::new("anything but an error", &value)) } else { Ok(Self) }
    }
}

impl FromValue for Value {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        Ok(value)
    }
}

impl<T: FromValue> FromValue for Option<T> {
    const TAKES_ERRORS: bool = T::TAKES_ERRORS;

    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value.bare() {
            Value::Null => Ok(None),
            _ => T::from_value(value).map(Some),
        }
    }
}

impl<T: FromValue> FromValue for Result<T, ServerError> {
    const TAKES_ERRORS: bool = true;

    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value.as_error() {
            Some(text) => Ok(Err(ServerError::parse(text))),
            None => T::from_value(value).map(Ok),
        }
    }
}

impl<T: FromValue> FromValue for Box<T> {
    const TAKES_ERRORS: bool = T::TAKES_ERRORS;

    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::from_value(value).map(Self::new)
    }
}
