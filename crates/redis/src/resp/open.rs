//! Aggregates that are not complete yet.

use super::value::Value;

/// Keys and values.
pub(super) type Pairs = Vec<(Value, Value)>;

/// The aggregates, by the byte they begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aggregate {
    Array,
    Set,
    Map,
    Push,
    Attributes,
}

impl Aggregate {
    /// How many values one of its elements is.
    pub(super) fn width(self) -> usize {
        match self {
            Self::Map | Self::Attributes => 2,
            Self::Array | Self::Set | Self::Push => 1,
        }
    }

    /// Whether it may come without a length.
    pub(super) fn may_be_streamed(self) -> bool {
        matches!(self, Self::Array | Self::Set | Self::Map)
    }
}

/// An aggregate that is being read.
#[derive(Debug)]
pub(super) struct Open {
    aggregate: Aggregate,
    /// How many values are to come; `None` if its end will be said.
    left: Option<usize>,
    items: Items,
    /// What was said about the aggregate itself.
    pub(super) attributes: Option<Pairs>,
}

#[derive(Debug)]
enum Items {
    Single(Vec<Value>),
    /// And the key whose value is to come.
    Paired(Pairs, Option<Value>),
}

/// An aggregate that is complete.
#[derive(Debug)]
pub(super) enum Closed {
    Value(Value),
    Push(Vec<Value>),
    Attributes(Pairs),
}

impl Open {
    /// With room for `room` values, which is no more than are announced.
    pub(super) fn new(aggregate: Aggregate, left: Option<usize>, room: usize, attributes: Option<Pairs>) -> Self {
        let items = match aggregate.width() {
            1 => Items::Single(Vec::with_capacity(room)),
            _ => Items::Paired(Vec::with_capacity(room / 2), None),
        };
        Self { aggregate, left, items, attributes }
    }

    /// Appends a value; there is one to come. Returns whether it was the last.
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

    /// How many values are known to come.
    pub(super) fn known_left(&self) -> usize {
        self.left.unwrap_or(0)
    }

    /// Appends values; more than these are to come.
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

    /// Whether the value of a key is to come.
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
