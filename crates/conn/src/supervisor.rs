//! Who may connect, who is connected, and how it all ends.
//!
//! Connections are children that are never restarted. A [`Permit`] counts one from its admission until it is dropped, which
//! happens however the connection ends, so the count is exact at any time.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

use crate::actor::{Actor, Limits};
use crate::push::{PushOptions, PushQueues};
use crate::{ConnectionContext, ConnectionId, FairnessConfig, Protocol, PushStats, SessionRegistry};

/// Settings of a server for one protocol, each with a default.
pub struct Builder<P: Protocol> {
    protocol: P,
    push: PushOptions<P::Frame>,
    fairness: FairnessConfig,
    limits: Limits,
    connections: usize,
    per_address: usize,
}

impl<P: Protocol> Builder<P> {
    /// How urgent and other pushes share the way out. Default: [`FairnessConfig::default`].
    #[must_use]
    pub fn with_fairness(self, fairness: FairnessConfig) -> Self {
        Self { fairness, ..self }
    }

    /// Where frames go that a dropping policy drops. A full queue is counted and logged. Default: nowhere, they are counted.
    #[must_use]
    pub fn with_push_dlq(mut self, dead_letters: mpsc::Sender<P::Frame>) -> Self {
        self.push.dead_letters = Some(dead_letters);
        self
    }

    /// Also sends to the dead letters what was queued when a connection ended. Default: off, because it is seldom wanted
    /// when the peer has left.
    #[must_use]
    pub fn keep_unsent(mut self) -> Self {
        self.push.keep_unsent = true;
        self
    }

    /// How many urgent and other frames may wait for one connection, at least one each. Default: 16 and 256.
    #[must_use]
    pub fn push_capacities(mut self, high: usize, low: usize) -> Self {
        (self.push.high, self.push.low) = (PushOptions::<P::Frame>::room(high), PushOptions::<P::Frame>::room(low));
        self
    }

    /// How many bytes of pushed frames may wait for one connection, of each priority. Default: 1 MiB. Slots are bounded by their
    /// number alone.
    #[must_use]
    pub fn push_bytes(mut self, bytes: usize) -> Self {
        self.push.bytes = PushOptions::<P::Frame>::room(bytes);
        self
    }

    /// How many bytes are gathered before they are written: what an urgent push waits for at most. Default: 64 KiB, a socket
    /// buffer's worth.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.limits.batch = bytes.max(1);
        self
    }

    /// How many bytes are read ahead of a reply that takes its time. Default: 64 KiB.
    #[must_use]
    pub fn read_ahead_bytes(mut self, bytes: usize) -> Self {
        self.limits.read_ahead = bytes.max(1);
        self
    }

    /// How many connections there may be. Default: 10 000, below the usual limit on files.
    #[must_use]
    pub fn max_connections(self, connections: usize) -> Self {
        Self { connections, ..self }
    }

    /// How many connections one address may have. Default: as many as there may be.
    #[must_use]
    pub fn max_connections_per_address(self, per_address: usize) -> Self {
        Self { per_address, ..self }
    }

    /// The supervisor of a server with these settings.
    pub fn build(self) -> Supervisor<P> {
        Supervisor {
            shared: Arc::new(Shared {
                protocol: Arc::new(self.protocol),
                push: Arc::new(self.push),
                fairness: self.fairness,
                limits: self.limits,
                connections: self.connections,
                per_address: self.per_address,
                registry: SessionRegistry::new(),
                ids: AtomicU64::new(0),
                counts: Mutex::default(),
                changed: Notify::new(),
                phase: Arc::default(),
            }),
        }
    }
}

impl<P: Protocol> fmt::Debug for Builder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Admits connections, knows them, and ends them. Clones are the same supervisor.
pub struct Supervisor<P: Protocol> {
    shared: Arc<Shared<P>>,
}

struct Shared<P: Protocol> {
    protocol: Arc<P>,
    push: Arc<PushOptions<P::Frame>>,
    fairness: FairnessConfig,
    limits: Limits,
    connections: usize,
    per_address: usize,
    registry: SessionRegistry<P::Frame>,
    ids: AtomicU64,
    counts: Mutex<Counts>,
    /// Rung when a connection has ended, and when the phase changes.
    changed: Notify,
    phase: Arc<SharedPhase>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// How far a shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Open = 0,
    /// Connections write what is gathered, and end.
    Closing = 1,
    /// Connections end at once.
    Aborted = 2,
}

#[derive(Debug, Default)]
pub(crate) struct SharedPhase(AtomicU8);

impl SharedPhase {
    pub(crate) fn get(&self) -> Phase {
        match self.0.load(SeqCst) {
            0 => Phase::Open,
            1 => Phase::Closing,
            _ => Phase::Aborted,
        }
    }
}

