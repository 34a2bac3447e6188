//! The memory of a connection with one subscription and no events.

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::super::conn::raise_file_limit;
use super::client::Client;
use super::process::{ServerProcess, on_load_core};
use super::{row, serving};

pub(super) fn memory(effort: Effort) -> Workload {
    let connections = usize::try_from(effort.operations(5_000)).expect("64 bits");
    Workload {
        name: "server-idle-memory",
        about: format!(
            "{connections} connections to the server, each with one subscription to a row: growth of its resident memory. All \
             subscribe to the same row, or each to its own."
        ),
        operation: "connection",
        metrics: &[Metric::Memory],
        contenders: vec![
            Contender::new("same query", move |meter| open(meter, connections, |_| 0)),
            Contender::new("own query", move |meter| open(meter, connections, |number| number)),
        ],
    }
}

fn open(meter: Meter, connections: usize, row: fn(u64) -> u64) -> Sample {
    let warm_up = connections / 50;
    let all = warm_up + connections;
    raise_file_limit(all);
    let server = serving::start(all as u64, all, None);
    on_load_core(|| {
        // A warm-up, so that memory that the program allocates once is not attributed to the connections.
        let first = subscribe(&server, 0..warm_up, row);
        let before = server.resident_bytes();
        let mut others = Vec::new();
        let sample = meter.measure(connections as u64, || others = subscribe(&server, warm_up..all, row));
        let grown = server.resident_bytes().saturating_sub(before);
        drop((first, others));
        sample.with_amount(Metric::Memory, grown)
    })
}

fn subscribe(server: &ServerProcess, numbers: std::ops::Range<usize>, row: fn(u64) -> u64) -> Vec<Client> {
    let client = |number| {
        let mut client = Client::connect_tidewire(&server.address);
        client.request(&row::subscribe(row(number as u64)));
        client
    };
    numbers.map(client).collect()
}
