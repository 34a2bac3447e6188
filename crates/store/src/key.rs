//! Index keys: bytes that sort like the values they encode.
//!
//! A key is a type tag and order-preserving bytes, so one ordered map of byte strings serves equality, ranges and sorts, over one
//! field or several. Each part is self-delimiting, so a prefix of the parts is a prefix of the bytes.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::Value;

/// The key of an entry in an ordered index.
///
/// Persistent maps clone all keys of a node, so short keys are stored inline and long ones are shared.
#[derive(Clone)]
pub struct IndexKey(KeyBytes);

#[derive(Clone)]
enum KeyBytes {
    /// The length, and the bytes padded with zeros.
    Inline(u8, [u8; INLINE_BYTES]),
    Shared(Arc<[u8]>),
}

/// Capacity of an inline key, chosen so that both variants have the same size.
const INLINE_BYTES: usize = 22;

const BOOL: u8 = 1;
const NUMBER: u8 = 2;
const STRING: u8 = 3;
/// Arrays and objects, which have no order among each other and sort after all scalars.
const OTHER: u8 = 4;
/// Null and absent values, which sort last.
const NULL: u8 = 0xff;

impl IndexKey {
    /// Returns the memory of the key in bytes.
    pub(crate) fn memory(&self) -> usize {
        match &self.0 {
            KeyBytes::Inline(..) => size_of::<Self>(),
            KeyBytes::Shared(bytes) => size_of::<Self>() + bytes.len(),
        }
    }

    /// Creates a key without parts, which sorts before all others.
    pub fn new() -> Self {
        Self(KeyBytes::Inline(0, [0; INLINE_BYTES]))
    }

    /// Appends a part. All arrays and objects have the same key, and so have null and absent values.
    pub fn push(&mut self, value: Option<&Value<'_>>) {
        match value {
            Some(Value::Bool(flag)) => self.extend(&[BOOL, u8::from(*flag)]),
            Some(Value::Number(number)) => {
                let mut part = [NUMBER; 9];
                part[1..].copy_from_slice(&sortable_bits(*number).to_be_bytes());
                self.extend(&part);
            }
            Some(Value::String(text)) => self.push_text(text, &[0, 0]),
            Some(Value::Array(_) | Value::Object(_)) => self.extend(&[OTHER]),
            None | Some(Value::Null) => self.extend(&[NULL]),
        }
    }

    /// Appends a string without its terminator, so that the key is a prefix of the keys of all strings that begin with `text`.
    pub(crate) fn push_prefix(&mut self, text: &str) {
        self.push_text(text, &[]);
    }

    fn push_text(&mut self, text: &str, terminator: &[u8]) {
        let mut part = Vec::with_capacity(1 + text.len() + terminator.len());
        part.push(STRING);
        // A zero byte is escaped, to distinguish it from the terminator.
        for byte in text.bytes() {
            part.push(byte);
            if byte == 0 {
                part.push(0xff);
            }
        }
        part.extend(terminator);
        self.extend(&part);
    }

    fn extend(&mut self, more: &[u8]) {
        if let KeyBytes::Inline(len, bytes) = &mut self.0
            && let Some(free) = bytes.get_mut(usize::from(*len)..).and_then(|rest| rest.get_mut(..more.len()))
        {
            free.copy_from_slice(more);
            // The sum is at most `INLINE_BYTES`.
            *len = len.wrapping_add(more.len().to_le_bytes()[0]);
            return;
        }
        self.0 = KeyBytes::Shared([self.as_bytes(), more].concat().into());
    }

    /// Returns a key with the parts of both keys.
    pub(crate) fn join(&self, other: &Self) -> Self {
        let mut key = self.clone();
        key.extend(other.as_bytes());
        key
    }

