//! The server under load, for a while: many clients that come, go, break off, are slow or cut off, and a process that is killed.
//!
//! Writers write what they alone may write, many at a time, and send again what they do not know to be done, until all of it is.
//! Followers follow queries, and go on where they were after every break. Meanwhile the process is killed, stopped and started
//! again on the same data, and a faulty network comes between. What is checked:
//!
//! - No write that was answered is lost; what was sent twice was done once, and was answered the same.
//! - A subscriber is told one position after the other, none twice. Deltas applied to what it has give what others have who follow
//!   the same query whole, at every position that both were told; and all are told positions in one order.
//! - Nobody is told of a write of its own before the reply to it, nor of half a transaction.
//! - When nothing is written any more, everybody has what the store has. When everybody has left, nothing is left of them.
//!
//! Who does what is decided by a seed, which is printed with a failure; when it happens is decided by how much has been written.
//! `TIDEWIRE_SOAK_SEED` sets the seed, and `TIDEWIRE_SOAK` how many times the usual work is done.

mod chance;
mod follower;
mod history;
mod link;
mod model;
mod query;
mod site;
mod subscriber;
mod writer;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};
use tidewire_testkit::{CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, wait_until_async};
use tokio::sync::watch;
use tokio::task::{JoinSet, block_in_place};

use self::chance::Chance;
use self::follower::{Follower, Manner};
use self::history::{History, Twins};
use self::model::Model;
use self::query::{Asked, heavy, items_of, named, rows};
use self::site::Site;
use self::subscriber::Subscriber;
use self::writer::Writer;
use crate::client::Client;

const WRITERS: usize = 6;
const WRITES: usize = 150;
const KILLS: usize = 3;
const CUTS: usize = 8;
const BUCKETS: [&str; 5] = ["items", "left", "right", "heavy", "log"];

/// How far it has come.
#[derive(Debug, Clone, Copy, Default)]
struct Course {
    /// Writes that were answered.
    written: usize,
    /// Nothing is written any more.
    is_over: bool,
}

/// What happens to everybody.
#[derive(Debug, Clone, Copy)]
enum Incident {
    Kill,
    Stop,
    Cut(CloseMode),
    Inject(Faults),
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_has_what_there_is_whatever_happens() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("it is a number"));
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| u64::from(time.subsec_nanos()));
    let seed = number("TIDEWIRE_SOAK_SEED").unwrap_or_else(clock);
    let scale = usize::try_from(number("TIDEWIRE_SOAK").unwrap_or(1)).expect("it is no more than can be done");
    println!("TIDEWIRE_SOAK_SEED={seed} TIDEWIRE_SOAK={scale}");

    let site = Site::open();
    let addr = site.addr();
    let url = format!("ws://{addr}/");
    prepare(&mut Client::connect_to(&url).await).await;
    let proxy = Arc::new(FaultProxy::start(addr));
    let (course, twins) = (Arc::new(watch::Sender::new(Course::default())), Arc::new(Twins::default()));

    let mut followers = JoinSet::new();
    for (place, (manner, is_proxied)) in manners().into_iter().enumerate() {
        let mut chance = Chance::new(seed, 1000 + place as u64);
        let histories = choose(manner, place, &mut chance, &twins);
        let addr = if is_proxied { proxy.addr() } else { addr };
        let subscriber = Subscriber::new(addr, manner == Manner::Slow, histories);
        followers.spawn(Follower { subscriber, manner, chance, course: course.subscribe() }.run());
    }
    let mut writers = JoinSet::new();
    for place in 0..WRITERS {
        let owner = format!("w{place}");
        let own = [true, false].map(|is_delta| History::new(items_of(&owner), is_delta, &twins));
        // The last one writes through the network that fails.
        let addr = if place + 1 == WRITERS { proxy.addr() } else { addr };
        let own = Subscriber::new(addr, false, own.into());
        let chance = Chance::new(seed, place as u64);
        writers.spawn(Writer::new(owner, WRITES * scale, chance, Arc::clone(&course), own).run());
    }
    let script = script(&mut Chance::new(seed, 999), scale);
    let directing = tokio::spawn(direct(site, Arc::clone(&proxy), script, course.subscribe()));

    let mut models = Vec::new();
    while let Some(model) = writers.join_next().await {
        models.push(model.unwrap());
    }
    let site = directing.await.unwrap();
    let mut client = Client::connect_to(&url).await;
    mark(&mut client).await;
    course.send_modify(|course| course.is_over = true);
    while let Some(followed) = followers.join_next().await {
        followed.unwrap();
    }
    check_records(&mut client, &models).await;
    check_that_all_have_left(&mut client).await;
    site.check();
    println!("{}", twins.finish());
}

/// Defines what there is, and gives every writer its accounts.
async fn prepare(client: &mut Client) {
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
        client.ask("store.defineBucket", json!({"name": bucket, "config": config})).await;
    }
    for (name, config) in named() {
        client.ask("store.defineQuery", json!({"name": name, "config": config})).await;
    }
    for bucket in ["left", "right"] {
        let accounts: Vec<Json> = (0..WRITERS).flat_map(|place| Model::accounts(&format!("w{place}"))).collect();
        client.ask("store.insertMany", json!({"bucket": bucket, "data": accounts})).await;
    }
}

