//! Tuples, from arrays of their length. Pairs are in `collection`.

use super::FromValue;
use super::collection::exactly;
use crate::error::ConversionError;
use crate::resp::Value;

macro_rules! tuple {
    ($len:literal: $($name:ident $value:ident),*) => {
        impl<$($name: FromValue),*> FromValue for ($($name,)*) {
            fn from_value(value: Value) -> Result<Self, ConversionError> {
                let [$($value),*] = exactly(value, concat!("an array of ", $len))?;
                Ok(($($name::from_value($value)?,)*))
            }
        }
    };
}

tuple! { 1: A a }
tuple! { 3: A a, B b, C c }
tuple! { 4: A a, B b, C c, D d }
tuple! { 5: A a, B b, C c, D d, E e }
tuple! { 6: A a, B b, C c, D d, E e, F f }
tuple! { 7: A a, B b, C c, D d, E e, F f, G g }
tuple! { 8: A a, B b, C c, D d, E e, F f, G g, H h }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuple_is_read_from_an_array_of_its_length() {
        let array = |len: i64| Value::Array((0..len).map(Value::from).collect());
        assert_eq!(<(u8, String, Option<i64>)>::from_value(array(3)), Ok((0, "1".into(), Some(2))));
        assert_eq!(<(u8,)>::from_value(array(1)), Ok((0,)));
        let error = <(u8, u8, u8)>::from_value(array(4)).expect_err("one too many");
        assert_eq!((error.expected, &*error.found), ("an array of 3", "array of 4"));
    }
}
