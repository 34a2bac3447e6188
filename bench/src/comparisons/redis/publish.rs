//! Messages to many local subscriptions of one channel.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_redis::resp::encode_command;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::super::Effort;
use super::data::{CHANNEL, VALUE_BYTES, VALUES};
use super::load::{RuntimeKind, about_cores};
use super::peer::{EXPECT_REPLY, Subscriber};
use super::server::Server;
use super::{fred, ours, raw_subscriber, redis_rs, rustis};

const SUBSCRIPTIONS: usize = 100;
/// Messages that are published in one write when throughput is measured. As many as the channel of fred holds by default.
const BATCH: usize = 32;

/// The reply of the server to `PUBLISH`: one connection has received the message.
const REPLY: &[u8] = b":1\r\n";

/// The messages of a round.
#[derive(Clone, Copy)]
struct Messages {
    /// Published one after the other, to measure latency.
    single: usize,
    /// Batches, to measure throughput.
    batches: usize,
}

pub(super) fn workload(name: &'static str, server: &Rc<Server>, runtime: RuntimeKind, effort: Effort) -> Workload {
    let count = |full| usize::try_from(effort.operations(full)).expect("64 bits").max(1);
    let messages = Messages { single: count(400), batches: count(25) };
    Workload {
        name,
        about: format!(
            "Messages of {VALUE_BYTES} bytes to {SUBSCRIPTIONS} subscriptions of one channel, each a task, on {}. Another connection \
             publishes; it is the same for all. A latency is the time from the write of one message until the last subscription has \
             received it, with no other message under way. The other columns are of batches of {BATCH} messages, each counted once per subscription. \"raw\", redis-rs and \
             rustis have one stream of messages, which a tokio broadcast channel distributes. {}",
            runtime.about(),
            about_cores(runtime.core()),
        ),
        operation: "message",
        metrics: &[Metric::LatencyP50, Metric::LatencyP99, Metric::Throughput, Metric::Cpu, Metric::Allocations],
        contenders: vec![
            contender::<raw_subscriber::RawSubscriber>(server, runtime, messages),
            contender::<ours::OurSubscriber>(server, runtime, messages),
            contender::<redis_rs::RedisRsSubscriber>(server, runtime, messages),
            contender::<fred::FredSubscriber>(server, runtime, messages),
            contender::<rustis::RustisSubscriber>(server, runtime, messages),
        ],
    }
}

fn contender<S: Subscriber>(server: &Rc<Server>, kind: RuntimeKind, messages: Messages) -> Contender {
    let server = server.clone();
    Contender::new(S::NAME, move |meter| {
        let port = server.port();
        kind.run(kind.core(), move |runtime| round::<S>(runtime, port, messages, meter))
    })
    .requires_program("redis-server")
}

fn round<S: Subscriber>(runtime: &Runtime, port: u16, messages: Messages, meter: Meter) -> Sample {
    let (sender, received) = mpsc::channel(1);
    let pending = Arc::new(Pending { deliveries: AtomicUsize::new(0), received: sender });
    let publisher = runtime.block_on(async {
        for subscription in S::subscribe(port, CHANNEL, SUBSCRIPTIONS).await {
            tokio::spawn(receive(subscription, Arc::clone(&pending)));
        }
        Publisher::connect(port, pending, received).await
    });
    let mut publisher = Some(publisher);
    let mut publish = |rounds: usize, batch: usize| {
        let mut moved = publisher.take().expect("the publisher is put back after each call");
        // Spawned, because the thread that blocks on the runtime may not be one of its workers.
        let published = async {
            let latencies = async move {
                let mut latencies = Vec::with_capacity(rounds);
                for _ in 0..rounds {
                    latencies.push(moved.publish(batch).await);
                }
                (moved, latencies)
            };
            tokio::spawn(latencies).await.expect(EXPECT_REPLY)
        };
        let (moved, latencies) = runtime.block_on(published);
        publisher = Some(moved);
        latencies
    };
    publish(messages.batches.div_ceil(5), BATCH);
    let latencies = publish(messages.single, 1);
    let deliveries = messages.batches * BATCH * SUBSCRIPTIONS;
    let sample = meter.measure(deliveries as u64, || publish(messages.batches, BATCH));
    sample.with_latencies(latencies)
}

/// Deliveries that the publisher waits for.
struct Pending {
    deliveries: AtomicUsize,
    /// Sends the time of the last delivery.
    received: mpsc::Sender<Instant>,
}

async fn receive<S: Subscriber>(mut subscription: S, pending: Arc<Pending>) {
    for expected in VALUES.iter().cycle() {
        let payload = subscription.receive().await;
        assert!(*payload == *expected.as_bytes(), "{} lost or changed a message", S::NAME);
        if pending.deliveries.fetch_sub(1, Ordering::AcqRel) == 1 {
            pending.received.try_send(Instant::now()).expect("the publisher waits");
        }
    }
}

struct Publisher {
    stream: TcpStream,
    /// The number of messages published so far.
    published: usize,
    output: BytesMut,
    pending: Arc<Pending>,
    received: mpsc::Receiver<Instant>,
}

impl Publisher {
    async fn connect(port: u16, pending: Arc<Pending>, received: mpsc::Receiver<Instant>) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        Self { stream, published: 0, output: BytesMut::new(), pending, received }
    }

    /// Publishes messages in one write. Returns the time from the write to the last delivery.
    async fn publish(&mut self, count: usize) -> Duration {
        self.output.clear();
        for _ in 0..count {
            encode_command(&["PUBLISH", CHANNEL, &VALUES[self.published % VALUES.len()]], &mut self.output);
            self.published += 1;
        }
        self.pending.deliveries.store(count * SUBSCRIPTIONS, Ordering::Release);
        let start = Instant::now();
        self.stream.write_all(&self.output).await.expect(EXPECT_REPLY);
        let last = self.received.recv().await.expect("the subscriptions are open");
        let mut reply = [0; REPLY.len()];
        for _ in 0..count {
            self.stream.read_exact(&mut reply).await.expect(EXPECT_REPLY);
            assert!(reply == *REPLY, "all subscriptions share one connection");
        }
        last.duration_since(start)
    }
}
