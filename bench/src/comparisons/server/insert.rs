//! Durable inserts: what the network adds to a store.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;

use tidewire_bench::{Contender, CpuClock, Meter, Metric, Sample, Workload};
use tidewire_store::Store;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::Effort;
use super::super::conn::runtime;
use super::super::store::folder;
use super::client::{self, Client, lossy};
use super::get::{CONNECTIONS, DEPTH, FIRST_ID, adopt};
use super::process::{Served, load, places};
use super::row::{self, BUCKET};
use super::serving;
use crate::role::Role;

/// How many rows are on their way at a time.
const WAVE: usize = CONNECTIONS * DEPTH;

pub(super) fn insert(effort: Effort) -> Workload {
    let batches = usize::try_from(effort.operations(32_000)).expect("64 bits").div_ceil(WAVE);
    Workload {
        name: "server-insert",
        about: format!(
            "{} rows of {} bytes, each on the disk before its reply: by store.insert on {CONNECTIONS} connections, {DEPTH} at a time \
             on each, or by as many tasks of a process that has the store, the \
             rows as trees, and no network. {} The disk is {}.",
            WAVE * batches,
            row::BYTES,
            places(),
            folder::disk()
        ),
        operation: "row",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("tidewire-store", move |meter| alone(meter, batches)),
            Contender::new("tidewire", move |meter| served(meter, batches)),
        ],
    }
}

