//! The cost of a connection with one subscription and no events.

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::super::conn::allow_files;
use super::client::Client;
use super::process::{Served, load};
use super::{row, serving};

pub(super) fn memory(effort: Effort) -> Workload {
    let connections = usize::try_from(effort.operations(5_000)).expect("64 bits");
    Workload {
        name: "server-idle-memory",
        about: format!(
            "{connections} connections to the server, each with one subscription to a row, and nothing else: by how much its resident \
             memory has grown. They follow the same row, or each its own."
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
    let few = connections / 50;
    let all = few + connections;
    allow_files(all);
    let server = serving::start(all as u64, all, None);
    load(|| {
        // So that what the first ones touch of the program and its runtime is not theirs.
        let first = follow(&server, 0..few, row);
        let before = server.resident();
        let mut others = Vec::new();
        let sample = meter.measure(connections as u64, || others = follow(&server, few..all, row));
        let grown = server.resident().saturating_sub(before);
        drop((first, others));
        sample.with_amount(Metric::Memory, grown)
    })
}

fn follow(server: &Served, numbers: std::ops::Range<usize>, row: fn(u64) -> u64) -> Vec<Client> {
    let follow = |number| {
        let mut client = Client::welcomed(&server.address);
        client.ask(&row::subscribe(row(number as u64)));
        client
    };
    numbers.map(follow).collect()
}
