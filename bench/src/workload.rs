//! Runs contenders side by side: one discarded round, then measured rounds in rotating order, then one round that counts
//! allocations or instructions if a metric needs it.
//!
//! The rotation gives every contender each position in a round about equally often, so that the position does not favour one of
//! them.
//!
//! Ratios are paired: all contenders run in every round and a ratio is taken within the round, so that drift of a shared machine
//! cancels out.

use std::collections::BTreeMap;
use std::env;
use std::num::ParseIntError;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Serialize;

use crate::{Estimate, Meter, Metric, Sample};

/// The same task for several contenders.
pub struct Workload {
    /// A unique name, used by bars and `--only`.
    pub name: &'static str,
    /// A description of the task, in full sentences.
    pub about: String,
    /// The unit of work that is counted, in the singular: "message".
    pub operation: &'static str,
    /// The metrics to measure. The table shows the ratio of the first one; the JSON has the ratios of all.
    pub metrics: &'static [Metric],
    /// The implementations to compare. The first is the baseline of the ratios.
    pub contenders: Vec<Contender>,
}

/// One way to do the task of a workload.
pub struct Contender {
    name: &'static str,
    requirement: Option<Requirement>,
    round: Box<dyn FnMut(Meter) -> Sample>,
}

/// A program or file that a contender needs.
enum Requirement {
    /// A program on the `PATH`.
    Program(&'static str),
    /// A package, and a file that exists if it is installed.
    Package(&'static str, PathBuf),
}

/// The number of rounds that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds(usize);

/// Error of parsing a number of rounds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoundsError {
    /// The text is not a whole number.
    #[error("the number of rounds must be a whole number")]
    NotANumber(#[from] ParseIntError),
    /// The number is outside the supported range. Fewer rounds cannot give a 95 % interval.
    #[error("the number of rounds must be between {min} and {max}, got {0}", min = Rounds::MIN, max = Rounds::MAX)]
    OutOfRange(usize),
}

/// The result of a workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadResult {
    pub(crate) workload: &'static str,
    pub(crate) about: String,
    pub(crate) operation: &'static str,
    pub(crate) metrics: &'static [Metric],
    pub(crate) baseline: &'static str,
    pub(crate) standings: Vec<ContenderResult>,
    pub(crate) left_out: Vec<LeftOut>,
}

/// The measurements of one contender.
#[derive(Clone, Debug, Serialize)]
pub struct ContenderResult {
    pub(crate) contender: &'static str,
    pub(crate) measured: BTreeMap<Metric, MetricResult>,
}

/// The measurements of one metric of one contender.
#[derive(Clone, Debug, Serialize)]
pub struct MetricResult {
    pub(crate) rounds: Vec<f64>,
    pub(crate) value: Estimate,
    /// The ratio to the baseline. `None` if the baseline was left out.
    pub(crate) ratio: Option<Estimate>,
}

/// A contender that could not run.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    pub(crate) contender: &'static str,
    /// The program or package that is not installed.
    pub(crate) needs: &'static str,
}

impl Contender {
    /// Creates a contender. `round` runs one round and returns its measurements, usually from [`Meter::measure`].
    ///
    /// Expensive setup belongs in `round`, outside the measured part, because contenders are also created when they are not run.
    pub fn new(name: &'static str, round: impl FnMut(Meter) -> Sample + 'static) -> Self {
        Self { name, requirement: None, round: Box::new(round) }
    }

    /// Leaves the contender out if `program` is not on the `PATH`.
    #[must_use]
    pub fn requires_program(self, program: &'static str) -> Self {
        Self { requirement: Some(Requirement::Program(program)), ..self }
    }

    /// Leaves the contender out if `file` does not exist. `name` is the package that the file belongs to.
    #[must_use]
    pub fn requires_file(self, name: &'static str, file: PathBuf) -> Self {
        Self { requirement: Some(Requirement::Package(name, file)), ..self }
    }

    /// Returns the name, as used by bars.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs a round and appends its values of `metrics` to `values`.
    fn run_round(&mut self, meter: Meter, metrics: &[Metric], values: &mut BTreeMap<Metric, Vec<f64>>) {
        let sample = (self.round)(meter);
        for &metric in metrics {
            let value =
                sample.value(metric).unwrap_or_else(|| panic!("contender {} did not measure {metric}", self.name));
            values.entry(metric).or_default().push(value);
        }
    }

    /// Returns the name of the required program or package if it is not installed.
    fn missing_requirement(&self) -> Option<&'static str> {
        let is_on_path = |program: &str| {
            env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
        };
        match self.requirement.as_ref()? {
            Requirement::Program(program) => (!is_on_path(program)).then_some(program),
            Requirement::Package(name, file) => (!file.is_file()).then_some(name),
        }
    }
}

