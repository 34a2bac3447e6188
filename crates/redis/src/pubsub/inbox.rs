//! The bounded queue between the pub/sub connection and a subscriber.
//!
//! It holds messages within a bound of their number and bytes. What is not a message takes no memory of its own: a gap is a mark on
//! the message after it, and dropped messages are a number. So a subscriber that does not read costs the same however often the
//! connection is replaced.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{Event, Message, SubscribeOptions, WhenSlow};
use crate::Error;
use crate::sync::{Mutex, MutexGuard, lock};

/// Memory for each message besides its payload and the name of its channel. Subscriptions of the same channel share it.
const OVERHEAD_BYTES: usize = size_of::<Entry>() + size_of::<Message>() + 2 * size_of::<usize>();
/// The capacity for messages that is kept while the queue is empty.
const MAX_IDLE_MESSAGES: usize = 256;

pub(super) struct Inbox {
    options: SubscribeOptions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    messages: VecDeque<Entry>,
    /// The bytes of `messages`.
    bytes: usize,
    /// The gap after the last message.
    gap: Option<u64>,
    /// Messages that were dropped so far.
    dropped: u64,
    /// Those of them that the subscriber has not been told of. They were before all of `messages`.
    unreported: u64,
    /// Whether every channel was confirmed. Before, messages are ignored.
    is_started: bool,
    /// Whether the connection waits until a message is taken.
    is_blocked: bool,
    end: Option<End>,
    waker: Option<Waker>,
}

/// The end of a subscription, and its error until that is returned.
struct End(Option<Error>);

struct Entry {
    /// The gap before the message.
    gap: Option<u64>,
    message: Arc<Message>,
}

/// What became of a message.
#[derive(Debug, PartialEq)]
pub(super) enum Pushed {
    /// It was queued or is not for this subscription.
    Done,
    /// It was queued, and this number of older ones were dropped.
    Dropped(u64),
    /// There is no space, and the options say to wait for it.
    Full(Arc<Message>),
}

impl Entry {
    fn cost(&self) -> usize {
        cost(&self.message)
    }
}

fn cost(message: &Message) -> usize {
    message.payload.len() + message.channel.len() + OVERHEAD_BYTES
}

impl Inbox {
    pub(super) fn new(options: SubscribeOptions) -> Self {
        Self { options, state: Mutex::default() }
    }

    /// Accepts messages from now on.
    pub(super) fn start(&self) {
        lock(&self.state).is_started = true;
    }

    pub(super) fn push(&self, message: Arc<Message>) -> Pushed {
        let mut state = lock(&self.state);
        if !state.is_started || state.end.is_some() {
            return Pushed::Done;
        }
        let cost = cost(&message);
        let mut dropped = 0;
        while state.is_full(&self.options, cost) {
            if self.options.when_slow == WhenSlow::Wait {
                state.is_blocked = true;
                return Pushed::Full(message);
            }
            state.drop_oldest();
            dropped += 1;
        }
        state.bytes += cost;
        let gap = state.gap.take();
        state.messages.push_back(Entry { gap, message });
        wake(state);
        if dropped == 0 { Pushed::Done } else { Pushed::Dropped(dropped) }
    }

    /// Records that messages may have been missed before the connection with this generation.
    pub(super) fn push_gap(&self, generation: u64) {
        let mut state = lock(&self.state);
        if state.end.is_none() {
            state.gap = state.gap.max(Some(generation));
            wake(state);
        }
    }

    /// Counts a message that was neither queued nor replaced, because the connection has ended.
    pub(super) fn count_dropped(&self) {
        lock(&self.state).dropped += 1;
    }

    /// Ends the subscription after the queued messages, with this error. The first end counts.
    pub(super) fn end(&self, error: Option<Error>) {
        let mut state = lock(&self.state);
        if state.end.is_none() {
            state.end = Some(End(error));
            wake(state);
        }
    }

    /// Returns the next event, and whether the connection waits for the space that became free.
    pub(super) fn poll_next(&self, context: &mut Context<'_>) -> Poll<(Option<Result<Event, Error>>, bool)> {
        let mut state = lock(&self.state);
        let event = match (state.next_event(), &mut state.end) {
            (Some(event), _) => Some(Ok(event)),
            (None, Some(End(error))) => error.take().map(Err),
            (None, None) => {
                let old = state.waker.replace(context.waker().clone());
                drop(state);
                drop(old);
                return Poll::Pending;
            }
        };
        Poll::Ready((event, std::mem::take(&mut state.is_blocked)))
    }

    /// Returns how many messages were dropped so far.
    pub(super) fn dropped(&self) -> u64 {
        lock(&self.state).dropped
    }
}

impl State {
    /// Whether there is no space for a message. One that is larger than the limit is queued alone.
    fn is_full(&self, options: &SubscribeOptions, cost: usize) -> bool {
        !self.messages.is_empty()
            && (self.messages.len() >= options.max_messages || self.bytes.saturating_add(cost) > options.max_bytes)
    }

    fn pop(&mut self) -> Option<Entry> {
        let entry = self.messages.pop_front()?;
        self.bytes -= entry.cost();
        if self.messages.is_empty() && self.messages.capacity() > MAX_IDLE_MESSAGES {
            self.messages = VecDeque::new();
        }
        Some(entry)
    }

