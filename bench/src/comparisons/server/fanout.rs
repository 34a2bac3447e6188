//! The fan-out of updates to many subscribers of the same query.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};

use super::super::Effort;
use super::super::conn::raise_file_limit;
use super::super::store::folder;
use super::client::{self, Client, lossy, position};
use super::pocketbase::{self, PocketBase};
use super::process::{ServerProcess, core_assignment, on_load_core};
use super::row::{self, FIRST_COUNT};
use super::{broadcast, nats, peers, serving};

const ROWS: u64 = 100;
/// The number of the row that is updated.
const NUMBER: u64 = 7;

pub(super) fn fanout(effort: Effort) -> Workload {
    let subscribers = usize::try_from(effort.operations(1000)).expect("64 bits");
    let writes = effort.operations(2000).min(40);
    let (mut plain, mut ours, mut nats, mut pocketbase) = (None, None, None, None);
    Workload {
        name: "server-fanout",
        about: format!(
            "{writes} updates of a row with {subscribers} subscribers, each after all of them have received the previous one. \
             tidewire-conn pushes the same bytes to all connections, without a store. NATS publishes the same bytes. PocketBase \
             updates a row of about the same size. {}",
            core_assignment()
        ),
        operation: "event",
        metrics: &[Metric::ServerCpu, Metric::Throughput],
        contenders: vec![
            Contender::new("tidewire-conn", move |meter| {
                plain.get_or_insert_with(|| Fanout::conn(subscribers)).round(meter, writes)
            }),
            Contender::new("tidewire", move |meter| {
                ours.get_or_insert_with(|| Fanout::tidewire(subscribers)).round(meter, writes)
            }),
            Contender::new("NATS", move |meter| {
                nats.get_or_insert_with(|| Fanout::nats(subscribers)).round(meter, writes)
            })
            .requires_file(nats::PROGRAM, peers::program(nats::PROGRAM)),
            Contender::new("PocketBase", move |meter| {
                pocketbase.get_or_insert_with(|| Fanout::pocketbase(subscribers)).round(meter, writes)
            })
            .requires_file(pocketbase::PROGRAM, peers::program(pocketbase::PROGRAM)),
        ],
    }
}

/// A server, a writer and subscribers.
struct Fanout<S> {
    // Dropped first, so that the clients close the connections.
    writer: TcpStream,
    subscribers: Vec<Subscriber>,
    server: S,
    protocol: Protocol,
    /// The number of updates so far.
    writes: u64,
}

struct Subscriber {
    socket: TcpStream,
    /// The index of the count in an event.
    count_at: usize,
}

/// The wire protocol of a server.
#[derive(Clone, Copy)]
struct Protocol {
    /// Encodes an update that sets the count of the row.
    write: fn(u64) -> Vec<u8>,
    /// Returns whether these bytes are the complete reply to an update.
    is_reply: fn(&[u8]) -> bool,
    /// Returns whether these bytes are the complete event of an update.
    is_event: fn(&[u8]) -> bool,
}

/// A running server.
trait RunningServer: Send {
    fn process(&self) -> &ServerProcess;
}

impl RunningServer for ServerProcess {
    fn process(&self) -> &ServerProcess {
        self
    }
}

impl RunningServer for PocketBase {
    fn process(&self) -> &ServerProcess {
        &self.process
    }
}

/// Raises the file limit for all four contenders, whose connections stay open between rounds.
fn raise_file_limit_for(subscribers: usize) {
    raise_file_limit(4 * (subscribers + 1));
}

/// Reads into the buffer until its content is complete.
fn read(socket: &mut TcpStream, buffer: &mut Vec<u8>, is_complete: fn(&[u8]) -> bool) {
    let mut length = 0;
    buffer.resize(buffer.capacity().max(2048), 0);
    while !is_complete(&buffer[..length]) {
        let read = socket.read(&mut buffer[length..]).expect("the server sends");
        assert!(read > 0, "the server closed the connection or sent unexpected bytes: {}", lossy(&buffer[..length]));
        length += read;
    }
    buffer.truncate(length);
}

fn is_frame(bytes: &[u8]) -> bool {
    client::lengths(bytes).is_some_and(|(header, payload)| bytes.len() == header + payload)
}

