//! Latency of many live queries with different parameters, under a constant rate of updates.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::time::Duration;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_testkit::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{self, Instant};

use super::super::Effort;
use super::super::conn::{raise_file_limit, runtime};
use super::super::store::folder;
use super::client::{self, Client, contains, lossy, position};
use super::get::into_tokio;
use super::process::{ServerProcess, core_assignment, on_load_core};
use super::row::{self, FIRST_COUNT};
use super::serving;

/// Subscriptions per connection.
const SUBSCRIPTIONS_PER_CONNECTION: u64 = 10;
/// The number of writing connections.
const WRITERS: u64 = 10;
/// How often the load sends the updates that are due.
const TICK: Duration = Duration::from_millis(5);

pub(super) fn distinct(effort: Effort) -> Workload {
    let rows = effort.operations(10_000);
    let (periods, period) = match effort {
        Effort::Full => (5, Duration::from_secs(1)),
        Effort::Quick => (2, Duration::from_millis(50)),
    };
    Workload {
        name: "server-live-queries",
        about: format!(
            "{rows} live queries, each for a different row, on {} connections. Each row is updated every {period:?}, {periods} times, \
             by one of {WRITERS} connections. An update is durable before its subscriber is notified. A latency is the time from \
             when the update was due until the subscriber has read it. No update may be lost. {} The disk is {}.",
            rows / SUBSCRIPTIONS_PER_CONNECTION,
            core_assignment(),
            folder::disk()
        ),
        operation: "change",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50, Metric::ServerCpu],
        contenders: vec![Contender::new("tidewire", move |meter| run(meter, Pace { rows, periods, period }))],
    }
}

fn run(meter: Meter, pace: Pace) -> Sample {
    let (subscribers, changes) = (pace.rows / SUBSCRIPTIONS_PER_CONNECTION, pace.rows * u64::from(pace.periods));
    let connections = usize::try_from(subscribers + WRITERS).expect("64 bits");
    raise_file_limit(connections);
    let folder = folder::new();
    let server = serving::start(pace.rows, connections, Some(folder.path()));
    let cpu = server.cpu();
    on_load_core(|| {
        let runtime = runtime();
        let _entered = runtime.enter();
        let subscribers: Vec<_> = (0..subscribers).map(|number| subscribe(&server, number)).collect();
        let writers: Vec<_> = (0..WRITERS).map(|_| Client::connect_tidewire(&server.address).into_socket()).collect();
        let (outputs, inputs): (Vec<_>, Vec<_>) = writers
            .into_iter()
            .map(|socket| into_tokio(socket).into_split())
            .map(|(read, write)| (write, read))
            .unzip();
        let before = cpu.now();
        let mut latencies = Vec::new();
        let sample = meter.measure(changes, || {
            let schedule = Schedule { start: Instant::now() + TICK, pace };
            let readers: Vec<_> =
                subscribers.into_iter().map(|socket| tokio::spawn(read_pushes(into_tokio(socket), schedule))).collect();
            let replies = changes / WRITERS;
            let replies: Vec<_> = inputs.into_iter().map(|read| tokio::spawn(read_replies(read, replies))).collect();
            runtime.block_on(async {
                write(outputs, schedule).await;
                for task in replies {
                    join(task).await;
                }
                for task in readers {
                    latencies.append(&mut join(task).await);
                }
            });
        });
        assert!(latencies.len() as u64 == changes, "every update has one latency");
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before)).with_latencies(latencies)
    })
}

/// Waits for a task, with a timeout.
async fn join<T>(task: tokio::task::JoinHandle<T>) -> T {
    let ended = time::timeout(PATIENCE, task).await;
    ended.expect("every update is delivered and every request is answered").expect("the load does not panic")
}

/// The rate of updates.
#[derive(Clone, Copy)]
struct Pace {
    rows: u64,
    /// The number of updates of each row.
    periods: u32,
    /// The time between two updates of a row.
    period: Duration,
}

/// The times when updates are due.
#[derive(Clone, Copy)]
struct Schedule {
    start: Instant,
    pace: Pace,
}

impl Schedule {
    /// Returns when the given update of a row is due. Rows and updates are numbered from zero.
    fn due(self, row: u64, update: u32) -> Instant {
        let Pace { rows, period, .. } = self.pace;
        let nanos = u64::try_from(period.as_nanos()).expect("the period is short") * row / rows;
        self.start + period * update + Duration::from_nanos(nanos)
    }
}

