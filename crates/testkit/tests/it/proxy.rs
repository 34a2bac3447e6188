use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};

use tidewire_testkit::{CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, Port, wait_until};

/// A listener behind a proxy. The test accepts the connections.
struct Server {
    listener: TcpListener,
    proxy: FaultProxy,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = FaultProxy::start(listener.local_addr().unwrap());
        Self { listener, proxy }
    }

    fn addr(&self) -> SocketAddr {
        self.proxy.addr()
    }

    /// Connects through the proxy. Returns both ends.
    fn connect(&self) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(self.addr()).unwrap();
        (client, self.listener.accept().unwrap().0)
    }
}

fn read_all(stream: &mut TcpStream) -> (Vec<u8>, std::io::Result<usize>) {
    let mut all = Vec::new();
    let end = stream.read_to_end(&mut all);
    (all, end)
}

fn expect(stream: &mut TcpStream, bytes: &[u8]) {
    let mut received = vec![0; bytes.len()];
    stream.read_exact(&mut received).unwrap();
    assert_eq!(received, bytes);
}

fn is_silent(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let is_silent = matches!((&mut &*stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
    is_silent
}

#[test]
fn forwards_bytes_and_half_close_without_faults() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    let megabytes: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();

    let (sent, mut sender) = (megabytes.clone(), client.try_clone().unwrap());
    let sending = thread::spawn(move || {
        sender.write_all(&sent).unwrap();
        sender.shutdown(Shutdown::Write).unwrap();
    });
    assert!(read_all(&mut served).0 == megabytes);
    sending.join().unwrap();

    served.write_all(b"still here").unwrap();
    drop(served);
    assert_eq!(read_all(&mut client).0, b"still here");
    assert_eq!(server.proxy.forwarded_bytes(Direction::ToServer), 5_000_000);
    assert_eq!(server.proxy.forwarded_bytes(Direction::ToClient), 10);
    drop(client);
    wait_until("the connection is no longer counted", PATIENCE, || server.proxy.open_connections() == 0);
    assert_eq!(server.proxy.accepted_connections(), 1);
}

#[test]
fn cuts_at_exactly_the_nth_byte_in_either_direction() {
    let server = Server::start();
    for after in [0, 1, 7, 16 * 1024, 100_000] {
        for direction in [Direction::ToServer, Direction::ToClient] {
            server.proxy.inject(Faults::default().cut(Cut::after(after, direction)));
            let (client, served) = server.connect();
            let (mut sender, mut receiver) = match direction {
                Direction::ToServer => (client, served),
                Direction::ToClient => (served, client),
            };
            receiver.write_all(b"not counted").unwrap();
            expect(&mut sender, b"not counted");
            // The sender may notice while it still writes.
            let sending =
                thread::spawn(move || sender.write_all(&vec![b'x'; 200_000]).and_then(|()| sender.read(&mut [0])));
            let (received, end) = read_all(&mut receiver);
            assert_eq!(received.len() as u64, after);
            end.expect("an orderly end");
            drop(receiver);
            assert!(matches!(sending.join().unwrap(), Ok(0) | Err(_)), "the sender's side ended too");
        }
    }
}

#[test]
fn a_cut_counts_from_its_injection() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    client.write_all(b"before").unwrap();
    expect(&mut served, b"before");
    server.proxy.inject(Faults::default().cut(Cut::after(3, Direction::ToServer)));
    client.write_all(b"afterwards").unwrap();
    assert_eq!(read_all(&mut served).0, b"aft");
}

