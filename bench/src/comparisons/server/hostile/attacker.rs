//! A connection that always has the same number of requests in flight.

use std::io::{self, BufReader, Read, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use tidewire_testkit::PATIENCE;

use super::super::client::{self, Client};
use super::attack::{Frame, Requests};

/// The number of requests in flight.
pub(super) const IN_FLIGHT: usize = 16;

/// Niceness of the threads of this client. It shares a core with the ordinary clients, whose latency must not include its CPU time.
const NICENESS: i32 = 10;

/// Number of bytes at the start of a reply that are stored. A subscription id is within them.
const HEAD_BYTES: usize = 128;

/// A running attack. Two threads: one writes requests, the other reads replies and discards them.
pub(super) struct Attacker {
    socket: TcpStream,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

impl Attacker {
    /// Connects, and returns after the first reply.
    pub(super) fn start(address: &str, mut requests: Requests) -> Self {
        let socket = Client::connect_tidewire(address).into_socket();
        let clone = || socket.try_clone().expect("a socket can be cloned");
        let (frames, pending) = sync_channel(IN_FLIGHT);
        for _ in 0..IN_FLIGHT {
            frames.send(requests.next()).expect("the channel has this capacity");
        }
        let (input, output) = (BufReader::with_capacity(64 << 10, clone()), clone());
        let (first_reply, received) = sync_channel(1);
        let writer = thread::spawn(move || write(output, &pending));
        let reader = thread::spawn(move || read(input, requests, &frames, &first_reply));
        received.recv_timeout(PATIENCE).expect("the server replies to the hostile client");
        Self { socket, reader, writer }
    }

    /// Disconnects.
    ///
    /// # Panics
    ///
    /// If the connection has already ended, because the load has then ended too.
    pub(super) fn stop(self) {
        assert!(!self.reader.is_finished(), "the server closed the connection of the hostile client");
        // Fails if the server closes the connection at the same time.
        let _ = self.socket.shutdown(Shutdown::Both);
        for thread in [self.reader, self.writer] {
            thread.join().expect("no thread of the hostile client panics");
        }
    }
}

/// Writes requests until the connection or the channel is closed.
fn write(mut output: TcpStream, frames: &Receiver<Frame>) {
    lower_priority();
    while let Ok(frame) = frames.recv() {
        if output.write_all(&frame).is_err() {
            return;
        }
    }
}

/// Reads replies until the connection is closed, and passes a request to the writer after each.
fn read(mut input: impl Read, mut requests: Requests, frames: &SyncSender<Frame>, first_reply: &SyncSender<()>) {
    lower_priority();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    while read_head(&mut input, &mut head).is_ok() {
        // A push begins with its subscription.
        if !head.starts_with(br#"{"id":"#) {
            continue;
        }
        if frames.send(requests.after(&head)).is_err() {
            return;
        }
        // The receiver waits for the first reply only, so later sends fail.
        let _ = first_reply.try_send(());
    }
}

/// Reads a message, and stores its first bytes in `head`.
fn read_head(input: &mut impl Read, head: &mut Vec<u8>) -> io::Result<()> {
    let header = client::read_header(input)?;
    let (_, payload) = client::lengths(&header).expect("the header is complete");
    head.resize(payload.min(HEAD_BYTES), 0);
    input.read_exact(head)?;
    let rest = (payload - head.len()) as u64;
    let discarded = io::copy(&mut input.take(rest), &mut io::sink())?;
    if discarded < rest { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// Lowers the priority of this thread. On Linux, other threads of the process are not affected.
fn lower_priority() {
    rustix::process::setpriority_process(None, NICENESS).expect("a thread can lower its priority");
}
