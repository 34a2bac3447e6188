//! The choice of the condition by which the index finds a query.
//!
//! Of several conditions that must all hold, one suffices: a row that fails it cannot match the query. A disjunction needs one
//! condition for each alternative. The chosen condition is the one that the fewest other queries share at the time of the
//! subscription: an equality, otherwise a range that few queries overlap.

use std::sync::Arc;

use tidewire_store::query::{Comparison, Scalar, Test};
use tidewire_store::{Field, Filter, Value};

use crate::bits::{Key, ordered};

/// The bytes of a string, shared by several index entries.
pub(crate) type Text = Arc<[u8]>;

/// An entry of a query in the index.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Access {
    /// The field equals a value.
    Equal(Field, Key),
    /// The field is a number in an interval of [`ordered`] bits.
    Numbers(Field, u64, Option<u64>),
    /// The field is a string in an interval.
    Texts(Field, Text, Option<Text>),
}

/// Chooses the index entries of a query. Returns `None` if no condition is usable, so that every change must be checked.
pub(crate) fn choose(filter: &Filter, overlap: &impl Fn(&Access) -> usize) -> Option<Vec<Access>> {
    alternatives(std::slice::from_ref(filter), overlap).map(|choice| choice.accesses)
}

struct Choice {
    accesses: Vec<Access>,
    cost: usize,
}

impl Choice {
    /// No entries, because no row can match.
    const NONE: Self = Self { accesses: Vec::new(), cost: 0 };
}

/// Chooses entries for a disjunction: each alternative needs one.
fn alternatives(filters: &[Filter], overlap: &impl Fn(&Access) -> usize) -> Option<Choice> {
    filters.iter().try_fold(Choice::NONE, |mut all, filter| {
        let one = match filter {
            Filter::Any(filters) => alternatives(filters, overlap)?,
            Filter::All(_) | Filter::Test(..) => conjunction(filter, overlap)?,
        };
        all.accesses.extend(one.accesses);
        all.cost = all.cost.saturating_add(one.cost);
        Some(all)
    })
}

/// Chooses entries for a conjunction: those of the cheapest condition.
fn conjunction(filter: &Filter, overlap: &impl Fn(&Access) -> usize) -> Option<Choice> {
    let mut conditions = Vec::new();
    flatten(filter, &mut conditions);
    let mut choices = Vec::new();
    let mut spans: Vec<(&Field, Span)> = Vec::new();
    for condition in conditions {
        match condition {
            Filter::Any(filters) => choices.extend(alternatives(filters, overlap)),
            Filter::Test(field, test) => match (values(test), Span::of(test)) {
                (Some(scalars), _) => choices.push(equal(field, scalars, overlap)),
                (None, Some(span)) => match spans.iter_mut().find(|(known, _)| *known == field) {
                    Some((_, known)) => *known = std::mem::replace(known, Span::Nothing).and(span),
                    None => spans.push((field, span)),
                },
                (None, None) => {}
            },
            Filter::All(_) => {}
        }
    }
    choices.extend(spans.into_iter().map(|(field, span)| span.choice(field, overlap)));
    choices.into_iter().min_by_key(|choice| (choice.cost, choice.accesses.len()))
}

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

fn equal(field: &Field, scalars: &[Scalar], overlap: &impl Fn(&Access) -> usize) -> Choice {
    let mut choice = Choice::NONE;
    for value in scalars.iter().filter_map(Scalar::value) {
        let Some(key) = Key::of(&value) else { continue };
        let access = Access::Equal(field.clone(), key);
        // Many rows share the same boolean or null.
        let base = match value {
            Value::Null => 8,
            Value::Bool(_) => 4,
            _ => 0,
        };
        choice.cost += base + overlap(&access);
        choice.accesses.push(access);
    }
    choice
}

/// The interval of the possible values of a field.
enum Span {
    Nothing,
    Numbers(u64, Option<u64>),
    Texts(Text, Option<Text>),
}

impl Span {
    /// Base costs, so that equality is preferred, then a bounded interval.
    const BOUNDED: usize = 16;
    const UNBOUNDED: usize = 64;

    /// Returns the interval of the values that pass a test. `None` if the test is not a comparison.
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
                let bits = ordered(number);
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
            _ => Self::Nothing,
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
                    .map_or(Self::Nothing, |(from, until)| Self::Numbers(from, until))
            }
            (Self::Texts(from, until), Self::Texts(other_from, other_until)) => {
                both((from, until), (other_from, other_until))
                    .map_or(Self::Nothing, |(from, until)| Self::Texts(from, until))
            }
            _ => Self::Nothing,
        }
    }

    fn choice(self, field: &Field, overlap: &impl Fn(&Access) -> usize) -> Choice {
        let (access, is_bounded) = match self {
            Self::Nothing => return Choice::NONE,
            Self::Numbers(from, until) => (Access::Numbers(field.clone(), from, until), from > 0 && until.is_some()),
            Self::Texts(from, until) => {
                let is_bounded = !from.is_empty() && until.is_some();
                (Access::Texts(field.clone(), from, until), is_bounded)
            }
        };
        let base = if is_bounded { Self::BOUNDED } else { Self::UNBOUNDED };
        Choice { cost: base + overlap(&access), accesses: vec![access] }
    }
}

/// Returns the smallest bytes that are greater than all bytes with this prefix.
fn after_prefix(prefix: &[u8]) -> Option<Text> {
    let (last, rest) = prefix.split_last()?;
    // UTF-8 has no byte 0xff.
    Some([rest, &[last.saturating_add(1)]].concat().into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn chosen(filter: &Json, overlap: &impl Fn(&Access) -> usize) -> Option<Vec<Access>> {
        choose(&Filter::parse(filter).unwrap(), overlap)
    }

    fn number(name: &str, number: f64) -> Access {
        Access::Equal(Field::new(name), Key::of(&Value::Number(number)).unwrap())
    }

    #[test]
    fn most_selective_condition_is_chosen() {
        let between = |name: &str, from: f64, until: f64| {
            vec![Access::Numbers(Field::new(name), ordered(from), Some(ordered(until) + 1))]
        };
        let text = |from: &str, until: Option<&str>| {
            vec![Access::Texts(Field::new("s"), from.as_bytes().into(), until.map(|until| until.as_bytes().into()))]
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
        let overlap = |access: &Access| if *access == number("kind", 1.0) { 1000 } else { 0 };
        let filter = json!({"kind": 1, "room": 7});
        assert_eq!(chosen(&filter, &overlap), Some(vec![number("room", 7.0)]));
        let filter = json!({"kind": 1, "at": {"$between": [1, 2]}});
        assert!(matches!(&chosen(&filter, &overlap).unwrap()[..], [Access::Numbers(..)]));
    }
}