    /// Drops the oldest message. A gap before it is then before the next one.
    fn drop_oldest(&mut self) {
        let Some(Entry { gap, .. }) = self.pop() else { return };
        self.dropped += 1;
        self.unreported += 1;
        let next = self.messages.front_mut().map_or(&mut self.gap, |next| &mut next.gap);
        *next = next.or(gap);
    }

    fn next_event(&mut self) -> Option<Event> {
        if self.unreported > 0 {
            return Some(Event::Dropped { count: std::mem::take(&mut self.unreported) });
        }
        let gap = self.messages.front_mut().map_or(&mut self.gap, |oldest| &mut oldest.gap);
        if let Some(generation) = gap.take() {
            return Some(Event::Gap { generation });
        }
        self.pop().map(|entry| Event::Message(entry.message))
    }
}

/// Wakes the subscriber, outside of the critical section.
fn wake(mut state: MutexGuard<'_, State>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &'static str) -> Arc<Message> {
        Arc::new(Message { channel: "c".into(), pattern: None, payload: payload.into() })
    }

    fn inbox(options: SubscribeOptions) -> Inbox {
        let inbox = Inbox::new(options);
        inbox.start();
        inbox
    }

    /// Returns all events as text, and whether one has freed space that the connection waits for.
    fn events(inbox: &Inbox) -> (Vec<String>, bool) {
        let (mut events, mut frees) = (Vec::new(), false);
        loop {
            match inbox.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready((Some(Ok(event)), frees_space)) => {
                    events.push(match event {
                        Event::Message(message) => String::from_utf8_lossy(&message.payload).into_owned(),
                        Event::Gap { generation } => format!("gap {generation}"),
                        Event::Dropped { count } => format!("dropped {count}"),
                    });
                    frees |= frees_space;
                }
                Poll::Ready((Some(Err(error)), _)) => events.push(error.to_string()),
                Poll::Ready((None, _)) => events.push("end".to_owned()),
                Poll::Pending => return (events, frees),
            }
            if events.last().is_some_and(|last| last == "end") {
                return (events, frees);
            }
        }
    }

    #[test]
    fn messages_before_the_confirmation_are_ignored() {
        let inbox = Inbox::new(SubscribeOptions::default());
        assert_eq!(inbox.push(message("a")), Pushed::Done);
        inbox.start();
        assert_eq!(inbox.push(message("b")), Pushed::Done);
        assert_eq!(events(&inbox).0, ["b"]);
    }

    #[test]
    fn oldest_messages_are_dropped_and_gaps_stay() {
        let inbox = inbox(SubscribeOptions::default().max_messages(2));
        inbox.push_gap(1);
        for (payload, pushed) in [("a", Pushed::Done), ("b", Pushed::Done), ("c", Pushed::Dropped(1))] {
            assert_eq!(inbox.push(message(payload)), pushed);
        }
        inbox.push_gap(2);
        inbox.push_gap(3);
        assert_eq!(inbox.push(message("d")), Pushed::Dropped(1));
        assert_eq!(inbox.dropped(), 2);
        assert_eq!(events(&inbox).0, ["dropped 2", "gap 1", "c", "gap 3", "d"]);
    }

    #[test]
    fn gaps_without_messages_are_merged() {
        let inbox = inbox(SubscribeOptions::default().max_messages(1));
        for generation in 0..1000 {
            inbox.push_gap(generation);
            inbox.push(message("a"));
        }
        assert_eq!(events(&inbox).0, ["dropped 999", "gap 999", "a"]);
    }

    #[test]
    fn bytes_are_bounded_and_a_larger_message_is_queued_alone() {
        let options = SubscribeOptions::default().max_bytes(2 * (OVERHEAD_BYTES + 2));
        let inbox = inbox(options);
        assert_eq!(inbox.push(message("a")), Pushed::Done);
        assert_eq!(inbox.push(message("b")), Pushed::Done);
        let large: &'static str = "0123456789".repeat(1000).leak();
        assert_eq!(inbox.push(message(large)), Pushed::Dropped(2));
        assert_eq!(inbox.push(message("c")), Pushed::Dropped(1));
        assert_eq!(events(&inbox).0, ["dropped 3", "c"]);
    }

    #[test]
    fn full_queue_waits_until_a_message_is_taken() {
        let inbox = inbox(SubscribeOptions::default().max_messages(1).when_slow(WhenSlow::Wait));
        assert_eq!(inbox.push(message("a")), Pushed::Done);
        let Pushed::Full(second) = inbox.push(message("b")) else { panic!("it waits") };
        assert_eq!(events(&inbox), (vec!["a".to_owned()], true));
        assert_eq!(inbox.push(second), Pushed::Done);
        assert_eq!(events(&inbox), (vec!["b".to_owned()], false));
    }

    #[test]
    fn error_is_the_last_event() {
        let inbox = inbox(SubscribeOptions::default());
        inbox.push(message("a"));
        inbox.end(Some(Error::QueueFull));
        inbox.end(None);
        assert_eq!(inbox.push(message("b")), Pushed::Done);
        assert_eq!(events(&inbox).0, ["a".to_owned(), Error::QueueFull.to_string(), "end".to_owned()]);
    }
}
