//! The program itself: what it says, keeps, refuses, and how it ends.

mod data;
mod ending;
mod refusals;
mod settings;

use std::process::Command;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidewire_testkit::{Port, Process, wait_until_async};
use tokio_tungstenite::connect_async;

use crate::client::Client;

/// A directory to run the program in.
struct Place(TempDir);

/// The program, which listens.
struct Running {
    process: Process,
    url: String,
}

/// What a run left behind that ended by itself.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Place {
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
        command
    }

    /// Runs it until it ends by itself.
    fn run(&self, args: &[&str]) -> Ended {
        let mut process = Process::spawn(self.command(args));
        let code = process.wait().code();
        Ended { code, stdout: process.stdout(), stderr: process.stderr() }
    }

    /// Starts it on a free port.
    fn start(&self, args: &[&str]) -> Running {
        Running::of(self.command(&[&["--port", "0"], args].concat()))
    }
}

impl Running {
    fn of(command: Command) -> Self {
        let process = Process::spawn(command);
        let url = format!("ws://{}", process.wait_for_line("ws://"));
        Self { process, url }
    }

    async fn client(&self) -> Client {
        Client::connect_to(&self.url).await
    }

    /// Asks it to end, and sees that it does so in order.
    fn stop(mut self) -> Process {
        self.process.terminate();
        assert_eq!(self.process.wait().code(), Some(0), "{}", self.process.output());
        self.process
    }
}

/// The lines of its log, each of which is JSON.
fn log(process: &Process) -> Vec<Json> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    process.stderr().lines().map(line).collect()
}

/// The warnings of its log.
fn warnings(process: &Process) -> Vec<String> {
    let log = log(process);
    let warnings = log.iter().filter(|line| line["level"] == "WARN");
    warnings.map(|line| line["message"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn help_and_version_are_told_and_nothing_is_started() {
    let place = Place::new();
    let help = place.run(&["--help"]);
    assert_eq!((help.code, &*help.stderr), (Some(0), ""));
    assert!(help.stdout.contains("Usage: tidewire") && help.stdout.contains("--data-dir"), "{}", help.stdout);
    let version = place.run(&["--version"]);
    assert_eq!(version.stdout, format!("tidewire {}", env!("CARGO_PKG_VERSION")));
    assert_eq!((version.code, &*version.stderr), (Some(0), ""));
    assert!(!place.has("data"));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_says_where_it_is_and_what_to_try_and_that_works() {
    let place = Place::new();
    let server = place.start(&["--path", "/live"]);
    server.process.wait_for_line("store.insert");
    let stdout = server.process.stdout();
    let lines: Vec<&str> = stdout.lines().collect();
    let [first, data, auth, how, define, insert] = lines[..] else { panic!("{stdout}") };
    assert_eq!(first, server.url);
    let port = first.strip_prefix("ws://127.0.0.1:").and_then(|rest| rest.strip_suffix("/live")).unwrap();
    assert_ne!(port.parse::<u16>().unwrap(), 0);
    assert_eq!(data, "The data is in ./data (a write is on the disk when it is answered).");
    assert_eq!(auth, "Auth is off: whoever can reach this address may do everything.");
    assert!(how.contains(first), "{how}");
    assert!(place.has("data"));

    let mut client = server.client().await;
    client.send_text(define.trim()).await;
    assert_eq!(client.reply(1).await["data"], json!({"name": "notes", "created": true}));
    client.send_text(insert.trim()).await;
    assert_eq!(client.reply(2).await["data"]["text"], "high tide at noon");
    drop(client);
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn in_memory_it_says_so_and_keeps_nothing() {
    let place = Place::new();
    let server = place.start(&["--engine", "memory"]);
    server.process.wait_for_line("The data is in memory, and gone when this ends.");
    assert!(!place.has("data"));
    server.stop();
}

/// Whoever reads the first line may close the pipe then.
#[tokio::test(flavor = "multi_thread")]
async fn it_serves_also_if_nobody_can_be_told() {
    let (place, port) = (Place::new(), Port::reserve());
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" --engine memory --port $1 >/dev/full", env!("CARGO_BIN_EXE_tidewire")]);
    command.arg(port.number().to_string()).current_dir(place.0.path());
    let process = Process::spawn(command);
    let url = format!("ws://{}/", port.addr());
    wait_until_async("it listens", tidewire_testkit::PATIENCE, async || connect_async(&url).await.is_ok()).await;
    let process = Running { process, url }.stop();
    assert_eq!(warnings(&process), ["the standard output is closed"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn its_log_is_json_where_no_person_reads_it() {
    let place = Place::new();
    let server = place.start(&["--host", "0.0.0.0"]);
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    let mut client = Client::connect_to(&format!("ws://127.0.0.1:{port}")).await;
    client.fail("store.gett", json!({})).await;
    drop(client);
    let process = server.stop();
    let warnings = warnings(&process);
    assert!(warnings[0].starts_with("auth is off, or not required, and 0.0.0.0 is no loopback"), "{warnings:?}");
    assert!(warnings[1].starts_with("rate limiting is off, and 0.0.0.0 is no loopback"), "{warnings:?}");
    assert_eq!(warnings.len(), 2);
    let log = log(&process);
    let has = |message: &str| log.iter().any(|line| line["message"] == message && line["level"] == "INFO");
    assert!(has("the data is open") && has("stopping"), "{log:?}");
}

#[test]
fn what_is_logged_can_be_chosen() {
    let place = Place::new();
    for (asked, expected) in [
        ("", &["the data is open", "stopping"][..]),
        ("tidewire=error", &[]),
        ("a=b=c", &["RUST_LOG cannot be used, and everything from info on is logged", "the data is open", "stopping"]),
    ] {
        let mut command = place.command(&["--port", "0"]);
        command.env("RUST_LOG", asked);
        let log = log(&Running::of(command).stop());
        let messages: Vec<&str> = log.iter().map(|line| line["message"].as_str().unwrap()).collect();
        assert_eq!(messages, expected, "{asked}");
    }
}
