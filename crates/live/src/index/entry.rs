//! The entries of a query in the index, and how they are chosen.
//!
//! A conjunction needs an entry for only one of its conditions: a row that fails this condition cannot match the query. A disjunction
//! needs an entry for each alternative. Of several usable conditions, the one with the lowest estimated cost is chosen: an equality
//! costs less than a range, and an entry costs more the more other queries share it at the time of the subscription.

use std::sync::Arc;

use tidewire_store::query::{Comparison, Scalar, Test};
use tidewire_store::{Field, Filter, Value};

use crate::bits::{ScalarKey, ordered_bits};

/// The bytes of a string, shared by several index entries.
pub(crate) type Text = Arc<[u8]>;

/// An entry of a query in the index.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum IndexEntry {
    /// The field equals a value.
    Equal(Field, ScalarKey),
    /// The [`ordered_bits`] of a number in the field are in this interval: from the first bound, up to but not including the second.
    /// `None` means no upper bound.
    Numbers(Field, u64, Option<u64>),
    /// A string in the field is in this interval, with bounds as in `Numbers`.
    Texts(Field, Text, Option<Text>),
}

/// Chooses the index entries of a query. `overlap` counts the queries that share an entry. Returns `None` if no condition is usable:
/// then every change must be checked.
pub(crate) fn choose(filter: &Filter, overlap: &impl Fn(&IndexEntry) -> usize) -> Option<Vec<IndexEntry>> {
    alternatives(std::slice::from_ref(filter), overlap).map(|choice| choice.entries)
}

/// Entries, and the estimated cost of finding the query by them.
struct Choice {
    entries: Vec<IndexEntry>,
    cost: usize,
}

impl Choice {
    /// No entries. A query with this choice is never found, because no row can match it.
    const EMPTY: Self = Self { entries: Vec::new(), cost: 0 };
}

/// Chooses entries for a disjunction: each alternative needs one.
fn alternatives(filters: &[Filter], overlap: &impl Fn(&IndexEntry) -> usize) -> Option<Choice> {
    filters.iter().try_fold(Choice::EMPTY, |mut all, filter| {
        let one = match filter {
            Filter::Any(filters) => alternatives(filters, overlap)?,
            Filter::All(_) | Filter::Test(..) => conjunction(filter, overlap)?,
        };
        all.entries.extend(one.entries);
        all.cost = all.cost.saturating_add(one.cost);
        Some(all)
    })
}

/// Chooses entries for a conjunction: those of the cheapest condition.
fn conjunction(filter: &Filter, overlap: &impl Fn(&IndexEntry) -> usize) -> Option<Choice> {
    let mut conditions = Vec::new();
    flatten(filter, &mut conditions);
    let mut choices = Vec::new();
    let mut intervals: Vec<(&Field, Interval)> = Vec::new();
    for condition in conditions {
        match condition {
            Filter::Any(filters) => choices.extend(alternatives(filters, overlap)),
            Filter::Test(field, test) => match (values(test), Interval::of(test)) {
                (Some(scalars), _) => choices.push(equal(field, scalars, overlap)),
                (None, Some(interval)) => match intervals.iter_mut().find(|(known, _)| *known == field) {
                    Some((_, known)) => *known = std::mem::replace(known, Interval::Empty).and(interval),
                    None => intervals.push((field, interval)),
                },
                (None, None) => {}
            },
            Filter::All(_) => {}
        }
    }
    choices.extend(intervals.into_iter().map(|(field, interval)| interval.choice(field, overlap)));
    choices.into_iter().min_by_key(|choice| (choice.cost, choice.entries.len()))
}

/// Collects the conditions of nested conjunctions.
fn flatten<'a>(filter: &'a Filter, conditions: &mut Vec<&'a Filter>) {
    match filter {
        Filter::All(filters) => filters.iter().for_each(|filter| flatten(filter, conditions)),
        other => conditions.push(other),
    }
}

/// Returns the possible values of a field, if the test lists them.
fn values(test: &Test) -> Option<&[Scalar]> {
    match test {
        Test::Equal(scalar) => Some(std::slice::from_ref(scalar)),
        Test::In(scalars) => Some(scalars.list()),
        _ => None,
    }
}

