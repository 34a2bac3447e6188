//! Comparison of two builds of this program, paired round by round.
//!
//! A round runs each build once, in a separate process, in alternating order. A run contributes one value per contender and
//! metric: its only measurement, or the median if it measured several times. The gain is computed within a round and then
//! summarised, so that drift of the machine affects both sides of a ratio.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Serialize};

use crate::metric::three_digits;
use crate::stats::coverage;
use crate::table::Table;
use crate::{Estimate, Machine, Metric, Rounds};

/// The results of one run, deserialised from the JSON that the run wrote.
///
/// Names are strings, because another build may have other contenders and metrics.
#[derive(Clone, Debug, Deserialize)]
pub struct RunResults {
    workloads: Vec<WorkloadValues>,
}

#[derive(Clone, Debug, Deserialize)]
struct WorkloadValues {
    workload: String,
    metrics: Vec<String>,
    standings: Vec<ContenderValues>,
}

#[derive(Clone, Debug, Deserialize)]
struct ContenderValues {
    contender: String,
    measured: BTreeMap<String, MetricValues>,
}

#[derive(Clone, Debug, Deserialize)]
struct MetricValues {
    rounds: Vec<f64>,
}

/// One round: a run of this build and a run of the other one.
#[derive(Clone, Debug)]
pub struct RoundPair {
    /// The run of this build.
    pub now: RunResults,
    /// The run of the older build.
    pub before: RunResults,
}

/// The change of every metric of one workload between two builds. Displayed as Markdown.
#[derive(Clone, Debug, Serialize)]
pub struct Changes {
    workload: String,
    metrics: Vec<Change>,
    /// Contender and metric that only this build measured.
    only_now: Vec<String>,
    /// Contender and metric that only the older build measured.
    only_before: Vec<String>,
}

/// The change of one metric of one contender.
#[derive(Clone, Debug, Serialize)]
struct Change {
    contender: String,
    metric: Metric,
    /// One value per round.
    before: Vec<f64>,
    /// One value per round.
    now: Vec<f64>,
    /// At least 1 if this build is at least as good as the older one.
    gain: Estimate,
    trend: Trend,
}

/// The verdict on a gain, by its interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Trend {
    /// The whole interval is above 1.
    Better,
    /// The interval contains 1.
    NoDifference,
    /// The whole interval is below 1.
    Worse,
}

/// A comparison of two builds. Displayed as the heading of the tables; serialised with every round.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeReport {
    command: String,
    machine: Machine,
    before: PathBuf,
    rounds: usize,
    measurements_per_run: usize,
    only_now: Vec<String>,
    only_before: Vec<String>,
    workloads: Vec<Changes>,
}

impl RunResults {
    /// Returns one value per contender and metric of a workload, in the order of the tables.
    fn values(&self, workload: &str) -> impl Iterator<Item = (MetricKey, f64)> {
        let workloads = self.workloads.iter().filter(move |figures| figures.workload == workload);
        workloads.flat_map(|figures| {
            figures.standings.iter().flat_map(|standing| {
                figures.metrics.iter().filter_map(|metric| {
                    let measured = standing.measured.get(metric)?;
                    let key = MetricKey { contender: standing.contender.clone(), metric: metric.clone() };
                    Some((key, Estimate::of(&measured.rounds).median))
                })
            })
        })
    }
}

/// A metric of a contender.
#[derive(PartialEq)]
struct MetricKey {
    contender: String,
    metric: String,
}

impl fmt::Display for MetricKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.metric, self.contender)
    }
}

/// Returns the values of successive runs, one per run, for each contender and metric.
fn series<'a>(runs: impl Iterator<Item = &'a RunResults>, workload: &str) -> Vec<(MetricKey, Vec<f64>)> {
    let mut series: Vec<(MetricKey, Vec<f64>)> = Vec::new();
    for (key, value) in runs.flat_map(|run| run.values(workload)) {
        match series.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => series.push((key, vec![value])),
        }
    }
    series
}

impl Changes {
    /// Pairs the rounds of a workload. Contenders whose name does not contain `contender` are ignored. A metric that only one
    /// build measured in every round is listed and not compared.
    pub fn of(workload: &str, contender: Option<&str>, rounds: &[RoundPair]) -> Self {
        let is_selected = |(key, values): &(MetricKey, Vec<f64>)| {
            contender.is_none_or(|part| key.contender.contains(part)) && values.len() == rounds.len()
        };
        let mut now = series(rounds.iter().map(|round| &round.now), workload);
        let mut before = series(rounds.iter().map(|round| &round.before), workload);
        now.retain(is_selected);
        before.retain(is_selected);

        let (mut metrics, mut only_now) = (Vec::new(), Vec::new());
        for (key, now) in now {
            let paired = before.iter().position(|(other, _)| *other == key);
            match (paired, parse_metric(&key.metric)) {
                (Some(at), Some(metric)) => {
                    let (_, before) = before.remove(at);
                    metrics.push(Change::new(key.contender, metric, before, now));
                }
                _ => only_now.push(key.to_string()),
            }
        }
        let only_before = before.into_iter().map(|(key, _)| key.to_string()).collect();
        Self { workload: workload.to_owned(), metrics, only_now, only_before }
    }
}

