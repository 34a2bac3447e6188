//! `RequestOptions`: the priority and the policy of a client's requests, and dead letters.

use std::time::Duration;

use tidewire_conn::client::{Client, ClientProtocol, Incoming, Outcome, RequestError, RequestOptions, TcpConnector};
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{Frame, PushPolicy, PushPriority};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::test_server::{Client as Peer, frame};

/// Replies come in the order in which requests are sent.
struct InOrder;

impl ClientProtocol for InOrder {
    type Frame = Frame;
    type Codec = LengthDelimited;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn classify(&self, _: &Frame) -> Incoming {
        Incoming::NextReply
    }
}

/// Returns a client, the server's end of its connection, and the dead letters.
async fn connected() -> (Client<InOrder>, Peer, mpsc::Receiver<Frame>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connector = TcpConnector::new(listener.local_addr().unwrap().to_string());
    let (dead, letters) = mpsc::channel(10_000);
    let (client, _, connection) = Client::builder(InOrder, connector).dead_letters(dead).keep_unsent(true).build();
    tokio::spawn(connection.run());
    let (socket, _) = listener.accept().await.unwrap();
    client.connected().await.unwrap();
    (client, Peer(socket), letters)
}

fn policy(policy: PushPolicy) -> RequestOptions {
    RequestOptions::default().policy(policy)
}

/// All frames are queued before the first is written, because they are queued in one poll of this test.
#[tokio::test]
async fn high_priority_requests_overtake_others() {
    let (client, mut peer, _letters) = connected().await;
    let high = RequestOptions::default().priority(PushPriority::High);
    let requesting = async {
        tokio::join!(
            client.request(frame("low")),
            client.send(frame("low, no reply")),
            client.request_with(frame("high"), high),
            client.send_with(frame("high, no reply"), high),
        )
    };
    let serving = async {
        for expected in ["high", "high, no reply", "low", "low, no reply"] {
            assert_eq!(peer.receive().await.unwrap(), expected);
        }
        peer.send("reply to high").await;
        peer.send("reply to low").await;
    };
    let ((low, low_sent, high, high_sent), ()) = tokio::join!(requesting, serving);
    assert_eq!((low_sent, high_sent), (Ok(()), Ok(())));
    assert_eq!((low.unwrap(), high.unwrap()), (frame("reply to low"), frame("reply to high")));
}

/// Returns a frame of which about twenty fit into the queue.
fn large(name: &str) -> Frame {
    frame(format!("{name:50000}"))
}

/// Fills the socket and the low-priority queue. Returns the number of frames that were accepted.
async fn fill(client: &Client<InOrder>) -> usize {
    let (mut accepted, mut refused) = (0, 0);
    // The queue must stay full after the connection has run.
    while refused < 1000 {
        match client.send_with(large("filler"), policy(PushPolicy::ReturnErrorIfFull)).await {
            Ok(()) => (accepted, refused) = (accepted + 1, 0),
            Err(error) => {
                assert_eq!(error, RequestError::QueueFull);
                refused += 1;
                tokio::task::yield_now().await;
            }
        }
        assert!(accepted < 1000, "the server reads");
    }
    accepted
}

#[tokio::test]
async fn policy_applies_when_the_queue_is_full() {
    let (client, peer, mut letters) = connected().await;
    let accepted = fill(&client).await;
    assert!(letters.try_recv().is_err(), "a frame that is rejected with an error is not a dead letter");

    let refused = client.request_with(large("refused"), policy(PushPolicy::ReturnErrorIfFull)).await;
    assert_eq!(refused, Err(RequestError::QueueFull));
    assert_eq!(RequestError::QueueFull.outcome(), Outcome::NeverSent);
    let dropped = client.request_with(large("dropped"), policy(PushPolicy::DropIfFull)).await;
    assert_eq!(dropped, Err(RequestError::QueueFull), "a dropped request does not wait for a reply");
    let unanswered = client.send_with(large("without reply"), policy(PushPolicy::WarnAndDropIfFull)).await;
    assert_eq!(unanswered, Ok(()));
    let patient =
        client.request_with(large("patient"), RequestOptions::default().timeout(Duration::from_millis(1))).await;
    assert_eq!(patient, Err(RequestError::TimedOut { outcome: Outcome::NeverSent }));
    assert_eq!(client.stats().connections.push.dropped, 2);
    for expected in ["dropped", "without reply"] {
        assert_eq!(letters.try_recv().unwrap(), large(expected));
    }
    assert!(letters.try_recv().is_err());

    // The frames in the queue are lost with the connection. Those in the socket may have reached the server.
    drop(peer);
    wait_until_async("the connection has ended", PATIENCE, async || client.stats().connections.push.unsent > 0).await;
    let lost: Vec<_> = std::iter::from_fn(|| letters.try_recv().ok()).collect();
    assert_eq!(lost.len() as u64, client.stats().connections.push.unsent);
    assert!(lost.len() < accepted && lost.iter().all(|frame| *frame == large("filler")));
}
