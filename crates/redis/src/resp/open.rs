//! Incomplete aggregates.

use super::value::Value;

/// Keys and values.
pub(super) type Pairs = Vec<(Value, Value)>;

/// The types of aggregates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aggregate {
    Array,
    Set,
    Map,
    Push,
    Attributes,
}

impl Aggregate {
    /// Returns the number of values of one element.
    pub(super) fn width(self) -> usize {
        match self {
            Self::Map | Self::Attributes => 2,
            Self::Array | Self::Set | Self::Push => 1,
        }
    }

    /// Whether its length may be unknown.
    pub(super) fn may_be_streamed(self) -> bool {
        matches!(self, Self::Array | Self::Set | Self::Map)
    }
}

/// An aggregate whose elements are being decoded.
#[derive(Debug)]
pub(super) struct Open {
    aggregate: Aggregate,
    /// The number of values to come. `None` if it is streamed.
    left: Option<usize>,
    items: Items,
    /// The attributes of the aggregate itself.
    pub(super) attributes: Option<Pairs>,
}

#[derive(Debug)]
enum Items {
    Single(Vec<Value>),
    /// Pairs, and a key whose value is to come.
    Paired(Pairs, Option<Value>),
}

/// A complete aggregate.
#[derive(Debug)]
pub(super) enum Closed {
    Value(Value),
    Push(Vec<Value>),
    Attributes(Pairs),
}

impl Open {
    /// Creates an aggregate with memory for `capacity` values.
    pub(super) fn new(aggregate: Aggregate, left: Option<usize>, capacity: usize, attributes: Option<Pairs>) -> Self {
        let items = match aggregate.width() {
            1 => Items::Single(Vec::with_capacity(capacity)),
            _ => Items::Paired(Vec::with_capacity(capacity / 2), None),
        };
        Self { aggregate, left, items, attributes }
    }

    /// Appends a value. Returns whether it was the last.
    #[inline]
    pub(super) fn push(&mut self, value: Value) -> bool {
        match &mut self.items {
            Items::Single(items) => items.push(value),
            Items::Paired(pairs, key) => match key.take() {
                None => *key = Some(value),
                Some(key) => pairs.push((key, value)),
            },
        }
        match &mut self.left {
            None => false,
            Some(left) => {
                *left -= 1;
                *left == 0
            }
        }
    }

    /// Returns the number of values to come, or zero if it is streamed.
    pub(super) fn known_left(&self) -> usize {
        self.left.unwrap_or(0)
    }

    /// Appends values, which do not include the last one.
    pub(super) fn push_all(&mut self, values: impl ExactSizeIterator<Item = Value>) {
        match (&mut self.items, &mut self.left) {
            (Items::Single(items), Some(left)) => {
                *left -= values.len();
                items.extend(values);
            }
            _ => values.for_each(|value| {
                self.push(value);
            }),
        }
    }

    pub(super) fn is_streamed(&self) -> bool {
        self.left.is_none()
    }

    /// Whether a key has no value yet.
    pub(super) fn is_odd(&self) -> bool {
        matches!(self.items, Items::Paired(_, Some(_)))
    }

    pub(super) fn close(self) -> Closed {
        match (self.aggregate, self.items) {
            (Aggregate::Push, Items::Single(items)) => Closed::Push(items),
            (Aggregate::Set, Items::Single(items)) => Closed::Value(Value::Set(items)),
            (_, Items::Single(items)) => Closed::Value(Value::Array(items)),
            (Aggregate::Attributes, Items::Paired(pairs, _)) => Closed::Attributes(pairs),
            (_, Items::Paired(pairs, _)) => Closed::Value(Value::Map(pairs)),
        }
    }
}
