//! The server against what one would take otherwise, and against the crates that it stands on.
//!
//! Every server is a process of its own on a core of its own, and the load is this process, on another one. What is compared is
//! mostly the CPU of the server for each operation, which is what a core of it can carry.

mod broadcast;
mod client;
mod fanout;
mod get;
mod idle;
mod insert;
mod nats;
mod opening;
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
    about: "The server against Node ws, NATS, PocketBase, and its own store and connections",
    workloads,
    roles: &[serving::ROLE, insert::STORE, broadcast::ROLE],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        get::get(effort),
        insert::insert(effort),
        fanout::fanout(effort),
        idle::memory(effort),
        queries::distinct(effort),
        opening::open_and_close(effort),
    ]
}
