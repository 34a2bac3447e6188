//! Metrics and `/health` of the store and its disk, in normal operation and after disk failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidewire::Server;
use tidewire_store::engine::EmbeddedOptions;
use tidewire_store::{Clock, Limits, Store, StoreOptions};

use crate::client::{Client, notes_config, options, serve_store};
use crate::faulty_disk::FaultyDisk;
use crate::metrics_page::{MetricsPage, metric, wait_for_metrics};
use crate::raw_client::RawClient;
use crate::test_server::object;

/// Opens a store on a disk with faults.
fn open(store_options: StoreOptions) -> (Store, FaultyDisk, TempDir) {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let (store, _) = Store::open_on(Arc::new(disk.clone()), &dir.path().join("data"), store_options).unwrap();
    store.define_bucket("notes", notes_config()).wait().unwrap();
    (store, disk, dir)
}

/// Returns options with small segments, and without automatic checkpoints.
fn small_segments() -> StoreOptions {
    StoreOptions::default().embedded(EmbeddedOptions::default().segment_bytes(16 << 10).checkpoint_log_bytes(u64::MAX))
}

async fn health(server: &Server) -> (u16, String) {
    let mut raw = RawClient::connect(server).await;
    raw.write(b"GET /health HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
    let (status, head, body) = raw.response().await;
    assert!(head.contains("content-type: application/json"), "{head}");
    let body: Json = serde_json::from_str(&body).unwrap();
    assert!(body["uptimeMs"].is_u64() && body["version"] == env!("CARGO_PKG_VERSION"), "{body}");
    (status, body["status"].as_str().unwrap().to_owned())
}

/// Asserts that the page shows the statistics of this store.
fn assert_shows_stats(page: &MetricsPage, store: &Store) {
    let stats = store.stats();
    let sum = |of: fn(&tidewire_store::BucketStats) -> usize| stats.buckets.iter().map(of).sum::<usize>() as u64;
    let engine = stats.engine;
    for (name, expected) in [
        ("store_buckets", stats.buckets.len() as u64),
        ("store_records", sum(|bucket| bucket.records)),
        ("store_record_bytes", sum(|bucket| bucket.bytes)),
        ("store_writes_waiting", stats.waiting as u64),
        ("store_queue_bytes", stats.queued_bytes as u64),
        ("store_history_bytes", stats.history_bytes as u64),
        ("store_stopped", stats.is_stopped.into()),
        ("store_commits_total", stats.commits),
        ("store_refused_total", stats.refused),
        ("store_abandoned_total", stats.abandoned),
        ("store_not_kept_total", stats.not_kept),
        ("store_replies_evicted_total", stats.evicted_replies),
        ("store_expired_total", stats.swept),
        ("store_followers_behind_total", stats.followers_behind),
        ("engine_syncs_total", engine.syncs),
        ("engine_checkpoints_total", engine.checkpoints),
        ("engine_checkpoints_failed_total", engine.checkpoints_failed),
        ("engine_slowed_total", engine.slowed),
        ("engine_log_bytes", engine.log_bytes),
        ("engine_snapshot_bytes", engine.snapshot_bytes),
    ] {
        assert_eq!(page.get(name), expected, "{name}");
    }
}

async fn checkpoint(store: &Store) -> bool {
    let store = store.clone();
    tokio::task::spawn_blocking(move || store.checkpoint().is_ok()).await.unwrap()
}

/// Inserts notes of a thousand bytes until one is rejected. Returns the error code and the number of inserted notes.
async fn insert_until_rejected(client: &mut Client) -> (String, u64) {
    let data = json!({"text": "x".repeat(1000)});
    for inserted in 0..1000 {
        let id = client.send("store.insert", json!({"bucket": "notes", "data": data})).await;
        let reply = client.reply(id).await;
        if reply["type"] == "error" {
            return (reply["code"].as_str().unwrap().to_owned(), inserted);
        }
    }
    panic!("1000 notes were accepted");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_disk_makes_health_503_and_rejects_writes_only() {
    let (store, disk, _dir) = open(StoreOptions::default());
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"id": "a", "text": "flood"}})).await;
    client.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    assert_eq!(health(&server).await, (200, "ok".to_owned()));
    assert_eq!(metric(&server, "store_stopped").await, 0);

    disk.fail_syncs();
    for id in ["b", "c"] {
        let (code, error) =
            client.call_err("store.insert", json!({"bucket": "notes", "data": {"id": id, "text": "ebb"}})).await;
        assert_eq!((code.as_str(), &error["message"]), ("INTERNAL_ERROR", &json!("Internal server error")));
    }
    let (status, reason) = health(&server).await;
    assert_eq!(status, 503);
    assert!(reason.contains("disk has failed") && reason.contains("restart"), "{reason}");
    let page = MetricsPage::read(&server).await;
    assert_eq!(page.get("store_stopped"), 1);
    assert_eq!(page.requests("store.insert", "INTERNAL_ERROR"), 2);
    assert_shows_stats(&page, &store);

    // Reads continue, and return only durable records.
    assert_eq!(client.call("store.get", json!({"bucket": "notes", "key": "a"})).await["text"], "flood");
    assert_eq!(client.call("store.count", json!({"bucket": "notes"})).await, 1);
    let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    assert_eq!(subscribed["data"].as_array().unwrap().len(), 1);
    assert!(client.has_no_pushes().await, "a failed write must not be pushed");
    Client::connect(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_rejects_writes_and_checkpoints_until_space_is_free() {
    let (store, disk, _dir) = open(small_segments());
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "first"}})).await;
    disk.set_full(true);
    let (code, inserted) = insert_until_rejected(&mut client).await;
    assert_eq!(code, "INTERNAL_ERROR");
    assert!(!checkpoint(&store).await);
    let page = wait_for_metrics(&server, "the failed checkpoint is counted", |page| {
        page.get("engine_checkpoints_failed_total") == 1
    })
    .await;
    assert!(page.get("store_not_kept_total") > 0 && page.get("store_stopped") == 0);
    assert_shows_stats(&page, &store);
    assert_eq!(health(&server).await, (200, "ok".to_owned()), "a full disk is temporary");
    disk.set_full(false);
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "last"}})).await;
    assert_eq!(client.call("store.count", json!({"bucket": "notes"})).await, inserted + 2);
    assert!(checkpoint(&store).await);
    wait_for_metrics(&server, "the checkpoint is counted", |page| page.get("engine_checkpoints_total") == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_above_its_limit_slows_writes_and_is_counted() {
    let mut store_options = small_segments();
    store_options.embedded.max_log_bytes = 20_000;
    let (store, _disk, _dir) = open(store_options);
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    insert_until_rejected(&mut client).await;
    let page = MetricsPage::read(&server).await;
    assert!(page.get("engine_slowed_total") > 0 && page.get("store_not_kept_total") > 0);
    assert_shows_stats(&page, &store);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_show_the_statistics_of_a_durable_store() {
    let now = Arc::new(AtomicU64::new(1_000_000));
    let clock = Arc::clone(&now);
    let store_options =
        StoreOptions::default().clock(Clock::new(move || clock.load(SeqCst))).sweep_interval(Duration::from_millis(1));
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), store_options).unwrap();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let before = MetricsPage::read(&server).await;
    assert_shows_stats(&before, &store);
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    let mut expiring = notes_config();
    expiring["ttl"] = json!("30s");
    client.call("store.defineBucket", json!({"name": "expiring", "config": expiring})).await;
    for bucket in ["notes", "expiring"] {
        for _ in 0..3 {
            client.call("store.insert", json!({"bucket": bucket, "data": {"text": "x"}})).await;
        }
    }
    assert_eq!(client.call_err("store.insert", json!({"bucket": "notes", "data": {}})).await.0, "VALIDATION_ERROR");
    let page = MetricsPage::read(&server).await;
    assert_eq!((page.get("store_buckets"), page.get("store_records")), (2, 6));
    assert_eq!((page.get("store_commits_total"), page.get("store_refused_total")), (8, 1));
    for grown in ["store_record_bytes", "store_history_bytes", "engine_syncs_total", "engine_log_bytes"] {
        assert!(page.get(grown) > before.get(grown), "{grown}");
    }
    assert_eq!((page.get("store_expired_total"), page.get("engine_checkpoints_total")), (0, 0));
    assert_shows_stats(&page, &store);

    now.fetch_add(30_001, SeqCst);
    // The writer checks the clock only when it has work.
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "x"}})).await;
    wait_for_metrics(&server, "the records are swept", |page| page.get("store_expired_total") == 3).await;
    assert!(checkpoint(&store).await);
    let page =
        wait_for_metrics(&server, "the checkpoint is counted", |page| page.get("engine_checkpoints_total") == 1).await;
    assert_eq!((page.get("store_expired_total"), page.get("store_records")), (3, 4));
    assert!(page.get("engine_snapshot_bytes") > 0);
    assert_shows_stats(&page, &store);
}

