//! Tests of the command-line program: output and exit codes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// Runs the program with `--quick` and with these bars.
fn bench(folder: &Path, bars: &str, arguments: &[&str]) -> Output {
    let file = folder.join("bars.toml");
    fs::write(&file, bars).unwrap();
    Command::new(env!("CARGO_BIN_EXE_tidewire-bench"))
        .args(["--quick", "--bars"])
        .arg(file)
        .arg("--json")
        .arg(folder)
        .args(arguments)
        .output()
        .unwrap()
}

/// A bar on the throughput of a channel, in messages per second.
fn bar(at_least: &str) -> String {
    format!(
        "[[bar]]\nworkload = 'one-producer'\ncontender = 'std'\nmetric = 'throughput'\nat_least = {at_least}\nwhy = 'A test.'"
    )
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn check_fails_only_on_a_missed_bar() {
    let folder = TempDir::new().unwrap();
    let run = |bars: &str, more: &[&str]| {
        let mut arguments = vec!["channels", "--only", "one-producer", "--rounds", "7"];
        arguments.extend(more);
        bench(folder.path(), bars, &arguments)
    };

    let held = run(&bar("1.0"), &["--check"]);
    assert_eq!(held.status.code(), Some(0), "{}", stderr(&held));
    assert!(stdout(&held).contains("| held "), "{}", stdout(&held));

    let missed = run(&bar("1e15"), &["--check"]);
    assert_eq!(missed.status.code(), Some(1), "{}", stderr(&missed));
    assert!(stdout(&missed).contains("| MISSED "), "{}", stdout(&missed));
    assert!(!stdout(&missed).contains("four-producers"), "{}", stdout(&missed));

    let unchecked = run(&bar("1e15"), &[]);
    assert_eq!(unchecked.status.code(), Some(0), "{}", stderr(&unchecked));

    let json = fs::read(folder.path().join("channels.json")).unwrap();
    let json: Json = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["bars"][0]["verdict"], "missed");
    assert_eq!(json["workloads"][0]["standings"].as_array().unwrap().len(), 5);
}

#[test]
fn too_few_rounds_are_rejected() {
    let folder = TempDir::new().unwrap();
    let rejected = bench(folder.path(), "", &["channels", "--rounds", "3"]);
    assert_eq!(rejected.status.code(), Some(2));
    assert!(stderr(&rejected).contains("must be between 7 and 1000, got 3"), "{}", stderr(&rejected));
}

#[test]
fn bar_with_unknown_contender_is_an_error() {
    let folder = TempDir::new().unwrap();
    let rejected = bench(folder.path(), &bar("1.0").replace("std", "sdt"), &["all"]);
    assert_eq!(rejected.status.code(), Some(2));
    assert!(stderr(&rejected).contains("has no contender \"sdt\""), "{}", stderr(&rejected));
    assert!(stdout(&rejected).is_empty());
}

#[test]
fn bars_of_this_package_match_its_workloads() {
    let listed = Command::new(env!("CARGO_BIN_EXE_tidewire-bench")).arg("list").output().unwrap();
    assert_eq!(listed.status.code(), Some(0), "{}", stderr(&listed));
    assert!(stdout(&listed).contains("redis-ping: depth 1, depth 16, depth 128"), "{}", stdout(&listed));
}

#[test]
fn contenders_without_redis_server_are_left_out() {
    let folder = TempDir::new().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tidewire-bench"))
        .args(["pipelining", "--check", "--json"])
        .arg(folder.path())
        .env("PATH", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("`make peers` installs it"), "{}", stdout(&output));
    assert!(stdout(&output).contains("| left out "), "{}", stdout(&output));
}

#[test]
fn cpu_of_the_server_process_is_measured() {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), "", &["pipelining", "--rounds", "7"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Json = serde_json::from_slice(&fs::read(folder.path().join("pipelining.json")).unwrap()).unwrap();
    for standing in json["workloads"][0]["standings"].as_array().unwrap() {
        let server_cpu = standing["measured"]["server-cpu"]["value"]["median"].as_f64().unwrap();
        assert!(server_cpu > 0.0, "{standing}");
    }
    assert!(stdout(&output).contains("server CPU per ping"), "redis-server is needed: {}", stdout(&output));
}

