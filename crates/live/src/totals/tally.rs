//! What has been counted, and can be taken back.

use std::collections::BTreeMap;

use serde_json::{Number, Value as Json};
use tidewire_store::{AggregateFunction, Field, Row, Value};

use super::running::RunningSum;
use crate::bits::{number, ordered};

/// What a function is computed of, for rows that come and go. It is what computing it anew of all rows gives.
#[derive(Debug)]
pub(crate) enum Tally {
    /// How many there are.
    Count(u64),
    /// The sum, and how many are in it.
    Sum(Box<Sum>),
    /// All numbers, by their ordered bits, and how often each is there.
    Numbers(BTreeMap<u64, u64>),
}

/// Whole numbers are added exactly, so that they can be taken away again. Others are kept, because what rounding makes of them
/// depends on their order.
#[derive(Debug, Default)]
pub(crate) struct Sum {
    numbers: u64,
    whole: i128,
    broken: RunningSum,
}

impl Tally {
    pub(crate) fn new(function: AggregateFunction) -> Self {
        match function {
            AggregateFunction::Sum | AggregateFunction::Avg => Self::Sum(Box::default()),
            AggregateFunction::Min | AggregateFunction::Max => Self::Numbers(BTreeMap::new()),
            _ => Self::Count(0),
        }
    }

    pub(crate) fn add(&mut self, row: &Row, field: Option<&Field>, ordinal: u64) {
        match self {
            Self::Count(rows) => *rows += u64::from(counts(row, field)),
            Self::Sum(sum) => {
                let Some(number) = number_of(row, field) else { return };
                sum.numbers += 1;
                match whole(number) {
                    Some(whole) => sum.whole += whole,
                    None => sum.broken.insert(ordinal, number),
                }
            }
            Self::Numbers(numbers) => {
                let Some(number) = number_of(row, field) else { return };
                *numbers.entry(ordered(number)).or_insert(0) += 1;
            }
        }
    }

    /// Takes back what was added of the same row.
    pub(crate) fn remove(&mut self, row: &Row, field: Option<&Field>, ordinal: u64) {
        match self {
            Self::Count(rows) => *rows = rows.saturating_sub(u64::from(counts(row, field))),
            Self::Sum(sum) => {
                let Some(number) = number_of(row, field) else { return };
                sum.numbers = sum.numbers.saturating_sub(1);
                match whole(number) {
                    Some(whole) => sum.whole -= whole,
                    None => sum.broken.remove(ordinal),
                }
            }
            Self::Numbers(numbers) => {
                let Some(number) = number_of(row, field) else { return };
                if let Some(count) = numbers.get_mut(&ordered(number)) {
                    *count -= 1;
                    if *count == 0 {
                        numbers.remove(&ordered(number));
                    }
                }
            }
        }
    }

    /// What comes of it; none for the least or greatest of nothing.
    pub(crate) fn result(&mut self, function: AggregateFunction) -> Option<Json> {
        #[expect(clippy::cast_precision_loss, reason = "JSON numbers have no more")]
        match self {
            Self::Count(rows) => Some(Json::from(*rows)),
            Self::Sum(sum) => {
                let total = sum.whole as f64 + sum.broken.total();
                Some(json(match function {
                    AggregateFunction::Avg if sum.numbers == 0 => 0.0,
                    AggregateFunction::Avg => total / sum.numbers as f64,
                    _ => total,
                }))
            }
            Self::Numbers(numbers) => {
                let one = match function {
                    AggregateFunction::Max => numbers.keys().next_back(),
                    _ => numbers.keys().next(),
                };
                one.map(|bits| json(number(*bits)))
            }
        }
    }
}

/// Whether a row is counted: if a field is named, it must be there.
fn counts(row: &Row, field: Option<&Field>) -> bool {
    field.is_none_or(|field| !matches!(row.get(field), None | Some(Value::Null)))
}

fn number_of(row: &Row, field: Option<&Field>) -> Option<f64> {
    match row.get(field?)? {
        Value::Number(number) => Some(number),
        _ => None,
    }
}

/// A number without a fraction that JSON readers have exactly.
fn whole(number: f64) -> Option<i128> {
    #[expect(clippy::cast_possible_truncation, reason = "what has no fraction and is below 2^53 is whole")]
    (number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0).then_some(number as i128)
}

/// A number as JSON writes it: without a fraction if it has none. What is beyond all numbers is null.
fn json(number: f64) -> Json {
    #[expect(clippy::cast_possible_truncation, reason = "what has no fraction and is below 2^53 is whole")]
    if whole(number).is_some() {
        return Json::from(number as i64);
    }
    Number::from_f64(number).map_or(Json::Null, Json::Number)
}