/// Blocks the writer until the returned sender sends or is dropped.
async fn block_writer(store: &Store) -> std::sync::mpsc::Sender<()> {
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let (entered, has_entered) = tokio::sync::oneshot::channel();
    drop(store.write(move |_| {
        let _ = entered.send(());
        let _ = gate.recv();
        Ok(())
    }));
    has_entered.await.unwrap();
    release
}

#[tokio::test(flavor = "multi_thread")]
async fn write_does_not_wait_for_the_backlog_of_another_client() {
    let store = Store::memory(StoreOptions::default());
    store.define_bucket("notes", notes_config()).await.unwrap();
    let server = serve_store(store.clone(), options()).await;
    let (_, mut commits) = store.follow();
    let release = block_writer(&store).await;
    let mut busy = Client::connect(&server).await;
    for _ in 0..50 {
        busy.send("store.insert", json!({"bucket": "notes", "data": {"text": "busy"}})).await;
    }
    wait_for_metrics(&server, "all writes are queued", |page| page.get("store_writes_waiting") == 50).await;
    let other = server.client(None);
    let inserted = tokio::spawn(async move { other.insert::<Json>("notes", json!({"text": "other"})).await });
    let page =
        wait_for_metrics(&server, "the other write is queued", |page| page.get("store_writes_waiting") == 51).await;
    assert_shows_stats(&page, &store);
    assert!(page.get("store_queue_bytes") > 51 * 20, "{}", page.get("store_queue_bytes"));
    release.send(()).unwrap();
    inserted.await.unwrap().unwrap();
    let text = |commit: &tidewire_store::Commit| commit.changes[0].new.as_ref().unwrap().to_record()["text"].clone();
    let order: Vec<Json> =
        [commits.next().await, commits.next().await].iter().flatten().map(|commit| text(commit)).collect();
    assert_eq!(order, [json!("busy"), json!("other")]);
}