fn equal(field: &Field, scalars: &[Scalar], overlap: &impl Fn(&IndexEntry) -> usize) -> Choice {
    let mut choice = Choice::EMPTY;
    for value in scalars.iter().filter_map(Scalar::value) {
        let Some(key) = ScalarKey::of(&value) else { continue };
        let entry = IndexEntry::Equal(field.clone(), key);
        // A null or a boolean is usually shared by many rows, so another equality is preferred.
        let base = match value {
            Value::Null => 8,
            Value::Bool(_) => 4,
            _ => 0,
        };
        choice.cost += base + overlap(&entry);
        choice.entries.push(entry);
    }
    choice
}

/// The interval of the possible values of a field, with bounds as in [`IndexEntry`].
enum Interval {
    Empty,
    Numbers(u64, Option<u64>),
    Texts(Text, Option<Text>),
}

impl Interval {
    /// Base costs. They are higher than those of equalities, so that an equality is preferred to an interval.
    const BOUNDED: usize = 16;
    const UNBOUNDED: usize = 64;

    /// Returns the interval of the values that pass a test. `None` if they are not an interval.
    fn of(test: &Test) -> Option<Self> {
        match test {
            Test::Order(comparison, scalar) => Some(Self::ordered(*comparison, scalar)),
            Test::Between(low, high) => {
                Some(Self::ordered(Comparison::GreaterOrEqual, low).and(Self::ordered(Comparison::LessOrEqual, high)))
            }
            Test::StartsWith(start) => {
                let start = start.as_bytes();
                Some(Self::Texts(start.into(), after_prefix(start)))
            }
            _ => None,
        }
    }

    /// Returns the interval of a comparison. Only numbers and strings can be compared, each with its own type.
    fn ordered(comparison: Comparison, scalar: &Scalar) -> Self {
        match scalar.value() {
            Some(Value::Number(number)) => {
                let bits = ordered_bits(number);
                match comparison {
                    Comparison::Greater => Self::Numbers(bits.saturating_add(1), None),
                    Comparison::GreaterOrEqual => Self::Numbers(bits, None),
                    Comparison::Less => Self::Numbers(0, Some(bits)),
                    Comparison::LessOrEqual => Self::Numbers(0, bits.checked_add(1)),
                }
            }
            Some(Value::String(text)) => {
                let at: Text = text.as_bytes().into();
                // The successor of a string is the string with a zero byte appended.
                let next: Text = [text.as_bytes(), &[0]].concat().into();
                match comparison {
                    Comparison::Greater => Self::Texts(next, None),
                    Comparison::GreaterOrEqual => Self::Texts(at, None),
                    Comparison::Less => Self::Texts(Text::default(), Some(at)),
                    Comparison::LessOrEqual => Self::Texts(Text::default(), Some(next)),
                }
            }
            _ => Self::Empty,
        }
    }

    /// Returns the intersection of two intervals.
    fn and(self, other: Self) -> Self {
        fn both<K: Ord>(one: (K, Option<K>), two: (K, Option<K>)) -> Option<(K, Option<K>)> {
            let from = one.0.max(two.0);
            let until = match (one.1, two.1) {
                (Some(one), Some(two)) => Some(one.min(two)),
                (one, two) => one.or(two),
            };
            until.as_ref().is_none_or(|until| from < *until).then_some((from, until))
        }
        match (self, other) {
            (Self::Numbers(from, until), Self::Numbers(other_from, other_until)) => {
                both((from, until), (other_from, other_until))
                    .map_or(Self::Empty, |(from, until)| Self::Numbers(from, until))
            }
            (Self::Texts(from, until), Self::Texts(other_from, other_until)) => {
                both((from, until), (other_from, other_until))
                    .map_or(Self::Empty, |(from, until)| Self::Texts(from, until))
            }
            _ => Self::Empty,
        }
    }

