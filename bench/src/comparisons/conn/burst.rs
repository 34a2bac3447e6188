//! Bursts of pushes to many connections, with a head per connection before a shared body.
//!
//! The receivers run in a separate process on another core, so the CPU time of this process is that of the server. They acknowledge
//! a burst when all of them have read all of it, and then the next one is sent. So every push is checked, and no contender fills the
//! socket buffers.

use std::convert::Infallible;
use std::io::{ErrorKind, Read as _, Write as _};
use std::marker::PhantomData;
use std::net::{TcpListener, TcpStream};

use bytes::Bytes;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload, pin_process, run_on_core};
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Head, Protocol, PushPriority, Reply, Supervisor};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::super::Effort;
use super::{raise_file_limit, runtime, separate_cores};
use crate::role::Role;

const HEAD_BYTES: usize = 20;
const BODY_BYTES: usize = 64;
/// The length of head and body together.
pub(crate) const PUSH_BYTES: usize = HEAD_BYTES + BODY_BYTES;
/// Pushes per burst. The queues of a connection have this capacity by default.
const PUSHES: usize = 64;
const BURSTS: usize = 20;
/// Sent by the receivers when a burst has arrived.
const ACK: u8 = b'!';

/// The framing of pushes.
pub(crate) trait Framing: Sized + 'static {
    /// The protocol of the server, which only pushes.
    type Protocol: Protocol;
    /// The part of a push that all receivers share.
    type Body;
    /// The process of the receivers, which runs [`receive`].
    const RECEIVERS: Role;
    /// The bytes of a frame before head and body.
    const PREFIX: &'static [u8];

    fn protocol() -> Self::Protocol;
    fn body(body: Bytes) -> Self::Body;
    fn push(head: &str, body: &Self::Body) -> <Self::Protocol as Protocol>::Frame;
}

pub(crate) fn broadcast<F: Framing>(name: &'static str, effort: Effort) -> Workload {
    let connections = usize::try_from(effort.operations(1000)).expect("64 bits");
    let contender = |name, serve: Serve| Contender::new(name, move |meter| run::<F>(meter, connections, serve));
    Workload {
        name,
        about: format!(
            "{BURSTS} bursts of {PUSHES} pushes to {connections} connections, with a head of {HEAD_BYTES} bytes per connection \
             and a shared body of {BODY_BYTES} bytes. The CPU time is that of the server, which has one thread. The receivers \
             are another process{}.",
            if separate_cores().is_some() { " on another core" } else { "" }
        ),
        operation: "delivery",
        metrics: &[Metric::Cpu, Metric::Allocations],
        contenders: vec![
            contender("raw epoll", |meter, receivers| {
                let mut server = RawEpoll::new::<F>(receivers);
                server.burst(0);
                measure(meter, server.connections.len(), || (1..=BURSTS).for_each(|burst| server.burst(burst)))
            }),
            contender("tokio channel each", on_runtime::<Channels<F>>),
            contender("tidewire-conn", on_runtime::<Ours<F>>),
        ],
    }
}

/// Serves one round: a warm-up burst, then [`BURSTS`] measured ones.
type Serve = fn(Meter, Receivers) -> Sample;

/// The connections to the receivers, in order, and one for their acknowledgements.
struct Receivers {
    control: TcpStream,
    connections: Vec<TcpStream>,
}

fn run<F: Framing>(meter: Meter, connections: usize, serve: Serve) -> Sample {
    raise_file_limit(connections);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let mut receivers = F::RECEIVERS.start(&[addr.to_string(), connections.to_string()]);
    let (load_core, server_core) = separate_cores().unzip();
    if let Some(core) = load_core {
        pin_process(receivers.pid(), core).expect("a process can be pinned");
    }
    let round = move || {
        let accept = || {
            let (socket, _) = listener.accept().expect("the receivers connect");
            socket.set_nodelay(true).expect("TCP_NODELAY can be set");
            socket.set_nonblocking(true).expect("a socket can be non-blocking");
            socket
        };
        let receivers = Receivers { control: accept(), connections: (0..connections).map(|_| accept()).collect() };
        serve(meter, receivers)
    };
    let sample = run_on_core(server_core.unwrap_or(0), round).expect("a thread can be pinned");
    assert!(receivers.wait().success(), "the receivers failed: {}", receivers.output());
    sample
}

fn measure(meter: Meter, connections: usize, work: impl FnOnce()) -> Sample {
    meter.measure((BURSTS * PUSHES * connections) as u64, work)
}

