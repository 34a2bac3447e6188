//! Requests and their bytes, in order.
//!
//! The bytes of all queued commands are one buffer. A task copies its command to the end of it, under the lock that it needs
//! anyway, and the actor takes the whole buffer. So a small command needs no allocation, and the actor never copies it. The bytes
//! of a request that is given up before it was sent are cut out, which is rare; so an error can say for certain that no byte was
//! written.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::submission::Submission;

/// The most room that is kept for bytes when there are none.
pub(super) const KEPT: usize = 1 << 20;

/// Requests that were not sent, and their bytes in the same order.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) requests: VecDeque<Submission>,
    pub(super) bytes: Vec<u8>,
}

impl Batch {
    pub(super) fn push(&mut self, request: Submission, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.requests.push_back(request);
    }

    /// Takes out those that are not to stay, and their bytes.
    pub(super) fn take_out(&mut self, stays: impl Fn(&Submission) -> bool) -> Vec<Submission> {
        if self.requests.iter().all(&stays) {
            return Vec::new();
        }
        let (mut taken, mut from, mut to) = (Vec::new(), 0, 0);
        for request in std::mem::take(&mut self.requests) {
            let len = request.len;
            if stays(&request) {
                self.bytes.copy_within(from..from + len, to);
                to += len;
                self.requests.push_back(request);
            } else {
                taken.push(request);
            }
            from += len;
        }
        self.bytes.truncate(to);
        taken
    }

    /// When the first of them is late.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        self.requests.iter().map(|request| request.deadline).min()
    }

    /// Puts others before these.
    pub(super) fn prepend(&mut self, mut others: Self) {
        others.requests.append(&mut self.requests);
        others.bytes.append(&mut self.bytes);
        *self = others;
    }
}

/// Empties a buffer whose bytes are of no use any more. One that has grown large is given back.
pub(super) fn empty(bytes: &mut Vec<u8>) {
    bytes.clear();
    if bytes.capacity() > KEPT {
        *bytes = Vec::new();
    }
}
