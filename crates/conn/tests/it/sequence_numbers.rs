//! Sequence numbers per command, as in database protocols: set in `before_send`, reset in `on_command_end`.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Head, Protocol, PushHandle, Reply, Supervisor};
use tokio::net::{TcpListener, TcpStream};

use crate::test_server::{Client, frame};

/// Answers `N` with a stream of `N` rows. A frame begins with its sequence number in the command.
struct Rows;

/// A stream of rows. Its value is twice the number of remaining rows, because each row is preceded by a poll that is pending.
struct Remaining(usize);

impl futures_core::Stream for Remaining {
    type Item = Result<Frame, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Pending once per row, so that other requests are read in the meantime.
        if self.0 % 2 == 1 {
            self.0 -= 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        self.0 -= 1;
        Poll::Ready(Some(Ok(frame(" row"))))
    }
}

fn sequence(context: &mut ConnectionContext) -> &mut u8 {
    context.data.as_mut().and_then(|data| data.downcast_mut()).unwrap()
}

impl Protocol for Rows {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    const HOLD_PUSHES: bool = true;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_connection_setup(&self, _: PushHandle<Frame>, context: &mut ConnectionContext) {
        context.data = Some(Box::new(0_u8));
    }

    fn on_frame(&self, request: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        let rows: usize = std::str::from_utf8(request.body()).unwrap().parse().unwrap();
        Reply::stream(Remaining(2 * rows))
    }

    fn before_send(&self, frame: &mut Frame, context: &mut ConnectionContext) {
        let sequence = sequence(context);
        *frame = Frame::new(Head::new(sequence.to_string().as_bytes()).unwrap(), frame.body().clone());
        *sequence += 1;
    }

    fn on_command_end(&self, context: &mut ConnectionContext) {
        *sequence(context) = 0;
    }
}

async fn sequences(max_in_flight: usize) {
    let server = Supervisor::builder(Rows).max_in_flight(max_in_flight).build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
    let serving = server.clone();
    tokio::spawn(async move { serving.serve(listener).await });
    for rows in ["3", "1", "0", "4"] {
        client.send(rows).await;
    }
    for number in [0, 1, 2, 0, 0, 1, 2, 3] {
        assert_eq!(client.receive().await.unwrap(), format!("{number} row"));
    }
    // A frame that is pushed between commands begins a sequence too.
    let handle = server.sessions().list().pop().unwrap().handle();
    handle.push_low_priority(frame(" push")).await.unwrap();
    assert_eq!(client.receive().await.unwrap(), "0 push");
}

#[tokio::test]
async fn sequence_numbers_restart_with_every_command() {
    sequences(1).await;
}

#[tokio::test]
async fn sequence_numbers_restart_with_every_command_in_flight() {
    sequences(4).await;
}
