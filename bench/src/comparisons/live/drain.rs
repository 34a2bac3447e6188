//! One task that reads the events of many subscribers, and polls only subscribers that were woken.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::Stream;
use futures_util::task::AtomicWaker;

/// Reads from many subscribers in one task.
pub(super) struct Drain<S> {
    subscribers: Vec<(S, Waker)>,
    woken: Arc<WokenSubscribers>,
    /// The subscribers to poll, swapped out of `woken`. Empty between calls.
    taken: Vec<usize>,
}

/// The numbers of the subscribers that were woken.
#[derive(Default)]
struct WokenSubscribers {
    numbers: Mutex<Vec<usize>>,
    task: AtomicWaker,
}

/// The waker of one subscriber.
struct SubscriberWaker {
    number: usize,
    woken: Arc<WokenSubscribers>,
}

impl Wake for SubscriberWaker {
    fn wake(self: Arc<Self>) {
        self.woken.numbers.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        self.woken.task.wake();
    }
}

impl<S: Stream + Unpin> Drain<S> {
    pub(super) fn new(subscribers: impl IntoIterator<Item = S>) -> Self {
        let woken = Arc::new(WokenSubscribers::default());
        let with_waker = |(number, subscriber)| {
            (subscriber, Waker::from(Arc::new(SubscriberWaker { number, woken: woken.clone() })))
        };
        let subscribers: Vec<_> = subscribers.into_iter().enumerate().map(with_waker).collect();
        // Each subscriber is polled once, to register its waker.
        let taken = (0..subscribers.len()).collect();
        let mut this = Self { subscribers, woken, taken };
        this.poll_taken(&mut |_| {});
        this
    }

    /// Runs `work`, and passes the events that arrive meanwhile to `each`. Reads all pending events before it returns.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>, mut each: impl FnMut(S::Item)) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            self.woken.task.register(context.waker());
            self.drain(&mut each);
            let done = work.as_mut().poll(context);
            if done.is_ready() {
                self.drain(&mut each);
            }
            done
        })
        .await
    }

    /// Passes all pending events to `each`.
    pub(super) fn drain(&mut self, each: &mut impl FnMut(S::Item)) {
        std::mem::swap(&mut *self.woken.numbers.lock().unwrap_or_else(PoisonError::into_inner), &mut self.taken);
        self.poll_taken(each);
    }

    fn poll_taken(&mut self, each: &mut impl FnMut(S::Item)) {
        for number in self.taken.drain(..) {
            let (subscriber, waker) = &mut self.subscribers[number];
            let mut context = Context::from_waker(waker);
            while let Poll::Ready(item) = Pin::new(&mut *subscriber).poll_next(&mut context) {
                each(item.expect("no subscription ends"));
            }
        }
    }
}
