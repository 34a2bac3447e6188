//! Live queries beside a store: their cost for writers, and their gain over polling.

mod drain;
mod evaluation;
mod fanout;
mod memory;
mod rows;
mod singly;
mod top;
mod updates;
mod watched;
mod writes;

use tidewire_bench::Workload;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "live",
    about: "Live queries against none, against encoding for each, and against asking again",
    workloads,
    roles: &[],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        writes::equalities(effort),
        writes::ranges(effort),
        writes::unserved(effort),
        evaluation::of_unserved(effort),
        fanout::to_equal(effort),
        top::ten(effort),
        memory::per_subscription(effort),
    ]
}
