//! Samples: the measurements of one contender in one round.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::{CpuClock, Metric, count_allocations};

/// The measurements of one contender in one round.
#[derive(Clone, Debug)]
pub struct Sample {
    operations: u64,
    values: BTreeMap<Metric, f64>,
}

impl Sample {
    /// Creates a sample with [`Metric::Throughput`], [`Metric::Wall`] and [`Metric::Cpu`].
    pub fn new(operations: u64, wall: Duration, cpu: Duration) -> Self {
        let values = BTreeMap::from([(Metric::Throughput, operations as f64 / wall.as_secs_f64())]);
        Self { operations, values }.with_time(Metric::Wall, wall).with_time(Metric::Cpu, cpu)
    }

    /// Adds a value, in the unit that [`Metric`] documents.
    #[must_use]
    pub fn with(mut self, metric: Metric, value: f64) -> Self {
        self.values.insert(metric, value);
        self
    }

    /// Adds a metric that is a time per operation, given the time of all operations together.
    #[must_use]
    pub fn with_time(self, metric: Metric, total: Duration) -> Self {
        let per_operation = total.as_nanos() as f64 / self.operations as f64;
        self.with(metric, per_operation)
    }

    /// Adds a metric that is an amount per operation, given the amount of all operations together.
    #[must_use]
    pub fn with_amount(self, metric: Metric, total: u64) -> Self {
        let per_operation = total as f64 / self.operations as f64;
        self.with(metric, per_operation)
    }

    /// Adds [`Metric::LatencyP50`] and [`Metric::LatencyP99`], given the latency of each operation.
    ///
    /// # Panics
    ///
    /// If `latencies` is empty.
    #[must_use]
    pub fn with_latencies(self, mut latencies: Vec<Duration>) -> Self {
        latencies.sort_unstable();
        let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100].as_secs_f64() * 1e9;
        self.with(Metric::LatencyP50, at(50)).with(Metric::LatencyP99, at(99))
    }

    pub(crate) fn value(&self, metric: Metric) -> Option<f64> {
        self.values.get(&metric).copied()
    }
}

/// Measures the work of a round, without its setup. Passed to each round.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    /// Counting disturbs the clocks, so allocations are counted in a separate round without clocks.
    pub(crate) counts_allocations: bool,
}

impl Meter {
    pub(crate) const CLOCKS: Self = Self { counts_allocations: false };
    pub(crate) const COUNTS: Self = Self { counts_allocations: true };

    /// Runs `work` and measures its wall-clock time and the CPU time of this process. `operations` is the number of operations that
    /// `work` performs. The result of `work` is dropped after the clocks have been read.
    pub fn measure<T>(self, operations: u64, work: impl FnOnce() -> T) -> Sample {
        if self.counts_allocations {
            let (_, allocations) = count_allocations(work);
            let sample = Sample { operations, values: BTreeMap::new() };
            return sample.with_amount(Metric::Allocations, allocations);
        }
        let cpu = CpuClock::of_this_process();
        let (started, spent) = (Instant::now(), cpu.now());
        let _result = work();
        let (wall, spent) = (started.elapsed(), cpu.now().saturating_sub(spent));
        Sample::new(operations, wall, spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_per_second_and_per_operation() {
        let sample = Sample::new(1000, Duration::from_millis(500), Duration::from_micros(250))
            .with_time(Metric::ServerCpu, Duration::from_micros(20))
            .with_amount(Metric::Memory, 1_400_000);
        assert_eq!(sample.value(Metric::Throughput), Some(2000.0));
        assert_eq!(sample.value(Metric::Wall), Some(500_000.0));
        assert_eq!(sample.value(Metric::Cpu), Some(250.0));
        assert_eq!(sample.value(Metric::ServerCpu), Some(20.0));
        assert_eq!(sample.value(Metric::Memory), Some(1400.0));
        assert_eq!(sample.value(Metric::IdleCpu), None);
    }

    #[test]
    fn latencies_may_be_unsorted() {
        let sample = Sample::new(101, Duration::from_secs(1), Duration::from_secs(1));
        let sample = sample.with_latencies((0..=100).rev().map(Duration::from_micros).collect());
        assert_eq!(sample.value(Metric::LatencyP50).map(f64::round), Some(50_000.0));
        assert_eq!(sample.value(Metric::LatencyP99).map(f64::round), Some(99_000.0));
    }
}
