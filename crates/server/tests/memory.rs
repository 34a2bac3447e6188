//! Limits of the memory that hostile clients can make the server allocate. A counting allocator measures the peak. The clients are in the
//! same process, so their messages are allocated before the measurement, or shared.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::{Heartbeat, Memory, Server, ServerOptions};
use tidewire_store::{Limits, Store, StoreOptions};
use tidewire_testkit::{CountingAllocator, PATIENCE};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Mutex, MutexGuard};

use crate::metrics_page::wait_for_metrics;
use crate::raw_client::{RawClient, TEXT, frame};

#[allow(dead_code, reason = "this binary uses only a part of it")]
#[path = "it/metrics_page.rs"]
mod metrics_page;
#[allow(dead_code, reason = "this binary uses only a part of it")]
#[path = "it/raw_client.rs"]
mod raw_client;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Serializes the tests, which share the allocator.
static MEASURING: Mutex<()> = Mutex::const_new(());

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Memory limit of all connections.
const MAX_BYTES: usize = 16 * MIB;
const MAX_RESULT_BYTES: usize = MIB;
/// Allowance for the runtime, the tasks of the test, and buffers that grow by doubling.
const SLACK: usize = 8 * MIB;

/// A server with small limits, over an in-memory store.
struct LimitedServer {
    server: Server,
    store: Store,
    _turn: MutexGuard<'static, ()>,
}

impl LimitedServer {
    async fn start() -> Self {
        let turn = MEASURING.lock().await;
        let limits = StoreOptions::default().limits(Limits::default().max_result_bytes(MAX_RESULT_BYTES));
        let store = Store::memory(limits);
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        store.define_bucket("b", config).wait().unwrap();
        let options = ServerOptions::default()
            .port(0)
            .max_result_bytes(MAX_RESULT_BYTES)
            .memory(Memory::default().max_bytes(MAX_BYTES))
            .heartbeat(Heartbeat::default().interval(Duration::from_hours(1)));
        let server = Server::start(store.clone(), options).await.unwrap();
        Self { server, store, _turn: turn }
    }

    /// Inserts records of about this size into the bucket.
    fn fill(&self, records: usize, bytes: usize) {
        let pad = "x".repeat(bytes.saturating_sub(100));
        for chunk in 0..records / 100 {
            let record = |n: usize| json!({"n": chunk * 100 + n, "pad": pad}).as_object().unwrap().clone();
            self.store.insert_many("b", (0..100).map(record)).wait().unwrap();
        }
    }

    /// Opens connections with small receive buffers.
    async fn sockets(&self, count: usize) -> Vec<RawClient> {
        let mut sockets = Vec::new();
        for _ in 0..count {
            sockets.push(RawClient::with_small_buffer(&self.server).await);
        }
        sockets
    }

    /// Asserts that the server still serves a client.
    async fn assert_serves(&self) {
        let mut raw = RawClient::websocket(&self.server).await;
        raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
        assert_eq!(raw.json().await["type"], "result");
    }
}

/// A measurement of the peak memory.
struct Measurement {
    baseline: usize,
}

impl Measurement {
    fn begin() -> Self {
        Self { baseline: ALLOCATOR.reset_peak() }
    }

    /// Asserts that the peak is below this number of bytes above the baseline.
    fn assert_below(&self, bytes: usize) {
        let peak = ALLOCATOR.peak_bytes().saturating_sub(self.baseline);
        assert!(peak < bytes, "peak of {} KiB, expected less than {} KiB", peak / KIB, bytes / KIB);
    }
}

fn request(request: &Json) -> Vec<u8> {
    frame(TEXT, request.to_string().as_bytes())
}

/// Writes to all sockets concurrently, and waits for all writes. A write fails if the server has closed the socket.
async fn write_to_all(sockets: Vec<RawClient>, bytes: Vec<u8>) -> Vec<RawClient> {
    let bytes = Arc::new(bytes);
    let write = |mut socket: RawClient| {
        let bytes = Arc::clone(&bytes);
        tokio::spawn(async move {
            let _ = tokio::time::timeout(PATIENCE, socket.stream.write_all(&bytes))
                .await
                .expect("the socket must be read or closed");
            socket
        })
    };
    let writing: Vec<_> = sockets.into_iter().map(write).collect();
    let mut written = Vec::new();
    for task in writing {
        written.push(task.await.unwrap());
    }
    written
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_messages_are_bounded() {
    let target = LimitedServer::start().await;
    let sockets = target.sockets(64).await;
    let mut message = frame(TEXT, &vec![b'x'; MIB]);
    message.pop();
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, message).await;
    wait_for_metrics(&target.server, "connections are closed", |page| {
        page.get("memory_closed_total") > 40 && page.get("memory_used_bytes") <= MAX_BYTES as u64
    })
    .await;
    // Connections being closed hold their memory until their tasks run.
    measurement.assert_below(2 * MAX_BYTES);
    target.assert_serves().await;
    drop(sockets);
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_large_replies_are_bounded() {
    let target = LimitedServer::start().await;
    target.fill(100, 9 * KIB);
    let sockets = target.sockets(48).await;
    let requests = request(&json!({"id": 1, "type": "store.all", "bucket": "b"})).repeat(20);
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, requests).await;
    wait_for_metrics(&target.server, "connections are closed", |page| {
        page.requests("store.all", "ok") + page.requests("store.all", "BACKPRESSURE") >= 48
            && page.get("memory_closed_total") > 0
            && page.get("memory_used_bytes") <= MAX_BYTES as u64
    })
    .await;
    // Connections being closed hold their memory until their tasks run.
    measurement.assert_below(2 * MAX_BYTES);
    target.assert_serves().await;
    drop(sockets);
}

