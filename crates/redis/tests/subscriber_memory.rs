//! Memory of subscriptions that are not read, measured by a counting allocator.

use tidewire_redis::pubsub::{Event, SubscribeOptions};
use tidewire_redis::{Client, Options, commands};
use tidewire_testkit::{CountingAllocator, PATIENCE, RedisServer, wait_until_async};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Tolerance for buffers of the connections and of the runtime.
const SLACK_BYTES: usize = 4 << 20;

#[tokio::test]
async fn memory_of_a_slow_subscriber_is_limited() {
    let server = RedisServer::start();
    let client = Client::start(Options::default().address(server.addr()).timeout(PATIENCE));
    let limited = SubscribeOptions::default().max_messages(usize::MAX).max_bytes(1 << 20);
    let mut large = client.subscribe(["large"]).await.unwrap();
    let slow = client.subscribe_with(["small", "bulk"], limited).await.unwrap();
    client.send(commands::publish("large", "")).await.unwrap();
    large.next().await;
    let before = ALLOCATOR.live_bytes();

    // A small message arrives together with large ones, whose memory it must not keep.
    let payload = "x".repeat(40_000);
    for _ in 0..1000 {
        client.send(commands::publish("small", "y")).await.unwrap();
        client.send(commands::publish("large", &payload)).await.unwrap();
        let received = large.next().await;
        assert!(matches!(&received, Some(Ok(Event::Message(message))) if message.payload == payload), "{received:?}");
    }
    let growth = ALLOCATOR.live_bytes().saturating_sub(before);
    assert!(growth < SLACK_BYTES, "{growth} bytes for 1000 small messages");
    assert_eq!(slow.dropped(), 0);

    // A hundred times the limit.
    for _ in 0..2600 {
        client.send(commands::publish("bulk", &payload)).await.unwrap();
    }
    wait_until_async("all are read", PATIENCE, async || client.stats().pubsub.messages == 1 + 2 * 1000 + 2600).await;
    let growth = ALLOCATOR.live_bytes().saturating_sub(before);
    assert!(growth < SLACK_BYTES, "{growth} bytes for a limit of 1 MiB");
    assert!(slow.dropped() > 3500, "{}", slow.dropped());

    // A message that was much larger than the input of an idle connection, and that was dropped.
    drop(slow);
    client.send(commands::publish("large", "x".repeat(12 << 20))).await.unwrap();
    assert!(matches!(large.next().await, Some(Ok(Event::Message(message))) if message.payload.len() == 12 << 20));
    client.send(commands::publish("large", "")).await.unwrap();
    large.next().await;
    wait_until_async("the memory is freed", PATIENCE, async || {
        ALLOCATOR.live_bytes().saturating_sub(before) < SLACK_BYTES
    })
    .await;
}
