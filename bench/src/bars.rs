//! Bars: limits on the results of workloads, read from a TOML file.
//!
//! A bar is missed only if the whole interval is on its wrong side, so that noise causes no false alarms. It names a workload, a
//! contender and a metric. An unknown name is an error before anything runs.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::metric::three_digits;
use crate::{Estimate, Metric, Workload, WorkloadResult};

/// The bars of one file. The default has none.
#[derive(Clone, Debug, Default)]
pub struct Bars(Vec<Bar>);

/// A limit on one metric of one contender.
#[derive(Clone, Debug, Serialize)]
pub struct Bar {
    workload: String,
    contender: String,
    /// The contender to compute a ratio with. `None` means that the bar limits the value itself.
    against: Option<String>,
    metric: Metric,
    bound: Bound,
    /// The target value, which is no worse than the bound. It is shown, and not compared with results.
    aim: Option<f64>,
    why: String,
}

/// The limit of a bar.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Bound {
    /// The value must be at least this.
    AtLeast(f64),
    /// The value must be at most this.
    AtMost(f64),
}

/// The verdict on a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Verdict {
    /// The whole interval is on the right side.
    Held,
    /// The interval is on both sides. More rounds or a machine with less load would give a verdict.
    Unclear,
    /// The whole interval is on the wrong side.
    Missed,
    /// A contender did not run, because a program is not installed.
    LeftOut,
}

/// A bar, the measured value and the verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    #[serde(flatten)]
    bar: Bar,
    measured: Option<Estimate>,
    verdict: Verdict,
}

/// Error of reading or checking a file of bars.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BarsError {
    /// The file is not a list of `[[bar]]` tables.
    #[error("invalid TOML, expected a list of `[[bar]]` tables")]
    File(#[source] toml::de::Error),
    /// A field is missing, unknown or of the wrong type.
    #[error("{bar} has an invalid field")]
    Fields {
        /// The bar.
        bar: String,
        /// The error of the TOML parser.
        source: toml::de::Error,
    },
    /// Both or neither of `at_least` and `at_most` are set.
    #[error("{bar} must have exactly one of at_least and at_most")]
    NotOneBound {
        /// The bar.
        bar: String,
    },
    /// `at_least` on a metric where lower is better, or `at_most` on one where higher is better.
    #[error("{bar} bounds {metric} on the wrong side: use at_least for throughput and at_most for every other metric")]
    WorseSide {
        /// The bar.
        bar: String,
        /// The metric.
        metric: Metric,
    },
    /// The aim is worse than the bound.
    #[error("{bar} has an aim that is worse than its bound")]
    AimWorseThanBound {
        /// The bar.
        bar: String,
    },
    /// `against` is an empty list.
    #[error("{bar} has an empty list for `against`: name a contender, or omit `against`")]
    EmptyAgainst {
        /// The bar.
        bar: String,
    },
    /// The workload does not exist.
    #[error("{bar}: unknown workload; `tidewire-bench list` prints all names")]
    UnknownWorkload {
        /// The bar.
        bar: String,
    },
    /// The contender does not exist.
    #[error("{bar}: the workload has no contender {contender:?}")]
    UnknownContender {
        /// The bar.
        bar: String,
        /// The unknown name.
        contender: String,
    },
    /// The workload does not measure the metric.
    #[error("{bar}: the workload does not measure {metric}")]
    NotMeasured {
        /// The bar.
        bar: String,
        /// The metric.
        metric: Metric,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    bar: Vec<toml::Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    workload: String,
    contender: String,
    against: Option<Against>,
    metric: Metric,
    at_least: Option<f64>,
    at_most: Option<f64>,
    aim: Option<f64>,
    why: String,
}

/// The contender or contenders to compute a ratio with. A list expands to one bar per name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Against {
    One(String),
    Each(Vec<String>),
}

impl Bars {
    /// Parses the text of a TOML file.
    pub fn parse(text: &str) -> Result<Self, BarsError> {
        let File { bar } = toml::from_str(text).map_err(BarsError::File)?;
        let mut bars = Vec::new();
        for (index, table) in bar.into_iter().enumerate() {
            bars.extend(Bar::read(index + 1, table)?);
        }
        Ok(Self(bars))
    }

