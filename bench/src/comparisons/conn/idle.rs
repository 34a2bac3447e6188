//! The cost of idle connections: memory and CPU of a server process with thousands of connections.
//!
//! Each connection has had one request answered, so memory that is allocated on first use is included. Kernel memory of sockets is
//! not part of the process, and is the same for all contenders.

use std::thread;
use std::time::Duration;

use tidewire_bench::{Contender, Metric, Workload};

use super::super::Effort;
use super::process::EchoProcess;
use super::server::{EchoProtocol, FRAMES};

pub(crate) fn memory(name: &'static str, protocol: EchoProtocol, effort: Effort) -> Workload {
    let connections = connections(effort);
    let contender = |name| {
        Contender::new(name, move |meter| {
            let mut server = EchoProcess::start(protocol, name, connections);
            // A warm-up, so that memory that the program allocates once is not attributed to the connections.
            server.open(connections / 50);
            let before = server.resident_bytes();
            let sample = meter.measure(connections as u64, || server.open(connections));
            let grown = server.resident_bytes().saturating_sub(before);
            sample.with_amount(Metric::Memory, grown)
        })
    };
    Workload {
        name,
        about: format!(
            "{connections} connections to an echo server in a separate process, idle after one request each: growth of its \
             resident memory."
        ),
        operation: "connection",
        metrics: &[Metric::Memory],
        contenders: protocol.servers.iter().map(|&(name, _)| contender(name)).collect(),
    }
}

pub(super) fn cpu(effort: Effort) -> Workload {
    let (connections, time) = (connections(effort), Duration::from_millis(effort.operations(3_000)));
    let contender = |name| {
        Contender::new(name, move |meter| {
            let mut server = EchoProcess::start(FRAMES, name, connections);
            let sample = meter.measure(connections as u64, || server.open(connections));
            // The server finishes its current work meanwhile.
            thread::sleep(time / 50);
            let cpu = server.cpu();
            let before = cpu.now();
            thread::sleep(time);
            let spent = cpu.now().saturating_sub(before);
            sample.with(Metric::IdleCpu, 100.0 * spent.as_secs_f64() / time.as_secs_f64())
        })
    };
    Workload {
        name: "conn-idle-cpu",
        about: format!("{connections} connections to an echo server in a separate process, idle for {time:?}."),
        operation: "server",
        metrics: &[Metric::IdleCpu],
        contenders: vec![contender("tidewire-conn")],
    }
}

fn connections(effort: Effort) -> usize {
    usize::try_from(effort.operations(5_000)).expect("64 bits")
}
