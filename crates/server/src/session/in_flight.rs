//! The bytes of the requests of a connection that are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tidewire_conn::{MemoryAccount, MemoryHold};

/// The bytes of the requests of a connection that are in flight. Allocated by the first request that is not answered at once.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Option<Arc<AtomicUsize>>);

impl InFlight {
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |bytes| bytes.load(Relaxed))
    }

    /// Counts a request until the result is dropped, here and in the memory account of the connection.
    pub(crate) fn hold(&mut self, size: usize, account: &MemoryAccount) -> HeldRequest {
        let bytes = Arc::clone(self.0.get_or_insert_default());
        bytes.fetch_add(size, Relaxed);
        HeldRequest { bytes, size, _held: account.hold(size) }
    }
}

/// A request in flight, as it is counted.
#[derive(Debug)]
pub(crate) struct HeldRequest {
    bytes: Arc<AtomicUsize>,
    size: usize,
    _held: MemoryHold,
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.size, Relaxed);
    }
}
