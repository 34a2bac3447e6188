//! Connections over real sockets: replies, failing handlers, limits, shutdown and statistics.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tidewire_conn::{AdmitError, ConnectionId, PushError, Shutdown, Supervisor};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::test_server::{Client, Server, Words, frame};

#[tokio::test]
async fn requests_are_answered_in_order() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    for request in ["a", "nothing", "twice", "count", "wait", "b"] {
        client.send(request).await;
    }
    server.supervisor.protocol().release.notify_one();
    for answer in ["a", "one", "two", "4", "waited", "b"] {
        assert_eq!(client.receive().await.as_deref(), Some(answer));
    }
    assert_eq!(server.supervisor.protocol().commands.load(Ordering::SeqCst), 6);
    assert_eq!(server.supervisor.protocol().setups.load(Ordering::SeqCst), 1);
}

/// Each part is written separately, so the actor reads the stream split at that point.
#[tokio::test]
async fn requests_may_be_split_anywhere() {
    let server = Server::start().await;
    let mut client = server.connect().await;
    client.0.set_nodelay(true).unwrap();
    let bytes = b"\0\0\0\x05hello\0\0\0\0\0\0\0\x05again";
    for cut in 1..bytes.len() {
        client.0.write_all(&bytes[..cut]).await.unwrap();
        tokio::task::yield_now().await;
        client.0.write_all(&bytes[cut..]).await.unwrap();
        for answer in ["hello", "", "again"] {
            assert_eq!(client.receive().await.as_deref(), Some(answer));
        }
    }
}

#[tokio::test]
async fn requests_are_answered_after_the_peer_has_closed_its_side() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send("wait").await;
    client.send("last").await;
    client.0.shutdown().await.unwrap();
    server.supervisor.protocol().release.notify_one();
    assert_eq!(client.receive().await.as_deref(), Some("waited"));
    assert_eq!(client.receive().await.as_deref(), Some("last"));
    assert_eq!(client.receive().await, None);
    assert_eq!(server.next_end().await, "conn-1: the peer closed the connection");
}

#[tokio::test]
async fn invalid_input_closes_its_own_connection_with_a_last_frame() {
    let mut server = Server::start().await;
    let (mut neighbour, _) = server.connected().await;

    let mut oversized = server.connect().await;
    oversized.0.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let word = oversized.receive().await.unwrap();
    assert!(word.starts_with("error: "), "{word}");
    assert_eq!(oversized.receive().await, None);
    assert!(server.next_end().await.starts_with("conn-2: invalid input"));

    let mut truncated = server.connect().await;
    truncated.0.write_all(b"\0\0\0\x05hel").await.unwrap();
    truncated.0.shutdown().await.unwrap();
    assert!(truncated.receive().await.unwrap().starts_with("error: "));
    assert_eq!(truncated.receive().await, None);
    assert!(server.next_end().await.starts_with("conn-3: invalid input"));

    assert_eq!(neighbour.ask("still there").await, "still there");
    drop((oversized, truncated));
    wait_until_async("only the neighbour is counted", PATIENCE, async || server.supervisor.count() == 1).await;
}

