//! Deletion of expired records, in parts.

use std::collections::VecDeque;

use crate::bucket::Ordinal;
use crate::{Draft, Row};

/// A sweep that is under way. Records that cannot be deleted are looked at once, not again and again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sweep {
    /// The buckets that it has not done yet.
    left: VecDeque<String>,
    /// How far it has come in the first of them.
    after: Option<(u64, Ordinal)>,
}

impl Sweep {
    pub(crate) fn is_done(&self) -> bool {
        self.left.is_empty()
    }
}

impl Draft {
    /// Deletes what has expired, at most so many records. Those that something refers to stay until it is gone.
    pub fn sweep(&mut self, limit: usize) -> usize {
        let mut sweep = self.begin_sweep();
        let mut swept = 0;
        while !sweep.is_done() && swept < limit {
            swept += self.sweep_some(&mut sweep, limit - swept);
        }
        swept
    }

    /// A sweep of all that has expired by now.
    pub(crate) fn begin_sweep(&self) -> Sweep {
        let expired =
            self.state.all().filter(|(_, bucket)| bucket.next_expiry().is_some_and(|first| first <= self.now));
        Sweep { left: expired.map(|(name, _)| name.to_owned()).collect(), after: None }
    }

    /// Goes on with a sweep: looks at the next records, at most so many, and deletes those that it can. Returns how many.
    pub(crate) fn sweep_some(&mut self, sweep: &mut Sweep, count: usize) -> usize {
        let (mut looked, mut swept) = (0, 0);
        while let Some(name) = sweep.left.front().cloned() {
            let bucket = self.state.any(&name).map(|(_, bucket)| bucket);
            let expired: Vec<((u64, Ordinal), Row)> = bucket
                .into_iter()
                .flat_map(|bucket| bucket.expired_after(sweep.after, self.now))
                .map(|(place, row)| (place, row.clone()))
                .take(count - looked)
                .collect();
            looked += expired.len();
            for (place, row) in expired {
                sweep.after = Some(place);
                swept += usize::from(self.atomically(|draft| draft.delete_now(&name, row)).is_ok());
            }
            if looked == count {
                break;
            }
            sweep.left.pop_front();
            sweep.after = None;
        }
        swept
    }
}
