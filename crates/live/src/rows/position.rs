//! The position of a row in the order of a result.
//!
//! The sort fields of a row are encoded as bytes that sort like the rows: a type tag and order-preserving bytes, inverted for a
//! descending field. Each field is self-delimiting, so the bytes of one row are never a prefix of another's. A position holds the
//! first 15 bytes, enough for a number or a short string; ties are resolved by comparing the rows.

use std::cmp::Ordering;

use tidewire_store::{Direction, Field, Row, Value};

use crate::bits::ordered_bits;

/// The position of a row: the first bytes of its sort key, then its ordinal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowPosition {
    /// The first 15 bytes of the sort key, and a byte that is 1 if the key is longer.
    head: [u64; 2],
    pub(super) ordinal: u64,
}

impl RowPosition {
    const HEAD_BYTES: usize = 15;

    fn is_truncated(&self) -> bool {
        self.head[1] & 0xff != 0
    }
}

/// A row and its position.
#[derive(Debug, Clone)]
pub(crate) struct RowEntry {
    pub(crate) position: RowPosition,
    pub(crate) row: Row,
}

/// The sort fields of a query.
#[derive(Debug)]
pub(crate) struct Sort(Box<[(Field, Direction)]>);

// Type tags, in ascending order.
const BOOL: u8 = 1;
const NUMBER: u8 = 2;
const STRING: u8 = 3;
/// Arrays and objects, which have no order.
const OTHER: u8 = 4;
/// Null and absent values. The tag is not inverted, so they are last in both directions.
const NULL: u8 = 0xff;

impl Sort {
    pub(crate) fn new(fields: &[(Field, Direction)]) -> Self {
        Self(fields.into())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the position of a row.
    pub(crate) fn position(&self, row: &Row, ordinal: u64) -> RowPosition {
        if self.0.is_empty() {
            return RowPosition { head: [0; 2], ordinal };
        }
        let bytes = self.bytes(row, RowPosition::HEAD_BYTES);
        let mut head = [0; 16];
        let len = bytes.len().min(RowPosition::HEAD_BYTES);
        head[..len].copy_from_slice(&bytes[..len]);
        head[RowPosition::HEAD_BYTES] = u8::from(bytes.len() > RowPosition::HEAD_BYTES);
        let head = u128::from_be_bytes(head);
        #[expect(clippy::cast_possible_truncation, reason = "each half has 64 bits")]
        let head = [(head >> 64) as u64, head as u64];
        RowPosition { head, ordinal }
    }

    pub(crate) fn entry(&self, row: &Row, ordinal: u64) -> RowEntry {
        RowEntry { position: self.position(row, ordinal), row: row.clone() }
    }

    /// Compares the positions of two rows.
    pub(crate) fn compare(&self, one: &RowEntry, two: &RowEntry) -> Ordering {
        one.position.head.cmp(&two.position.head).then_with(|| {
            // The heads are equal, so either both are truncated or neither is.
            let rest = if one.position.is_truncated() {
                self.bytes(&one.row, usize::MAX).cmp(&self.bytes(&two.row, usize::MAX))
            } else {
                Ordering::Equal
            };
            rest.then(one.position.ordinal.cmp(&two.position.ordinal))
        })
    }

    /// Returns the sort key of a row. A key longer than `min_len` bytes may be incomplete.
    fn bytes(&self, row: &Row, min_len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        for (field, direction) in &self.0 {
            let start = bytes.len();
            match row.get(field) {
                None | Some(Value::Null) => {
                    bytes.push(NULL);
                    continue;
                }
                Some(Value::Bool(flag)) => bytes.extend([BOOL, u8::from(flag)]),
                Some(Value::Number(number)) => {
                    bytes.push(NUMBER);
                    bytes.extend(ordered_bits(number).to_be_bytes());
                }
                Some(Value::String(text)) => {
                    bytes.push(STRING);
                    // A zero byte is escaped, to distinguish it from the terminator.
                    for byte in text.bytes() {
                        bytes.push(byte);
                        if byte == 0 {
                            bytes.push(0xff);
                        }
                        if bytes.len() > min_len {
                            break;
                        }
                    }
                    bytes.extend([0, 0]);
                }
                Some(Value::Array(_) | Value::Object(_)) => bytes.push(OTHER),
            }
            if *direction == Direction::Desc {
                bytes[start..].iter_mut().for_each(|byte| *byte = !*byte);
            }
            if bytes.len() > min_len {
                break;
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    /// Values in ascending sort order. The values of an inner list sort equal.
    fn values() -> Vec<Vec<Json>> {
        vec![
            vec![json!(false)],
            vec![json!(true)],
            vec![json!(-1e300)],
            vec![json!(-1)],
            vec![json!(0), json!(-0.0)],
            vec![json!(1), json!(1.0)],
            vec![json!(1.5)],
            vec![json!("")],
            vec![json!("\0")],
            vec![json!("\0\u{1}")],
            vec![json!("a")],
            vec![json!("a\0")],
            vec![json!("a long string that is cut")],
            vec![json!("a long string that is cut, and goes on")],
            vec![json!("é")],
            vec![json!([2]), json!({"a": 1})],
        ]
    }

    #[test]
    fn rows_sort_by_fields_then_by_ordinal() {
        let row = |json: Json| Row::new(json.as_object().unwrap()).unwrap();
        let ranked =
            || values().into_iter().enumerate().flat_map(|(rank, alike)| alike.into_iter().map(move |v| (rank, v)));
        let sort = |names: &[(&str, Direction)]| {
            Sort::new(&names.iter().map(|(name, direction)| (Field::new(*name), *direction)).collect::<Vec<_>>())
        };
        let up = sort(&[("a", Direction::Asc), ("b", Direction::Desc)]);
        let down = sort(&[("a", Direction::Desc), ("b", Direction::Desc)]);
        for (first, one) in ranked() {
            for (second, two) in ranked() {
                for (b, c) in
                    [(json!(1), json!(2)), (json!("y"), json!("x")), (json!(1), json!(1)), (json!(1), Json::Null)]
                {
                    let then = match (&b, &c) {
                        (Json::Number(b), Json::Number(c)) => c.as_i64().cmp(&b.as_i64()),
                        _ => Ordering::Less,
                    };
                    let (one, two) = (row(json!({"a": one, "b": b})), row(json!({"a": two, "b": c})));
                    for (sort, expected) in [(&up, first.cmp(&second)), (&down, second.cmp(&first))] {
                        let compared = |o, p| sort.compare(&sort.entry(&one, o), &sort.entry(&two, p));
                        assert_eq!(compared(1, 2), expected.then(then).then(Ordering::Less), "{one} {two}");
                        assert_eq!(compared(2, 1), expected.then(then).then(Ordering::Greater), "{one} {two}");
                    }
                }
            }
            // Null and absent values are last and equal.
            for nothing in [json!({"b": 1}), json!({"a": null, "b": 1})] {
                for sort in [&up, &down] {
                    let (one, two) = (row(json!({"a": one, "b": 1})), row(nothing.clone()));
                    assert_eq!(sort.compare(&sort.entry(&one, 9), &sort.entry(&two, 1)), Ordering::Less);
                    let absent = row(json!({"b": 1}));
                    assert_eq!(sort.compare(&sort.entry(&absent, 9), &sort.entry(&two, 9)), Ordering::Equal);
                }
            }
        }
    }
}
