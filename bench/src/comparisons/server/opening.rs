//! Many connections that are opened, welcomed and closed.

use std::io::Read as _;

use serde_json::Value as Json;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_testkit::{PATIENCE, wait_until};

use super::super::Effort;
use super::super::conn::allow_files;
use super::client::{self, Client};
use super::process::{Served, load, places};
use super::serving;

/// How many come at a time. As many fit the queue of those who are not accepted yet.
const AT_ONCE: usize = 100;

pub(super) fn open_and_close(effort: Effort) -> Workload {
    let connections = usize::try_from(effort.operations(10_000)).expect("64 bits");
    Workload {
        name: "server-open-close",
        about: format!(
            "{connections} connections to the server: {AT_ONCE} at a time are opened and welcomed, all stay until the last one is \
             there, and then they are closed, {AT_ONCE} at a time. The memory is what the server has more of than before, when all have \
             left. Before \"first\" a hundredth as many came and left, and before \"again\" as many: what differs is memory that the \
             allocator keeps for the next ones. {}",
            places()
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
    allow_files(connections);
    let server = serving::start(0, connections + 1, None);
    load(|| {
        let mut observer = Client::welcomed(&server.address);
        come_and_go(&server, before);
        wait_until_alone(&mut observer);
        let (cpu, memory) = (server.cpu(), server.resident());
        let started = cpu.now();
        let sample = meter.measure(connections as u64, || come_and_go(&server, connections));
        let spent = cpu.now().saturating_sub(started);
        wait_until_alone(&mut observer);
        let grown = server.resident().saturating_sub(memory);
        sample.with_time(Metric::ServerCpu, spent).with_amount(Metric::Memory, grown)
    })
}

fn come_and_go(server: &Served, connections: usize) {
    let mut present = Vec::with_capacity(connections);
    while present.len() < connections {
        let some = AT_ONCE.min(connections - present.len());
        let mut clients: Vec<_> = (0..some).map(|_| Client::open(&server.address)).collect();
        clients.iter_mut().for_each(Client::greet);
        for client in &mut clients {
            client.be_greeted();
            client.be_welcomed();
        }
        present.append(&mut clients);
    }
    let close = client::close();
    for some in present.chunks_mut(AT_ONCE) {
        for client in &mut *some {
            client.write(&close);
        }
        for client in some {
            // Its own close, and the end.
            client.socket.read_to_end(&mut Vec::new()).expect("the server closes in order");
        }
    }
}

fn wait_until_alone(observer: &mut Client) {
    wait_until("all connections have ended", PATIENCE, || {
        let stats: Json = observer.ask(r#"{"id":1,"type":"server.stats"}"#);
        stats["connectionCount"] == 1
    });
}
