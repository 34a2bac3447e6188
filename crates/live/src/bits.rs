//! Values as bits that can be hashed and sorted.

use tidewire_store::Value;

/// Bits that sort as the numbers do. Both zeros are one.
pub(crate) fn ordered(number: f64) -> u64 {
    let bits = if number == 0.0 { 0 } else { number.to_bits() };
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

/// The number of such bits.
pub(crate) fn number(ordered: u64) -> f64 {
    f64::from_bits(if ordered >> 63 == 1 { ordered & !(1 << 63) } else { !ordered })
}

/// What a scalar is known by: equal keys are equal values, null included.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key(Box<[u8]>);

impl Key {
    /// The key of a value; none if it is an array or object, which equal nothing.
    pub(crate) fn of(value: &Value<'_>) -> Option<Self> {
        let mut bytes = Vec::new();
        Self::write(value, &mut bytes).then(|| Self(bytes.into()))
    }

    /// Writes the bytes of a key in place of what is there, so that one can be looked for without being made.
    pub(crate) fn write(value: &Value<'_>, bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        match value {
            Value::Null => bytes.push(0),
            Value::Bool(flag) => bytes.extend([1, u8::from(*flag)]),
            Value::Number(number) => {
                bytes.push(2);
                bytes.extend(ordered(*number).to_be_bytes());
            }
            Value::String(text) => {
                bytes.push(3);
                bytes.extend(text.as_bytes());
            }
            Value::Array(_) | Value::Object(_) => return false,
        }
        true
    }
}

impl std::borrow::Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_sort_as_numbers_do(one in any::<f64>(), two in any::<f64>()) {
            prop_assume!(!one.is_nan() && !two.is_nan());
            prop_assert_eq!(ordered(one).cmp(&ordered(two)), one.partial_cmp(&two).unwrap());
            prop_assert_eq!(number(ordered(one)).partial_cmp(&one), Some(std::cmp::Ordering::Equal));
        }
    }
}
