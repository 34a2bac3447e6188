//! Closing a WebSocket that has no actor.

use std::borrow::Cow;
use std::io::{self, IoSlice};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{CloseCode, Message, WebSocket, WebSocketOptions};
use crate::codec::{Batch, Codec};
use crate::timeouts::MAX_DISCARDED_BYTES;

/// Closes the server side of a stream that has been upgraded to a WebSocket, for a client that is not admitted. Sends a close frame
/// with this code and reason, closes the sending side, and discards further input, at most 1 MiB, until the client has closed its
/// side. Without that, the socket would be reset, and the client might lose the close frame.
///
/// # Errors
///
/// Returns an error if the stream fails, if the code must not be sent, or if the reason is longer than 123 bytes. Returns
/// [`TimedOut`](io::ErrorKind::TimedOut) if closing takes longer than `limit`. The stream is dropped in any case.
pub async fn close<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    code: CloseCode,
    reason: impl Into<Cow<'static, str>>,
    limit: Duration,
) -> io::Result<()> {
    let mut frame = Batch::default();
    let encoded = WebSocket::server(WebSocketOptions::default()).encode(&Message::close(code, reason), &mut frame);
    encoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let closing = async {
        while !frame.is_empty() {
            let mut slices = [IoSlice::new(&[]); 2];
            let count = frame.slices(&mut slices);
            match stream.write_vectored(&slices[..count]).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => frame.advance(written),
            }
        }
        stream.shutdown().await?;
        let mut discarded = 0;
        let mut buffer = [0; 512];
        while discarded < MAX_DISCARDED_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                length => discarded += length,
            }
        }
        Ok(())
    };
    tokio::time::timeout(limit, closing).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
