//! Scripted servers, and shared helpers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::BytesMut;
use tidewire_redis::resp::{Decoder, Message};
use tidewire_redis::{Command, Options, Request, Value};
use tidewire_testkit::{PATIENCE, RedisServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A scripted server on its own port. It ends when it is dropped.
pub(crate) struct Scripted {
    addr: SocketAddr,
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Scripted {
    /// Serves every connection with this function, which gets the number of the connection.
    pub(crate) async fn start<F>(serve: impl Fn(TcpStream, usize) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, accepted) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        let count = Arc::clone(&accepted);
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.spawn(serve(stream, count.fetch_add(1, SeqCst)));
            }
        });
        Self { addr, accepted, _tasks: tasks }
    }

    /// Answers every command with this function, which gets its words and the number of the connection.
    pub(crate) async fn answering(answer: impl Fn(&[String], usize) -> String + Send + Sync + 'static) -> Self {
        let answer = Arc::new(answer);
        Self::start(move |mut stream, number| {
            let said = Arc::clone(&answer);
            async move { self::answer(&mut stream, |words| Some(said(words, number))).await }
        })
        .await
    }

    /// Completes the handshake, and then does not read any more.
    pub(crate) async fn deaf() -> Self {
        Self::start(|mut stream, _| async move {
            let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
            for _ in 0..3 {
                while !matches!(decoder.decode(&mut input), Ok(Some(_))) {
                    if !matches!(stream.read_buf(&mut input).await, Ok(1..)) {
                        return;
                    }
                }
                if stream.write_all(b"+OK\r\n").await.is_err() {
                    return;
                }
            }
            std::future::pending::<()>().await;
        })
        .await
    }

    pub(crate) fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Returns the number of connections so far.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(SeqCst)
    }
}

/// Returns a real server without `HELLO`, for RESP2, and one with it. The flag is true for the former.
pub(crate) fn resp2_and_resp3() -> [(RedisServer, bool); 2] {
    let old = RedisServer::options().config("rename-command HELLO \"\"").start();
    [(old, true), (RedisServer::start(), false)]
}

/// Answers the commands on a connection, until it ends or the function returns `None`.
pub(crate) async fn answer(stream: &mut TcpStream, answer: impl Fn(&[String]) -> Option<String>) {
    let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
    loop {
        while let Ok(Some(Message::Reply(Value::Array(words)))) = decoder.decode(&mut input) {
            let word = |word: &Value| String::from_utf8_lossy(word.as_bytes().unwrap()).into_owned();
            let Some(reply) = answer(&words.iter().map(word).collect::<Vec<_>>()) else { return };
            if stream.write_all(reply.as_bytes()).await.is_err() {
                return;
            }
        }
        if !matches!(stream.read_buf(&mut input).await, Ok(1..)) {
            return;
        }
    }
}

/// Returns the reply to a command of the handshake, in RESP3. `None` for other commands.
pub(crate) fn greeting(words: &[String]) -> Option<String> {
    match &*words[0] {
        "HELLO" => Some("%1\r\n+proto\r\n:3\r\n".to_owned()),
        "CLIENT" | "SELECT" => Some("+OK\r\n".to_owned()),
        _ => None,
    }
}

/// Returns options with a short backoff and a long timeout.
pub(crate) fn options(port: u16) -> Options {
    Options::default()
        .address(("127.0.0.1", port))
        .min_backoff(Duration::from_millis(1))
        .max_backoff(Duration::from_millis(20))
        .timeout(PATIENCE)
}

/// Returns a request for the unconverted reply.
pub(crate) fn command(words: &[&str]) -> Request<Value> {
    Command::new(words[0]).args(&words[1..]).returning()
}