    fn choice(self, field: &Field, overlap: &impl Fn(&IndexEntry) -> usize) -> Choice {
        let (entry, is_bounded) = match self {
            Self::Empty => return Choice::EMPTY,
            Self::Numbers(from, until) => {
                (IndexEntry::Numbers(field.clone(), from, until), from > 0 && until.is_some())
            }
            Self::Texts(from, until) => {
                let is_bounded = !from.is_empty() && until.is_some();
                (IndexEntry::Texts(field.clone(), from, until), is_bounded)
            }
        };
        let base = if is_bounded { Self::BOUNDED } else { Self::UNBOUNDED };
        Choice { cost: base + overlap(&entry), entries: vec![entry] }
    }
}

/// Returns the smallest bytes that are greater than all strings with this prefix. `None` if the prefix is empty.
fn after_prefix(prefix: &[u8]) -> Option<Text> {
    let (last, rest) = prefix.split_last()?;
    // UTF-8 has no byte 0xff.
    Some([rest, &[last.saturating_add(1)]].concat().into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn chosen(filter: &Json, overlap: &impl Fn(&IndexEntry) -> usize) -> Option<Vec<IndexEntry>> {
        choose(&Filter::parse(filter).unwrap(), overlap)
    }

    fn number(name: &str, number: f64) -> IndexEntry {
        IndexEntry::Equal(Field::new(name), ScalarKey::of(&Value::Number(number)).unwrap())
    }

    #[test]
    fn most_selective_condition_is_chosen() {
        let between = |name: &str, from: f64, until: f64| {
            vec![IndexEntry::Numbers(Field::new(name), ordered_bits(from), Some(ordered_bits(until) + 1))]
        };
        let text = |from: &str, until: Option<&str>| {
            vec![IndexEntry::Texts(Field::new("s"), from.as_bytes().into(), until.map(|until| until.as_bytes().into()))]
        };
        for (filter, expected) in [
            (json!({}), None),
            (json!({"n": {"$neq": 1}}), None),
            (json!({"s": {"$contains": "x"}, "n": 1}), Some(vec![number("n", 1.0)])),
            (json!({"b": true, "n": 1}), Some(vec![number("n", 1.0)])),
            (json!({"x": null, "n": {"$in": [1, 2]}}), Some(vec![number("n", 1.0), number("n", 2.0)])),
            (json!({"m": {"$between": [1, 2]}, "n": 1}), Some(vec![number("n", 1.0)])),
            (json!({"m": {"$gte": 1, "$lte": 2}, "n": {"$gt": 1}}), Some(between("m", 1.0, 2.0))),
            (json!({"m": {"$gt": 3}, "$and": [{"m": {"$lt": 2}}]}), Some(vec![])),
            (json!({"m": {"$gt": "3", "$lt": 4}}), Some(vec![])),
            (json!({"m": {"$gt": null}}), Some(vec![])),
            (json!({"m": [1]}), Some(vec![])),
            (json!({"s": {"$startsWith": "ab"}}), Some(text("ab", Some("ac")))),
            (json!({"s": {"$startsWith": ""}}), Some(text("", None))),
            (json!({"s": {"$gt": "a"}}), Some(text("a\0", None))),
            (json!({"s": {"$between": ["a", "b"]}}), Some(text("a", Some("b\0")))),
            (json!({"$or": []}), Some(vec![])),
            (json!({"$or": [{"n": 1}, {"m": 2, "x": true}]}), Some(vec![number("n", 1.0), number("m", 2.0)])),
            (json!({"$or": [{"n": 1}, {"m": {"$neq": 2}}]}), None),
            (json!({"k": 5, "$or": [{"n": 1}, {"m": {"$neq": 2}}]}), Some(vec![number("k", 5.0)])),
        ] {
            assert_eq!(chosen(&filter, &|_| 0), expected, "{filter}");
        }
    }

    #[test]
    fn shared_values_are_avoided() {
        let overlap = |entry: &IndexEntry| if *entry == number("kind", 1.0) { 1000 } else { 0 };
        let filter = json!({"kind": 1, "room": 7});
        assert_eq!(chosen(&filter, &overlap), Some(vec![number("room", 7.0)]));
        let filter = json!({"kind": 1, "at": {"$between": [1, 2]}});
        assert!(matches!(&chosen(&filter, &overlap).unwrap()[..], [IndexEntry::Numbers(..)]));
    }
}