/// Returns the push of `tidewire`, without the head with the subscription id.
fn push_body(count: u64) -> String {
    let row = row::text(NUMBER).replace(&FIRST_COUNT.to_string(), &count.to_string());
    let row = row.trim_end_matches('}');
    let meta = r#""_version":1000,"_createdAt":1767225600000,"_updatedAt":1767225600000"#;
    format!(r#""type":"push","channel":"subscription","data":[{row},{meta}}}]}}"#)
}

impl Fanout<ServerProcess> {
    fn conn(subscribers: usize) -> Self {
        raise_file_limit_for(subscribers);
        let server = broadcast::start(subscribers + 1);
        let writer = Client::connect(&server.address);
        let clients = (0..subscribers).map(|_| Client::connect(&server.address)).collect();
        let protocol =
            Protocol { write: |count| client::text(&push_body(count)), is_reply: <[u8]>::is_empty, is_event: is_frame };
        Self::from_clients(server, writer, clients, protocol)
    }

    fn tidewire(subscribers: usize) -> Self {
        raise_file_limit_for(subscribers);
        let server = serving::start(ROWS, subscribers + 1, None);
        let writer = Client::connect_tidewire(&server.address);
        let subscriber = |_| {
            let mut client = Client::connect_tidewire(&server.address);
            client.request(&row::subscribe(NUMBER));
            client
        };
        let clients = (0..subscribers).map(subscriber).collect();
        let write = |count| client::text(&row::update(1, NUMBER, count));
        Self::from_clients(server, writer, clients, Protocol { write, is_reply: is_frame, is_event: is_frame })
    }

    fn nats(subscribers: usize) -> Self {
        raise_file_limit_for(subscribers);
        let server = nats::start();
        let mut writer = nats::connect(&server.address, false);
        let mut clients: Vec<_> = (0..subscribers).map(|_| nats::connect(&server.address, true)).collect();
        nats::answer_ping(&mut writer);
        clients.iter_mut().for_each(nats::answer_ping);
        let protocol = Protocol {
            write: |count| nats::publication(&format!("{}{}", broadcast::head(100), push_body(count))),
            is_reply: <[u8]>::is_empty,
            is_event: is_frame,
        };
        Self::from_clients(server, writer, clients, protocol)
    }

    fn from_clients(server: ServerProcess, writer: Client, subscribers: Vec<Client>, protocol: Protocol) -> Self {
        Self::new(server, writer.into_socket(), subscribers.into_iter().map(Client::into_socket), protocol)
    }
}

impl Fanout<PocketBase> {
    fn pocketbase(subscribers: usize) -> Self {
        raise_file_limit_for(subscribers);
        let server = pocketbase::start(folder::new());
        let address = server.process.address.clone();
        let writer = TcpStream::connect(&address).expect("the server accepts");
        writer.set_nodelay(true).expect("TCP_NODELAY can be set");
        let protocol =
            Protocol { write: pocketbase::update, is_reply: pocketbase::is_response, is_event: pocketbase::is_event };
        Self::new(server, writer, (0..subscribers).map(|_| pocketbase::subscribe(&address)), protocol)
    }
}

impl<S: RunningServer> Fanout<S> {
    /// Does a first update, and finds the count in the event of each subscriber.
    fn new(server: S, writer: TcpStream, subscribers: impl Iterator<Item = TcpStream>, protocol: Protocol) -> Self {
        let subscribers = subscribers.map(|socket| Subscriber { socket, count_at: 0 }).collect();
        let mut fanout = Self { writer, subscribers, server, protocol, writes: 0 };
        let (count, mut buffer) = (fanout.write(), Vec::new());
        for Subscriber { socket, count_at } in &mut fanout.subscribers {
            read(socket, &mut buffer, protocol.is_event);
            let found = position(&buffer, count.as_bytes());
            *count_at = found.unwrap_or_else(|| panic!("{count} is not in {}", lossy(&buffer)));
        }
        read(&mut fanout.writer, &mut buffer, protocol.is_reply);
        fanout
    }

    /// Sends an update. Returns the new count of the row.
    fn write(&mut self) -> String {
        self.writes += 1;
        let count = FIRST_COUNT + self.writes;
        self.writer.write_all(&(self.protocol.write)(count)).expect("the server reads");
        count.to_string()
    }

    fn round(&mut self, meter: Meter, writes: u64) -> Sample {
        let cpu = self.server.process().cpu();
        let events = writes * self.subscribers.len() as u64;
        on_load_core(|| {
            let before = cpu.now();
            let sample = meter.measure(events, || (0..writes).for_each(|_| self.write_and_read()));
            sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
        })
    }

    /// Sends an update and reads all events, from the last subscriber to the first. Servers mostly write in the opposite order, so a
    /// write wakes this process about once, and the cost of wake-ups is equal for all contenders.
    fn write_and_read(&mut self) {
        let (count, mut buffer) = (self.write(), Vec::with_capacity(2048));
        for Subscriber { socket, count_at } in self.subscribers.iter_mut().rev() {
            read(socket, &mut buffer, self.protocol.is_event);
            let has_count = buffer[*count_at..].starts_with(count.as_bytes());
            assert!(has_count, "{count} is not at {count_at} of {}", lossy(&buffer));
        }
        read(&mut self.writer, &mut buffer, self.protocol.is_reply);
    }
}
