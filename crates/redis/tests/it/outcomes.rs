//! Under random faults, a server reads whole commands, each once and in the order of submission, and every caller gets the true
//! outcome of its request.
//!
//! The peer reads in small pieces, stalls, answers late or before it has read everything, and cuts connections. Meanwhile callers send
//! bursts, cancel and time out, with few permits. All of it follows from a seed.

use std::collections::HashSet;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use fastrand::Rng;
use tidewire_redis::observe::ClientStats;
use tidewire_redis::resp::Decoder;
use tidewire_redis::{
    Address, Client, Command, ConnectionState, Error, Options, Pipeline, Request, RequestOutcome, WhenFull, WhileDown,
};
use tidewire_testkit::PATIENCE;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Concurrent callers.
const CALLERS: u8 = 4;
/// Bursts of each caller.
const BURSTS: usize = 12;

/// What identifies a command, encoded in its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CommandId {
    caller: u8,
    /// The number of the request among those of its caller.
    turn: u32,
    /// The number of the command in its request, and the number of commands of the request.
    part: u8,
    of: u8,
    /// The length of its value.
    len: u32,
}

/// The length of a command up to the end of its key.
const HEAD: usize = "*3\r\n$3\r\nSET\r\n$20\r\n01234567890123456789\r\n".len();
/// The probe that the client sends when a reply is overdue.
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

impl CommandId {
    fn key(self) -> String {
        format!("{:02x}{:08x}{:02x}{:02x}{:06x}", self.caller, self.turn, self.part, self.of, self.len)
    }

    /// Parses the beginning of a command, if it is complete.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let key = str::from_utf8(bytes.get(HEAD - 22..HEAD - 2)?).ok()?;
        let number = |from: usize, to: usize| u32::from_str_radix(key.get(from..to)?, 16).ok();
        let short = |from| number(from, from + 2).and_then(|number| u8::try_from(number).ok());
        Some(Self { caller: short(0)?, turn: number(2, 10)?, part: short(10)?, of: short(12)?, len: number(14, 20)? })
    }

    /// Returns a unique value.
    fn value(self) -> Vec<u8> {
        let mut value = vec![0; self.len as usize];
        Rng::with_seed(u64::from(self.turn) << 16 | u64::from(self.caller) << 8 | u64::from(self.part))
            .fill(&mut value);
        value
    }

    fn request(self) -> Request<String> {
        Command::new("SET").arg(self.key()).arg(&self.value()[..]).returning()
    }

    fn bytes(self) -> Vec<u8> {
        self.request().command().as_bytes().to_vec()
    }
}

/// The commands that all connections of the peer have read, and what was wrong with them.
#[derive(Default)]
struct Received {
    /// Includes commands that were cut.
    ids: HashSet<CommandId>,
    violations: Vec<String>,
}

/// The state that the connections of the peer share.
#[derive(Clone)]
struct PeerShared {
    received: Arc<Mutex<Received>>,
    /// The number of requests that have ended.
    ended: watch::Receiver<usize>,
    /// Set when no more requests are sent. From then on peers read and answer everything.
    is_draining: watch::Receiver<bool>,
}

trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

/// A connection of the peer.
struct Peer {
    socket: Box<dyn Socket>,
    shared: PeerShared,
    random: Rng,
    input: BytesMut,
    /// Replies that were not sent yet.
    replies: Vec<u8>,
    /// The last command, and the last one of each caller.
    last: Option<CommandId>,
    turns: [Option<u32>; CALLERS as usize],
    /// The command at the front of the input, once it is known.
    current: Option<Current>,
}

struct Current {
    id: CommandId,
    bytes: Vec<u8>,
    is_answered: bool,
}

impl Peer {
    fn new(socket: Box<dyn Socket>, shared: PeerShared, random: Rng) -> Self {
        let (input, turns) = (BytesMut::new(), [None; CALLERS as usize]);
        Self { socket, shared, random, input, replies: Vec::new(), last: None, turns, current: None }
    }

