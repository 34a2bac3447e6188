//! Pushes: priorities, fairness, policies, waiting pushers and slots.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tidewire_conn::{FairnessConfig, Frame, PushError, PushPolicy, PushPriority, PushQueues, Slot};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::sync::mpsc;

use crate::test_server::{Server, frame};

fn push(handle: &tidewire_conn::PushHandle<Frame>, text: &str, priority: PushPriority) -> Result<(), PushError> {
    handle.try_push(frame(text), priority, PushPolicy::ReturnErrorIfFull)
}

/// On one thread nothing is written before the test waits, so all frames are queued when the actor runs.
#[tokio::test]
async fn high_priority_frames_are_written_first() {
    let server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    for number in 0..3 {
        push(&handle, &format!("low {number}"), PushPriority::Low).unwrap();
    }
    for number in 0..3 {
        push(&handle, &format!("high {number}"), PushPriority::High).unwrap();
    }
    for expected in ["high 0", "high 1", "high 2", "low 0", "low 1", "low 2"] {
        assert_eq!(client.receive().await.as_deref(), Some(expected));
    }
}

/// Returns the order in which 12 high-priority and 5 low-priority frames are written. All are queued before the first is written.
async fn written_order(fairness: FairnessConfig) -> String {
    let server = Server::with(|builder| builder.fairness(fairness)).await;
    let (mut client, handle) = server.connected().await;
    for number in 0..12 {
        push(&handle, &format!("h{number}"), PushPriority::High).unwrap();
    }
    for number in 0..5 {
        push(&handle, &format!("l{number}"), PushPriority::Low).unwrap();
    }
    let mut order = Vec::new();
    for _ in 0..17 {
        order.push(client.receive().await.unwrap());
    }
    order.join(" ")
}

#[tokio::test]
async fn builder_sets_the_fairness_of_connections() {
    let fairness = FairnessConfig::default().max_high_before_low(3);
    assert_eq!(written_order(fairness).await, "h0 h1 h2 l0 h3 h4 h5 l1 h6 h7 h8 l2 h9 h10 h11 l3 l4");
    let strict = FairnessConfig::default().max_high_before_low(0);
    assert_eq!(written_order(strict).await, "h0 h1 h2 h3 h4 h5 h6 h7 h8 h9 h10 h11 l0 l1 l2 l3 l4");
    let sliced = strict.time_slice(Duration::ZERO);
    assert_eq!(written_order(sliced).await, "h0 l0 h1 l1 h2 l2 h3 l3 h4 l4 h5 h6 h7 h8 h9 h10 h11");
}

async fn order(fairness: FairnessConfig, high: usize, low: usize) -> String {
    let (queues, handle) = PushQueues::<String>::bounded(high, low);
    let mut queues = queues.fairness(fairness);
    for _ in 0..high {
        handle.push_high_priority("h".into()).await.unwrap();
    }
    for _ in 0..low {
        handle.push_low_priority("l".into()).await.unwrap();
    }
    drop(handle);
    let mut order = String::new();
    while let Some((_, frame)) = queues.recv().await {
        order.push_str(&frame);
    }
    order
}

#[tokio::test]
async fn low_priority_frames_have_a_fair_share() {
    let default = FairnessConfig::default();
    assert_eq!((default.max_high_before_low, default.time_slice), (16, None));
    assert_eq!(order(default, 40, 2).await, format!("{0}l{0}l{1}", "h".repeat(16), "h".repeat(8)));
    let strict = FairnessConfig::default().max_high_before_low(0);
    assert_eq!(order(strict, 40, 2).await, format!("{}ll", "h".repeat(40)));
    let sliced = strict.time_slice(Duration::ZERO);
    assert_eq!(order(sliced, 3, 3).await, "hlhlhl");
}

#[tokio::test]
async fn high_priority_push_overtakes_a_stream() {
    let server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    client.send("stream").await;
    assert!(client.receive().await.unwrap().ends_with("01"));
    handle.push_high_priority(frame("urgent")).await.unwrap();
    // The stream never ends, so the push arrives only if it overtakes.
    while client.receive().await.as_deref() != Some("urgent") {}
}

