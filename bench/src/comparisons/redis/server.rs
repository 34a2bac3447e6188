//! The redis-server of the comparison.

use std::cell::LazyCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tidewire_bench::{CpuClock, pin_process};
use tidewire_testkit::RedisServer;

use super::super::conn::separate_cores;
use super::data;

/// A redis-server with data, started in the first round. It is pinned to its own core if there are two.
pub(super) struct Server(LazyCell<RunningServer>);

struct RunningServer {
    redis: RedisServer,
    cpu: CpuClock,
}

impl Server {
    pub(super) fn new() -> Self {
        Self(LazyCell::new(|| {
            let redis = RedisServer::start();
            if let Some((_, core)) = separate_cores() {
                pin_process(redis.pid(), core).expect("redis-server can be pinned to a core");
            }
            fill(redis.port());
            let cpu = CpuClock::of(redis.pid()).expect("redis-server has a CPU clock");
            RunningServer { redis, cpu }
        }))
    }

    pub(super) fn port(&self) -> u16 {
        self.0.redis.port()
    }

    pub(super) fn cpu(&self) -> CpuClock {
        self.0.cpu
    }
}

/// Returns a field of a section of `INFO`, if it is there.
pub(super) fn info(port: u16, section: &str, field: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("redis-server accepts");
    stream.write_all(format!("INFO {section}\r\nQUIT\r\n").as_bytes()).expect("redis-server reads");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("redis-server replies");
    let mut fields = reply.lines().filter_map(|line| line.split_once(':'));
    fields.find(|&(name, _)| name == field).map(|(_, value)| value.to_owned())
}

/// Returns how often the server has executed `GET`.
pub(super) fn get_calls(port: u16) -> u64 {
    let Some(statistics) = info(port, "commandstats", "cmdstat_get") else { return 0 };
    let calls = statistics.strip_prefix("calls=").and_then(|rest| rest.split(',').next());
    calls.and_then(|calls| calls.parse().ok()).expect("the statistics of a command begin with its calls")
}

fn fill(port: u16) {
    let (commands, count) = data::commands();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("redis-server accepts");
    stream.write_all(&commands).expect("redis-server reads");
    // Each reply is one line: `+OK` or the length of the list.
    let (mut replies, mut input) = (0, [0; 4096]);
    while replies < count {
        let read = stream.read(&mut input).expect("redis-server replies");
        assert!(read > 0 && !input[..read].contains(&b'-'), "redis-server stores the data");
        replies += input[..read].split(|&byte| byte == b'\n').count() - 1;
    }
}
