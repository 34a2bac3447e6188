//! A soak test of the server: many clients that reconnect, fail or are slow, a faulty network, and a process that is killed.
//!
//! Each writer pipelines writes to its own records, and retries unacknowledged writes until all are done. Readers subscribe to queries, and
//! resume after every disconnect. Meanwhile the process is killed, stopped and restarted on the same data, and a proxy injects network
//! faults. The test checks:
//!
//! - No acknowledged write is lost. A retried write takes effect once, and gets the same reply.
//! - A subscriber receives each position at most once. At every position, the result built from deltas equals the snapshot that
//!   other subscribers of the query received, and all subscribers receive positions in one order.
//! - No client sees its own write before the reply, or a partial transaction.
//! - After the last write, every subscriber has the results of the store. After the last disconnect, the server keeps no state.
//!
//! A seed, which is printed, determines the random choices; the number of completed writes determines when a fault is injected.
//! `TIDEWIRE_SOAK_SEED` sets the seed, and `TIDEWIRE_SOAK` multiplies the amount of work.

mod connection;
mod history;
mod model;
mod query;
mod reader;
mod rng;
mod server;
mod subscriber;
mod writer;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};
use tidewire_testkit::{CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, wait_until_async};
use tokio::sync::watch;
use tokio::task::{JoinSet, block_in_place};

use self::history::{CrossCheck, History};
use self::model::Model;
use self::query::{LiveQuery, heavy, items_of, named, rows};
use self::reader::{Behavior, Reader};
use self::rng::Rng;
use self::server::RestartableServer;
use self::subscriber::Subscriber;
use self::writer::Writer;
use crate::client::Client;

const WRITERS: usize = 6;
const WRITES: usize = 150;
const KILLS: usize = 3;
const CUTS: usize = 8;
const BUCKETS: [&str; 5] = ["items", "left", "right", "heavy", "log"];

/// The progress of the run.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    /// Number of acknowledged writes.
    written: usize,
    /// Whether all writes are done.
    is_done: bool,
}

/// A fault of the server or the network.
#[derive(Debug, Clone, Copy)]
enum Incident {
    Kill,
    Stop,
    Cut(CloseMode),
    Inject(Faults),
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_converge_after_crashes_and_network_faults() {
    let number =
        |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("the variable must be a number"));
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| u64::from(time.subsec_nanos()));
    let seed = number("TIDEWIRE_SOAK_SEED").unwrap_or_else(clock);
    let scale = usize::try_from(number("TIDEWIRE_SOAK").unwrap_or(1)).expect("the variable must fit usize");
    println!("TIDEWIRE_SOAK_SEED={seed} TIDEWIRE_SOAK={scale}");

    let server = RestartableServer::start();
    let addr = server.addr();
    let url = format!("ws://{addr}/");
    create_schema(&mut Client::connect_to(&url).await).await;
    let proxy = Arc::new(FaultProxy::start(addr));
    let (progress, cross_check) = (Arc::new(watch::Sender::new(Progress::default())), Arc::new(CrossCheck::default()));

    let mut readers = JoinSet::new();
    for (index, (behavior, is_proxied)) in reader_behaviors().into_iter().enumerate() {
        let mut rng = Rng::new(seed, 1000 + index as u64);
        let histories = choose_queries(behavior, index, &mut rng, &cross_check);
        let addr = if is_proxied { proxy.addr() } else { addr };
        let subscriber = Subscriber::new(addr, behavior == Behavior::Slow, histories);
        readers.spawn(Reader { subscriber, behavior, rng, progress: progress.subscribe() }.run());
    }
    let mut writers = JoinSet::new();
    for index in 0..WRITERS {
        let owner = format!("w{index}");
        let own = [true, false].map(|is_delta| History::new(items_of(&owner), is_delta, &cross_check));
        // The last writer connects through the faulty network.
        let addr = if index + 1 == WRITERS { proxy.addr() } else { addr };
        let own = Subscriber::new(addr, false, own.into());
        let rng = Rng::new(seed, index as u64);
        writers.spawn(Writer::new(owner, WRITES * scale, rng, Arc::clone(&progress), own).run());
    }
    let schedule = schedule(&mut Rng::new(seed, 999), scale);
    let fault_injection = tokio::spawn(inject_faults(server, Arc::clone(&proxy), schedule, progress.subscribe()));

    let mut models = Vec::new();
    while let Some(model) = writers.join_next().await {
        models.push(model.unwrap());
    }
    let server = fault_injection.await.unwrap();
    let mut client = Client::connect_to(&url).await;
    write_markers(&mut client).await;
    progress.send_modify(|progress| progress.is_done = true);
    while let Some(result) = readers.join_next().await {
        result.unwrap();
    }
    check_records(&mut client, &models).await;
    check_no_connections_left(&mut client).await;
    server.check();
    println!("{}", cross_check.finish());
}

/// Defines the buckets and queries, and inserts the accounts of every writer.
async fn create_schema(client: &mut Client) {
    for bucket in BUCKETS {
        let key = match bucket {
            "log" => json!({"type": "number", "generated": "autoincrement"}),
            _ => json!({"type": "string"}),
        };
        let mut config = json!({"key": "id", "schema": {"id": key, "owner": {"type": "string", "required": true}}});
        if bucket == "items" {
            config["schema"]["rank"] = json!({"type": "number"});
            config["indexes"] = json!(["rank", "owner"]);
        }
        client.call("store.defineBucket", json!({"name": bucket, "config": config})).await;
    }
    for (name, config) in named() {
        client.call("store.defineQuery", json!({"name": name, "config": config})).await;
    }
    for bucket in ["left", "right"] {
        let accounts: Vec<Json> = (0..WRITERS).flat_map(|index| Model::accounts(&format!("w{index}"))).collect();
        client.call("store.insertMany", json!({"bucket": bucket, "data": accounts})).await;
    }
}

