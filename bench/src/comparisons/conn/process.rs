//! An echo server in a separate process, so that its memory and CPU time exclude its clients.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tidewire_bench::{CpuClock, pin_process};
use tidewire_testkit::Process;

use super::super::resident_bytes;
use super::raise_file_limit;
use super::server::EchoProtocol;

/// An echo server and the client side of its connections.
pub(crate) struct EchoProcess {
    // Dropped first, so that the clients close the connections.
    connections: Vec<TcpStream>,
    process: Process,
    addr: String,
    protocol: EchoProtocol,
}

impl EchoProcess {
    /// Starts the server with this name, with a file limit for this number of connections.
    pub(crate) fn start(protocol: EchoProtocol, name: &str, connections: usize) -> Self {
        raise_file_limit(2 * connections);
        let process = protocol.role.start(&[name.into(), connections.to_string()]);
        let addr = process.wait_for_line("listening on ");
        Self { connections: Vec::new(), process, addr, protocol }
    }

    /// Pins the server to a core.
    pub(crate) fn pin(&self, core: usize) {
        pin_process(self.process.pid(), core).expect("a process can be pinned");
    }

    /// Opens this number of connections, and exchanges one request and reply on each.
    pub(crate) fn open(&mut self, connections: usize) {
        let (request, expected) = (self.protocol.exchange)(1);
        let mut reply = vec![0; expected.len()];
        for _ in 0..connections {
            let mut socket = TcpStream::connect(&self.addr).expect("the server accepts");
            (self.protocol.handshake)(&mut socket);
            socket.write_all(&request).expect("the server reads");
            socket.read_exact(&mut reply).expect("the server answers");
            assert!(reply == expected, "the reply equals the request");
            self.connections.push(socket);
        }
    }

    /// Takes the open connections.
    pub(crate) fn take_connections(&mut self) -> Vec<TcpStream> {
        std::mem::take(&mut self.connections)
    }

    /// Returns the CPU clock of the server.
    pub(crate) fn cpu(&self) -> CpuClock {
        CpuClock::of(self.process.pid()).expect("the server is running")
    }

    /// Returns the resident memory of the server in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        resident_bytes(self.process.pid())
    }
}
