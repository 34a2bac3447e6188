//! Binary encodings of values, for hashing and sorting.

use tidewire_store::Value;

/// Returns bits that sort like the number. Both zeros have the same bits.
pub(crate) fn ordered_bits(number: f64) -> u64 {
    let bits = if number == 0.0 { 0 } else { number.to_bits() };
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

/// Returns the number with these [`ordered_bits`].
pub(crate) fn from_ordered_bits(ordered: u64) -> f64 {
    f64::from_bits(if ordered >> 63 == 1 { ordered & !(1 << 63) } else { !ordered })
}

/// A hashable key of a scalar. Keys are equal if the values are equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ScalarKey(Box<[u8]>);

impl ScalarKey {
    /// Returns the key of a value, or `None` for an array or object, which equals no value.
    pub(crate) fn of(value: &Value<'_>) -> Option<Self> {
        let mut bytes = Vec::new();
        Self::write(value, &mut bytes).then(|| Self(bytes.into()))
    }

    /// Overwrites `bytes` with the key of a value, for lookups without an allocation. Returns false for an array or object.
    pub(crate) fn write(value: &Value<'_>, bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        match value {
            Value::Null => bytes.push(0),
            Value::Bool(flag) => bytes.extend([1, u8::from(*flag)]),
            Value::Number(number) => {
                bytes.push(2);
                bytes.extend(ordered_bits(*number).to_be_bytes());
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

impl std::borrow::Borrow<[u8]> for ScalarKey {
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
        fn ordered_bits_sort_like_numbers(one in any::<f64>(), two in any::<f64>()) {
            prop_assume!(!one.is_nan() && !two.is_nan());
            prop_assert_eq!(ordered_bits(one).cmp(&ordered_bits(two)), one.partial_cmp(&two).unwrap());
            prop_assert_eq!(from_ordered_bits(ordered_bits(one)).partial_cmp(&one), Some(std::cmp::Ordering::Equal));
        }
    }
}
