//! One writer, and many subscribers of the same query.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::super::conn::allow_files;
use super::super::store::folder;
use super::client::{self, Client, lossy, position};
use super::pocketbase::{self, PocketBase};
use super::process::{Served, load, places};
use super::row::{self, FIRST_COUNT};
use super::{broadcast, nats, peers, serving};

const ROWS: u64 = 100;
/// The row that is followed.
const NUMBER: u64 = 7;

pub(super) fn fanout(effort: Effort) -> Workload {
    let subscribers = usize::try_from(effort.operations(1000)).expect("64 bits");
    let writes = effort.operations(2000).min(40);
    let (mut plain, mut ours, mut nats, mut pocketbase) = (None, None, None, None);
    Workload {
        name: "server-fanout",
        about: format!(
            "{writes} updates of a row, each when all {subscribers} who follow it have been told of the one before. tidewire-conn \
             alone pushes the same bytes to all connections, NATS has them published, and PocketBase changes a row of about the same \
             size. {}",
            places()
        ),
        operation: "event",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("tidewire-conn", move |meter| {
                plain.get_or_insert_with(|| Audience::of_connections(subscribers)).round(meter, writes)
            }),
            Contender::new("tidewire", move |meter| {
                ours.get_or_insert_with(|| Audience::of_ours(subscribers)).round(meter, writes)
            }),
            Contender::new("NATS", move |meter| {
                nats.get_or_insert_with(|| Audience::of_nats(subscribers)).round(meter, writes)
            })
            .needing_file(nats::PROGRAM, peers::program(nats::PROGRAM)),
            Contender::new("PocketBase", move |meter| {
                pocketbase.get_or_insert_with(|| Audience::of_pocketbase(subscribers)).round(meter, writes)
            })
            .needing_file(pocketbase::PROGRAM, peers::program(pocketbase::PROGRAM)),
        ],
    }
}

/// A server, somebody who writes, and all who are told of it.
struct Audience<S> {
    // Dropped first, so that it is the clients who leave.
    writer: TcpStream,
    listeners: Vec<Listener>,
    server: S,
    dialect: Dialect,
    /// How often the row was written.
    writes: u64,
}

struct Listener {
    socket: TcpStream,
    /// Where the count is in what it is told.
    count_at: usize,
}

/// How the server is spoken to.
#[derive(Clone, Copy)]
struct Dialect {
    /// What gives the row this count.
    write: fn(u64) -> Vec<u8>,
    /// Whether that is all which the writer is answered.
    is_answer: fn(&[u8]) -> bool,
    /// Whether that is all which a listener is told of a write.
    is_delivery: fn(&[u8]) -> bool,
}

/// A server that runs.
trait Serves: Send {
    fn served(&self) -> &Served;
}

impl Serves for Served {
    fn served(&self) -> &Served {
        self
    }
}

impl Serves for PocketBase {
    fn served(&self) -> &Served {
        &self.served
    }
}

/// All four keep their connections from round to round.
fn make_room(listeners: usize) {
    allow_files(4 * (listeners + 1));
}

/// Reads into the buffer until what is there is whole.
fn read(socket: &mut TcpStream, buffer: &mut Vec<u8>, is_whole: fn(&[u8]) -> bool) {
    let mut length = 0;
    buffer.resize(buffer.capacity().max(2048), 0);
    while !is_whole(&buffer[..length]) {
        let read = socket.read(&mut buffer[length..]).expect("the server sends");
        assert!(read > 0, "the server left, or sends more than was expected: {}", lossy(&buffer[..length]));
        length += read;
    }
    buffer.truncate(length);
}

fn is_frame(bytes: &[u8]) -> bool {
    client::lengths(bytes).is_some_and(|(header, payload)| bytes.len() == header + payload)
}