/// Writes the last record of each bucket.
async fn write_markers(client: &mut Client) {
    let insert = |bucket: &&str| {
        let mut data = json!({"owner": "marker", "n": 1_000_000, "rank": 1000, "amount": 0});
        if *bucket != "log" {
            data["id"] = json!("marker");
        }
        json!({"op": "insert", "bucket": bucket, "data": data})
    };
    let operations: Vec<Json> = BUCKETS.iter().map(insert).collect();
    client.call("store.transaction", json!({"operations": operations})).await;
}

/// Returns the behaviour of each reader, and whether it connects through the faulty network.
fn reader_behaviors() -> Vec<(Behavior, bool)> {
    let direct = [
        Behavior::Steady,
        Behavior::Steady,
        Behavior::Reconnecting,
        Behavior::Reconnecting,
        Behavior::Reconnecting,
        Behavior::Slow,
    ];
    let direct = direct.into_iter().chain([Behavior::Slow, Behavior::Slow]).map(|behavior| (behavior, false));
    direct
        .chain(
            [Behavior::Steady, Behavior::Steady, Behavior::Reconnecting, Behavior::Slow]
                .map(|behavior| (behavior, true)),
        )
        .collect()
}

/// Returns the queries of a reader. The first two readers subscribe to all queries, with deltas and with snapshots. Slow readers also
/// subscribe to the large records.
fn choose_queries(behavior: Behavior, index: usize, rng: &mut Rng, cross_check: &Arc<CrossCheck>) -> Vec<History> {
    let all = query::all(WRITERS);
    if index < 2 {
        return all.into_iter().map(|query| History::new(query, index == 0, cross_check)).collect();
    }
    let mut chosen: Vec<LiveQuery> = (0..4).map(|_| rng.pick(&all).clone()).collect();
    if behavior == Behavior::Slow {
        chosen.push(heavy());
        chosen.push(heavy());
    }
    chosen.into_iter().enumerate().map(|(index, query)| History::new(query, index % 2 == 0, cross_check)).collect()
}

/// Returns the faults, each with the number of writes after which it occurs.
fn schedule(rng: &mut Rng, scale: usize) -> Vec<(usize, Incident)> {
    let mut incidents = vec![Incident::Stop];
    incidents.resize(1 + KILLS * scale, Incident::Kill);
    for _ in 0..CUTS * scale {
        let mode = *rng.pick(&[CloseMode::Graceful, CloseMode::Reset]);
        let direction = *rng.pick(&[Direction::ToClient, Direction::ToServer]);
        let cut = Cut::after(rng.below(20_000) as u64, direction).mode(mode);
        incidents.push(match rng.below(4) {
            0 => Incident::Inject(Faults::default().cut(cut)),
            1 => Incident::Inject(Faults::default().half_open(true)),
            2 => Incident::Inject(Faults::default().refuse(true)),
            _ => Incident::Cut(mode),
        });
    }
    // The writer behind the proxy may be blocked by a fault until the others are done, so its writes do not count.
    let writes = (WRITERS - 1) * WRITES * scale;
    let mut schedule: Vec<_> = incidents.into_iter().map(|incident| (rng.below(writes), incident)).collect();
    schedule.sort_by_key(|(after, _)| *after);
    schedule
}

/// Injects the faults. A network fault lasts until a few more writes are done.
async fn inject_faults(
    mut server: RestartableServer,
    proxy: Arc<FaultProxy>,
    schedule: Vec<(usize, Incident)>,
    mut progress: watch::Receiver<Progress>,
) -> RestartableServer {
    const FAULT_WRITES: usize = 20;
    let writes = schedule.last().map_or(0, |(after, _)| *after);
    for (after, incident) in schedule {
        drop(progress.wait_for(|progress| progress.written >= after).await.expect("the run has ended"));
        block_in_place(|| match incident {
            Incident::Kill => server.kill(),
            Incident::Stop => server.stop(),
            Incident::Cut(mode) => proxy.cut(mode),
            Incident::Inject(faults) => proxy.inject(faults),
        });
        if let Incident::Inject(_) = incident {
            let until = (progress.borrow().written + FAULT_WRITES).min(writes);
            drop(progress.wait_for(|progress| progress.written >= until).await.expect("the run has ended"));
            block_in_place(|| proxy.heal());
        }
    }
    server
}

/// Checks that the store has exactly the records of the writers.
async fn check_records(client: &mut Client, models: &[Model]) {
    assert_eq!(models.len(), WRITERS);
    for bucket in BUCKETS {
        let mut count = 1;
        for model in models {
            let owned = client.call("store.where", json!({"bucket": bucket, "filter": {"owner": model.owner}})).await;
            model.check(bucket, rows(&owned));
            count += rows(&owned).len();
        }
        assert_eq!(client.call("store.count", json!({"bucket": bucket})).await, json!(count), "in {bucket}");
    }
}

/// Checks that only this client's connection is left, without subscriptions.
async fn check_no_connections_left(client: &mut Client) {
    wait_until_async("all other connections have closed", PATIENCE, async || {
        let stats = client.call("server.stats", json!({})).await;
        let connections = &stats["connections"];
        stats["connectionCount"] == 1
            && connections["active"] == 1
            && connections["totalStoreSubscriptions"] == 0
            && stats["store"]["queries"]["activeSubscriptions"] == 0
    })
    .await;
}
