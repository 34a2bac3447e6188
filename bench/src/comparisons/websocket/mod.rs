//! WebSocket connections compared with other libraries.

mod burst;
mod coalesced;
mod echo;
mod server;

use tidewire_bench::Workload;

use super::conn::burst::{Framing, broadcast};
use super::conn::idle;
use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "websocket",
    about: "WebSocket connections compared with tokio-tungstenite, fastwebsockets and a raw epoll loop",
    workloads,
    roles: &[<burst::TextFraming as Framing>::RECEIVERS, server::ROLE],
};

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        echo::echo("ws-echo", 1, effort.operations(64_000)),
        echo::echo("ws-echo-depth-16", 16, effort.operations(512_000)),
        broadcast::<burst::TextFraming>("ws-burst-broadcast", effort),
        idle::memory("ws-idle-memory", server::MESSAGES, effort),
    ]
}
