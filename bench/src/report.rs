//! Reports of a comparison, as Markdown and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::metric::three_digits;
use crate::stats::coverage;
use crate::table::Table;
use crate::{Bars, Judgement, Machine, Rounds, WorkloadResult};

/// The results of a comparison. Displayed as Markdown tables; serialised with the values of every round.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    comparison: &'static str,
    command: String,
    machine: Machine,
    rounds: usize,
    workloads: Vec<WorkloadResult>,
    bars: Vec<Judgement>,
}

impl Report {
    /// Creates the report of a run of `command` on this machine.
    pub fn new(
        comparison: &'static str,
        command: String,
        rounds: Rounds,
        results: Vec<WorkloadResult>,
        bars: &Bars,
    ) -> Self {
        let bars = bars.judge(&results);
        Self { comparison, command, machine: Machine::this(), rounds: rounds.count(), workloads: results, bars }
    }

    /// Returns whether a bar was missed.
    pub fn has_missed_bar(&self) -> bool {
        self.bars.iter().any(Judgement::is_missed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let measured = self.workloads.iter().filter(|result| !result.standings.is_empty());
        if measured.clone().next().is_some() {
            writeln!(f, "`{}`", self.command)?;
            let percent = 100.0 * coverage(self.rounds);
            writeln!(
                f,
                "on {}. Medians of {} rounds, ratios with {percent:.1} % intervals.\n",
                self.machine, self.rounds
            )?;
        }
        for result in measured {
            writeln!(f, "**{}**: {}\n\n{}", result.workload, result.about, result_table(result))?;
        }
        for line in left_out(&self.workloads) {
            writeln!(f, "{line}\n")?;
        }
        if !self.bars.is_empty() {
            let mut table = Table::new(4, Judgement::HEADINGS.map(Into::into).into());
            for judgement in &self.bars {
                table.push_row(judgement.cells());
            }
            writeln!(f, "{table}")?;
        }
        for missed in self.bars.iter().filter(|judgement| judgement.is_missed()) {
            writeln!(f, "Missed bar: {}\n", missed.why())?;
        }
        Ok(())
    }
}

fn result_table(result: &WorkloadResult) -> Table {
    let mut headings = vec!["contender".to_owned()];
    for (column, metric) in result.metrics.iter().enumerate() {
        headings.push(metric.heading(result.operation));
        if column == 0 {
            headings.push(format!("× {}", result.baseline));
        }
    }
    let mut table = Table::new(1, headings);
    for standing in &result.standings {
        let mut cells = vec![standing.contender.to_owned()];
        for (column, metric) in result.metrics.iter().enumerate() {
            let measured = &standing.measured[metric];
            cells.push(metric.format_value(measured.value.median));
            if column == 0 {
                cells.push(match measured.ratio {
                    _ if standing.contender == result.baseline => "1".into(),
                    Some(ratio) => ratio.format_value(three_digits),
                    None => "–".into(),
                });
            }
        }
        table.push_row(cells);
    }
    table
}

/// Returns one line for each program that is not installed.
fn left_out(results: &[WorkloadResult]) -> Vec<String> {
    let mut missing: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for result in results {
        for absent in &result.left_out {
            missing.entry(absent.needs).or_default().push(format!("{} of {}", absent.contender, result.workload));
        }
    }
    let line = |(needed, names): (&str, Vec<String>)| {
        format!("Left out, because {needed} is not installed (`make peers` installs it): {}.", names.join(", "))
    };
    missing.into_iter().map(line).collect()
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
            about: "Echoes frames.".into(),
            operation: "frame",
            metrics: &[Metric::Throughput, Metric::Cpu],
            contenders: vec![
                contender("theirs", 500),
                contender("ours", 250),
                contender("far", 1).requires_program("no program has this name"),
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
            why = 'It is a test.'
        ";
        let result = workload.run(Rounds::default(), || ());
        Report::new(
            "frames",
            "tidewire-bench frames".into(),
            Rounds::default(),
            vec![result],
            &Bars::parse(bars).unwrap(),
        )
    }

    #[test]
    fn report_is_displayed_as_tables() {
        let printed = report().to_string();
        let (command, rest) = printed.split_once('\n').unwrap();
        let (machine, tables) = rest.split_once('\n').unwrap();
        assert_eq!(command, "`tidewire-bench frames`");
        assert!(machine.ends_with("Medians of 9 rounds, ratios with 96.1 % intervals."), "{machine}");
        assert_eq!(
            tables,
            "
**echo**: Echoes frames.

| contender | frames per second |            × theirs | CPU per frame |
|:----------|------------------:|--------------------:|--------------:|
| theirs    |          2.00 k/s |                   1 |        412 ns |
| ours      |          4.00 k/s | 2.00 (2.00 to 2.00) |        412 ns |

Left out, because no program has this name is not installed (`make peers` installs it): far of echo.

| verdict  | workload | contender | metric              |      bar |    aim |            measured |
|:---------|:---------|:----------|:--------------------|---------:|-------:|--------------------:|
| MISSED   | echo     | ours      | throughput × theirs |   ≥ 3.00 |      – | 2.00 (2.00 to 2.00) |
| left out | echo     | far       | cpu                 | ≤ 500 ns | 100 ns |                   – |

Missed bar: Two is not enough.

"
        );
    }

    #[test]
    fn json_has_every_round() {
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
