//! `tidewire-bench`: the comparisons, from the command line.

mod comparisons;
mod role;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use indicatif::{ProgressBar, ProgressStyle};
use tidewire_bench::{Bars, Outcome, Report, Rounds, Workload};

use crate::comparisons::{COMPARISONS, Comparison, Effort};

/// Compares Tidewire with its peers, side by side.
///
/// Contenders run interleaved, one round each in an order that rotates, after one round that is not measured. The tables
/// show medians; a ratio is taken within each round and comes with an interval that covers the true one of this run with at least 95 %
/// probability. Let nothing else run meanwhile, and trust ratios rather than absolute numbers.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit code: 0 when all went well, 1 when --check found a bar missed, 2 for any other error."
)]
struct Options {
    /// What to run
    #[arg(value_parser = choices())]
    comparison: Choice,

    /// Rounds to measure: more of them make the intervals narrower
    #[arg(long, value_name = "N", default_value = "9")]
    rounds: Rounds,

    /// Run only the workloads whose name contains this
    #[arg(long, value_name = "WORKLOAD")]
    only: Option<String>,

    /// Do a hundredth of the work in each round: shows that everything runs, and little else
    #[arg(long)]
    quick: bool,

    /// Fail if a bar is missed with the whole of its interval
    #[arg(long)]
    check: bool,

    /// Folder for the numbers of every round, one JSON file per comparison
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    json: PathBuf,

    /// Bars to judge by, instead of those of `bench/bars.toml`
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    bars: Option<PathBuf>,
}

#[derive(Clone, Copy)]
enum Choice {
    One(&'static Comparison),
    All,
    List,
}

fn choices() -> impl clap::builder::TypedValueParser<Value = Choice> {
    let mut values: Vec<_> =
        COMPARISONS.iter().map(|comparison| PossibleValue::new(comparison.name).help(comparison.about)).collect();
    values.push(PossibleValue::new("all").help("Every comparison"));
    values.push(PossibleValue::new("list").help("Names of comparisons, workloads and contenders, and runs nothing"));
    PossibleValuesParser::new(values).map(|name| match COMPARISONS.iter().find(|comparison| comparison.name == name) {
        Some(comparison) => Choice::One(comparison),
        None if name == "all" => Choice::All,
        None => Choice::List,
    })
}

fn main() -> ExitCode {
    if role::play(COMPARISONS.iter().flat_map(|comparison| comparison.roles)) {
        return ExitCode::SUCCESS;
    }
    match run(&Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(options: &Options) -> Result<ExitCode> {
    let effort = if options.quick { Effort::Quick } else { Effort::Full };
    let mut plan: Vec<(&Comparison, Vec<Workload>)> =
        COMPARISONS.iter().map(|comparison| (comparison, (comparison.workloads)(effort))).collect();
    let bars = bars(options.bars.as_deref())?;
    bars.check(plan.iter().flat_map(|(_, workloads)| workloads))?;

    if let Choice::One(chosen) = options.comparison {
        plan.retain(|(comparison, _)| comparison.name == chosen.name);
    }
    if let Some(part) = &options.only {
        for (_, workloads) in &mut plan {
            workloads.retain(|workload| workload.name.contains(part));
        }
        plan.retain(|(_, workloads)| !workloads.is_empty());
        ensure!(!plan.is_empty(), "no workload has {part:?} in its name; `tidewire-bench list` names them all");
    }
    if matches!(options.comparison, Choice::List) {
        list(&plan);
        return Ok(ExitCode::SUCCESS);
    }
    if cfg!(debug_assertions) {
        println!("This is a debug build: its numbers mean nothing.\n");
    }

    let mut missed = false;
    for (comparison, workloads) in plan {
        let outcomes = workloads.into_iter().map(|workload| race(workload, options.rounds)).collect();
        let report = Report::new(comparison.name, command(), options.rounds, outcomes, &bars);
        print!("{report}");
        println!("Every round: {}\n", write(&report, &options.json, comparison.name)?.display());
        missed |= report.missed();
    }
    Ok(if options.check && missed { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn bars(file: Option<&Path>) -> Result<Bars> {
    let Some(file) = file else { return Bars::parse(include_str!("../bars.toml")).context("bench/bars.toml") };
    let context = || file.display().to_string();
    Bars::parse(&fs::read_to_string(file).with_context(context)?).with_context(context)
}

fn list(plan: &[(&Comparison, Vec<Workload>)]) {
    for (comparison, workloads) in plan {
        println!("{}: {}", comparison.name, comparison.about);
        for workload in workloads {
            let names: Vec<_> = workload.contenders.iter().map(tidewire_bench::Contender::name).collect();
            println!("  {}: {}", workload.name, names.join(", "));
        }
    }
}

fn race(workload: Workload, rounds: Rounds) -> Outcome {
    // Shown on a terminal only.
    let progress = ProgressBar::new(workload.steps(rounds) as u64)
        .with_style(ProgressStyle::with_template("{msg} {wide_bar} {eta}").expect("the template is well-formed"))
        .with_message(workload.name);
    let outcome = workload.run(rounds, || progress.inc(1));
    progress.finish_and_clear();
    outcome
}

/// What makes this table again.
fn command() -> String {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    format!("cargo run --release -p tidewire-bench -- {}", arguments.join(" "))
}

fn write(report: &Report, folder: &Path, comparison: &str) -> Result<PathBuf> {
    let file = folder.join(format!("{comparison}.json"));
    let text = serde_json::to_string_pretty(report)?;
    fs::create_dir_all(folder).and_then(|()| fs::write(&file, text)).with_context(|| file.display().to_string())?;
    Ok(file)
}
