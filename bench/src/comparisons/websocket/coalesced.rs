//! A socket that batches writes, for libraries that write every frame separately.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Buffers writes until no more input is ready or the buffer has [`FLUSH_BYTES`](Self::FLUSH_BYTES).
pub(super) struct Coalesced {
    socket: TcpStream,
    output: BytesMut,
}

impl Coalesced {
    const FLUSH_BYTES: usize = 16 * 1024;

    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, output: BytesMut::new() }
    }

    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            match ready!(Pin::new(&mut self.socket).poll_write(context, &self.output))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.output.advance(written),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Coalesced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.socket).poll_read(context, buffer);
        if read.is_pending()
            && let Poll::Ready(Err(error)) = self.poll_drain(context)
        {
            return Poll::Ready(Err(error));
        }
        read
    }
}

impl AsyncWrite for Coalesced {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.output.len() >= Self::FLUSH_BYTES {
            ready!(self.poll_drain(context))?;
        }
        self.output.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
