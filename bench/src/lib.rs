//! The harness for the comparisons of this package. Linux only.
//!
//! A [`Workload`] sets [`Contender`]s the same task. They run interleaved, round by round, in rotating order, after one discarded
//! round. Ratios are taken within a round and then summarized, so a machine that is slow for a while is slow for both sides of a
//! ratio; every ratio has a confidence interval ([`Estimate`]). [`Bars`] are the limits that must hold; a bar is missed only if
//! its whole interval is on the wrong side.
//!
//! ```
//! use tidewire_bench::{Bars, Contender, Metric, Outcome, Rounds, Workload};
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
//!     why = "Adding needs no memory."
//!     "#,
//! )?;
//! bars.check([&workload])?;
//! let outcome: Outcome = workload.run(Rounds::default(), || ());
//! assert!(!bars.judge(&[outcome])[0].missed());
//! # Ok::<(), tidewire_bench::BarsError>(())
//! ```
#![allow(clippy::cast_precision_loss, reason = "counts and nanoseconds of a benchmark stay below 2^53")]

mod allocations;
mod bars;
mod changes;
mod contest;
mod cores;
mod cpu;
mod machine;
mod metric;
mod report;
mod sample;
mod stats;
mod table;

pub use allocations::{count_allocations, count_bytes};
pub use bars::{Bar, Bars, BarsError, Bound, Judgement, Verdict};
pub use changes::{ChangeReport, Changes, Figures, RoundPair};
pub use contest::{Contender, LeftOut, Measured, Outcome, Rounds, RoundsError, Standing, Workload};
pub use cores::{available_cores, on_core, pin_process};
pub use cpu::CpuClock;
pub use machine::Machine;
pub use metric::Metric;
pub use report::Report;
pub use sample::{Meter, Sample};
pub use stats::Estimate;