/// Why a connection is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// There are as many as there may be.
    #[error("there are {0} connections, and no more are admitted")]
    TooMany(usize),
    /// Its address has as many as one may have.
    #[error("{0} has {1} connections, and no more are admitted from one address")]
    TooManyFrom(IpAddr, usize),
    /// The server shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl<P: Protocol> Supervisor<P> {
    /// The settings of a server that speaks this protocol.
    pub fn with_protocol(protocol: P) -> Builder<P> {
        Builder {
            protocol,
            push: PushOptions::new(),
            fairness: FairnessConfig::default(),
            limits: Limits { batch: 64 * 1024, read_ahead: 64 * 1024 },
            connections: 10_000,
            per_address: usize::MAX,
        }
    }

    /// Admits a connection from that address, or says why not: so whoever accepts can refuse politely.
    pub fn admit(&self, peer: SocketAddr) -> Result<Permit<P>, Refused> {
        let Shared { connections, per_address, phase, .. } = &*self.shared;
        let mut counts = self.shared.counts();
        if phase.get() != Phase::Open {
            return Err(Refused::ShuttingDown);
        }
        if counts.all >= *connections {
            return Err(Refused::TooMany(counts.all));
        }
        let own = counts.by_address.get(&peer.ip()).copied().unwrap_or(0);
        if own >= *per_address {
            return Err(Refused::TooManyFrom(peer.ip(), own));
        }
        counts.all += 1;
        *counts.by_address.entry(peer.ip()).or_default() += 1;
        drop(counts);
        let id = ConnectionId(self.shared.ids.fetch_add(1, SeqCst) + 1);
        Ok(Permit { shared: Arc::clone(&self.shared), id, peer })
    }

    /// Accepts and runs connections until [`shutdown`](Self::shutdown). One that is refused is closed at once. A failed
    /// accept is logged and tried again after a moment, since it mostly means that the process has too many files open.
    pub async fn serve(&self, listener: TcpListener) -> io::Result<()> {
        loop {
            let changed = self.shared.changed.notified();
            if self.shared.phase.get() != Phase::Open {
                return Ok(());
            }
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => match self.admit(peer) {
                        Ok(permit) => {
                            // It fails when the peer has already left, which is that connection's affair.
                            if let Err(error) = socket.set_nodelay(true) {
                                tracing::debug!(%peer, %error, "small writes may be delayed");
                            }
                            tokio::spawn(permit.run(socket, Vec::new()));
                        }
                        Err(refused) => tracing::info!(%peer, %refused, "a connection was refused"),
                    },
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                () = changed => {}
            }
        }
    }

    /// The live connections.
    pub fn sessions(&self) -> &SessionRegistry<P::Frame> {
        &self.shared.registry
    }

    /// How many connections are admitted and have not ended.
    pub fn count(&self) -> usize {
        self.shared.counts().all
    }

    /// What became of pushed frames that were not written, on all connections.
    pub fn push_stats(&self) -> PushStats {
        self.shared.push.stats()
    }

    /// The protocol.
    pub fn protocol(&self) -> &P {
        &self.shared.protocol
    }

    /// Admits nobody any more and ends every connection, after it has written what it had gathered. What has not ended by
    /// the deadline is ended at once. Returns when there are none; a [`Permit`] that is held and not run counts as one.
    pub async fn shutdown(&self, deadline: Duration) {
        self.enter(Phase::Closing);
        if tokio::time::timeout(deadline, self.empty()).await.is_err() {
            tracing::warn!(connections = self.count(), "connections did not end in time and are aborted");
            self.enter(Phase::Aborted);
            self.empty().await;
        }
    }

    fn enter(&self, phase: Phase) {
        self.shared.phase.0.fetch_max(phase as u8, SeqCst);
        self.shared.changed.notify_waiters();
        for (_, handle) in self.shared.registry.list() {
            handle.0.wake();
        }
    }

    async fn empty(&self) {
        loop {
            let changed = self.shared.changed.notified();
            if self.count() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl<P: Protocol> Shared<P> {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Protocol> Clone for Supervisor<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P: Protocol> fmt::Debug for Supervisor<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").field("connections", &self.count()).finish_non_exhaustive()
    }
}

/// Leave to connect. It counts until it is dropped or its connection has ended.
pub struct Permit<P: Protocol> {
    shared: Arc<Shared<P>>,
    id: ConnectionId,
    peer: SocketAddr,
}

impl<P: Protocol> Permit<P> {
    /// The name the connection will have.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// Runs the connection to its end, on the task that polls this. `already_read` is what was read from the socket before,
    /// by whoever upgraded it.
    pub async fn run<S: AsyncRead + AsyncWrite + Unpin>(self, socket: S, already_read: Vec<u8>) {
        let Shared { protocol, push, fairness, limits, registry, phase, .. } = &*self.shared;
        let queues = PushQueues::new(Arc::clone(push), *fairness);
        registry.insert(self.id, &queues.handle());
        let context = ConnectionContext::new(self.id, self.peer);
        let actor =
            Actor::new(socket, &already_read, Arc::clone(protocol), context, queues, Arc::clone(phase), *limits);
        drop(already_read);
        actor.run().await;
    }
}

impl<P: Protocol> Drop for Permit<P> {
    fn drop(&mut self) {
        self.shared.registry.remove(&self.id);
        let mut counts = self.shared.counts();
        counts.all -= 1;
        if let Some(own) = counts.by_address.get_mut(&self.peer.ip()) {
            *own -= 1;
            if *own == 0 {
                counts.by_address.remove(&self.peer.ip());
            }
        }
        drop(counts);
        self.shared.changed.notify_waiters();
    }
}

impl<P: Protocol> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}
