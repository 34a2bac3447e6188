//! The event queue of an inbox.

use std::collections::VecDeque;

use crate::subscription::Event;

/// A FIFO queue of events. It allocates no memory for the common cases of no event and one event.
#[derive(Debug, Default)]
pub(crate) enum EventQueue {
    #[default]
    Empty,
    One(Event),
    /// At least one.
    Several(VecDeque<Event>),
}

impl EventQueue {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::One(_) => 1,
            Self::Several(events) => events.len(),
        }
    }

    pub(crate) fn push(&mut self, event: Event) {
        match std::mem::take(self) {
            Self::Empty => *self = Self::One(event),
            Self::One(first) => *self = Self::Several(VecDeque::from([first, event])),
            Self::Several(mut events) => {
                events.push_back(event);
                *self = Self::Several(events);
            }
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        match std::mem::take(self) {
            Self::Empty => None,
            Self::One(event) => Some(event),
            Self::Several(mut events) => {
                let first = events.pop_front();
                if !events.is_empty() {
                    *self = Self::Several(events);
                }
                first
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidewire_store::Position;

    use super::*;
    use crate::{Mark, QueryResult};

    #[test]
    fn events_are_popped_in_order() {
        let event = |sequence| {
            let mark = Mark::new(Position { epoch: 1, sequence }, 0);
            Event::Snapshot { result: QueryResult::NoValue, mark }
        };
        let sequence = |event: Option<Event>| match event? {
            Event::Snapshot { mark, .. } | Event::Delta { mark, .. } => Some(mark.position().sequence),
        };
        let mut queue = EventQueue::default();
        for several in [1, 2, 5] {
            for number in 1..=several {
                queue.push(event(number));
                assert_eq!(queue.len() as u64, number);
            }
            for number in 1..=several {
                assert_eq!(sequence(queue.pop()), Some(number));
            }
            assert!(matches!(queue, EventQueue::Empty), "{queue:?}");
            assert_eq!(sequence(queue.pop()), None);
        }
    }
}
