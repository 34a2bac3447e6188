//! The result of an aggregate query, maintained incrementally.

mod groups;
mod tally;

use bytes::Bytes;
use tidewire_store::{Aggregate, Row};

use self::groups::Groups;
use self::tally::Tally;
use crate::net::Net;

/// What a query computes of all records that it means, or of each group of them.
#[derive(Debug)]
pub(crate) struct Totals {
    aggregate: Aggregate,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    Whole(Tally),
    Groups(Groups),
}

impl Totals {
    /// That of the rows that a query means, with their ordinals.
    pub(crate) fn new<'a>(aggregate: &Aggregate, rows: impl Iterator<Item = (u64, &'a Row)>) -> Self {
        let aggregate = aggregate.clone();
        let kept = if aggregate.group_by.is_empty() {
            let mut tally = Tally::new(aggregate.function);
            rows.for_each(|(_, row)| tally.add(row, aggregate.field.as_ref()));
            Kept::Whole(tally)
        } else {
            let mut groups = Groups::new(&aggregate);
            rows.for_each(|(ordinal, row)| groups.add(&aggregate, row, ordinal));
            Kept::Groups(groups)
        };
        Self { aggregate, kept }
    }

    /// How many rows it keeps.
    pub(crate) fn len(&self) -> usize {
        match &self.kept {
            Kept::Whole(_) => 0,
            Kept::Groups(groups) => groups.len(),
        }
    }

    /// Takes changes in. Returns whether the result has changed.
    pub(crate) fn apply(&mut self, nets: &[Net<'_>]) -> bool {
        let Self { aggregate, kept } = self;
        match kept {
            Kept::Whole(tally) => {
                let before = tally.result(aggregate.function);
                for net in nets {
                    if let Some(row) = net.old {
                        tally.remove(row, aggregate.field.as_ref());
                    }
                    if let Some(row) = net.new {
                        tally.add(row, aggregate.field.as_ref());
                    }
                }
                before != tally.result(aggregate.function)
            }
            Kept::Groups(groups) => groups.apply(aggregate, nets),
        }
    }

    /// The whole result; none for the least or greatest of nothing.
    pub(crate) fn encode(&self) -> Option<Bytes> {
        match &self.kept {
            Kept::Whole(tally) => tally.result(self.aggregate.function).map(|value| value.to_string().into()),
            Kept::Groups(groups) => {
                let mut text = Vec::new();
                groups.encode(&self.aggregate, &mut text);
                Some(text.into())
            }
        }
    }
}