fn served(meter: Meter, batches: usize) -> Sample {
    let folder = folder::new();
    let server = serving::start(0, CONNECTIONS + 1, Some(folder.path()));
    let (address, cpu) = (server.address.as_str(), server.cpu());
    load(move || {
        let writer = |connection| Writer::try_out(Client::welcomed(address), connection, batches);
        let writers: Vec<_> = (0..CONNECTIONS).map(writer).collect();
        let runtime = runtime();
        let _entered = runtime.enter();
        let tasks: Vec<_> = writers.into_iter().map(Writer::write_all).collect();
        let sample = measure(meter, cpu, batches, || {
            let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
            runtime.block_on(async {
                for task in tasks {
                    task.await.expect("the load does not panic");
                }
            });
        });
        let request = format!(r#"{{"id":1,"type":"store.count","bucket":"{BUCKET}"}}"#);
        let count = Client::welcomed(address).ask(&request);
        assert!(count == WAVE * (1 + batches), "{count} rows are stored");
        sample
    })
}

fn measure(meter: Meter, cpu: CpuClock, batches: usize, work: impl FnOnce()) -> Sample {
    let before = cpu.now();
    let sample = meter.measure((WAVE * batches) as u64, work);
    sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
}

/// A connection, and the rows that it is about to insert.
struct Writer {
    socket: TcpStream,
    batches: Vec<Batch>,
    /// The bytes of one reply.
    reply: usize,
}

/// Requests that are sent at once, and how the reply to each begins.
struct Batch {
    requests: Vec<u8>,
    beginnings: Vec<String>,
}

/// The number of the row in this place of a batch. They grow about evenly over all connections, as if a sequence had made them.
fn number(connection: usize, batch: usize, place: usize) -> u64 {
    ((batch * CONNECTIONS + connection) * DEPTH + place) as u64
}

impl Batch {
    fn new(connection: usize, batch: usize) -> Self {
        let (mut requests, mut beginnings) = (Vec::new(), Vec::new());
        for place in 0..DEPTH {
            let (id, number) = (FIRST_ID + place, number(connection, batch, place));
            let (row, key) = (row::text(number), row::key(number));
            let request = format!(r#"{{"id":{id},"type":"store.insert","bucket":"{BUCKET}","data":{row}}}"#);
            requests.extend(client::text(&request));
            beginnings.push(format!(r#"{{"id":{id},"type":"result","data":{{"id":{key},"#));
        }
        Self { requests, beginnings }
    }

    fn check(&self, replies: &[u8], length: usize) {
        for (reply, beginning) in replies.chunks_exact(length).zip(&self.beginnings) {
            let (header, _) = client::lengths(reply).expect("it is a frame");
            assert!(reply[header..].starts_with(beginning.as_bytes()), "{beginning} begins {}", lossy(reply));
        }
    }
}

impl Writer {
    /// Inserts the first batch, which is not measured, and makes all others.
    fn try_out(mut client: Client, connection: usize, batches: usize) -> Self {
        let first = Batch::new(connection, 0);
        client.write(&first.requests);
        let replies: Vec<_> = (0..DEPTH).map(|_| client.receive_frame()).collect();
        let reply = replies[0].len();
        assert!(replies.iter().all(|other| other.len() == reply), "all replies have the same length");
        first.check(&replies.concat(), reply);
        let batches = (1..=batches).map(|batch| Batch::new(connection, batch)).collect();
        Self { socket: client.into_socket(), batches, reply }
    }

    /// Sends one batch after the other, each when the one before is answered.
    fn write_all(self) -> impl Future<Output = ()> + Send {
        let Self { socket, batches, reply } = self;
        let mut socket = adopt(socket);
        async move {
            let mut replies = vec![0; DEPTH * reply];
            for batch in batches {
                socket.write_all(&batch.requests).await.expect("the server reads");
                socket.read_exact(&mut replies).await.expect("the server answers");
                batch.check(&replies, reply);
            }
        }
    }
}

/// The store in a process of its own, which inserts when it is told to.
pub(super) const STORE: Role = Role { name: "server-store", play };

fn alone(meter: Meter, batches: usize) -> Sample {
    let folder = folder::new();
    let path = folder.path().to_str().expect("the folder of this program is text");
    let store = Served::new(STORE.start(&[path.to_owned(), batches.to_string()]), "listening on ");
    let (address, cpu) = (store.address.as_str(), store.cpu());
    load(move || {
        let mut control = TcpStream::connect(address).expect("the store listens");
        let mut next = || {
            control.write_all(&[1]).expect("the store is there");
            control.read_exact(&mut [0]).expect("the store has inserted");
        };
        // A batch that is not measured, as above.
        next();
        measure(meter, cpu, batches, next)
    })
}

fn play(arguments: &[String]) {
    let [folder, batches] = arguments else { panic!("the store is told a folder and a number") };
    let batches: usize = batches.parse().expect("a number of batches");
    let store = serving::open(folder);
    serving::define(&store);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    println!("listening on {}", listener.local_addr().expect("it is bound"));
    let (mut control, _) = listener.accept().expect("the load connects");
    let runtime = runtime();
    for part in [0..1, 1..1 + batches] {
        control.read_exact(&mut [0]).expect("the load is there");
        runtime.block_on(insert_all(&store, part));
        control.write_all(&[1]).expect("the load waits");
    }
    let count = store.snapshot().state.bucket(BUCKET).expect("it was defined").len();
    assert!(count == WAVE * (1 + batches), "{count} rows are stored");
    // Until it is killed: the load reads its clock.
    let _ = control.read(&mut [0]);
}

/// Has as many tasks as there would be connections insert these batches, each when the one before is on the disk.
async fn insert_all(store: &Store, batches: Range<usize>) {
    let row = row::record(0);
    let writer = |connection| {
        let (store, batches, row) = (store.clone(), batches.clone(), row.clone());
        tokio::spawn(async move {
            for batch in batches {
                let insert = |place| {
                    let mut row = row.clone();
                    row.insert("id".to_owned(), row::key(number(connection, batch, place)).into());
                    store.insert(BUCKET, row)
                };
                let pending: Vec<_> = (0..DEPTH).map(insert).collect();
                for stored in pending {
                    stored.await.expect("the row is stored");
                }
            }
        })
    };
    let tasks: Vec<_> = (0..CONNECTIONS).map(writer).collect();
    for task in tasks {
        task.await.expect("no writer panics");
    }
}
