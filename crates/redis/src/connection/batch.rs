//! Requests and their bytes, in order.
//!
//! The bytes of all queued commands are in one buffer. A caller copies its command to the end of it, under the lock that it needs
//! anyway, and the actor takes the whole buffer. So a small command needs no allocation, and the actor never copies it. The bytes
//! of a request that is dropped before it was sent are removed from the buffer, which is rare; so an error can say for certain that
//! no byte was written.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::request::PendingRequest;

/// Capacity above which an empty buffer is freed.
pub(super) const MAX_IDLE_BUFFER_BYTES: usize = 1 << 20;

/// Unsent requests, and their bytes in the same order.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) requests: VecDeque<PendingRequest>,
    pub(super) bytes: Vec<u8>,
}

impl Batch {
    pub(super) fn push(&mut self, request: PendingRequest, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.requests.push_back(request);
    }

    /// Removes the requests for which the predicate holds, and their bytes.
    pub(super) fn remove(&mut self, is_removed: impl Fn(&PendingRequest) -> bool) -> Vec<PendingRequest> {
        if !self.requests.iter().any(&is_removed) {
            return Vec::new();
        }
        let (mut removed, mut from, mut to) = (Vec::new(), 0, 0);
        for request in std::mem::take(&mut self.requests) {
            let len = request.len;
            if is_removed(&request) {
                removed.push(request);
            } else {
                self.bytes.copy_within(from..from + len, to);
                to += len;
                self.requests.push_back(request);
            }
            from += len;
        }
        self.bytes.truncate(to);
        removed
    }

    pub(super) fn earliest_deadline(&self) -> Option<Instant> {
        self.requests.iter().map(|request| request.deadline).min()
    }

    /// Inserts another batch before this one.
    pub(super) fn prepend(&mut self, mut other: Self) {
        other.requests.append(&mut self.requests);
        other.bytes.append(&mut self.bytes);
        *self = other;
    }
}

/// Empties a buffer. One that has grown large is freed.
pub(super) fn clear(bytes: &mut Vec<u8>) {
    bytes.clear();
    if bytes.capacity() > MAX_IDLE_BUFFER_BYTES {
        *bytes = Vec::new();
    }
}
