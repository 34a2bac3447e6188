//! A steady load of ordinary requests, each sent when it is due.
//!
//! The schedule does not wait for replies (an open loop), and a latency starts when an operation was due. So a server that stops
//! for a while delays every operation that was due meanwhile, as it would for independent clients. Threads block on sockets, since the
//! timers of tokio are too coarse for latencies below a millisecond.

use std::io::Write as _;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use tidewire_testkit::PATIENCE;

use super::super::client::{self, Client, contains, lossy};
use super::super::get;
use super::super::queries::number_after;
use super::super::row::{self, BUCKET, FIRST_COUNT};
use super::ROWS;

/// The number of ordinary connections whose latency is measured.
pub(super) const CONNECTIONS: usize = 5;

/// The operation of the ordinary connections.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Reads a row by key.
    Get,
    /// Inserts a row, durably.
    Insert,
    /// Updates a row that another connection has subscribed to. Ends when the subscriber has read the push.
    Push,
}

/// The rate at which operations are due.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// The number of operations of each connection.
    pub(super) turns: u32,
    /// The time from one operation to the next. Successive operations are on different connections.
    pub(super) interval: Duration,
}

/// When each operation is due.
#[derive(Clone, Copy)]
struct Schedule {
    start: Instant,
    pace: Pace,
}

/// The ordinary connections.
pub(super) struct PacedLoad {
    operation: Operation,
    /// The connections whose latency is measured.
    connections: Vec<Client>,
    /// Updates the rows of all connections. `None` if the connections send the requests themselves.
    writer: Option<Client>,
}

impl Operation {
    /// Returns the unit that is counted, in the singular.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Insert => "insert",
            Self::Push => "push",
        }
    }

    pub(super) fn is_durable(self) -> bool {
        self == Self::Insert
    }

    /// Returns a description, in a sentence.
    pub(super) fn about(self) -> String {
        match self {
            Self::Get => format!("store.get of one of {ROWS} rows on {CONNECTIONS} connections."),
            Self::Insert => {
                format!(
                    "store.insert of a row of {} bytes on {CONNECTIONS} connections, durable before the reply.",
                    row::BYTES
                )
            }
            Self::Push => format!(
                "store.update of one of {CONNECTIONS} rows, each of which another connection has subscribed to. A latency ends when the \
                 subscriber has read the push."
            ),
        }
    }

    fn request(self, connection: usize, turn: u32) -> String {
        match self {
            Self::Get => get::request(1, self.row(connection, turn)),
            Self::Insert => {
                let row = row::text(self.row(connection, turn));
                format!(r#"{{"id":1,"type":"store.insert","bucket":"{BUCKET}","data":{row}}}"#)
            }
            Self::Push => row::update(1, self.row(connection, turn), FIRST_COUNT + 1 + u64::from(turn)),
        }
    }

    /// Returns the number of the row that an operation uses.
    fn row(self, connection: usize, turn: u32) -> u64 {
        let operation = u64::from(turn) * CONNECTIONS as u64 + connection as u64;
        match self {
            Self::Get => operation * 7919 % ROWS,
            Self::Insert => ROWS + operation,
            Self::Push => connection as u64,
        }
    }
}

impl Pace {
    /// Returns the number of operations of all connections.
    pub(super) fn operations(self) -> u64 {
        u64::from(self.turns) * CONNECTIONS as u64
    }
}

impl Schedule {
    fn due(self, connection: usize, turn: u32) -> Instant {
        let connections = u32::try_from(CONNECTIONS).expect("there are few");
        let connection = u32::try_from(connection).expect("there are few");
        self.start + self.pace.interval * (turn * connections + connection)
    }
}

impl PacedLoad {
    /// Connects, and opens the subscriptions.
    pub(super) fn connect(address: &str, operation: Operation) -> Self {
        let connect = || {
            let client = Client::connect_tidewire(address);
            client.socket.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
            client
        };
        let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
        let is_push = operation == Operation::Push;
        if is_push {
            for (connection, client) in connections.iter_mut().enumerate() {
                client.request(&row::subscribe(operation.row(connection, 0)));
            }
        }
        Self { operation, connections, writer: is_push.then(connect) }
    }

    /// Runs the whole schedule. Returns the latency of every operation.
    ///
    /// # Panics
    ///
    /// If an ordinary request fails or has no reply within [`PATIENCE`].
    pub(super) fn run(self, pace: Pace) -> Vec<Duration> {
        let Self { operation, connections, writer } = self;
        let clone = |client: &Client| client.socket.try_clone().expect("a socket can be cloned");
        let outputs = connections.iter().map(|connection| clone(writer.as_ref().unwrap_or(connection))).collect();
        let schedule = Schedule { start: Instant::now() + pace.interval, pace };
        thread::scope(|scope| {
            scope.spawn(move || send(outputs, operation, schedule));
            if let Some(writer) = writer {
                scope.spawn(move || read_replies(writer, pace.operations()));
            }
            let measure = |(connection, client)| {
                scope.spawn(move || match operation {
                    Operation::Get | Operation::Insert => time_replies(client, operation, connection, schedule),
                    Operation::Push => time_pushes(client, connection, schedule),
                })
            };
            let connections: Vec<_> = connections.into_iter().enumerate().map(measure).collect();
            connections
                .into_iter()
                .flat_map(|connection| connection.join().expect("no connection thread panics"))
                .collect()
        })
    }
}

/// Sends every request when it is due.
fn send(mut outputs: Vec<TcpStream>, operation: Operation, schedule: Schedule) {
    for turn in 0..schedule.pace.turns {
        for (connection, output) in outputs.iter_mut().enumerate() {
            let frame = client::text(&operation.request(connection, turn));
            thread::sleep(schedule.due(connection, turn).saturating_duration_since(Instant::now()));
            output.write_all(&frame).expect("the server reads");
        }
    }
}

/// Checks that all updates succeed.
fn read_replies(mut writer: Client, replies: u64) {
    for _ in 0..replies {
        check(&writer.receive());
    }
}

fn check(reply: &[u8]) {
    assert!(contains(reply, br#""type":"result""#), "unexpected reply to an ordinary request: {}", lossy(reply));
}

/// Reads the replies of a connection, which are in the order of the requests.
fn time_replies(mut client: Client, operation: Operation, connection: usize, schedule: Schedule) -> Vec<Duration> {
    let time = |turn| {
        let reply = client.receive();
        let latency = schedule.due(connection, turn).elapsed();
        check(&reply);
        let (key, expected) =
            (number_after(&reply, br#"{"id":1,"type":"result","data":{"id":"#), operation.row(connection, turn));
        assert!(key == row::key(expected), "expected the row {}, got {}", row::key(expected), lossy(&reply));
        latency
    };
    (0..schedule.pace.turns).map(time).collect()
}

/// Reads the pushes of a subscriber. A push also ends the latencies of earlier updates, which the server may skip if a newer one
/// exists.
fn time_pushes(mut client: Client, connection: usize, schedule: Schedule) -> Vec<Duration> {
    let mut latencies = Vec::new();
    let mut seen = 0;
    while seen < schedule.pace.turns {
        let push = client.receive();
        let read = Instant::now();
        let updates = u32::try_from(number_after(&push, br#""count":"#) - FIRST_COUNT).expect("updates are few");
        assert!(updates > seen, "the push after update {seen} is {}", lossy(&push));
        latencies.extend((seen..updates).map(|turn| read - schedule.due(connection, turn)));
        seen = updates;
    }
    latencies
}
