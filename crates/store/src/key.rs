//! Index keys: bytes that sort as the values do.
//!
//! A key is a type tag and order-preserving bytes, so one ordered map of byte strings serves equality, ranges and sorts, over one
//! field or several. Each part is self-delimiting, so a prefix of the parts is a prefix of the bytes.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::Value;

/// What an ordered index is sorted by.
///
/// Maps with structural sharing clone their keys a node at a time, so short keys are in place and long ones are shared.
#[derive(Clone)]
pub struct IndexKey(KeyBytes);

#[derive(Clone)]
enum KeyBytes {
    Inline(u8, [u8; INLINE_BYTES]),
    Shared(Arc<[u8]>),
}

/// So many bytes make a key as large as one that is shared.
const INLINE_BYTES: usize = 22;

const BOOL: u8 = 1;
const NUMBER: u8 = 2;
const STRING: u8 = 3;
/// Arrays and objects, which are all alike: they come after what has an order, and equal nothing.
const OTHER: u8 = 4;
/// After all values: absent ones and null, which come last in both directions.
const NULL: u8 = 0xff;

impl IndexKey {
    /// The memory it takes.
    pub(crate) fn memory(&self) -> usize {
        match &self.0 {
            KeyBytes::Inline(..) => size_of::<Self>(),
            KeyBytes::Shared(bytes) => size_of::<Self>() + bytes.len(),
        }
    }

    /// A key without parts, which sorts before all others.
    pub fn new() -> Self {
        Self(KeyBytes::Inline(0, [0; INLINE_BYTES]))
    }

    /// Appends a part. Arrays and objects have one place, since they have no order; null and absent values have another.
    pub fn push(&mut self, value: Option<&Value<'_>>) {
        match value {
            Some(Value::Bool(flag)) => self.extend(&[BOOL, u8::from(*flag)]),
            Some(Value::Number(number)) => {
                let mut part = [NUMBER; 9];
                part[1..].copy_from_slice(&ordered(*number).to_be_bytes());
                self.extend(&part);
            }
            Some(Value::String(text)) => self.push_text(text, &[0, 0]),
            Some(Value::Array(_) | Value::Object(_)) => self.extend(&[OTHER]),
            None | Some(Value::Null) => self.extend(&[NULL]),
        }
    }

    /// Appends a string that may go on: all strings that begin with it have it as a prefix.
    pub(crate) fn push_prefix(&mut self, text: &str) {
        self.push_text(text, &[]);
    }

    fn push_text(&mut self, text: &str, end: &[u8]) {
        let mut part = Vec::with_capacity(1 + text.len() + end.len());
        part.push(STRING);
        // A zero within is told from the end by what follows it.
        for byte in text.bytes() {
            part.push(byte);
            if byte == 0 {
                part.push(0xff);
            }
        }
        part.extend(end);
        self.extend(&part);
    }

    fn extend(&mut self, more: &[u8]) {
        if let KeyBytes::Inline(len, bytes) = &mut self.0
            && let Some(room) = bytes.get_mut(usize::from(*len)..).and_then(|rest| rest.get_mut(..more.len()))
        {
            room.copy_from_slice(more);
            // Both together are within the room.
            *len = len.wrapping_add(more.len().to_le_bytes()[0]);
            return;
        }
        self.0 = KeyBytes::Shared([self.as_bytes(), more].concat().into());
    }

    /// The keys with this one's parts and then those of another.
    pub(crate) fn join(&self, other: &Self) -> Self {
        let mut key = self.clone();
        key.extend(other.as_bytes());
        key
    }

    /// Between which keys all values lie that an order test can compare with this one: those of its type.
    pub(crate) fn type_range(value: &Value<'_>) -> Option<(Self, Self)> {
        let tag = match value {
            Value::Number(_) => NUMBER,
            Value::String(_) => STRING,
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
        };
        Some((Self::of_bytes(&[tag]), Self::of_bytes(&[tag + 1])))
    }

