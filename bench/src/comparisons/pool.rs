//! The striped pool compared with hand-written alternatives.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidewire_bench::{Contender, CpuClock, Meter, Metric, Sample, Workload, available_cores, run_on_core};
use tidewire_pool::{Context, Handler, Key, Message, Overflow, Placement, Pool};
use tokio::runtime;
use tokio::sync::mpsc;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "pool",
    about: "The striped pool compared with crossbeam channels, a tokio task per key, and rayon without ordering",
    workloads,
    roles: &[],
};

/// The capacity in messages of the pool, or of all channels of a contender together.
const CAPACITY: usize = 65_536;
const KEYS: u64 = 10_000;

fn workloads(effort: Effort) -> Vec<Workload> {
    let (alone, many) = (effort.operations(1_000_000), effort.operations(1_000_000));
    vec![
        Workload {
            name: "pool-alone",
            about: format!(
                "{alone} messages with {KEYS} keys from one producer to one worker, with an empty handler. Producer and worker {}",
                if separate_cores().is_some() { "run on separate cores." } else { "share the only core." }
            ),
            operation: "message",
            metrics: &[Metric::Cpu, Metric::Throughput, Metric::Allocations],
            contenders: vec![
                Contender::new("crossbeam", move |meter| {
                    produce_on_separate_cores(meter, alone, || Channels::start(1, empty))
                }),
                Contender::new("pinned", move |meter| {
                    produce_on_separate_cores(meter, alone, || Ours(pool(Placement::Pinned, 1, empty_handler)))
                }),
                Contender::new("moving", move |meter| {
                    produce_on_separate_cores(meter, alone, || Ours(pool(Placement::Moving, 1, empty_handler)))
                }),
            ],
        },
        Workload {
            name: "pool-many",
            about: format!(
                "{many} messages with {KEYS} keys from four producers to two workers, with an empty handler."
            ),
            operation: "message",
            metrics: &[Metric::Throughput, Metric::Cpu, Metric::Allocations],
            contenders: vec![
                Contender::new("tokio task per key", move |meter| produce(meter, 4, many, &Tasks::<Dense>::start())),
                Contender::new("tokio task per key, hash map", move |meter| {
                    produce(meter, 4, many, &Tasks::<HashMap<Key, Mailbox>>::start())
                }),
                Contender::new("crossbeam", move |meter| produce(meter, 4, many, &Channels::start(2, empty))),
                Contender::new("rayon, no order", move |meter| produce(meter, 4, many, &Rayon::start())),
                Contender::new("pinned", move |meter| {
                    produce(meter, 4, many, &Ours(pool(Placement::Pinned, 2, empty_handler)))
                }),
                Contender::new("moving", move |meter| {
                    produce(meter, 4, many, &Ours(pool(Placement::Moving, 2, empty_handler)))
                }),
            ],
        },
        hot_key(effort),
        idle(effort),
    ]
}

/// A receiver of messages.
trait Sink<P>: Sync {
    fn send(&self, message: Message<P>);
    /// Waits until all messages have been taken from the queues. More messages may follow.
    fn drain(&self);
}

/// Returns a core for the producer and one for the worker, if there are two.
fn separate_cores() -> Option<(usize, usize)> {
    match available_cores().expect("the affinity of this thread can be read")[..] {
        [producer, worker, ..] => Some((producer, worker)),
        _ => None,
    }
}

/// Sends from one producer to one worker, pinned to separate cores. Whether they share a core has the largest effect on the result.
/// Without pinning, the scheduler would choose.
fn produce_on_separate_cores<S: Sink<u64> + Send>(
    meter: Meter,
    messages: u64,
    start: impl FnOnce() -> S + Send,
) -> Sample {
    let Some((producer, worker)) = separate_cores() else { return produce(meter, 1, messages, &start()) };
    // The worker inherits the affinity of the thread that starts it.
    let sink = run_on_core(worker, start).expect("a thread can be pinned to a core");
    run_on_core(producer, || produce(meter, 1, messages, &sink)).expect("a thread can be pinned to a core")
}

fn produce(meter: Meter, producers: u64, messages: u64, sink: &impl Sink<u64>) -> Sample {
    let send = |count: u64, first: u64| {
        // A step that is coprime to the number of keys visits all keys, in an order that does not favour the cache.
        for n in 0..count {
            let number = first + n;
            sink.send(Message::new(number.wrapping_mul(7919) % KEYS, number));
        }
    };
    // All buffers grow before the measurement.
    send(100_000, 0);
    sink.drain();
    meter.measure(messages, || {
        thread::scope(|scope| {
            for producer in 1..producers {
                scope.spawn(move || send(messages / producers, producer * messages));
            }
            send(messages - messages / producers * (producers - 1), 0);
        });
        sink.drain();
    })
}