#[tokio::test]
async fn slow_consumer_blocks_pushers_until_the_connection_ends() {
    let server = Server::with(|builder| builder.high_priority_capacity(2).low_priority_capacity(2)).await;
    let (client, handle) = server.connected().await;
    let big = "x".repeat(90_000);
    // The socket buffers, the batch and the queue accept some frames. Then the queue must stay full after the actor has run.
    let (mut pushed, mut refused) = (0, 0);
    while refused < 1000 {
        match push(&handle, &big, PushPriority::Low) {
            Ok(()) => (pushed, refused) = (pushed + 1, 0),
            Err(error) => {
                assert_eq!(error, PushError::QueueFull);
                refused += 1;
                tokio::task::yield_now().await;
            }
        }
        assert!(pushed < 1000, "the peer reads");
    }
    let waiting = tokio::spawn({
        let handle = handle.clone();
        async move { handle.push_low_priority(frame("never sent")).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    drop(client);
    assert_eq!(waiting.await.unwrap(), Err(PushError::Closed));
    assert_eq!(push(&handle, "gone", PushPriority::High), Err(PushError::Closed));
    wait_until_async("unsent frames are counted", PATIENCE, async || server.supervisor.stats().push.unsent > 0).await;
}

#[tokio::test]
async fn dropped_frames_reach_the_dead_letters() {
    let (dead, mut letters) = mpsc::channel(2);
    let server = Server::with(|builder| {
        builder.high_priority_capacity(1).low_priority_capacity(1).dead_letters(dead).keep_unsent(true)
    })
    .await;
    let (client, handle) = server.connected().await;
    // On one thread the frame stays queued until the test waits.
    push(&handle, "queued", PushPriority::Low).unwrap();
    for (text, policy) in [("a", PushPolicy::DropIfFull), ("b", PushPolicy::WarnAndDropIfFull)] {
        assert_eq!(handle.try_push(frame(text), PushPriority::Low, policy), Ok(()));
    }
    assert_eq!(letters.try_recv().unwrap(), frame("a"));
    assert_eq!(letters.try_recv().unwrap(), frame("b"));
    for _ in 0..3 {
        assert_eq!(handle.try_push(frame("c"), PushPriority::Low, PushPolicy::DropIfFull), Ok(()));
    }
    let stats = server.supervisor.stats().push;
    assert_eq!((stats.dropped, stats.undelivered), (5, 1));
    drop(client);
}

#[tokio::test]
async fn slot_holds_the_newest_frame() {
    let server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    for number in 0..5 {
        handle.push_latest(Slot(7), frame(format!("seven {number}"))).unwrap();
        handle.push_latest(Slot(8), frame(format!("eight {number}"))).unwrap();
    }
    assert_eq!(client.receive().await.as_deref(), Some("seven 4"));
    assert_eq!(client.receive().await.as_deref(), Some("eight 4"));
    assert_eq!(server.supervisor.stats().push.replaced, 8);
    handle.push_latest(Slot(7), frame("seven again")).unwrap();
    assert_eq!(client.receive().await.as_deref(), Some("seven again"));
}

#[tokio::test]
async fn broadcast_reaches_only_selected_connections() {
    let server = Server::start().await;
    let (mut first, _) = server.connected().await;
    let (mut second, _) = server.connected().await;
    let reached = server
        .supervisor
        .sessions()
        .broadcast(PushPriority::Low, |session| (session.id().0 != 1).then(|| frame("news")));
    assert_eq!(reached, 1);
    assert_eq!(second.receive().await.as_deref(), Some("news"));
    assert_eq!(first.ask("still here").await, "still here");
}

/// All frames are queued before the actor runs, while it writes an endless stream. The sixteen high-priority frames come first, then
/// the low-priority ones, then the stream continues.
#[tokio::test]
async fn queued_frames_overtake_a_stream_by_priority() {
    let server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    client.send("stream").await;
    assert!(client.receive().await.unwrap().ends_with("01"));
    for number in 0..100 {
        push(&handle, &format!("low {number}"), PushPriority::Low).unwrap();
    }
    for number in 0..16 {
        push(&handle, &format!("high {number}"), PushPriority::High).unwrap();
    }
    let mut numbers = 1;
    let first = loop {
        let received = client.receive().await.unwrap();
        if !received.starts_with('0') {
            break received;
        }
        numbers += 1;
        assert_eq!(received.parse::<u32>().unwrap(), numbers, "the stream is in order");
    };
    assert_eq!(first, "high 0");
    let rest = (1..16).map(|number| format!("high {number}")).chain((0..100).map(|number| format!("low {number}")));
    for expected in rest {
        assert_eq!(client.receive().await.unwrap(), expected);
    }
    assert_eq!(client.receive().await.unwrap().parse::<u32>().unwrap(), numbers + 1, "the stream is complete");
}

/// All frames arrive, and the frames of each producer and priority are in order, as are those of the endless stream.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_producers_keep_their_order_during_a_stream() {
    const PRODUCERS: usize = 4;
    const FRAMES: usize = 500;
    let server = Server::start().await;
    let (mut client, handle) = server.connected().await;
    client.send("stream").await;
    let producers: Vec<_> = (0..PRODUCERS)
        .map(|producer| {
            let handle = handle.clone();
            tokio::spawn(async move {
                for number in 0..FRAMES {
                    handle.push_low_priority(frame(format!("low {producer} {number}"))).await.unwrap();
                    handle.push_high_priority(frame(format!("high {producer} {number}"))).await.unwrap();
                }
            })
        })
        .collect();
    let mut next = std::collections::HashMap::new();
    let (mut pushed, mut streamed) = (0, 0);
    while pushed < 2 * PRODUCERS * FRAMES {
        let received = client.receive().await.unwrap();
        if let Ok(number) = received.parse::<u64>() {
            streamed += 1;
            assert_eq!(number, streamed, "the stream is out of order");
            continue;
        }
        let (source, number) = received.rsplit_once(' ').unwrap();
        let expected = next.entry(source.to_owned()).or_insert(0);
        assert_eq!(number.parse::<usize>().unwrap(), *expected, "{source} is out of order");
        *expected += 1;
        pushed += 1;
    }
    assert!(next.len() == 2 * PRODUCERS && next.values().all(|count| *count == FRAMES));
    assert!(streamed > 0, "the stream waited for the pushes");
    for producer in producers {
        producer.await.unwrap();
    }
}

#[tokio::test]
async fn push_overtakes_a_pending_reply_with_the_smallest_batch() {
    let server = Server::with(|builder| builder.batch_bytes(1)).await;
    let (mut client, handle) = server.connected().await;
    client.send("wait").await;
    let waits = &server.supervisor.protocol().waits;
    wait_until_async("the reply is awaited", PATIENCE, async || waits.load(Ordering::SeqCst) == 1).await;
    handle.push_low_priority(frame("news")).await.unwrap();
    assert_eq!(client.receive().await.as_deref(), Some("news"));
    server.supervisor.protocol().release.notify_one();
    assert_eq!(client.receive().await.as_deref(), Some("waited"));
}

#[tokio::test]
async fn capacity_is_clamped() {
    let (mut queues, handle) = PushQueues::<String>::bounded(usize::MAX, usize::MAX);
    handle.push_low_priority("news".into()).await.unwrap();
    assert_eq!(queues.recv().await, Some((PushPriority::Low, "news".into())));
}

/// Repeated, because it tests a race.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frame_of_the_last_handle_is_received() {
    for _ in 0..20_000 {
        let (mut queues, handle) = PushQueues::<String>::bounded(1, 1);
        let pushing = tokio::spawn(async move {
            handle.try_push("last".into(), PushPriority::High, PushPolicy::ReturnErrorIfFull).unwrap();
        });
        assert_eq!(queues.recv().await, Some((PushPriority::High, "last".into())));
        pushing.await.unwrap();
    }
}

/// Polls a future once. Returns whether it is pending.
async fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    let mut future = future;
    std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

#[tokio::test]
async fn waiting_pushers_get_capacity_in_order() {
    let (mut queues, handle) = PushQueues::<String>::bounded(1, 2);
    let push_now = |text: &str| handle.try_push(text.into(), PushPriority::Low, PushPolicy::ReturnErrorIfFull);
    for text in ["a", "b"] {
        push_now(text).unwrap();
    }
    let mut first = Box::pin(handle.push_low_priority("c".into()));
    let mut second = Box::pin(handle.push_low_priority("d".into()));
    assert!(is_pending(first.as_mut()).await && is_pending(second.as_mut()).await);
    assert_eq!(queues.recv().await.unwrap().1, "a");
    // The free capacity is reserved for the first pusher, even before it is polled.
    assert_eq!(push_now("x"), Err(PushError::QueueFull));
    assert!(is_pending(second.as_mut()).await);
    first.await.unwrap();
    assert_eq!(queues.recv().await.unwrap().1, "b");
    second.await.unwrap();
    assert_eq!(push_now("x"), Err(PushError::QueueFull));
    for text in ["c", "d"] {
        assert_eq!(queues.recv().await.unwrap().1, text);
    }
    // No pusher waits, and the full capacity is available again.
    for text in ["e", "f"] {
        push_now(text).unwrap();
    }
    assert_eq!(push_now("x"), Err(PushError::QueueFull));
}

#[tokio::test]
async fn cancelled_pushers_return_their_capacity() {
    let (mut queues, handle) = PushQueues::<String>::bounded(1, 1);
    let push_now = |text: &str| handle.try_push(text.into(), PushPriority::Low, PushPolicy::ReturnErrorIfFull);
    push_now("a").unwrap();
    let mut first = Box::pin(handle.push_low_priority("never".into()));
    let mut second = Box::pin(handle.push_low_priority("b".into()));
    assert!(is_pending(first.as_mut()).await && is_pending(second.as_mut()).await);
    assert_eq!(queues.recv().await.unwrap().1, "a");
    drop(first);
    second.await.unwrap();
    let mut third = Box::pin(handle.push_low_priority("never".into()));
    assert!(is_pending(third.as_mut()).await);
    assert_eq!(queues.recv().await.unwrap().1, "b");
    drop(third);
    push_now("c").unwrap();
    assert_eq!(push_now("x"), Err(PushError::QueueFull));
    let mut last = Box::pin(handle.push_low_priority("never".into()));
    assert!(is_pending(last.as_mut()).await);
    drop(queues);
    assert_eq!(last.await, Err(PushError::Closed));
}

/// Pushers on two threads wait, and some are cancelled. All queued frames arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_capacity_is_lost_under_concurrent_pushers() {
    let (mut queues, handle) = PushQueues::<String>::bounded(1, 3);
    let receiving = tokio::spawn(async move {
        let mut received = 0;
        while queues.recv().await.unwrap().1 != "end" {
            received += 1;
        }
        (queues, received)
    });
    let pushers = [0, 1, 2, 3].map(|pusher| {
        let handle = handle.clone();
        tokio::spawn(async move {
            let mut pushed = 0;
            for number in 0..2000 {
                let mut push = Box::pin(handle.push_low_priority("news".into()));
                let is_cancelled = (number + pusher) % 3 == 0;
                if !is_pending(push.as_mut()).await {
                    pushed += 1;
                } else if !is_cancelled {
                    push.await.unwrap();
                    pushed += 1;
                }
            }
            pushed
        })
    });
    let mut pushed = 0;
    for pusher in pushers {
        pushed += pusher.await.unwrap();
    }
    handle.push_low_priority("end".into()).await.unwrap();
    let (_queues, received) = receiving.await.unwrap();
    assert_eq!(received, pushed);
    let push_now = || handle.try_push("news".into(), PushPriority::Low, PushPolicy::ReturnErrorIfFull);
    assert_eq!([(); 4].map(|()| push_now()), [Ok(()), Ok(()), Ok(()), Err(PushError::QueueFull)]);
}

