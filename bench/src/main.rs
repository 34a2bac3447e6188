//! The command-line program `tidewire-bench`.

mod comparisons;
mod program;
mod role;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tidewire_bench::{Bars, ChangeReport, Changes, Report, RoundPair, Rounds, Workload, WorkloadResult};

use crate::comparisons::{COMPARISONS, Comparison, Effort};
use crate::program::{Program, RunOptions};

/// The workloads to run, by comparison.
type Plan = Vec<(&'static Comparison, Vec<Workload>)>;

/// Compares Tidewire with its peers, side by side, or two builds of Tidewire with each other.
///
/// Contenders run interleaved, one round each in an order that rotates, after a warm-up round that is not measured. The tables
/// show medians. A ratio is computed within each round; its interval covers the true ratio of this run with at least 95 %
/// probability. Run on an otherwise idle machine, and trust ratios rather than absolute numbers.
#[derive(Parser)]
#[command(version, after_help = "Exit code: 0 on success, 1 if --check found a missed bar, 2 on any other error.")]
struct Options {
    /// The comparison to run
    #[arg(value_parser = choices())]
    comparison: Choice,

    /// Number of rounds to measure; more rounds give narrower intervals
    #[arg(long, value_name = "N", default_value = "9")]
    rounds: Rounds,

    /// Run only workloads whose name contains this text
    #[arg(long, value_name = "WORKLOAD")]
    only: Option<String>,

    /// Run only contenders whose name contains this text
    #[arg(long, value_name = "CONTENDER")]
    contender: Option<String>,

    /// Compare with an older build, given the path of its `tidewire-bench`
    ///
    /// Runs this build and the older one in turn, once per round, and prints the gain of each metric: now / before for
    /// throughput and before / now for every other metric, so that 1 or more means at least as good as before.
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["check", "bars", "one_round"])]
    before: Option<PathBuf>,

    /// Measure a single round of the workload with exactly this name and write it as JSON
    ///
    /// `--before` runs both builds this way. A single round has no interval, so no table is printed and no bar is judged.
    #[arg(long, value_name = "WORKLOAD", hide_short_help = true, conflicts_with_all = ["rounds", "only", "check", "bars"])]
    one_round: Option<String>,

    /// Do a hundredth of the work in each round, to check that everything runs
    #[arg(long)]
    quick: bool,

    /// Exit with 1 if the whole interval of a metric is on the wrong side of its bar
    #[arg(long)]
    check: bool,

    /// Folder for the JSON files with the values of every round, one file per comparison
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    json: PathBuf,

    /// File with bars to use instead of `bench/bars.toml`
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
    values.push(PossibleValue::new("list").help("Print the names of all comparisons, workloads and contenders"));
    PossibleValuesParser::new(values).map(|name| match COMPARISONS.iter().find(|comparison| comparison.name == name) {
        Some(comparison) => Choice::One(comparison),
        None if name == "all" => Choice::All,
        None => Choice::List,
    })
}

