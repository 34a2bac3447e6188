//! The sum of numbers that rounding makes depend on their order.
//!
//! They are added in the order of coming, as they are when all are added anew. What the sum was is noted now and then on the way,
//! so that when one of them changes, only those after it are added again: most changes concern rows that came late.

use std::collections::BTreeMap;

/// Numbers in the order of coming, and their sum.
#[derive(Debug, Default)]
pub(crate) struct RunningSum {
    numbers: BTreeMap<u64, f64>,
    /// The ordinals of some numbers, in order, and the sum up to them and with them.
    notes: Vec<(u64, f64)>,
    /// The sum of all, if none has changed since.
    total: Option<f64>,
}

impl RunningSum {
    /// How many numbers there are from one note to the next.
    const STEP: usize = 256;

    pub(crate) fn insert(&mut self, ordinal: u64, number: f64) {
        self.numbers.insert(ordinal, number);
        self.forget_from(ordinal);
    }

    pub(crate) fn remove(&mut self, ordinal: u64) {
        if self.numbers.remove(&ordinal).is_some() {
            self.forget_from(ordinal);
        }
    }

    /// The sum.
    pub(crate) fn total(&mut self) -> f64 {
        if let Some(total) = self.total {
            return total;
        }
        let (mut total, from) = self.notes.last().map_or((0.0, 0), |(ordinal, total)| (*total, ordinal + 1));
        for (place, (ordinal, number)) in (1..).zip(self.numbers.range(from..)) {
            total += number;
            if place % Self::STEP == 0 {
                self.notes.push((*ordinal, total));
            }
        }
        self.total = Some(total);
        total
    }

    fn forget_from(&mut self, ordinal: u64) {
        self.total = None;
        self.notes.truncate(self.notes.partition_point(|(noted, _)| *noted < ordinal));
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_the_sum_of_all_in_order(first in 0..1500_u32, steps in vec((0..1600_u64, prop::option::of(0.0..1.0)), 0..20)) {
            let mut sum = RunningSum::default();
            let mut model = BTreeMap::new();
            let first = (0..first).map(|n| (u64::from(n), Some(1.0 / (f64::from(n) + 3.0))));
            for (place, (ordinal, number)) in first.chain(steps).enumerate() {
                if let Some(number) = number {
                    sum.insert(ordinal, number);
                    model.insert(ordinal, number);
                } else {
                    sum.remove(ordinal);
                    model.remove(&ordinal);
                }
                if place % 100 == 0 || place > 1400 {
                    let expected = model.values().fold(0.0, |sum, number| sum + number);
                    prop_assert_eq!(sum.total().to_bits(), expected.to_bits());
                }
            }
            let expected = model.values().fold(0.0, |sum, number| sum + number);
            prop_assert_eq!(sum.total().to_bits(), expected.to_bits());
            prop_assert!(sum.notes.len() <= model.len() / RunningSum::STEP + 20);
        }
    }
}