impl Workload {
    /// Returns the maximum number of times that [`run`](Self::run) calls `step`.
    pub fn steps(&self, rounds: Rounds) -> usize {
        let (counted, timed) = self.split_metrics();
        let timed_rounds = if timed.is_empty() { 0 } else { 1 + rounds.0 };
        self.contenders.len() * (timed_rounds + usize::from(!counted.is_empty()))
    }

    /// Returns the metrics that are counted, and those that are timed.
    fn split_metrics(&self) -> (Vec<Metric>, Vec<Metric>) {
        self.metrics.iter().partition(|metric| metric.is_counted())
    }

    /// Runs the workload. `step` is called after each round of each contender.
    ///
    /// # Panics
    ///
    /// If a sample lacks one of [`metrics`](Self::metrics), or a contender panics.
    pub fn run(self, rounds: Rounds, mut step: impl FnMut()) -> WorkloadResult {
        let (counted, timed) = self.split_metrics();
        let baseline = self.contenders.first().map_or("", Contender::name);
        let mut left_out = Vec::new();
        let mut present = Vec::new();
        for contender in self.contenders {
            match contender.missing_requirement() {
                Some(needs) => left_out.push(LeftOut { contender: contender.name, needs }),
                None => present.push((contender, BTreeMap::<Metric, Vec<f64>>::new())),
            }
        }

        if !timed.is_empty() {
            for (contender, _) in &mut present {
                (contender.round)(Meter::CLOCKS);
                step();
            }
            for round in 0..rounds.0 {
                for position in 0..present.len() {
                    let next = (round + position) % present.len();
                    let (contender, values) = &mut present[next];
                    contender.run_round(Meter::CLOCKS, &timed, values);
                    step();
                }
            }
        }
        if !counted.is_empty() {
            for (contender, values) in &mut present {
                contender.run_round(Meter::COUNTS, &counted, values);
                step();
            }
        }

        let base = present.iter().find(|(contender, _)| contender.name == baseline).map(|(_, values)| values.clone());
        let measured = |(metric, rounds): (Metric, Vec<f64>)| {
            let ratio = base.as_ref().map(|base| Estimate::of_ratio(&rounds, &base[&metric]));
            (metric, MetricResult { value: Estimate::of(&rounds), ratio, rounds })
        };
        let standings = present
            .into_iter()
            .map(|(contender, values)| ContenderResult {
                contender: contender.name,
                measured: values.into_iter().map(measured).collect(),
            })
            .collect();
        let Self { name: workload, about, operation, metrics, .. } = self;
        WorkloadResult { workload, about, operation, metrics, baseline, standings, left_out }
    }
}

impl WorkloadResult {
    /// Returns whether a contender of this name was selected, including one whose program is not installed.
    pub(crate) fn has(&self, contender: &str) -> bool {
        self.standings.iter().any(|standing| standing.contender == contender)
            || self.left_out.iter().any(|left_out| left_out.contender == contender)
    }

    /// Returns a metric of a contender, or its ratio to the contender `against`. `None` if either was left out.
    pub(crate) fn estimate(&self, contender: &str, against: Option<&str>, metric: Metric) -> Option<Estimate> {
        let rounds = |name: &str| {
            let standing = self.standings.iter().find(|standing| standing.contender == name)?;
            Some(&standing.measured.get(&metric)?.rounds)
        };
        let own = rounds(contender)?;
        Some(match against {
            Some(other) => Estimate::of_ratio(own, rounds(other)?),
            None => Estimate::of(own),
        })
    }
}

impl Rounds {
    /// Six rounds reach 95 % coverage too, but the median of an even number of rounds is not a measured value.
    const MIN: usize = 7;
    const MAX: usize = 1000;

    /// A single round, without an interval. The caller pairs it with rounds of other runs ([`Changes`](crate::Changes)).
    pub const ONE: Self = Self(1);

    /// Returns an error unless the number of rounds is between 7 and 1000.
    pub fn new(rounds: usize) -> Result<Self, RoundsError> {
        if (Self::MIN..=Self::MAX).contains(&rounds) { Ok(Self(rounds)) } else { Err(RoundsError::OutOfRange(rounds)) }
    }

    /// Returns the number of rounds.
    pub fn count(self) -> usize {
        self.0
    }
}

impl Default for Rounds {
    /// Nine rounds, the fewest whose interval ignores one outlier on each side.
    fn default() -> Self {
        Self(9)
    }
}

impl FromStr for Rounds {
    type Err = RoundsError;

