//! Request counts and latency histograms per operation.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::Code;
use crate::ops::table::{OPERATIONS, OperationId};

/// Upper bounds of the latency histogram, in microseconds. Reads take a few microseconds and durable writes a few hundred. Above ten
/// seconds a request is close to the default timeout.
const LATENCY_BOUNDS_MICROS: [u64; 15] =
    [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 25_000, 100_000, 500_000, 2_500_000, 10_000_000];

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Ok,
    Failed(Code),
    /// The connection was closed before the request was done.
    Abandoned,
}

impl RequestOutcome {
    const COUNT: usize = Code::ALL.len() + 2;

    fn all() -> impl Iterator<Item = Self> {
        let codes = Code::ALL.iter().map(|code| Self::Failed(*code));
        std::iter::once(Self::Ok).chain(codes).chain([Self::Abandoned])
    }

    fn index(self) -> usize {
        match self {
            Self::Ok => 0,
            Self::Failed(code) => code as usize + 1,
            Self::Abandoned => Self::COUNT - 1,
        }
    }

    /// Returns the value of the metric label `outcome`.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed(code) => code.as_str(),
            Self::Abandoned => "abandoned",
        }
    }
}

/// The metrics of all operations.
#[derive(Debug)]
pub(crate) struct OperationMetrics {
    /// One entry per operation, and a last one for unknown operations.
    by_operation: Box<[OperationMetric]>,
}

#[derive(Debug, Default)]
struct OperationMetric {
    /// Requests by outcome. Successful requests are not counted here; their number is the difference to all requests.
    outcomes: [AtomicU64; RequestOutcome::COUNT],
    /// Requests by latency, not cumulative. The last bucket has no upper bound.
    latency: [AtomicU64; LATENCY_BOUNDS_MICROS.len() + 1],
    micros: AtomicU64,
}

impl OperationMetric {
    fn requests(&self) -> u64 {
        sum(&self.latency)
    }

    fn count(&self, outcome: RequestOutcome) -> u64 {
        match outcome {
            // A concurrently recorded request may be in only one of the two counters.
            RequestOutcome::Ok => self.requests().saturating_sub(sum(&self.outcomes)),
            outcome => self.outcomes[outcome.index()].load(Relaxed),
        }
    }
}

impl Default for OperationMetrics {
    fn default() -> Self {
        Self { by_operation: (0..=OPERATIONS.len()).map(|_| OperationMetric::default()).collect() }
    }
}

impl OperationMetrics {
    pub(crate) fn record(&self, operation: Option<OperationId>, outcome: RequestOutcome, elapsed: Duration) {
        let metric = &self.by_operation[operation.map_or(OPERATIONS.len(), OperationId::index)];
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        if outcome != RequestOutcome::Ok {
            metric.outcomes[outcome.index()].fetch_add(1, Relaxed);
        }
        metric.latency[LATENCY_BOUNDS_MICROS.partition_point(|bound| *bound < micros)].fetch_add(1, Relaxed);
        metric.micros.fetch_add(micros, Relaxed);
    }

    /// Returns the number of requests that have ended.
    pub(crate) fn requests(&self) -> u64 {
        self.by_operation.iter().map(OperationMetric::requests).sum()
    }

    /// Returns the number of requests that were answered with an error.
    pub(crate) fn failed(&self) -> u64 {
        let errors = 1..RequestOutcome::COUNT - 1;
        self.by_operation.iter().map(|metric| sum(&metric.outcomes[errors.clone()])).sum()
    }

