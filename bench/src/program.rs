//! Builds of this program, run as child processes. `--before` measures two of them in turn.
//!
//! A build without `--one-round` cannot measure a single round. It runs [`MIN_ROUNDS`] rounds per process, and so does the build
//! that it is compared with.

use std::ffi::OsString;
use std::fs;
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;
use tidewire_bench::RunResults;

/// The fewest rounds that a build without `--one-round` accepts.
const MIN_ROUNDS: usize = 7;

/// The number of lines of a failed program's standard error that are shown.
const MAX_STDERR_LINES: usize = 20;

/// A build of this program.
pub(crate) struct Program {
    path: PathBuf,
    workloads: Vec<ListedWorkload>,
    has_one_round: bool,
}

/// A workload as `list` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedWorkload {
    pub(crate) comparison: String,
    pub(crate) workload: String,
    /// The names as printed. A name may contain the separator, so the list is searched and not split.
    contenders: String,
}

/// How to run a build to measure a workload. Both builds are run in the same way.
#[derive(Clone, Copy)]
pub(crate) struct RunOptions<'a> {
    pub(crate) is_one_round: bool,
    pub(crate) is_quick: bool,
    pub(crate) contender: Option<&'a str>,
}

impl RunOptions<'_> {
    /// Returns how often a run measures each contender.
    pub(crate) fn measurements(self) -> usize {
        if self.is_one_round { 1 } else { MIN_ROUNDS }
    }
}

impl Program {
    /// Runs the program at `path` to list its workloads and to detect its options.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // A bare name is a file in the working directory, not a program on the `PATH`.
        let path = path::absolute(path).with_context(|| format!("invalid path of a program: {}", path.display()))?;
        let mut program = Self { path, workloads: Vec::new(), has_one_round: false };
        program.workloads = parse_list(&program.output(&["list".into()])?);
        let Some(first) = program.workloads.first() else {
            bail!("{} is not a build of tidewire-bench: `list` prints no workload", program.path.display());
        };
        let probe = ["list".into(), "--one-round".into(), first.workload.clone().into()];
        program.has_one_round = program.output(&probe).is_ok();
        Ok(program)
    }

    /// Returns whether the build has the option `--one-round`.
    pub(crate) fn has_one_round(&self) -> bool {
        self.has_one_round
    }

    pub(crate) fn workloads(&self) -> &[ListedWorkload] {
        &self.workloads
    }

    /// Returns whether the build has the workload, with a contender whose name contains `contender`.
    pub(crate) fn has(&self, workload: &str, contender: Option<&str>) -> bool {
        self.find(workload).is_some_and(|listed| contender.is_none_or(|part| listed.contenders.contains(part)))
    }

    fn find(&self, workload: &str) -> Option<&ListedWorkload> {
        self.workloads.iter().find(|listed| listed.workload == workload)
    }

    /// Measures a workload in a new process. Returns when the process has ended.
    pub(crate) fn measure(&self, workload: &str, run: RunOptions<'_>) -> Result<RunResults> {
        let name = self.path.display();
        let listed = self.find(workload).with_context(|| format!("{name} has no workload {workload}"))?;
        let comparison = listed.comparison.as_str();
        let folder = TempDir::new().context("cannot create a temporary folder")?;
        let mut arguments: Vec<OsString> = vec![comparison.into(), "--json".into(), folder.path().into()];
        if run.is_one_round {
            arguments.extend(["--one-round".into(), workload.into()]);
            if let Some(contender) = run.contender {
                arguments.extend(["--contender".into(), contender.into()]);
            }
        } else {
            // This also runs workloads whose names contain this one. Their results are not used.
            arguments.extend(["--only".into(), workload.into(), "--rounds".into(), MIN_ROUNDS.to_string().into()]);
        }
        if run.is_quick {
            arguments.push("--quick".into());
        }
        self.output(&arguments)?;
        let file = folder.path().join(format!("{comparison}.json"));
        let json = fs::read_to_string(&file).with_context(|| format!("{name} wrote no {}", file.display()))?;
        serde_json::from_str(&json).with_context(|| format!("cannot parse the JSON that {name} wrote"))
    }

    /// Runs the program and returns its standard output. Fails unless it exits with 0.
    fn output(&self, arguments: &[OsString]) -> Result<String> {
        let name = self.path.display();
        let output = Command::new(&self.path).args(arguments).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot run {name}"))?;
        ensure!(
            output.status.success(),
            "{name} {} failed ({}): {}",
            arguments.join(" ".as_ref()).display(),
            output.status,
            last_lines(&String::from_utf8_lossy(&output.stderr))
        );
        String::from_utf8(output.stdout).with_context(|| format!("the output of {name} is not valid UTF-8"))
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(MAX_STDERR_LINES)..].join("\n")
}

/// Parses the output of `list`: a line `comparison: about`, followed by lines `  workload: contenders`.
fn parse_list(text: &str) -> Vec<ListedWorkload> {
    let mut workloads = Vec::new();
    let mut comparison = None;
    for line in text.lines() {
        let Some((name, rest)) = line.split_once(": ") else { continue };
        match (name.strip_prefix("  "), comparison) {
            (None, _) => comparison = Some(name),
            (Some(workload), Some(comparison)) => {
                workloads.push(ListedWorkload {
                    comparison: comparison.to_owned(),
                    workload: workload.to_owned(),
                    contenders: rest.to_owned(),
                });
            }
            (Some(_), None) => {}
        }
    }
    workloads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_comparison_of_each_workload() {
        // Printed by `tidewire-bench list`.
        let text = "\
channels: Bounded channels of tokio, crossbeam, flume and std, from one and from four producers
  one-producer: tokio tasks, tokio blocking, crossbeam, flume, std
  four-producers: tokio tasks, tokio blocking, crossbeam, flume, std
server: The server against Node ws, NATS, PocketBase, and its own store and connections
  server-get: Node ws, tidewire
";
        let listed = |comparison: &str, workload: &str, contenders: &str| ListedWorkload {
            comparison: comparison.to_owned(),
            workload: workload.to_owned(),
            contenders: contenders.to_owned(),
        };
        let channels = "tokio tasks, tokio blocking, crossbeam, flume, std";
        assert_eq!(
            parse_list(text),
            [
                listed("channels", "one-producer", channels),
                listed("channels", "four-producers", channels),
                listed("server", "server-get", "Node ws, tidewire"),
            ]
        );
    }

    #[test]
    fn text_without_comparisons_has_no_workloads() {
        for text in ["", "usage: something else", "  server-get: tidewire\n", "\n\n:\n"] {
            assert_eq!(parse_list(text), [], "{text:?}");
        }
    }
}
