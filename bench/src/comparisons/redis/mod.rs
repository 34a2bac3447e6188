//! The Redis client against its peers, all with one connection that every task shares.

mod data;
mod fred;
mod load;
mod ours;
mod peer;
mod raw;
mod redis_rs;
mod rustis;
mod server;

use std::rc::Rc;

use tidewire_bench::{Contender, Metric, Workload};

use self::load::{Load, Runs, Task};
use self::peer::Peer;
use self::server::Server;
use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "redis",
    about: "The Redis client against redis-rs, fred, rustis and a raw pre-encoded loop, on one connection",
    workloads,
    roles: &[],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    let server = Rc::new(Server::new());
    let workload = |name, task, tasks, runs, turns| {
        workload(name, &server, Load { task, tasks, runs, turns: turns_of_a_task(effort, turns, tasks) })
    };
    vec![
        workload("redis-get-1", Task::Get, 1, Runs::TwoThreads, 2_000),
        workload("redis-set-1", Task::Set, 1, Runs::TwoThreads, 2_000),
        workload("redis-get-64", Task::Get, 64, Runs::TwoThreads, 32_000),
        workload("redis-set-64", Task::Set, 64, Runs::TwoThreads, 32_000),
        workload("redis-get-512", Task::Get, 512, Runs::TwoThreads, 51_200),
        workload("redis-get-1-current-thread", Task::Get, 1, Runs::CurrentThread, 2_000),
        workload("redis-set-1-current-thread", Task::Set, 1, Runs::CurrentThread, 2_000),
        workload("redis-get-64-current-thread", Task::Get, 64, Runs::CurrentThread, 32_000),
        workload("redis-set-64-current-thread", Task::Set, 64, Runs::CurrentThread, 32_000),
        workload("redis-get-512-current-thread", Task::Get, 512, Runs::CurrentThread, 51_200),
        workload("redis-pipeline-100", Task::Pipeline, 1, Runs::TwoThreads, 500),
        workload("redis-lrange-1000", Task::ListRange, 1, Runs::TwoThreads, 300),
        workload("redis-mget-1000", Task::MultiGet, 1, Runs::TwoThreads, 200),
        workload("redis-get-1-mib", Task::GetLarge, 1, Runs::TwoThreads, 200),
    ]
}

/// All turns are shared out evenly, and each task has one at least.
fn turns_of_a_task(effort: Effort, turns: u64, tasks: usize) -> u64 {
    (effort.operations(turns) / tasks as u64).max(1)
}

fn workload(name: &'static str, server: &Rc<Server>, load: Load) -> Workload {
    let raw = server.clone();
    Workload {
        name,
        about: load.about(),
        operation: load.task.operation(),
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::ServerCpu, Metric::Allocations],
        contenders: vec![
            Contender::new("raw", move |meter| raw::round(&raw, load, meter)).needing("redis-server"),
            contender::<ours::Ours>(server, load),
            contender::<redis_rs::RedisRs>(server, load),
            contender::<fred::Fred>(server, load),
            contender::<rustis::Rustis>(server, load),
        ],
    }
}

fn contender<P: Peer>(server: &Rc<Server>, load: Load) -> Contender {
    let server = server.clone();
    Contender::new(P::NAME, move |meter| load::round::<P>(&server, load, meter)).needing("redis-server")
}
