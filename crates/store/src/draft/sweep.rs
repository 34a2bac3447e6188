//! Deletion of expired records, in batches.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bucket::Ordinal;
use crate::{Draft, Row};

/// A sweep in progress. It examines each expired record once, including those that cannot be deleted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sweep {
    /// The buckets that still have records to examine.
    remaining: VecDeque<Arc<str>>,
    /// The last examined record of the first bucket.
    after: Option<(u64, Ordinal)>,
}

impl Sweep {
    pub(crate) fn is_done(&self) -> bool {
        self.remaining.is_empty()
    }
}

impl Draft {
    /// Deletes at most `limit` expired records. Returns their number. A record stays while a reference with `onDelete: restrict` refers
    /// to it.
    pub fn sweep(&mut self, limit: usize) -> usize {
        let mut sweep = self.begin_sweep();
        let mut swept = 0;
        while !sweep.is_done() && swept < limit {
            swept += self.sweep_batch(&mut sweep, limit - swept);
        }
        swept
    }

    /// Begins a sweep of all expired records.
    pub(crate) fn begin_sweep(&self) -> Sweep {
        Sweep { remaining: self.state.expired(self.now).cloned().collect(), after: None }
    }

    /// Continues a sweep: examines at most `count` records and deletes those that can be deleted. Returns the number deleted.
    pub(crate) fn sweep_batch(&mut self, sweep: &mut Sweep, count: usize) -> usize {
        let (mut examined, mut swept) = (0, 0);
        while let Some(name) = sweep.remaining.front().cloned() {
            let bucket = self.state.any_bucket(&name).map(|(_, bucket)| bucket);
            let expired: Vec<((u64, Ordinal), Row)> = bucket
                .into_iter()
                .flat_map(|bucket| bucket.expired_after(sweep.after, self.now))
                .map(|(position, row)| (position, row.clone()))
                .take(count - examined)
                .collect();
            examined += expired.len();
            for (position, row) in expired {
                sweep.after = Some(position);
                swept += usize::from(self.atomically(|draft| draft.delete_row(&name, row)).is_ok());
            }
            if examined == count {
                break;
            }
            sweep.remaining.pop_front();
            sweep.after = None;
        }
        swept
    }
}