/// A socket that is closed with unread bytes is reset, and the peer loses the output.
#[tokio::test]
async fn last_frame_reaches_a_peer_that_sent_too_much() {
    let server = Server::start().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client(tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
    let (socket, peer) = listener.accept().await.unwrap();
    client.0.write_all(&vec![0xff; 100_000]).await.unwrap();
    server.supervisor.admit(peer).unwrap().run(socket, Vec::new()).await;
    assert!(client.receive().await.unwrap().starts_with("error: "));
    assert_eq!(client.0.read(&mut [0]).await.unwrap(), 0, "an end, not a reset");
}

#[tokio::test]
async fn failing_handler_ends_only_its_own_connection() {
    let mut server = Server::start().await;
    let (mut neighbour, _) = server.connected().await;
    for (request, end) in [
        ("fail", "a reply failed: as planned"),
        ("panic", "the protocol panicked"),
        ("late-panic", "the protocol panicked"),
        ("close", "a handler closed the connection"),
    ] {
        let mut client = server.connect().await;
        client.send(request).await;
        if request == "close" {
            assert_eq!(client.receive().await.as_deref(), Some("bye"));
        }
        assert_eq!(client.receive().await, None);
        assert!(server.next_end().await.ends_with(end), "{request}");
        assert_eq!(neighbour.ask("still there").await, "still there");
    }
    wait_until_async("only the neighbour is counted", PATIENCE, async || server.supervisor.count() == 1).await;
    assert!(server.ends.try_recv().is_err(), "each end is reported once");
}

#[tokio::test]
async fn on_panic_replies_for_a_handler_that_panicked() {
    let server = Server::start().await;
    server.supervisor.protocol().answers_panics.store(true, Ordering::SeqCst);
    let mut client = server.connect().await;
    for request in ["panic", "late-panic", "stream-panic", "still there"] {
        client.send(request).await;
    }
    for answer in ["panicked", "panicked", "before", "panicked", "still there"] {
        assert_eq!(client.receive().await.as_deref(), Some(answer));
    }
    assert_eq!(server.supervisor.protocol().commands.load(Ordering::SeqCst), 4);
    assert_eq!(server.supervisor.stats().panics, 3);
}

/// The second reply is ready before the first, and waits for its turn.
#[tokio::test]
async fn concurrent_requests_are_answered_in_order() {
    let server = Server::with(|builder| builder.max_in_flight(4)).await;
    let mut client = server.connect().await;
    for request in ["wait", "quick", "late-panic?", "twice", "fifth"] {
        client.send(request).await;
    }
    let words = server.supervisor.protocol();
    wait_until_async("the second is done", PATIENCE, async || words.quick.load(Ordering::SeqCst) == 1).await;
    assert_eq!(words.commands.load(Ordering::SeqCst), 0, "no reply comes before its turn");
    words.release.notify_one();
    for answer in ["waited", "quickly", "late-panic?", "one", "two", "fifth"] {
        assert_eq!(client.receive().await.as_deref(), Some(answer));
    }
    // A request that closes the connection is the last one, whatever was sent after it.
    for request in ["wait", "close", "never handled"] {
        client.send(request).await;
    }
    wait_until_async("the first is awaited", PATIENCE, async || words.waits.load(Ordering::SeqCst) == 2).await;
    words.release.notify_one();
    assert_eq!(client.receive().await.as_deref(), Some("waited"));
    assert_eq!(client.receive().await.as_deref(), Some("bye"));
    assert_eq!(client.receive().await, None);
}

#[tokio::test]
async fn handle_does_not_keep_a_session_listed() {
    let mut server = Server::start().await;
    let (client, handle) = server.connected().await;
    let id = ConnectionId(1);
    assert_eq!(id.to_string(), "conn-1");
    assert!(server.supervisor.sessions().get(&id).is_some());
    drop(client);
    server.next_end().await;
    wait_until_async("the connection has ended", PATIENCE, async || server.supervisor.sessions().is_empty()).await;
    assert!(server.supervisor.sessions().get(&id).is_none());
    assert_eq!(handle.push_high_priority(frame("too late")).await, Err(PushError::Closed));
    let error: std::io::Error = PushError::Closed.into();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn connection_limits_are_exact_and_permits_are_returned() {
    let server = Server::with(|builder| builder.max_connections(3).max_connections_per_address(2)).await;
    let supervisor: &Supervisor<Words> = &server.supervisor;
    let [here, there] = ["127.0.0.1:1", "127.0.0.2:1"].map(|addr| addr.parse().unwrap());
    let first = supervisor.admit(here).unwrap();
    let _second = supervisor.admit(here).unwrap();
    assert_eq!(supervisor.admit(here).unwrap_err(), AdmitError::TooManyFromAddress(here.ip(), 2));
    let _third = supervisor.admit(there).unwrap();
    assert_eq!(supervisor.admit(there).unwrap_err(), AdmitError::TooManyConnections(3));
    assert_eq!(server.connect().await.receive().await, None, "the listener refuses too");
    drop(first);
    assert_eq!(supervisor.count(), 2);
    supervisor.admit(here).unwrap();
}

#[tokio::test]
async fn already_read_bytes_come_first() {
    let server = Server::start().await;
    let (near, far) = tokio::io::duplex(1024);
    let permit = server.supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
    tokio::spawn(permit.run(near, b"\0\0\0\x05fir".to_vec()));
    let (mut read, mut write) = tokio::io::split(far);
    write.write_all(b"st").await.unwrap();
    let mut answer = [0; 9];
    read.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"\0\0\0\x05first");
}

#[tokio::test]
async fn shutdown_aborts_connections_at_the_deadline() {
    let mut server = Server::start().await;
    let (mut idle, _) = server.connected().await;
    let (mut waiting, _) = server.connected().await;
    waiting.send("wait").await;
    let (mut stuck, _) = server.connected().await;
    stuck.send("stream").await;
    let shutdown = Shutdown::default().deadline(Duration::from_millis(100));
    server.supervisor.shutdown(shutdown).await;
    assert_eq!(server.supervisor.count(), 0);
    for _ in 0..3 {
        assert!(server.next_end().await.ends_with("the server is shutting down"));
    }
    for client in [&mut idle, &mut waiting] {
        assert_eq!(client.receive().await, None);
    }
    let refused = server.supervisor.admit(server.addr).unwrap_err();
    assert_eq!(refused, AdmitError::ShuttingDown);
    let mut late = tokio::net::TcpStream::connect(server.addr).await.map(Client);
    if let Ok(late) = &mut late {
        assert_eq!(late.receive().await, None);
    }
}

#[tokio::test]
async fn shutdown_notifies_peers_and_serves_them_for_the_grace_period() {
    let mut server = Server::start().await;
    server.supervisor.protocol().announces_shutdown.store(true, Ordering::SeqCst);
    let (mut client, handle) = server.connected().await;
    let default = Shutdown::default();
    assert_eq!((default.grace, default.deadline), (Duration::ZERO, Duration::from_secs(5)));
    let shutdown = default.grace(Duration::from_mins(1)).deadline(Duration::from_mins(2));
    let supervisor = server.supervisor.clone();
    let shutting = tokio::spawn(async move { supervisor.shutdown(shutdown).await });
    assert_eq!(client.receive().await.as_deref(), Some("going down"));
    assert_eq!(client.ask("still served").await, "still served");
    handle.push_high_priority(frame("pushed")).await.unwrap();
    assert_eq!(client.receive().await.as_deref(), Some("pushed"));
    assert_eq!(server.supervisor.admit(server.addr).unwrap_err(), AdmitError::ShuttingDown);
    drop(client);
    assert!(server.next_end().await.ends_with("the peer closed the connection"));
    shutting.await.unwrap();
}

#[tokio::test]
async fn shutdown_completes_requests_and_queued_pushes() {
    let mut server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    client.send("wait").await;
    let waits = &server.supervisor.protocol().waits;
    wait_until_async("the reply is awaited", PATIENCE, async || waits.load(Ordering::SeqCst) == 1).await;
    handle.push_low_priority(frame("queued")).await.unwrap();
    let supervisor = server.supervisor.clone();
    let shutting = tokio::spawn(async move { supervisor.shutdown(Shutdown::default()).await });
    wait_until_async("nothing more is queued", PATIENCE, async || handle.is_closed()).await;
    server.supervisor.protocol().release.notify_one();
    assert_eq!(client.receive().await.as_deref(), Some("queued"));
    assert_eq!(client.receive().await.as_deref(), Some("waited"));
    assert_eq!(client.receive().await, None);
    assert!(server.next_end().await.ends_with("the server is shutting down"));
    drop(client);
    shutting.await.unwrap();
    assert_eq!(server.supervisor.stats().push.unsent, 0);
}

#[tokio::test]
async fn sessions_and_stats_report_connections() {
    let server = Server::start().await;
    let (mut client, _) = server.connected().await;
    client.send("name ann").await;
    assert_eq!(client.receive().await.as_deref(), Some("named"));
    let session = server.supervisor.sessions().list().pop().unwrap();
    assert_eq!(session.id(), ConnectionId(1));
    assert_eq!(session.peer(), Some(client.0.local_addr().unwrap()));
    assert!(session.since().unwrap().elapsed() < PATIENCE);
    assert_eq!(*session.data::<String>().unwrap(), "ann");
    assert!(session.data::<u32>().is_none());
    wait_until_async("the connection is idle", PATIENCE, async || session.counters().frames_out == 2).await;
    let counters = session.counters();
    assert_eq!((counters.frames_in, counters.frames_out, counters.bytes_in, counters.bytes_out), (2, 2, 21, 18));

    let before = server.supervisor.stats();
    assert_eq!((before.connections, before.admitted, before.traffic), (1, 1, counters));
    drop(client);
    wait_until_async("the connection has ended", PATIENCE, async || server.supervisor.count() == 0).await;
    let after = server.supervisor.stats();
    assert_eq!((after.connections, after.admitted, after.traffic), (0, 1, counters));
    assert_eq!((after.ended["peer"], after.ended.values().sum::<u64>()), (1, 1));
}

#[tokio::test]
async fn closed_connections_leave_the_registry() {
    let server = Server::start().await;
    for _ in 0..20 {
        let mut clients = Vec::new();
        for _ in 0..100 {
            clients.push(server.connect().await);
        }
        for client in &mut clients {
            assert_eq!(client.ask("hello").await, "hello");
        }
    }
    wait_until_async("all connections have ended", PATIENCE, async || server.supervisor.count() == 0).await;
    assert!(server.supervisor.sessions().list().is_empty());
}

#[tokio::test]
async fn frames_before_a_stream_error_are_written() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send("broken-stream").await;
    assert_eq!(client.receive().await.as_deref(), Some("1"));
    assert_eq!(client.receive().await.as_deref(), Some("2"));
    assert_eq!(client.receive().await, None);
    assert!(server.next_end().await.ends_with("a reply failed: as planned"));
}

