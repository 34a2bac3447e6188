//! Runs contenders side by side: one discarded round, then measured rounds in rotating order, then one round that counts
//! allocations or instructions if a metric needs it.
//!
//! The rotation gives every contender each position in a round about equally often, so none is always first after a pause or last
//! before one. Neighbours mostly stay neighbours.
//!
//! Ratios are paired: all contenders run in every round, and a ratio is taken within the round, so the drift of a shared machine
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
    /// What bars and `--only` call it; no other workload has it.
    pub name: &'static str,
    /// What is done and how, in sentences.
    pub about: String,
    /// What is counted, in the singular: "message".
    pub operation: &'static str,
    /// What is measured. Ratios are printed of the first, and of every other one they are in the JSON.
    pub metrics: &'static [Metric],
    /// Who takes part. The first is the baseline of the ratios.
    pub contenders: Vec<Contender>,
}

/// One way to do the task of a workload.
pub struct Contender {
    name: &'static str,
    needs: Option<Need>,
    round: Box<dyn FnMut(Meter) -> Sample>,
}

/// What has to be installed for a contender.
enum Need {
    /// A program on the `PATH`.
    Program(&'static str),
    /// What people call it, and a file that is there if it is.
    File(&'static str, PathBuf),
}

/// The number of rounds that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds(usize);

/// Why a number of rounds is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoundsError {
    /// Not a number at all.
    #[error("the number of rounds is a whole number")]
    NotANumber(#[from] ParseIntError),
    /// An interval over fewer rounds would be an accident, and more of them only take time.
    #[error("{0} rounds: a median with an honest interval takes at least {min} rounds, and at most {max} are run", min = Rounds::MIN, max = Rounds::MAX)]
    OutOfRange(usize),
}

/// The result of a workload.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub(crate) workload: &'static str,
    pub(crate) about: String,
    pub(crate) operation: &'static str,
    pub(crate) metrics: &'static [Metric],
    pub(crate) baseline: &'static str,
    pub(crate) standings: Vec<Standing>,
    pub(crate) left_out: Vec<LeftOut>,
}

/// The result of one contender.
#[derive(Clone, Debug, Serialize)]
pub struct Standing {
    pub(crate) contender: &'static str,
    pub(crate) measured: BTreeMap<Metric, Measured>,
}

/// One metric of one contender.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub(crate) rounds: Vec<f64>,
    pub(crate) value: Estimate,
    /// Against the baseline; absent if that was left out.
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
    /// `round` does one round and says what it took, mostly by [`Meter::measure`]. It sets up what it needs outside of what
    /// it measures, and not before it is called, because a contender is also made when nothing is run.
    pub fn new(name: &'static str, round: impl FnMut(Meter) -> Sample + 'static) -> Self {
        Self { name, needs: None, round: Box::new(round) }
    }

    /// Leaves the contender out where `program` is not on the `PATH`.
    #[must_use]
    pub fn needing(self, program: &'static str) -> Self {
        Self { needs: Some(Need::Program(program)), ..self }
    }

    /// Leaves the contender out where there is no such file, which belongs to what people call `name`.
    #[must_use]
    pub fn needing_file(self, name: &'static str, file: PathBuf) -> Self {
        Self { needs: Some(Need::File(name, file)), ..self }
    }

    /// What bars call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs a round and adds these metrics of it to `values`.
    fn take(&mut self, meter: Meter, metrics: &[Metric], values: &mut BTreeMap<Metric, Vec<f64>>) {
        let sample = (self.round)(meter);
        for &metric in metrics {
            let value = sample.value(metric).unwrap_or_else(|| panic!("{} did not measure {metric}", self.name));
            values.entry(metric).or_default().push(value);
        }
    }

    fn missing(&self) -> Option<&'static str> {
        let on_the_path = |program: &str| {
            env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
        };
        match self.needs.as_ref()? {
            Need::Program(program) => (!on_the_path(program)).then_some(program),
            Need::File(name, file) => (!file.is_file()).then_some(name),
        }
    }
}

impl Workload {
    /// How often [`run`](Self::run) reports a step at most.
    pub fn steps(&self, rounds: Rounds) -> usize {
        let (counted, timed) = self.kinds();
        let each = if timed.is_empty() { 0 } else { 1 + rounds.0 };
        self.contenders.len() * (each + usize::from(!counted.is_empty()))
    }

    /// The metrics that are counted, and those that are timed.
    fn kinds(&self) -> (Vec<Metric>, Vec<Metric>) {
        self.metrics.iter().partition(|metric| metric.is_counted())
    }

    /// Runs it; `step` is called after each round of each contender.
    ///
    /// # Panics
    ///
    /// If a sample lacks one of [`metrics`](Self::metrics), or a contender panics.
    pub fn run(self, rounds: Rounds, mut step: impl FnMut()) -> Outcome {
        let (counted, timed) = self.kinds();
        let baseline = self.contenders.first().map_or("", Contender::name);
        let mut left_out = Vec::new();
        let mut present = Vec::new();
        for contender in self.contenders {
            match contender.missing() {
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
                for turn in 0..present.len() {
                    let next = (round + turn) % present.len();
                    let (contender, values) = &mut present[next];
                    contender.take(Meter::CLOCKS, &timed, values);
                    step();
                }
            }
        }
        if !counted.is_empty() {
            for (contender, values) in &mut present {
                contender.take(Meter::COUNTS, &counted, values);
                step();
            }
        }

        let base = present.iter().find(|(contender, _)| contender.name == baseline).map(|(_, values)| values.clone());
        let measured = |(metric, rounds): (Metric, Vec<f64>)| {
            let ratio = base.as_ref().map(|base| Estimate::of_ratio(&rounds, &base[&metric]));
            (metric, Measured { value: Estimate::of(&rounds), ratio, rounds })
        };
        let standings = present
            .into_iter()
            .map(|(contender, values)| Standing {
                contender: contender.name,
                measured: values.into_iter().map(measured).collect(),
            })
            .collect();
        let Self { name: workload, about, operation, metrics, .. } = self;
        Outcome { workload, about, operation, metrics, baseline, standings, left_out }
    }
}

