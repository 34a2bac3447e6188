//! Reads by key: what a request and its reply cost.

use std::net::TcpStream;

use serde_json::Value as Json;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::Effort;
use super::super::conn::runtime;
use super::client::{self, Client, lossy};
use super::process::{Served, load, places};
use super::row::{self, BUCKET};
use super::{peers, serving};

pub(super) const CONNECTIONS: usize = 50;
pub(super) const DEPTH: usize = 16;
const ROWS: u64 = 10_000;

/// The id of the first request of a batch. All have two digits.
pub(super) const FIRST_ID: usize = 10;

pub(super) fn get(effort: Effort) -> Workload {
    let wave = (CONNECTIONS * DEPTH) as u64;
    let batches = (effort.operations(160_000) / wave).max(1);
    let (mut ours, mut node) = (None, None);
    Workload {
        name: "server-get",
        about: format!(
            "{} times store.get of one of {ROWS} rows, on {CONNECTIONS} connections, {DEPTH} at a time on each. Node ws reads the \
             same requests and answers each with a constant of the same {} bytes. All that comes back is compared. {}",
            wave * batches,
            reply().len(),
            places()
        ),
        operation: "request",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("Node ws", move |meter| {
                let server = node.get_or_insert_with(|| peers::node_ws(&reply()));
                ask(meter, server, batches, Client::connect, |_, reply| assert!(reply == self::reply().as_bytes()))
            })
            .needing_file(peers::WS, peers::ws_package()),
            Contender::new("tidewire", move |meter| {
                let server = ours.get_or_insert_with(|| serving::start(ROWS, CONNECTIONS, None));
                ask(meter, server, batches, Client::welcomed, check)
            }),
        ],
    }
}

/// A reply as ours, of the same length.
fn reply() -> String {
    let row = row::text(0);
    let row = row.trim_end_matches('}');
    let meta = r#""_version":1,"_createdAt":1767225600000,"_updatedAt":1767225600000"#;
    format!(r#"{{"id":{FIRST_ID},"type":"result","data":{row},{meta}}}}}"#)
}

/// The request that reads the row of this number.
pub(super) fn request(id: usize, number: u64) -> String {
    format!(r#"{{"id":{id},"type":"store.get","bucket":"{BUCKET}","key":{}}}"#, row::key(number))
}

/// Which row a request of a batch asks for: those of a batch are far apart.
fn number(connection: usize, place: usize) -> u64 {
    ((connection * DEPTH + place) as u64 * 7919) % ROWS
}

/// Whether this is the row that was asked for, under the id of the request.
fn check((id, number): (usize, u64), reply: &[u8]) {
    let parsed: Json = serde_json::from_slice(reply).expect("a reply is JSON");
    let row = &parsed["data"];
    assert!(parsed["id"] == id && row["id"] == row::key(number) && row["_version"] == 1, "{parsed}");
    assert!(reply.len() == self::reply().len(), "replies have one length, unlike {}", lossy(reply));
}

/// Requests that are sent at once, and all that is answered to them.
struct Batch {
    socket: TcpStream,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

fn ask(
    meter: Meter,
    server: &Served,
    batches: u64,
    connect: fn(&str) -> Client,
    check: fn((usize, u64), &[u8]),
) -> Sample {
    let (address, cpu) = (server.address.as_str(), server.cpu());
    load(move || {
        let open = |connection| Batch::try_out(connect(address), connection, check);
        let open: Vec<_> = (0..CONNECTIONS).map(open).collect();
        let runtime = runtime();
        let _entered = runtime.enter();
        let tasks: Vec<_> = open.into_iter().map(|batch| batch.repeat(batches)).collect();
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
    /// Sends it for the first time, and looks at each reply.
    fn try_out(mut client: Client, connection: usize, check: fn((usize, u64), &[u8])) -> Self {
        let asked = |place| (FIRST_ID + place, number(connection, place));
        let requests: Vec<u8> =
            (0..DEPTH).map(asked).flat_map(|(id, number)| client::text(&request(id, number))).collect();
        client.write(&requests);
        let mut replies = Vec::new();
        for place in 0..DEPTH {
            let frame = client.receive_frame();
            let (header, _) = client::lengths(&frame).expect("it is a frame");
            check(asked(place), &frame[header..]);
            replies.extend(frame);
        }
        Self { socket: client.into_socket(), requests, replies }
    }

    /// Sends it again and again, each time when all is answered, with the same replies.
    fn repeat(self, batches: u64) -> impl Future<Output = ()> + Send {
        let Self { socket, requests, replies: expected } = self;
        let mut socket = adopt(socket);
        async move {
            let mut replies = vec![0; expected.len()];
            for _ in 0..batches {
                socket.write_all(&requests).await.expect("the server reads");
                socket.read_exact(&mut replies).await.expect("the server answers");
                assert!(replies == expected, "a row that nobody changes stays the same");
            }
        }
    }
}

/// Has the runtime, which was entered, take a socket.
pub(super) fn adopt(socket: TcpStream) -> tokio::net::TcpStream {
    socket.set_nonblocking(true).expect("a socket can be non-blocking");
    tokio::net::TcpStream::from_std(socket).expect("the runtime takes a socket")
}
