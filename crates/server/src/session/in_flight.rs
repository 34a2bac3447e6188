//! Memory of the requests in flight of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tidewire_conn::{MemoryAccount, MemoryHold};

/// The memory of the requests in flight of a connection. Allocated by the first request that is not answered immediately.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Option<Arc<AtomicUsize>>);

impl InFlight {
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |bytes| bytes.load(Relaxed))
    }

    /// Counts a request, here and in the memory account of the connection, until the returned guard is dropped.
    pub(crate) fn hold(&mut self, size: usize, account: &MemoryAccount) -> HeldRequest {
        let bytes = Arc::clone(self.0.get_or_insert_default());
        bytes.fetch_add(size, Relaxed);
        HeldRequest { bytes, size, _held: account.hold(size) }
    }
}

/// Guard of the memory of a request in flight.
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