    /// Returns an error if a bar names an unknown workload, contender or metric.
    pub fn check<'a>(&self, workloads: impl IntoIterator<Item = &'a Workload>) -> Result<(), BarsError> {
        let workloads: Vec<_> = workloads.into_iter().collect();
        self.0.iter().try_for_each(|bar| bar.check(&workloads))
    }

    /// Returns the verdict on each bar whose workload and contenders were selected for the run.
    pub fn judge(&self, results: &[WorkloadResult]) -> Vec<Judgement> {
        let judge = |bar: &Bar| {
            let result = results.iter().find(|result| result.workload == bar.workload)?;
            if ![Some(&bar.contender), bar.against.as_ref()].into_iter().flatten().all(|name| result.has(name)) {
                return None;
            }
            let measured = result.estimate(&bar.contender, bar.against.as_deref(), bar.metric);
            let verdict = measured.map_or(Verdict::LeftOut, |measured| bar.bound.judge(measured));
            Some(Judgement { bar: bar.clone(), measured, verdict })
        };
        self.0.iter().filter_map(judge).collect()
    }
}

impl Bar {
    /// Parses a table: one bar, or one for each contender in `against`.
    fn read(number: usize, table: toml::Table) -> Result<Vec<Self>, BarsError> {
        let name = |key| table.get(key).and_then(toml::Value::as_str).unwrap_or("?");
        let label = format!("bar {number} ({}, {})", name("workload"), name("contender"));
        let fields = match table.try_into() {
            Ok(fields) => fields,
            Err(source) => return Err(BarsError::Fields { bar: label, source }),
        };
        let Fields { workload, contender, against, metric, at_least, at_most, aim, why } = fields;
        let bound = match (at_least, at_most) {
            (Some(value), None) => Bound::AtLeast(value),
            (None, Some(value)) => Bound::AtMost(value),
            _ => return Err(BarsError::NotOneBound { bar: label }),
        };
        if metric.higher_is_better() != matches!(bound, Bound::AtLeast(_)) {
            return Err(BarsError::WorseSide { bar: label, metric });
        }
        if aim.is_some_and(|aim| !bound.allows(aim)) {
            return Err(BarsError::AimWorseThanBound { bar: label });
        }
        let against = match against {
            None => vec![None],
            Some(Against::One(name)) => vec![Some(name)],
            Some(Against::Each(names)) if names.is_empty() => return Err(BarsError::EmptyAgainst { bar: label }),
            Some(Against::Each(names)) => names.into_iter().map(Some).collect(),
        };
        let bar = Self { workload, contender, against: None, metric, bound, aim, why };
        Ok(against.into_iter().map(|against| Self { against, ..bar.clone() }).collect())
    }

    fn check(&self, workloads: &[&Workload]) -> Result<(), BarsError> {
        let bar = format!("the bar on {} of {} in {}", self.metric, self.contender, self.workload);
        let Some(workload) = workloads.iter().find(|workload| workload.name == self.workload) else {
            return Err(BarsError::UnknownWorkload { bar });
        };
        for contender in [Some(&self.contender), self.against.as_ref()].into_iter().flatten() {
            if !workload.contenders.iter().any(|known| known.name() == contender) {
                return Err(BarsError::UnknownContender { bar, contender: contender.clone() });
            }
        }
        if workload.metrics.contains(&self.metric) {
            Ok(())
        } else {
            Err(BarsError::NotMeasured { bar, metric: self.metric })
        }
    }

    /// Formats a number of this bar: a ratio, or a value with its unit.
    fn format_value(&self, number: f64) -> String {
        if self.against.is_some() { three_digits(number) } else { self.metric.format_value(number) }
    }
}

