//! A server in a separate process on its own core.

use std::process::Command;

use tidewire_bench::{CpuClock, pin_process, run_on_core};
use tidewire_testkit::Process;

use super::super::conn::separate_cores;
use super::super::resident_bytes;

/// A running server.
pub(super) struct ServerProcess {
    process: Process,
    /// The listening address, as host and port.
    pub(super) address: String,
}

impl ServerProcess {
    /// Waits until the process prints its address after the text `prefix`.
    pub(super) fn new(process: Process, prefix: &str) -> Self {
        let address = process.wait_for_line(prefix);
        Self::listening(process, address)
    }

    /// Wraps a process that already listens on an address.
    pub(super) fn listening(process: Process, address: String) -> Self {
        if let Some((_, core)) = separate_cores() {
            pin_process(process.pid(), core).expect("a process can be pinned");
        }
        Self { process, address }
    }

    /// Returns the CPU clock of the server.
    pub(super) fn cpu(&self) -> CpuClock {
        CpuClock::of(self.process.pid()).expect("the server is running")
    }

    /// Returns the resident memory of the server in bytes.
    pub(super) fn resident_bytes(&self) -> u64 {
        resident_bytes(self.process.pid())
    }
}

/// Starts a peer program for one core. Go programs would otherwise start a thread per core of the machine.
pub(super) fn spawn(mut command: Command) -> Process {
    command.env("GOMAXPROCS", "1");
    Process::spawn(command)
}

/// Runs the load on a core without a server.
pub(super) fn on_load_core<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let core = separate_cores().map_or(0, |(load, _)| load);
    run_on_core(core, work).expect("a thread can be pinned")
}

/// Describes the cores of load and server.
pub(super) fn core_assignment() -> &'static str {
    if separate_cores().is_some() { "Load and server run on separate cores." } else { "Load and server share a core." }
}