/// The last write of all.
async fn mark(client: &mut Client) {
    let insert = |bucket: &&str| {
        let mut data = json!({"owner": "marker", "n": 1_000_000, "rank": 1000, "amount": 0});
        if *bucket != "log" {
            data["id"] = json!("marker");
        }
        json!({"op": "insert", "bucket": bucket, "data": data})
    };
    let operations: Vec<Json> = BUCKETS.iter().map(insert).collect();
    client.ask("store.transaction", json!({"operations": operations})).await;
}

/// How the followers behave, and whether the network between them and the server fails.
fn manners() -> Vec<(Manner, bool)> {
    let direct = [Manner::Steady, Manner::Steady, Manner::Restless, Manner::Restless, Manner::Restless, Manner::Slow];
    let direct = direct.into_iter().chain([Manner::Slow, Manner::Slow]).map(|manner| (manner, false));
    direct
        .chain([Manner::Steady, Manner::Steady, Manner::Restless, Manner::Slow].map(|manner| (manner, true)))
        .collect()
}

/// What one follows. The first two follow everything, whole and as deltas; whoever is slow follows the great records too.
fn choose(manner: Manner, place: usize, chance: &mut Chance, twins: &Arc<Twins>) -> Vec<History> {
    let all = query::all(WRITERS);
    if place < 2 {
        return all.into_iter().map(|asked| History::new(asked, place == 0, twins)).collect();
    }
    let mut chosen: Vec<Asked> = (0..4).map(|_| chance.pick(&all).clone()).collect();
    if manner == Manner::Slow {
        chosen.push(heavy());
        chosen.push(heavy());
    }
    chosen.into_iter().enumerate().map(|(which, asked)| History::new(asked, which % 2 == 0, twins)).collect()
}

/// What happens, and after how many writes.
fn script(chance: &mut Chance, scale: usize) -> Vec<(usize, Incident)> {
    let mut incidents = vec![Incident::Stop];
    incidents.resize(1 + KILLS * scale, Incident::Kill);
    for _ in 0..CUTS * scale {
        let end = *chance.pick(&[CloseMode::Graceful, CloseMode::Reset]);
        let direction = *chance.pick(&[Direction::ToClient, Direction::ToServer]);
        let cut = Cut::after(chance.below(20_000) as u64, direction).mode(end);
        incidents.push(match chance.below(4) {
            0 => Incident::Inject(Faults::default().cut(cut)),
            1 => Incident::Inject(Faults::default().half_open(true)),
            2 => Incident::Inject(Faults::default().refuse(true)),
            _ => Incident::Cut(end),
        });
    }
    // The writer behind the network may have to wait until the others are done, for a fault to pass.
    let writes = (WRITERS - 1) * WRITES * scale;
    let mut script: Vec<_> = incidents.into_iter().map(|incident| (chance.below(writes), incident)).collect();
    script.sort_by_key(|(after, _)| *after);
    script
}

/// Lets it happen. A fault of the network lasts until a few more writes are done.
async fn direct(
    mut site: Site,
    proxy: Arc<FaultProxy>,
    script: Vec<(usize, Incident)>,
    mut course: watch::Receiver<Course>,
) -> Site {
    const LASTS: usize = 20;
    let writes = script.last().map_or(0, |(after, _)| *after);
    for (after, incident) in script {
        drop(course.wait_for(|course| course.written >= after).await.expect("the course goes on"));
        block_in_place(|| match incident {
            Incident::Kill => site.kill(),
            Incident::Stop => site.stop(),
            Incident::Cut(end) => proxy.cut(end),
            Incident::Inject(faults) => proxy.inject(faults),
        });
        if let Incident::Inject(_) = incident {
            let until = (course.borrow().written + LASTS).min(writes);
            drop(course.wait_for(|course| course.written >= until).await.expect("the course goes on"));
            block_in_place(|| proxy.heal());
        }
    }
    site
}

/// Whether there is all that the writers have written, and nothing else.
async fn check_records(client: &mut Client, models: &[Model]) {
    assert_eq!(models.len(), WRITERS);
    for bucket in BUCKETS {
        let mut count = 1;
        for model in models {
            let owned = client.ask("store.where", json!({"bucket": bucket, "filter": {"owner": model.owner}})).await;
            model.check(bucket, rows(&owned));
            count += rows(&owned).len();
        }
        assert_eq!(client.ask("store.count", json!({"bucket": bucket})).await, json!(count), "in {bucket}");
    }
}

/// Whether nothing is left of whoever was there, but for who asks.
async fn check_that_all_have_left(client: &mut Client) {
    wait_until_async("all have left", PATIENCE, async || {
        let stats = client.ask("server.stats", json!({})).await;
        let connections = &stats["connections"];
        stats["connectionCount"] == 1
            && connections["active"] == 1
            && connections["totalStoreSubscriptions"] == 0
            && stats["store"]["queries"]["activeSubscriptions"] == 0
    })
    .await;
}
