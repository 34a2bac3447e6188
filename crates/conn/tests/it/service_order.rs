//! The order of pushes and replies: `ORDER`, `HOLD_PUSHES`, `before_send`, and pushes that are tied to a reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{
    ConnectionContext, Frame, Head, Protocol, PushHandle, PushPolicy, PushPriority, Reply, ReplyTicket, ServiceOrder,
    Slot, Supervisor,
};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};

use crate::test_server::{Client, Planned, frame};

/// Numbers all frames. `wait` is answered when the test notifies `release`, other requests are echoed, and a push that begins with `flood`
/// is pushed again when it is sent.
struct Ordered<const HOLD: bool, const REPLIES_FIRST: bool> {
    release: Arc<Notify>,
    waits: AtomicUsize,
    sender: mpsc::Sender<(PushHandle<Frame>, ReplyTicket)>,
}

/// The state of a connection.
struct ConnectionState {
    handle: PushHandle<Frame>,
    sent: AtomicU64,
}

impl<const HOLD: bool, const REPLIES_FIRST: bool> Protocol for Ordered<HOLD, REPLIES_FIRST> {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;
    const HOLD_PUSHES: bool = HOLD;
    const ORDER: ServiceOrder = if REPLIES_FIRST { ServiceOrder::RepliesFirst } else { ServiceOrder::PushesFirst };

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_connection_setup(&self, handle: PushHandle<Frame>, context: &mut ConnectionContext) {
        context.data = Some(Box::new(ConnectionState { handle, sent: AtomicU64::new(0) }));
    }

    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let state: &ConnectionState = context.data.as_ref().unwrap().downcast_ref().unwrap();
        self.sender.try_send((state.handle.clone(), context.ticket())).unwrap();
        if request.body() != &b"wait"[..] {
            return Reply::Frame(request);
        }
        self.waits.fetch_add(1, Ordering::SeqCst);
        let release = Arc::clone(&self.release);
        Reply::future(async move {
            release.notified().await;
            Ok(frame("waited"))
        })
    }

    fn before_send(&self, frame: &mut Frame, context: &mut ConnectionContext) {
        let state: &ConnectionState = context.data.as_ref().unwrap().downcast_ref().unwrap();
        if frame.body().starts_with(b"flood") {
            state.handle.try_push(frame.clone(), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
        }
        let number = state.sent.fetch_add(1, Ordering::SeqCst) + 1;
        *frame = Frame::new(Head::new(format!("{number} ").as_bytes()).unwrap(), frame.body().clone());
    }
}

struct Server<const HOLD: bool, const REPLIES_FIRST: bool> {
    supervisor: Supervisor<Ordered<HOLD, REPLIES_FIRST>>,
    listener: TcpListener,
    tickets: mpsc::Receiver<(PushHandle<Frame>, ReplyTicket)>,
}

impl<const HOLD: bool, const REPLIES_FIRST: bool> Server<HOLD, REPLIES_FIRST> {
    async fn new() -> Self {
        let (sender, tickets) = mpsc::channel(100);
        let ordered = Ordered { release: Arc::default(), waits: AtomicUsize::new(0), sender };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { supervisor: Supervisor::builder(ordered).build(), listener, tickets }
    }

    async fn connect(&self) -> Client {
        let client = TcpStream::connect(self.listener.local_addr().unwrap()).await.unwrap();
        let (socket, peer) = self.listener.accept().await.unwrap();
        tokio::spawn(self.supervisor.admit(peer).unwrap().run(socket, Vec::new()));
        Client(client)
    }

    async fn ticket(&mut self) -> (PushHandle<Frame>, ReplyTicket) {
        self.tickets.recv().await.unwrap()
    }

    fn release(&self) {
        self.supervisor.protocol().release.notify_one();
    }
}

fn push(handle: &PushHandle<Frame>, text: &str) {
    handle.try_push(frame(text), PushPriority::Low, PushPolicy::ReturnErrorIfFull).unwrap();
}

async fn expect(client: &mut Client, answers: &[&str]) {
    for answer in answers {
        assert_eq!(client.receive().await.as_deref(), Some(*answer));
    }
}

#[tokio::test]
async fn pushes_may_overtake_a_reply_or_be_held() {
    let mut free = Server::<false, false>::new().await;
    let mut client = free.connect().await;
    client.send("wait").await;
    let (handle, _) = free.ticket().await;
    push(&handle, "pushed");
    expect(&mut client, &["1 pushed"]).await;
    free.release();
    expect(&mut client, &["2 waited"]).await;

    let mut held = Server::<true, false>::new().await;
    let mut client = held.connect().await;
    // The second request is handled after the push that was held during the first.
    client.send("wait").await;
    client.send("wait").await;
    let (handle, _) = held.ticket().await;
    push(&handle, "pushed");
    // On one thread this lets the actor run.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    held.release();
    expect(&mut client, &["1 waited", "2 pushed"]).await;
    held.ticket().await;
    push(&handle, "pushed again");
    held.release();
    expect(&mut client, &["3 waited", "4 pushed again"]).await;
    push(&handle, "at once");
    expect(&mut client, &["5 at once"]).await;
}

/// On one thread both are ready when the actor runs.
#[tokio::test]
async fn service_order_puts_pushes_or_replies_first() {
    let mut pushes_first = Server::<false, false>::new().await;
    let mut client = pushes_first.connect().await;
    client.send("wait").await;
    let (handle, _) = pushes_first.ticket().await;
    pushes_first.release();
    push(&handle, "pushed");
    expect(&mut client, &["1 pushed", "2 waited"]).await;

    let mut replies_first = Server::<false, true>::new().await;
    let mut client = replies_first.connect().await;
    client.send("wait").await;
    let (handle, _) = replies_first.ticket().await;
    replies_first.release();
    push(&handle, "pushed");
    expect(&mut client, &["1 waited", "2 pushed"]).await;
}

