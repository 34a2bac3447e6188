//! Tasks that share a connection, each waiting for its reply before it sends the next request.

use tidewire_bench::{Meter, Metric, Sample, on_core};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::super::conn::apart;
use super::data::{KEYS, LARGE, LARGE_VALUE, LENGTH, LIST, PIPELINE, VALUES, are_values};
use super::peer::Peer;
use super::server::Server;

#[derive(Clone, Copy)]
pub(super) struct Load {
    pub(super) task: Task,
    pub(super) tasks: usize,
    pub(super) runs: Runs,
    /// How often each task asks.
    pub(super) turns: u64,
}

/// What is asked.
#[derive(Clone, Copy)]
pub(super) enum Task {
    Get,
    Set,
    Pipeline,
    ListRange,
    MultiGet,
    GetLarge,
}

/// What the tasks run on.
#[derive(Clone, Copy)]
pub(super) enum Runs {
    TwoThreads,
    CurrentThread,
}

impl Load {
    pub(super) fn about(self) -> String {
        let Self { tasks, .. } = self;
        let what = match self.task {
            Task::Get => format!("GET of {LENGTH} bytes"),
            Task::Set => format!("SET of {LENGTH} bytes"),
            Task::Pipeline => format!("A pipeline of {PIPELINE} GETs of {LENGTH} bytes"),
            Task::ListRange => format!("LRANGE of {} elements of {LENGTH} bytes", VALUES.len()),
            Task::MultiGet => format!("MGET of {} values of {LENGTH} bytes", VALUES.len()),
            Task::GetLarge => "GET of 1 MiB".into(),
        };
        let who = if tasks == 1 { "one task".into() } else { format!("{tasks} tasks on one connection") };
        let on = match self.runs {
            Runs::TwoThreads => "a runtime of two threads",
            Runs::CurrentThread => "a current-thread runtime",
        };
        let cores = match self.core() {
            Some(_) => "Load and server have a core each.",
            None => "The server keeps to one core, the load may use all.",
        };
        let raw = if tasks == 1 { "" } else { " \"raw\" sends as many commands in one write as there are tasks." };
        format!("{what} by {who}, on {on}. {cores}{raw}")
    }

    pub(super) fn operations(self) -> u64 {
        self.turns * self.tasks as u64
    }

    /// The core that the load keeps to, so that it leaves the server's alone. A task by itself is never at work while the server
    /// is: by chance it would share its core, which is several times as fast, and nothing else would be measured.
    fn core(self) -> Option<usize> {
        let keeps = matches!(self.runs, Runs::CurrentThread) || self.tasks == 1;
        apart().filter(|_| keeps).map(|(core, _)| core)
    }

    /// Does a round on a new runtime.
    pub(super) fn run(self, round: impl FnOnce(&Runtime) -> Sample + Send) -> Sample {
        let run = move || {
            let mut builder = match self.runs {
                Runs::TwoThreads => Builder::new_multi_thread(),
                Runs::CurrentThread => Builder::new_current_thread(),
            };
            let runtime = builder.worker_threads(2).enable_all().build().expect("a runtime starts");
            round(&runtime)
        };
        match self.core() {
            // The threads of the runtime inherit the core of the one that starts it.
            Some(core) => on_core(core, run).expect("the load can be pinned to a core"),
            None => run(),
        }
    }
}

impl Task {
    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Get | Self::GetLarge => "GET",
            Self::Set => "SET",
            Self::Pipeline => "pipeline",
            Self::ListRange => "LRANGE",
            Self::MultiGet => "MGET",
        }
    }
}

pub(super) fn round<P: Peer>(server: &Server, load: Load, meter: Meter) -> Sample {
    let (port, cpu) = (server.port(), server.cpu());
    load.run(move |runtime| {
        let client = runtime.block_on(P::connect(port));
        // Buffers have grown and the connection is open before it counts.
        runtime.block_on(all(&client, Load { turns: load.turns.div_ceil(20), ..load }));
        let before = cpu.now();
        let sample = meter.measure(load.operations(), || runtime.block_on(all(&client, load)));
        sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
    })
}

async fn all<P: Peer>(client: &P, load: Load) {
    let mut tasks = JoinSet::new();
    for number in 0..load.tasks {
        let mut client = client.clone();
        tasks.spawn(async move {
            for _ in 0..load.turns {
                turn(&mut client, load.task, number).await;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("a task gets its replies");
    }
}

async fn turn<P: Peer>(client: &mut P, task: Task, number: usize) {
    let is_right = match task {
        Task::Get => *client.get(&KEYS[number]).await == *VALUES[number].as_bytes(),
        Task::Set => {
            client.set(&KEYS[number], &VALUES[number]).await;
            true
        }
        Task::Pipeline => are_values(&client.pipeline(&KEYS[..PIPELINE]).await, PIPELINE),
        Task::ListRange => are_values(&client.list_range(LIST).await, VALUES.len()),
        Task::MultiGet => are_values(&client.multi_get(&KEYS).await, VALUES.len()),
        Task::GetLarge => client.get(LARGE).await.len() == LARGE_VALUE.len(),
    };
    assert!(is_right, "{} got another reply", P::NAME);
}
