//! The benchmark harness for the comparisons of this package. Linux only.
//!
//! A [`Workload`] is a task that several [`Contender`]s perform. They run interleaved, round by round, in rotating order, after one
//! discarded round. Ratios are computed within a round and then summarised, so that a machine that is slow for a while slows down
//! both sides of a ratio. Every ratio has a confidence interval ([`Estimate`]). [`Bars`] are limits on the results; a bar is missed
//! only if the whole interval is on its wrong side.
//!
//! ```
//! use tidewire_bench::{Bars, Contender, Metric, Rounds, Workload, WorkloadResult};
//!
//! let sum = |name, numbers: u64| {
//!     Contender::new(name, move |meter| meter.measure(numbers, || (0..numbers).sum::<u64>()))
//! };
//! let workload = Workload {
//!     name: "sums",
//!     about: "Adds up numbers.".into(),
//!     operation: "number",
//!     metrics: &[Metric::Throughput, Metric::Allocations],
//!     contenders: vec![sum("few", 100), sum("many", 10_000)],
//! };
//! let bars = Bars::parse(
//!     r#"
//!     [[bar]]
//!     workload = "sums"
//!     contender = "many"
//!     metric = "allocations"
//!     at_most = 0.0
//!     why = "Adding numbers does not allocate."
//!     "#,
//! )?;
//! bars.check([&workload])?;
//! let result: WorkloadResult = workload.run(Rounds::default(), || ());
//! assert!(!bars.judge(&[result])[0].is_missed());
//! # Ok::<(), tidewire_bench::BarsError>(())
//! ```
#![allow(clippy::cast_precision_loss, reason = "counts and nanoseconds of a benchmark stay below 2^53")]

mod allocations;
mod bars;
mod changes;
mod cores;
mod cpu;
mod machine;
mod metric;
mod report;
mod sample;
mod stats;
mod table;
mod workload;

pub use allocations::{count_allocations, count_bytes};
pub use bars::{Bar, Bars, BarsError, Bound, Judgement, Verdict};
pub use changes::{ChangeReport, Changes, RoundPair, RunResults};
pub use cores::{available_cores, pin_process, run_on_core};
pub use cpu::CpuClock;
pub use machine::Machine;
pub use metric::Metric;
pub use report::Report;
pub use sample::{Meter, Sample};
pub use stats::Estimate;
pub use workload::{Contender, ContenderResult, LeftOut, MetricResult, Rounds, RoundsError, Workload, WorkloadResult};
