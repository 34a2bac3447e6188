//! The form in which replies are kept.

use bytes::Bytes;

use crate::Value;
use crate::resp::Attributed;

/// Returns the size of a value in bytes: its strings, and the memory for its elements.
pub(super) fn size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Boolean(_) | Value::Integer(_) | Value::Double(_) => 0,
        Value::BigNumber(bytes)
        | Value::Simple(bytes)
        | Value::Bulk(bytes)
        | Value::Verbatim(_, bytes)
        | Value::SimpleError(bytes)
        | Value::BlobError(bytes) => bytes.len(),
        Value::Array(items) | Value::Set(items) => sum(items, size),
        Value::Map(pairs) => sum(pairs, pair_size),
        Value::Attributed(attributed) => {
            size_of::<Attributed>() + sum(&attributed.attributes, pair_size) + size(&attributed.value)
        }
    }
}

fn pair_size((key, value): &(Value, Value)) -> usize {
    size(key) + size(value)
}

fn sum<T>(items: &[T], size: impl Fn(&T) -> usize) -> usize {
    size_of_val(items) + items.iter().map(size).sum::<usize>()
}

/// Copies a value, with all its strings in one allocation. The strings of a reply are slices of the input, and would keep all of it in
/// memory.
pub(super) fn copy(value: &Value) -> Value {
    if let Value::Bulk(bytes) = value {
        return Value::Bulk(Bytes::copy_from_slice(bytes));
    }
    let mut strings = Vec::new();
    // The result is dropped: this pass collects the strings.
    map(value, &mut |string| {
        strings.extend_from_slice(string);
        Bytes::new()
    });
    let mut rest = Bytes::from(strings.into_boxed_slice());
    map(value, &mut |string| rest.split_to(string.len()))
}

/// Calls `f` with each string in order, and returns the value with its results.
fn map(value: &Value, f: &mut impl FnMut(&Bytes) -> Bytes) -> Value {
    match value {
        Value::Null => Value::Null,
        Value::Boolean(value) => Value::Boolean(*value),
        Value::Integer(value) => Value::Integer(*value),
        Value::Double(value) => Value::Double(*value),
        Value::BigNumber(digits) => Value::BigNumber(f(digits)),
        Value::Simple(text) => Value::Simple(f(text)),
        Value::Bulk(bytes) => Value::Bulk(f(bytes)),
        Value::Verbatim(format, bytes) => Value::Verbatim(*format, f(bytes)),
        Value::SimpleError(text) => Value::SimpleError(f(text)),
        Value::BlobError(text) => Value::BlobError(f(text)),
        Value::Array(items) => Value::Array(items.iter().map(|item| map(item, f)).collect()),
        Value::Set(items) => Value::Set(items.iter().map(|item| map(item, f)).collect()),
        Value::Map(pairs) => Value::Map(map_pairs(pairs, f)),
        Value::Attributed(attributed) => Value::Attributed(Box::new(Attributed {
            attributes: map_pairs(&attributed.attributes, f),
            value: map(&attributed.value, f),
        })),
    }
}

fn map_pairs(pairs: &[(Value, Value)], f: &mut impl FnMut(&Bytes) -> Bytes) -> Vec<(Value, Value)> {
    pairs
        .iter()
        .map(|(key, value)| {
            let key = map(key, f);
            (key, map(value, f))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_is_equal_and_independent_of_the_input() {
        let input = Bytes::from(vec![b'x'; 1000]);
        let slice = |range| input.slice(range);
        let value = Value::Map(vec![
            (Value::Bulk(slice(0..3)), Value::Array(vec![Value::Simple(slice(3..5)), Value::Integer(7), Value::Null])),
            (Value::Boolean(true), Value::Set(vec![Value::Verbatim(*b"txt", slice(5..5)), Value::Double(0.5)])),
            (
                Value::BigNumber(slice(9..10)),
                Value::Attributed(Box::new(Attributed {
                    attributes: vec![(Value::Bulk(slice(10..12)), Value::BlobError(slice(0..1)))],
                    value: Value::SimpleError(slice(1..2)),
                })),
            ),
        ]);
        let copied = copy(&value);
        assert_eq!(copied, value);
        let single = copy(&Value::Bulk(slice(0..9)));
        assert_eq!(single, Value::Bulk(slice(0..9)));
        drop(value);
        assert!(input.is_unique(), "a copy refers to the input");
        drop((copied, single));
    }

    #[test]
    fn size_counts_strings_and_elements() {
        let element = size_of::<Value>();
        assert_eq!(size(&"four".into()), 4);
        assert_eq!(size(&Value::Array(vec!["four".into(), 1.into()])), 4 + 2 * element);
        assert_eq!(size(&Value::Map(vec![("a".into(), "bc".into())])), 3 + 2 * element);
        assert_eq!(size(&Value::Array(vec![Value::Array(vec![Value::Null])])), 2 * element);
    }
}
