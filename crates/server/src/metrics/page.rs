//! The page of `/metrics`, in the text format of Prometheus. It is written on request, from counters that the crates keep anyway;
//! only the outcome and latency of each request are recorded for it.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::state::ServerState;

/// All metrics of a server.
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
        self.gauge("connections", "Connections, in-process clients included", server.connection_count());
        self.gauge("subscriptions", "Subscriptions of all connections", server.subscription_count());
        self.gauge("pool_requests", "Costly requests that wait or run on the pool", server.work.depth());
        self.gauge("memory_used_bytes", "Memory that connections hold", server.memory.used());
        self.gauge("memory_max_bytes", "Limit of the memory that connections hold", server.memory.max_bytes());
        for (name, help, value) in [
            ("connections_admitted", "Connections admitted", conn.admitted),
            (
                "connections_refused",
                "Connections refused: too many in all or from one address",
                conn.refused + count(&counters.refused_connections),
            ),
            (
                "sockets_refused",
                "Sockets refused: too many in all or from one address",
                count(&counters.refused_sockets),
            ),
            ("origins_refused", "Requests refused because of their origin or host", count(&counters.bad_origins)),
            (
                "forwarded_ignored",
                "Requests whose forwarding headers were ignored: the peer is not a trusted proxy",
                count(&counters.forwarded_ignored),
            ),
            (
                "forwarded_invalid",
                "Requests of trusted proxies with invalid forwarding headers",
                count(&counters.forwarded_invalid),
            ),
            (
                "proxy_headers_refused",
                "Sockets closed because of the PROXY protocol",
                count(&counters.proxy_headers_refused),
            ),
            ("bytes_received", "Bytes read", conn.traffic.bytes_in),
            ("bytes_sent", "Bytes written", conn.traffic.bytes_out),
            ("messages_received", "Messages read", conn.traffic.frames_in),
            ("messages_sent", "Messages written", conn.traffic.frames_out),
            ("pushes_dropped", "Notices dropped because the queue was full", conn.push.dropped),
            ("pushes_unsent", "Pushes that were queued when their connection ended", conn.push.unsent),
            ("pushes_replaced", "Results replaced by newer ones before they were sent", conn.push.replaced),
            (
                "pushes_held_back",
                "Pushes dropped because the buffer was full; sent as a whole result later",
                count(&counters.held_back),
            ),
            ("requests", "Requests that have ended", server.operations.requests()),
            ("requests_failed", "Requests answered with an error", server.operations.failed()),
            ("requests_invalid", "Messages that were not valid requests", count(&counters.invalid)),
            ("requests_rate_limited", "Requests refused by the rate limit", count(&counters.rate_limited)),
            (
                "requests_backpressure",
                "Requests not run because the client does not read",
                count(&counters.backpressure),
            ),
            ("requests_timed_out", "Requests that missed their deadline", count(&counters.timed_out)),
            ("requests_on_pool", "Requests that were costly and ran on the pool", server.work.submitted()),
            (
                "requests_pool_full",
                "Costly requests not run: too many waited, or the memory limit was exceeded",
                server.work.rejected(),
            ),
            ("requests_slow", "Requests that were logged as slow", count(&counters.slow)),
            ("logins_failed", "Logins that failed", count(&counters.logins_failed)),
            (
                "logins_throttled",
                "Logins refused because their address had failed too often",
                count(&counters.logins_throttled),
            ),
            ("logins_timed_out", "Connections closed because no login came in time", count(&counters.logins_timed_out)),
            (
                "before_login_rate_limited",
                "Messages refused because their address sent too many before a login",
                count(&counters.before_login_limited),
            ),
            ("slow_consumers", "Connections closed because the client does not read", count(&counters.slow_consumers)),
            ("memory_closed", "Connections closed because of the memory limit", server.memory.closed()),
            ("heartbeats_missed", "Connections closed because no pong came", count(&counters.heartbeats_missed)),
            ("sessions_revoked", "Connections closed because their session was revoked", count(&counters.revoked)),
            ("panics", "Connections closed by a panic", count(&counters.panics)),
            ("subscriptions_ended", "Subscriptions that the server has ended", count(&counters.subscriptions_ended)),
            ("backups", "Backups made by server.backup", count(&counters.backups)),
            ("backups_failed", "Backups that failed", count(&counters.backups_failed)),
            (
                "rate_keys_forgotten",
                "Users and addresses whose request count was reset because there were too many",
                server.forgotten_rate_keys(),
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
        self.gauge("store_buckets", "Buckets", stats.buckets.len());
        self.gauge("store_records", "Records", stats.records);
        self.gauge("store_record_bytes", "Memory of records", stats.record_bytes);
        self.gauge("store_writes_waiting", "Writes that wait for the writer", stats.waiting);
        self.gauge("store_queue_bytes", "Memory of the writes that wait for the writer", stats.queued_bytes);
        self.gauge("store_history_bytes", "Memory of the commits from which subscriptions resume", stats.history_bytes);
        self.gauge("store_stopped", "Whether the disk has failed", stats.is_stopped.into());
        self.counter("store_commits", "Commits", stats.commits);
        self.counter("store_refused", "Writes refused", stats.refused);
        self.counter("store_abandoned", "Writes given up before the queue had room", stats.abandoned);
        self.counter("store_not_kept", "Groups of writes that could not be stored", stats.not_kept);
        self.counter(
            "store_replies_evicted",
            "Replies of idempotency keys evicted before they expired",
            stats.evicted_replies,
        );
        self.counter("store_expired", "Records deleted because they had expired", stats.swept);
        self.counter("store_followers_behind", "Times that a follower fell out of the history", stats.followers_behind);
        let engine = stats.engine;
        self.counter("engine_syncs", "Times that the log was synced", engine.syncs);
        self.counter("engine_checkpoints", "Checkpoints made", engine.checkpoints);
        self.counter("engine_checkpoints_failed", "Checkpoints that failed", engine.checkpoints_failed);
        self.counter("engine_slowed", "Groups of writes slowed because the log is long", engine.slowed);
        self.line("engine_log_bytes", "gauge", "Bytes of the log", engine.log_bytes);
        self.line("engine_snapshot_bytes", "gauge", "Bytes of the newest snapshot", engine.snapshot_bytes);
    }

    fn live(&mut self, server: &ServerState) {
        let stats = server.live.stats();
        self.gauge("live_queries", "Live queries, equal ones counted once", stats.queries);
        let kept = "Bytes that live queries keep, without the records themselves";
        self.gauge("live_kept_bytes", kept, stats.kept_bytes);
        self.counter("live_events", "Events delivered to subscriptions", stats.events);
        self.counter("live_conflated", "Events replaced by newer ones before they were taken", stats.conflated);
        self.counter("live_restarts", "Times that all live queries were evaluated anew", stats.restarts);
        self.counter("live_evaluations", "Evaluations of queries by background threads", stats.evaluations);
        let repeated = "Evaluations repeated because the history did not reach back to their beginning";
        self.counter("live_reevaluations", repeated, stats.reevaluations);
        self.counter("live_too_costly", "Subscriptions ended because they took too much work", stats.too_costly);
    }
}