#[tokio::test]
async fn tied_push_follows_its_reply() {
    let mut server = Server::<false, false>::new().await;
    let mut client = server.connect().await;
    let mut other = server.connect().await;
    other.send("hello").await;
    let (other_handle, _) = server.ticket().await;
    expect(&mut other, &["1 hello"]).await;

    client.send("wait").await;
    let (handle, ticket) = server.ticket().await;
    let tied = handle.after(ticket);
    tied.try_push(frame("tied"), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
    tied.push_latest(Slot(1), frame("tied slot, old")).unwrap();
    handle.push_latest(Slot(1), frame("tied slot")).unwrap();
    handle.push_latest(Slot(2), frame("free slot")).unwrap();
    tied.push_latest(Slot(3), frame("third slot")).unwrap();
    push(&handle, "free");
    // The ticket has no effect on another connection.
    other_handle.after(ticket).push_latest(Slot(1), frame("not tied")).unwrap();
    expect(&mut other, &["2 not tied"]).await;
    expect(&mut client, &["1 free slot", "2 free"]).await;

    server.release();
    expect(&mut client, &["3 waited", "4 tied", "5 tied slot", "6 third slot"]).await;
    tied.push_latest(Slot(1), frame("already answered")).unwrap();
    expect(&mut client, &["7 already answered"]).await;
}

/// Clearing a slot also removes an earlier frame that waits for an earlier reply.
#[tokio::test]
async fn tied_frames_can_be_cleared() {
    let mut server = Server::<false, false>::new().await;
    let mut client = server.connect().await;
    client.send("wait").await;
    let (handle, ticket) = server.ticket().await;
    assert_eq!(handle.queued_bytes(), 0);
    let tied = handle.after(ticket);
    tied.try_push(frame("four"), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
    handle.push_latest(Slot(1), frame("free")).unwrap();
    tied.push_latest(Slot(1), frame("tied")).unwrap();
    tied.push_latest(Slot(2), frame("six")).unwrap();
    assert_eq!(handle.queued_bytes(), 15);
    assert!(handle.clear_slot(Slot(1)));
    assert_eq!(handle.queued_bytes(), 7);
    // Now the actor has moved the slots to the tied frames.
    push(&handle, "free");
    expect(&mut client, &["1 free"]).await;
    assert_eq!(handle.queued_bytes(), 7);
    assert!(handle.clear_slot(Slot(2)) && !handle.clear_slot(Slot(2)));
    tied.push_next(Slot(3), frame("seven")).unwrap();
    tied.push_next(Slot(3), frame("eight")).unwrap();
    assert_eq!(handle.queued_bytes(), 14);
    assert!(handle.clear_slot(Slot(3)) && !handle.clear_slot(Slot(3)));
    tied.push_latest(Slot(2), frame("again")).unwrap();
    assert_eq!(handle.queued_bytes(), 9);
    server.release();
    expect(&mut client, &["2 waited", "3 four", "4 again"]).await;
    client.send("nothing else").await;
    expect(&mut client, &["5 nothing else"]).await;
    assert_eq!(handle.queued_bytes(), 0);
}

#[tokio::test]
async fn tied_frames_are_counted_as_unsent_when_the_connection_ends() {
    let mut server = Server::<false, false>::new().await;
    let mut client = server.connect().await;
    client.send("wait").await;
    let (handle, ticket) = server.ticket().await;
    handle.after(ticket).push_latest(Slot(1), frame("tied")).unwrap();
    handle.after(ticket).try_push(frame("tied"), PushPriority::Low, PushPolicy::DropIfFull).unwrap();
    let supervisor = server.supervisor.clone();
    let shutdown = tidewire_conn::Shutdown::default().deadline(std::time::Duration::from_millis(10));
    supervisor.shutdown(shutdown).await;
    assert_eq!(supervisor.stats().push.unsent, 2);
}

#[tokio::test]
async fn broadcast_calls_before_send_for_every_connection() {
    let server = Server::<false, false>::new().await;
    let (mut first, mut second) = (server.connect().await, server.connect().await);
    first.send("hello").await;
    expect(&mut first, &["1 hello"]).await;
    let sessions = server.supervisor.sessions();
    wait_until_async("both are served", PATIENCE, async || sessions.len() == 2).await;
    assert_eq!(sessions.broadcast(PushPriority::Low, |_| Some(frame("news"))), 2);
    expect(&mut first, &["2 news"]).await;
    expect(&mut second, &["1 news"]).await;
}

/// Each push fills a batch and is followed by another one.
#[tokio::test]
async fn flood_of_pushes_does_not_block_requests() {
    flood::<false, false>().await;
    flood::<true, false>().await;
    flood::<false, true>().await;
}

async fn flood<const HOLD: bool, const REPLIES_FIRST: bool>() {
    let mut server = Server::<HOLD, REPLIES_FIRST>::new().await;
    let mut client = server.connect().await;
    client.send("hello").await;
    let (handle, _) = server.ticket().await;
    expect(&mut client, &["1 hello"]).await;
    push(&handle, &format!("flood{}", "x".repeat(70_000)));
    client.receive().await.unwrap();
    client.send("answer me").await;
    while !client.receive().await.unwrap().ends_with("answer me") {}
    client.send("wait").await;
    server.release();
    while !client.receive().await.unwrap().ends_with("waited") {}
}
