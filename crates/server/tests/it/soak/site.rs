//! The server: a process on one port and one directory, which is killed and comes back.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;
use tidewire_testkit::{Port, Process};

/// A server that comes back with its data.
pub(super) struct Site {
    port: Port,
    dir: TempDir,
    process: Process,
}

impl Site {
    pub(super) fn open() -> Self {
        let (port, dir) = (Port::reserve(), tempfile::tempdir().unwrap());
        // So little that a slow reader comes to feel it.
        let config = json!({"backpressure": {"maxBufferedBytes": 96 << 10}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let process = start(&port, dir.path());
        Self { port, dir, process }
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Ends it without warning, and starts it again.
    pub(super) fn kill(&mut self) {
        self.process.kill();
        self.check();
        self.process = start(&self.port, self.dir.path());
    }

    /// Asks it to end, waits until it has, and starts it again.
    pub(super) fn stop(&mut self) {
        self.process.terminate();
        let status = self.process.wait();
        self.check();
        assert!(status.success(), "it ended with {status}: {}", self.process.output());
        self.process = start(&self.port, self.dir.path());
    }

    /// Whatever its clients do, it has no faults of its own.
    pub(super) fn check(&self) {
        let output = self.process.output();
        let is_fault = |line: &&str| line.contains("panicked") || line.contains("\"ERROR\"");
        assert_eq!(output.lines().find(is_fault), None, "a fault of the server:\n{output}");
    }
}

fn start(port: &Port, dir: &Path) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidewire"));
    command.env("RUST_LOG", "warn").args(["--durability", "always", "--grace", "500", "--port"]);
    command.arg(port.number().to_string()).arg("--config").arg(dir.join("config.json"));
    command.arg("--data-dir").arg(dir.join("data"));
    let process = Process::spawn(command);
    process.wait_for_line("ws://");
    process
}
