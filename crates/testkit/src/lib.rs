//! The test kit of Tidewire: real servers, real faults, real kills.
//!
//! * [`RedisServer`]: a real `redis-server` on a port of its own, which can be stopped, killed, paused and restarted.
//! * [`FaultProxy`]: a TCP proxy that delays, throttles, cuts, goes silent and refuses.
//! * [`Process`]: a child process that a test kills; [`rerun`] makes one from a test of the same binary.
//! * [`CountingAllocator`]: counts the bytes that a test binary holds.
//! * [`wait_until`], [`wait_until_async`]: wait for a condition instead of for time.
//!
//! Every process started here dies with the process that started it, also when that one panics, aborts or is killed. Processes
//! that it forks itself are not tracked.
//!
//! Nothing returns an error: a failure is for the reader of the test's output, so it panics with a message that says what was
//! expected and what to do.
//!
//! ```
//! use std::{io::Read, net::TcpStream, time::Duration};
//! use tidewire_testkit::{Cut, Direction, Faults, FaultProxy, RedisServer};
//!
//! let redis = RedisServer::start();
//! assert_eq!(redis.cli(["SET", "greeting", "hello"]), "OK");
//!
//! // The first three bytes of whatever the server says come through, then the connection ends.
//! let proxy = FaultProxy::start(redis.addr());
//! proxy.inject(Faults { cut: Some(Cut::after(3, Direction::ToClient)), ..Faults::default() });
//!
//! let mut client = TcpStream::connect(proxy.addr()).unwrap();
//! std::io::Write::write_all(&mut client, b"GET greeting\r\n").unwrap();
//! let mut heard = Vec::new();
//! client.read_to_end(&mut heard).unwrap();
//! assert_eq!(heard, b"$5\r");
//! ```

#[cfg(not(target_os = "linux"))]
compile_error!("tidewire-testkit needs Linux: it ties children to their parent with PR_SET_PDEATHSIG and reads /proc");

mod certificates;
mod memory;
mod port;
mod process;
mod proxy;
mod redis;
mod wait;

pub use certificates::Certificates;
pub use memory::CountingAllocator;
pub use port::Port;
pub use process::{Process, is_rerun, is_running, rerun};
pub use proxy::{Cut, Direction, End, FaultProxy, Faults};
pub use redis::{RedisOptions, RedisServer};
pub use wait::{PATIENCE, wait_until, wait_until_async};
