//! What connections cost in memory, by an allocator that counts.

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

/// The tests count in turn.
static COUNTING: Mutex<()> = Mutex::const_new(());

const REQUEST: &[u8] = b"\0\0\0\x05hello";
/// What a shared runtime and the machine around may take at any time.
const SLACK: usize = 256 * 1024;

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

/// The pusher is far faster, and has to wait: never more than the queue, a batch and the socket's buffers is held.
#[tokio::test]
async fn a_slow_reader_makes_a_fast_pusher_wait_and_costs_no_more_than_its_queue() {
    const FRAMES: usize = 20_000;
    const BODY: usize = 4096;
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
                handle.push_low_priority(Frame::from(Bytes::from(vec![b'x'; BODY]))).await.unwrap();
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
        frames += usize::from(length == BODY);
        peak = peak.max(ALLOCATOR.live_bytes());
    }
    pushing.await.unwrap();
    // A queue of one megabyte, a batch, and what overlaps while it grows.
    let held = peak - before;
    assert!(held < (1 << 20) + 4 * 64 * 1024 + SLACK, "{held} bytes were held for one slow reader");
}

/// One burst must not cost it memory for ever: this one takes more than a megabyte while it lasts.
#[tokio::test]
async fn an_idle_connection_gives_back_its_queues() {
    const SLOTS: u64 = 4096;
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    ask(&mut client).await;
    let handle = supervisor.sessions().list().pop().unwrap().handle();
    let frame = || Frame::from(Bytes::from_static(b"x"));
    // Once, so that everything exists.
    handle.push_latest(Slot(0), frame()).unwrap();
    client.read_exact(&mut [0; 5]).await.unwrap();
    let before = ALLOCATOR.live_bytes();
    for slot in 0..SLOTS {
        handle.push_latest(Slot(slot), frame()).unwrap();
    }
    for _ in 0..SLOTS {
        client.read_exact(&mut [0; 5]).await.unwrap();
    }
    let is_small = || ALLOCATOR.live_bytes() < before + SLACK;
    wait_until_async("an idle connection has given back what a burst took", PATIENCE, async || is_small()).await;
}

#[tokio::test]
async fn twenty_thousand_connections_leave_nothing_behind() {
    const WAVE: usize = 250;
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let mut after_first = None;
    for wave in 0..80_u8 {
        // Different addresses, so that the ports of those that have just been closed are not missed.
        let server = SocketAddr::from(([127, 0, 0, 1 + wave], port));
        let mut clients = Vec::new();
        for _ in 0..WAVE {
            clients.push(TcpSocket::new_v4().unwrap().connect(server).await.unwrap());
        }
        for client in &mut clients {
            ask(client).await;
        }
        assert_eq!(supervisor.count(), WAVE);
        drop(clients);
        wait_until_async("all are gone", PATIENCE, async || supervisor.count() == 0).await;
        assert!(supervisor.sessions().is_empty());
        after_first.get_or_insert(ALLOCATOR.live_bytes());
    }
    assert_eq!(supervisor.stats().admitted, 20_000);
    let (first, last) = (after_first.unwrap(), ALLOCATOR.live_bytes());
    assert!(last < first + SLACK, "{first} bytes after {WAVE} connections, {last} after 20000");
}

/// Most connections wait most of the time, and what they hold then is mostly this.
#[tokio::test]
async fn the_future_of_a_connection_is_small() {
    let _counting = COUNTING.lock().await;
    let (supervisor, port) = serve().await;
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let permit = supervisor.admit(client.peer_addr().unwrap()).unwrap();
    let size = size_of_val(&permit.run(client, Vec::new()));
    assert!(size <= 640, "{size} bytes");
}
