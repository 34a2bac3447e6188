//! A TCP proxy that injects faults.
//!
//! It runs on its own thread and runtime, so it works for blocking and async tests alike, and a test that pauses its tokio clock
//! does not pause the proxy.
//!
//! A new set of faults reaches the accept loop as a request that is acknowledged. All connections run on the same single thread
//! and check the faults before every read and write (hence `biased`), so when [`FaultProxy::inject`] returns, no byte moves under
//! the old ones. Connections that are pending by then are accepted first, so the new faults apply to every connection that the
//! test has made.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::port::Port;

/// Limits of the queue per direction of a connection: 64 reads of at most 16 KiB, so that a delay costs no throughput below a
/// megabyte in flight. A full queue stops reading, which the sender sees as backpressure.
const CHUNK_BYTES: usize = 16 * 1024;
const QUEUE_CHUNKS: usize = 64;

/// A throttled connection pauses after about this time. Shorter pauses would be rounded up to the millisecond of the timer.
const THROTTLE_INTERVAL: Duration = Duration::from_millis(10);

/// The delay after a failed accept, as when there are no file descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// The faults of a [`FaultProxy`]. The default is none.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Faults {
    /// The delay of every byte, in both directions. Default: zero.
    pub delay: Duration,
    /// The limit in bytes per second, in each direction of each connection. Default: none.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Ends each connection after a number of bytes, counted from the injection, or from its own start if later. Default: never.
    pub cut: Option<Cut>,
    /// Stalls all connections without closing them, as if the peer had lost power: connecting succeeds, bytes pile up, a close is
    /// not passed on. Healing continues from there. Default: false.
    pub half_open: bool,
    /// Refuses new connections. Existing ones stay. Default: false.
    pub refuse: bool,
}

impl Faults {
    /// Sets [`delay`](#structfield.delay).
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets [`bytes_per_second`](#structfield.bytes_per_second).
    #[must_use]
    pub fn bytes_per_second(mut self, bytes_per_second: NonZeroU64) -> Self {
        self.bytes_per_second = Some(bytes_per_second);
        self
    }

    /// Sets [`cut`](#structfield.cut).
    #[must_use]
    pub fn cut(mut self, cut: Cut) -> Self {
        self.cut = Some(cut);
        self
    }

    /// Sets [`half_open`](#structfield.half_open).
    #[must_use]
    pub fn half_open(mut self, half_open: bool) -> Self {
        self.half_open = half_open;
        self
    }

    /// Sets [`refuse`](#structfield.refuse).
    #[must_use]
    pub fn refuse(mut self, refuse: bool) -> Self {
        self.refuse = refuse;
        self
    }
}

/// Where a connection is cut. See [`Faults::cut`](Faults#structfield.cut).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Cut {
    /// The number of bytes that still go through.
    pub after: u64,
    /// The direction in which bytes are counted.
    pub direction: Direction,
    /// How the connection ends. Default: [`CloseMode::Graceful`].
    pub mode: CloseMode,
}

impl Cut {
    /// Ends the connection after exactly `bytes` in this direction.
    pub fn after(bytes: u64, direction: Direction) -> Self {
        Self { after: bytes, direction, mode: CloseMode::Graceful }
    }

    /// Sets [`mode`](#structfield.mode).
    #[must_use]
    pub fn mode(mut self, mode: CloseMode) -> Self {
        self.mode = mode;
        self
    }
}

/// The direction in which bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseMode {
    /// An orderly end of stream (FIN). What a side still sends is discarded until it closes too, so a side that never reads does not
    /// notice; [`FaultProxy::open_connections`] counts the connection until then.
    Graceful,
    /// A reset (RST). As with any reset, bytes just before it may be lost.
    Reset,
}

/// A TCP proxy in front of a server that injects faults. Dropping it ends all connections.
///
/// See the [crate's example](crate).
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    commands: mpsc::Sender<(Command, SyncSender<()>)>,
    counters: Arc<Counters>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
enum Command {
    Inject(Faults),
    Cut(CloseMode),
}

#[derive(Debug, Default)]
struct Counters {
    accepted: AtomicU64,
    open: AtomicUsize,
    to_server: AtomicU64,
    to_client: AtomicU64,
}

