//! `ConnectionContext::limit_input`: a limit on the input of one connection, which the protocol raises later.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tidewire_conn::websocket::{CloseCode, Message, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, PushHandle, Reply, Supervisor};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::Notify;

/// The limit of a new connection.
const BEFORE_BYTES: usize = 100;
/// The limit after `open`.
const AFTER_BYTES: usize = 5000;
/// The size of the read buffer of an actor.
const READ_BUFFER_BYTES: u64 = 16 * 1024;

/// Limits the input of a connection until it sends `open`. `wait` is answered when the test notifies `release`, and any other message
/// with its length.
struct Limiting {
    release: Arc<Notify>,
}

impl Protocol for Limiting {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_connection_setup(&self, _: PushHandle<Message>, context: &mut ConnectionContext<Message>) {
        context.limit_input(BEFORE_BYTES);
    }

    fn on_frame(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let text = message.as_text().unwrap_or_default();
        match text {
            "open" => context.limit_input(AFTER_BYTES),
            "wait" => {
                let release = Arc::clone(&self.release);
                return Reply::future(async move {
                    release.notified().await;
                    Ok(Message::text("waited"))
                });
            }
            _ => {}
        }
        Reply::Frame(Message::text(text.len().to_string()))
    }
}

/// Returns the peer's end of a new connection.
fn connect(supervisor: &Supervisor<Limiting>) -> DuplexStream {
    let (near, far) = tokio::io::duplex(1 << 20);
    let permit = supervisor.admit(([127, 0, 0, 1], 1).into()).unwrap();
    tokio::spawn(permit.run(near, Vec::new()));
    far
}

fn limiting() -> (Supervisor<Limiting>, Arc<Notify>) {
    let release = Arc::new(Notify::new());
    (Supervisor::builder(Limiting { release: Arc::clone(&release) }).build(), release)
}

/// Returns a masked frame with this first byte and a masking key of zeros.
fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match u16::try_from(payload.len()).unwrap() {
        length @ 0..126 => frame.push(0x80 | u8::try_from(length).unwrap()),
        length => {
            frame.push(0xfe);
            frame.extend(length.to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

fn text(bytes: usize) -> Vec<u8> {
    masked(0x81, &vec![b'x'; bytes])
}

/// Returns the payload of the next frame, which must be short.
async fn receive(far: &mut DuplexStream) -> Vec<u8> {
    let _first = far.read_u8().await.unwrap();
    let mut payload = vec![0; far.read_u8().await.unwrap().into()];
    far.read_exact(&mut payload).await.unwrap();
    payload
}

#[tokio::test(start_paused = true)]
async fn frame_is_limited_until_the_protocol_raises_the_limit() {
    let (supervisor, _) = limiting();
    let too_large = CloseCode::TOO_BIG.get().to_be_bytes();
    let mut far = connect(&supervisor);
    far.write_all(&[text(BEFORE_BYTES), text(BEFORE_BYTES + 1)].concat()).await.unwrap();
    assert_eq!(receive(&mut far).await, b"100");
    assert_eq!(receive(&mut far).await, too_large);

    // A message above the limit, in fragments that are each within it.
    let mut far = connect(&supervisor);
    far.write_all(&[masked(0x01, &[b'x'; 60]), masked(0x80, &[b'x'; 41])].concat()).await.unwrap();
    assert_eq!(receive(&mut far).await, too_large);

    // The large frame arrives together with the frame that raises the limit.
    let mut far = connect(&supervisor);
    far.write_all(&[masked(0x81, b"open"), text(AFTER_BYTES), text(AFTER_BYTES + 1)].concat()).await.unwrap();
    assert_eq!(receive(&mut far).await, b"4");
    assert_eq!(receive(&mut far).await, b"5000");
    assert_eq!(receive(&mut far).await, too_large);
}

#[tokio::test(start_paused = true)]
async fn read_ahead_is_limited() {
    const FRAMES: usize = 2000;
    let (supervisor, release) = limiting();
    let mut far = connect(&supervisor);
    far.write_all(&masked(0x81, b"wait")).await.unwrap();
    far.write_all(&text(50).repeat(FRAMES)).await.unwrap();
    // A paused clock advances when all tasks wait.
    tokio::time::sleep(Duration::from_millis(1)).await;
    let read = supervisor.sessions().list()[0].counters().bytes_in;
    assert!(read <= READ_BUFFER_BYTES + BEFORE_BYTES as u64, "{read} bytes were read ahead");
    release.notify_one();
    assert_eq!(receive(&mut far).await, b"waited");
    for _ in 0..FRAMES {
        assert_eq!(receive(&mut far).await, b"50");
    }
}
