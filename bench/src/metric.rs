//! Metrics: names, column headings and units.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A metric of a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Metric {
    /// Operations per second.
    Throughput,
    /// Average wall-clock nanoseconds per operation.
    Wall,
    /// CPU nanoseconds of this process per operation, over all its threads.
    Cpu,
    /// CPU nanoseconds of the server process per operation.
    ServerCpu,
    /// Allocations per operation. Counted in a separate round, so it is one number without an interval.
    Allocations,
    /// User-space instructions of the server process per operation. Counted in a separate round.
    Instructions,
    /// Median latency in nanoseconds.
    LatencyP50,
    /// 99th percentile of the latency in nanoseconds.
    LatencyP99,
    /// Bytes of memory per operation. The operation is the object that uses the memory, such as a connection.
    Memory,
    /// CPU used while idle, in percent of one core.
    IdleCpu,
}

impl Metric {
    /// Returns whether a higher value is better. A ratio is always the contender's value over the baseline's, so if this is
    /// false, a ratio below 1 is better.
    pub fn higher_is_better(self) -> bool {
        self == Self::Throughput
    }

    /// Returns whether the metric is counted in a separate round, because counting disturbs the clocks.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Self::Allocations | Self::Instructions)
    }

    /// Returns the heading of the column.
    pub(crate) fn heading(self, operation: &str) -> String {
        match self {
            Self::Throughput => format!("{operation}s per second"),
            Self::Wall => format!("time per {operation}"),
            Self::Cpu => format!("CPU per {operation}"),
            Self::ServerCpu => format!("server CPU per {operation}"),
            Self::Allocations => format!("allocations per {operation}"),
            Self::Instructions => format!("instructions per {operation}"),
            Self::LatencyP50 => "p50".into(),
            Self::LatencyP99 => "p99".into(),
            Self::Memory => format!("memory per {operation}"),
            Self::IdleCpu => "idle CPU".into(),
        }
    }

    /// Formats a value with a readable unit: `1.85 M/s`, `412 ns`.
    pub(crate) fn format_value(self, value: f64) -> String {
        match self {
            Self::Throughput => scaled(value, 1000.0, &["/s", "k/s", "M/s", "G/s"]),
            Self::Wall | Self::Cpu | Self::ServerCpu | Self::LatencyP50 | Self::LatencyP99 => {
                scaled(value, 1000.0, &["ns", "µs", "ms", "s"])
            }
            Self::Allocations => format!("{value:.2}"),
            Self::Instructions => format!("{value:.0}"),
            Self::Memory => scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB"]),
            Self::IdleCpu => format!("{value:.2} %"),
        }
    }
}

impl fmt::Display for Metric {
    /// Writes the name as used by bars and JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Formats with three significant digits, or with all digits before the decimal point.
pub(crate) fn three_digits(value: f64) -> String {
    let decimals = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    // 999.5 would be rounded to 1000.
    while value >= step - 0.5 {
        let Some(next) = units.next() else { break };
        value /= step;
        unit = next;
    }
    format!("{} {unit}", three_digits(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_printed_with_readable_units() {
        for (metric, value, printed) in [
            (Metric::Throughput, 1_850_000.0, "1.85 M/s"),
            (Metric::Throughput, 999_700.0, "1.00 M/s"),
            (Metric::Throughput, 12.34, "12.3 /s"),
            (Metric::Wall, 4.1e9, "4.10 s"),
            (Metric::Cpu, 412.3, "412 ns"),
            (Metric::Cpu, 99.97, "100 ns"),
            (Metric::ServerCpu, 0.0, "0.00 ns"),
            (Metric::LatencyP50, 12_340.0, "12.3 µs"),
            (Metric::LatencyP99, 7.2e12, "7200 s"),
            (Metric::Allocations, 0.0, "0.00"),
            (Metric::Instructions, 8123.4, "8123"),
            (Metric::Memory, 1434.0, "1.40 KiB"),
            (Metric::IdleCpu, 0.5, "0.50 %"),
        ] {
            assert_eq!(metric.format_value(value), printed);
        }
    }

    #[test]
    fn name_and_heading_of_a_metric() {
        assert_eq!(Metric::LatencyP99.to_string(), "latency-p99");
        assert_eq!(Metric::ServerCpu.heading("ping"), "server CPU per ping");
    }
}
