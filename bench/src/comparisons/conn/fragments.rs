//! Latency of an urgent push during a stream of large frames, compared with a push to an idle connection.
//!
//! The pusher shares the only thread of the server with the connection. The runtime checks its timers after every task poll:
//! otherwise the pusher would wait until the socket is full. The receiver only reads, on another thread. The written bytes are parsed
//! into frames, to record when the last byte of each urgent frame was written.

use std::io::{IoSlice, Read as _};
use std::net;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidewire_bench::{Contender, Metric, Sample, Workload, run_on_core};
use tidewire_conn::codec::{FragmentOptions, Fragmented, LengthDelimited, LengthDelimitedOptions};
use tidewire_conn::{Frame, Supervisor};
use tokio::runtime;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::super::Effort;
use super::latency::{ObservedSocket, PushProtocol, WriteObserver, pair, serve_one};
use super::separate_cores;
use super::server::BODY_BYTES;

/// The length of a frame of the stream.
const LARGE_FRAME_BYTES: usize = 8 << 20;
/// The limit of the push buffer.
const MAX_QUEUED_BYTES: usize = 4 * LARGE_FRAME_BYTES;
const PUSH_INTERVAL: Duration = Duration::from_millis(1);

pub(super) fn push(effort: Effort) -> Workload {
    let (frames, pushes) = (effort.operations(128), effort.operations(500));
    Workload {
        name: "conn-fragmented-push",
        about: format!(
            "An urgent push of {BODY_BYTES} bytes every {PUSH_INTERVAL:?}: {pushes} pushes to an idle connection, or pushes during \
             a stream of {frames} frames of 8 MiB. A latency is the time from the return of the push to the return of the \
             write. The receiver reads as fast as it can{}.",
            if separate_cores().is_some() { ", on another core" } else { "" }
        ),
        operation: "push",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50],
        contenders: vec![
            Contender::new("idle", move |_| run(fragmented, Background::Idle { pushes })),
            Contender::new("during fragments", move |_| run(fragmented, Background::Stream { frames })),
            Contender::new("during whole frames", move |_| run(unfragmented, Background::Stream { frames })),
        ],
    }
}

type FragmentedCodec = Fragmented<LengthDelimited>;

fn fragmented() -> FragmentedCodec {
    Fragmented::new(LengthDelimited::default(), FragmentOptions::default())
}

/// Returns the same codec with fragments as large as the frames.
fn unfragmented() -> FragmentedCodec {
    let inner = LengthDelimited::new(LengthDelimitedOptions::default().max_frame(2 * LARGE_FRAME_BYTES));
    Fragmented::new(inner.expect("four bytes are enough"), FragmentOptions::default().fragment_bytes(LARGE_FRAME_BYTES))
}

/// The other traffic of the connection, which determines the length of a round.
#[derive(Clone, Copy)]
enum Background {
    Idle { pushes: u64 },
    Stream { frames: u64 },
}

