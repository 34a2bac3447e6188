//! The reply to one write: a channel for one value, whose sender does not wake the receiver itself.
//!
//! The writer answers all writes of a group, and then wakes their callers, each once. If it woke them one by one, a runtime on the
//! same core would run after each of them, for one reply at a time.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::lock::lock;

/// Returns both ends of a reply.
pub(super) fn reply<T>() -> (ReplySender<T>, Reply<T>) {
    let slot = Arc::new(Slot(Mutex::new(State::Waiting(None))));
    (ReplySender(Arc::clone(&slot)), Reply(slot))
}

/// The sender of a reply. If it is dropped without a reply, the receiver gets `None`.
pub(super) struct ReplySender<T>(Arc<Slot<T>>);

/// The reply, when it is there. `None` if there is none.
pub(super) struct Reply<T>(Arc<Slot<T>>);

struct Slot<T>(Mutex<State<T>>);

enum State<T> {
    Waiting(Option<Waker>),
    Sent(T),
    /// It was taken, or the sender or the receiver has gone.
    Ended,
}

impl<T> Slot<T> {
    /// Replaces the state of a reply that is not there. Returns the waker of the receiver, and the state if the receiver has gone.
    fn end(&self, state: State<T>) -> (Option<Waker>, Option<State<T>>) {
        let mut current = lock(&self.0);
        match &mut *current {
            State::Waiting(waker) => {
                let waker = waker.take();
                *current = state;
                (waker, None)
            }
            // Not dropped under the lock.
            State::Sent(_) | State::Ended => (None, Some(state)),
        }
    }
}

impl<T> ReplySender<T> {
    /// Sends the reply. Returns the waker of the receiver, which must be woken.
    #[must_use]
    pub(super) fn send(self, value: T) -> Option<Waker> {
        self.0.end(State::Sent(value)).0
    }
}

impl<T> Drop for ReplySender<T> {
    fn drop(&mut self) {
        if let (Some(waker), _) = self.0.end(State::Ended) {
            waker.wake();
        }
    }
}

impl<T> Future for Reply<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = lock(&self.0.0);
        if let State::Waiting(waker) = &mut *state {
            if waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
                let before = waker.replace(context.waker().clone());
                drop(state);
                drop(before);
            }
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, State::Ended) {
            State::Sent(value) => Poll::Ready(Some(value)),
            _ => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *lock(&self.0.0), State::Ended);
        drop(state);
    }
}

/// Wakes each receiver once.
pub(super) fn wake_all(mut wakers: Vec<Waker>) {
    wakers.sort_unstable_by_key(|waker| waker.data().addr());
    wakers.dedup_by(|one, other| one.will_wake(other));
    wakers.into_iter().for_each(Waker::wake);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn poll<T>(reply: &mut Reply<T>, count: &Arc<Count>) -> Poll<Option<T>> {
        Pin::new(reply).poll(&mut Context::from_waker(&Waker::from(Arc::clone(count))))
    }

    #[test]
    fn a_receiver_of_several_replies_is_woken_once() {
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let mut replies = Vec::new();
        let mut senders = Vec::new();
        for number in 0..10 {
            let (sender, mut reply) = reply();
            assert_eq!(poll(&mut reply, &counts[number % 2]), Poll::Pending);
            senders.push((sender, number));
            replies.push(reply);
        }
        let wakers = senders.into_iter().filter_map(|(sender, number)| sender.send(number)).collect();
        assert!(counts.iter().all(|count| count.0.load(SeqCst) == 0));
        wake_all(wakers);
        assert!(counts.iter().all(|count| count.0.load(SeqCst) == 1));
        for (number, reply) in replies.iter_mut().enumerate() {
            assert_eq!(poll(reply, &counts[0]), Poll::Ready(Some(number)));
        }
    }

    #[test]
    fn a_sender_that_goes_wakes_the_receiver() {
        let count = Arc::new(Count::default());
        let (sender, mut pending) = reply::<u32>();
        assert_eq!(poll(&mut pending, &count), Poll::Pending);
        drop(sender);
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(poll(&mut pending, &count), Poll::Ready(None));
    }

    #[test]
    fn a_value_without_a_receiver_is_dropped() {
        let value = Arc::new(());
        let (sender, pending) = reply();
        drop(pending);
        assert!(sender.send(Arc::clone(&value)).is_none());
        assert_eq!(Arc::strong_count(&value), 1);
        // Nor is one that is not taken kept.
        let (sender, pending) = reply();
        assert!(sender.send(Arc::clone(&value)).is_none());
        drop(pending);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
