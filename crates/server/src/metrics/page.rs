//! The `/metrics` page in the Prometheus text format. It is rendered on request from the counters of all crates.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::state::ServerState;

/// Renders all metrics of a server.
pub(crate) fn prometheus(server: &ServerState, conn: &tidewire_conn::Stats) -> String {
    let mut page = Page::default();
    page.server(server, conn);
    page.ended(&conn.ended);
    server.operations.append(&mut page.text);
    page.store(server);
    page.live(server);
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn line(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
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

    fn server(&mut self, server: &ServerState, conn: &tidewire_conn::Stats) {
        let counters = &server.counters;
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        self.gauge("connections", "Open connections, including in-process clients", server.connection_count());
        self.gauge("subscriptions", "Active subscriptions of all connections", server.subscription_count());
        self.gauge("pool_requests", "Expensive requests queued or running on the worker pool", server.work.depth());
        self.gauge("memory_used_bytes", "Memory held by connections", server.memory.used());
        self.gauge("memory_max_bytes", "Limit of the memory held by connections", server.memory.max_bytes());
        for (name, help, value) in [
            ("connections_admitted", "Connections admitted", conn.admitted),
            (
                "connections_refused",
                "Connections rejected: too many in total or from one address",
                conn.refused + count(&counters.rejected_connections),
            ),
            (
                "sockets_refused",
                "Sockets rejected: too many in total or from one address",
                count(&counters.rejected_sockets),
            ),
            (
                "origins_refused",
                "HTTP requests rejected because of their origin or host",
                count(&counters.rejected_origins),
            ),
            (
                "forwarded_ignored",
                "HTTP requests whose forwarding headers were ignored: the peer is not a trusted proxy",
                count(&counters.forwarded_ignored),
            ),
            (
                "forwarded_invalid",
                "HTTP requests from trusted proxies with invalid forwarding headers",
                count(&counters.forwarded_invalid),
            ),
            (
                "proxy_headers_refused",
                "Sockets closed because of a missing, invalid or untrusted PROXY protocol header",
                count(&counters.rejected_proxy_headers),
            ),
            ("bytes_received", "Bytes received from clients", conn.traffic.bytes_in),
            ("bytes_sent", "Bytes sent to clients", conn.traffic.bytes_out),
            ("messages_received", "Messages received from clients", conn.traffic.frames_in),
            ("messages_sent", "Messages sent to clients", conn.traffic.frames_out),
            ("pushes_dropped", "Notices of revoked sessions dropped because the queue was full", conn.push.dropped),
            ("pushes_unsent", "Pushes still queued when their connection ended", conn.push.unsent),
            ("pushes_replaced", "Results replaced by newer ones before they were sent", conn.push.replaced),
            (
                "pushes_held_back",
                "Pushes dropped because the push buffer was full; the client gets a snapshot when it has read",
                count(&counters.held_back),
            ),
            ("requests", "Requests that have ended", server.operations.requests()),
            ("requests_failed", "Requests answered with an error", server.operations.failed()),
            ("requests_invalid", "Messages that were not valid requests", count(&counters.invalid)),
            ("requests_rate_limited", "Requests rejected by the rate limit", count(&counters.rate_limited)),
            (
                "requests_backpressure",
                "Requests rejected because the client does not read its pushes",
                count(&counters.backpressure),
            ),
            ("requests_timed_out", "Requests that timed out", count(&counters.timed_out)),
            ("requests_on_pool", "Expensive requests submitted to the worker pool", server.work.submitted()),
            (
                "requests_pool_full",
                "Expensive requests rejected: the queue was full or the memory limit was exceeded",
                server.work.rejected(),
            ),
            ("requests_slow", "Requests logged as slow", count(&counters.slow)),
            ("logins_failed", "Failed logins", count(&counters.logins_failed)),
            (
                "logins_throttled",
                "Logins rejected because of too many failed logins from the address",
                count(&counters.logins_throttled),
            ),
            ("logins_timed_out", "Connections closed by the login timeout", count(&counters.logins_timed_out)),
            (
                "before_login_rate_limited",
                "Messages rejected by the rate limit before login",
                count(&counters.before_login_limited),
            ),
            (
                "slow_consumers",
                "Connections closed because the client did not read its pushes",
                count(&counters.slow_consumers),
            ),
            ("memory_closed", "Connections closed because of the memory limit", server.memory.closed()),
            ("heartbeats_missed", "Connections closed because no pong arrived", count(&counters.heartbeats_missed)),
            ("sessions_revoked", "Connections closed because their session was revoked", count(&counters.revoked)),
            ("panics", "Connections closed by a panic", count(&counters.panics)),
            ("subscriptions_ended", "Subscriptions ended by the server", count(&counters.subscriptions_ended)),
            ("backups", "Backups completed by server.backup", count(&counters.backups)),
            ("backups_failed", "Failed backups", count(&counters.backups_failed)),
            (
                "rate_keys_forgotten",
                "Users and addresses evicted from rate limiters because there were too many",
                server.evicted_rate_keys(),
            ),
        ] {
            self.counter(name, help, value);
        }
    }

    fn ended(&mut self, ended: &BTreeMap<&'static str, u64>) {
        let name = "tidewire_connections_ended_total";
        let _ = write!(self.text, "# HELP {name} Connections that have ended, by reason\n# TYPE {name} counter\n");
        for (reason, count) in ended {
            let _ = writeln!(self.text, "{name}{{reason=\"{reason}\"}} {count}");
        }
    }

    fn store(&mut self, server: &ServerState) {
        let stats = server.store.stats();
        self.gauge("store_buckets", "Number of buckets", stats.buckets.len());
        self.gauge("store_records", "Number of records", stats.records);
        self.gauge("store_record_bytes", "Memory used by records", stats.record_bytes);
        self.gauge("store_writes_waiting", "Writes queued for the writer thread", stats.waiting);
        self.gauge("store_queue_bytes", "Memory used by queued writes", stats.queued_bytes);
        self.gauge(
            "store_history_bytes",
            "Memory used by the commit history, from which subscriptions resume",
            stats.history_bytes,
        );
        self.gauge(
            "store_stopped",
            "1 if the store has stopped because of a disk error, else 0",
            stats.is_stopped.into(),
        );
        self.counter("store_commits", "Commits", stats.commits);
        self.counter("store_refused", "Writes rejected", stats.refused);
        self.counter("store_abandoned", "Writes cancelled before they entered the queue", stats.abandoned);
        self.counter("store_not_kept", "Commit groups that could not be written", stats.not_kept);
        self.counter(
            "store_replies_evicted",
            "Replies of idempotency keys evicted before they expired",
            stats.evicted_replies,
        );
        self.counter("store_expired", "Expired records deleted", stats.swept);
        self.counter("store_followers_behind", "Followers that fell behind the commit history", stats.followers_behind);
        let engine = stats.engine;
        self.counter("engine_syncs", "Log syncs (fsync)", engine.syncs);
        self.counter("engine_checkpoints", "Completed checkpoints", engine.checkpoints);
        self.counter("engine_checkpoints_failed", "Failed checkpoints", engine.checkpoints_failed);
        self.counter("engine_slowed", "Commit groups delayed because the log is too long", engine.slowed);
        self.line("engine_log_bytes", "gauge", "Size of the log", engine.log_bytes);
        self.line("engine_snapshot_bytes", "gauge", "Size of the newest snapshot", engine.snapshot_bytes);
    }

    fn live(&mut self, server: &ServerState) {
        let stats = server.live.stats();
        self.gauge("live_queries", "Live queries; equal queries share one", stats.queries);
        let help = "Memory used by live queries, excluding the records";
        self.gauge("live_kept_bytes", help, stats.kept_bytes);
        self.counter("live_events", "Events delivered to subscriptions", stats.events);
        self.counter("live_conflated", "Events replaced by newer ones before they were delivered", stats.conflated);
        self.counter("live_restarts", "Re-evaluations of all live queries", stats.restarts);
        self.counter("live_evaluations", "Evaluations of queries by background threads", stats.evaluations);
        let help = "Evaluations repeated because the commit history no longer covered their start";
        self.counter("live_reevaluations", help, stats.reevaluations);
        self.counter("live_too_costly", "Subscriptions ended because they were too expensive", stats.too_costly);
    }
}