impl Outcome {
    /// Whether a contender of this name was selected, including one that was left out because a program is not installed.
    pub(crate) fn has(&self, contender: &str) -> bool {
        self.standings.iter().any(|standing| standing.contender == contender)
            || self.left_out.iter().any(|left_out| left_out.contender == contender)
    }

    /// A metric of a contender, or its ratio `against` another one. None if either was left out.
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
    /// Six would reach 95 %, but have no middle one: the median would be a number that no round measured.
    const MIN: usize = 7;
    const MAX: usize = 1000;

    /// A single round. It has no interval: the caller pairs it with rounds of other runs ([`Changes`](crate::Changes)).
    pub const ONE: Self = Self(1);

    /// Fails unless the number of rounds is between 7 and 1000.
    pub fn new(rounds: usize) -> Result<Self, RoundsError> {
        if (Self::MIN..=Self::MAX).contains(&rounds) { Ok(Self(rounds)) } else { Err(RoundsError::OutOfRange(rounds)) }
    }

    /// The number.
    pub fn count(self) -> usize {
        self.0
    }
}

impl Default for Rounds {
    /// Nine: the fewest whose interval forgives one bad round on each side.
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
        Workload { name: "test", about: String::new(), operation: "turn", metrics, contenders }
    }

    #[test]
    fn contenders_take_turns_in_an_order_that_rotates() {
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
        let outcome = test.run(Rounds(7), || {
            steps += 1;
            if steps % 3 == 0 {
                log.borrow_mut().push(' ');
            }
        });

        // One round to warm up, seven measured, one counted.
        assert_eq!(log.borrow().trim_end(), "abc abc bca cab abc bca cab abc abc");
        assert_eq!(steps, expected_steps);
        for standing in &outcome.standings {
            assert_eq!(standing.measured[&Metric::Throughput].rounds, [10.0; 7]);
            assert_eq!(standing.measured[&Metric::Allocations].rounds.len(), 1);
        }
    }

    #[test]
    fn what_is_only_counted_runs_once() {
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
        let outcome = test.run(Rounds::default(), || ());
        let many = &outcome.standings[1].measured[&Metric::Instructions];
        assert_eq!(many.rounds, [50.0]);
        assert_eq!(many.ratio, Some(Estimate { median: 5.0, low: 5.0, high: 5.0 }));
    }

    #[test]
    fn ratios_are_paired_and_against_the_first() {
        let growing = |name, factor: f64| {
            let mut round = 0.0;
            Contender::new(name, move |_| {
                round += 1.0;
                sample().with(Metric::Memory, factor * round)
            })
        };
        let test = workload(&[Metric::Memory], vec![growing("one", 1.0), growing("three", 3.0)]);
        let outcome = test.run(Rounds(9), || ());

        let three = &outcome.standings[1].measured[&Metric::Memory];
        assert_eq!(three.rounds[..2], [6.0, 9.0], "the first round is not measured");
        assert_eq!(three.value, Estimate { median: 18.0, low: 9.0, high: 27.0 });
        assert_eq!(three.ratio, Some(Estimate { median: 3.0, low: 3.0, high: 3.0 }));
        let third = outcome.estimate("one", Some("three"), Metric::Memory).unwrap();
        assert!((third.median - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_contender_whose_program_is_absent_is_left_out() {
        let absent = Contender::new("absent", |_| panic!("must not run")).needing("no program has this name");
        let present = Contender::new("present", |_| sample()).needing("sh");
        let outcome = workload(&[Metric::Cpu], vec![absent, present]).run(Rounds::default(), || ());

        assert_eq!(outcome.left_out[0].needs, "no program has this name");
        assert!(outcome.estimate("absent", None, Metric::Cpu).is_none());
        assert!(outcome.estimate("present", Some("absent"), Metric::Cpu).is_none());
        assert!(outcome.estimate("present", None, Metric::Cpu).is_some());
        assert_eq!(outcome.standings[0].measured[&Metric::Cpu].ratio, None);
    }

    #[test]
    fn a_contender_whose_file_is_absent_is_left_out() {
        let missing = PathBuf::from("/no file has this name");
        let absent = Contender::new("absent", |_| panic!("must not run")).needing_file("the package", missing);
        let there = env::current_exe().unwrap();
        let present = Contender::new("present", |_| sample()).needing_file("this program", there);
        let outcome = workload(&[Metric::Cpu], vec![absent, present]).run(Rounds::default(), || ());

        assert_eq!(outcome.left_out.len(), 1);
        assert_eq!(outcome.left_out[0].needs, "the package");
        assert_eq!(outcome.standings[0].contender, "present");
    }

    #[test]
    fn rounds_have_limits() {
        assert_eq!("7".parse::<Rounds>().unwrap().count(), 7);
        for refused in ["6", "1001"] {
            assert!(matches!(refused.parse::<Rounds>(), Err(RoundsError::OutOfRange(_))));
        }
        assert!(matches!("many".parse::<Rounds>(), Err(RoundsError::NotANumber(_))));
    }
}