impl FaultProxy {
    /// Listens on a port of its own for connections to `upstream`.
    ///
    /// # Panics
    ///
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> Self {
        let port = Port::reserve();
        let addr = port.addr();
        let counters = Arc::new(Counters::default());
        let (commands, queue) = mpsc::channel(1);
        let (started, listening) = sync_channel(1);
        let thread = thread::Builder::new()
            .name("fault-proxy".into())
            .spawn({
                let counters = Arc::clone(&counters);
                move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                    let accepting = accept(&port, upstream, queue, &counters, &started);
                    runtime.expect("a runtime can be made").block_on(accepting).expect("the proxy can listen");
                }
            })
            .expect("a thread can be started");
        listening.recv().expect("the proxy listens");
        Self { addr, commands, counters, thread: Some(thread) }
    }

    /// Returns the address of the proxy.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Replaces the faults, for existing and new connections.
    pub fn inject(&self, faults: Faults) {
        self.send_command(Command::Inject(faults));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.inject(Faults::default());
    }

    /// Ends all connections now.
    pub fn cut(&self, mode: CloseMode) {
        self.send_command(Command::Cut(mode));
    }

    /// Returns the number of connections accepted so far.
    pub fn accepted_connections(&self) -> u64 {
        self.counters.accepted.load(Relaxed)
    }

    /// Returns the number of open connections.
    pub fn open_connections(&self) -> usize {
        self.counters.open.load(Relaxed)
    }

    /// Returns the number of bytes forwarded in a direction, on all connections.
    pub fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.counters.bytes(direction).load(Relaxed)
    }

    fn send_command(&self, command: Command) {
        let (done, acknowledged) = sync_channel(1);
        // Not `blocking_send`, which panics on a thread of a tokio runtime. The queue is nearly always empty, because each
        // sender waits for the acknowledgement.
        let mut command = (command, done);
        while let Err(mpsc::error::TrySendError::Full(again)) = self.commands.try_send(command) {
            command = again;
            thread::yield_now();
        }
        acknowledged.recv().expect("the proxy runs until it is dropped");
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // The accept loop ends when the last sender of commands is dropped.
        self.commands = mpsc::channel(1).0;
        let ended = self.thread.take().is_none_or(|thread| thread.join().is_ok());
        assert!(ended || thread::panicking(), "the fault proxy panicked");
    }
}

impl Counters {
    fn bytes(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToClient => &self.to_client,
        }
    }
}

/// The state that all connections watch.
#[derive(Debug, Clone, Copy, Default)]
struct ProxyState {
    faults: Faults,
    /// Incremented by every injection, which resets byte counts.
    injection: u64,
    /// Incremented by every cut command.
    cuts: u64,
    close_mode: Option<CloseMode>,
}

async fn accept(
    port: &Port,
    upstream: SocketAddr,
    mut commands: mpsc::Receiver<(Command, SyncSender<()>)>,
    counters: &Arc<Counters>,
    started: &SyncSender<()>,
) -> io::Result<()> {
    let (state, states) = watch::channel(ProxyState::default());
    let mut connections = JoinSet::new();
    let mut listener = Some(TcpListener::bind(port.addr()).await?);
    let admit = |connections: &mut JoinSet<()>, client| {
        counters.accepted.fetch_add(1, Relaxed);
        let cuts = states.borrow().cuts;
        connections.spawn(serve(client, upstream, states.clone(), cuts, Arc::clone(counters)));
    };
    let _ = started.send(());
    loop {
        let incoming = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            command = commands.recv() => {
                let Some((command, done)) = command else { return Ok(()) };
                while let Some(Ok(client)) = listener.as_ref().map(accept_pending) {
                    admit(&mut connections, client);
                }
                state.send_modify(|state| match command {
                    Command::Inject(faults) => (state.faults, state.injection) = (faults, state.injection + 1),
                    Command::Cut(mode) => (state.cuts, state.close_mode) = (state.cuts + 1, Some(mode)),
                });
                if state.borrow().faults.refuse {
                    if let Some(listener) = listener.take() {
                        // Closing it alone would leave it listening in a child that was forked and has yet to exec.
                        let _ = SockRef::from(&listener).shutdown(Shutdown::Both);
                    }
                } else if listener.is_none() {
                    listener = Some(TcpListener::bind(port.addr()).await?);
                }
                let _ = done.send(());
            }
            incoming = incoming => match incoming {
                Ok((client, _)) => admit(&mut connections, client),
                Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
            },
            Some(ended) = connections.join_next() => ended.expect("a connection does not panic"),
        }
    }
}

/// Accepts a pending connection, even if the runtime has not been notified of it yet.
fn accept_pending(listener: &TcpListener) -> io::Result<TcpStream> {
    let (socket, _) = SockRef::from(listener).accept()?;
    socket.set_nonblocking(true)?;
    TcpStream::from_std(socket.into())
}

/// Serves one connection until it ends or the proxy has received more than `cuts` cut commands.
async fn serve(
    mut client: TcpStream,
    upstream: SocketAddr,
    mut state: watch::Receiver<ProxyState>,
    cuts: u64,
    counters: Arc<Counters>,
) {
    let _open = OpenGuard::count(&counters);

    let mut cut_state = state.clone();
    let cut_command = async move {
        match cut_state.wait_for(|state| state.cuts > cuts).await {
            Ok(state) => state.close_mode.unwrap_or(CloseMode::Reset),
            Err(_) => CloseMode::Reset,
        }
    };
    tokio::pin!(cut_command);

    let connecting = async {
        wait_while_half_open(&mut state).await;
        TcpStream::connect(upstream).await
    };
    let connected = tokio::select! {
        biased;
        mode = &mut cut_command => Err(mode),
        connected = connecting => connected.map_err(|_| CloseMode::Reset),
    };
    let mut server = match connected {
        Ok(server) => server,
        Err(mode) => return finish(client, mode).await,
    };
    // Fails only for a dead socket, which the first read reports.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));

    let mode = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::select! {
            biased;
            mode = cut_command => mode,
            both = async { tokio::try_join!(
                pump(from_client, to_server, Direction::ToServer, state.clone(), &counters),
                pump(from_server, to_client, Direction::ToClient, state.clone(), &counters),
            ) } => match both {
                Ok(_) => return,
                Err(mode) => mode,
            },
        }
    };
    tokio::join!(finish(client, mode), finish(server, mode));
}

