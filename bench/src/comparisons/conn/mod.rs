//! Connection actors against what one writes by hand and against Framed.

pub(super) mod burst;
pub(super) mod echo;
mod fragments;
pub(super) mod idle;
mod latency;
pub(super) mod process;
pub(super) mod server;
mod unused;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tidewire_bench::{Workload, available_cores};
use tokio::runtime::{self, Runtime};

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "conn",
    about: "Connection actors over TCP against a raw tokio loop, Framed and a raw epoll loop",
    workloads,
    roles: &[<burst::Lengths as burst::Framing>::READERS, server::ROLE],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        echo::echo("conn-echo", 50, 32, effort.operations(800_000)),
        echo::echo("conn-echo-depth-1", 50, 1, effort.operations(50_000)),
        latency::push(effort),
        fragments::push(effort),
        burst::broadcast::<burst::Lengths>("conn-burst-broadcast", effort),
        idle::memory("conn-idle-memory", server::FRAMES, effort),
        idle::cpu(effort),
        unused::push(effort),
    ]
}

/// A core for the load and one for the server, where there are two.
pub(super) fn apart() -> Option<(usize, usize)> {
    match available_cores().expect("the kernel tells which cores there are")[..] {
        [load, server, ..] => Some((load, server)),
        _ => None,
    }
}

pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts")
}

/// Lets this process have so many connections open, beside what it has anyway.
pub(super) fn allow_files(connections: usize) {
    let wanted = connections as u64 + 100;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit on files can be read");
    assert!(wanted <= hard, "{wanted} open files are needed, and the hard limit is {hard}: raise it with `ulimit -Hn`");
    if soft < wanted {
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).expect("the soft limit can be raised to the hard one");
    }
}
