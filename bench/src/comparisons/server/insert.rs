//! Durable inserts: the cost that the network adds to the store.

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
use super::get::{CONNECTIONS, DEPTH, FIRST_ID, into_tokio};
use super::process::{ServerProcess, core_assignment, on_load_core};
use super::row::{self, BUCKET};
use super::serving;
use crate::role::Role;

/// Rows in flight.
const ROWS_IN_FLIGHT: usize = CONNECTIONS * DEPTH;

pub(super) fn insert(effort: Effort) -> Workload {
    let batches = usize::try_from(effort.operations(32_000)).expect("64 bits").div_ceil(ROWS_IN_FLIGHT);
    Workload {
        name: "server-insert",
        about: format!(
            "{} rows of {} bytes, each durable before its reply: by store.insert on {CONNECTIONS} connections, {DEPTH} in flight on \
             each, or, for tidewire-store, by as many tasks in the process of the store, with parsed records and without a \
             network. {} The disk is {}.",
            ROWS_IN_FLIGHT * batches,
            row::BYTES,
            core_assignment(),
            folder::disk()
        ),
        operation: "row",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("tidewire-store", move |meter| run_store(meter, batches)),
            Contender::new("tidewire", move |meter| run_server(meter, batches)),
        ],
    }
}

fn run_server(meter: Meter, batches: usize) -> Sample {
    let folder = folder::new();
    let server = serving::start(0, CONNECTIONS + 1, Some(folder.path()));
    let (address, cpu) = (server.address.as_str(), server.cpu());
    on_load_core(move || {
        let writer = |connection| Writer::new(Client::connect_tidewire(address), connection, batches);
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
        let count = Client::connect_tidewire(address).request(&request);
        assert!(count == ROWS_IN_FLIGHT * (1 + batches), "{count} rows are stored");
        sample
    })
}

fn measure(meter: Meter, cpu: CpuClock, batches: usize, work: impl FnOnce()) -> Sample {
    let before = cpu.now();
    let sample = meter.measure((ROWS_IN_FLIGHT * batches) as u64, work);
    sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
}

/// A connection, and the batches that it will insert.
struct Writer {
    socket: TcpStream,
    batches: Vec<Batch>,
    /// The length of a reply.
    reply_bytes: usize,
}

/// Requests that are sent in one write, and the expected start of each reply.
struct Batch {
    requests: Vec<u8>,
    prefixes: Vec<String>,
}

/// Returns the number of a row of a batch. Connections insert about evenly, so the numbers grow like those of a sequence.
fn number(connection: usize, batch: usize, index: usize) -> u64 {
    ((batch * CONNECTIONS + connection) * DEPTH + index) as u64
}

impl Batch {
    fn new(connection: usize, batch: usize) -> Self {
        let (mut requests, mut prefixes) = (Vec::new(), Vec::new());
        for index in 0..DEPTH {
            let (id, number) = (FIRST_ID + index, number(connection, batch, index));
            let (row, key) = (row::text(number), row::key(number));
            let request = format!(r#"{{"id":{id},"type":"store.insert","bucket":"{BUCKET}","data":{row}}}"#);
            requests.extend(client::text(&request));
            prefixes.push(format!(r#"{{"id":{id},"type":"result","data":{{"id":{key},"#));
        }
        Self { requests, prefixes }
    }

    fn check(&self, replies: &[u8], length: usize) {
        for (reply, prefix) in replies.chunks_exact(length).zip(&self.prefixes) {
            let (header, _) = client::lengths(reply).expect("the frame is complete");
            assert!(
                reply[header..].starts_with(prefix.as_bytes()),
                "expected a reply that starts with {prefix}, got {}",
                lossy(reply)
            );
        }
    }
}

impl Writer {
    /// Inserts the first batch, which is not measured, and encodes all others.
    fn new(mut client: Client, connection: usize, batches: usize) -> Self {
        let first = Batch::new(connection, 0);
        client.write(&first.requests);
        let replies: Vec<_> = (0..DEPTH).map(|_| client.receive_frame()).collect();
        let reply_bytes = replies[0].len();
        assert!(replies.iter().all(|reply| reply.len() == reply_bytes), "all replies have the same length");
        first.check(&replies.concat(), reply_bytes);
        let batches = (1..=batches).map(|batch| Batch::new(connection, batch)).collect();
        Self { socket: client.into_socket(), batches, reply_bytes }
    }

    /// Sends the batches, each after all replies to the previous one.
    fn write_all(self) -> impl Future<Output = ()> + Send {
        let Self { socket, batches, reply_bytes } = self;
        let mut socket = into_tokio(socket);
        async move {
            let mut replies = vec![0; DEPTH * reply_bytes];
            for batch in batches {
                socket.write_all(&batch.requests).await.expect("the server reads");
                socket.read_exact(&mut replies).await.expect("the server answers");
                batch.check(&replies, reply_bytes);
            }
        }
    }
}

/// A process with a store, which inserts rows on request.
pub(super) const STORE: Role = Role { name: "server-store", run };

fn run_store(meter: Meter, batches: usize) -> Sample {
    let folder = folder::new();
    let path = folder.path().to_str().expect("the path is valid UTF-8");
    let store = ServerProcess::new(STORE.start(&[path.to_owned(), batches.to_string()]), "listening on ");
    let (address, cpu) = (store.address.as_str(), store.cpu());
    on_load_core(move || {
        let mut control = TcpStream::connect(address).expect("the store listens");
        let mut insert_batches = || {
            control.write_all(&[1]).expect("the store process reads");
            control.read_exact(&mut [0]).expect("the store process replies");
        };
        // A warm-up batch, as with the server.
        insert_batches();
        measure(meter, cpu, batches, insert_batches)
    })
}

fn run(arguments: &[String]) {
    let [folder, batches] = arguments else { panic!("expected a folder and a number of batches") };
    let batches: usize = batches.parse().expect("a number of batches");
    let store = serving::open(folder);
    serving::define(&store);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    println!("listening on {}", listener.local_addr().expect("it is bound"));
    let (mut control, _) = listener.accept().expect("the load connects");
    let runtime = runtime();
    for part in [0..1, 1..1 + batches] {
        control.read_exact(&mut [0]).expect("the load sends a request");
        runtime.block_on(insert_all(&store, part));
        control.write_all(&[1]).expect("the load waits");
    }
    let count = store.snapshot().state.bucket(BUCKET).expect("the bucket exists").len();
    assert!(count == ROWS_IN_FLIGHT * (1 + batches), "{count} rows are stored");
    // Runs until it is killed, because the load reads the CPU clock of this process.
    let _ = control.read(&mut [0]);
}

/// Inserts batches, by as many tasks as the server has connections. Each task waits until a batch is durable.
async fn insert_all(store: &Store, batches: Range<usize>) {
    let row = row::record(0);
    let writer = |connection| {
        let (store, batches, row) = (store.clone(), batches.clone(), row.clone());
        tokio::spawn(async move {
            for batch in batches {
                let insert = |index| {
                    let mut row = row.clone();
                    row.insert("id".to_owned(), row::key(number(connection, batch, index)).into());
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