/// One client queues at most 4 MiB of writes. Here it sends 30 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn queued_writes_are_bounded() {
    const WRITES: usize = 500;
    let target = LimitedServer::start().await;
    let raw = target.sockets(1).await.pop().unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let busy = target.store.write(move |_| {
        // Until the test drops the sender, even if it fails.
        let _ = released.recv();
        Ok(())
    });
    // Larger messages would be parsed one at a time.
    let record = json!({"pad": "x".repeat(60 * KIB)});
    let writes = request(&json!({"id": 1, "type": "store.insert", "bucket": "b", "data": record})).repeat(WRITES);
    drop(record);
    let measurement = Measurement::begin();
    let mut raw = raw.split(writes);
    wait_for_metrics(&target.server, "4 MiB are in flight", |page| page.get("memory_used_bytes") > 4 * MIB as u64)
        .await;
    // A queued write holds a record and its text. The rest is input.
    measurement.assert_below(3 * 4 * MIB + SLACK / 2);
    drop(release);
    busy.wait().unwrap();
    for _ in 0..WRITES {
        assert_eq!(raw.json().await["type"], "result");
    }
    wait_for_metrics(&target.server, "the memory is released", |page| page.get("memory_used_bytes") == 0).await;
}

/// Twenty different live queries, each with a result above the limit.
#[tokio::test(flavor = "multi_thread")]
async fn too_large_subscriptions_are_bounded() {
    let target = LimitedServer::start().await;
    target.fill(8000, 5 * KIB);
    let mut raw = target.sockets(1).await.pop().unwrap();
    let subscribe = |id: usize| {
        let query = json!({"bucket": "b", "filter": {"n": {"$gte": id}}});
        request(&json!({"id": id, "type": "store.subscribe", "config": query}))
    };
    let requests: Vec<u8> = (0..20).flat_map(subscribe).collect();
    let measurement = Measurement::begin();
    raw.write(&requests).await;
    for id in 0..20 {
        let reply = raw.json().await;
        assert_eq!((&reply["id"], &reply["code"]), (&json!(id), &json!("TOO_LARGE")));
    }
    measurement.assert_below(4 * MAX_RESULT_BYTES + SLACK);
}

/// Twenty live queries with a small window of a large bucket.
#[tokio::test(flavor = "multi_thread")]
async fn windowed_subscriptions_are_bounded() {
    let target = LimitedServer::start().await;
    target.fill(8000, 5 * KIB);
    let mut raw = target.sockets(1).await.pop().unwrap();
    let subscribe = |id: usize| {
        let query = json!({"bucket": "b", "filter": {"n": {"$gte": id}}, "sort": {"pad": "asc"}, "limit": 10});
        request(&json!({"id": id, "type": "store.subscribe", "config": query}))
    };
    let requests: Vec<u8> = (0..20).flat_map(subscribe).collect();
    let measurement = Measurement::begin();
    raw.write(&requests).await;
    for id in 0..20 {
        assert_eq!(raw.json().await["id"], id);
    }
    measurement.assert_below(2 * MAX_BYTES);
}

/// Returns the memory of expensive reads: each thread of the pool may use the result limit, and four times as much to build the result.
fn pool_bytes() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (2 * cores).clamp(4, 32) * 5 * MAX_RESULT_BYTES
}

#[tokio::test(flavor = "multi_thread")]
async fn sorts_of_a_large_bucket_are_bounded() {
    let target = LimitedServer::start().await;
    target.fill(8000, 5 * KIB);
    let sockets = target.sockets(8).await;
    let query =
        json!({"id": 1, "type": "store.query", "bucket": "b", "sort": {"pad": "asc", "n": "desc"}, "limit": 10});
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, request(&query)).await;
    for mut socket in sockets {
        assert_eq!(socket.json().await["data"].as_array().unwrap().len(), 10);
    }
    measurement.assert_below(pool_bytes() + SLACK);
}

/// One group per record.
#[tokio::test(flavor = "multi_thread")]
async fn groups_of_a_large_bucket_are_bounded() {
    let target = LimitedServer::start().await;
    target.fill(8000, 5 * KIB);
    let sockets = target.sockets(8).await;
    let aggregate = json!({"function": "count", "groupBy": ["id", "pad"]});
    let query = json!({"id": 1, "type": "store.query", "bucket": "b", "aggregate": aggregate});
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, request(&query)).await;
    for mut socket in sockets {
        assert_eq!(socket.json().await["code"], "TOO_LARGE");
    }
    measurement.assert_below(pool_bytes() + SLACK);
}
