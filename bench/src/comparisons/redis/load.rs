//! Tasks that share a connection, each waiting for its reply before it sends the next request.

use tidewire_bench::{CpuClock, Meter, Metric, Sample, run_on_core};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::super::conn::separate_cores;
use super::data::{KEYS, LARGE, LARGE_VALUE, LIST, PIPELINE_COMMANDS, VALUE_BYTES, VALUES, are_values};
use super::peer::Peer;
use super::server::Server;

/// Tasks that send requests over one connection.
#[derive(Clone, Copy)]
pub(super) struct Load {
    pub(super) command: Command,
    pub(super) tasks: usize,
    pub(super) runtime: RuntimeKind,
    /// Requests per task.
    pub(super) requests_per_task: u64,
}

/// The kind of request.
#[derive(Clone, Copy)]
pub(super) enum Command {
    Get,
    Set,
    Pipeline,
    ListRange,
    MultiGet,
    GetLarge,
}

/// The runtime of the tasks.
#[derive(Clone, Copy)]
pub(super) enum RuntimeKind {
    TwoThreads,
    CurrentThread,
}

impl Load {
    pub(super) fn about(self) -> String {
        let Self { tasks, .. } = self;
        let what = match self.command {
            Command::Get => format!("GET of {VALUE_BYTES} bytes"),
            Command::Set => format!("SET of {VALUE_BYTES} bytes"),
            Command::Pipeline => format!("A pipeline of {PIPELINE_COMMANDS} GETs of {VALUE_BYTES} bytes"),
            Command::ListRange => format!("LRANGE of {} elements of {VALUE_BYTES} bytes", VALUES.len()),
            Command::MultiGet => format!("MGET of {} values of {VALUE_BYTES} bytes", VALUES.len()),
            Command::GetLarge => "GET of 1 MiB".into(),
        };
        let who = if tasks == 1 { "one task".into() } else { format!("{tasks} tasks on one connection") };
        let (on, cores) = (self.runtime.about(), about_cores(self.core()));
        format!("{what} by {who}, on {on}. {cores}")
    }

    pub(super) fn operations(self) -> u64 {
        self.requests_per_task * self.tasks as u64
    }

    /// Returns the core to pin the load to. A single task never runs at the same time as the server, so the scheduler might place both
    /// on one core, which is several times as fast and would dominate the result.
    fn core(self) -> Option<usize> {
        if self.tasks == 1 { load_core() } else { self.runtime.core() }
    }

    /// Runs a round on a new runtime.
    pub(super) fn run(self, round: impl FnOnce(&Runtime) -> Sample + Send) -> Sample {
        self.runtime.run(self.core(), round)
    }
}

impl RuntimeKind {
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::TwoThreads => "a runtime with two threads",
            Self::CurrentThread => "a current-thread runtime",
        }
    }

    /// Returns the core to pin the load to.
    pub(super) fn core(self) -> Option<usize> {
        match self {
            Self::TwoThreads => None,
            Self::CurrentThread => load_core(),
        }
    }

    /// Runs a round on a new runtime, on this core or on any.
    pub(super) fn run(self, core: Option<usize>, round: impl FnOnce(&Runtime) -> Sample + Send) -> Sample {
        let run = move || {
            let mut builder = match self {
                Self::TwoThreads => Builder::new_multi_thread(),
                Self::CurrentThread => Builder::new_current_thread(),
            };
            let runtime = builder.worker_threads(2).enable_all().build().expect("a runtime starts");
            round(&runtime)
        };
        match core {
            // The threads of the runtime inherit the affinity of the thread that starts it.
            Some(core) => run_on_core(core, run).expect("the load can be pinned to a core"),
            None => run(),
        }
    }
}

/// Returns the core for the load, if there is one beside that of the server.
fn load_core() -> Option<usize> {
    separate_cores().map(|(core, _)| core)
}

/// Describes the cores of load and server.
pub(super) fn about_cores(core: Option<usize>) -> &'static str {
    match core {
        Some(_) => "Load and server run on separate cores.",
        None => "The server is pinned to one core; the load may use all cores.",
    }
}

impl Command {
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
        measure(runtime, &client, load, cpu, meter)
    })
}

/// Measures the load with a client that is connected.
pub(super) fn measure<P: Peer>(runtime: &Runtime, client: &P, load: Load, cpu: CpuClock, meter: Meter) -> Sample {
    // Warm up: open the connection and let buffers grow.
    runtime.block_on(run_tasks(client, Load { requests_per_task: load.requests_per_task.div_ceil(20), ..load }));
    let before = cpu.now();
    let sample = meter.measure(load.operations(), || runtime.block_on(run_tasks(client, load)));
    sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
}

async fn run_tasks<P: Peer>(client: &P, load: Load) {
    let mut tasks = JoinSet::new();
    for number in 0..load.tasks {
        let mut client = client.clone();
        tasks.spawn(async move {
            for _ in 0..load.requests_per_task {
                request(&mut client, load.command, number).await;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no task panics");
    }
}

async fn request<P: Peer>(client: &mut P, command: Command, number: usize) {
    let is_expected = match command {
        Command::Get => *client.get(&KEYS[number]).await == *VALUES[number].as_bytes(),
        Command::Set => {
            client.set(&KEYS[number], &VALUES[number]).await;
            true
        }
        Command::Pipeline => are_values(&client.pipeline(&KEYS[..PIPELINE_COMMANDS]).await, PIPELINE_COMMANDS),
        Command::ListRange => are_values(&client.list_range(LIST).await, VALUES.len()),
        Command::MultiGet => are_values(&client.multi_get(&KEYS).await, VALUES.len()),
        Command::GetLarge => client.get(LARGE).await.len() == LARGE_VALUE.len(),
    };
    assert!(is_expected, "{} returned an unexpected reply", P::NAME);
}
