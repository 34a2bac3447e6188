//! The store compared with redb and `SQLite`.

mod checkpoint;
mod contender;
pub(super) mod folder;
mod group;
mod insert;
mod memory;
mod ours;
mod query;
mod read;
mod redb;
mod row;
mod sqlite;
mod start;

use tidewire_bench::Workload;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "store",
    about: "The store compared with redb and SQLite, each with group commit",
    workloads,
    roles: &[memory::HOLD, start::FILL, start::START],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        insert::many(effort),
        insert::one(effort),
        read::points(effort),
        query::indexed(effort),
        start::after_kill(effort),
        memory::per_row(effort),
        checkpoint::commits(effort),
    ]
}
