//! A server in a process of its own, on a core of its own.

use std::process::Command;

use tidewire_bench::{CpuClock, on_core, pin_process};
use tidewire_testkit::Process;

use super::super::conn::apart;
use super::super::resident;

/// A server that runs.
pub(super) struct Served {
    process: Process,
    /// Where it listens: a host and a port.
    pub(super) address: String,
}

impl Served {
    /// A process that is about to print where it listens, behind this text.
    pub(super) fn new(process: Process, listening: &str) -> Self {
        let address = process.wait_for_line(listening);
        Self::listening(process, address)
    }

    /// A process that listens there.
    pub(super) fn listening(process: Process, address: String) -> Self {
        if let Some((_, core)) = apart() {
            pin_process(process.pid(), core).expect("a process can be pinned");
        }
        Self { process, address }
    }

    /// Runs while it does.
    pub(super) fn cpu(&self) -> CpuClock {
        CpuClock::of(self.process.pid()).expect("the server lives")
    }

    /// Its resident memory in bytes.
    pub(super) fn resident(&self) -> u64 {
        resident(self.process.pid())
    }
}

/// Starts a program that others wrote, for one core: those that have a thread for each would have one too many.
pub(super) fn spawn(mut command: Command) -> Process {
    command.env("GOMAXPROCS", "1");
    Process::spawn(command)
}

/// Runs the load, on the core where no server is.
pub(super) fn load<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let core = apart().map_or(0, |(load, _)| load);
    on_core(core, work).expect("a thread can be pinned")
}

/// Where load and server are, in a sentence.
pub(super) fn places() -> &'static str {
    if apart().is_some() { "The load has a core, the server another one." } else { "Load and server share a core." }
}
