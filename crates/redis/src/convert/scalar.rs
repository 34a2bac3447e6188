//! Numbers and strings.

use std::sync::Arc;

use bytes::Bytes;

use super::FromValue;
use crate::command::ToArgument;
use crate::error::ConversionError;
use crate::resp::Value;

impl FromValue for () {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value.as_bytes() {
            Some(text) if text == "OK" => Ok(()),
            _ => Err(ConversionError::new("OK", &value)),
        }
    }
}

impl FromValue for bool {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value.bare() {
            Value::Boolean(value) => return Ok(*value),
            Value::Integer(1) => return Ok(true),
            Value::Integer(0) | Value::Null => return Ok(false),
            _ => {}
        }
        match value.as_bytes().map(|text| &text[..]) {
            Some(b"OK" | b"1") => Ok(true),
            Some(b"0") => Ok(false),
            _ => Err(ConversionError::new("a boolean", &value)),
        }
    }
}

macro_rules! integers {
    ($($type:ident $({ $($more:tt)* })?),* $(,)?) => {$(
        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self, ConversionError> {
                let found = match value.bare() {
                    Value::Integer(integer) => Self::try_from(*integer).ok(),
                    Value::Boolean(value) => Some(Self::from(*value)),
                    Value::Double(double) => whole(*double).and_then(|integer| Self::try_from(integer).ok()),
                    _ => digits(&value).and_then(|text| text.parse().ok()),
                };
                found.ok_or_else(|| ConversionError::new(concat!("an integer that fits ", stringify!($type)), &value))
            }

            $($($more)*)?
        }
    )*};
}

integers! {
    i8,
    i16,
    i32,
    i64,
    i128,
    isize,
    u8 {
        /// From a string, not from an array of numbers.
        fn vec_from_value(value: Value) -> Result<Vec<Self>, ConversionError> {
            Bytes::from_value(value).map(Vec::from)
        }
    },
    u16,
    u32,
    u64,
    u128,
    usize,
}

impl FromValue for f64 {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let found = match value.bare() {
            Value::Double(double) => Some(*double),
            #[expect(clippy::cast_precision_loss, reason = "the same as in the text of a double")]
            Value::Integer(integer) => Some(*integer as f64),
            Value::Boolean(value) => Some(f64::from(u8::from(*value))),
            _ => digits(&value).and_then(|text| text.parse().ok()),
        };
        found.ok_or_else(|| ConversionError::new("a number", &value))
    }
}

/// The nearest `f32`. A finite number that is too large is an error.
impl FromValue for f32 {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let double = f64::from_value(value)?;
        #[expect(clippy::cast_possible_truncation, reason = "the caller has requested 32 bits")]
        let float = double as Self;
        if float.is_infinite() && double.is_finite() {
            return Err(ConversionError::new("a number that fits f32", &Value::Double(double)));
        }
        Ok(float)
    }
}

impl FromValue for Bytes {
    #[inline]
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value {
            Value::Bulk(bytes) => Ok(bytes),
            other => bytes_of(other),
        }
    }
}

/// Returns the bytes of a string or number.
fn bytes_of(value: Value) -> Result<Bytes, ConversionError> {
    match value.into_bare() {
        Value::Simple(bytes) | Value::Bulk(bytes) | Value::Verbatim(_, bytes) | Value::BigNumber(bytes) => Ok(bytes),
        Value::Integer(integer) => Ok(integer.with_bytes(Bytes::copy_from_slice)),
        Value::Double(double) => Ok(double.with_bytes(Bytes::copy_from_slice)),
        Value::Boolean(value) => Ok(Bytes::from_static(if value { b"1" } else { b"0" })),
        other => Err(ConversionError::new("a string", &other)),
    }
}

impl FromValue for String {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let bytes = Bytes::from_value(value)?;
        match str::from_utf8(&bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(ConversionError::new("a string in UTF-8", &Value::Bulk(bytes))),
        }
    }
}

macro_rules! texts {
    ($($type:ty),*) => {$(
        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self, ConversionError> {
                String::from_value(value).map(Self::from)
            }
        }
    )*};
}