#[tokio::test]
async fn clear_slot_removes_all_frames_of_push_next() {
    let (mut queues, handle) = PushQueues::<String>::bounded(1, 4);
    for (slot, text) in [(1, "a"), (2, "b"), (1, "c"), (2, "d")] {
        handle.push_next(Slot(slot), text.into()).unwrap();
    }
    assert_eq!(handle.push_next(Slot(1), "e".into()), Err(PushError::QueueFull));
    let waiting = tokio::spawn({
        let handle = handle.clone();
        async move { handle.push_low_priority("f".into()).await }
    });
    tokio::task::yield_now().await;
    assert!(handle.clear_slot(Slot(1)) && !handle.clear_slot(Slot(1)));
    waiting.await.unwrap().unwrap();
    handle.push_next(Slot(1), "g".into()).unwrap();
    assert_eq!(handle.push_next(Slot(1), "h".into()), Err(PushError::QueueFull));
    for expected in ["b", "d", "f", "g"] {
        assert_eq!(queues.recv().await, Some((PushPriority::Low, expected.into())));
    }
    assert_eq!(handle.queued_bytes(), 0);
}

/// A cleared slot loses its position, and gets a new one when it is filled again.
#[tokio::test]
async fn cleared_frames_are_not_written() {
    let (mut queues, handle) = PushQueues::<String>::bounded(4, 4);
    assert!(!handle.clear_slot(Slot(1)));
    for slot in 1..=3 {
        handle.push_latest(Slot(slot), format!("old {slot}")).unwrap();
    }
    assert!(handle.clear_slot(Slot(1)) && !handle.clear_slot(Slot(1)));
    assert!(handle.clear_slot(Slot(2)));
    handle.push_latest(Slot(1), "new 1".into()).unwrap();
    handle.push_latest(Slot(1), "newer 1".into()).unwrap();
    for expected in ["old 3", "newer 1"] {
        assert_eq!(queues.recv().await.unwrap().1, expected);
    }
    assert_eq!(handle.queued_bytes(), 0);
    assert!(!handle.clear_slot(Slot(1)), "it is sent");
    drop(handle);
    assert!(queues.recv().await.is_none());
}

