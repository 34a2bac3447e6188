//! Connection actors compared with hand-written loops and tokio-util's `Framed`.

pub(super) mod burst;
pub(super) mod echo;
mod fragments;
pub(super) mod idle;
mod instructions;
mod latency;
pub(super) mod process;
pub(super) mod server;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tidewire_bench::{Workload, available_cores};
use tokio::runtime::{self, Runtime};

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "conn",
    about: "Connection actors over TCP compared with a raw tokio loop, Framed and a raw epoll loop",
    workloads,
    roles: &[<burst::LengthFraming as burst::Framing>::RECEIVERS, server::ROLE],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        echo::echo("conn-echo", 50, 32, effort.operations(800_000)),
        echo::echo("conn-echo-depth-1", 50, 1, effort.operations(50_000)),
        latency::push(effort),
        fragments::push(effort),
        burst::broadcast::<burst::LengthFraming>("conn-burst-broadcast", effort),
        idle::memory("conn-idle-memory", server::FRAMES, effort),
        idle::cpu(effort),
        instructions::without_pushes(effort),
    ]
}

/// Returns a core for the load and one for the server, if there are two.
pub(super) fn separate_cores() -> Option<(usize, usize)> {
    match available_cores().expect("the affinity of this thread can be read")[..] {
        [load, server, ..] => Some((load, server)),
        _ => None,
    }
}

pub(super) fn runtime() -> Runtime {
    runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts")
}

/// Raises the limit on open files of this process, so that it can open this number of connections.
pub(super) fn raise_file_limit(connections: usize) {
    let wanted = connections as u64 + 100;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit on files can be read");
    assert!(wanted <= hard, "{wanted} open files are needed, but the hard limit is {hard}: raise it with `ulimit -Hn`");
    if soft < wanted {
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).expect("the soft limit can be raised to the hard one");
    }
}