fn main() -> ExitCode {
    if role::run_if_requested(COMPARISONS.iter().flat_map(|comparison| comparison.roles)) {
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
    let mut plan: Plan = COMPARISONS.iter().map(|comparison| (comparison, (comparison.workloads)(effort))).collect();
    let bars = bars(options.bars.as_deref())?;
    bars.check(plan.iter().flat_map(|(_, workloads)| workloads))?;

    options.select(&mut plan)?;
    if matches!(options.comparison, Choice::List) {
        ensure!(options.before.is_none(), "--before needs a comparison to run, got `list`");
        list(&plan);
        return Ok(ExitCode::SUCCESS);
    }
    if cfg!(debug_assertions) {
        println!("Warning: this is a debug build, its results are meaningless. Build with --release.\n");
    }
    if let Some(before) = &options.before {
        compare_builds(options, before, &plan)?;
        return Ok(ExitCode::SUCCESS);
    }

    let is_one_round = options.one_round.is_some();
    let (rounds, bars) = if is_one_round { (Rounds::ONE, Bars::default()) } else { (options.rounds, bars) };
    let mut has_missed_bar = false;
    for (comparison, workloads) in plan {
        let results = workloads.into_iter().map(|workload| run_workload(workload, rounds)).collect();
        let report = Report::new(comparison.name, command(), rounds, results, &bars);
        if !is_one_round {
            print!("{report}");
        }
        println!("Values of every round: {}\n", write(&report, &options.json, comparison.name)?.display());
        has_missed_bar |= report.has_missed_bar();
    }
    Ok(if options.check && has_missed_bar { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

impl Options {
    /// Removes the workloads and contenders that the command line did not select. Fails if nothing is left.
    fn select(&self, plan: &mut Plan) -> Result<()> {
        plan.retain(|(comparison, _)| self.selects_comparison(comparison.name));
        for (_, workloads) in &mut *plan {
            workloads.retain(|workload| self.selects_workload(workload.name));
        }
        plan.retain(|(_, workloads)| !workloads.is_empty());
        if plan.is_empty() {
            let all = "`tidewire-bench list` prints all names";
            match &self.one_round {
                Some(exact) => bail!("unknown workload {exact:?}; {all}"),
                None => bail!("no workload name contains {:?}; {all}", self.only.as_deref().unwrap_or_default()),
            }
        }
        if let Some(part) = &self.contender {
            for (_, workloads) in &mut *plan {
                for workload in &mut *workloads {
                    workload.contenders.retain(|contender| contender.name().contains(part));
                }
                workloads.retain(|workload| !workload.contenders.is_empty());
            }
            plan.retain(|(_, workloads)| !workloads.is_empty());
            ensure!(!plan.is_empty(), "no contender name contains {part:?}; `tidewire-bench list` prints all names");
        }
        Ok(())
    }

    fn selects_comparison(&self, name: &str) -> bool {
        match self.comparison {
            Choice::One(chosen) => chosen.name == name,
            Choice::All | Choice::List => true,
        }
    }

    fn selects_workload(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
            && self.one_round.as_ref().is_none_or(|exact| name == exact)
    }
}

/// Runs this build and the one at `older` in turn and prints the changes, workload by workload.
fn compare_builds(options: &Options, older: &Path, plan: &Plan) -> Result<()> {
    let before = Program::open(older)?;
    let now = Program::open(&env::current_exe().context("cannot determine the path of this executable")?)?;
    let run = RunOptions {
        is_one_round: now.has_one_round() && before.has_one_round(),
        is_quick: options.quick,
        contender: options.contender.as_deref(),
    };

    let selected = plan.iter().flat_map(|(_, workloads)| workloads).map(|workload| workload.name);
    let (paired, only_now): (Vec<_>, Vec<_>) = selected.partition(|name| before.has(name, run.contender));
    let only_before = before.workloads().iter().filter(|listed| {
        options.selects_comparison(&listed.comparison)
            && options.selects_workload(&listed.workload)
            && !now.has(&listed.workload, None)
    });
    let only_before = only_before.map(|listed| listed.workload.clone()).collect();
    let only_now = only_now.into_iter().map(str::to_owned).collect();
    let mut report = ChangeReport::new(command(), older.to_owned(), options.rounds, run.measurements())
        .with_unpaired(only_now, only_before);
    print!("{report}");

    for workload in paired {
        let progress = progress(workload, options.rounds.count());
        let mut rounds = Vec::with_capacity(options.rounds.count());
        for round in 0..options.rounds.count() {
            // Alternating, so that neither build always runs first.
            rounds.push(if round % 2 == 0 {
                let before = before.measure(workload, run)?;
                RoundPair { before, now: now.measure(workload, run)? }
            } else {
                let now = now.measure(workload, run)?;
                RoundPair { before: before.measure(workload, run)?, now }
            });
            progress.inc(1);
        }
        progress.finish_and_clear();
        let changes = Changes::of(workload, options.contender.as_deref(), &rounds);
        print!("{changes}");
        report.push(changes);
    }
    println!("Values of every round: {}\n", write(&report, &options.json, "before")?.display());
    Ok(())
}

fn bars(file: Option<&Path>) -> Result<Bars> {
    let Some(file) = file else { return Bars::parse(include_str!("../bars.toml")).context("bench/bars.toml") };
    let context = || file.display().to_string();
    Bars::parse(&fs::read_to_string(file).with_context(context)?).with_context(context)
}

fn list(plan: &Plan) {
    for (comparison, workloads) in plan {
        println!("{}: {}", comparison.name, comparison.about);
        for workload in workloads {
            let names: Vec<_> = workload.contenders.iter().map(tidewire_bench::Contender::name).collect();
            println!("  {}: {}", workload.name, names.join(", "));
        }
    }
}

fn run_workload(workload: Workload, rounds: Rounds) -> WorkloadResult {
    let progress = progress(workload.name, workload.steps(rounds));
    let result = workload.run(rounds, || progress.inc(1));
    progress.finish_and_clear();
    result
}

/// Creates a progress bar, which is shown only on a terminal.
fn progress(workload: &'static str, steps: usize) -> ProgressBar {
    ProgressBar::new(steps as u64)
        .with_style(ProgressStyle::with_template("{msg} {wide_bar} {eta}").expect("the template is well-formed"))
        .with_message(workload)
}

/// Returns the command that reproduces the output.
fn command() -> String {
    let arguments: Vec<String> = env::args().skip(1).collect();
    format!("cargo run --release -p tidewire-bench -- {}", arguments.join(" "))
}

/// Writes a report as `NAME.json` and returns the path of the file.
fn write(report: &impl Serialize, folder: &Path, name: &str) -> Result<PathBuf> {
    let file = folder.join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(report)?;
    fs::create_dir_all(folder).and_then(|()| fs::write(&file, text)).with_context(|| file.display().to_string())?;
    Ok(file)
}
