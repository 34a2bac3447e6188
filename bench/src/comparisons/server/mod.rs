//! The server compared with alternatives, and with the crates that it is built on.
//!
//! Every server is a separate process on its own core, and the load is this process, on another core. The main metric is the
//! server's CPU time per operation, which determines how much one core can serve.

mod archive;
mod broadcast;
mod client;
mod fanout;
mod get;
mod hostile;
mod idle;
mod insert;
mod nats;
mod open_close;
mod peers;
mod pocketbase;
mod process;
mod queries;
mod row;
mod serving;

use tidewire_bench::Workload;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "server",
    about: "The server compared with Node ws, NATS, PocketBase, and its own store and connections",
    workloads,
    roles: &[serving::ROLE, insert::STORE, broadcast::ROLE],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    let mut workloads = vec![
        get::get(effort),
        insert::insert(effort),
        fanout::fanout(effort),
        idle::memory(effort),
        queries::distinct(effort),
        open_close::open_and_close(effort),
    ];
    workloads.extend(hostile::workloads(effort));
    workloads
}
