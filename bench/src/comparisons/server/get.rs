//! Reads by key: the cost of a request and its reply.

use std::net::TcpStream;

use serde_json::Value as Json;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::Effort;
use super::super::conn::runtime;
use super::client::{self, Client, lossy};
use super::process::{ServerProcess, core_assignment, on_load_core};
use super::row::{self, BUCKET};
use super::{peers, serving};

pub(super) const CONNECTIONS: usize = 50;
pub(super) const DEPTH: usize = 16;
const ROWS: u64 = 10_000;

/// The id of the first request of a batch. All ids have two digits.
pub(super) const FIRST_ID: usize = 10;

pub(super) fn get(effort: Effort) -> Workload {
    let requests_in_flight = (CONNECTIONS * DEPTH) as u64;
    let batches = (effort.operations(160_000) / requests_in_flight).max(1);
    let (mut ours, mut node) = (None, None);
    Workload {
        name: "server-get",
        about: format!(
            "{} store.get requests for one of {ROWS} rows, on {CONNECTIONS} connections, {DEPTH} in flight on each. Node ws reads the \
             same requests and answers each with a constant reply of {} bytes, the same length. All replies are compared. {}",
            requests_in_flight * batches,
            reply().len(),
            core_assignment()
        ),
        operation: "request",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("Node ws", move |meter| {
                let server = node.get_or_insert_with(|| peers::node_ws(&reply()));
                run(meter, server, batches, Client::connect, |_, reply| assert!(reply == self::reply().as_bytes()))
            })
            .requires_file(peers::WS, peers::ws_package()),
            Contender::new("tidewire", move |meter| {
                let server = ours.get_or_insert_with(|| serving::start(ROWS, CONNECTIONS, None));
                run(meter, server, batches, Client::connect_tidewire, check)
            }),
        ],
    }
}

/// Returns a reply with the format and length of a reply of `tidewire`.
fn reply() -> String {
    let row = row::text(0);
    let row = row.trim_end_matches('}');
    let meta = r#""_version":1,"_createdAt":1767225600000,"_updatedAt":1767225600000"#;
    format!(r#"{{"id":{FIRST_ID},"type":"result","data":{row},{meta}}}}}"#)
}

/// Returns the request that reads the row of this number.
pub(super) fn request(id: usize, number: u64) -> String {
    format!(r#"{{"id":{id},"type":"store.get","bucket":"{BUCKET}","key":{}}}"#, row::key(number))
}

/// Returns the row that a request of a batch reads. The rows of a batch are far apart.
fn number(connection: usize, index: usize) -> u64 {
    ((connection * DEPTH + index) as u64 * 7919) % ROWS
}

/// Panics unless the reply has the id and the row of the request.
fn check((id, number): (usize, u64), reply: &[u8]) {
    let parsed: Json = serde_json::from_slice(reply).expect("a reply is JSON");
    let row = &parsed["data"];
    assert!(parsed["id"] == id && row["id"] == row::key(number) && row["_version"] == 1, "{parsed}");
    assert!(reply.len() == self::reply().len(), "unexpected length of the reply {}", lossy(reply));
}

/// Requests that are sent in one write, and the replies to them.
struct Batch {
    socket: TcpStream,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

fn run(
    meter: Meter,
    server: &ServerProcess,
    batches: u64,
    connect: fn(&str) -> Client,
    check: fn((usize, u64), &[u8]),
) -> Sample {
    let (address, cpu) = (server.address.as_str(), server.cpu());
    on_load_core(move || {
        let batch = |connection| Batch::new(connect(address), connection, check);
        let connections: Vec<_> = (0..CONNECTIONS).map(batch).collect();
        let runtime = runtime();
        let _entered = runtime.enter();
        let tasks: Vec<_> = connections.into_iter().map(|batch| batch.repeat(batches)).collect();
        let before = cpu.now();
        let sample = meter.measure((CONNECTIONS * DEPTH) as u64 * batches, || {
            let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
            runtime.block_on(async {
                for task in tasks {
                    task.await.expect("the load does not panic");
                }
            });
        });
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
    })
}

impl Batch {
    /// Sends the batch once, and checks each reply.
    fn new(mut client: Client, connection: usize, check: fn((usize, u64), &[u8])) -> Self {
        let request_at = |index| (FIRST_ID + index, number(connection, index));
        let requests: Vec<u8> =
            (0..DEPTH).map(request_at).flat_map(|(id, number)| client::text(&request(id, number))).collect();
        client.write(&requests);
        let mut replies = Vec::new();
        for index in 0..DEPTH {
            let frame = client.receive_frame();
            let (header, _) = client::lengths(&frame).expect("the frame is complete");
            check(request_at(index), &frame[header..]);
            replies.extend(frame);
        }
        Self { socket: client.into_socket(), requests, replies }
    }

    /// Sends the batch repeatedly, each time after all replies have arrived, and compares the replies with those of the first time.
    fn repeat(self, batches: u64) -> impl Future<Output = ()> + Send {
        let Self { socket, requests, replies: expected } = self;
        let mut socket = into_tokio(socket);
        async move {
            let mut replies = vec![0; expected.len()];
            for _ in 0..batches {
                socket.write_all(&requests).await.expect("the server reads");
                socket.read_exact(&mut replies).await.expect("the server answers");
                assert!(replies == expected, "the replies do not change");
            }
        }
    }
}

/// Registers a socket with the current runtime.
pub(super) fn into_tokio(socket: TcpStream) -> tokio::net::TcpStream {
    socket.set_nonblocking(true).expect("a socket can be non-blocking");
    tokio::net::TcpStream::from_std(socket).expect("the socket can be registered")
}
