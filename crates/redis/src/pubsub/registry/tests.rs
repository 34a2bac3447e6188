//! The registry with a server that executes its commands.

use std::collections::BTreeSet;
use std::task::{Context, Poll};

use proptest::prelude::*;

use super::*;
use crate::pubsub::{Event, SubscribeOptions};

/// A registry, and a server that executes its commands.
#[derive(Default)]
struct World {
    registry: Registry,
    /// Commands that the server has not executed.
    sent: VecDeque<Change>,
    on_server: BTreeSet<(Kind, Bytes)>,
    joined: Vec<Joined>,
}

struct Joined {
    id: u64,
    wanted: BTreeSet<(Kind, Bytes)>,
    inbox: Arc<Inbox>,
    confirmation: oneshot::Receiver<Result<(), Error>>,
    is_confirmed: bool,
    /// The last gap it received, and the one it must have received.
    gap: u64,
    expected_gap: u64,
}

#[derive(Debug, Clone)]
enum Step {
    Join(u8, Vec<u8>),
    Leave(usize),
    Send,
    Confirm,
    Refuse(bool),
    EndChannel(usize),
    Reconnect,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..3_u8, prop::collection::vec(0..6_u8, 1..4)).prop_map(|(kind, names)| Step::Join(kind, names)),
        3 => any::<usize>().prop_map(Step::Leave),
        5 => Just(Step::Send),
        5 => Just(Step::Confirm),
        1 => any::<bool>().prop_map(Step::Refuse),
        1 => any::<usize>().prop_map(Step::EndChannel),
        1 => Just(Step::Reconnect),
    ]
}

fn refusal(is_temporary: bool) -> ServerError {
    ServerError::parse(if is_temporary { b"BUSY script" } else { b"NOPERM no" })
}

impl World {
    fn connect(&mut self) {
        self.registry.connected();
        self.settle();
    }

    fn reconnect(&mut self) {
        self.registry.lost(&ConnectionError::EndOfStream, false, WhileDown::Queue);
        self.sent.clear();
        self.on_server.clear();
        for joined in &mut self.joined {
            joined.expected_gap = if joined.is_confirmed { self.registry.generation + 1 } else { 0 };
        }
        self.registry.begin_attempt();
        self.connect();
    }

    /// Runs the effects, and removes the subscriptions that have ended.
    fn settle(&mut self) {
        for effect in self.registry.take_effects() {
            effect.run();
        }
        let mut joined = std::mem::take(&mut self.joined);
        joined.retain_mut(|joined| {
            match joined.confirmation.try_recv() {
                Ok(Ok(())) => {
                    joined.is_confirmed = true;
                    for (kind, name) in &joined.wanted {
                        let state = self.registry.channels[*kind as usize].get(name).map(|channel| channel.state);
                        assert_eq!(state, Some(ChannelState::Subscribed), "confirmed too early");
                    }
                }
                Ok(Err(_)) => return false,
                Err(_) => {}
            }
            loop {
                match joined.inbox.poll_next(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready((Some(Ok(Event::Gap { generation })), _)) => {
                        joined.gap = generation;
                        for (kind, name) in &joined.wanted {
                            let channel = &self.registry.channels[*kind as usize][name];
                            // One that the server has ended meanwhile has another gap later.
                            let is_restored = channel.state == ChannelState::Subscribed || channel.was_interrupted;
                            assert!(is_restored, "a gap before the channels are restored");
                        }
                    }
                    Poll::Ready((Some(Ok(other)), _)) => panic!("{other:?}"),
                    Poll::Ready((Some(Err(_)) | None, _)) => return false,
                    Poll::Pending => return true,
                }
            }
        });
        self.joined = joined;
    }

    fn join(&mut self, kind: Kind, names: &[u8]) {
        let names: BTreeSet<_> = names.iter().map(|name| Bytes::copy_from_slice(&[*name])).collect();
        let inbox = Arc::new(Inbox::new(SubscribeOptions::default()));
        let (sender, confirmation) = oneshot::channel();
        let wanted = names.iter().map(|name| (kind, name.clone())).collect();
        let names = names.into_iter().collect();
        let (id, _) =
            self.registry.join(kind, names, Arc::clone(&inbox), sender, WhileDown::Queue).expect("not closed");
        self.joined.push(Joined { id, wanted, inbox, confirmation, is_confirmed: false, gap: 0, expected_gap: 0 });
    }

