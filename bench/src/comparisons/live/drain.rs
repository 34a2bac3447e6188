//! One task that takes the events of many subscribers, and looks only at those that have any.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::Stream;
use futures_util::task::AtomicWaker;

/// Subscribers, and which of them have something.
pub(super) struct Drain<S> {
    subscribers: Vec<(S, Waker)>,
    ready: Arc<Ready>,
    /// Taken from `ready`, and empty between two calls.
    taken: Vec<usize>,
}

#[derive(Default)]
struct Ready {
    numbers: Mutex<Vec<usize>>,
    task: AtomicWaker,
}

/// Tells which subscriber has something.
struct Bell {
    number: usize,
    ready: Arc<Ready>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ready.numbers.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        self.ready.task.wake();
    }
}

impl<S: Stream + Unpin> Drain<S> {
    pub(super) fn new(subscribers: impl IntoIterator<Item = S>) -> Self {
        let ready = Arc::new(Ready::default());
        let with_bell =
            |(number, subscriber)| (subscriber, Waker::from(Arc::new(Bell { number, ready: ready.clone() })));
        let subscribers: Vec<_> = subscribers.into_iter().enumerate().map(with_bell).collect();
        // Each is looked at once, so that it has its bell.
        let taken = (0..subscribers.len()).collect();
        let mut this = Self { subscribers, ready, taken };
        this.look(&mut |_| {});
        this
    }

    /// Hands over what the subscribers are told while something is done, and all that they have been told when it is.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>, mut each: impl FnMut(S::Item)) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            self.ready.task.register(context.waker());
            self.take(&mut each);
            let done = work.as_mut().poll(context);
            if done.is_ready() {
                self.take(&mut each);
            }
            done
        })
        .await
    }

    /// Hands over what the subscribers have been told.
    pub(super) fn take(&mut self, each: &mut impl FnMut(S::Item)) {
        std::mem::swap(&mut *self.ready.numbers.lock().unwrap_or_else(PoisonError::into_inner), &mut self.taken);
        self.look(each);
    }

    fn look(&mut self, each: &mut impl FnMut(S::Item)) {
        for number in self.taken.drain(..) {
            let (subscriber, bell) = &mut self.subscribers[number];
            let mut context = Context::from_waker(bell);
            while let Poll::Ready(item) = Pin::new(&mut *subscriber).poll_next(&mut context) {
                each(item.expect("no subscription ends"));
            }
        }
    }
}
