//! A server with a test protocol, and a client for it. Other tests use them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tidewire_conn::codec::{LengthDelimited, LengthDelimitedOptions};
use tidewire_conn::{Builder, CloseReason, ConnectionContext, Frame, Protocol, PushHandle, Reply, Supervisor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};

/// A protocol that replies according to the first word of a frame: see `on_frame`.
pub(crate) struct Words {
    /// Gets the id and the close reason of each connection.
    pub(crate) ends: mpsc::Sender<String>,
    /// Lets a `wait` be answered.
    pub(crate) release: Arc<Notify>,
    /// The number of calls of `on_connection_setup`.
    pub(crate) setups: AtomicUsize,
    /// The number of calls of `on_command_end`.
    pub(crate) commands: AtomicUsize,
    /// The number of `wait` requests.
    pub(crate) waits: AtomicUsize,
    /// The number of `quick` replies that are ready.
    pub(crate) quick: Arc<AtomicUsize>,
    /// `on_panic` returns a reply.
    pub(crate) answers_panics: AtomicBool,
    /// `on_shutdown` returns a frame.
    pub(crate) announces_shutdown: AtomicBool,
}

/// The error of a reply that fails.

#[derive(Debug, thiserror::Error)]
#[error("as planned")]
pub(crate) struct Planned;

pub(crate) fn frame(text: impl Into<String>) -> Frame {
    Frame::from(Bytes::from(text.into()))
}

impl Protocol for Words {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Planned;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::new(LengthDelimitedOptions::default().max_frame(100_000)).unwrap()
    }

    fn on_connection_setup(&self, _: PushHandle<Frame>, context: &mut ConnectionContext) {
        self.setups.fetch_add(1, Ordering::SeqCst);
        context.data = Some(Box::new(0_u32));
    }

    fn on_frame(&self, request: Frame, context: &mut ConnectionContext) -> Reply<Frame, Planned> {
        let text = String::from_utf8(request.body().to_vec()).unwrap();
        let count = context.data.as_mut().and_then(|data| data.downcast_mut::<u32>()).unwrap();
        *count += 1;
        match text.split(' ').next().unwrap() {
            "nothing" => Reply::None,
            "twice" => Reply::Frames(vec![frame("one"), frame("two")]),
            "count" => Reply::Frame(frame(count.to_string())),
            "large" => Reply::Frame(frame("x".repeat(90_000))),
            "close" => Reply::Close(Some(frame("bye"))),
            "fail" => Reply::future(async { Err(Planned) }),
            "panic" => panic!("as planned"),
            "late-panic" => Reply::future(async { panic!("as planned") }),
            "wait" => {
                self.waits.fetch_add(1, Ordering::SeqCst);
                let release = Arc::clone(&self.release);
                Reply::future(async move {
                    release.notified().await;
                    Ok(frame("waited"))
                })
            }
            "quick" => {
                let quick = Arc::clone(&self.quick);
                Reply::future(async move {
                    tokio::task::yield_now().await;
                    quick.fetch_add(1, Ordering::SeqCst);
                    Ok(frame("quickly"))
                })
            }
            "name" => {
                context.share(text.split(' ').nth(1).unwrap().to_owned());
                Reply::Frame(frame("named"))
            }
            "stream-panic" => Reply::stream(Panics(0)),
            "broken-stream" => Reply::stream(Broken(0)),
            "stream" => Reply::stream(Numbers(0)),
            _ => Reply::Frame(request),
        }
    }

    fn on_command_end(&self, _: &mut ConnectionContext) {
        self.commands.fetch_add(1, Ordering::SeqCst);
    }

    fn on_panic(&self, _: &mut ConnectionContext) -> Option<Frame> {
        self.answers_panics.load(Ordering::SeqCst).then(|| frame("panicked"))
    }

    fn on_shutdown(&self, _: Duration, _: &mut ConnectionContext) -> Option<Frame> {
        self.announces_shutdown.load(Ordering::SeqCst).then(|| frame("going down"))
    }

    fn last_frame(&self, reason: &CloseReason<Self>, _: &mut ConnectionContext) -> Option<Frame> {
        match reason {
            CloseReason::Decode(error) => Some(frame(format!("error: {error}"))),
            _ => None,
        }
    }

    fn on_connection_closed(&self, reason: &CloseReason<Self>, context: &mut ConnectionContext) {
        self.ends.try_send(format!("{}: {reason}", context.id())).unwrap();
    }
}

/// An endless stream of numbers.
struct Numbers(u64);

impl futures_core::Stream for Numbers {
    type Item = Result<Frame, Planned>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0 += 1;
        std::task::Poll::Ready(Some(Ok(frame(format!("{:01000}", self.0)))))
    }
}

/// A stream that fails after two frames.
struct Broken(u64);

impl futures_core::Stream for Broken {
    type Item = Result<Frame, Planned>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0 += 1;
        std::task::Poll::Ready(Some(if self.0 > 2 { Err(Planned) } else { Ok(frame(self.0.to_string())) }))
    }
}

/// A stream that panics after a frame.
struct Panics(u64);

impl futures_core::Stream for Panics {
    type Item = Result<Frame, Planned>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0 += 1;
        assert!(self.0 < 2, "as planned");
        std::task::Poll::Ready(Some(Ok(frame("before"))))
    }
}

pub(crate) struct Server {
    pub(crate) supervisor: Supervisor<Words>,
    pub(crate) addr: SocketAddr,
    pub(crate) ends: mpsc::Receiver<String>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(|builder| builder).await
    }

    pub(crate) async fn with(settings: impl FnOnce(Builder<Words>) -> Builder<Words>) -> Self {
        let (sender, ends) = mpsc::channel(10_000);
        let words = Words {
            ends: sender,
            release: Arc::default(),
            setups: AtomicUsize::new(0),
            commands: AtomicUsize::new(0),
            waits: AtomicUsize::new(0),
            quick: Arc::default(),
            answers_panics: AtomicBool::new(false),
            announces_shutdown: AtomicBool::new(false),
        };
        let supervisor = settings(Supervisor::builder(words)).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let serving = supervisor.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        Self { supervisor, addr, ends }
    }

    pub(crate) async fn connect(&self) -> Client {
        Client(TcpStream::connect(self.addr).await.unwrap())
    }

    /// Returns a client whose connection is served, and a handle to it.
    pub(crate) async fn connected(&self) -> (Client, PushHandle<Frame>) {
        let mut client = self.connect().await;
        assert_eq!(client.ask("hello").await, "hello");
        let handle = self.supervisor.sessions().list().pop().unwrap().handle();
        (client, handle)
    }

    pub(crate) async fn next_end(&mut self) -> String {
        tokio::time::timeout(Duration::from_mins(1), self.ends.recv()).await.unwrap().unwrap()
    }
}

pub(crate) struct Client(pub(crate) TcpStream);

impl Client {
    pub(crate) async fn send(&mut self, text: &str) {
        let mut bytes = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        self.0.write_all(&bytes).await.unwrap();
    }

    pub(crate) async fn receive(&mut self) -> Option<String> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).await.ok()?;
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut body).await.unwrap();
        Some(String::from_utf8(body).unwrap())
    }

    pub(crate) async fn ask(&mut self, text: &str) -> String {
        self.send(text).await;
        self.receive().await.unwrap()
    }
}