#[tokio::test]
async fn aborted_task_reports_its_end() {
    let mut server = Server::start().await;
    let (near, _far) = tokio::io::duplex(1024);
    let permit = server.supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
    let running = tokio::spawn(permit.run(near, Vec::new()));
    tokio::task::yield_now().await;
    assert_eq!(server.supervisor.protocol().setups.load(Ordering::SeqCst), 1);
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert_eq!(server.next_end().await, "conn-1: the task of the connection was dropped");
    assert!(server.ends.try_recv().is_err(), "the end is reported once");
    assert_eq!(server.supervisor.count(), 0);
}

/// A socket that has endless requests as input, and accepts all output at once.
#[derive(Default)]
struct EndlessRequests {
    /// The number of bytes that the actor has read.
    read: Arc<AtomicUsize>,
}

impl AsyncRead for EndlessRequests {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        const REQUEST: &[u8] = b"\0\0\0\x05large";
        while buffer.remaining() >= REQUEST.len() {
            buffer.put_slice(REQUEST);
            self.read.fetch_add(REQUEST.len(), Ordering::SeqCst);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for EndlessRequests {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn read_ahead_is_limited_while_replies_are_large() {
    let server = Server::with(|builder| builder.read_ahead_bytes(1000)).await;
    let peer = EndlessRequests::default();
    let read = Arc::clone(&peer.read);
    let permit = server.supervisor.admit("127.0.0.1:9".parse().unwrap()).unwrap();
    let running = tokio::spawn(permit.run(peer, Vec::new()));
    let commands = &server.supervisor.protocol().commands;
    while commands.load(Ordering::SeqCst) < 100 {
        tokio::task::yield_now().await;
    }
    let ahead = read.load(Ordering::SeqCst) - 9 * commands.load(Ordering::SeqCst);
    assert!(ahead < 1000 + 16 * 1024, "{ahead} bytes are read ahead");
    running.abort();
}
