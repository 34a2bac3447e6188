//! Conversion of replies to types. Replies of RESP2 and RESP3 convert to the same values.

mod collection;
mod deserialize;
mod scalar;
mod tuple;

use crate::error::{ConversionError, ServerError};
use crate::resp::Value;

pub use deserialize::Serde;

/// A type that replies convert to.
///
/// | type | converts from |
/// |---|---|
/// | `()` | `OK` |
/// | `bool` | a boolean; 0 or 1; `OK` is true and null is false, as in the reply to `SET` with `NX` |
/// | integers | an integer, a boolean, a double without a fraction, digits in a string; the number must fit the type |
/// | `f32`, `f64` | a double, an integer, a boolean, a number in a string |
/// | `String`, `Vec<u8>`, [`Bytes`](bytes::Bytes) | a string, a number, a boolean as 0 or 1; `Bytes` does not copy |
/// | `Option<T>` | null is `None` |
/// | `Vec<T>`, sets, `[T; N]` | an array or set; a map is an array of pairs |
/// | maps, `Vec<(K, V)>` | a map, an array of pairs, an array of alternating keys and values |
/// | tuples of up to eight | an array of this length |
/// | `Result<T, ServerError>` | an error, or what `T` converts from |
/// | [`Serde<T>`] | what serde can deserialize to `T` |
/// | [`Ignore`], [`Value`] | anything |
///
/// An error reply is [`Error::Server`](crate::Error::Server), and an error inside a reply is a [`ConversionError`], unless the type
/// is a `Result`. Attributes are skipped.
pub trait FromValue: Sized {
    /// Whether an error reply converts to this type.
    const TAKES_ERRORS: bool = false;

    /// Converts a value.
    fn from_value(value: Value) -> Result<Self, ConversionError>;

    /// Converts a value to a `Vec` of this type. `u8` overrides it, because bytes are a string, and so do pairs, which may be a flat
    /// array.
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

/// Discards any reply that is not an error.
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
