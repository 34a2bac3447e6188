//! Many live queries with different parameters, and constant changes to the row of each.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::time::Duration;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_testkit::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{self, Instant};

use super::super::Effort;
use super::super::conn::{allow_files, runtime};
use super::super::store::folder;
use super::client::{self, Client, contains, lossy, position};
use super::get::adopt;
use super::process::{Served, load, places};
use super::row::{self, FIRST_COUNT};
use super::serving;

/// How many queries a connection follows.
const EACH: u64 = 10;
/// How many connections write.
const WRITERS: u64 = 10;
/// How often the load looks what is due.
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
            "{rows} live queries, each of another row, on {} connections. Each row is updated every {period:?}, {periods} times, by \
             one of {WRITERS} connections, and is on the disk before anybody is told. A latency is from when an update was due to \
             when the subscriber has read it. Every one of them must arrive. {} The disk is {}.",
            rows / EACH,
            places(),
            folder::disk()
        ),
        operation: "change",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50, Metric::ServerCpu],
        contenders: vec![Contender::new("tidewire", move |meter| run(meter, Pace { rows, periods, period }))],
    }
}

fn run(meter: Meter, pace: Pace) -> Sample {
    let (subscribers, changes) = (pace.rows / EACH, pace.rows * u64::from(pace.periods));
    let connections = usize::try_from(subscribers + WRITERS).expect("64 bits");
    allow_files(connections);
    let folder = folder::new();
    let server = serving::start(pace.rows, connections, Some(folder.path()));
    let cpu = server.cpu();
    load(|| {
        let runtime = runtime();
        let _entered = runtime.enter();
        let subscribers: Vec<_> = (0..subscribers).map(|number| follow(&server, number)).collect();
        let writers: Vec<_> = (0..WRITERS).map(|_| Client::welcomed(&server.address).into_socket()).collect();
        let (sent, answered): (Vec<_>, Vec<_>) =
            writers.into_iter().map(|socket| adopt(socket).into_split()).map(|(read, write)| (write, read)).unzip();
        let before = cpu.now();
        let mut latencies = Vec::new();
        let sample = meter.measure(changes, || {
            let schedule = Schedule { start: Instant::now() + TICK, pace };
            let told: Vec<_> =
                subscribers.into_iter().map(|socket| tokio::spawn(hear(adopt(socket), schedule))).collect();
            let answers = changes / WRITERS;
            let answered: Vec<_> = answered.into_iter().map(|read| tokio::spawn(count(read, answers))).collect();
            runtime.block_on(async {
                write(sent, schedule).await;
                for task in answered {
                    in_time(task).await;
                }
                for task in told {
                    latencies.append(&mut in_time(task).await);
                }
            });
        });
        assert!(latencies.len() as u64 == changes, "every change is told once");
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before)).with_latencies(latencies)
    })
}

async fn in_time<T>(task: tokio::task::JoinHandle<T>) -> T {
    let ended = time::timeout(PATIENCE, task).await;
    ended.expect("every change is delivered, and every request answered").expect("the load does not panic")
}

/// How often rows change.
#[derive(Clone, Copy)]
struct Pace {
    rows: u64,
    /// How often each changes.
    periods: u32,
    /// From one change of a row to the next.
    period: Duration,
}

/// When which row is due.
#[derive(Clone, Copy)]
struct Schedule {
    start: Instant,
    pace: Pace,
}

impl Schedule {
    /// When the row of this number gets its update of this number, from zero.
    fn due(self, row: u64, update: u32) -> Instant {
        let Pace { rows, period, .. } = self.pace;
        let nanos = u64::try_from(period.as_nanos()).expect("it is short") * row / rows;
        self.start + period * update + Duration::from_nanos(nanos)
    }
}

/// A connection that follows [`EACH`] rows.
fn follow(server: &Served, subscriber: u64) -> TcpStream {
    let mut client = Client::welcomed(&server.address);
    for place in 0..EACH {
        client.ask(&row::subscribe(subscriber * EACH + place));
    }
    client.into_socket()
}

/// Sends all updates, each when it is due.
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
    // A connection ends when the last half of it is dropped; the other half still reads.
    writers.into_iter().for_each(OwnedWriteHalf::forget);
}

/// Sees that so many requests are answered well.
async fn count(mut socket: OwnedReadHalf, answers: u64) {
    let mut input = Input::default();
    for _ in 0..answers {
        let answer = input.next(&mut socket).await;
        assert!(contains(&answer[..40], br#""type":"result""#), "an update is answered with {}", lossy(answer));
    }
}

/// Hears all that the rows of a connection have to tell, and says how long each change took.
///
/// Results that come faster than they are read may be told by the newest alone. A second is never too fast, so there every change must
/// come by itself; where all is over in no time, whoever is told of a later one has heard of those before.
async fn hear(mut socket: tokio::net::TcpStream, schedule: Schedule) -> Vec<Duration> {
    let Pace { periods, period, .. } = schedule.pace;
    let mut heard = BTreeMap::<u64, u32>::new();
    let (mut input, mut latencies) = (Input::default(), Vec::new());
    while latencies.len() as u64 != EACH * u64::from(periods) {
        let push = input.next(&mut socket).await;
        let (key, count) = (number_after(push, br#""id":"#), number_after(push, br#""count":"#));
        let (row, before) = (key - row::key(0), heard.entry(key).or_default());
        let updates = u32::try_from(count - FIRST_COUNT).expect("it was counted up to there");
        let is_next = if period < Duration::from_secs(1) { updates > *before } else { updates == *before + 1 };
        assert!(is_next, "{before} changes were told before {}", lossy(push));
        latencies.extend((*before..updates).map(|update| schedule.due(row, update).elapsed()));
        *before = updates;
    }
    latencies
}

/// The number that follows `name` in `text`.
pub(super) fn number_after(text: &[u8], name: &[u8]) -> u64 {
    let at = position(text, name).unwrap_or_else(|| panic!("{} is not in {}", lossy(name), lossy(text)));
    let digits = text[at + name.len()..].iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| 10 * number + u64::from(digit - b'0'))
}

/// What was read and is not used yet.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    used: usize,
}

impl Input {
    /// The payload of the next message.
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
            assert!(read > 0, "the server left");
        }
    }
}
