//! Live queries: their cost for writers, and their gain over polling.

mod drain;
mod evaluation;
mod fanout;
mod memory;
mod naive;
mod rows;
mod store;
mod top;
mod updates;
mod writes;

use tidewire_bench::Workload;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "live",
    about: "Live queries compared with none, with encoding per subscriber, and with repeated queries",
    workloads,
    roles: &[],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        writes::equalities(effort),
        writes::ranges(effort),
        writes::unindexed(effort),
        evaluation::unindexed(effort),
        fanout::same_query(effort),
        top::ten(effort),
        memory::per_subscription(effort),
    ]
}
