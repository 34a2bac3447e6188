//! High-priority pushes that overtake a reply: pings arrive between the frames of an endless stream.
//!
//! `cargo run -p tidewire-conn --example heartbeat`

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::{ConnectionContext, Frame, Protocol, PushHandle, Reply, Shutdown, Supervisor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Feed;

/// An endless stream of frames that share a body of one kilobyte.
struct Kilobytes(Bytes);

impl Stream for Kilobytes {
    type Item = Result<Frame, Infallible>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(Some(Ok(Frame::from(self.0.clone()))))
    }
}

impl Protocol for Feed {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_connection_setup(&self, handle: PushHandle<Frame>, _: &mut ConnectionContext) {
        // The task ends with the connection, because pushing to a closed connection is an error.
        tokio::spawn(async move {
            let ping = Frame::from(Bytes::from_static(b"ping"));
            while handle.push_high_priority(ping.clone()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }

    fn on_frame(&self, _: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::stream(Kilobytes(Bytes::from(vec![b'x'; 1024])))
    }
}

pub(crate) fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime starts").block_on(feed()).expect("loopback works");
}

async fn feed() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let mut client = TcpStream::connect(listener.local_addr()?).await?;
    let server = Supervisor::builder(Feed).build();
    let serving = tokio::spawn({
        let server = server.clone();
        async move { server.serve(listener).await }
    });

    client.write_all(b"\0\0\0\x04feed").await?;
    let (mut pings, mut kilobytes) = (0, 0);
    while pings < 10 || kilobytes < 1000 {
        let mut frame = vec![0; client.read_u32().await? as usize];
        client.read_exact(&mut frame).await?;
        if frame == b"ping" { pings += 1 } else { kilobytes += 1 }
    }
    println!("{pings} pings among {kilobytes} kB of the stream");
    drop(client);
    server.shutdown(Shutdown::default()).await;
    serving.await?
}