    /// Reads and answers until a random end, or until the client closes.
    async fn run(mut self) {
        if self.handshake().await.is_none() {
            return;
        }
        let mut left = if self.random.u8(..4) == 0 { usize::MAX } else { self.random.usize(1..600_000) };
        while left > 0 {
            let is_draining = *self.shared.is_draining.borrow_and_update();
            if is_draining {
                left = usize::MAX;
            } else if self.random.u8(..24) == 0 {
                self.stall().await;
            }
            if is_draining || self.random.bool() {
                let replies = std::mem::take(&mut self.replies);
                if self.socket.write_all(&replies).await.is_err() {
                    return;
                }
            }
            let most = if is_draining || self.random.u8(..4) == 0 { 200_000 } else { self.random.usize(1..3000) };
            let mut piece = vec![0; most.min(left)];
            let count = tokio::select! {
                biased;
                read = self.socket.read(&mut piece) => match read {
                    Ok(count @ 1..) => count,
                    _ => return,
                },
                // Delayed replies are sent when no more input comes.
                () = tokio::task::yield_now(), if !self.replies.is_empty() => 0,
                _ = self.shared.is_draining.changed(), if !is_draining => 0,
            };
            self.input.extend_from_slice(&piece[..count]);
            left -= count;
            while self.answer_next() {}
        }
    }

    async fn handshake(&mut self) -> Option<()> {
        let mut decoder = Decoder::default();
        for _ in 0..3 {
            while decoder.decode(&mut self.input).ok()?.is_none() {
                if self.socket.read_buf(&mut self.input).await.ok()? == 0 {
                    return None;
                }
            }
            self.socket.write_all(b"+OK\r\n").await.ok()?;
        }
        Some(())
    }

    /// Stalls until some requests have ended.
    async fn stall(&mut self) {
        let until = *self.shared.ended.borrow() + self.random.usize(1..12);
        tokio::select! {
            _ = self.shared.ended.wait_for(|ended| *ended >= until) => {}
            _ = self.shared.is_draining.wait_for(|is_draining| *is_draining) => {}
        }
    }

    /// Takes a command from the input and answers it. Returns false if it is incomplete.
    fn answer_next(&mut self) -> bool {
        if self.current.is_none() && self.input.starts_with(PING) {
            self.input.advance(PING.len());
            self.replies.extend_from_slice(b"+PONG\r\n");
            self.check(self.last.is_none_or(|last| last.part + 1 == last.of), "a PING within a pipeline");
            return true;
        }
        if self.current.is_none() && self.input.len() >= HEAD {
            match CommandId::parse(&self.input) {
                Some(id) => self.check_order(id),
                None => self.check(false, "not a command"),
            }
        }
        let Some(mut current) = self.current.take() else { return false };
        let len = self.input.len().min(current.bytes.len());
        self.check(self.input[..len] == current.bytes[..len], "bytes that were not sent");
        let is_whole = len == current.bytes.len();
        if !current.is_answered && (is_whole || self.random.u8(..16) == 0) {
            self.replies.extend_from_slice(format!("+{}\r\n", current.id.key()).as_bytes());
            current.is_answered = true;
        }
        if is_whole {
            self.input.advance(len);
        } else {
            self.current = Some(current);
        }
        is_whole
    }

    /// Checks that a command is read once and in order.
    fn check_order(&mut self, id: CommandId) {
        let is_new = self.shared.received.lock().unwrap().ids.insert(id);
        self.check(is_new, "received twice");
        let is_next = match self.last.replace(id) {
            Some(last) if last.part + 1 < last.of => id == CommandId { part: last.part + 1, len: id.len, ..last },
            _ => id.part == 0 && self.turns[usize::from(id.caller)] < Some(id.turn),
        };
        self.check(is_next, "out of order");
        self.turns[usize::from(id.caller)] = Some(id.turn);
        self.current = Some(Current { id, bytes: id.bytes(), is_answered: false });
    }

