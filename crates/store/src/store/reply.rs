//! The reply to a write: a oneshot channel whose sender returns the waker of the receiver instead of waking it.
//!
//! The writer sends the replies of a whole group and then wakes each caller once. If it woke them one by one, a runtime on the same
//! core would be scheduled after each reply.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::lock::lock;

/// Creates a channel for one reply.
pub(super) fn reply<T>() -> (ReplySender<T>, Reply<T>) {
    let slot = Arc::new(ReplySlot(Mutex::new(ReplyState::Waiting(None))));
    (ReplySender(Arc::clone(&slot)), Reply(slot))
}

/// The sender of a reply. If it is dropped without sending, the receiver gets `None`.
pub(super) struct ReplySender<T>(Arc<ReplySlot<T>>);

/// A future for the reply. Resolves to `None` if the sender was dropped.
pub(super) struct Reply<T>(Arc<ReplySlot<T>>);

struct ReplySlot<T>(Mutex<ReplyState<T>>);

enum ReplyState<T> {
    Waiting(Option<Waker>),
    Sent(T),
    /// The value was taken, or the sender or the receiver was dropped.
    Ended,
}

impl<T> ReplySlot<T> {
    /// Sets the final state if the receiver still waits. Returns the waker of the receiver, or the state if it does not wait.
    fn complete(&self, state: ReplyState<T>) -> (Option<Waker>, Option<ReplyState<T>>) {
        let mut current = lock(&self.0);
        match &mut *current {
            ReplyState::Waiting(waker) => {
                let waker = waker.take();
                *current = state;
                (waker, None)
            }
            // The caller drops the state after the lock is released.
            ReplyState::Sent(_) | ReplyState::Ended => (None, Some(state)),
        }
    }
}

impl<T> ReplySender<T> {
    /// Sends the reply. Returns the waker of the receiver, which the caller must wake.
    #[must_use]
    pub(super) fn send(self, value: T) -> Option<Waker> {
        self.0.complete(ReplyState::Sent(value)).0
    }
}

impl<T> Drop for ReplySender<T> {
    fn drop(&mut self) {
        if let (Some(waker), _) = self.0.complete(ReplyState::Ended) {
            waker.wake();
        }
    }
}

impl<T> Future for Reply<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = lock(&self.0.0);
        if let ReplyState::Waiting(waker) = &mut *state {
            if waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
                let before = waker.replace(context.waker().clone());
                drop(state);
                drop(before);
            }
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, ReplyState::Ended) {
            ReplyState::Sent(value) => Poll::Ready(Some(value)),
            _ => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *lock(&self.0.0), ReplyState::Ended);
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
    fn receiver_of_several_replies_is_woken_once() {
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
    fn dropping_the_sender_wakes_the_receiver() {
        let count = Arc::new(Count::default());
        let (sender, mut pending) = reply::<u32>();
        assert_eq!(poll(&mut pending, &count), Poll::Pending);
        drop(sender);
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(poll(&mut pending, &count), Poll::Ready(None));
    }

    #[test]
    fn value_without_a_receiver_is_dropped() {
        let value = Arc::new(());
        let (sender, pending) = reply();
        drop(pending);
        assert!(sender.send(Arc::clone(&value)).is_none());
        assert_eq!(Arc::strong_count(&value), 1);
        // A value that the receiver never takes is dropped with it.
        let (sender, pending) = reply();
        assert!(sender.send(Arc::clone(&value)).is_none());
        drop(pending);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