    /// Whether it is of nothing, and nothing else.
    pub(crate) fn is_null(&self) -> bool {
        self.as_bytes() == [NULL]
    }

    /// The first parts of it: those that another one has, and so many more.
    pub(crate) fn prefix_parts(&self, before: &Self, count: usize) -> Self {
        let bytes = self.as_bytes();
        let mut end = before.as_bytes().len();
        for _ in 0..count {
            end += bytes.get(end..).map_or(0, part_len);
        }
        Self::of_bytes(bytes.get(..end).unwrap_or(bytes))
    }

    /// The key of one value.
    pub fn of(value: Option<&Value<'_>>) -> Self {
        let mut key = Self::new();
        key.push(value);
        key
    }

    /// The least key that does not begin with this one.
    pub fn after_prefix(&self) -> Option<Self> {
        let mut bytes = self.as_bytes().to_vec();
        while let Some(last) = bytes.pop() {
            if let Some(next) = last.checked_add(1) {
                bytes.push(next);
                return Some(Self::of_bytes(&bytes));
            }
        }
        None
    }

    /// The key that has these bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let mut key = Self::new();
        key.extend(bytes);
        key
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            KeyBytes::Inline(len, bytes) => &bytes[..usize::from(*len)],
            KeyBytes::Shared(bytes) => bytes,
        }
    }
}

impl Default for IndexKey {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for IndexKey {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for IndexKey {}

impl PartialOrd for IndexKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for IndexKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for IndexKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Debug for IndexKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IndexKey({})", self.as_bytes().escape_ascii())
    }
}

/// How many bytes the first part takes.
fn part_len(bytes: &[u8]) -> usize {
    match bytes.first() {
        Some(&BOOL) => 2,
        Some(&NUMBER) => 9,
        Some(&STRING) => bytes.windows(2).position(|pair| pair == [0, 0]).map_or(bytes.len(), |end| end + 2),
        Some(_) => 1,
        None => 0,
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

    #[test]
    fn what_has_no_order_comes_after_what_has_one_and_before_nothing() {
        let array = IndexKey::of(Some(&Value::Array("[1]")));
        assert_eq!(array, IndexKey::of(Some(&Value::Object("{}"))));
        assert!(IndexKey::of(Some(&Value::String("\u{10ffff}".into()))) < array);
        assert!(array < IndexKey::of(Some(&Value::Null)));
        assert_eq!(IndexKey::of(Some(&Value::Null)), IndexKey::of(None));
    }

    fn scalar() -> impl Strategy<Value = Value<'static>> {
        prop_oneof![
            any::<bool>().prop_map(Value::Bool),
            any::<f64>().prop_filter("a number", |number| !number.is_nan()).prop_map(Value::Number),
            (-3..4_i32).prop_map(|number| Value::Number(f64::from(number))),
            "[\0\u{1}a-c\u{ff}]{0,4}|a{19,24}".prop_map(|text| Value::String(Cow::Owned(text))),
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
        fn strings_that_begin_alike_are_together(text in "[\0a\u{ff}]{0,4}", beginning in "[\0a\u{ff}]{0,2}") {
            let mut from = IndexKey::new();
            from.push_prefix(&beginning);
            let key = IndexKey::of(Some(&Value::String(Cow::Borrowed(&text))));
            let is_within = from <= key && from.after_prefix().is_none_or(|after| key < after);
            prop_assert_eq!(is_within, text.starts_with(&beginning));
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
            prop_assert_eq!(&key(&one).prefix_parts(&IndexKey::new(), 1), &prefix);
            prop_assert_eq!(key(&one).prefix_parts(&prefix, 1), key(&one));
            let is_within = prefix <= key(&two) && prefix.after_prefix().is_none_or(|after| key(&two) < after);
            prop_assert_eq!(is_within, one.0.strictly_equals(&two.0));
        }
    }
}
