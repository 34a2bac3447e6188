//! Tools for tests: real servers, network faults and child processes.
//!
//! * [`RedisServer`]: a real `redis-server` on a port of its own, which can be stopped, killed, paused and restarted. The environment
//!   variable `TIDEWIRE_TEST_SERVER` chooses Valkey or another program instead: see [`ServerProgram`].
//! * [`FaultProxy`]: a TCP proxy that delays, throttles, cuts, stalls and refuses connections.
//! * [`Process`]: a child process that a test kills; [`rerun`] makes one from a test of the same binary.
//! * [`rerun_in_own_network`]: runs a test in a network namespace, where it can [lose all packets](set_loopback).
//! * [`CountingAllocator`]: counts the bytes that a test binary holds.
//! * [`wait_until`], [`wait_until_async`]: wait for a condition, not for time.
//!
//! Every process started here ends with the process that started it, even if that one panics, aborts or is killed. Processes that it
//! forks itself are not tracked.
//!
//! Nothing returns an error: a failure panics, with a message that says what was expected and what to do.
//!
//! ```
//! use std::{io::Read, net::TcpStream, time::Duration};
//! use tidewire_testkit::{Cut, Direction, Faults, FaultProxy, RedisServer};
//!
//! let redis = RedisServer::start();
//! assert_eq!(redis.cli(["SET", "greeting", "hello"]), "OK");
//!
//! // The connection is closed after three bytes from the server.
//! let proxy = FaultProxy::start(redis.addr());
//! proxy.inject(Faults::default().cut(Cut::after(3, Direction::ToClient)));
//!
//! let mut client = TcpStream::connect(proxy.addr()).unwrap();
//! std::io::Write::write_all(&mut client, b"GET greeting\r\n").unwrap();
//! let mut received = Vec::new();
//! client.read_to_end(&mut received).unwrap();
//! assert_eq!(received, b"$5\r");
//! ```

#[cfg(not(target_os = "linux"))]
compile_error!("tidewire-testkit needs Linux: it ties children to their parent with PR_SET_PDEATHSIG and reads /proc");

mod certificates;
mod memory;
mod network;
mod port;
mod process;
mod program;
mod proxy;
mod redis;
mod wait;

pub use certificates::Certificates;
pub use memory::CountingAllocator;
pub use network::{rerun_in_own_network, set_loopback};
pub use port::Port;
pub use process::{Process, is_rerun, is_running, rerun};
pub use program::ServerProgram;
pub use proxy::{CloseMode, Cut, Direction, FaultProxy, Faults};
pub use redis::{RedisOptions, RedisServer};
pub use wait::{PATIENCE, wait_until, wait_until_async};
