//! The program as it is called: what it prints, and its exit codes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs one workload as briefly as can be, judged by the bars in `bars`.
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
fn check_fails_on_a_missed_bar_and_on_no_other() {
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

    let not_asked = run(&bar("1e15"), &[]);
    assert_eq!(not_asked.status.code(), Some(0), "{}", stderr(&not_asked));

    let json = fs::read(folder.path().join("channels.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["bars"][0]["verdict"], "missed");
    assert_eq!(json["workloads"][0]["standings"].as_array().unwrap().len(), 5);
}

#[test]
fn too_few_rounds_are_refused_with_a_sentence() {
    let folder = TempDir::new().unwrap();
    let refused = bench(folder.path(), "", &["channels", "--rounds", "3"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("takes at least 7 rounds"), "{}", stderr(&refused));
}

#[test]
fn a_bar_that_fits_nothing_is_an_error_before_anything_runs() {
    let folder = TempDir::new().unwrap();
    let refused = bench(folder.path(), &bar("1.0").replace("std", "sdt"), &["all"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("has no contender \"sdt\""), "{}", stderr(&refused));
    assert!(stdout(&refused).is_empty());
}

#[test]
fn the_bars_of_this_package_fit_its_workloads() {
    let listed = Command::new(env!("CARGO_BIN_EXE_tidewire-bench")).arg("list").output().unwrap();
    assert_eq!(listed.status.code(), Some(0), "{}", stderr(&listed));
    assert!(stdout(&listed).contains("redis-ping: depth 1, depth 16, depth 128"), "{}", stdout(&listed));
}

#[test]
fn without_redis_server_the_rest_runs() {
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
fn a_server_in_another_process_is_measured() {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), "", &["pipelining", "--rounds", "7"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join("pipelining.json")).unwrap()).unwrap();
    for standing in json["workloads"][0]["standings"].as_array().unwrap() {
        let server_cpu = standing["measured"]["server-cpu"]["value"]["median"].as_f64().unwrap();
        assert!(server_cpu > 0.0, "{standing}");
    }
    assert!(stdout(&output).contains("server CPU per ping"), "redis-server is needed: {}", stdout(&output));
}

/// Runs all workloads of a comparison, and sees that each had somebody take part.
fn every_workload_runs(comparison: &str) {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), "", &[comparison, "--rounds", "7"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = fs::read(folder.path().join(format!("{comparison}.json"))).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    for workload in json["workloads"].as_array().unwrap() {
        // Where valgrind is not installed, nobody counts instructions.
        let took_part = |kind: &str| !workload[kind].as_array().unwrap().is_empty();
        assert!(took_part("standings") || took_part("left_out"), "{workload}");
    }
}

#[test]
fn every_workload_on_connections_runs() {
    every_workload_runs("conn");
}

#[test]
fn every_workload_on_websockets_runs() {
    every_workload_runs("websocket");
}

#[test]
fn every_workload_on_the_store_runs() {
    every_workload_runs("store");
}

#[test]
fn every_workload_on_live_queries_runs() {
    every_workload_runs("live");
}

#[test]
fn every_workload_on_the_server_runs() {
    every_workload_runs("server");
}

#[test]
fn every_workload_on_redis_runs() {
    every_workload_runs("redis");
}
