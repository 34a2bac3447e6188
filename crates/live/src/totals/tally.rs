//! Aggregate functions that support the removal of rows.

use std::collections::BTreeMap;

use serde_json::{Number, Value as Json};
use tidewire_store::query::{AggregateFunction, Sum};
use tidewire_store::{Field, Row, Value};

use crate::bits::{from_ordered_bits, ordered_bits};

/// The state of an aggregate function, to which rows are added and from which they are removed.
#[derive(Debug)]
pub(crate) enum Tally {
    /// The number of rows.
    Count(u64),
    /// The exact sum and the count of the numbers.
    Sum(Box<Sum>, u64),
    /// All numbers by their ordered bits, with their counts.
    Numbers(BTreeMap<u64, u64>),
}

impl Tally {
    pub(crate) fn new(function: AggregateFunction) -> Self {
        match function {
            AggregateFunction::Sum | AggregateFunction::Avg => Self::Sum(Box::default(), 0),
            AggregateFunction::Min | AggregateFunction::Max => Self::Numbers(BTreeMap::new()),
            _ => Self::Count(0),
        }
    }

    pub(crate) fn add(&mut self, row: &Row, field: Option<&Field>) {
        match self {
            Self::Count(rows) => *rows += u64::from(is_counted(row, field)),
            Self::Sum(sum, numbers) => {
                let Some(number) = number_of(row, field) else { return };
                sum.add(number);
                *numbers += 1;
            }
            Self::Numbers(numbers) => {
                let Some(number) = number_of(row, field) else { return };
                *numbers.entry(ordered_bits(number)).or_insert(0) += 1;
            }
        }
    }

    /// Removes a row that was added.
    pub(crate) fn remove(&mut self, row: &Row, field: Option<&Field>) {
        match self {
            Self::Count(rows) => *rows = rows.saturating_sub(u64::from(is_counted(row, field))),
            Self::Sum(sum, numbers) => {
                let Some(number) = number_of(row, field) else { return };
                sum.subtract(number);
                *numbers = numbers.saturating_sub(1);
            }
            Self::Numbers(numbers) => {
                let Some(number) = number_of(row, field) else { return };
                if let Some(count) = numbers.get_mut(&ordered_bits(number)) {
                    *count -= 1;
                    if *count == 0 {
                        numbers.remove(&ordered_bits(number));
                    }
                }
            }
        }
    }

    /// Returns the approximate memory of the retained numbers.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Count(_) | Self::Sum(..) => 0,
            // Two numbers, and the nodes of the tree are about two thirds full.
            Self::Numbers(numbers) => numbers.len() * 24,
        }
    }

    /// Returns the result. The minimum and maximum of no numbers have no value.
    pub(crate) fn result(&self, function: AggregateFunction) -> Option<Json> {
        #[expect(clippy::cast_precision_loss, reason = "JSON numbers have the precision of f64")]
        match self {
            Self::Count(rows) => Some(Json::from(*rows)),
            Self::Sum(sum, numbers) => Some(json(match function {
                AggregateFunction::Avg if *numbers == 0 => 0.0,
                AggregateFunction::Avg => sum.total() / *numbers as f64,
                _ => sum.total(),
            })),
            Self::Numbers(numbers) => {
                let one = match function {
                    AggregateFunction::Max => numbers.keys().next_back(),
                    _ => numbers.keys().next(),
                };
                one.map(|bits| json(from_ordered_bits(*bits)))
            }
        }
    }
}

/// Returns whether a row is counted: if there is a field, it must be present and not null.
fn is_counted(row: &Row, field: Option<&Field>) -> bool {
    field.is_none_or(|field| !matches!(row.get(field), None | Some(Value::Null)))
}

fn number_of(row: &Row, field: Option<&Field>) -> Option<f64> {
    match row.get(field?)? {
        Value::Number(number) => Some(number),
        _ => None,
    }
}

/// Converts a number to JSON: integers without a decimal point, infinity as null.
fn json(number: f64) -> Json {
    #[expect(clippy::cast_possible_truncation, reason = "an integer below 2^53 is exact")]
    if number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0 {
        return Json::from(number as i64);
    }
    Number::from_f64(number).map_or(Json::Null, Json::Number)
}