/// Opens a connection with [`SUBSCRIPTIONS_PER_CONNECTION`] subscriptions.
fn subscribe(server: &ServerProcess, subscriber: u64) -> TcpStream {
    let mut client = Client::connect_tidewire(&server.address);
    for index in 0..SUBSCRIPTIONS_PER_CONNECTION {
        client.request(&row::subscribe(subscriber * SUBSCRIPTIONS_PER_CONNECTION + index));
    }
    client.into_socket()
}

/// Sends every update when it is due.
async fn write(mut writers: Vec<OwnedWriteHalf>, schedule: Schedule) {
    let Pace { rows, periods, .. } = schedule.pace;
    let mut due = (0..periods).flat_map(|update| (0..rows).map(move |row| (row, update))).peekable();
    let mut batches = vec![Vec::new(); writers.len()];
    let mut ticks = time::interval(TICK);
    while due.peek().is_some() {
        ticks.tick().await;
        let now = Instant::now();
        while let Some((row, update)) = due.next_if(|&(row, update)| schedule.due(row, update) <= now) {
            let request = row::update(1, row, FIRST_COUNT + 1 + u64::from(update));
            let writer = usize::try_from(row % WRITERS).expect("64 bits");
            batches[writer].extend(client::text(&request));
        }
        for (writer, batch) in writers.iter_mut().zip(&mut batches) {
            writer.write_all(batch).await.expect("the server reads");
            batch.clear();
        }
    }
    // Dropping a write half shuts the connection down, but the read half is still in use.
    writers.into_iter().for_each(OwnedWriteHalf::forget);
}

/// Reads this number of replies, and checks that all requests succeeded.
async fn read_replies(mut socket: OwnedReadHalf, replies: u64) {
    let mut input = Input::default();
    for _ in 0..replies {
        let reply = input.next(&mut socket).await;
        assert!(contains(&reply[..40], br#""type":"result""#), "unexpected reply to an update: {}", lossy(reply));
    }
}

/// Reads all pushes of a connection. Returns the latency of each update.
///
/// The server may skip a result if a newer one exists before the subscriber has read it. With a period of at least a second, every
/// update must be pushed. With a shorter period, a push also ends the latencies of the updates before it.
async fn read_pushes(mut socket: tokio::net::TcpStream, schedule: Schedule) -> Vec<Duration> {
    let Pace { periods, period, .. } = schedule.pace;
    let mut seen = BTreeMap::<u64, u32>::new();
    let (mut input, mut latencies) = (Input::default(), Vec::new());
    while latencies.len() as u64 != SUBSCRIPTIONS_PER_CONNECTION * u64::from(periods) {
        let push = input.next(&mut socket).await;
        let (key, count) = (number_after(push, br#""id":"#), number_after(push, br#""count":"#));
        let (row, before) = (key - row::key(0), seen.entry(key).or_default());
        let updates = u32::try_from(count - FIRST_COUNT).expect("the number of updates fits");
        let is_next = if period < Duration::from_secs(1) { updates > *before } else { updates == *before + 1 };
        assert!(is_next, "unexpected push after {before} updates: {}", lossy(push));
        latencies.extend((*before..updates).map(|update| schedule.due(row, update).elapsed()));
        *before = updates;
    }
    latencies
}

/// Returns the number that follows `name` in `text`.
pub(super) fn number_after(text: &[u8], name: &[u8]) -> u64 {
    let at = position(text, name).unwrap_or_else(|| panic!("{} is not in {}", lossy(name), lossy(text)));
    let digits = text[at + name.len()..].iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| 10 * number + u64::from(digit - b'0'))
}

/// A read buffer.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    used: usize,
}

impl Input {
    /// Returns the payload of the next message.
    async fn next(&mut self, socket: &mut (impl tokio::io::AsyncRead + Unpin)) -> &[u8] {
        loop {
            let rest = &self.bytes[self.used..];
            if let Some((header, payload)) = client::lengths(rest)
                && rest.len() >= header + payload
            {
                let begin = self.used + header;
                self.used = begin + payload;
                return &self.bytes[begin..begin + payload];
            }
            self.bytes.drain(..self.used);
            self.used = 0;
            let read = socket.read_buf(&mut self.bytes).await.expect("the server sends");
            assert!(read > 0, "the server closed the connection");
        }
    }
}
