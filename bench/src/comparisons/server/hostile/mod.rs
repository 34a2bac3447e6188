//! Latency of ordinary requests while another connection sends costly ones.
//!
//! Each contender is an [`Attack`]: the requests of the other connection. The baseline sends cheap requests at the same depth. Every
//! round has its own server, because a costly request may outlive the connection that sent it.

mod attack;
mod attacker;
mod paced;

use std::time::Duration;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use self::attack::Attack;
use self::attacker::{Attacker, IN_FLIGHT};
use self::paced::{CONNECTIONS, Operation, Pace, PacedLoad};
use super::super::Effort;
use super::super::store::folder;
use super::archive;
use super::process::{core_assignment, on_load_core};
use super::serving;

/// The rows that ordinary requests use.
const ROWS: u64 = 1000;

/// The amount of work of a round.
#[derive(Clone, Copy)]
struct Size {
    /// The number of records in the archive.
    records: u64,
    /// The length of a `store.insertMany` request.
    insert_many_bytes: usize,
    pace: Pace,
}

pub(super) fn workloads(effort: Effort) -> [Workload; 3] {
    [
        workload("server-hostile-get", Operation::Get, effort),
        workload("server-hostile-insert", Operation::Insert, effort),
        workload("server-hostile-push", Operation::Push, effort),
    ]
}

fn workload(name: &'static str, operation: Operation, effort: Effort) -> Workload {
    let size = match effort {
        // Just below the default of `maxPayloadBytes`.
        Effort::Full => Size {
            records: 100_000,
            insert_many_bytes: (1 << 20) - 1024,
            pace: Pace { turns: 200, interval: Duration::from_millis(2) },
        },
        Effort::Quick => Size {
            records: 100,
            insert_many_bytes: 2 << 10,
            pace: Pace { turns: 4, interval: Duration::from_millis(1) },
        },
    };
    let contenders = Attack::ALL
        .map(|attack| Contender::new(attack.name(), move |meter| measure(meter, operation, attack, size)))
        .into();
    let disk = if operation.is_durable() { format!(" The disk is {}.", folder::disk()) } else { String::new() };
    Workload {
        name,
        about: format!(
            "{} An operation is due every {:?}, {} in all. A latency starts when the operation was due. Meanwhile one other connection keeps \
             {IN_FLIGHT} requests in flight. Each contender is another kind of request: cheap store.get requests for `ordinary`, \
             and for the others requests that are costly for the server, most of them over a bucket of {} records of {} bytes \
             without indexes. A rejected request counts as answered. {}{disk}",
            operation.about(),
            size.pace.interval,
            size.pace.operations(),
            size.records,
            archive::RECORD_BYTES,
            core_assignment(),
        ),
        operation: operation.name(),
        metrics: &[Metric::LatencyP99, Metric::LatencyP50],
        contenders,
    }
}

fn measure(meter: Meter, operation: Operation, attack: Attack, size: Size) -> Sample {
    let folder = operation.is_durable().then(folder::new);
    let connections = CONNECTIONS + 2;
    let folder_path = folder.as_ref().map(tempfile::TempDir::path);
    let server = serving::start_with_archive(ROWS, size.records, connections, folder_path);
    on_load_core(|| {
        let paced = PacedLoad::connect(&server.address, operation);
        let attacker = Attacker::start(&server.address, attack.requests(size.records, size.insert_many_bytes));
        let mut latencies = Vec::new();
        let sample = meter.measure(size.pace.operations(), || latencies = paced.run(size.pace));
        attacker.stop();
        sample.with_latencies(latencies)
    })
}
