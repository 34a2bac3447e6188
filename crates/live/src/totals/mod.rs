//! The result of an aggregate query, maintained incrementally.

mod groups;
mod tally;

use bytes::Bytes;
use tidewire_store::query::{Budget, Exceeded};
use tidewire_store::{Aggregate, Row};

use self::groups::Groups;
pub(crate) use self::groups::GroupsCopy;
use self::tally::Tally;
use crate::net_change::NetChange;
use crate::query::{QueryResult, ResultCopy, ResultTooLarge};

/// The maintained aggregate of all matching records, or of each group.
#[derive(Debug)]
pub(crate) struct Totals {
    aggregate: Aggregate,
    state: AggregateState,
}

/// The state of an aggregate: one value, or groups.
#[derive(Debug)]
enum AggregateState {
    Single(Tally),
    Groups(Groups),
}

impl Totals {
    /// Aggregates rows, given with their ordinals. The retained memory is charged to the budget.
    pub(crate) fn new<'a>(
        aggregate: &Aggregate,
        rows: impl Iterator<Item = Result<(u64, &'a Row), Exceeded>>,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        let aggregate = aggregate.clone();
        let mut state = if aggregate.group_by.is_empty() {
            AggregateState::Single(Tally::new(aggregate.function))
        } else {
            AggregateState::Groups(Groups::new(&aggregate))
        };
        let mut held = 0;
        for row in rows {
            let (ordinal, row) = row?;
            match &mut state {
                AggregateState::Single(tally) => tally.add(row, aggregate.field.as_ref()),
                AggregateState::Groups(groups) => groups.add(&aggregate, row, ordinal),
            }
            let bytes = state.bytes();
            budget.hold(bytes.saturating_sub(held))?;
            held = bytes;
        }
        Ok(Self { aggregate, state })
    }

    /// Returns the number of retained rows. Only groups retain rows.
    pub(crate) fn len(&self) -> usize {
        match &self.state {
            AggregateState::Single(_) => 0,
            AggregateState::Groups(groups) => groups.len(),
        }
    }

    /// Returns the approximate memory of the state.
    pub(crate) fn bytes(&self) -> usize {
        self.state.bytes()
    }

    /// Applies the net changes of a commit. Returns whether the result has changed.
    pub(crate) fn apply(&mut self, changes: &[NetChange<&Row>]) -> bool {
        let Self { aggregate, state } = self;
        match state {
            AggregateState::Single(tally) => {
                let before = tally.result(aggregate.function);
                for change in changes {
                    if let Some(row) = change.old {
                        tally.remove(row, aggregate.field.as_ref());
                    }
                    if let Some(row) = change.new {
                        tally.add(row, aggregate.field.as_ref());
                    }
                }
                before != tally.result(aggregate.function)
            }
            AggregateState::Groups(groups) => groups.apply(aggregate, changes),
        }
    }

    /// Encodes the result. Fails if it is larger than `max_bytes`.
    pub(crate) fn encode(&self, max_bytes: usize) -> Result<QueryResult, ResultTooLarge> {
        match &self.state {
            AggregateState::Single(tally) => Ok(self.value(tally)),
            AggregateState::Groups(groups) => groups.encode(&self.aggregate, max_bytes).map(QueryResult::Json),
        }
    }

    /// Copies the result, so that another thread can encode it. A single value is encoded at once.
    pub(crate) fn copy(&self) -> ResultCopy {
        match &self.state {
            AggregateState::Single(tally) => ResultCopy::Encoded(self.value(tally)),
            AggregateState::Groups(groups) => ResultCopy::Groups(groups.copy(&self.aggregate)),
        }
    }

    /// Returns the aggregate of all rows. The minimum and maximum of no numbers have no value.
    fn value(&self, tally: &Tally) -> QueryResult {
        let value = tally.result(self.aggregate.function);
        value.map_or(QueryResult::NoValue, |value| QueryResult::Json(Bytes::from(value.to_string())))
    }
}

impl AggregateState {
    fn bytes(&self) -> usize {
        match self {
            Self::Single(tally) => tally.bytes(),
            Self::Groups(groups) => groups.bytes(),
        }
    }
}