/// Runs the receivers. Their sockets are read in turn, from the last connection to the first. The server writes in the opposite order,
/// so a burst wakes this process about once, and the cost of wake-ups is equal for all contenders.
pub(crate) fn receive<F: Framing>(arguments: &[String]) {
    let [addr, connections] = arguments else { panic!("expected an address and a number of connections") };
    let connections = connections.parse().expect("a number of connections");
    raise_file_limit(connections);
    let connect = |_: usize| TcpStream::connect(addr).expect("the server accepts");
    let mut control = connect(0);
    let mut sockets: Vec<_> = (0..connections).map(connect).collect();
    let frame = F::PREFIX.len() + PUSH_BYTES;
    let mut bytes = vec![0; PUSHES * frame];
    for burst in 0..=BURSTS {
        for (receiver, socket) in sockets.iter_mut().enumerate().rev() {
            socket.read_exact(&mut bytes).expect("the server sends");
            for (push, frame) in bytes.chunks_exact(frame).enumerate() {
                let (prefix, rest) = frame.split_at(F::PREFIX.len());
                let (head, body) = rest.split_at(HEAD_BYTES);
                assert_eq!(prefix, F::PREFIX);
                assert_eq!(head, self::head(receiver));
                assert_eq!(body, self::body(burst, push));
            }
        }
        control.write_all(&[ACK]).expect("the server waits");
    }
}

/// Returns the head for a receiver: text of the length of a subscription id.
fn head(receiver: usize) -> [u8; HEAD_BYTES] {
    let mut head = *b"subscription01234567";
    head[HEAD_BYTES - 8..].copy_from_slice(&letters(receiver));
    head
}

fn body(burst: usize, push: usize) -> [u8; BODY_BYTES] {
    let mut body = [b'x'; BODY_BYTES];
    body[..8].copy_from_slice(&letters(burst * PUSHES + push));
    body
}

/// Encodes the lower 32 bits of a number as letters, four bits each.
fn letters(number: usize) -> [u8; 8] {
    std::array::from_fn(|index| b"abcdefghijklmnop"[number >> (4 * index) & 15])
}

/// A lower bound for one thread: copies bytes to a buffer per connection and writes each buffer once per burst.
struct RawEpoll {
    epoll: Epoll,
    control: TcpStream,
    connections: Vec<RawConnection>,
}

struct RawConnection {
    socket: TcpStream,
    prefix: &'static [u8],
    head: [u8; HEAD_BYTES],
    output: Vec<u8>,
    written: usize,
}

impl RawEpoll {
    const CONTROL: u64 = u64::MAX;

    fn new<F: Framing>(Receivers { control, connections }: Receivers) -> Self {
        let epoll = Epoll::new(EpollCreateFlags::empty()).expect("an epoll can be made");
        let add = |socket: &TcpStream, data| {
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
            epoll.add(socket, EpollEvent::new(flags, data)).expect("a socket can be watched");
        };
        add(&control, Self::CONTROL);
        let connection = |(receiver, socket)| {
            add(&socket, receiver as u64);
            RawConnection { socket, prefix: F::PREFIX, head: head(receiver), output: Vec::new(), written: 0 }
        };
        let connections = connections.into_iter().enumerate().map(connection).collect();
        Self { epoll, control, connections }
    }

    fn burst(&mut self, burst: usize) {
        for push in 0..PUSHES {
            let body = body(burst, push);
            for RawConnection { prefix, head, output, .. } in &mut self.connections {
                output.extend_from_slice(prefix);
                output.extend_from_slice(head);
                output.extend_from_slice(&body);
            }
        }
        self.connections.iter_mut().for_each(RawConnection::write);
        while !self.is_acknowledged() {
            let mut events = [EpollEvent::empty(); 256];
            let count = self.epoll.wait(&mut events, EpollTimeout::NONE).expect("an epoll can be waited for");
            for event in events[..count].iter().filter(|event| event.data() != Self::CONTROL) {
                self.connections[usize::try_from(event.data()).expect("64 bits")].write();
            }
        }
    }

    fn is_acknowledged(&mut self) -> bool {
        let mut ack = [0];
        match self.control.read(&mut ack) {
            Ok(1) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            ended => panic!("the receivers have disconnected: {ended:?}"),
        }
    }
}

impl RawConnection {
    fn write(&mut self) {
        while self.written < self.output.len() {
            match self.socket.write(&self.output[self.written..]) {
                Ok(written) => self.written += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("the receivers have disconnected: {error}"),
            }
        }
        self.output.clear();
        self.written = 0;
    }
}

