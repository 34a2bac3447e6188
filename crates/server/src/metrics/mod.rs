//! How a server is and what it has done: for hosts, for `/health` and for `/metrics`.

pub(crate) mod counters;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::state::Core;

/// How a server is, and what it has done since it was started.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ServerStats {
    /// What it calls itself.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Since when it runs.
    pub uptime: Duration,
    /// Who is connected.
    pub connections: usize,
    /// Who of them is logged in.
    pub authenticated: usize,
    /// How many queries they follow.
    pub subscriptions: usize,
    /// Requests handled.
    pub requests: u64,
    /// Those that were answered with an error.
    pub failed: u64,
    /// Connections that a panic has ended.
    pub panics: u64,
    /// Connections that were closed because their client did not read.
    pub slow_consumers: u64,
    /// All that `server.stats` tells a client.
    pub wire: Json,
}

pub(crate) fn stats(core: &Core, address: SocketAddr) -> ServerStats {
    let rows = core.rows();
    let counters = &core.counters;
    ServerStats {
        name: core.options.name.clone(),
        address,
        uptime: core.started.elapsed(),
        connections: rows.len(),
        authenticated: rows.iter().filter(|row| row.user_id.is_some()).count(),
        subscriptions: counters.subscriptions.load(SeqCst),
        requests: counters.requests.load(Relaxed),
        failed: counters.failed.load(Relaxed),
        panics: counters.panics.load(Relaxed),
        slow_consumers: counters.slow_consumers.load(Relaxed),
        wire: core.server_stats(),
    }
}

/// Whether a server can do its work.
pub(crate) struct Health {
    pub(crate) is_well: bool,
    uptime: Duration,
}

pub(crate) fn health(core: &Core) -> Health {
    Health { is_well: !core.store.stats().is_stopped, uptime: core.started.elapsed() }
}

impl Health {
    pub(crate) fn to_json(&self) -> Json {
        let status = if self.is_well { "ok" } else { "the disk has failed: nothing is written until a restart" };
        json!({"status": status, "version": env!("CARGO_PKG_VERSION"), "uptimeMs": u64::try_from(self.uptime.as_millis()).unwrap_or(u64::MAX)})
    }
}