/// What ours pushes, without the head that names the subscription.
fn push_body(count: u64) -> String {
    let row = row::text(NUMBER).replace(&FIRST_COUNT.to_string(), &count.to_string());
    let row = row.trim_end_matches('}');
    let meta = r#""_version":1000,"_createdAt":1767225600000,"_updatedAt":1767225600000"#;
    format!(r#""type":"push","channel":"subscription","data":[{row},{meta}}}]}}"#)
}

impl Audience<Served> {
    fn of_connections(listeners: usize) -> Self {
        make_room(listeners);
        let server = broadcast::start(listeners + 1);
        let writer = Client::connect(&server.address);
        let clients = (0..listeners).map(|_| Client::connect(&server.address)).collect();
        let dialect = Dialect {
            write: |count| client::text(&push_body(count)),
            is_answer: <[u8]>::is_empty,
            is_delivery: is_frame,
        };
        Self::of_clients(server, writer, clients, dialect)
    }

    fn of_ours(listeners: usize) -> Self {
        make_room(listeners);
        let server = serving::start(ROWS, listeners + 1, None);
        let writer = Client::welcomed(&server.address);
        let listener = |_| {
            let mut client = Client::welcomed(&server.address);
            client.ask(&row::subscribe(NUMBER));
            client
        };
        let clients = (0..listeners).map(listener).collect();
        let write = |count| client::text(&row::update(1, NUMBER, count));
        Self::of_clients(server, writer, clients, Dialect { write, is_answer: is_frame, is_delivery: is_frame })
    }

    fn of_nats(listeners: usize) -> Self {
        make_room(listeners);
        let server = nats::start();
        let mut writer = nats::connect(&server.address, false);
        let mut clients: Vec<_> = (0..listeners).map(|_| nats::connect(&server.address, true)).collect();
        nats::settle(&mut writer);
        clients.iter_mut().for_each(nats::settle);
        let dialect = Dialect {
            write: |count| nats::publication(&format!("{}{}", broadcast::head(100), push_body(count))),
            is_answer: <[u8]>::is_empty,
            is_delivery: is_frame,
        };
        Self::of_clients(server, writer, clients, dialect)
    }

    fn of_clients(server: Served, writer: Client, listeners: Vec<Client>, dialect: Dialect) -> Self {
        Self::new(server, writer.into_socket(), listeners.into_iter().map(Client::into_socket), dialect)
    }
}

impl Audience<PocketBase> {
    fn of_pocketbase(listeners: usize) -> Self {
        make_room(listeners);
        let server = pocketbase::start(folder::new());
        let address = server.served.address.clone();
        let writer = TcpStream::connect(&address).expect("the server accepts");
        writer.set_nodelay(true).expect("TCP_NODELAY can be set");
        let dialect = Dialect {
            write: pocketbase::update,
            is_answer: pocketbase::is_response,
            is_delivery: pocketbase::is_event,
        };
        Self::new(server, writer, (0..listeners).map(|_| pocketbase::subscribe(&address)), dialect)
    }
}

impl<S: Serves> Audience<S> {
    /// Writes for the first time, and sees that all are told.
    fn new(server: S, writer: TcpStream, listeners: impl Iterator<Item = TcpStream>, dialect: Dialect) -> Self {
        let listeners = listeners.map(|socket| Listener { socket, count_at: 0 }).collect();
        let mut audience = Self { writer, listeners, server, dialect, writes: 0 };
        let (count, mut buffer) = (audience.write(), Vec::new());
        for Listener { socket, count_at } in &mut audience.listeners {
            read(socket, &mut buffer, dialect.is_delivery);
            let found = position(&buffer, count.as_bytes());
            *count_at = found.unwrap_or_else(|| panic!("{count} is not in {}", lossy(&buffer)));
        }
        read(&mut audience.writer, &mut buffer, dialect.is_answer);
        audience
    }

    /// Gives the row another count, and says which.
    fn write(&mut self) -> String {
        self.writes += 1;
        let count = FIRST_COUNT + self.writes;
        self.writer.write_all(&(self.dialect.write)(count)).expect("the server reads");
        count.to_string()
    }

    fn round(&mut self, meter: Meter, writes: u64) -> Sample {
        let cpu = self.server.served().cpu();
        let deliveries = writes * self.listeners.len() as u64;
        load(|| {
            let before = cpu.now();
            let sample = meter.measure(deliveries, || (0..writes).for_each(|_| self.write_and_read()));
            sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
        })
    }

    /// Listeners are read in turn, from the last to the first. Servers mostly write to them the other way round, so that a write wakes
    /// this process about once, and no contender pays for more.
    fn write_and_read(&mut self) {
        let (count, mut buffer) = (self.write(), Vec::with_capacity(2048));
        for Listener { socket, count_at } in self.listeners.iter_mut().rev() {
            read(socket, &mut buffer, self.dialect.is_delivery);
            let told = buffer[*count_at..].starts_with(count.as_bytes());
            assert!(told, "{count} is not at {count_at} of {}", lossy(&buffer));
        }
        read(&mut self.writer, &mut buffer, self.dialect.is_answer);
    }
}
