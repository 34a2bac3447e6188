//! Encoding frames into the batch, and writing the batch to the socket.
//!
//! Frames are encoded for each receiver. A broadcast shares bodies, not encoded frames: a header has a few bytes, and copying it
//! is cheaper than tracking when the copy could be skipped. So `before_send` sees every frame of every connection, and a protocol
//! need not declare whether it changes frames.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};

use super::{Actor, Progress};
use crate::codec::{Codec, EncodePosition};
use crate::{CloseReason, FrameLike, Protocol, PushPriority};

/// Limit of the slices of one write.
const MAX_SLICES_PER_WRITE: usize = 32;

/// Frames that the codec has encoded in part, at most one of each kind.
pub(super) struct Unfinished<F> {
    pub(super) high: Option<Box<(F, EncodePosition)>>,
    pub(super) low: Option<Box<(F, EncodePosition)>>,
    pub(super) reply: Option<Box<(F, EncodePosition)>>,
}

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    Push(PushPriority),
    Reply,
}

impl<F> Unfinished<F> {
    fn get_mut(&mut self, kind: FrameKind) -> &mut Option<Box<(F, EncodePosition)>> {
        match kind {
            FrameKind::Push(PushPriority::High) => &mut self.high,
            FrameKind::Push(PushPriority::Low) => &mut self.low,
            FrameKind::Reply => &mut self.reply,
        }
    }
}

impl<F: FrameLike> Unfinished<F> {
    /// Returns the size of the frames, which stay in memory until their last part is encoded.
    pub(super) fn held_bytes(&self) -> usize {
        let Self { high, low, reply } = self;
        [high, low, reply].into_iter().flatten().map(|unfinished| unfinished.0.size()).sum()
    }
}

impl<F> Default for Unfinished<F> {
    fn default() -> Self {
        Self { high: None, low: None, reply: None }
    }
}

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    /// Encodes a frame, or the first part of it.
    pub(super) fn send(&mut self, mut frame: P::Frame, kind: FrameKind) {
        self.shared.protocol.before_send(&mut frame, &mut self.context);
        match self.codec.encode_part(&frame, EncodePosition::default(), &mut self.batch) {
            Ok(None) => self.context.counters.frames_out += 1,
            Ok(Some(position)) => *self.unfinished.get_mut(kind) = Some(Box::new((frame, position))),
            Err(error) => {
                if matches!(kind, FrameKind::Push(_)) {
                    self.queues.outbox().count_unsent(frame);
                }
                self.close(CloseReason::Encode(error));
            }
        }
    }

    /// Encodes the next part of an unfinished frame.
    pub(super) fn send_next_part(&mut self, kind: FrameKind) {
        let unfinished = self.unfinished.get_mut(kind);
        let Some((frame, position)) = unfinished.as_deref_mut() else { return };
        match self.codec.encode_part(frame, *position, &mut self.batch) {
            Ok(Some(next)) => *position = next,
            Ok(None) => {
                *unfinished = None;
                self.context.counters.frames_out += 1;
            }
            Err(error) => self.close(CloseReason::Encode(error)),
        }
    }

    /// Encodes a whole frame at once, so that no other frame is written between its parts.
    pub(super) fn send_whole(&mut self, mut frame: P::Frame) {
        self.shared.protocol.before_send(&mut frame, &mut self.context);
        match self.codec.encode(&frame, &mut self.batch) {
            Ok(()) => self.context.counters.frames_out += 1,
            // Closes without a last frame, because this frame may be the last frame.
            Err(error) => {
                tracing::warn!(connection = %self.context.id(), %error, "frame cannot be encoded");
                self.lifecycle.close(CloseReason::Encode(error));
            }
        }
    }

    /// Writes as much of the batch as the socket accepts, and flushes once when all is written.
    pub(super) fn write(&mut self, context: &mut Context<'_>) -> Progress<P> {
        let mut progress = false;
        while !self.batch.is_empty() {
            let socket = Pin::new(&mut self.socket);
            let written = if let Some(only) = self.batch.only_slice() {
                socket.poll_write(context, only)
            } else {
                let mut slices = [IoSlice::new(&[]); MAX_SLICES_PER_WRITE];
                let count = self.batch.slices(&mut slices);
                socket.poll_write_vectored(context, &slices[..count])
            };
            match written {
                Poll::Pending => return Ok(progress),
                Poll::Ready(Err(error)) => return Err(CloseReason::Io(error)),
                Poll::Ready(Ok(0)) => return Err(CloseReason::Io(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => {
                    self.batch.advance(written);
                    self.context.counters.bytes_out += written as u64;
                    self.needs_flush = true;
                    self.watch.stalled_since = None;
                    self.watch.half_closed_since = None;
                    progress = true;
                }
            }
        }
        if self.needs_flush {
            match Pin::new(&mut self.socket).poll_flush(context) {
                Poll::Pending => {}
                Poll::Ready(Err(error)) => return Err(CloseReason::Io(error)),
                Poll::Ready(Ok(())) => {
                    self.needs_flush = false;
                    progress = true;
                }
            }
        }
        Ok(progress)
    }
}
