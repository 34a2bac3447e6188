//! Reports: Markdown for people, and the same as JSON for programs.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::metric::three_digits;
use crate::stats::coverage;
use crate::table::Table;
use crate::{Bars, Judgement, Machine, Outcome, Rounds};

/// A comparison that was run. Displayed as Markdown; serialised with every round.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    comparison: &'static str,
    command: String,
    machine: Machine,
    rounds: usize,
    workloads: Vec<Outcome>,
    bars: Vec<Judgement>,
}

impl Report {
    /// On what `command` measured, on this machine.
    pub fn new(comparison: &'static str, command: String, rounds: Rounds, outcomes: Vec<Outcome>, bars: &Bars) -> Self {
        let bars = bars.judge(&outcomes);
        Self { comparison, command, machine: Machine::this(), rounds: rounds.count(), workloads: outcomes, bars }
    }

    /// Whether a bar was missed.
    pub fn missed(&self) -> bool {
        self.bars.iter().any(Judgement::missed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let measured = self.workloads.iter().filter(|outcome| !outcome.standings.is_empty());
        if measured.clone().next().is_some() {
            writeln!(f, "`{}`", self.command)?;
            let percent = 100.0 * coverage(self.rounds);
            writeln!(
                f,
                "on {}. Medians of {} rounds, ratios with {percent:.1} % intervals.\n",
                self.machine, self.rounds
            )?;
        }
        for outcome in measured {
            writeln!(f, "**{}**: {}\n\n{}", outcome.workload, outcome.about, contest_table(outcome))?;
        }
        for line in left_out(&self.workloads) {
            writeln!(f, "{line}\n")?;
        }
        if !self.bars.is_empty() {
            let mut table = Table::new(4, Judgement::HEADINGS.map(Into::into).into());
            for judgement in &self.bars {
                table.row(judgement.cells());
            }
            writeln!(f, "{table}")?;
        }
        for missed in self.bars.iter().filter(|judgement| judgement.missed()) {
            writeln!(f, "A bar was missed that is there for a reason: {}\n", missed.why())?;
        }
        Ok(())
    }
}

fn contest_table(outcome: &Outcome) -> Table {
    let mut headings = vec!["contender".to_owned()];
    for (column, metric) in outcome.metrics.iter().enumerate() {
        headings.push(metric.heading(outcome.operation));
        if column == 0 {
            headings.push(format!("× {}", outcome.baseline));
        }
    }
    let mut table = Table::new(1, headings);
    for standing in &outcome.standings {
        let mut cells = vec![standing.contender.to_owned()];
        for (column, metric) in outcome.metrics.iter().enumerate() {
            let measured = &standing.measured[metric];
            cells.push(metric.human(measured.value.median));
            if column == 0 {
                cells.push(match measured.ratio {
                    _ if standing.contender == outcome.baseline => "1".into(),
                    Some(ratio) => ratio.human(three_digits),
                    None => "–".into(),
                });
            }
        }
        table.row(cells);
    }
    table
}

/// One line for each thing that is not installed.
fn left_out(outcomes: &[Outcome]) -> Vec<String> {
    let mut lacking: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for outcome in outcomes {
        for absent in &outcome.left_out {
            lacking.entry(absent.needs).or_default().push(format!("{} of {}", absent.contender, outcome.workload));
        }
    }
    let line = |(needed, names): (&str, Vec<String>)| {
        format!("Left out, because {needed} is not installed (`make peers` installs it): {}.", names.join(", "))
    };
    lacking.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Contender, Metric, Sample, Workload};

    fn report() -> Report {
        let contender = |name, millis| {
            let sample = Sample::new(1000, Duration::from_millis(millis), Duration::from_micros(412));
            Contender::new(name, move |_| sample.clone())
        };
        let workload = Workload {
            name: "echo",
            about: "Frames there and back.".into(),
            operation: "frame",
            metrics: &[Metric::Throughput, Metric::Cpu],
            contenders: vec![
                contender("theirs", 500),
                contender("ours", 250),
                contender("far", 1).needing("no program has this name"),
            ],
        };
        let bars = "
            [[bar]]
            workload = 'echo'
            contender = 'ours'
            against = 'theirs'
            metric = 'throughput'
            at_least = 3
            why = 'Two is not enough.'
            [[bar]]
            workload = 'echo'
            contender = 'far'
            metric = 'cpu'
            at_most = 500
            aim = 100
            why = 'It is far.'
        ";
        let outcome = workload.run(Rounds::default(), || ());
        Report::new(
            "frames",
            "tidewire-bench frames".into(),
            Rounds::default(),
            vec![outcome],
            &Bars::parse(bars).unwrap(),
        )
    }

    #[test]
    fn people_get_tables() {
        let printed = report().to_string();
        let (command, rest) = printed.split_once('\n').unwrap();
        let (machine, tables) = rest.split_once('\n').unwrap();
        assert_eq!(command, "`tidewire-bench frames`");
        assert!(machine.ends_with("Medians of 9 rounds, ratios with 96.1 % intervals."), "{machine}");
        assert_eq!(
            tables,
            "
**echo**: Frames there and back.

| contender | frames per second |            × theirs | CPU per frame |
|:----------|------------------:|--------------------:|--------------:|
| theirs    |          2.00 k/s |                   1 |        412 ns |
| ours      |          4.00 k/s | 2.00 (2.00 to 2.00) |        412 ns |

Left out, because no program has this name is not installed (`make peers` installs it): far of echo.

| verdict  | workload | contender | metric              |      bar |    aim |            measured |
|:---------|:---------|:----------|:--------------------|---------:|-------:|--------------------:|
| MISSED   | echo     | ours      | throughput × theirs |   ≥ 3.00 |      – | 2.00 (2.00 to 2.00) |
| left out | echo     | far       | cpu                 | ≤ 500 ns | 100 ns |                   – |

A bar was missed that is there for a reason: Two is not enough.

"
        );
    }

    #[test]
    fn programs_get_every_round() {
        let text = serde_json::to_string(&report()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ours = &json["workloads"][0]["standings"][1];
        assert_eq!(json["comparison"], "frames");
        assert_eq!(json["rounds"], 9);
        assert!(json["machine"]["cores"].is_u64());
        assert_eq!(ours["contender"], "ours");
        assert_eq!(ours["measured"]["throughput"]["rounds"].as_array().unwrap().len(), 9);
        assert_eq!(ours["measured"]["throughput"]["value"]["median"], 4000.0);
        assert_eq!(ours["measured"]["throughput"]["ratio"]["low"], 2.0);
        assert_eq!(json["workloads"][0]["left_out"][0]["contender"], "far");
        assert_eq!(json["bars"][0]["verdict"], "missed");
        assert_eq!(json["bars"][0]["bound"]["at_least"], 3.0);
        assert_eq!(json["bars"][0]["measured"]["high"], 2.0);
        assert_eq!(json["bars"][1]["verdict"], "left-out");
    }
}