/// Writes a shell script that simulates an older build: it handles some arguments itself and passes everything else to the real
/// program. Returns its path.
fn older_build(folder: &Path, script: &str) -> PathBuf {
    let file = folder.join("older-bench");
    let program = env!("CARGO_BIN_EXE_tidewire-bench");
    let text = format!("#!/bin/sh\nBENCH='{program}'\n{script}\nexec \"$BENCH\" \"$@\"\n");
    // Written by another process: a child that a parallel test forks would inherit a descriptor that is open for writing here, and
    // executing the file would fail with ETXTBSY.
    let write = r#"printf %s "$2" > "$1" && chmod +x "$1""#;
    let written = Command::new("sh").args(["-c", write, "sh"]).arg(&file).arg(text).status().unwrap();
    assert!(written.success());
    file
}

/// Compares the program with the one at `before`.
fn compare(folder: &Path, before: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidewire-bench"))
        .args(["--quick", "--rounds", "7", "--before"])
        .arg(before)
        .arg("--json")
        .arg(folder)
        .args(arguments)
        .output()
        .unwrap()
}

/// Returns the JSON of a comparison that succeeded.
fn changes(folder: &Path, output: &Output) -> Json {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&fs::read(folder.join("before.json")).unwrap()).unwrap()
}

/// Checks that each contender has a pair of values per round for all of these metrics. Returns the names of the contenders.
fn contenders_with(workload: &Json, metrics: &[&str]) -> BTreeSet<String> {
    let changes = workload["metrics"].as_array().unwrap();
    for change in changes {
        assert!(metrics.contains(&change["metric"].as_str().unwrap()), "{change}");
        assert_eq!(change["before"].as_array().unwrap().len(), 7, "{change}");
        assert_eq!(change["now"].as_array().unwrap().len(), 7, "{change}");
        // Other metrics may be zero.
        if change["metric"] == "throughput" {
            assert!(change["gain"]["median"].as_f64().unwrap() > 0.0, "{change}");
        }
    }
    let names: BTreeSet<_> = changes.iter().map(|change| change["contender"].as_str().unwrap().to_owned()).collect();
    assert_eq!(changes.len(), names.len() * metrics.len(), "{workload}");
    names
}

#[test]
fn build_is_compared_with_itself() {
    let folder = TempDir::new().unwrap();
    let this = Path::new(env!("CARGO_BIN_EXE_tidewire-bench"));
    let output = compare(folder.path(), this, &["channels", "--only", "one-producer"]);
    let json = changes(folder.path(), &output);
    assert_eq!(json["measurements_per_run"], 1);
    assert_eq!(json["workloads"].as_array().unwrap().len(), 1);
    assert_eq!(json["workloads"][0]["workload"], "one-producer");
    let contenders = contenders_with(&json["workloads"][0], &["throughput", "cpu", "allocations"]);
    assert_eq!(contenders.len(), 5);
    assert!(stdout(&output).contains("| contender "), "{}", stdout(&output));
}

#[test]
fn throughput_cpu_and_memory_of_two_builds_are_compared() {
    let folder = TempDir::new().unwrap();
    let this = Path::new(env!("CARGO_BIN_EXE_tidewire-bench"));
    let output = compare(folder.path(), this, &["server", "--only", "server-get", "--contender", "tidewire"]);
    let json = changes(folder.path(), &output);
    let contenders = contenders_with(&json["workloads"][0], &["server-cpu", "throughput"]);
    assert_eq!(Vec::from_iter(contenders), ["tidewire"]);

    let output = compare(folder.path(), this, &["server", "--only", "idle-memory", "--contender", "own query"]);
    let json = changes(folder.path(), &output);
    assert_eq!(json["workloads"][0]["metrics"][0]["metric"], "memory");
    assert_eq!(json["workloads"][0]["metrics"].as_array().unwrap().len(), 1);
}

#[test]
fn build_without_one_round_is_compared() {
    let folder = TempDir::new().unwrap();
    // The error of clap for an unknown option.
    let older = older_build(
        folder.path(),
        r#"case " $* " in
  *" --one-round "* | *" --contender "*) echo "error: unexpected argument" >&2; exit 2 ;;
esac"#,
    );
    let output = compare(folder.path(), &older, &["channels", "--only", "one-producer", "--contender", "std"]);
    let json = changes(folder.path(), &output);
    assert_eq!(json["measurements_per_run"], 7);
    let contenders = contenders_with(&json["workloads"][0], &["throughput", "cpu", "allocations"]);
    assert_eq!(Vec::from_iter(contenders), ["std"]);
    assert!(stdout(&output).contains("the median of its 7 measurements"), "{}", stdout(&output));
}