/// All counters, as Prometheus reads them.
pub(crate) fn prometheus(core: &Core, conn: &tidewire_conn::Stats) -> String {
    let mut page = Page::default();
    let counters = &core.counters;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
    page.gauge("connections", "Clients that are connected", core.connection_count());
    page.gauge("subscriptions", "Queries that clients follow", counters.subscriptions.load(SeqCst));
    for (name, help, value) in [
        ("connections_admitted", "Connections admitted", conn.admitted),
        ("connections_refused", "Connections refused: too many in all or of one address", conn.refused),
        ("sockets_refused", "Sockets refused before they said anything", count(&counters.refused_sockets)),
        ("origins_refused", "Connections refused for their origin", count(&counters.bad_origins)),
        ("bytes_received", "Bytes read", conn.traffic.bytes_in),
        ("bytes_sent", "Bytes written", conn.traffic.bytes_out),
        ("messages_received", "Messages read", conn.traffic.frames_in),
        ("messages_sent", "Messages written", conn.traffic.frames_out),
        ("pushes_dropped", "Pushes dropped for want of room", conn.push.dropped),
        ("pushes_unsent", "Pushes that waited when their connection ended", conn.push.unsent),
        ("pushes_replaced", "Results replaced by newer ones before they were sent", conn.push.replaced),
        ("requests", "Requests handled", count(&counters.requests)),
        ("requests_unreadable", "Messages that were no requests", count(&counters.unreadable)),
        ("requests_failed", "Requests answered with an error", count(&counters.failed)),
        ("requests_rate_limited", "Requests refused by the rate limit", count(&counters.rate_limited)),
        ("requests_backpressure", "Requests not run because their client does not read", count(&counters.backpressure)),
        ("requests_timed_out", "Requests that took too long", count(&counters.timed_out)),
        ("requests_slow", "Requests that were logged as slow", count(&counters.slow)),
        ("logins_failed", "Logins that failed", count(&counters.logins_failed)),
        ("slow_consumers", "Connections closed because their client does not read", count(&counters.slow_consumers)),
        ("heartbeats_missed", "Connections closed for want of a pong", count(&counters.heartbeats_missed)),
        ("sessions_revoked", "Connections closed because sessions were revoked", count(&counters.revoked)),
        ("panics", "Connections closed by a panic", count(&counters.panics)),
        ("subscriptions_ended", "Subscriptions ended by another's doing", count(&counters.subscriptions_ended)),
        ("pushes_held_back", "Times that a subscription waited for its client to read", count(&counters.held_back)),
        (
            "rate_keys_forgotten",
            "Users and addresses whose requests were forgotten for want of room",
            core.rate.as_ref().map_or(0, crate::session::rate_limit::RateLimiter::forgotten),
        ),
    ] {
        page.counter(name, help, value);
    }
    page.ends(&conn.ended);
    page.store(core);
    page.live(core);
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn line(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        // Writing to a string does not fail.
        let _ = write!(
            self.text,
            "# HELP tidewire_{name} {help}\n# TYPE tidewire_{name} {kind}\ntidewire_{name} {value}\n"
        );
    }

    fn gauge(&mut self, name: &str, help: &str, value: usize) {
        self.line(name, "gauge", help, value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.line(&format!("{name}_total"), "counter", help, value);
    }

    /// Why connections have ended.
    fn ends(&mut self, ended: &std::collections::BTreeMap<&'static str, u64>) {
        let name = "tidewire_connections_ended_total";
        let _ = write!(self.text, "# HELP {name} Connections that have ended, by reason\n# TYPE {name} counter\n");
        for (reason, count) in ended {
            let _ = writeln!(self.text, "{name}{{reason=\"{reason}\"}} {count}");
        }
    }

    fn store(&mut self, core: &Core) {
        let stats = core.store.stats();
        self.gauge("store_buckets", "Buckets", stats.buckets.len());
        self.gauge("store_records", "Records", stats.buckets.iter().map(|bucket| bucket.records).sum());
        self.gauge("store_record_bytes", "Memory of records", stats.buckets.iter().map(|bucket| bucket.bytes).sum());
        self.gauge("store_writes_waiting", "Writes that wait for the writer", stats.waiting);
        self.gauge("store_history_bytes", "Memory of commits that can be resumed from", stats.history_bytes);
        self.gauge("store_stopped", "Whether the disk has failed", stats.is_stopped.into());
        self.counter("store_commits", "Commits", stats.commits);
        self.counter("store_refused", "Writes refused", stats.refused);
        self.counter("store_abandoned", "Writes given up before there was room for them", stats.abandoned);
        self.counter("store_not_kept", "Groups of writes that could not be kept", stats.not_kept);
        self.counter("store_expired", "Records deleted because they had expired", stats.swept);
        self.counter("store_followers_behind", "Times that a follower fell out of the history", stats.followers_behind);
        let engine = stats.engine;
        self.counter("engine_syncs", "Times that the disk was waited for", engine.syncs);
        self.counter("engine_checkpoints", "Checkpoints made", engine.checkpoints);
        self.counter("engine_checkpoints_failed", "Checkpoints that failed", engine.checkpoints_failed);
        self.counter("engine_slowed", "Groups of writes that were slowed because the log is long", engine.slowed);
        self.line("engine_log_bytes", "gauge", "Bytes of the log", engine.log_bytes);
        self.line("engine_snapshot_bytes", "gauge", "Bytes of the newest snapshot", engine.snapshot_bytes);
    }

    fn live(&mut self, core: &Core) {
        let stats = core.live.stats();
        self.gauge("live_queries", "Queries followed, equal ones counted once", stats.queries);
        self.counter("live_events", "Events given to subscribers", stats.events);
        self.counter("live_conflated", "Events that took the place of others", stats.conflated);
        self.counter("live_restarts", "Times that all queries were read anew", stats.restarts);
    }
}
