//! The memory that hostile clients can make the server allocate, measured by an allocator that counts. The clients are in the same
//! process, so what they send is allocated before the measurement begins, or shared.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire::{Heartbeat, Memory, Server, ServerOptions};
use tidewire_store::{Limits, Store, StoreOptions};
use tidewire_testkit::{CountingAllocator, PATIENCE};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Mutex, MutexGuard};

use crate::page::wait_for;
use crate::raw::{Raw, TEXT, frame};

#[allow(dead_code, reason = "this binary needs a part of it")]
#[path = "it/page.rs"]
mod page;
#[allow(dead_code, reason = "this binary needs a part of it")]
#[path = "it/raw.rs"]
mod raw;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The tests measure in turn.
static MEASURING: Mutex<()> = Mutex::const_new(());

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The limit of all connections.
const MAX_BYTES: usize = 16 * MIB;
const MAX_RESULT_BYTES: usize = MIB;
/// What the runtime, the tasks of the test and buffers that grow by doubling may take beside the limit.
const SLACK: usize = 8 * MIB;

/// A server with small limits, over a store in memory.
struct Target {
    server: Server,
    store: Store,
    _turn: MutexGuard<'static, ()>,
}

impl Target {
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

    /// Fills the bucket with records of about so many bytes.
    fn fill(&self, records: usize, bytes: usize) {
        let pad = "x".repeat(bytes.saturating_sub(100));
        for chunk in 0..records / 100 {
            let record = |n: usize| json!({"n": chunk * 100 + n, "pad": pad}).as_object().unwrap().clone();
            self.store.insert_many("b", (0..100).map(record)).wait().unwrap();
        }
    }

    /// Connections for which the system buffers little.
    async fn sockets(&self, count: usize) -> Vec<Raw> {
        let mut sockets = Vec::new();
        for _ in 0..count {
            sockets.push(Raw::small(&self.server).await);
        }
        sockets
    }

    /// Asserts that the server still serves a client.
    async fn serves(&self) {
        let mut raw = Raw::websocket(&self.server).await;
        raw.send(r#"{"id":1,"type":"store.buckets"}"#).await;
        assert_eq!(raw.json().await["type"], "result");
    }
}

/// A measurement of the peak.
struct Measurement {
    baseline: usize,
}

impl Measurement {
    fn begin() -> Self {
        Self { baseline: ALLOCATOR.reset_peak() }
    }

