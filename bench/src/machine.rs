//! A description of the machine that a table was measured on.

use std::fmt;
use std::fs::read_to_string;
use std::thread::available_parallelism;

use serde::Serialize;

/// The machine that a table was measured on. Numbers from different machines are not comparable.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
}

impl Machine {
    /// Describes the machine that this program runs on.
    pub fn this() -> Self {
        let info = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(": "));
        let kernel = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: model.map_or("unknown CPU", |(_, model)| model).into(),
            cores: available_parallelism().map_or(1, usize::from),
            kernel: kernel.trim().into(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, kernel } = self;
        write!(f, "{cpu}, {cores} {}, Linux {kernel}", if *cores == 1 { "core" } else { "cores" })
    }
}
