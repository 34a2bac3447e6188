//! The memory limit: which connection is closed, and which bytes count.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use bytes::Bytes;
use tidewire_conn::codec::{LengthDelimited, LengthDelimitedOptions};
use tidewire_conn::{
    Builder, CloseReason, ConnectionContext, Frame, MemoryLimit, Protocol, PushHandle, PushPolicy, PushPriority, Reply,
    Slot, Supervisor,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::test_server::frame;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// `large N` is answered with N bytes, and `first` when the semaphore `first` has a permit. Other requests are echoed.
struct Sizes {
    handled: AtomicUsize,
    first: Arc<Semaphore>,
}

impl Sizes {
    fn new() -> Self {
        Self { handled: AtomicUsize::new(0), first: Arc::new(Semaphore::new(0)) }
    }

    fn of(size: &str) -> Frame {
        Frame::from(Bytes::from(vec![b'x'; size.parse().unwrap()]))
    }
}

impl Protocol for Sizes {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::new(LengthDelimitedOptions::default().max_frame(64 * MIB)).unwrap()
    }

    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        self.handled.fetch_add(1, SeqCst);
        let text = String::from_utf8_lossy(request.body()).into_owned();
        if let Some(size) = text.strip_prefix("large ") {
            return Reply::Frame(Self::of(size));
        }
        if text == "first" {
            let first = Arc::clone(&self.first);
            return Reply::future(async move {
                first.acquire().await.unwrap().forget();
                Ok(frame("first"))
            });
        }
        Reply::Frame(request)
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        matches!(reason, CloseReason::MemoryLimit).then(|| frame("memory"))
    }
}

struct Server {
    supervisor: Supervisor<Sizes>,
    address: SocketAddr,
    limit: MemoryLimit,
}

impl Server {
    async fn start(max_bytes: usize, settings: impl FnOnce(Builder<Sizes>) -> Builder<Sizes>) -> Self {
        Self::sharing(&MemoryLimit::new(max_bytes), settings).await
    }

    async fn sharing(limit: &MemoryLimit, settings: impl FnOnce(Builder<Sizes>) -> Builder<Sizes>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let supervisor = settings(Supervisor::builder(Sizes::new())).memory_limit(limit.clone()).build();
        let serving = supervisor.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        Self { supervisor, address, limit: limit.clone() }
    }

    /// Connects, and waits for a reply.
    async fn connect(&self) -> Client {
        let mut client = Client(TcpStream::connect(self.address).await.unwrap());
        client.echo("hello").await;
        client
    }

    /// Returns the handle of the newest connection.
    fn newest(&self) -> PushHandle<Frame> {
        self.supervisor.sessions().list().pop().unwrap().handle()
    }

    fn ended(&self) -> u64 {
        self.supervisor.stats().ended["memory_limit"]
    }

    async fn wait_until_closed(&self, connections: u64) {
        let is_closed = || self.limit.closed() == connections && self.ended() == connections;
        wait_until_async("connections are closed by the limit", PATIENCE, async || is_closed()).await;
    }

    async fn wait_until_released(&self) {
        wait_until_async("all memory is released", PATIENCE, async || self.limit.used() == 0).await;
    }
}

struct Client(TcpStream);

impl Client {
    async fn send(&mut self, text: &str) {
        self.begin(text.len(), text.as_bytes()).await;
    }

    /// Sends the length of a frame, and its beginning.
    async fn begin(&mut self, length: usize, beginning: &[u8]) {
        self.0.write_u32(u32::try_from(length).unwrap()).await.unwrap();
        self.0.write_all(beginning).await.unwrap();
    }

    async fn receive(&mut self) -> std::io::Result<Vec<u8>> {
        let mut body = vec![0; self.0.read_u32().await? as usize];
        self.0.read_exact(&mut body).await?;
        Ok(body)
    }