fn run(codec: fn() -> FragmentedCodec, background: Background) -> Sample {
    let (load_core, server_core) = separate_cores().unzip();
    let round = move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().event_interval(1).build();
        runtime.expect("a runtime starts").block_on(async {
            let (socket, receiver) = pair();
            let reading = thread::spawn(move || run_on_core(load_core.unwrap_or(0), || read_all(receiver)));
            let log = SharedFrameLog::default();
            let server = Supervisor::builder(PushProtocol::new(codec)).push_bytes(MAX_QUEUED_BYTES);
            let handle = serve_one(server, ObservedSocket { socket, observer: log.clone() }).await;

            if let Background::Stream { frames } = background {
                let (handle, large) = (handle.clone(), Frame::from(Bytes::from(vec![b'.'; LARGE_FRAME_BYTES])));
                tokio::spawn(async move {
                    for _ in 0..frames {
                        handle.push_low_priority(large.clone()).await.expect("the connection is open");
                    }
                });
            }
            let urgent = Frame::from(Bytes::from_static(&[b'!'; BODY_BYTES]));
            let mut pushed = Vec::new();
            let mut ticks = interval(PUSH_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let started = Instant::now();
            while match background {
                Background::Idle { pushes } => (pushed.len() as u64) < pushes,
                Background::Stream { frames } => log.lock().streamed < frames * LARGE_FRAME_BYTES as u64,
            } {
                ticks.tick().await;
                handle.push_high_priority(urgent.clone()).await.expect("the connection is open");
                pushed.push(Instant::now());
            }
            while log.lock().urgent.len() < pushed.len() {
                sleep(PUSH_INTERVAL).await;
            }
            let elapsed = started.elapsed();
            handle.close(None);

            let received = tokio::task::spawn_blocking(|| reading.join().expect("the receiver does not panic"));
            let received = received.await.expect("the blocking task does not panic").expect("a thread can be pinned");
            let log = log.lock();
            assert_eq!(received, log.bytes, "all written bytes are received");
            let delays = pushed.iter().zip(&log.urgent).map(|(pushed, written)| written.duration_since(*pushed));
            // Only the latencies are used; the CPU time is not measured.
            Sample::new(pushed.len() as u64, elapsed, Duration::ZERO).with_latencies(delays.collect())
        })
    };
    run_on_core(server_core.unwrap_or(0), round).expect("a thread can be pinned")
}

/// Reads to the end of the stream and returns the number of bytes. The buffer is small enough for the CPU cache.
fn read_all(mut receiver: net::TcpStream) -> u64 {
    let (mut buffer, mut bytes) = (vec![0; 64 << 10], 0);
    loop {
        match receiver.read(&mut buffer).expect("the server closes the connection") {
            0 => return bytes,
            length => bytes += length as u64,
        }
    }
}

#[derive(Clone, Default)]
struct SharedFrameLog(Arc<Mutex<FrameLog>>);

impl SharedFrameLog {
    fn lock(&self) -> MutexGuard<'_, FrameLog> {
        self.0.lock().expect("the lock is not poisoned")
    }
}

impl WriteObserver for SharedFrameLog {
    fn on_write(&mut self, slices: &[IoSlice<'_>], mut count: usize) {
        let now = Instant::now();
        let mut frames = self.lock();
        for slice in slices {
            let written = &slice[..slice.len().min(count)];
            count -= written.len();
            frames.record(written, now);
        }
    }
}

/// Parses the written bytes into frames with a length prefix.
#[derive(Default)]
struct FrameLog {
    bytes: u64,
    /// Payload bytes of frames that are not urgent.
    streamed: u64,
    /// The times when urgent frames were written.
    urgent: Vec<Instant>,
    /// The bytes of the current length prefix that have been written.
    prefix: Vec<u8>,
    /// Bytes of the current frame that have not been written.
    left: usize,
    /// Whether the current frame is urgent.
    is_urgent: bool,
}

impl FrameLog {
    /// The length of an urgent frame: a byte for the fragment flags, and the body.
    const URGENT_FRAME_BYTES: usize = 1 + BODY_BYTES;

    fn record(&mut self, mut written: &[u8], now: Instant) {
        self.bytes += written.len() as u64;
        while !written.is_empty() {
            if self.left == 0 {
                let (some, rest) = written.split_at(written.len().min(4 - self.prefix.len()));
                self.prefix.extend_from_slice(some);
                written = rest;
                if let Ok(length) = <[u8; 4]>::try_from(&self.prefix[..]) {
                    self.left = u32::from_be_bytes(length) as usize;
                    self.is_urgent = self.left == Self::URGENT_FRAME_BYTES;
                    self.prefix.clear();
                }
                continue;
            }
            let some = self.left.min(written.len());
            written = &written[some..];
            self.left -= some;
            match (self.is_urgent, self.left) {
                (true, 0) => self.urgent.push(now),
                (true, _) => {}
                (false, _) => self.streamed += some as u64,
            }
        }
    }
}
