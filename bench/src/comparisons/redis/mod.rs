//! The Redis client compared with its peers. All tasks share one connection.

mod blocking;
mod broadcast;
mod caching;
mod data;
mod fred;
mod load;
mod ours;
mod peer;
mod publish;
mod raw;
mod raw_cache;
mod raw_subscriber;
mod redis_rs;
mod rustis;
mod server;

use std::rc::Rc;

use tidewire_bench::{Contender, Metric, Workload};

use self::load::{Command, Load, RuntimeKind};
use self::peer::Peer;
use self::server::Server;
use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "redis",
    about: "The Redis client compared with redis-rs, fred, rustis and a raw loop of pre-encoded commands, on one connection",
    workloads,
    roles: &[],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    let server = Rc::new(Server::new());
    let workload = |name, command, tasks, runtime, requests| {
        workload(name, &server, Load { command, tasks, runtime, requests_per_task: per_task(effort, requests, tasks) })
    };
    vec![
        workload("redis-get-1", Command::Get, 1, RuntimeKind::TwoThreads, 2_000),
        workload("redis-set-1", Command::Set, 1, RuntimeKind::TwoThreads, 2_000),
        workload("redis-get-64", Command::Get, 64, RuntimeKind::TwoThreads, 32_000),
        workload("redis-set-64", Command::Set, 64, RuntimeKind::TwoThreads, 32_000),
        workload("redis-get-512", Command::Get, 512, RuntimeKind::TwoThreads, 51_200),
        workload("redis-get-1-current-thread", Command::Get, 1, RuntimeKind::CurrentThread, 2_000),
        workload("redis-set-1-current-thread", Command::Set, 1, RuntimeKind::CurrentThread, 2_000),
        workload("redis-get-64-current-thread", Command::Get, 64, RuntimeKind::CurrentThread, 32_000),
        workload("redis-set-64-current-thread", Command::Set, 64, RuntimeKind::CurrentThread, 32_000),
        workload("redis-get-512-current-thread", Command::Get, 512, RuntimeKind::CurrentThread, 51_200),
        workload("redis-pipeline-100", Command::Pipeline, 1, RuntimeKind::TwoThreads, 500),
        workload("redis-lrange-1000", Command::ListRange, 1, RuntimeKind::TwoThreads, 300),
        workload("redis-mget-1000", Command::MultiGet, 1, RuntimeKind::TwoThreads, 200),
        workload("redis-get-1-mib", Command::GetLarge, 1, RuntimeKind::TwoThreads, 200),
        beside_blpop(&server, effort),
        publish::workload("redis-publish-100", &server, RuntimeKind::TwoThreads, effort),
        publish::workload("redis-publish-100-current-thread", &server, RuntimeKind::CurrentThread, effort),
        caching::invalidation(&server, effort),
        caching::hit(&server, effort),
    ]
}

fn beside_blpop(server: &Rc<Server>, effort: Effort) -> Workload {
    let (command, tasks, runtime) = (Command::Get, 64, RuntimeKind::TwoThreads);
    let load = Load { command, tasks, runtime, requests_per_task: per_task(effort, 32_000, tasks) };
    blocking::workload("redis-get-64-beside-blpop", server, load)
}

/// Returns the number of requests of each task, at least one.
fn per_task(effort: Effort, requests: u64, tasks: usize) -> u64 {
    (effort.operations(requests) / tasks as u64).max(1)
}

fn workload(name: &'static str, server: &Rc<Server>, load: Load) -> Workload {
    let raw = server.clone();
    let about_raw = if load.tasks == 1 { "" } else { " \"raw\" sends one command per task in a single write." };
    Workload {
        name,
        about: format!("{}{about_raw}", load.about()),
        operation: load.command.operation(),
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::ServerCpu, Metric::Allocations],
        contenders: vec![
            Contender::new("raw", move |meter| raw::round(&raw, load, meter)).requires_program("redis-server"),
            contender::<ours::Ours>(server, load),
            contender::<redis_rs::RedisRs>(server, load),
            contender::<fred::Fred>(server, load),
            contender::<rustis::Rustis>(server, load),
        ],
    }
}

fn contender<P: Peer>(server: &Rc<Server>, load: Load) -> Contender {
    let server = server.clone();
    Contender::new(P::NAME, move |meter| load::round::<P>(&server, load, meter)).requires_program("redis-server")
}
