//! The registry of live connections.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use crate::mailbox::Mailbox;
use crate::sync::lock;
use crate::{FrameLike, PushHandle, PushPolicy, PushPriority, Session};

/// Names a connection, for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conn-{}", self.0)
    }
}

/// Finds live connections by their id. It keeps none of them alive, and lists none that has gone, whoever still holds a handle
/// to it.
pub struct SessionRegistry<F: FrameLike> {
    /// Whoever goes through them all takes the map as it is, and frees the lock; who changes it meanwhile changes a copy.
    sessions: Mutex<Arc<Sessions<F>>>,
}

/// In the order in which they came.
type Sessions<F> = BTreeMap<ConnectionId, Weak<Mailbox<F>>>;

impl<F: FrameLike> SessionRegistry<F> {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// A handle to a live connection.
    pub fn get(&self, id: &ConnectionId) -> Option<PushHandle<F>> {
        live(lock(&self.sessions).get(id)?).map(PushHandle::new)
    }

    /// Lists a connection.
    pub fn insert(&self, id: ConnectionId, handle: &PushHandle<F>) {
        Arc::make_mut(&mut lock(&self.sessions)).insert(id, Arc::downgrade(&handle.0));
    }

    /// Strikes a connection off.
    pub fn remove(&self, id: &ConnectionId) {
        Arc::make_mut(&mut lock(&self.sessions)).remove(id);
    }

    /// How many connections are live.
    pub fn len(&self) -> usize {
        lock(&self.sessions).values().filter(|session| live(session).is_some()).count()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The live connections at one moment, in the order in which they came.
    pub fn list(&self) -> Vec<Session<F>> {
        live_sessions(&lock(&self.sessions)).collect()
    }

    /// Pushes a frame to every live connection for which `frame` makes one, dropping it where there is no room. Returns to how
    /// many it was pushed or dropped for. Frames that share their body are cheap to make many of.
    pub fn broadcast(&self, priority: PushPriority, mut frame: impl FnMut(&Session<F>) -> Option<F>) -> usize {
        let mut reached = 0;
        // Not under the lock, as `frame` may look at the registry. And one by one, so that each is looked at while it is in the
        // cache.
        let sessions = Arc::clone(&lock(&self.sessions));
        for session in live_sessions(&sessions) {
            if let Some(frame) = frame(&session) {
                let pushed = session.mailbox().push_or_drop(frame, priority, PushPolicy::DropIfFull, None);
                reached += usize::from(pushed.is_ok());
            }
        }
        reached
    }
}

fn live_sessions<F: FrameLike>(sessions: &Sessions<F>) -> impl Iterator<Item = Session<F>> {
    sessions.iter().filter_map(|(&id, session)| Some(Session::new(id, live(session)?)))
}

fn live<F: FrameLike>(session: &Weak<Mailbox<F>>) -> Option<Arc<Mailbox<F>>> {
    session.upgrade().filter(|mailbox| !mailbox.outbox.is_closed())
}

impl<F: FrameLike> Default for SessionRegistry<F> {
    fn default() -> Self {
        Self { sessions: Mutex::default() }
    }
}

impl<F: FrameLike> fmt::Debug for SessionRegistry<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRegistry").field("len", &self.len()).finish()
    }
}