    async fn echo(&mut self, text: &str) {
        self.send(text).await;
        assert_eq!(self.receive().await.unwrap(), text.as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_frames_close_the_connection_that_holds_the_most() {
    let server = Server::start(4 * MIB, |builder| builder).await;
    let mut idle = server.connect().await;
    let mut largest = server.connect().await;
    let account = server.newest().account().unwrap();
    largest.begin(4 * MIB, &vec![b'x'; MIB]).await;
    wait_until_async("a megabyte is recorded", PATIENCE, async || account.bytes() >= MIB).await;
    assert_eq!(server.limit.closed(), 0);
    let mut others = Vec::new();
    while server.limit.closed() == 0 {
        let mut other = server.connect().await;
        let account = server.newest().account().unwrap();
        other.begin(200 * KIB + 1, &vec![b'y'; 200 * KIB]).await;
        let is_recorded = || account.bytes() >= 200 * KIB || server.limit.closed() > 0;
        wait_until_async("the beginning is recorded", PATIENCE, async || is_recorded()).await;
        others.push(other);
        assert!(others.len() < 40, "no connection is closed: {:?}", server.limit);
    }
    server.wait_until_closed(1).await;
    assert_eq!(largest.receive().await.unwrap(), b"memory", "the last frame has the reason");
    for other in &mut others {
        other.0.write_all(b"y").await.unwrap();
        assert_eq!(other.receive().await.unwrap().len(), 200 * KIB + 1, "the others go on");
    }
    idle.echo("still here").await;
    server.wait_until_released().await;
    assert_eq!(server.limit.closed(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_reply_counts_until_its_last_byte_is_written() {
    let server = Server::start(24 * MIB, |builder| builder).await;
    let mut idle = server.connect().await;
    let mut reader = server.connect().await;
    let account = server.newest().account().unwrap();
    reader.send(&format!("large {}", 16 * MIB)).await;
    wait_until_async("the reply is recorded", PATIENCE, async || account.bytes() >= 16 * MIB).await;
    // Either the rest is in the socket buffers, or the whole body is still in memory.
    let mut most = vec![0; 8 * MIB];
    reader.0.read_exact(&mut most).await.unwrap();
    assert!(matches!(account.bytes(), 0 | 16_777_216..), "{} bytes", account.bytes());
    let mut rest = vec![0; 8 * MIB + 4];
    reader.0.read_exact(&mut rest).await.unwrap();
    server.wait_until_released().await;
    assert_eq!(server.limit.closed(), 0);
    // A reply above the limit.
    reader.send(&format!("large {}", 32 * MIB)).await;
    server.wait_until_closed(1).await;
    reader.receive().await.expect_err("the reply is cut off");
    idle.echo("still here").await;
    server.wait_until_released().await;
}

/// The actor takes no pushes, because its peer does not read.
#[tokio::test(flavor = "multi_thread")]
async fn queued_pushes_count() {
    let server =
        Server::start(17 * MIB, |builder| builder.push_bytes(64 * MIB).max_slots(64).slot_bytes(64 * MIB)).await;
    let mut idle = server.connect().await;
    let mut stalled = server.connect().await;
    let handle = server.newest();
    stalled.send(&format!("large {}", 16 * MIB)).await;
    wait_until_async("the reply waits", PATIENCE, async || server.limit.used() >= 16 * MIB).await;
    let push = || Frame::from(Bytes::from(vec![b'p'; 300 * KIB]));
    handle.push_latest(Slot(1), push()).unwrap();
    handle.try_push(push(), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
    assert!(server.limit.used() >= 16 * MIB + 600 * KIB, "{:?}", server.limit);
    // The newest frame of a slot replaces the one before it.
    handle.push_latest(Slot(1), push()).unwrap();
    assert!(server.limit.used() < 16 * MIB + 700 * KIB, "{:?}", server.limit);
    handle.clear_slot(Slot(1));
    assert!(server.limit.used() < 16 * MIB + 400 * KIB, "{:?}", server.limit);
    for slot in 2..6 {
        // Fails if the connection has been closed in the meantime.
        let _ = handle.push_latest(Slot(slot), push());
    }
    server.wait_until_closed(1).await;
    stalled.receive().await.expect_err("the reply is cut off");
    idle.echo("still here").await;
    server.wait_until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_held_by_the_application_counts_across_supervisors() {
    let limit = MemoryLimit::new(MIB);
    let (one, two) =
        (Server::sharing(&limit, |builder| builder).await, Server::sharing(&limit, |builder| builder).await);
    let mut small = one.connect().await;
    let mut large = two.connect().await;
    let (of_small, of_large) = (one.newest().account().unwrap(), two.newest().account().unwrap());
    let first = of_large.hold(600 * KIB);
    let second = of_small.hold(400 * KIB);
    assert_eq!((limit.closed(), of_small.bytes()), (0, 400 * KIB));
    drop(second);
    assert_eq!(of_small.bytes(), 0);
    // The connection that exceeds the limit is not the one that holds the most.
    let second = of_small.hold(500 * KIB);
    two.wait_until_closed(1).await;
    assert_eq!(large.receive().await.unwrap(), b"memory");
    small.echo("still here").await;
    // The closed connection still holds its bytes, but no other connection is closed for them.
    let third = of_small.hold(100 * KIB);
    small.echo("still here").await;
    assert_eq!((limit.closed(), one.ended()), (1, 0));
    drop((first, second, third));
    assert_eq!(limit.used(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_largest_connection_is_closed_each_time() {
    let server = Server::start(MIB, |builder| builder).await;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push((server.connect().await, server.newest().account().unwrap()));
    }
    let mut held: Vec<_> = (1..8).map(|n| clients[n].1.hold(n * 16 * KIB)).collect();
    assert_eq!(server.limit.closed(), 0);
    // 448 KiB are held. The new account is larger than all others.
    held.push(clients[0].1.hold(MIB));
    server.wait_until_closed(1).await;
    assert_eq!(clients[0].0.receive().await.unwrap(), b"memory");
    // 448 KiB are left. Together with the new bytes, they are 1088 KiB.
    held.push(clients[1].1.hold(640 * KIB));
    server.wait_until_closed(2).await;
    assert_eq!(clients[1].0.receive().await.unwrap(), b"memory");
    for (client, _) in &mut clients[2..] {
        client.echo("still here").await;
    }
    drop(held);
    assert_eq!(server.limit.used(), 0);
}

/// Includes accounts of connections that are being closed.
#[test]
fn accounts_are_exact_under_concurrent_changes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (server, clients) = runtime.block_on(async {
        let server = Server::start(2 * MIB, |builder| builder).await;
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push((server.connect().await, server.newest().account().unwrap()));
        }
        (server, clients)
    });
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let clients = &clients;
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                for round in 0..20_000_usize {
                    let account = &clients[(round + thread) % clients.len()].1;
                    held.push_back(account.hold(round * 7919 % (200 * KIB)));
                    if held.len() > 10 {
                        held.pop_front();
                    }
                }
            });
        }
    });
    assert!(server.limit.closed() > 0);
    assert_eq!(server.limit.used(), 0);
    assert!(clients.iter().all(|(_, account)| account.bytes() == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_while_ready_replies_exceed_their_limit() {
    let server = Server::start(usize::MAX, |builder| builder.max_in_flight(100).ready_reply_bytes(MIB)).await;
    let mut client = server.connect().await;
    let handled = || server.supervisor.protocol().handled.load(SeqCst) - 1;
    client.send("first").await;
    for _ in 0..20 {
        client.send(&format!("large {}", 400 * KIB)).await;
    }
    client.send("last").await;
    // Three of them are more than a megabyte.
    wait_until_async("replies are ready", PATIENCE, async || handled() == 4).await;
    let account = server.newest().account().unwrap();
    wait_until_async("they are recorded", PATIENCE, async || account.bytes() >= 1200 * KIB).await;
    assert!(account.bytes() < 1400 * KIB, "{} bytes", account.bytes());
    assert_eq!(handled(), 4);
    server.supervisor.protocol().first.add_permits(1);
    assert_eq!(client.receive().await.unwrap(), b"first");
    for _ in 0..20 {
        assert_eq!(client.receive().await.unwrap().len(), 400 * KIB);
    }
    assert_eq!(client.receive().await.unwrap(), b"last");
    server.wait_until_released().await;
}