/// The queue has capacity for one write, and the writer is blocked.
#[tokio::test(flavor = "multi_thread")]
async fn queued_and_abandoned_writes_are_counted() {
    let store = Store::memory(StoreOptions::default().queue(1));
    store.define_bucket("notes", notes_config()).await.unwrap();
    let server = serve_store(store.clone(), options()).await;
    let release = block_writer(&store).await;
    let mut first = Client::connect(&server).await;
    let waiting = first.send("store.insert", json!({"bucket": "notes", "data": {"text": "first"}})).await;
    wait_for_metrics(&server, "one write is queued", |page| page.get("store_writes_waiting") == 1).await;
    let mut second = Client::connect(&server).await;
    second.send("store.insert", json!({"bucket": "notes", "data": {"text": "second"}})).await;
    wait_for_metrics(&server, "both are read", |page| page.get("messages_received_total") == 2).await;
    assert!(server.disconnect("conn-2"));
    assert_eq!(second.closed().await.0, 1000);
    let page = wait_for_metrics(&server, "the write is abandoned", |page| page.get("store_abandoned_total") == 1).await;
    assert_eq!(page.requests("store.insert", "abandoned"), 1);
    assert_shows_stats(&page, &store);
    release.send(()).unwrap();
    assert_eq!(first.reply(waiting).await["data"]["text"], "first");
    assert_eq!(first.call("store.count", json!({"bucket": "notes"})).await, 1, "the second write was abandoned");
    let page = MetricsPage::read(&server).await;
    assert_eq!(page.get("store_writes_waiting"), 0);
    assert_shows_stats(&page, &store);
}

/// The history is so small that live queries fall behind when commits follow each other quickly.
#[tokio::test(flavor = "multi_thread")]
async fn live_queries_that_fall_behind_are_reevaluated_and_counted() {
    let store = Store::memory(StoreOptions::default().history_bytes(1));
    store.define_bucket("notes", notes_config()).await.unwrap();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    client.call("store.subscribe", json!({"config": {"bucket": "notes", "aggregate": {"function": "count"}}})).await;
    let mut written = 0;
    while metric(&server, "live_restarts_total").await == 0 {
        assert!(written < 100_000, "the live queries never fell behind");
        let inserts: Vec<_> =
            (0..100).map(|number| store.insert("notes", object(json!({"text": "x", "rank": number})))).collect();
        for insert in inserts {
            insert.await.unwrap();
            written += 1;
        }
    }
    while client.push().await["data"] != json!(written) {}
    let page = MetricsPage::read(&server).await;
    assert!(page.get("store_followers_behind_total") > 0);
    assert_shows_stats(&page, &store);
}

#[tokio::test(flavor = "multi_thread")]
async fn full_store_rejects_inserts_until_records_are_deleted() {
    let store = Store::memory(StoreOptions::default().limits(Limits::default().max_store_bytes(10_000)));
    store.define_bucket("notes", notes_config()).await.unwrap();
    let server = serve_store(store.clone(), options()).await;
    let mut client = Client::connect(&server).await;
    let (code, inserted) = insert_until_rejected(&mut client).await;
    assert_eq!((code.as_str(), inserted > 0), ("TOO_LARGE", true));
    let long = json!({"text": "x".repeat(1000)});
    let (code, error) = client.call_err("store.insertMany", json!({"bucket": "notes", "data": [long]})).await;
    assert_eq!(code, "TOO_LARGE");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("the limit is 10000") && message.contains("delete records"), "{message}");
    assert_eq!(client.call("store.count", json!({"bucket": "notes"})).await, inserted);
    client.call("store.clear", json!({"bucket": "notes"})).await;
    client.call("store.insert", json!({"bucket": "notes", "data": long})).await;
}
