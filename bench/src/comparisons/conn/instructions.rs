//! Instructions per request on a connection without pushes, counted by valgrind: an actor that supports pushes compared with loops
//! that do not.
//!
//! Valgrind counts instructions of the server process, not of the kernel. One server answers n requests and another 2n; the
//! difference excludes startup and shutdown.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tidewire_bench::{Contender, Metric, Sample, Workload};
use tidewire_testkit::Process;

use super::super::Effort;
use super::server::{self, FRAME_BYTES, ROLE};

/// The pause before a request. Long enough for the server to be idle again, even under valgrind.
const PAUSE: Duration = Duration::from_millis(1);

pub(super) fn without_pushes(effort: Effort) -> Workload {
    let requests = effort.operations(500);
    let contender = |name| {
        Contender::new(name, move |_| {
            let started = Instant::now();
            let (once, twice) = (instructions(name, requests), instructions(name, 2 * requests));
            // Only instructions are counted; the times are not used.
            let sample = Sample::new(requests, started.elapsed(), Duration::ZERO);
            sample.with_amount(Metric::Instructions, twice.saturating_sub(once))
        })
        .requires_program("valgrind")
    };
    Workload {
        name: "conn-push-unused",
        about: format!(
            "{requests} requests on one connection, one at a time, to a server with one thread that never pushes. Counts the \
             user-space instructions of the server process. Only tidewire-conn can push."
        ),
        operation: "request",
        metrics: &[Metric::Instructions],
        contenders: server::ALL.iter().map(|&(name, _)| contender(name)).collect(),
    }
}

/// Returns the instructions of a server that answers this number of requests.
fn instructions(name: &str, requests: u64) -> u64 {
    let server = ROLE.command(&[name.into(), "1".into()]);
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(server.get_program());
    valgrind.args(server.get_args());
    valgrind.envs(server.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut server = Process::spawn(valgrind);

    let mut socket = TcpStream::connect(server.wait_for_line("listening on ")).expect("the server accepts");
    socket.set_nodelay(true).expect("TCP_NODELAY can be set");
    let (request, mut reply) = (server::frames(1), [0; FRAME_BYTES]);
    for _ in 0..requests {
        thread::sleep(PAUSE);
        socket.write_all(&request).expect("the server reads");
        socket.read_exact(&mut reply).expect("the server answers");
        assert!(reply[..] == request, "the reply equals the request");
    }
    thread::sleep(PAUSE);
    server.terminate();
    server.wait();
    let counted = server.wait_for_line("Collected :");
    counted.trim().parse().unwrap_or_else(|_| panic!("cannot parse the instruction count of valgrind: {counted:?}"))
}
