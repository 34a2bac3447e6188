//! Reads from the client-side cache, and changes of values in it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tidewire_redis::resp::encode_command;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::yield_now;

use super::super::Effort;
use super::data::{CHANGING, KEYS, VALUE_BYTES, VALUES};
use super::load::{RuntimeKind, about_cores};
use super::peer::{CachingPeer, EXPECT_REPLY};
use super::server::{Server, get_calls};
use super::{fred, ours, raw_cache, redis_rs, rustis};

/// A current-thread runtime, so that the scheduler does not dominate the result.
const RUNTIME: RuntimeKind = RuntimeKind::CurrentThread;

pub(super) fn invalidation(server: &Rc<Server>, effort: Effort) -> Workload {
    let changes = effort.operations(600).max(1);
    Workload {
        name: "redis-invalidation",
        about: format!(
            "Another connection changes a value of {VALUE_BYTES} bytes that a reader has in its client-side cache. A latency is the time \
             from the write of the SET until a cached read returns the new value. The reader reads in a loop and yields to the \
             runtime after each read, on {}. fred has no cache: its reader keeps the value until it receives an invalidation, as \
             \"raw\" does. {}",
            RUNTIME.about(),
            about_cores(RUNTIME.core()),
        ),
        operation: "change",
        metrics: &[Metric::LatencyP50, Metric::LatencyP99, Metric::ServerCpu],
        contenders: vec![
            contender::<raw_cache::RawCache>(server, changes, measure_invalidation),
            contender::<ours::OurCache>(server, changes, measure_invalidation),
            contender::<redis_rs::RedisRsCache>(server, changes, measure_invalidation),
            contender::<fred::FredCache>(server, changes, measure_invalidation),
            contender::<rustis::RustisCache>(server, changes, measure_invalidation),
        ],
    }
}

pub(super) fn hit(server: &Rc<Server>, effort: Effort) -> Workload {
    let hits = effort.operations(300_000);
    Workload {
        name: "redis-cache-hit",
        about: format!(
            "GET of {VALUE_BYTES} bytes from the client-side cache, by one task on {}. fred is left out because it has no cache.",
            RUNTIME.about(),
        ),
        operation: "hit",
        metrics: &[Metric::Cpu, Metric::Throughput, Metric::Allocations],
        contenders: vec![
            contender::<ours::OurCache>(server, hits, measure_hits),
            contender::<redis_rs::RedisRsCache>(server, hits, measure_hits),
            contender::<rustis::RustisCache>(server, hits, measure_hits),
        ],
    }
}

/// Measures a number of operations of a client on a runtime.
type Measure<P> = fn(&Runtime, P, &Reading, Meter) -> Sample;

/// What a round does.
struct Reading {
    port: u16,
    operations: u64,
}

fn contender<P: CachingPeer>(server: &Rc<Server>, operations: u64, measure: Measure<P>) -> Contender {
    let server = server.clone();
    Contender::new(P::NAME, move |meter| {
        let (reading, cpu) = (Reading { port: server.port(), operations }, server.cpu());
        RUNTIME.run(RUNTIME.core(), move |runtime| {
            let client = runtime.block_on(P::connect(reading.port));
            let before = cpu.now();
            let sample = measure(runtime, client, &reading, meter);
            sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
        })
    })
    .requires_program("redis-server")
}

fn measure_invalidation<P: CachingPeer>(runtime: &Runtime, mut client: P, reading: &Reading, meter: Meter) -> Sample {
    let mut latencies = Vec::new();
    let mut writer = runtime.block_on(async {
        let mut writer = Writer::connect(reading.port).await;
        // The value must be in the cache before it changes: a client may keep an old reply that crosses the invalidation.
        writer.set().await;
        writer.confirm().await;
        client.cached_get(CHANGING).await;
        writer
    });
    let calls = get_calls(reading.port);
    let sample = meter.measure(reading.operations, || {
        runtime.block_on(async {
            for _ in 0..reading.operations {
                latencies.push(writer.change(&mut client).await);
            }
        });
    });
    let calls = get_calls(reading.port) - calls;
    assert_eq!(calls, reading.operations, "{} reads each new value once and then has it in its cache", P::NAME);
    sample.with_latencies(latencies)
}

fn measure_hits<P: CachingPeer>(runtime: &Runtime, mut client: P, reading: &Reading, meter: Meter) -> Sample {
    let mut read = |times: u64| {
        runtime.block_on(async {
            for _ in 0..times {
                assert!(*client.cached_get(&KEYS[0]).await == *VALUES[0].as_bytes(), "the value was cached");
            }
        });
    };
    read(1000);
    let calls = get_calls(reading.port);
    let sample = meter.measure(reading.operations, || read(reading.operations));
    assert_eq!(get_calls(reading.port), calls, "{} answers from its cache", P::NAME);
    sample
}

/// A connection that changes the value.
struct Writer {
    stream: TcpStream,
    /// The number of changes so far.
    changes: usize,
    output: BytesMut,
}

impl Writer {
    async fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        Self { stream, changes: 0, output: BytesMut::new() }
    }

    /// Changes the value. Returns the time until the client returns the new one.
    async fn change(&mut self, client: &mut impl CachingPeer) -> Duration {
        let start = Instant::now();
        let value = self.set().await;
        while *client.cached_get(CHANGING).await != *value.as_bytes() {
            yield_now().await;
        }
        let latency = start.elapsed();
        self.confirm().await;
        latency
    }

    /// Sends a command that sets the next value. Returns the value.
    async fn set(&mut self) -> &'static str {
        let value = &VALUES[self.changes % VALUES.len()];
        self.changes += 1;
        self.output.clear();
        encode_command(&["SET", CHANGING, value], &mut self.output);
        self.stream.write_all(&self.output).await.expect(EXPECT_REPLY);
        value
    }

    /// Waits for the reply to the command.
    async fn confirm(&mut self) {
        let mut reply = [0; b"+OK\r\n".len()];
        self.stream.read_exact(&mut reply).await.expect(EXPECT_REPLY);
        assert!(reply == *b"+OK\r\n", "the server stores the value");
    }
}