/// A server with a task per connection.
trait TaskServer {
    fn spawn(connections: Vec<tokio::net::TcpStream>) -> Self;
    /// Returns whether all connections accept pushes.
    fn is_ready(&self) -> bool {
        true
    }
    /// Pushes a body to every connection.
    fn push(&self, body: Bytes);
}

fn on_runtime<T: TaskServer>(meter: Meter, Receivers { control, connections }: Receivers) -> Sample {
    let runtime = runtime();
    let _entered = runtime.enter();
    let count = connections.len();
    let register = |socket| tokio::net::TcpStream::from_std(socket).expect("the socket can be registered");
    let (mut control, connections) = (register(control), connections.into_iter().map(register).collect());
    let tasks = T::spawn(connections);
    let mut burst = |burst| {
        runtime.block_on(async {
            for push in 0..PUSHES {
                tasks.push(Bytes::copy_from_slice(&body(burst, push)));
            }
            control.read_u8().await.expect("the receivers acknowledge");
        });
    };
    while !tasks.is_ready() {
        runtime.block_on(tokio::task::yield_now());
    }
    burst(0);
    measure(meter, count, || (1..=BURSTS).for_each(burst))
}

/// The usual hand-written solution with tokio: a bounded channel and a task per connection.
struct Channels<F>(Vec<mpsc::Sender<Push>>, PhantomData<F>);

/// The number of the receiver, and the body of the push.
type Push = (usize, Bytes);

impl<F: Framing> TaskServer for Channels<F> {
    fn spawn(connections: Vec<tokio::net::TcpStream>) -> Self {
        let spawn = |mut socket: tokio::net::TcpStream| {
            let (sender, mut pushes) = mpsc::channel::<Push>(256);
            tokio::spawn(async move {
                let (mut batch, mut output) = (Vec::new(), Vec::new());
                while pushes.recv_many(&mut batch, PUSHES).await > 0 {
                    for (receiver, body) in batch.drain(..) {
                        output.extend_from_slice(F::PREFIX);
                        output.extend_from_slice(&head(receiver));
                        output.extend_from_slice(&body);
                    }
                    socket.write_all(&output).await.expect("the receivers read");
                    output.clear();
                }
            });
            sender
        };
        Self(connections.into_iter().map(spawn).collect(), PhantomData)
    }

    fn push(&self, body: Bytes) {
        for (receiver, sender) in self.0.iter().enumerate() {
            sender.try_send((receiver, body.clone())).expect("a burst fits");
        }
    }
}

struct Ours<F: Framing> {
    supervisor: Supervisor<F::Protocol>,
    /// The head for each connection.
    heads: Vec<String>,
}

impl<F: Framing> TaskServer for Ours<F> {
    fn spawn(connections: Vec<tokio::net::TcpStream>) -> Self {
        let supervisor = Supervisor::builder(F::protocol()).build();
        let head = |receiver| String::from_utf8(head(receiver).into()).expect("it is text");
        let heads = (0..connections.len()).map(head).collect();
        for socket in connections {
            let permit = supervisor
                .admit(socket.peer_addr().expect("it is connected"))
                .expect("the connection limit is not reached");
            tokio::spawn(permit.run(socket, Vec::new()));
        }
        Self { supervisor, heads }
    }

    fn is_ready(&self) -> bool {
        self.supervisor.sessions().len() == self.heads.len()
    }

    fn push(&self, body: Bytes) {
        let body = F::body(body);
        let reached = self.supervisor.sessions().broadcast(PushPriority::Low, |session| {
            // Sessions are numbered from one, in the order of admission.
            let receiver = usize::try_from(session.id().0).expect("64 bits") - 1;
            Some(F::push(&self.heads[receiver], &body))
        });
        assert_eq!(reached, self.heads.len(), "every connection is open");
    }
}

/// Frames with a length prefix.
pub(super) struct LengthFraming;

impl Framing for LengthFraming {
    type Protocol = PushOnly;
    type Body = Bytes;
    const RECEIVERS: Role = Role { name: "conn-burst-receivers", run: receive::<Self> };
    #[expect(clippy::cast_possible_truncation, reason = "it is 84")]
    const PREFIX: &'static [u8] = &(PUSH_BYTES as u32).to_be_bytes();

    fn protocol() -> PushOnly {
        PushOnly
    }

    fn body(body: Bytes) -> Bytes {
        body
    }

    fn push(head: &str, body: &Bytes) -> Frame {
        Frame::new(Head::new(head.as_bytes()).expect("it is short"), body.clone())
    }
}

/// A protocol that ignores all frames and only pushes.
pub(super) struct PushOnly;

impl Protocol for PushOnly {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, _: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::None
    }
}
