//! The state that the handles of a client share with the actor of its connection.

use std::fmt;
use std::sync::atomic::AtomicUsize;

use tokio::time::timeout_at;

use super::gate::Permit;
use super::queue::{Queue, Usage};
use super::request::PendingRequest;
use super::status::StatusSender;
use crate::observe::{ClientStats, Counters};
use crate::{Error, Options, RequestPhase};

pub(crate) struct ClientShared {
    pub(crate) options: Options,
    pub(crate) status: StatusSender,
    pub(crate) queue: Queue,
    pub(crate) counters: Counters,
    /// The number of handles. The last one closes the connection.
    pub(crate) handles: AtomicUsize,
}

impl ClientShared {
    pub(crate) fn new(options: Options) -> Self {
        let limit = Permit { commands: options.max_in_flight, bytes: options.max_in_flight_bytes };
        Self {
            options,
            status: StatusSender::new(),
            queue: Queue::new(limit),
            counters: Counters::default(),
            handles: AtomicUsize::new(1),
        }
    }

    /// Queues a request once there is a permit for it, or fails at its deadline.
    pub(crate) async fn submit_in_turn(&self, bytes: &[u8], request: PendingRequest) -> Result<(), Error> {
        timeout_at(request.deadline, self.queue.submit_in_turn(bytes, request)).await.unwrap_or_else(|_| {
            self.counters.count_timeout(RequestPhase::Queued);
            Err(Error::TimedOut { phase: RequestPhase::Queued })
        })
    }

    /// Ends a request that will have no reply. Its permit is returned before its caller can send again.
    pub(super) fn fail(&self, request: PendingRequest, error: Error) {
        self.queue.release(request.permit);
        if let Some(reply) = request.reply {
            reply.fail(error);
        }
    }

    /// Ends an unsent request whose deadline has passed or whose caller has gone away.
    pub(super) fn time_out(&self, request: PendingRequest, phase: RequestPhase) {
        if request.has_caller() {
            self.counters.count_timeout(phase);
        }
        self.fail(request, Error::TimedOut { phase });
    }

    pub(crate) fn stats(&self) -> ClientStats {
        let stats = self.counters.snapshot();
        let Usage { queued, in_flight } = self.queue.usage();
        ClientStats { queued, in_flight: in_flight.commands, in_flight_bytes: in_flight.bytes, ..stats }
    }
}

impl fmt::Debug for ClientShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientShared").field("status", &*self.status.subscribe().borrow()).finish_non_exhaustive()
    }
}
