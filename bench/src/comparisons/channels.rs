//! Bounded channels from one or several producers to one consumer: the base cost of a message between threads.

use std::hint::black_box;
use std::sync::mpsc::sync_channel;
use std::thread;

use tidewire_bench::{Contender, Meter, Metric, Sample, Workload};
use tokio::runtime;
use tokio::sync::mpsc;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "channels",
    about: "Bounded channels of tokio, crossbeam, flume and std, from one and from four producers",
    workloads,
    roles: &[],
};

/// The capacity of a channel in messages.
const CAPACITY: usize = 1024;

fn workloads(effort: Effort) -> Vec<Workload> {
    vec![
        workload("one-producer", "one producer", 1, effort.operations(2_000_000)),
        workload("four-producers", "four producers", 4, effort.operations(2_000_000)),
    ]
}

fn workload(name: &'static str, from: &str, producers: u64, messages: u64) -> Workload {
    let load = Load { producers, messages };
    Workload {
        name,
        about: format!(
            "{messages} integers through a channel with a capacity of {CAPACITY}, from {from} to one consumer. Producers and \
             consumer are threads or, for \"tokio tasks\", tasks on a runtime with two workers."
        ),
        operation: "message",
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::Allocations],
        contenders: vec![
            Contender::new("tokio tasks", move |meter| load.over_tasks(meter)),
            Contender::new("tokio blocking", move |meter| {
                let (sender, mut receiver) = mpsc::channel(CAPACITY);
                load.over_threads(
                    meter,
                    sender,
                    |sender, n| sender.blocking_send(n).is_ok(),
                    || receiver.blocking_recv(),
                )
            }),
            Contender::new("crossbeam", move |meter| {
                let (sender, receiver) = crossbeam_channel::bounded(CAPACITY);
                load.over_threads(meter, sender, |sender, n| sender.send(n).is_ok(), || receiver.recv().ok())
            }),
            Contender::new("flume", move |meter| {
                let (sender, receiver) = flume::bounded(CAPACITY);
                load.over_threads(meter, sender, |sender, n| sender.send(n).is_ok(), || receiver.recv().ok())
            }),
            Contender::new("std", move |meter| {
                let (sender, receiver) = sync_channel(CAPACITY);
                load.over_threads(meter, sender, |sender, n| sender.send(n).is_ok(), || receiver.recv().ok())
            }),
        ],
    }
}

#[derive(Clone, Copy)]
struct Load {
    producers: u64,
    /// The messages of all producers together; a multiple of `producers`.
    messages: u64,
}

impl Load {
    fn over_threads<S: Clone + Send>(
        self,
        meter: Meter,
        sender: S,
        send: impl Fn(&S, u64) -> bool + Copy + Send,
        mut receive: impl FnMut() -> Option<u64>,
    ) -> Sample {
        meter.measure(self.messages, || {
            thread::scope(|scope| {
                for _ in 0..self.producers {
                    let sender = sender.clone();
                    scope.spawn(move || assert!((0..self.messages / self.producers).all(|n| send(&sender, n))));
                }
                drop(sender);
                let mut count = 0;
                while let Some(message) = receive() {
                    black_box(message);
                    count += 1;
                }
                assert_eq!(count, self.messages);
            });
        })
    }

    fn over_tasks(self, meter: Meter) -> Sample {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime starts");
        let (sender, mut receiver) = mpsc::channel(CAPACITY);
        let consumer = async move {
            let mut count = 0;
            while let Some(message) = receiver.recv().await {
                black_box(message);
                count += 1;
            }
            count
        };
        meter.measure(self.messages, || {
            for _ in 0..self.producers {
                let sender = sender.clone();
                runtime.spawn(async move {
                    for n in 0..self.messages / self.producers {
                        sender.send(n).await.expect("the consumer outlives the producers");
                    }
                });
            }
            drop(sender);
            // Spawned, because the thread that blocks on the runtime is not one of its workers.
            let count = runtime.block_on(runtime.spawn(consumer)).expect("the consumer does not panic");
            assert_eq!(count, self.messages);
        })
    }
}