texts! { Box<str>, Arc<str> }

/// Returns the integer of a double without a fraction. From 1e17 on, RESP2 has an exponent, which is not an integer.
fn whole(double: f64) -> Option<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "it has no fraction and fits")]
    (double.fract() == 0.0 && double.abs() < 1e17).then_some(double as i64)
}

/// Returns the text of a value that may be a number.
fn digits(value: &Value) -> Option<&str> {
    let bytes = match value.bare() {
        Value::BigNumber(digits) => digits,
        other => other.as_bytes()?,
    };
    str::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;
    use crate::resp::Attributed;

    fn all_are<T: FromValue + PartialEq + Debug>(expected: &T, values: impl IntoIterator<Item = Value>) {
        for value in values {
            let shown = format!("{value:?}");
            assert_eq!(T::from_value(value).as_ref(), Ok(expected), "{shown}");
        }
    }

    fn none_is<T: FromValue + Debug>(values: impl IntoIterator<Item = Value>) {
        for value in values {
            let shown = format!("{value:?}");
            assert!(T::from_value(value).is_err(), "{shown}");
        }
    }

    #[test]
    fn numbers_convert_from_all_forms() {
        let attributed = Value::Attributed(Box::new(Attributed { attributes: vec![], value: Value::from(5) }));
        all_are(
            &5_u8,
            [Value::from(5), "5".into(), Value::Simple("5".into()), Value::BigNumber("5".into()), attributed],
        );
        all_are(&1_i64, [Value::Boolean(true), "1".into()]);
        none_is::<u8>([256.into(), (-1).into(), "".into(), "5 ".into(), Value::Null, Value::Double(256.0)]);
        all_are(&-3_i128, [Value::Double(-3.0), "-3".into(), Value::BigNumber("-3".into())]);
        none_is::<i64>([1.5, 1e17, -1e17, f64::INFINITY, f64::NAN].map(Value::Double));
        all_are(&f64::INFINITY, [Value::Double(f64::INFINITY), "inf".into()]);
        all_are(&-2.0, [Value::Double(-2.0), (-2).into(), "-2".into(), "-2.0".into(), "-2e0".into()]);
        all_are(&1.0, [Value::Boolean(true), 1.into()]);
        none_is::<f64>([Value::Null, "a".into()]);
        all_are(&0.1_f32, [Value::Double(0.1), "0.1".into()]);
        all_are(&f32::INFINITY, [Value::Double(f64::INFINITY), "inf".into()]);
        none_is::<f32>([Value::Double(1e300), "-1e300".into()]);
    }

    #[test]
    fn booleans_and_ok_convert() {
        all_are(&true, [Value::Boolean(true), 1.into(), Value::Simple("OK".into()), "1".into()]);
        all_are(&false, [Value::Boolean(false), 0.into(), Value::Null, "0".into()]);
        none_is::<bool>([2.into(), "yes".into(), Value::Array(vec![])]);
        all_are(&(), [Value::Simple("OK".into())]);
        none_is::<()>([1.into(), Value::Null, "PONG".into()]);
    }

    #[test]
    fn strings_are_not_copied() {
        let bytes = Bytes::from(vec![b'a'; 100]);
        let converted = Bytes::from_value(Value::Bulk(bytes.clone())).expect("a string");
        assert_eq!(converted.as_ptr(), bytes.as_ptr());
        all_are(&"1.5".to_owned(), [Value::Double(1.5), "1.5".into(), Value::Verbatim(*b"txt", "1.5".into())]);
        all_are(&"1".to_owned(), [Value::Boolean(true), 1.into(), Value::Double(1.0)]);
        none_is::<String>([Value::Null, Value::Bulk(Bytes::from_static(b"\xff"))]);
        none_is::<Bytes>([Value::SimpleError("ERR".into()), Value::Array(vec![])]);
    }

    #[test]
    fn error_has_the_expected_type_and_the_reply() {
        let error = u8::from_value("many".into()).expect_err("no number");
        let expected = "expected an integer that fits u8, got bulk string \"many\"; the command was executed, request another type";
        assert_eq!(error.to_string(), expected);
    }
}
