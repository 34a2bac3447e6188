//! What connections cost that nobody uses: the memory and the CPU of a server process with thousands of them.
//!
//! Each has had one request answered, so that whatever a connection allocates on its first use is there. What the kernel keeps
//! for a socket is no memory of the process, and the same for all.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use tidewire_bench::{Contender, CpuClock, Meter, Metric, Sample, Workload};
use tidewire_testkit::Process;

use super::super::Effort;
use super::allow_files;
use super::server::{self, FRAME, ROLE};

pub(super) fn memory(effort: Effort) -> Workload {
    let connections = connections(effort);
    let contender = |name| {
        Contender::new(name, move |meter| {
            let mut server = Server::start(name, connections);
            // So that what the first ones touch of the program and its runtime is not theirs.
            server.open(connections / 50);
            let before = server.resident();
            let sample = server.measure(meter, connections);
            let grown = server.resident().saturating_sub(before);
            sample.with_amount(Metric::Memory, grown)
        })
    };
    Workload {
        name: "conn-idle-memory",
        about: format!(
            "{connections} connections to an echo server in a process of its own, idle after one request each: by how much \
             its resident memory has grown."
        ),
        operation: "connection",
        metrics: &[Metric::Memory],
        contenders: server::ALL.iter().map(|&(name, _)| contender(name)).collect(),
    }
}

pub(super) fn cpu(effort: Effort) -> Workload {
    let (connections, time) = (connections(effort), Duration::from_millis(effort.operations(3_000)));
    let contender = |name| {
        Contender::new(name, move |meter| {
            let mut server = Server::start(name, connections);
            let sample = server.measure(meter, connections);
            // It finishes what it was doing.
            thread::sleep(time / 50);
            let cpu = CpuClock::of(server.process.pid()).expect("the server lives");
            let before = cpu.now();
            thread::sleep(time);
            let spent = cpu.now().saturating_sub(before);
            sample.with(Metric::IdleCpu, 100.0 * spent.as_secs_f64() / time.as_secs_f64())
        })
    };
    Workload {
        name: "conn-idle-cpu",
        about: format!("{connections} connections to an echo server in a process of its own, idle for {time:?}."),
        operation: "server",
        metrics: &[Metric::IdleCpu],
        contenders: vec![contender("tidewire-conn")],
    }
}

fn connections(effort: Effort) -> usize {
    usize::try_from(effort.operations(5_000)).expect("64 bits")
}

/// A server and its connections.
struct Server {
    // Dropped first, so that it is the clients who leave.
    connections: Vec<TcpStream>,
    process: Process,
    addr: String,
}

impl Server {
    fn start(name: &str, connections: usize) -> Self {
        allow_files(2 * connections);
        let process = ROLE.start(&[name.into(), connections.to_string()]);
        let addr = process.wait_for_line("listening on ");
        Self { connections: Vec::new(), process, addr }
    }

    fn measure(&mut self, meter: Meter, connections: usize) -> Sample {
        meter.measure(connections as u64, || self.open(connections))
    }

    /// Opens so many more, and has one request answered on each.
    fn open(&mut self, connections: usize) {
        let (request, mut reply) = (server::frames(1), [0; FRAME]);
        for _ in 0..connections {
            let mut socket = TcpStream::connect(&self.addr).expect("the server accepts");
            socket.write_all(&request).expect("the server reads");
            socket.read_exact(&mut reply).expect("the server answers");
            assert!(reply[..] == request, "an echo is what was sent");
            self.connections.push(socket);
        }
    }

    /// Its resident memory in bytes. The kernel counts page by page, where the other files under /proc are an estimate.
    fn resident(&self) -> u64 {
        let rollup =
            fs::read_to_string(format!("/proc/{}/smaps_rollup", self.process.pid())).expect("the server lives");
        let resident = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).expect("it has resident memory");
        let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number of kB");
        1024 * kilobytes
    }
}