    fn execute(&mut self, refusal: Option<ServerError>) {
        let Some(Change { subscribes, kind, name }) = self.sent.pop_front() else { return };
        let outcome = if let Some(error) = refusal {
            self.registry.refused(error)
        } else {
            if subscribes {
                assert!(self.on_server.insert((kind, name.clone())), "subscribed twice");
            } else {
                self.on_server.remove(&(kind, name.clone()));
            }
            self.registry.confirmed(subscribes, kind, &name)
        };
        if outcome.is_err() {
            self.reconnect();
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Join(kind, names) => {
                self.join([Kind::Channel, Kind::Pattern, Kind::Shard][kind as usize], &names);
            }
            Step::Leave(index) if !self.joined.is_empty() => {
                let joined = self.joined.swap_remove(index % self.joined.len());
                self.registry.abandon(joined.id);
            }
            Step::Send => self.sent.extend(self.registry.next_command(4)),
            Step::Confirm => self.execute(None),
            Step::Refuse(is_temporary) => self.execute(Some(refusal(is_temporary))),
            Step::EndChannel(index) if !self.on_server.is_empty() => {
                let (kind, name) = self.on_server.iter().nth(index % self.on_server.len()).expect("in range").clone();
                self.on_server.remove(&(kind, name.clone()));
                if self.registry.confirmed(false, kind, &name).is_err() {
                    self.reconnect();
                }
            }
            Step::Leave(_) | Step::EndChannel(_) => {}
            Step::Reconnect => self.reconnect(),
        }
        self.settle();
    }
}

proptest! {
    #[test]
    fn channels_on_the_server_become_those_that_are_wanted(steps in prop::collection::vec(step(), 0..200)) {
        let mut world = World::default();
        world.connect();
        for step in steps {
            world.run(step);
        }
        while let Some(change) = world.registry.next_command(usize::MAX) {
            world.sent.push_back(change);
            world.run(Step::Confirm);
        }
        while !world.sent.is_empty() {
            world.run(Step::Confirm);
            world.run(Step::Send);
        }
        let wanted: BTreeSet<_> = world.joined.iter().flat_map(|joined| joined.wanted.clone()).collect();
        prop_assert_eq!(&world.on_server, &wanted);
        prop_assert_eq!(world.registry.census().channels, wanted.len());
        prop_assert!(world.registry.due.is_empty() && world.registry.link == Link::Open);
        for joined in &world.joined {
            prop_assert!(joined.is_confirmed);
            prop_assert!(joined.gap >= joined.expected_gap, "{} < {}", joined.gap, joined.expected_gap);
        }
        world.registry.close();
        prop_assert!(world.registry.has_no_channels() || world.registry.is_connected());
        world.settle();
        prop_assert!(world.joined.is_empty());
    }
}

#[test]
fn responses_that_belong_to_no_command_are_errors() {
    let mut world = World::default();
    world.connect();
    let unexpected = |outcome| matches!(outcome, Err(ConnectionError::UnexpectedReply));
    assert!(unexpected(world.registry.confirmed(true, Kind::Channel, b"a")));
    assert!(unexpected(world.registry.refused(refusal(false))));
    assert!(world.registry.replied().is_err());
    world.join(Kind::Channel, b"a");
    world.run(Step::Send);
    assert!(unexpected(world.registry.confirmed(true, Kind::Pattern, b"a")));
    assert!(world.registry.confirmed(false, Kind::Shard, b"x").is_ok(), "a channel that is not subscribed");
}

#[test]
fn subscriptions_that_come_and_go_leave_no_command_behind() {
    let mut world = World::default();
    world.connect();
    for number in 0..100_u8 {
        world.join(Kind::Channel, &[number]);
        world.run(Step::Leave(0));
    }
    assert!(world.registry.due.is_empty() && world.registry.has_no_channels());
}

#[test]
fn channel_that_the_server_ends_before_the_others_are_confirmed_is_confirmed_again() {
    let mut world = World::default();
    world.connect();
    world.join(Kind::Shard, b"abc");
    (0..3).for_each(|_| world.run(Step::Send));
    world.run(Step::Confirm);
    world.run(Step::EndChannel(0));
    world.run(Step::Send);
    (0..2).for_each(|_| world.run(Step::Confirm));
    assert!(!world.joined[0].is_confirmed);
    world.run(Step::Confirm);
    assert!(world.joined[0].is_confirmed);
}