#[test]
fn both_sides_see_a_reset() {
    let server = Server::start();
    let cut = Cut::after(1, Direction::ToServer).mode(CloseMode::Reset);
    server.proxy.inject(Faults::default().cut(cut));
    let (mut client, mut served) = server.connect();
    client.write_all(b"xyz").unwrap();
    for side in [&mut client, &mut served] {
        assert_eq!(read_all(side).1.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn all_connections_are_cut_on_demand() {
    let server = Server::start();
    let mut pairs: Vec<_> = (0..5).map(|_| server.connect()).collect();
    server.proxy.cut(CloseMode::Graceful);
    for (client, served) in &mut pairs {
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        assert_eq!(served.read(&mut [0]).unwrap(), 0);
    }
    let (mut client, mut served) = server.connect();
    client.write_all(b"a new one works").unwrap();
    expect(&mut served, b"a new one works");
}

#[test]
fn half_open_stalls_bytes_and_closes_until_healed() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    server.proxy.inject(Faults::default().half_open(true));

    client.write_all(b"into the void").unwrap();
    drop(client);
    let mut late = TcpStream::connect(server.addr()).expect("the kernel still accepts");
    late.write_all(b"so is this").unwrap();
    wait_until("the proxy has accepted the late connection", PATIENCE, || server.proxy.accepted_connections() == 2);
    assert!(is_silent(&served));
    assert_eq!(server.proxy.forwarded_bytes(Direction::ToServer), 0);

    server.proxy.heal();
    assert_eq!(read_all(&mut served).0, b"into the void");
    expect(&mut server.listener.accept().unwrap().0, b"so is this");
}

#[test]
fn half_open_exerts_backpressure() {
    let server = Server::start();
    let (client, mut served) = server.connect();
    let faults = Faults::default().half_open(true);
    server.proxy.inject(faults);
    client.set_nonblocking(true).unwrap();
    let chunk = vec![0; 64 * 1024];
    let mut written = 0;
    let full = loop {
        match (&mut &client).write(&chunk) {
            Ok(length) => written += length,
            Err(error) => break error,
        }
        assert!(written < 100 << 20, "the half-open proxy keeps reading");
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    // Each command wakes the proxy, which would forward any bytes it sees.
    (0..10).for_each(|_| server.proxy.inject(faults));
    assert_eq!(server.proxy.forwarded_bytes(Direction::ToServer), 0);
    assert_eq!((&mut &client).write(&chunk).unwrap_err().kind(), ErrorKind::WouldBlock);

    server.proxy.heal();
    drop(client);
    assert_eq!(read_all(&mut served).0.len(), written);
}

#[test]
fn refuses_new_connections_and_keeps_the_old() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    for _ in 0..3 {
        server.proxy.inject(Faults::default().refuse(true));
        assert_eq!(TcpStream::connect(server.addr()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        client.write_all(b"old").unwrap();
        expect(&mut served, b"old");
        server.proxy.heal();
        let _new = server.connect();
    }
}

#[test]
fn faults_apply_to_pending_connections() {
    let server = Server::start();
    for _ in 0..20 {
        let mut kept = TcpStream::connect(server.addr()).unwrap();
        server.proxy.inject(Faults::default().refuse(true));
        kept.write_all(b"let in before").unwrap();
        expect(&mut server.listener.accept().unwrap().0, b"let in before");
        server.proxy.heal();
    }
    for _ in 0..20 {
        let mut ended = TcpStream::connect(server.addr()).unwrap();
        server.proxy.cut(CloseMode::Reset);
        assert_eq!(read_all(&mut ended).1.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn a_dead_server_resets_the_client() {
    let unused = Port::reserve();
    let proxy = FaultProxy::start(unused.addr());
    let mut client = TcpStream::connect(proxy.addr()).unwrap();
    assert_eq!(read_all(&mut client).1.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Only lower bounds are checked: a loaded machine is never too fast.
#[test]
fn delay_and_throttle_are_applied() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();

    let delay = Duration::from_millis(50);
    server.proxy.inject(Faults::default().delay(delay));
    let start = Instant::now();
    client.write_all(b"ping").unwrap();
    expect(&mut served, b"ping");
    served.write_all(b"pong").unwrap();
    expect(&mut client, b"pong");
    assert!(start.elapsed() >= 2 * delay);

    server.proxy.inject(Faults::default().bytes_per_second(NonZeroU64::new(100_000).unwrap()));
    let start = Instant::now();
    client.write_all(&[b'x'; 10_000]).unwrap();
    expect(&mut served, &[b'x'; 10_000]);
    // The pause for the last piece of 10 ms comes after the piece has arrived.
    assert!(start.elapsed() >= Duration::from_millis(90));

    server.proxy.heal();
}

#[test]
fn delayed_bytes_arrive_in_order() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    server.proxy.inject(Faults::default().delay(Duration::from_millis(20)));
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 253) as u8).collect();
    let expected = sent.clone();
    let sending = thread::spawn(move || client.write_all(&sent).map(|()| client));
    expect(&mut served, &expected);
    sending.join().unwrap().unwrap();
}

#[test]
fn healing_releases_delayed_bytes() {
    let server = Server::start();
    let (mut client, mut served) = server.connect();
    let faults = Faults::default().delay(Duration::from_hours(1));
    server.proxy.inject(faults);
    client.write_all(b"late").unwrap();
    // Each command wakes the proxy, which reads any bytes it sees.
    (0..10).for_each(|_| server.proxy.inject(faults));
    server.proxy.heal();
    served.set_read_timeout(Some(PATIENCE)).unwrap();
    expect(&mut served, b"late");
}

#[test]
fn faults_can_be_injected_inside_a_runtime() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        server.proxy.inject(Faults::default().refuse(true));
        assert!(tokio::net::TcpStream::connect(server.addr()).await.is_err());
        server.proxy.heal();
        tokio::net::TcpStream::connect(server.addr()).await.unwrap();
    });
}
