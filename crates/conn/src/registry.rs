//! The registry of live connections.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use crate::mailbox::Mailbox;
use crate::sync::lock;
use crate::{FrameLike, PushHandle, PushPolicy, PushPriority, Session};

/// The id of a connection, unique in its supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conn-{}", self.0)
    }
}

/// The live connections, by id. The registry does not keep connections alive, and does not list connections that have ended, even if
/// there are still handles to them.
///
/// A supervisor registers its connections itself. Applications can [insert](Self::insert) other handles, including those of bare
/// [`PushQueues`](crate::PushQueues).
pub struct SessionRegistry<F: FrameLike> {
    /// Sorted by id, which is the order of admission. An iteration clones the `Arc` and releases the lock. A concurrent change
    /// copies the map.
    entries: Mutex<Arc<Entries<F>>>,
}

type Entries<F> = BTreeMap<ConnectionId, Entry<F>>;

/// The connection with an id. `listed` and `running` are the same unless the application has inserted or removed the id.
struct Entry<F> {
    /// The connection that the registry lists.
    listed: Weak<Mailbox<F>>,
    /// The connection that the supervisor runs. The supervisor wakes and counts it even if it is not listed.
    running: Weak<Mailbox<F>>,
}

impl<F: FrameLike> SessionRegistry<F> {
    /// Creates an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a handle to a live connection.
    pub fn get(&self, id: &ConnectionId) -> Option<PushHandle<F>> {
        lock(&self.entries).get(id)?.live().map(PushHandle::new)
    }

    /// Lists a handle under an id, replacing the handle that was listed before.
    pub fn insert(&self, id: ConnectionId, handle: &PushHandle<F>) {
        Arc::make_mut(&mut lock(&self.entries)).entry(id).or_default().listed = Arc::downgrade(&handle.0);
    }

    /// Removes an id from the list. A running connection is not affected.
    pub fn remove(&self, id: &ConnectionId) {
        let mut entries = lock(&self.entries);
        let entries = Arc::make_mut(&mut entries);
        if let Some(entry) = entries.get_mut(id) {
            entry.listed = Weak::new();
            if entry.running.strong_count() == 0 {
                entries.remove(id);
            }
        }
    }

    /// Registers a connection that the supervisor runs.
    pub(crate) fn add_running(&self, id: ConnectionId, mailbox: &Arc<Mailbox<F>>) {
        let entry = Entry { listed: Arc::downgrade(mailbox), running: Arc::downgrade(mailbox) };
        Arc::make_mut(&mut lock(&self.entries)).insert(id, entry);
    }

    /// Removes a connection that has ended.
    pub(crate) fn remove_running(&self, id: ConnectionId) {
        Arc::make_mut(&mut lock(&self.entries)).remove(&id);
    }

    /// Returns all running connections, listed or not.
    pub(crate) fn running(&self) -> Vec<Arc<Mailbox<F>>> {
        lock(&self.entries).values().filter_map(|entry| entry.running.upgrade()).collect()
    }

    /// Returns the running connections with these ids, listed or not.
    pub(crate) fn find_running(&self, ids: &[ConnectionId]) -> Vec<Arc<Mailbox<F>>> {
        let entries = lock(&self.entries);
        ids.iter().filter_map(|id| entries.get(id)?.running.upgrade()).collect()
    }

    /// Returns the number of live connections.
    pub fn len(&self) -> usize {
        lock(&self.entries).values().filter(|entry| entry.live().is_some()).count()
    }

    /// Whether there is no live connection.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the live connections at one moment, in the order in which they were admitted.
    pub fn list(&self) -> Vec<Session<F>> {
        live_sessions(&lock(&self.entries)).collect()
    }

    /// Pushes a frame to every live connection for which `frame` returns one. If a queue is full, its frame is dropped. Returns the
    /// number of connections for which a frame was pushed or dropped. Frames should share their body, so that each is cheap.
    pub fn broadcast(&self, priority: PushPriority, mut frame: impl FnMut(&Session<F>) -> Option<F>) -> usize {
        let mut reached = 0;
        // Not under the lock, because `frame` may use the registry. Sessions are created one by one, so that each connection is used
        // while it is in the cache.
        let entries = Arc::clone(&lock(&self.entries));
        for session in live_sessions(&entries) {
            if let Some(frame) = frame(&session) {
                let pushed = session.mailbox().push_or_drop(frame, priority, PushPolicy::DropIfFull, None);
                reached += usize::from(pushed.is_ok());
            }
        }
        reached
    }
}

fn live_sessions<F: FrameLike>(entries: &Entries<F>) -> impl Iterator<Item = Session<F>> {
    entries.iter().filter_map(|(&id, entry)| Some(Session::new(id, entry.live()?)))
}

impl<F: FrameLike> Entry<F> {
    /// Returns the listed connection, unless it has ended.
    fn live(&self) -> Option<Arc<Mailbox<F>>> {
        self.listed.upgrade().filter(|mailbox| !mailbox.outbox.is_closed())
    }
}

impl<F> Clone for Entry<F> {
    fn clone(&self) -> Self {
        Self { listed: Weak::clone(&self.listed), running: Weak::clone(&self.running) }
    }
}

impl<F> Default for Entry<F> {
    fn default() -> Self {
        Self { listed: Weak::new(), running: Weak::new() }
    }
}

impl<F: FrameLike> Default for SessionRegistry<F> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<F: FrameLike> fmt::Debug for SessionRegistry<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRegistry").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Frame, PushQueues};

    const ID: ConnectionId = ConnectionId(1);

    #[test]
    fn inserted_handle_is_listed_until_its_queues_are_dropped() {
        let registry = SessionRegistry::<Frame>::new();
        let (queues, handle) = PushQueues::bounded(1, 1);
        registry.insert(ID, &handle);
        assert_eq!((registry.len(), registry.running().len()), (1, 0));
        drop(queues);
        assert!(registry.is_empty() && registry.get(&ID).is_none());
        registry.remove(&ID);
        assert!(lock(&registry.entries).is_empty());
    }

    #[test]
    fn removing_a_running_connection_only_hides_it() {
        let registry = SessionRegistry::<Frame>::new();
        let (queues, handle) = PushQueues::bounded(1, 1);
        registry.add_running(ID, &queues.mailbox);
        registry.remove(&ID);
        assert_eq!((registry.len(), registry.running().len(), registry.find_running(&[ID]).len()), (0, 1, 1));
        registry.insert(ID, &handle);
        assert_eq!(registry.len(), 1);
        registry.remove_running(ID);
        assert!(lock(&registry.entries).is_empty());
    }
}
