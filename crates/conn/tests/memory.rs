//! Memory usage of connections, measured with a counting allocator.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, PushPolicy, PushPriority, Reply, Slot, Supervisor};
use tidewire_testkit::{CountingAllocator, PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Mutex;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Held by each test, so that only one of them allocates at a time.
static COUNTING: Mutex<()> = Mutex::const_new(());

const REQUEST: &[u8] = b"\0\0\0\x05hello";
/// Tolerance for allocations of the runtime.
const SLACK_BYTES: usize = 256 * 1024;

struct Echo;

impl Protocol for Echo {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::Frame(frame)
    }
}

async fn serve() -> (Supervisor<Echo>, u16) {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let supervisor = Supervisor::builder(Echo).build();
    let serving = supervisor.clone();
    tokio::spawn(async move { serving.serve(listener).await });
    (supervisor, port)
}

async fn ask(client: &mut TcpStream) {
    client.write_all(REQUEST).await.unwrap();
    let mut answer = [0; REQUEST.len()];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, REQUEST);
}

/// The pusher waits for capacity, so memory is bounded by the queue, a batch and the socket buffers.
#[tokio::test]
async fn memory_of_a_slow_consumer_is_bounded() {
    const FRAMES: usize = 20_000;
    const BODY_BYTES: usize = 4096;
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    ask(&mut client).await;
    let handle = supervisor.sessions().list().pop().unwrap().handle();

    let before = ALLOCATOR.live_bytes();
    let pushing = tokio::spawn({
        let handle = handle.clone();
        async move {
            for _ in 0..FRAMES {
                handle.push_low_priority(Frame::from(Bytes::from(vec![b'x'; BODY_BYTES]))).await.unwrap();
            }
        }
    });
    let is_full = || handle.try_push(Frame::default(), PushPriority::Low, PushPolicy::ReturnErrorIfFull).is_err();
    wait_until_async("the queue is full", PATIENCE, async || is_full()).await;
    assert!(!pushing.is_finished(), "the pusher waits");

    let (mut peak, mut frames) = (0, 0);
    while frames < FRAMES {
        let length = client.read_u32().await.unwrap() as usize;
        client.read_exact(&mut vec![0; length]).await.unwrap();
        frames += usize::from(length == BODY_BYTES);
        peak = peak.max(ALLOCATOR.live_bytes());
    }
    pushing.await.unwrap();
    // The queue of one megabyte, and the batch with the copies that are made when it grows.
    let held = peak - before;
    assert!(held < (1 << 20) + 4 * 64 * 1024 + SLACK_BYTES, "{held} bytes were held for a slow consumer");
}

/// The frames of the burst take up more than a megabyte while they are queued.
#[tokio::test]
async fn idle_connection_releases_its_queues() {
    const SLOTS: u64 = 4096;
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    ask(&mut client).await;
    let handle = supervisor.sessions().list().pop().unwrap().handle();
    let frame = || Frame::from(Bytes::from_static(b"x"));
    // The first push allocates the queues.
    handle.push_latest(Slot(0), frame()).unwrap();
    client.read_exact(&mut [0; 5]).await.unwrap();
    let before = ALLOCATOR.live_bytes();
    for slot in 0..SLOTS {
        handle.push_latest(Slot(slot), frame()).unwrap();
    }
    for _ in 0..SLOTS {
        client.read_exact(&mut [0; 5]).await.unwrap();
    }
    let is_small = || ALLOCATOR.live_bytes() < before + SLACK_BYTES;
    wait_until_async("the memory of the burst is released", PATIENCE, async || is_small()).await;
}

#[tokio::test]
async fn closed_connections_leak_no_memory() {
    const WAVE_CONNECTIONS: usize = 250;
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let mut after_first = None;
    for wave in 0..80_u8 {
        // A different address in each wave, so that ports in TIME_WAIT do not run out.
        let server = SocketAddr::from(([127, 0, 0, 1 + wave], port));
        let mut clients = Vec::new();
        for _ in 0..WAVE_CONNECTIONS {
            clients.push(TcpSocket::new_v4().unwrap().connect(server).await.unwrap());
        }
        for client in &mut clients {
            ask(client).await;
        }
        assert_eq!(supervisor.count(), WAVE_CONNECTIONS);
        drop(clients);
        wait_until_async("all connections have ended", PATIENCE, async || supervisor.count() == 0).await;
        assert!(supervisor.sessions().is_empty());
        after_first.get_or_insert(ALLOCATOR.live_bytes());
    }
    assert_eq!(supervisor.stats().admitted, 20_000);
    let (first, last) = (after_first.unwrap(), ALLOCATOR.live_bytes());
    assert!(last < first + SLACK_BYTES, "{first} bytes after {WAVE_CONNECTIONS} connections, {last} after 20000");
}

/// The future is most of the memory of an idle connection.
#[tokio::test]
async fn future_of_a_connection_is_small() {
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let permit = supervisor.admit(client.peer_addr().unwrap()).unwrap();
    let size = size_of_val(&permit.run(client, Vec::new()));
    assert!(size <= 640, "{size} bytes");
}
