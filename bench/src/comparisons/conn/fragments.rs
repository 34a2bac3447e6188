//! How soon an urgent push is written beside a stream of large frames, compared with a push to an idle connection.
//!
//! The pusher shares the server's one thread with the connection. That thread checks its timers after every turn: otherwise the
//! pusher would wait until the socket is full. The receiver has another thread, and only reads. The bytes are followed frame by
//! frame, to see when the last byte of each urgent frame has been written.

use std::io::{IoSlice, Read as _};
use std::net;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidewire_bench::{Contender, Metric, Sample, Workload, on_core};
use tidewire_conn::codec::{FragmentOptions, Fragmented, LengthDelimited, LengthDelimitedOptions};
use tidewire_conn::{Frame, Supervisor};
use tokio::runtime;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::super::Effort;
use super::apart;
use super::latency::{Pushed, Watched, Watcher, pair, push_to};
use super::server::BODY;

/// A frame of the stream.
const LARGE: usize = 8 << 20;
/// What may wait of it.
const QUEUED: usize = 4 * LARGE;
const PAUSE: Duration = Duration::from_millis(1);

pub(super) fn push(effort: Effort) -> Workload {
    let (frames, pushes) = (effort.operations(128), effort.operations(500));
    Workload {
        name: "conn-fragmented-push",
        about: format!(
            "An urgent push of {BODY} bytes every {PAUSE:?}, beside {frames} frames of 8 MiB or {pushes} times beside nothing: \
             from the return of the push to that of the write. The receiver reads as fast as it can{}.",
            if apart().is_some() { ", on another core" } else { "" }
        ),
        operation: "push",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50],
        contenders: vec![
            Contender::new("idle", move |_| run(fragmented, Beside::Nothing { pushes })),
            Contender::new("beside fragments", move |_| run(fragmented, Beside::Stream { frames })),
            Contender::new("beside whole frames", move |_| run(whole, Beside::Stream { frames })),
        ],
    }
}

type Cut = Fragmented<LengthDelimited>;

fn fragmented() -> Cut {
    Fragmented::new(LengthDelimited::default(), FragmentOptions::default())
}

/// The same bytes, but for the fragments.
fn whole() -> Cut {
    let inner = LengthDelimited::new(LengthDelimitedOptions::default().max_frame(2 * LARGE));
    Fragmented::new(inner.expect("four bytes are enough"), FragmentOptions::default().fragment_bytes(LARGE))
}

/// What else is written, and thereby for how long.
#[derive(Clone, Copy)]
enum Beside {
    Nothing { pushes: u64 },
    Stream { frames: u64 },
}

fn run(codec: fn() -> Cut, beside: Beside) -> Sample {
    let (load_core, server_core) = apart().unzip();
    let round = move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().event_interval(1).build();
        runtime.expect("a runtime starts").block_on(async {
            let (socket, receiver) = pair();
            let reading = thread::spawn(move || on_core(load_core.unwrap_or(0), || read_all(receiver)));
            let seen = Seen::default();
            let server = Supervisor::builder(Pushed::new(codec)).push_bytes(QUEUED);
            let handle = push_to(server, Watched { socket, watcher: seen.clone() }).await;

            if let Beside::Stream { frames } = beside {
                let (handle, large) = (handle.clone(), Frame::from(Bytes::from(vec![b'.'; LARGE])));
                tokio::spawn(async move {
                    for _ in 0..frames {
                        handle.push_low_priority(large.clone()).await.expect("the connection lives");
                    }
                });
            }
            let urgent = Frame::from(Bytes::from_static(&[b'!'; BODY]));
            let mut pushed = Vec::new();
            let mut ticks = interval(PAUSE);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let started = Instant::now();
            while match beside {
                Beside::Nothing { pushes } => (pushed.len() as u64) < pushes,
                Beside::Stream { frames } => seen.lock().streamed < frames * LARGE as u64,
            } {
                ticks.tick().await;
                handle.push_high_priority(urgent.clone()).await.expect("the connection lives");
                pushed.push(Instant::now());
            }
            while seen.lock().urgent.len() < pushed.len() {
                sleep(PAUSE).await;
            }
            let elapsed = started.elapsed();
            handle.close(None);

            let received = tokio::task::spawn_blocking(|| reading.join().expect("the receiver does not panic"));
            let received = received.await.expect("somebody waits for it").expect("a thread can be pinned");
            let seen = seen.lock();
            assert_eq!(received, seen.bytes, "what was written arrives");
            let delays = pushed.iter().zip(&seen.urgent).map(|(pushed, written)| written.duration_since(*pushed));
            // Nothing was timed but the pushes.
            Sample::new(pushed.len() as u64, elapsed, Duration::ZERO).with_latencies(delays.collect())
        })
    };
    on_core(server_core.unwrap_or(0), round).expect("a thread can be pinned")
}

/// How many bytes there are. The buffer is one that stays in the cache.
fn read_all(mut receiver: net::TcpStream) -> u64 {
    let (mut buffer, mut bytes) = (vec![0; 64 << 10], 0);
    loop {
        match receiver.read(&mut buffer).expect("the server ends in order") {
            0 => return bytes,
            length => bytes += length as u64,
        }
    }
}

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Frames>>);

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Frames> {
        self.0.lock().expect("nobody panics")
    }
}

impl Watcher for Seen {
    fn written(&mut self, slices: &[IoSlice<'_>], mut count: usize) {
        let now = Instant::now();
        let mut frames = self.lock();
        for slice in slices {
            let written = &slice[..slice.len().min(count)];
            count -= written.len();
            frames.follow(written, now);
        }
    }
}

/// The frames that have been written, each behind its length.
#[derive(Default)]
struct Frames {
    bytes: u64,
    /// The bytes of those that are not urgent, without their lengths.
    streamed: u64,
    /// When urgent ones were written.
    urgent: Vec<Instant>,
    /// The length, as far as it has been written.
    prefix: Vec<u8>,
    /// What is missing of the frame whose length has been written, and whether it is urgent.
    left: usize,
    is_urgent: bool,
}

impl Frames {
    /// An urgent frame: a byte that says it is whole, and its body.
    const URGENT: usize = 1 + BODY;

    fn follow(&mut self, mut written: &[u8], now: Instant) {
        self.bytes += written.len() as u64;
        while !written.is_empty() {
            if self.left == 0 {
                let (some, rest) = written.split_at(written.len().min(4 - self.prefix.len()));
                self.prefix.extend_from_slice(some);
                written = rest;
                if let Ok(length) = <[u8; 4]>::try_from(&self.prefix[..]) {
                    self.left = u32::from_be_bytes(length) as usize;
                    self.is_urgent = self.left == Self::URGENT;
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