#[expect(clippy::unnecessary_wraps, reason = "a handler returns a result")]
fn empty_handler(message: &mut Message<u64>, _: &mut Context<'_, u64>) -> Result<(), Infallible> {
    empty(message);
    Ok(())
}

fn empty(message: &mut Message<u64>) {
    black_box(message.payload);
}

fn pool<P: Send + 'static>(placement: Placement, workers: usize, handler: impl Handler<P>) -> Pool<P> {
    let builder = Pool::builder().workers(workers).placement(placement).messages(CAPACITY);
    builder.overflow(Overflow::Wait).start(handler).expect("the pool starts")
}

struct Ours<P: Send + 'static>(Pool<P>);

impl<P: Send + 'static> Sink<P> for Ours<P> {
    fn send(&self, message: Message<P>) {
        self.0.submit(message).expect("the pool is open");
    }

    fn drain(&self) {
        while self.0.depth() > 0 {
            thread::yield_now();
        }
    }
}

/// A typical hand-written solution: a bounded channel per worker, selected by the key modulo the number of workers.
struct Channels<P> {
    senders: Vec<crossbeam_channel::Sender<Message<P>>>,
    workers: Vec<JoinHandle<()>>,
}

impl<P: Send + 'static> Channels<P> {
    fn start(workers: usize, handler: impl Fn(&mut Message<P>) + Send + Sync + 'static) -> Self {
        let handler = Arc::new(handler);
        let worker = |_| {
            let (sender, receiver) = crossbeam_channel::bounded::<Message<P>>(CAPACITY / workers);
            let handler = Arc::clone(&handler);
            let thread = thread::spawn(move || {
                for mut message in receiver {
                    // A worker must survive a panic of its handler.
                    let _ = black_box(catch_unwind(AssertUnwindSafe(|| handler(&mut message))));
                }
            });
            (sender, thread)
        };
        let (senders, workers) = (0..workers).map(worker).unzip();
        Self { senders, workers }
    }
}

impl<P: Send + 'static> Sink<P> for Channels<P> {
    fn send(&self, message: Message<P>) {
        let worker = usize::try_from(message.key.0).expect("64 bits") % self.senders.len();
        assert!(self.senders[worker].send(message).is_ok(), "the worker is running");
    }

    fn drain(&self) {
        while self.senders.iter().any(|sender| !sender.is_empty()) {
            thread::yield_now();
        }
    }
}

impl<P> Drop for Channels<P> {
    fn drop(&mut self) {
        self.senders.clear();
        for worker in self.workers.drain(..) {
            worker.join().expect("a worker does not panic");
        }
    }
}

/// An actor per key: a tokio task with a channel, found through a [`Directory`].
struct Tasks<K> {
    keys: K,
    _runtime: runtime::Runtime,
}

type Mailbox = mpsc::Sender<Message<u64>>;

impl<K: FromIterator<(Key, Mailbox)>> Tasks<K> {
    fn start() -> Self {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime starts");
        let key = |key| {
            let (sender, mut receiver) = mpsc::channel::<Message<u64>>(16);
            runtime.spawn(async move {
                while let Some(mut message) = receiver.recv().await {
                    empty(&mut message);
                }
            });
            (Key(key), sender)
        };
        Self { keys: (0..KEYS).map(key).collect(), _runtime: runtime }
    }
}

/// Finds the channel of a key.
trait Directory {
    fn find(&self, key: Key) -> &Mailbox;
    fn all(&self) -> impl Iterator<Item = &Mailbox>;
}

/// A vector indexed by the key. The best case: real keys are rarely small and contiguous.
struct Dense(Vec<Mailbox>);

impl FromIterator<(Key, Mailbox)> for Dense {
    fn from_iter<I: IntoIterator<Item = (Key, Mailbox)>>(keys: I) -> Self {
        Self(keys.into_iter().map(|(_, mailbox)| mailbox).collect())
    }
}

impl Directory for Dense {
    fn find(&self, key: Key) -> &Mailbox {
        &self.0[usize::try_from(key.0).expect("64 bits")]
    }

    fn all(&self) -> impl Iterator<Item = &Mailbox> {
        self.0.iter()
    }
}

/// A hash map with arbitrary keys. Keys are never added or removed here, so it needs no lock.
impl Directory for HashMap<Key, Mailbox> {
    fn find(&self, key: Key) -> &Mailbox {
        &self[&key]
    }

    fn all(&self) -> impl Iterator<Item = &Mailbox> {
        self.values()
    }
}