    /// Returns the range of the keys of all values of the same type. Returns `None` if values of this type cannot be compared.
    pub(crate) fn type_range(value: &Value<'_>) -> Option<(Self, Self)> {
        let tag = match value {
            Value::Number(_) => NUMBER,
            Value::String(_) => STRING,
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
        };
        Some((Self::of_bytes(&[tag]), Self::of_bytes(&[tag + 1])))
    }

    /// Returns whether this is the key of a single null or absent value.
    pub(crate) fn is_null(&self) -> bool {
        self.as_bytes() == [NULL]
    }

    /// Returns a key with the parts of `before`, which must be a prefix of this key, and the next `count` parts.
    pub(crate) fn prefix_parts(&self, before: &Self, count: usize) -> Self {
        let bytes = self.as_bytes();
        let mut end = before.as_bytes().len();
        for _ in 0..count {
            end += bytes.get(end..).map_or(0, part_len);
        }
        Self::of_bytes(bytes.get(..end).unwrap_or(bytes))
    }

    /// Returns the key of one value.
    pub fn of(value: Option<&Value<'_>>) -> Self {
        let mut key = Self::new();
        key.push(value);
        key
    }

    /// Returns the smallest key that is greater than all keys that begin with this one, if there is such a key.
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

    /// Creates a key from its bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let mut key = Self::new();
        key.extend(bytes);
        key
    }

    /// Returns the bytes of the key.
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

/// Returns the length of the first part.
fn part_len(bytes: &[u8]) -> usize {
    match bytes.first() {
        Some(&BOOL) => 2,
        Some(&NUMBER) => 9,
        Some(&STRING) => bytes.windows(2).position(|pair| pair == [0, 0]).map_or(bytes.len(), |end| end + 2),
        Some(_) => 1,
        None => 0,
    }
}

/// Returns bits that sort like the numbers. Both zeros have the same bits.
fn sortable_bits(number: f64) -> u64 {
    let bits = if number == 0.0 { 0 } else { number.to_bits() };
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn arrays_and_objects_sort_between_scalars_and_null() {
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
        fn keys_sort_like_values(one in scalar(), two in scalar()) {
            let (first, second) = (IndexKey::of(Some(&one)), IndexKey::of(Some(&two)));
            prop_assert_eq!(first.cmp(&second), one.sort_order(&two));
            prop_assert_eq!(first == second, one.strictly_equals(&two));
            prop_assert!(first < IndexKey::of(None));
        }

        #[test]
        fn strings_with_a_common_prefix_are_contiguous(text in "[\0a\u{ff}]{0,4}", beginning in "[\0a\u{ff}]{0,2}") {
            let mut from = IndexKey::new();
            from.push_prefix(&beginning);
            let key = IndexKey::of(Some(&Value::String(Cow::Borrowed(&text))));
            let is_within = from <= key && from.after_prefix().is_none_or(|after| key < after);
            prop_assert_eq!(is_within, text.starts_with(&beginning));
        }

        #[test]
        fn compound_keys_sort_part_by_part(one in (scalar(), scalar()), two in (scalar(), scalar())) {
            let key = |(first, second): &(Value<'_>, Value<'_>)| {
                let mut key = IndexKey::of(Some(first));
                key.push(Some(second));
                key
            };
            let expected = one.0.sort_order(&two.0).then(one.1.sort_order(&two.1));
            prop_assert_eq!(key(&one).cmp(&key(&two)), expected);
            // All keys with a prefix are between it and `after_prefix`.
            let prefix = IndexKey::of(Some(&one.0));
            prop_assert!(prefix <= key(&one) && prefix.after_prefix().is_none_or(|after| key(&one) < after));
            prop_assert_eq!(&key(&one).prefix_parts(&IndexKey::new(), 1), &prefix);
            prop_assert_eq!(key(&one).prefix_parts(&prefix, 1), key(&one));
            let is_within = prefix <= key(&two) && prefix.after_prefix().is_none_or(|after| key(&two) < after);
            prop_assert_eq!(is_within, one.0.strictly_equals(&two.0));
        }
    }
}