/// Returns the metric of this name, if this build has it.
fn parse_metric(name: &str) -> Option<Metric> {
    let name: serde::de::value::StrDeserializer<'_, serde::de::value::Error> = name.into_deserializer();
    Metric::deserialize(name).ok()
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "**{}**\n", self.workload)?;
        if self.metrics.is_empty() {
            writeln!(f, "No metric was measured by both builds.\n")?;
        } else {
            let headings = ["verdict", "contender", "metric", "before", "now", "gain"];
            let mut table = Table::new(3, headings.map(Into::into).into());
            for change in &self.metrics {
                table.push_row(change.cells());
            }
            writeln!(f, "{table}")?;
        }
        write_names(f, "Measured by this build only", &self.only_now)?;
        write_names(f, "Measured by the older build only", &self.only_before)
    }
}

/// Writes a line with a list of names, unless the list is empty.
fn write_names(f: &mut fmt::Formatter<'_>, label: &str, names: &[String]) -> fmt::Result {
    if names.is_empty() { Ok(()) } else { writeln!(f, "{label}: {}.\n", names.join(", ")) }
}

impl Change {
    /// Computes the gain. `before` and `now` have one value per round.
    fn new(contender: String, metric: Metric, before: Vec<f64>, now: Vec<f64>) -> Self {
        let gains: Vec<f64> = before.iter().zip(&now).map(|(&before, &now)| gain(metric, before, now)).collect();
        let gain = Estimate::of(&gains);
        Self { contender, metric, before, now, gain, trend: Trend::of(gain) }
    }

    fn cells(&self) -> Vec<String> {
        let Self { contender, metric, before, now, gain, trend } = self;
        vec![
            trend.to_string(),
            contender.clone(),
            metric.to_string(),
            metric.format_value(Estimate::of(before).median),
            metric.format_value(Estimate::of(now).median),
            gain.format_value(three_digits),
        ]
    }
}

/// Returns the gain of one round. Equal values are a gain of 1, even if both are zero.
fn gain(metric: Metric, before: f64, now: f64) -> f64 {
    if before.total_cmp(&now).is_eq() {
        1.0
    } else if metric.higher_is_better() {
        now / before
    } else {
        before / now
    }
}

impl Trend {
    fn of(gain: Estimate) -> Self {
        if gain.low > 1.0 {
            Self::Better
        } else if gain.high < 1.0 {
            Self::Worse
        } else {
            Self::NoDifference
        }
    }
}

impl fmt::Display for Trend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Better => "better",
            Self::NoDifference => "no difference",
            Self::Worse => "WORSE",
        })
    }
}

impl ChangeReport {
    /// Creates a report without results, for runs of this build and of the program `before` on this machine.
    pub fn new(command: String, before: PathBuf, rounds: Rounds, measurements_per_run: usize) -> Self {
        Self {
            command,
            machine: Machine::this(),
            before,
            rounds: rounds.count(),
            measurements_per_run,
            only_now: Vec::new(),
            only_before: Vec::new(),
            workloads: Vec::new(),
        }
    }

    /// Sets the names of the workloads that only one of the builds has.
    #[must_use]
    pub fn with_unpaired(self, only_now: Vec<String>, only_before: Vec<String>) -> Self {
        Self { only_now, only_before, ..self }
    }

    /// Adds the result of a workload.
    pub fn push(&mut self, changes: Changes) {
        self.workloads.push(changes);
    }
}