/// Forwards one direction until its source closes (`Ok`) or the connection must end.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    direction: Direction,
    mut state: watch::Receiver<ProxyState>,
    counters: &Counters,
) -> Result<(), CloseMode> {
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(QUEUE_CHUNKS);
    let mut reader_state = state.clone();

    let read = async move {
        loop {
            wait_while_half_open(&mut reader_state).await;
            let mut chunk = vec![0; CHUNK_BYTES];
            let length = tokio::select! {
                biased;
                Ok(()) = reader_state.changed() => continue,
                length = from.read(&mut chunk) => length.map_err(|_| CloseMode::Reset)?,
            };
            chunk.truncate(length);
            // The end of the stream is queued as an empty chunk, so that it is delayed like the bytes before it.
            if queue.send((Instant::now(), chunk)).await.is_err() || length == 0 {
                return Ok(());
            }
        }
    };

    let write = async move {
        let (mut injection, mut passed) = (state.borrow().injection, 0);
        // For throttling: the time that the bytes so far should have taken, and the end of the current pause.
        let (mut owed, mut rested) = (Duration::ZERO, Instant::now());
        while let Some((read, chunk)) = queued.recv().await {
            let mut rest = chunk.as_slice();
            loop {
                let now = wait_while_half_open(&mut state).await;
                if now.injection != injection {
                    (injection, passed) = (now.injection, 0);
                    (owed, rested) = (Duration::ZERO, Instant::now());
                }
                let due = rested.max(read + now.faults.delay);
                // No sleep if it is already due: the shortest sleep takes a millisecond.
                if due > Instant::now() {
                    tokio::select! {
                        Ok(()) = state.changed() => {}
                        () = sleep_until(due) => {}
                    }
                    continue;
                }
                if chunk.is_empty() {
                    return to.shutdown().await.map_err(|_| CloseMode::Reset);
                }
                let cut = now.faults.cut.filter(|cut| cut.direction == direction);
                let mut limit = cut.map_or(u64::MAX, |cut| cut.after.saturating_sub(passed));
                if let Some(rate) = now.faults.bytes_per_second {
                    // In pieces of ten milliseconds, so that bytes flow steadily and not in bursts.
                    limit = limit.min((rate.get() / 100).max(1));
                }
                let piece = &rest[..rest.len().min(usize::try_from(limit).unwrap_or(usize::MAX))];
                let length = tokio::select! {
                    biased;
                    Ok(()) = state.changed(), if !piece.is_empty() => continue,
                    length = to.write(piece), if !piece.is_empty() => length.map_err(|_| CloseMode::Reset)?,
                    else => 0,
                };
                rest = &rest[length..];
                passed += length as u64;
                counters.bytes(direction).fetch_add(length as u64, Relaxed);
                if let Some(cut) = cut.filter(|cut| passed >= cut.after) {
                    return Err(cut.mode);
                }
                if let Some(rate) = now.faults.bytes_per_second {
                    owed += Duration::from_nanos(1_000_000_000 * length as u64 / rate);
                    if owed >= THROTTLE_INTERVAL {
                        (owed, rested) = (Duration::ZERO, Instant::now() + owed);
                    }
                }
                if rest.is_empty() {
                    break;
                }
            }
        }
        Ok(())
    };

    tokio::try_join!(read, write).map(|_| ())
}

/// Waits while the connection is half-open. Returns the state under which it continues.
async fn wait_while_half_open(state: &mut watch::Receiver<ProxyState>) -> ProxyState {
    let resumed = state.wait_for(|state| !state.faults.half_open).await.map(|state| *state);
    match resumed {
        Ok(state) => state,
        // The proxy is being dropped, and this task with it.
        Err(_) => std::future::pending().await,
    }
}

async fn finish(mut stream: TcpStream, mode: CloseMode) {
    match mode {
        CloseMode::Reset => {
            // With a linger of zero, closing discards unsent bytes and sends a reset. It fails only for a dead socket.
            let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        }
        CloseMode::Graceful => {
            // Closing with unread bytes would reset the connection, so they are read first.
            let _ = stream.shutdown().await;
            let mut unread = [0; 1024];
            while matches!(stream.read(&mut unread).await, Ok(1..)) {}
        }
    }
}

/// Counts a connection for as long as it is served.
struct OpenGuard<'a>(&'a Counters);

impl<'a> OpenGuard<'a> {
    fn count(counters: &'a Counters) -> Self {
        counters.open.fetch_add(1, Relaxed);
        Self(counters)
    }
}

impl Drop for OpenGuard<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}