impl Bound {
    fn allows(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
        }
    }

    fn judge(self, measured: Estimate) -> Verdict {
        let Estimate { low, high, .. } = measured;
        match (self.allows(low), self.allows(high)) {
            // A ratio of zero to zero is NaN.
            _ if low.is_nan() || high.is_nan() => Verdict::Unclear,
            (true, true) => Verdict::Held,
            (false, false) => Verdict::Missed,
            _ => Verdict::Unclear,
        }
    }
}

impl Judgement {
    /// The columns of [`cells`](Self::cells): four of text, then three of numbers.
    pub(crate) const HEADINGS: [&str; 7] = ["verdict", "workload", "contender", "metric", "bar", "aim", "measured"];

    /// Returns whether the bar was missed.
    pub fn is_missed(&self) -> bool {
        self.verdict == Verdict::Missed
    }

    /// Returns the reason for the bar.
    pub(crate) fn why(&self) -> &str {
        &self.bar.why
    }

    /// Returns the row of the table.
    pub(crate) fn cells(&self) -> Vec<String> {
        let Self { bar, measured, verdict } = self;
        let bound = match bar.bound {
            Bound::AtLeast(bound) => format!("≥ {}", bar.format_value(bound)),
            Bound::AtMost(bound) => format!("≤ {}", bar.format_value(bound)),
        };
        vec![
            verdict.to_string(),
            bar.workload.clone(),
            bar.contender.clone(),
            bar.against.as_ref().map_or(bar.metric.to_string(), |other| format!("{} × {other}", bar.metric)),
            bound,
            bar.aim.map_or("–".into(), |aim| bar.format_value(aim)),
            measured.map_or("–".into(), |measured| measured.format_value(|number| bar.format_value(number))),
        ]
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Held => "held",
            Self::Unclear => "unclear",
            Self::Missed => "MISSED",
            Self::LeftOut => "left out",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::time::Duration;

    use super::*;
    use crate::{Contender, Rounds, Sample};

    const GOOD: &str = "workload = 'echo'\ncontender = 'ours'\nmetric = 'throughput'\nwhy = 'because'\n";

    fn bars(fields: &str) -> Result<Bars, BarsError> {
        Bars::parse(&format!("[[bar]]\n{GOOD}at_least = 1\n[[bar]]\n{fields}"))
    }

    /// Returns the error with its source.
    fn error_text(fields: &str) -> String {
        let error = bars(fields).unwrap_err();
        let source = error.source().map(ToString::to_string).unwrap_or_default();
        format!("{error}: {source}")
    }

    fn echo() -> Workload {
        let contender = |name, millis| {
            let sample = Sample::new(1000, Duration::from_millis(millis), Duration::ZERO);
            Contender::new(name, move |_| sample.clone())
        };
        Workload {
            name: "echo",
            about: String::new(),
            operation: "frame",
            metrics: &[Metric::Throughput],
            contenders: vec![
                contender("theirs", 500),
                contender("ours", 250),
                contender("absent", 1).requires_program("no program has this name"),
            ],
        }
    }

    #[test]
    fn bars_of_this_package_are_valid() {
        Bars::parse(include_str!("../bars.toml")).unwrap();
    }

    #[test]
    fn error_names_the_invalid_bar() {
        let label = "bar 2 (echo, ours)";
        for (fields, expected) in [
            (format!("{GOOD}at_least = 1\nat_most = 2"), "exactly one of at_least and at_most"),
            (GOOD.to_owned(), "exactly one of at_least and at_most"),
            (format!("{GOOD}at_least = 2\naim = 1.5"), "aim that is worse"),
            (format!("{GOOD}at_most = 2"), "bounds throughput on the wrong side"),
            (GOOD.replace("throughput", "cpu") + "at_least = 2", "bounds cpu on the wrong side"),
            (format!("{GOOD}at_last = 2"), "at_last"),
            (format!("{GOOD}at_least = 'two'"), "f64"),
            (GOOD.replace("throughput", "speed"), "speed"),
            (GOOD.replace("why", "#"), "why"),
            (format!("{GOOD}at_least = 1\nagainst = []"), "empty list for `against`"),
        ] {
            let error = error_text(&fields);
            assert!(error.contains(label) && error.contains(expected), "{error}");
        }
        assert!(error_text("contender = 'ours'").contains("bar 2 (?, ours)"));
        assert!(matches!(Bars::parse("[[bars]]"), Err(BarsError::File(_))));
    }

    #[test]
    fn unknown_names_in_bars_are_errors() {
        let check = |fields: String| bars(&fields).unwrap().check(&[echo()]);
        check(format!("{GOOD}against = 'theirs'\nat_least = 1")).unwrap();
        check(format!("{GOOD}against = 'absent'\nat_least = 1")).unwrap();
        let good = format!("{GOOD}at_least = 1");
        assert!(matches!(check(good.replace("echo", "ecko")), Err(BarsError::UnknownWorkload { .. })));
        assert!(matches!(check(good.replace("ours", "hours")), Err(BarsError::UnknownContender { .. })));
        for against in ["'them'", "['theirs', 'them']"] {
            let unknown = check(format!("{good}\nagainst = {against}"));
            assert!(matches!(unknown, Err(BarsError::UnknownContender { .. })), "{against}");
        }
        assert!(matches!(
            check(format!("{}at_most = 1", GOOD.replace("throughput", "memory"))),
            Err(BarsError::NotMeasured { .. })
        ));
    }

    #[test]
    fn bar_is_missed_only_by_the_whole_interval() {
        let judge = |bound: Bound, low, high| bound.judge(Estimate { median: low, low, high });
        for (bound, low, high, verdict) in [
            (Bound::AtLeast(2.0), 2.0, 3.0, Verdict::Held),
            (Bound::AtLeast(2.0), 1.0, 2.0, Verdict::Unclear),
            (Bound::AtLeast(2.0), 1.0, 1.9, Verdict::Missed),
            (Bound::AtMost(2.0), 1.0, 2.0, Verdict::Held),
            (Bound::AtMost(2.0), 2.0, 3.0, Verdict::Unclear),
            (Bound::AtMost(2.0), 2.1, 3.0, Verdict::Missed),
            (Bound::AtMost(2.0), f64::NAN, f64::NAN, Verdict::Unclear),
            (Bound::AtMost(2.0), f64::INFINITY, f64::INFINITY, Verdict::Missed),
        ] {
            assert_eq!(judge(bound, low, high), verdict, "{bound:?} of {low} to {high}");
        }
    }

    #[test]
    fn bars_are_judged_by_value_and_by_ratio() {
        let result = [echo().run(Rounds::default(), || ())];
        for (fields, verdict) in [
            ("at_least = 4000", Verdict::Held),
            ("at_least = 4001", Verdict::Missed),
            ("at_least = 2\nagainst = 'theirs'", Verdict::Held),
            ("at_least = 2.1\nagainst = 'theirs'", Verdict::Missed),
            ("at_least = 1\nagainst = 'absent'", Verdict::LeftOut),
        ] {
            let judgements = bars(&format!("{GOOD}{fields}")).unwrap().judge(&result);
            assert_eq!(judgements[1].verdict, verdict, "{fields}");
            assert_eq!(judgements[1].is_missed(), verdict == Verdict::Missed);
        }
        let both = bars(&format!("{GOOD}at_least = 2\nagainst = ['theirs', 'absent']")).unwrap().judge(&result);
        let verdicts: Vec<_> = both[1..].iter().map(|judgement| judgement.verdict).collect();
        assert_eq!(verdicts, [Verdict::Held, Verdict::LeftOut], "one bar for each contender in `against`");
        assert!(bars(&format!("{GOOD}at_least = 1")).unwrap().judge(&[]).is_empty(), "the workload was not run");
    }

    #[test]
    fn bar_is_not_judged_if_its_contenders_were_not_selected() {
        let mut ours = echo();
        ours.contenders.retain(|contender| contender.name() == "ours");
        let result = [ours.run(Rounds::default(), || ())];
        let both = bars(&format!("{GOOD}at_least = 2\nagainst = 'theirs'")).unwrap().judge(&result);
        assert_eq!(both.len(), 1, "only the bar without `against`");
        assert_eq!(both[0].verdict, Verdict::Held);
    }
}