impl fmt::Display for ChangeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * coverage(self.rounds);
        writeln!(f, "`{}`", self.command)?;
        writeln!(f, "on {}. Before: {}.", self.machine, self.before.display())?;
        match self.measurements_per_run {
            1 => write!(f, "Medians of {} rounds; a round is one measurement of each build.", self.rounds)?,
            several => write!(
                f,
                "Medians of {} rounds; a round is one run of each build, and the value of a run is the median of its {several} \
                 measurements.",
                self.rounds
            )?,
        }
        writeln!(f, " Gains have {percent:.1} % intervals.")?;
        writeln!(
            f,
            "The gain is now / before for throughput and before / now for every other metric: 1 or more means at least as good \
             as before.\n"
        )?;
        write_names(f, "Workloads of this build only", &self.only_now)?;
        write_names(f, "Workloads of the older build only", &self.only_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of the workload "echo" with these contenders, metrics and values.
    fn run(figures: &[(&str, &str, &[f64])]) -> RunResults {
        let mut metrics: Vec<String> = figures.iter().map(|(_, metric, _)| (*metric).to_owned()).collect();
        metrics.sort_unstable();
        metrics.dedup();
        let standings = figures.iter().map(|(contender, metric, rounds)| ContenderValues {
            contender: (*contender).to_owned(),
            measured: BTreeMap::from([((*metric).to_owned(), MetricValues { rounds: rounds.to_vec() })]),
        });
        let standings = standings.collect();
        RunResults { workloads: vec![WorkloadValues { workload: "echo".into(), metrics, standings }] }
    }

    fn rounds(now: &RunResults, before: &RunResults) -> Vec<RoundPair> {
        vec![RoundPair { now: now.clone(), before: before.clone() }; 7]
    }

    #[test]
    fn gain_above_one_is_better_for_every_metric() {
        let before = run(&[("ours", "throughput", &[1000.0]), ("ours", "cpu", &[300.0]), ("ours", "memory", &[512.0])]);
        let now = run(&[("ours", "throughput", &[2000.0]), ("ours", "cpu", &[400.0]), ("ours", "memory", &[512.0])]);
        let changes = Changes::of("echo", None, &rounds(&now, &before));
        assert_eq!(
            changes.to_string(),
            "**echo**

| verdict       | contender | metric     |   before |      now |                gain |
|:--------------|:----------|:-----------|---------:|---------:|--------------------:|
| better        | ours      | throughput | 1.00 k/s | 2.00 k/s | 2.00 (2.00 to 2.00) |
| WORSE         | ours      | cpu        |   300 ns |   400 ns | 0.75 (0.75 to 0.75) |
| no difference | ours      | memory     |    512 B |    512 B | 1.00 (1.00 to 1.00) |

"
        );
    }

    #[test]
    fn drift_of_the_machine_cancels_within_a_round() {
        let round = |speed: f64| RoundPair {
            now: run(&[("ours", "throughput", &[1.5 * speed])]),
            before: run(&[("ours", "throughput", &[speed])]),
        };
        let changes = Changes::of("echo", None, &[100.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0].map(round));
        assert_eq!(changes.metrics[0].gain, Estimate { median: 1.5, low: 1.5, high: 1.5 });
        assert_eq!(changes.metrics[0].before, [100.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0]);
    }

    #[test]
    fn run_with_several_measurements_uses_their_median() {
        let before = run(&[("ours", "cpu", &[9.0, 3.0, 1.0])]);
        let now = run(&[("ours", "cpu", &[2.0, 1.0, 70.0])]);
        let changes = Changes::of("echo", None, &rounds(&now, &before));
        assert_eq!(changes.metrics[0].gain, Estimate { median: 1.5, low: 1.5, high: 1.5 });
    }

    #[test]
    fn metric_of_one_build_is_listed() {
        let before = run(&[("ours", "cpu", &[1.0]), ("theirs", "cpu", &[1.0]), ("ours", "page-faults", &[1.0])]);
        let now = run(&[("ours", "cpu", &[1.0]), ("new", "cpu", &[1.0])]);
        let changes = Changes::of("echo", None, &rounds(&now, &before));
        assert_eq!(changes.metrics.len(), 1);
        assert_eq!(changes.only_now, ["cpu of new"]);
        assert_eq!(changes.only_before, ["cpu of theirs", "page-faults of ours"]);
        let printed = changes.to_string();
        assert!(printed.contains("Measured by the older build only: cpu of theirs, page-faults of ours."), "{printed}");

        let selected = Changes::of("echo", Some("our"), &rounds(&now, &before));
        assert_eq!(selected.only_before, ["page-faults of ours"]);

        let mut interrupted = rounds(&now, &before);
        interrupted[3].before = run(&[("theirs", "cpu", &[1.0])]);
        let interrupted = Changes::of("echo", None, &interrupted);
        assert_eq!(interrupted.only_now, ["cpu of ours", "cpu of new"], "a metric with missing rounds is not compared");
        assert!(interrupted.to_string().contains("No metric was measured by both builds."));
    }

    #[test]
    fn equal_zeros_show_no_difference() {
        let verdict = |before, now| {
            let run = |memory| run(&[("ours", "memory", &[memory])]);
            Changes::of("echo", None, &rounds(&run(now), &run(before))).metrics[0].trend
        };
        assert_eq!(verdict(0.0, 0.0), Trend::NoDifference);
        assert_eq!(verdict(0.0, 16.0), Trend::Worse);
        assert_eq!(verdict(16.0, 0.0), Trend::Better);
    }

    #[test]
    fn interval_around_one_shows_no_difference() {
        for (low, high, trend) in [
            (0.9, 1.1, Trend::NoDifference),
            (1.0, 1.1, Trend::NoDifference),
            (0.9, 1.0, Trend::NoDifference),
            (1.01, 1.1, Trend::Better),
            (0.9, 0.99, Trend::Worse),
            (f64::NAN, f64::NAN, Trend::NoDifference),
        ] {
            assert_eq!(Trend::of(Estimate { median: low, low, high }), trend, "{low} to {high}");
        }
    }
}