    /// Appends the metrics in the Prometheus text format. Operations without requests are omitted.
    pub(super) fn append(&self, out: &mut String) {
        let used: Vec<(&str, &OperationMetric)> = self
            .by_operation
            .iter()
            .enumerate()
            .map(|(index, metric)| (OPERATIONS.get(index).map_or("unknown", |operation| operation.name), metric))
            .filter(|(_, metric)| metric.requests() > 0)
            .collect();
        let name = "tidewire_operation_requests_total";
        let _ =
            write!(out, "# HELP {name} Requests that have ended, by operation and outcome\n# TYPE {name} counter\n");
        for (operation, metric) in &used {
            for outcome in RequestOutcome::all() {
                let count = metric.count(outcome);
                if count > 0 {
                    let outcome = outcome.label();
                    let _ = writeln!(out, "{name}{{operation=\"{operation}\",outcome=\"{outcome}\"}} {count}");
                }
            }
        }
        let name = "tidewire_operation_duration_seconds";
        let _ = write!(out, "# HELP {name} Request latency, by operation\n# TYPE {name} histogram\n");
        for (operation, metric) in &used {
            let mut count = 0;
            for (bucket, bound) in metric.latency.iter().zip(LATENCY_BOUNDS_MICROS.iter().map(Some).chain([None])) {
                count += bucket.load(Relaxed);
                let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| seconds(*bound));
                let _ = writeln!(out, "{name}_bucket{{operation=\"{operation}\",le=\"{bound}\"}} {count}");
            }
            let total = seconds(metric.micros.load(Relaxed));
            let _ = writeln!(out, "{name}_sum{{operation=\"{operation}\"}} {total}");
            let _ = writeln!(out, "{name}_count{{operation=\"{operation}\"}} {count}");
        }
    }
}

fn sum(counters: &[AtomicU64]) -> u64 {
    counters.iter().map(|counter| counter.load(Relaxed)).sum()
}

/// Formats microseconds as seconds, without trailing zeros.
fn seconds(micros: u64) -> String {
    let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_has_its_own_index() {
        let indexes: Vec<usize> = RequestOutcome::all().map(RequestOutcome::index).collect();
        assert_eq!(indexes, (0..RequestOutcome::COUNT).collect::<Vec<_>>());
    }

    #[test]
    fn requests_are_counted_by_operation_outcome_and_latency() {
        let metrics = OperationMetrics::default();
        let get = OperationId::named("store.get");
        metrics.record(get, RequestOutcome::Ok, Duration::from_micros(5));
        metrics.record(get, RequestOutcome::Ok, Duration::from_micros(6));
        metrics.record(get, RequestOutcome::Failed(Code::BucketNotDefined), Duration::from_secs(11));
        metrics.record(None, RequestOutcome::Failed(Code::UnknownOperation), Duration::ZERO);
        metrics.record(get, RequestOutcome::Abandoned, Duration::from_millis(1));
        assert_eq!((metrics.requests(), metrics.failed()), (5, 2));
        let mut page = String::new();
        metrics.append(&mut page);
        for line in [
            "tidewire_operation_requests_total{operation=\"store.get\",outcome=\"ok\"} 2",
            "tidewire_operation_requests_total{operation=\"store.get\",outcome=\"BUCKET_NOT_DEFINED\"} 1",
            "tidewire_operation_requests_total{operation=\"store.get\",outcome=\"abandoned\"} 1",
            "tidewire_operation_requests_total{operation=\"unknown\",outcome=\"UNKNOWN_OPERATION\"} 1",
            "tidewire_operation_duration_seconds_bucket{operation=\"store.get\",le=\"0.000005\"} 1",
            "tidewire_operation_duration_seconds_bucket{operation=\"store.get\",le=\"0.00001\"} 2",
            "tidewire_operation_duration_seconds_bucket{operation=\"store.get\",le=\"10\"} 3",
            "tidewire_operation_duration_seconds_bucket{operation=\"store.get\",le=\"+Inf\"} 4",
            "tidewire_operation_duration_seconds_sum{operation=\"store.get\"} 11.001011",
            "tidewire_operation_duration_seconds_count{operation=\"store.get\"} 4",
        ] {
            assert!(page.lines().any(|known| known == line), "{line}\n{page}");
        }
        assert!(!page.contains("store.insert"));
    }
}
