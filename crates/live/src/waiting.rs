//! The queue of events in an inbox.

use std::collections::VecDeque;

use crate::subscription::Event;

/// Events that wait for a subscriber, the first one first. Mostly there is none, or one for a moment: neither takes memory beside
/// its own.
#[derive(Debug, Default)]
pub(crate) enum Waiting {
    #[default]
    Nothing,
    One(Event),
    /// At least one.
    Several(VecDeque<Event>),
}

impl Waiting {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::One(_) => 1,
            Self::Several(events) => events.len(),
        }
    }

    pub(crate) fn push(&mut self, event: Event) {
        match std::mem::take(self) {
            Self::Nothing => *self = Self::One(event),
            Self::One(first) => *self = Self::Several(VecDeque::from([first, event])),
            Self::Several(mut events) => {
                events.push_back(event);
                *self = Self::Several(events);
            }
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        match std::mem::take(self) {
            Self::Nothing => None,
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
    use crate::{Mark, Whole};

    #[test]
    fn what_came_first_goes_first_and_the_last_leaves_nothing() {
        let event = |sequence| {
            let mark = Mark::new(Position { epoch: 1, sequence }, 0);
            Event::Whole { whole: Whole::Nothing, mark }
        };
        let sequence = |event: Option<Event>| match event? {
            Event::Whole { mark, .. } | Event::Delta { mark, .. } => Some(mark.position().sequence),
        };
        let mut waiting = Waiting::default();
        for several in [1, 2, 5] {
            for number in 1..=several {
                waiting.push(event(number));
                assert_eq!(waiting.len() as u64, number);
            }
            for number in 1..=several {
                assert_eq!(sequence(waiting.pop()), Some(number));
            }
            assert!(matches!(waiting, Waiting::Nothing), "{waiting:?}");
            assert_eq!(sequence(waiting.pop()), None);
        }
    }
}
