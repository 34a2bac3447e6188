//! Index keys: bytes that sort as the values do.
//!
//! A type tag and order-preserving bytes, so that one ordered map of byte strings serves equality, ranges and sorts, of one
//! field or of several. Each part ends by itself, so that a prefix of the parts is a prefix of the bytes.

use crate::Value;

/// What an ordered index is sorted by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct IndexKey(Vec<u8>);

const BOOL: u8 = 1;
const NUMBER: u8 = 2;
const STRING: u8 = 3;
/// After all values: absent ones and null come last in both directions, and are found by neither equality nor ranges.
const NOTHING: u8 = 0xff;

impl IndexKey {
    /// A key without parts, which sorts before all others.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a part. Arrays and objects have no order and are never equal: to an index they are nothing.
    pub fn push(&mut self, value: Option<&Value<'_>>) {
        match value {
            Some(Value::Bool(flag)) => self.0.extend([BOOL, u8::from(*flag)]),
            Some(Value::Number(number)) => {
                self.0.push(NUMBER);
                self.0.extend(ordered(*number).to_be_bytes());
            }
            Some(Value::String(text)) => {
                self.0.push(STRING);
                // A zero within is told from the end by what follows it.
                for byte in text.bytes() {
                    self.0.push(byte);
                    if byte == 0 {
                        self.0.push(0xff);
                    }
                }
                self.0.extend([0, 0]);
            }
            None | Some(Value::Null | Value::Array(_) | Value::Object(_)) => self.0.push(NOTHING),
        }
    }

    /// The key of one value.
    pub fn of(value: Option<&Value<'_>>) -> Self {
        let mut key = Self::new();
        key.push(value);
        key
    }

    /// The least key that does not begin with this one.
    pub fn after_prefix(&self) -> Option<Self> {
        let mut bytes = self.0.clone();
        while let Some(last) = bytes.pop() {
            if let Some(next) = last.checked_add(1) {
                bytes.push(next);
                return Some(Self(bytes));
            }
        }
        None
    }

    /// The key that has these bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Bits that sort as the numbers do. Both zeros are one.
fn ordered(number: f64) -> u64 {
    let bits = if number == 0.0 { 0 } else { number.to_bits() };
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;

    fn scalar() -> impl Strategy<Value = Value<'static>> {
        prop_oneof![
            any::<bool>().prop_map(Value::Bool),
            any::<f64>().prop_filter("a number", |number| !number.is_nan()).prop_map(Value::Number),
            (-3..4_i32).prop_map(|number| Value::Number(f64::from(number))),
            "[\0\u{1}a-c\u{ff}]{0,4}".prop_map(|text| Value::String(Cow::Owned(text))),
        ]
    }

    proptest! {
        #[test]
        fn keys_sort_as_values_do(one in scalar(), two in scalar()) {
            let (first, second) = (IndexKey::of(Some(&one)), IndexKey::of(Some(&two)));
            prop_assert_eq!(first.cmp(&second), one.sort_order(&two));
            prop_assert_eq!(first == second, one.strictly_equals(&two));
            prop_assert!(first < IndexKey::of(None));
        }

        #[test]
        fn parts_sort_one_after_the_other(one in (scalar(), scalar()), two in (scalar(), scalar())) {
            let key = |(first, second): &(Value<'_>, Value<'_>)| {
                let mut key = IndexKey::of(Some(first));
                key.push(Some(second));
                key
            };
            let expected = one.0.sort_order(&two.0).then(one.1.sort_order(&two.1));
            prop_assert_eq!(key(&one).cmp(&key(&two)), expected);
            // All keys that begin with a part lie between it and what comes after it.
            let prefix = IndexKey::of(Some(&one.0));
            prop_assert!(prefix <= key(&one) && prefix.after_prefix().is_none_or(|after| key(&one) < after));
            let is_within = prefix <= key(&two) && prefix.after_prefix().is_none_or(|after| key(&two) < after);
            prop_assert_eq!(is_within, one.0.strictly_equals(&two.0));
        }
    }
}
