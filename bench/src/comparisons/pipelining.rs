//! The effect of pipelining on one raw connection to a redis-server, at several depths. The ratio is known to be large, so this
//! also checks the harness.

use std::cell::LazyCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::rc::Rc;

use tidewire_bench::{Contender, CpuClock, Meter, Metric, Sample, Workload, available_cores, pin_process, run_on_core};
use tidewire_testkit::RedisServer;

use super::{Comparison, Effort};

pub(crate) const COMPARISON: Comparison = Comparison {
    name: "pipelining",
    about: "PING to a redis-server over one raw connection, at depth 1, 16 and 128",
    workloads,
    roles: &[],
};

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

fn workloads(effort: Effort) -> Vec<Workload> {
    let cores = Cores::choose();
    // Shared by the contenders and started in the first round.
    let server = Rc::new(LazyCell::new(move || Server::start(cores)));
    let contender = |name, depth, pings| {
        let (server, batches) = (server.clone(), effort.operations(pings) / depth);
        Contender::new(name, move |meter| server.ping(meter, depth, batches)).requires_program("redis-server")
    };
    vec![Workload {
        name: "redis-ping",
        about: format!(
            "PING over one TCP connection, with one write per batch. The next batch follows when all replies have arrived. {}",
            match cores {
                Some(Cores { load, server }) => format!("The load runs on core {load}, the server on core {server}."),
                None => "Load and server share the only core.".into(),
            }
        ),
        operation: "ping",
        metrics: &[Metric::Throughput, Metric::Cpu, Metric::ServerCpu],
        contenders: vec![
            contender("depth 1", 1, 6_400),
            contender("depth 16", 16, 64_000),
            contender("depth 128", 128, 256_000),
        ],
    }]
}

/// The cores of load and server, on a machine with at least two.
#[derive(Clone, Copy)]
struct Cores {
    load: usize,
    server: usize,
}

impl Cores {
    fn choose() -> Option<Self> {
        match available_cores().expect("the affinity of this thread can be read")[..] {
            [load, server, ..] => Some(Self { load, server }),
            _ => None,
        }
    }
}

struct Server {
    redis: RedisServer,
    cpu: CpuClock,
    cores: Option<Cores>,
}

impl Server {
    fn start(cores: Option<Cores>) -> Self {
        let redis = RedisServer::start();
        if let Some(cores) = cores {
            pin_process(redis.pid(), cores.server).expect("redis-server can be pinned to a core");
        }
        let cpu = CpuClock::of(redis.pid()).expect("redis-server has a CPU clock");
        Self { redis, cpu, cores }
    }

    fn ping(&self, meter: Meter, depth: u64, batches: u64) -> Sample {
        let (port, cpu) = (self.redis.port(), self.cpu);
        let round = move || {
            let mut connection = Connection::open(port, depth);
            connection.exchange();
            let before = cpu.now();
            let sample = meter.measure(depth * batches, || (0..batches).for_each(|_| connection.exchange()));
            sample.with_time(Metric::ServerCpu, cpu.now().saturating_sub(before))
        };
        match self.cores {
            Some(cores) => run_on_core(cores.load, round).expect("the load can be pinned to a core"),
            None => round(),
        }
    }
}

struct Connection {
    stream: TcpStream,
    batch: Vec<u8>,
    replies: Vec<u8>,
    expected: Vec<u8>,
}

impl Connection {
    fn open(port: u16, depth: u64) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("redis-server accepts");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        let depth = usize::try_from(depth).expect("a depth is small");
        let expected = PONG.repeat(depth);
        Self { stream, batch: PING.repeat(depth), replies: vec![0; expected.len()], expected }
    }

    fn exchange(&mut self) {
        self.stream.write_all(&self.batch).expect("redis-server reads");
        self.stream.read_exact(&mut self.replies).expect("redis-server replies");
        assert!(self.replies == self.expected, "redis-server answers PING with PONG");
    }
}