    /// Asserts that at no time more than this was allocated above the baseline.
    fn is_below(&self, bytes: usize) {
        let peak = ALLOCATOR.peak_bytes().saturating_sub(self.baseline);
        assert!(peak < bytes, "{} KiB were allocated at one time, at most {} are expected", peak / KIB, bytes / KIB);
    }
}

fn request(request: &Json) -> Vec<u8> {
    frame(TEXT, request.to_string().as_bytes())
}

/// Writes to all sockets at once, and waits until each write has ended. A socket that the server has closed fails it.
async fn write_to_all(sockets: Vec<Raw>, bytes: Vec<u8>) -> Vec<Raw> {
    let bytes = Arc::new(bytes);
    let write = |mut socket: Raw| {
        let bytes = Arc::clone(&bytes);
        tokio::spawn(async move {
            let _ =
                tokio::time::timeout(PATIENCE, socket.stream.write_all(&bytes)).await.expect("it is read or closed");
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
async fn unfinished_messages() {
    let target = Target::start().await;
    let sockets = target.sockets(64).await;
    let mut message = frame(TEXT, &vec![b'x'; MIB]);
    message.pop();
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, message).await;
    wait_for(&target.server, "connections are closed", |page| {
        page.get("memory_closed_total") > 40 && page.get("memory_used_bytes") <= MAX_BYTES as u64
    })
    .await;
    // Connections that are being closed hold their part until their tasks run.
    measurement.is_below(2 * MAX_BYTES);
    target.serves().await;
    drop(sockets);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_of_large_replies() {
    let target = Target::start().await;
    target.fill(100, 9 * KIB);
    let sockets = target.sockets(48).await;
    let requests = request(&json!({"id": 1, "type": "store.all", "bucket": "b"})).repeat(20);
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, requests).await;
    wait_for(&target.server, "connections are closed", |page| {
        page.requests("store.all", "ok") + page.requests("store.all", "BACKPRESSURE") >= 48
            && page.get("memory_closed_total") > 0
            && page.get("memory_used_bytes") <= MAX_BYTES as u64
    })
    .await;
    // Connections that are being closed hold their part until their tasks run.
    measurement.is_below(2 * MAX_BYTES);
    target.serves().await;
    drop(sockets);
}

/// One client queues no more than 4 MiB of writes, however many it sends: here 30 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn large_writes_behind_a_busy_writer() {
    const WRITES: usize = 500;
    let target = Target::start().await;
    let raw = target.sockets(1).await.pop().unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let busy = target.store.write(move |_| {
        // Until the test is done with it, also if it fails.
        let _ = released.recv();
        Ok(())
    });
    // Larger messages are parsed one at a time.
    let record = json!({"pad": "x".repeat(60 * KIB)});
    let writes = request(&json!({"id": 1, "type": "store.insert", "bucket": "b", "data": record})).repeat(WRITES);
    drop(record);
    let measurement = Measurement::begin();
    let mut raw = raw.split(writes);
    wait_for(&target.server, "4 MiB are in flight", |page| page.get("memory_used_bytes") > 4 * MIB as u64).await;
    // A write in the queue is a record with its text, and the rest of the input.
    measurement.is_below(3 * 4 * MIB + SLACK / 2);
    drop(release);
    busy.wait().unwrap();
    for _ in 0..WRITES {
        assert_eq!(raw.json().await["type"], "result");
    }
    wait_for(&target.server, "everything is released", |page| page.get("memory_used_bytes") == 0).await;
}

/// Twenty different live queries, each with a result above the limit.
#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_to_a_large_bucket() {
    let target = Target::start().await;
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
    measurement.is_below(4 * MAX_RESULT_BYTES + SLACK);
}

/// Twenty live queries whose window is small, over a bucket that is large.
#[tokio::test(flavor = "multi_thread")]
async fn windows_of_a_large_bucket() {
    let target = Target::start().await;
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
    measurement.is_below(2 * MAX_BYTES);
}

/// The memory of costly reads: each thread of the pool may take the limit of a result, and four times as much to build it.
fn pool_bytes() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (2 * cores).clamp(4, 32) * 5 * MAX_RESULT_BYTES
}

#[tokio::test(flavor = "multi_thread")]
async fn sorts_of_a_large_bucket() {
    let target = Target::start().await;
    target.fill(8000, 5 * KIB);
    let sockets = target.sockets(8).await;
    let query =
        json!({"id": 1, "type": "store.query", "bucket": "b", "sort": {"pad": "asc", "n": "desc"}, "limit": 10});
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, request(&query)).await;
    for mut socket in sockets {
        assert_eq!(socket.json().await["data"].as_array().unwrap().len(), 10);
    }
    measurement.is_below(pool_bytes() + SLACK);
}

/// As many groups as records.
#[tokio::test(flavor = "multi_thread")]
async fn groups_of_a_large_bucket() {
    let target = Target::start().await;
    target.fill(8000, 5 * KIB);
    let sockets = target.sockets(8).await;
    let aggregate = json!({"function": "count", "groupBy": ["id", "pad"]});
    let query = json!({"id": 1, "type": "store.query", "bucket": "b", "aggregate": aggregate});
    let measurement = Measurement::begin();
    let sockets = write_to_all(sockets, request(&query)).await;
    for mut socket in sockets {
        assert_eq!(socket.json().await["code"], "TOO_LARGE");
    }
    measurement.is_below(pool_bytes() + SLACK);
}
