//! Lingering: closing a socket so that the peer receives the last frames.
//!
//! A connection that has ended closes its side of the socket, and waits until the peer closes its side or
//! [`Timeouts::linger`](crate::Timeouts::linger) has passed. Further input is read and discarded: a socket that is closed with unread
//! bytes is reset, and the peer may lose the last frames. The protocol is notified of the end before the connection lingers.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::lifecycle::{Lifecycle, Linger};
use super::{Actor, MAX_TURNS_PER_POLL};
use crate::Protocol;
use crate::batch::Batch;
use crate::supervisor::ShutdownPhase;
use crate::timeouts::MAX_DISCARDED_BYTES;

impl<P: Protocol, S: AsyncRead + AsyncWrite + Unpin> Actor<P, S> {
    /// Releases everything that lingering does not need, and sets the alarm for its deadline.
    pub(super) fn prepare_to_linger(&mut self, deadline: Instant) {
        self.batch = Batch::default();
        self.discard_unencoded();
        self.record_held();
        self.set_alarm(deadline);
    }

    pub(super) fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.register_waker(context);
        let Lifecycle::Lingering(mut linger) = std::mem::replace(&mut self.lifecycle, Lifecycle::Ended) else {
            return Poll::Ready(());
        };
        let polled = self.poll_peer_close(&mut linger, context);
        if polled.is_pending() {
            self.lifecycle = Lifecycle::Lingering(linger);
        }
        polled
    }

    fn poll_peer_close(&mut self, linger: &mut Linger, context: &mut Context<'_>) -> Poll<()> {
        let Linger { deadline, is_shut_down, discarded } = linger;
        // An error is ignored: the socket is dropped in any case.
        *is_shut_down = *is_shut_down || Pin::new(&mut self.socket).poll_shutdown(context).is_ready();
        if self.queues.mailbox.take_alarm() {
            self.alarm = None;
            if Instant::now() >= *deadline {
                return Poll::Ready(());
            }
            self.set_alarm(*deadline);
        }
        for _ in 0..MAX_TURNS_PER_POLL {
            let is_done = *is_shut_down && self.input.has_ended || *discarded > MAX_DISCARDED_BYTES;
            if is_done || self.shared.phase.get() == ShutdownPhase::Aborted {
                return Poll::Ready(());
            }
            if self.input.has_ended {
                return Poll::Pending;
            }
            self.input.bytes.clear();
            match ready!(self.input.poll_read(&mut self.socket, context)) {
                Ok(1..) => *discarded += self.input.bytes.len(),
                Ok(0) | Err(_) => self.input.has_ended = true,
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}
