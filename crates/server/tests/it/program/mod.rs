//! Tests of the server program as a process.

mod access;
mod backup;
mod connection_logs;
mod persistence;
mod reload;
mod revoke;
mod settings;
mod shutdown;
mod startup_errors;

use std::process::Command;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidewire_testkit::{Port, Process, wait_until_async};
use tokio_tungstenite::connect_async;

use crate::client::Client;

/// The working directory of a test.
struct WorkDir(TempDir);

/// A running server.
struct ServerProcess {
    process: Process,
    url: String,
}

/// The exit code and output of a process that exited by itself.
struct Exit {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl WorkDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    fn has(&self, name: &str) -> bool {
        self.0.path().join(name).exists()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidewire"));
        command.current_dir(self.0.path()).args(args).env_remove("RUST_LOG");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TIDEWIRE_")) {
            command.env_remove(name);
        }
        // The default may exceed the limit of open files of this machine.
        command.env("TIDEWIRE_MAX_CONNECTIONS", "1000");
        command
    }

    /// Runs the program until it exits by itself.
    fn run(&self, args: &[&str]) -> Exit {
        let mut process = Process::spawn(self.command(args));
        let code = process.wait().code();
        Exit { code, stdout: process.stdout(), stderr: process.stderr() }
    }

    /// Starts a server on a free port.
    fn start(&self, args: &[&str]) -> ServerProcess {
        ServerProcess::spawn(self.command(&[&["--port", "0"], args].concat()))
    }
}

impl ServerProcess {
    fn spawn(command: Command) -> Self {
        let process = Process::spawn(command);
        let url = format!("ws://{}", process.wait_for_line("ws://"));
        Self { process, url }
    }

    async fn client(&self) -> Client {
        Client::connect_to(&self.url).await
    }

    /// Stops the server with SIGTERM and checks the exit code.
    fn stop(mut self) -> Process {
        self.process.terminate();
        assert_eq!(self.process.wait().code(), Some(0), "{}", self.process.output());
        self.process
    }
}

/// Returns the lines of the log, parsed as JSON.
fn log(process: &Process) -> Vec<Json> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    process.stderr().lines().map(line).collect()
}

/// Returns the warnings of the log.
fn warnings(process: &Process) -> Vec<String> {
    let log = log(process);
    let warnings = log.iter().filter(|line| line["level"] == "WARN");
    warnings.map(|line| line["message"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn help_and_version_are_printed_without_starting() {
    let dir = WorkDir::new();
    let help = dir.run(&["--help"]);
    assert_eq!((help.code, &*help.stderr), (Some(0), ""));
    assert!(help.stdout.contains("Usage: tidewire") && help.stdout.contains("--data-dir"), "{}", help.stdout);
    let version = dir.run(&["--version"]);
    assert_eq!(version.stdout, format!("tidewire {}", env!("CARGO_PKG_VERSION")));
    assert_eq!((version.code, &*version.stderr), (Some(0), ""));
    assert!(!dir.has("data"));
}

#[tokio::test(flavor = "multi_thread")]
async fn printed_first_steps_work() {
    let dir = WorkDir::new();
    let server = dir.start(&["--path", "/live"]);
    server.process.wait_for_line("store.insert");
    let stdout = server.process.stdout();
    let lines: Vec<&str> = stdout.lines().collect();
    let [first, data, auth, how, define, insert] = lines[..] else { panic!("{stdout}") };
    assert_eq!(first, server.url);
    let port = first.strip_prefix("ws://127.0.0.1:").and_then(|rest| rest.strip_suffix("/live")).unwrap();
    assert_ne!(port.parse::<u16>().unwrap(), 0);
    assert_eq!(data, "Data directory: ./data (acknowledged writes survive a crash).");
    assert_eq!(auth, "Auth is off: every client has full access.");
    assert!(how.contains(first), "{how}");
    assert!(dir.has("data"));

    let mut client = server.client().await;
    client.send_text(define.trim()).await;
    assert_eq!(client.reply(1).await["data"], json!({"name": "notes", "created": true}));
    client.send_text(insert.trim()).await;
    assert_eq!(client.reply(2).await["data"]["text"], "high tide at noon");
    drop(client);
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_engine_is_announced_and_creates_no_directory() {
    let dir = WorkDir::new();
    let server = dir.start(&["--engine", "memory"]);
    server.process.wait_for_line("The data is in memory only and is lost on exit.");
    assert!(!dir.has("data"));
    server.stop();
}

/// A parent process may close the pipe after reading the first line.
#[tokio::test(flavor = "multi_thread")]
async fn serves_without_a_writable_standard_output() {
    let (dir, port) = (WorkDir::new(), Port::reserve());
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" --engine memory --port $1 >/dev/full", env!("CARGO_BIN_EXE_tidewire")]);
    command.arg(port.number().to_string()).current_dir(dir.0.path()).env("TIDEWIRE_MAX_CONNECTIONS", "1000");
    let process = Process::spawn(command);
    let url = format!("ws://{}/", port.addr());
    wait_until_async("the server listens", tidewire_testkit::PATIENCE, async || connect_async(&url).await.is_ok())
        .await;
    let process = ServerProcess { process, url }.stop();
    assert_eq!(warnings(&process), ["cannot write to standard output"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_is_json_unless_on_a_terminal() {
    let dir = WorkDir::new();
    let server = dir.start(&["--host", "0.0.0.0"]);
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    let mut client = Client::connect_to(&format!("ws://127.0.0.1:{port}")).await;
    client.call_err("store.gett", json!({})).await;
    drop(client);
    let process = server.stop();
    let warnings = warnings(&process);
    assert!(warnings[0].starts_with("auth is off or not required on 0.0.0.0"), "{warnings:?}");
    assert!(warnings[1].starts_with("the rate limit is off on 0.0.0.0"), "{warnings:?}");
    assert_eq!(warnings.len(), 2);
    let log = log(&process);
    let has = |message: &str| log.iter().any(|line| line["message"] == message && line["level"] == "INFO");
    assert!(has("data directory opened") && has("shutting down"), "{log:?}");
}

#[test]
fn rust_log_sets_the_level() {
    let dir = WorkDir::new();
    for (filter, expected) in [
        ("", &["data directory opened", "shutting down"][..]),
        ("tidewire=error", &[]),
        ("a=b=c", &["invalid RUST_LOG, using info", "data directory opened", "shutting down"]),
    ] {
        let mut command = dir.command(&["--port", "0"]);
        command.env("RUST_LOG", filter);
        let log = log(&ServerProcess::spawn(command).stop());
        let messages: Vec<&str> = log.iter().map(|line| line["message"].as_str().unwrap()).collect();
        assert_eq!(messages, expected, "{filter}");
    }
}
