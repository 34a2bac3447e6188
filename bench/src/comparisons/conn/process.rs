//! An echo server in a process of its own, so that its memory and its CPU can be told from those of its clients.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tidewire_bench::{CpuClock, pin_process};
use tidewire_testkit::Process;

use super::super::resident;
use super::allow_files;
use super::server::Dialect;

/// A server and its connections.
pub(crate) struct EchoProcess {
    // Dropped first, so that it is the clients who leave.
    connections: Vec<TcpStream>,
    process: Process,
    addr: String,
    dialect: Dialect,
}

impl EchoProcess {
    /// Starts the server of this name, for so many connections.
    pub(crate) fn start(dialect: Dialect, name: &str, connections: usize) -> Self {
        allow_files(2 * connections);
        let process = dialect.role.start(&[name.into(), connections.to_string()]);
        let addr = process.wait_for_line("listening on ");
        Self { connections: Vec::new(), process, addr, dialect }
    }

    /// Keeps it on this core.
    pub(crate) fn pin(&self, core: usize) {
        pin_process(self.process.pid(), core).expect("a process can be pinned");
    }

    /// Opens so many more connections, and has one request answered on each.
    pub(crate) fn open(&mut self, connections: usize) {
        let (request, expected) = (self.dialect.exchange)(1);
        let mut reply = vec![0; expected.len()];
        for _ in 0..connections {
            let mut socket = TcpStream::connect(&self.addr).expect("the server accepts");
            (self.dialect.greet)(&mut socket);
            socket.write_all(&request).expect("the server reads");
            socket.read_exact(&mut reply).expect("the server answers");
            assert!(reply == expected, "an echo is what was sent");
            self.connections.push(socket);
        }
    }

    /// The connections that are open, for whoever wants to use them.
    pub(crate) fn take_connections(&mut self) -> Vec<TcpStream> {
        std::mem::take(&mut self.connections)
    }

    /// Runs while it does.
    pub(crate) fn cpu(&self) -> CpuClock {
        CpuClock::of(self.process.pid()).expect("the server lives")
    }

    /// Its resident memory in bytes.
    pub(crate) fn resident(&self) -> u64 {
        resident(self.process.pid())
    }
}
