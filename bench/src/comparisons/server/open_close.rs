//! Opening and closing many connections.

use std::io::Read as _;

use serde_json::Value as Json;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_testkit::{PATIENCE, wait_until};

use super::super::Effort;
use super::super::conn::raise_file_limit;
use super::client::{self, Client};
use super::process::{ServerProcess, core_assignment, on_load_core};
use super::serving;

/// Connections that are opened or closed together. The listen backlog has room for them.
const BATCH: usize = 100;

pub(super) fn open_and_close(effort: Effort) -> Workload {
    let connections = usize::try_from(effort.operations(10_000)).expect("64 bits");
    Workload {
        name: "server-open-close",
        about: format!(
            "{connections} connections to the server are opened, {BATCH} at a time, and receive the welcome message. When all are \
             open they are closed, {BATCH} at a time. The memory is the growth of the server after all connections have closed. \
             Before \"first\", a hundredth as many connections were opened and closed, and before \"again\" as many: the difference \
             is memory that the allocator keeps for later connections. {}",
            core_assignment()
        ),
        operation: "connection",
        metrics: &[Metric::ServerCpu, Metric::Throughput, Metric::Memory],
        contenders: vec![
            Contender::new("first", move |meter| run(meter, connections / 100, connections)),
            Contender::new("again", move |meter| run(meter, connections, connections)),
        ],
    }
}

fn run(meter: Meter, before: usize, connections: usize) -> Sample {
    raise_file_limit(connections);
    let server = serving::start(0, connections + 1, None);
    on_load_core(|| {
        let mut observer = Client::connect_tidewire(&server.address);
        open_and_close_all(&server, before);
        wait_until_closed(&mut observer);
        let (cpu, memory) = (server.cpu(), server.resident_bytes());
        let started = cpu.now();
        let sample = meter.measure(connections as u64, || open_and_close_all(&server, connections));
        let spent = cpu.now().saturating_sub(started);
        wait_until_closed(&mut observer);
        let grown = server.resident_bytes().saturating_sub(memory);
        sample.with_time(Metric::ServerCpu, spent).with_amount(Metric::Memory, grown)
    })
}

fn open_and_close_all(server: &ServerProcess, connections: usize) {
    let mut open = Vec::with_capacity(connections);
    while open.len() < connections {
        let count = BATCH.min(connections - open.len());
        let mut clients: Vec<_> = (0..count).map(|_| Client::open(&server.address)).collect();
        clients.iter_mut().for_each(Client::send_handshake);
        for client in &mut clients {
            client.read_handshake();
            client.read_welcome();
        }
        open.append(&mut clients);
    }
    let close = client::close();
    for batch in open.chunks_mut(BATCH) {
        for client in &mut *batch {
            client.write(&close);
        }
        for client in batch {
            // Reads the close frame of the server, and the end of the stream.
            client.socket.read_to_end(&mut Vec::new()).expect("the server closes the connection");
        }
    }
}

fn wait_until_closed(observer: &mut Client) {
    wait_until("all connections have ended", PATIENCE, || {
        let stats: Json = observer.request(r#"{"id":1,"type":"server.stats"}"#);
        stats["connectionCount"] == 1
    });
}
