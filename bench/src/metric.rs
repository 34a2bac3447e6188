//! Metrics: their names in files, headings and units.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One thing measured of a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Metric {
    /// Operations a second.
    Throughput,
    /// Nanoseconds from the beginning to the end of an operation, on average.
    Wall,
    /// Nanoseconds of CPU that this process spent per operation, on all its threads.
    Cpu,
    /// The same of the process that does the work, where that is another one.
    ServerCpu,
    /// Allocations per operation. Counted in a round of its own, so it is one number without an interval.
    Allocations,
    /// Instructions per operation that the process which does the work executes itself, without the kernel. Counted like
    /// allocations.
    Instructions,
    /// Nanoseconds that half of the operations took at most.
    LatencyP50,
    /// Nanoseconds that 99 of 100 operations took at most.
    LatencyP99,
    /// Bytes of memory per operation; the operation is what is held, such as a connection.
    Memory,
    /// CPU used while nothing happens, in percent of one core.
    IdleCpu,
}

impl Metric {
    /// Whether more of it is better. A ratio is always the contender's value over the baseline's, so where this is false a
    /// ratio below 1 is the better one.
    pub fn higher_is_better(self) -> bool {
        self == Self::Throughput
    }

    /// Whether it is counted in a round of its own, because counting disturbs the clocks.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Self::Allocations | Self::Instructions)
    }

    /// The heading of its column.
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

    /// The value in the unit a person would choose: `1.85 M/s`, `412 ns`.
    pub(crate) fn human(self, value: f64) -> String {
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
    /// The name that bars and JSON use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Three significant digits, or all digits before the point.
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
    // 999.5 would be printed as 1000.
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
    fn values_are_printed_in_the_unit_a_person_would_choose() {
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
            assert_eq!(metric.human(value), printed);
        }
    }

    #[test]
    fn names_are_those_of_the_files() {
        assert_eq!(Metric::LatencyP99.to_string(), "latency-p99");
        assert_eq!(Metric::ServerCpu.heading("ping"), "server CPU per ping");
    }
}
