//! A load beside a task of the same client that waits in a `BLPOP`.

use std::rc::Rc;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_testkit::{PATIENCE, wait_until};

use super::load::{self, Load};
use super::ours::Ours;
use super::peer::Peer as _;
use super::server::{self, Server};

pub(super) fn workload(name: &'static str, server: &Rc<Server>, load: Load) -> Workload {
    let contender = |name, waits| {
        let server = server.clone();
        Contender::new(name, move |meter| round(&server, load, waits, meter)).requires_program("redis-server")
    };
    Workload {
        name,
        about: format!(
            "{} \"beside BLPOP\": another task of the same client waits in a BLPOP of an empty list. Only tidewire: on a shared \
             connection of the other clients, a BLPOP delays all requests after it.",
            load.about()
        ),
        operation: load.command.operation(),
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::ServerCpu, Metric::Allocations],
        contenders: vec![contender("without BLPOP", false), contender("beside BLPOP", true)],
    }
}

fn round(server: &Server, load: Load, waits: bool, meter: Meter) -> Sample {
    let (port, cpu) = (server.port(), server.cpu());
    load.run(move |runtime| {
        let client = runtime.block_on(Ours::connect(port));
        let waiting = waits.then(|| runtime.spawn(client.clone().wait_for_element()));
        let blocked = usize::from(waits).to_string();
        let is_ready = || server::info(port, "clients", "blocked_clients").as_ref() == Some(&blocked);
        wait_until("only the BLPOP of this round blocks", PATIENCE, is_ready);
        let sample = load::measure(runtime, &client, load, cpu, meter);
        if let Some(waiting) = waiting {
            assert!(!waiting.is_finished(), "the BLPOP waits during the whole round");
            waiting.abort();
        }
        sample
    })
}