#[tokio::test]
async fn queued_bytes_counts_lanes_and_slots() {
    let (mut queues, handle) = PushQueues::<String>::bounded(4, 4);
    assert_eq!(handle.queued_bytes(), 0);
    handle.push_high_priority("1".into()).await.unwrap();
    handle.push_low_priority("22".into()).await.unwrap();
    handle.push_latest(Slot(1), "old".into()).unwrap();
    handle.push_latest(Slot(1), "4444".into()).unwrap();
    assert_eq!(handle.queued_bytes(), 7);
    assert!(handle.clear_slot(Slot(1)));
    assert_eq!(handle.queued_bytes(), 3);
    handle.push_latest(Slot(1), "55555".into()).unwrap();
    queues.recv().await.unwrap();
    assert_eq!(handle.queued_bytes(), 7);
    drop(queues);
    assert_eq!(handle.queued_bytes(), 0);
}

#[tokio::test]
async fn queued_bytes_except_excludes_the_frame_of_a_slot() {
    let (mut queues, handle) = PushQueues::bounded(4, 4);
    assert_eq!(handle.queued_bytes_except(Slot(1)), 0);
    push(&handle, "lane", PushPriority::Low).unwrap();
    handle.push_latest(Slot(1), frame("first")).unwrap();
    handle.push_latest(Slot(2), frame("second")).unwrap();
    let all = handle.queued_bytes();
    assert_eq!(all, "lanefirstsecond".len());
    assert_eq!(handle.queued_bytes_except(Slot(1)), all - "first".len());
    assert_eq!(handle.queued_bytes_except(Slot(2)), all - "second".len());
    assert_eq!(handle.queued_bytes_except(Slot(3)), all, "an empty slot excludes nothing");
    while handle.queued_bytes() > 0 {
        assert!(queues.recv().await.is_some());
    }
    assert_eq!(handle.queued_bytes_except(Slot(1)), 0);
}
