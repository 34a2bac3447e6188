//! The budget of a client: requests and bytes in flight.
//!
//! A request that has timed out keeps its budget until its reply has come. Otherwise callers that give up could send without
//! bound to a server that does not answer.

use std::ops::AddAssign;

/// The room that a request takes, from its submission until its replies have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Weight {
    pub(crate) requests: usize,
    pub(crate) bytes: usize,
}

/// The room that there is.
#[derive(Debug)]
pub(super) struct Budget {
    max: Weight,
    used: Weight,
    /// How many wait for room. Whoever comes later waits behind them.
    pub(super) waiting: usize,
}

impl Budget {
    pub(super) fn new(requests: usize, bytes: usize) -> Self {
        let max = Weight { requests: requests.max(1), bytes: bytes.max(1) };
        Self { max, used: Weight::default(), waiting: 0 }
    }

    /// Takes room for a request, if there is any. One that is larger than all the room has it to itself.
    pub(super) fn take(&mut self, requests: usize, bytes: usize) -> Option<Weight> {
        let weight = Weight { requests: requests.min(self.max.requests), bytes: bytes.min(self.max.bytes) };
        let fits = weight.requests <= self.max.requests - self.used.requests
            && weight.bytes <= self.max.bytes - self.used.bytes;
        fits.then(|| {
            self.used += weight;
            weight
        })
    }

    /// Gives room back. Returns whether somebody waits for some.
    pub(super) fn give_back(&mut self, weight: Weight) -> bool {
        self.used.requests -= weight.requests;
        self.used.bytes -= weight.bytes;
        self.waiting > 0 && weight != Weight::default()
    }

    /// What is taken.
    pub(super) fn used(&self) -> Weight {
        self.used
    }
}

impl AddAssign for Weight {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_larger_than_all_has_it_to_itself() {
        let mut budget = Budget::new(4, 10);
        let large = budget.take(100, 5).expect("room");
        assert_eq!((large, budget.take(1, 1)), (Weight { requests: 4, bytes: 5 }, None));
        budget.give_back(large);
        let small = budget.take(1, 1).expect("room");
        assert_eq!(budget.take(1, 1000), None);
        budget.give_back(small);
        assert_eq!(budget.take(1, 1000), Some(Weight { requests: 1, bytes: 10 }));
    }

    #[test]
    fn there_is_room_for_one_at_least() {
        assert!(Budget::new(0, 0).take(1, 1).is_some());
    }
}