    fn check(&self, holds: bool, what: &str) {
        if !holds {
            let start = self.input[..self.input.len().min(60)].escape_ascii();
            self.shared.received.lock().unwrap().violations.push(format!("{what}: {start} after {:?}", self.last));
        }
    }
}

/// Accepts connections until the end, and reads everything that was sent.
async fn accept(listener: Listener, shared: PeerShared, seed: u64, mut is_over: watch::Receiver<bool>) {
    let mut open = JoinSet::new();
    for number in 1.. {
        let socket = tokio::select! {
            socket = listener.accept() => socket,
            _ = is_over.wait_for(|is_over| *is_over) => break,
        };
        open.spawn(Peer::new(socket, shared.clone(), Rng::with_seed(seed << 16 | number)).run());
    }
    while let Some(ended) = open.join_next().await {
        ended.unwrap();
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    async fn accept(&self) -> Box<dyn Socket> {
        match self {
            Self::Tcp(listener) => Box::new(listener.accept().await.unwrap().0),
            Self::Unix(listener) => Box::new(listener.accept().await.unwrap().0),
        }
    }
}

/// The outcome of a command.
type CommandResult = (CommandId, Result<String, Error>);
type Exchange = Pin<Box<dyn Future<Output = Vec<CommandResult>> + Send>>;

/// A caller that sends requests in bursts.
struct Caller {
    client: Client,
    number: u8,
    random: Rng,
    turn: u32,
    ended: Arc<watch::Sender<usize>>,
}

impl Caller {
    async fn run(mut self) -> Vec<CommandResult> {
        let mut reported = Vec::new();
        for _ in 0..BURSTS {
            if self.random.bool() {
                self.client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
            }
            // Submitted in this order; some are cancelled after a number of polls.
            let mut burst = Vec::new();
            for _ in 0..self.random.usize(1..8) {
                let turns = if self.random.u8(..6) == 0 { self.random.usize(1..6) } else { usize::MAX };
                burst.push((turns, Some(self.ask())));
            }
            poll_fn(|context| {
                for (turns, slot) in &mut burst {
                    let Some(exchange) = slot else { continue };
                    let polled = exchange.as_mut().poll(context);
                    *turns -= 1;
                    if polled.is_pending() && *turns > 0 {
                        continue;
                    }
                    if let Poll::Ready(one) = polled {
                        reported.extend(one);
                    }
                    *slot = None;
                    self.ended.send_modify(|ended| *ended += 1);
                }
                if burst.iter().all(|(_, slot)| slot.is_none()) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        reported
    }

    /// Starts a request with one command, or a pipeline.
    fn ask(&mut self) -> Exchange {
        let random = &mut self.random;
        self.turn += 1;
        let of = if random.u8(..4) == 0 { random.u8(1..6) } else { 1 };
        let ids: Vec<_> = (0..of)
            .map(|part| {
                let len = match random.u8(..32) {
                    0 => random.u32(..400_000),
                    1..6 => random.u32(..20_000),
                    _ => random.u32(..200),
                };
                CommandId { caller: self.number, turn: self.turn, part, of, len }
            })
            .collect();
        let millis = if random.u8(..4) == 0 { 200 } else { random.u64(..20) };
        let client = self.client.with_timeout(Duration::from_millis(millis));
        Box::pin(async move {
            if let [id] = ids[..] {
                return vec![(id, client.send(id.request()).await)];
            }
            let pipeline: Pipeline<Vec<String>> = ids.iter().map(|id| id.request()).collect();
            let reported = client.pipeline(pipeline).await.expect("every command has a result of its own");
            ids.into_iter().zip(reported).collect()
        })
    }
}

/// Returns the numbers of commands that were served, never sent, and maybe executed.
async fn run_scenario(seed: u64, while_down: WhileDown, is_unix: bool) -> [usize; 3] {
    let mut random = Rng::with_seed(seed);
    let path = std::env::temp_dir().join(format!("tidewire-outcomes-{}-{seed}", std::process::id()));
    let (listener, address) = if is_unix {
        (Listener::Unix(UnixListener::bind(&path).unwrap()), Address::Unix(path.clone()))
    } else {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (Listener::Tcp(listener), Address::Tcp { host: "127.0.0.1".into(), port })
    };
    let options = Options::default()
        .address(address)
        .while_down(while_down)
        .min_backoff(Duration::from_micros(100))
        .max_backoff(Duration::from_millis(2))
        .connect_timeout(Duration::from_millis(*random.choice(&[50, 5000]).unwrap()))
        .max_in_flight(*random.choice(&[1, 3, 8, 64]).unwrap())
        .max_in_flight_bytes(*random.choice(&[100, 10_000, 500_000, 64 << 20]).unwrap())
        .when_full(if random.u8(..4) == 0 { WhenFull::Fail } else { WhenFull::Wait });
    let client = Client::start(options);

    let (ended, is_draining, is_over) =
        (Arc::new(watch::Sender::new(0)), watch::Sender::new(false), watch::Sender::new(false));
    let received = Arc::new(Mutex::new(Received::default()));
    let shared =
        PeerShared { received: Arc::clone(&received), ended: ended.subscribe(), is_draining: is_draining.subscribe() };
    let peers = tokio::spawn(accept(listener, shared, seed, is_over.subscribe()));
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        let (client, ended, random) = (client.clone(), Arc::clone(&ended), random.fork());
        callers.spawn(Caller { client, number, random, turn: 0, ended }.run());
    }
    let all = tokio::time::timeout(PATIENCE, callers.join_all()).await.expect("every call ends");

    is_draining.send_replace(true);
    let idle = async {
        let is_idle = |stats: ClientStats| (stats.in_flight, stats.in_flight_bytes, stats.queued) == (0, 0, 0);
        while !is_idle(client.stats()) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, idle).await.expect("all permits are returned");
    client.close(PATIENCE).await;
    is_over.send_replace(true);
    tokio::time::timeout(PATIENCE, peers).await.expect("the peers read all input").unwrap();
    if is_unix {
        std::fs::remove_file(path).unwrap();
    }
    let received = received.lock().unwrap();
    assert!(received.violations.is_empty(), "seed {seed}: {:?}", received.violations);
    let mut counts = [0; 3];
    for (id, reported) in all.into_iter().flatten() {
        let is_received = received.ids.contains(&id);
        let (is_true, kind) = match &reported {
            Ok(text) => (is_received && *text == id.key(), 0),
            Err(error) => match error.outcome() {
                Some(RequestOutcome::NeverSent) => (!is_received, 1),
                Some(RequestOutcome::MaybeExecuted) => (true, 2),
                None => (false, 2),
            },
        };
        assert!(is_true, "seed {seed}: {id:?} returned {reported:?}, received by the server: {is_received}");
        counts[kind] += 1;
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_are_true_under_random_faults() {
    let seed = std::env::var("TIDEWIRE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..1 << 40));
    println!("TIDEWIRE_SEED={seed}");
    let mut scenarios = JoinSet::new();
    for (number, while_down) in [WhileDown::WaitForAttempt, WhileDown::Fail, WhileDown::Queue].into_iter().enumerate() {
        for round in 0..4 {
            scenarios.spawn(run_scenario(seed + (number * 4 + round) as u64, while_down, round % 2 == 0));
        }
    }
    let counts = scenarios.join_all().await;
    let sum = counts.iter().fold([0; 3], |sum, counts| std::array::from_fn(|kind| sum[kind] + counts[kind]));
    println!("served, never sent, perhaps executed: {sum:?}");
    assert!(sum.iter().all(|sum| *sum > 0), "{sum:?}");
}