impl<K: Directory + Sync> Sink<u64> for Tasks<K> {
    fn send(&self, message: Message<u64>) {
        self.keys.find(message.key).blocking_send(message).expect("the task is running");
    }

    fn drain(&self) {
        while self.keys.all().any(|key| key.capacity() < key.max_capacity()) {
            thread::yield_now();
        }
    }
}

/// An upper bound for a thread pool: neither ordered nor bounded.
struct Rayon {
    pool: rayon::ThreadPool,
    pending: Arc<AtomicU64>,
}

impl Rayon {
    fn start() -> Self {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool starts");
        Self { pool, pending: Arc::default() }
    }
}

impl Sink<u64> for Rayon {
    fn send(&self, mut message: Message<u64>) {
        self.pending.fetch_add(1, Relaxed);
        let pending = Arc::clone(&self.pending);
        self.pool.spawn(move || {
            empty(&mut message);
            pending.fetch_sub(1, Relaxed);
        });
    }

    fn drain(&self) {
        while self.pending.load(Relaxed) > 0 {
            thread::yield_now();
        }
    }
}

/// A message with the time of its submission.
#[derive(Clone, Copy)]
struct Timed {
    sent: Instant,
    is_slow: bool,
}

/// Measures how long other keys wait while every second message has a hot key, whose handler takes a millisecond.
fn hot_key(effort: Effort) -> Workload {
    let messages = effort.operations(60_000) / 100;
    let contender = |name, start: fn(Arc<Delays>) -> Box<dyn Sink<Timed>>| {
        Contender::new(name, move |meter| {
            let delays = Arc::new(Delays::default());
            let sink = start(Arc::clone(&delays));
            let sample = meter.measure(messages, || {
                for number in 0..messages / 2 {
                    // The worker of the hot key is busy most of the time, but keeps up.
                    thread::sleep(Duration::from_micros(1250));
                    let sent = Instant::now();
                    sink.send(Message::new(0, Timed { sent, is_slow: true }));
                    sink.send(Message::new(1 + number * 7919 % KEYS, Timed { sent, is_slow: false }));
                }
                sink.drain();
            });
            drop(sink);
            let delays = delays.0.lock().expect("the lock is not poisoned").clone();
            sample.with_latencies(delays)
        })
    };
    Workload {
        name: "pool-hot-key",
        about: format!(
            "{messages} messages to two workers, two every 1.25 ms: one with a hot key, whose handler takes 1 ms, and one with \
             one of {KEYS} other keys, whose handler returns immediately. A latency is the time from submission to handler of a \
             message with another key."
        ),
        operation: "message",
        metrics: &[Metric::LatencyP99, Metric::LatencyP50],
        contenders: vec![
            contender("crossbeam", |delays| Box::new(Channels::start(2, move |message| delays.handle(message)))),
            contender("pinned", |delays| Box::new(Ours(pool(Placement::Pinned, 2, delays.handler())))),
            contender("moving", |delays| Box::new(Ours(pool(Placement::Moving, 2, delays.handler())))),
        ],
    }
}

#[derive(Default)]
struct Delays(Mutex<Vec<Duration>>);

impl Delays {
    fn handle(&self, message: &mut Message<Timed>) {
        if message.payload.is_slow {
            thread::sleep(Duration::from_millis(1));
        } else {
            let delay = message.payload.sent.elapsed();
            self.0.lock().expect("the lock is not poisoned").push(delay);
        }
    }

    fn handler(self: Arc<Self>) -> impl Handler<Timed> {
        move |message: &mut Message<Timed>, _: &mut Context<'_, Timed>| {
            self.handle(message);
            Ok::<(), Infallible>(())
        }
    }
}

fn idle(effort: Effort) -> Workload {
    let time = Duration::from_millis(effort.operations(5_000));
    let contender = |name, placement| {
        Contender::new(name, move |meter| {
            let pool = pool(placement, 8, empty_handler);
            pool.submit(Message::new(1, 1)).expect("the pool is open");
            while pool.depth() > 0 {
                thread::yield_now();
            }
            // Workers spin for a moment before they sleep.
            thread::sleep(time / 50);
            let cpu = CpuClock::of_this_process();
            let before = cpu.now();
            let sample = meter.measure(1, || thread::sleep(time));
            let spent = cpu.now().saturating_sub(before);
            sample.with(Metric::IdleCpu, 100.0 * spent.as_secs_f64() / time.as_secs_f64())
        })
    };
    Workload {
        name: "pool-idle",
        about: format!("Eight idle workers, for {time:?}."),
        operation: "pool",
        metrics: &[Metric::IdleCpu],
        contenders: vec![contender("moving", Placement::Moving)],
    }
}