    fn from_str(text: &str) -> Result<Self, RoundsError> {
        Self::new(text.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Duration;

    use super::*;

    fn sample() -> Sample {
        Sample::new(10, Duration::from_secs(1), Duration::from_secs(1))
    }

    fn workload(metrics: &'static [Metric], contenders: Vec<Contender>) -> Workload {
        Workload { name: "test", about: String::new(), operation: "operation", metrics, contenders }
    }

    #[test]
    fn order_of_contenders_rotates() {
        let log = Rc::new(RefCell::new(String::new()));
        let contender = |name: &'static str| {
            let log = log.clone();
            Contender::new(name, move |meter| {
                log.borrow_mut().push_str(name);
                if meter.counts_allocations { meter.measure(1, || ()) } else { sample() }
            })
        };
        let test =
            workload(&[Metric::Throughput, Metric::Allocations], vec![contender("a"), contender("b"), contender("c")]);
        let expected_steps = test.steps(Rounds(7));
        let mut steps = 0;
        let result = test.run(Rounds(7), || {
            steps += 1;
            if steps % 3 == 0 {
                log.borrow_mut().push(' ');
            }
        });

        // One round to warm up, seven measured, one counted.
        assert_eq!(log.borrow().trim_end(), "abc abc bca cab abc bca cab abc abc");
        assert_eq!(steps, expected_steps);
        for standing in &result.standings {
            assert_eq!(standing.measured[&Metric::Throughput].rounds, [10.0; 7]);
            assert_eq!(standing.measured[&Metric::Allocations].rounds.len(), 1);
        }
    }

    #[test]
    fn workload_without_timed_metrics_runs_once() {
        let contender = |name, instructions| {
            let mut rounds = 0;
            Contender::new(name, move |_| {
                rounds += 1;
                assert_eq!(rounds, 1);
                sample().with_amount(Metric::Instructions, instructions)
            })
        };
        let test = workload(&[Metric::Instructions], vec![contender("few", 100), contender("many", 500)]);
        assert_eq!(test.steps(Rounds::default()), 2);
        let result = test.run(Rounds::default(), || ());
        let many = &result.standings[1].measured[&Metric::Instructions];
        assert_eq!(many.rounds, [50.0]);
        assert_eq!(many.ratio, Some(Estimate { median: 5.0, low: 5.0, high: 5.0 }));
    }

    #[test]
    fn ratios_are_paired_within_rounds() {
        let growing = |name, factor: f64| {
            let mut round = 0.0;
            Contender::new(name, move |_| {
                round += 1.0;
                sample().with(Metric::Memory, factor * round)
            })
        };
        let test = workload(&[Metric::Memory], vec![growing("one", 1.0), growing("three", 3.0)]);
        let result = test.run(Rounds(9), || ());

        let three = &result.standings[1].measured[&Metric::Memory];
        assert_eq!(three.rounds[..2], [6.0, 9.0], "the first round is not measured");
        assert_eq!(three.value, Estimate { median: 18.0, low: 9.0, high: 27.0 });
        assert_eq!(three.ratio, Some(Estimate { median: 3.0, low: 3.0, high: 3.0 }));
        let third = result.estimate("one", Some("three"), Metric::Memory).unwrap();
        assert!((third.median - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn contender_is_left_out_if_program_is_missing() {
        let absent = Contender::new("absent", |_| panic!("must not run")).requires_program("no program has this name");
        let present = Contender::new("present", |_| sample()).requires_program("sh");
        let result = workload(&[Metric::Cpu], vec![absent, present]).run(Rounds::default(), || ());

        assert_eq!(result.left_out[0].needs, "no program has this name");
        assert!(result.estimate("absent", None, Metric::Cpu).is_none());
        assert!(result.estimate("present", Some("absent"), Metric::Cpu).is_none());
        assert!(result.estimate("present", None, Metric::Cpu).is_some());
        assert_eq!(result.standings[0].measured[&Metric::Cpu].ratio, None);
    }

    #[test]
    fn contender_is_left_out_if_file_is_missing() {
        let missing = PathBuf::from("/no file has this name");
        let absent = Contender::new("absent", |_| panic!("must not run")).requires_file("the package", missing);
        let existing = env::current_exe().unwrap();
        let present = Contender::new("present", |_| sample()).requires_file("this program", existing);
        let result = workload(&[Metric::Cpu], vec![absent, present]).run(Rounds::default(), || ());

        assert_eq!(result.left_out.len(), 1);
        assert_eq!(result.left_out[0].needs, "the package");
        assert_eq!(result.standings[0].contender, "present");
    }

    #[test]
    fn number_of_rounds_is_limited() {
        assert_eq!("7".parse::<Rounds>().unwrap().count(), 7);
        for text in ["6", "1001"] {
            assert!(matches!(text.parse::<Rounds>(), Err(RoundsError::OutOfRange(_))));
        }
        assert!(matches!("many".parse::<Rounds>(), Err(RoundsError::NotANumber(_))));
    }
}