#[test]
fn workloads_of_one_build_are_listed() {
    let folder = TempDir::new().unwrap();
    let older = older_build(
        folder.path(),
        r#"if [ "$*" = list ]; then
  "$BENCH" list | sed -e 's/^  four-producers:/  three-producers:/' -e 's/^\(  pool-alone:.*\), moving/\1/'
  exit
fi"#,
    );
    let output = compare(folder.path(), &older, &["channels", "--contender", "std"]);
    let json = changes(folder.path(), &output);
    assert_eq!(json["only_now"], json!(["four-producers"]));
    assert_eq!(json["only_before"], json!(["three-producers"]));
    assert_eq!(json["workloads"].as_array().unwrap().len(), 1);
    assert!(stdout(&output).contains("Workloads of the older build only: three-producers."), "{}", stdout(&output));

    let output = compare(folder.path(), &older, &["pool", "--only", "pool-alone", "--contender", "moving"]);
    let json = changes(folder.path(), &output);
    assert_eq!(json["only_now"], json!(["pool-alone"]), "the older build does not have the contender");
    assert_eq!(json["workloads"], json!([]));
}

#[test]
fn error_names_the_older_build_that_failed() {
    let folder = TempDir::new().unwrap();
    let rejected = |before: &Path| {
        let output = compare(folder.path(), before, &["channels", "--only", "one-producer"]);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        stderr(&output)
    };
    let absent = rejected(&folder.path().join("absent"));
    assert!(absent.contains("cannot run") && absent.contains("/absent"), "{absent}");

    let not_executable = folder.path().join("not-executable");
    fs::write(&not_executable, "").unwrap();
    let not_executable = rejected(&not_executable);
    assert!(not_executable.contains("cannot run") && not_executable.contains("/not-executable"), "{not_executable}");

    let another_program = rejected(Path::new("/bin/true"));
    assert!(another_program.contains("is not a build of tidewire-bench"), "{another_program}");

    let crashes = older_build(folder.path(), r#"if [ "$1" = channels ]; then echo "disk full" >&2; exit 101; fi"#);
    let crashes = rejected(&crashes);
    assert!(crashes.contains("older-bench channels") && crashes.contains("disk full"), "{crashes}");

    let writes_no_json = older_build(folder.path(), r#"if [ "$1" = channels ]; then exit 0; fi"#);
    let writes_no_json = rejected(&writes_no_json);
    assert!(writes_no_json.contains("older-bench wrote no"), "{writes_no_json}");
}

#[test]
fn single_round_is_written_and_not_judged() {
    let folder = TempDir::new().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tidewire-bench"))
        .args(["channels", "--quick", "--one-round", "one-producer", "--contender", "std", "--json"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Json = serde_json::from_slice(&fs::read(folder.path().join("channels.json")).unwrap()).unwrap();
    let standings = json["workloads"][0]["standings"].as_array().unwrap();
    assert_eq!(standings.len(), 1);
    assert_eq!(standings[0]["measured"]["throughput"]["rounds"].as_array().unwrap().len(), 1);
    assert_eq!(json["bars"], json!([]));

    for (option, name) in [("--one-round", "one-prod"), ("--only", "absent"), ("--contender", "absent")] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_tidewire-bench")).args(["channels", option, name]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(&format!("{name:?}")), "{}", stderr(&output));
    }
}

/// Runs all workloads of a comparison, and checks that each has at least one contender.
fn every_workload_runs(comparison: &str) {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), "", &[comparison, "--rounds", "7"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = fs::read(folder.path().join(format!("{comparison}.json"))).unwrap();
    let json: Json = serde_json::from_slice(&json).unwrap();
    for workload in json["workloads"].as_array().unwrap() {
        // Without valgrind, no contender counts instructions.
        let has_any = |kind: &str| !workload[kind].as_array().unwrap().is_empty();
        assert!(has_any("standings") || has_any("left_out"), "{workload}");
    }
}

#[test]
fn every_conn_workload_runs() {
    every_workload_runs("conn");
}

#[test]
fn every_websocket_workload_runs() {
    every_workload_runs("websocket");
}

#[test]
fn every_store_workload_runs() {
    every_workload_runs("store");
}

#[test]
fn every_live_workload_runs() {
    every_workload_runs("live");
}

#[test]
fn every_server_workload_runs() {
    every_workload_runs("server");
}

#[test]
fn every_redis_workload_runs() {
    every_workload_runs("redis");
}
