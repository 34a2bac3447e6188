//! A server process on a fixed port and data directory that can be killed and restarted.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;
use tidewire_testkit::{Port, Process};

/// A server process that is restarted with its data.
pub(super) struct RestartableServer {
    port: Port,
    dir: TempDir,
    process: Process,
}

impl RestartableServer {
    pub(super) fn start() -> Self {
        let (port, dir) = (Port::reserve(), tempfile::tempdir().unwrap());
        // The limit is small enough for slow readers to reach it.
        let config = json!({"backpressure": {"maxBufferedBytes": 96 << 10}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let process = spawn_server(&port, dir.path());
        Self { port, dir, process }
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Kills the process with SIGKILL and restarts it.
    pub(super) fn kill(&mut self) {
        self.process.kill();
        self.check();
        self.process = spawn_server(&self.port, self.dir.path());
    }

    /// Stops the process with SIGTERM and restarts it.
    pub(super) fn stop(&mut self) {
        self.process.terminate();
        let status = self.process.wait();
        self.check();
        assert!(status.success(), "exited with {status}: {}", self.process.output());
        self.process = spawn_server(&self.port, self.dir.path());
    }

    /// Checks that the log has no panics or errors.
    pub(super) fn check(&self) {
        let output = self.process.output();
        let is_fault = |line: &&str| line.contains("panicked") || line.contains("\"ERROR\"");
        assert_eq!(output.lines().find(is_fault), None, "a panic or error in the log:\n{output}");
    }
}

fn spawn_server(port: &Port, dir: &Path) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidewire"));
    command.env("RUST_LOG", "warn").args(["--durability", "always", "--grace", "500", "--port"]);
    command.arg(port.number().to_string()).arg("--config").arg(dir.join("config.json"));
    command.arg("--data-dir").arg(dir.join("data"));
    let process = Process::spawn(command);
    process.wait_for_line("ws://");
    process
}
