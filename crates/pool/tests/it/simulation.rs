use std::collections::HashSet;

use proptest::prelude::*;
use tidewire_pool::{AskError, Context, Message, Placement, Pool, Reply, Retry};

use crate::gate::Gate;

fn order(seed: u64, placement: Placement, messages: &[(u64, u32)]) -> Vec<(u64, u32)> {
    let gate = Gate::opened();
    let mut pool = Pool::builder().workers(3).placement(placement).simulate(seed, gate.clone()).unwrap();
    for &(key, number) in messages {
        pool.submit(Message::new(key, (key, number))).unwrap();
    }
    assert_eq!(pool.run(usize::MAX), messages.len());
    assert_eq!(pool.stats().handled, messages.len() as u64);
    gate.handled()
}

proptest! {
    #[test]
    fn seed_determines_the_order_and_keys_stay_in_order(
        seed in any::<u64>(),
        pinned in any::<bool>(),
        keys in prop::collection::vec(0..6_u64, 0..60),
    ) {
        let placement = if pinned { Placement::Pinned } else { Placement::Moving };
        let messages: Vec<_> = keys.into_iter().zip(0..).collect();
        let seen = order(seed, placement, &messages);
        prop_assert_eq!(&seen, &order(seed, placement, &messages));
        for key in 0..6 {
            let of = |all: &[(u64, u32)]| all.iter().copied().filter(|message| message.0 == key).collect::<Vec<_>>();
            prop_assert_eq!(of(&seen), of(&messages));
        }
    }
}

#[test]
fn seeds_cover_every_order_of_three_keys() {
    let messages = [(0, 0), (3, 0), (6, 0)];
    let orders: HashSet<_> = (0..200).map(|seed| order(seed, Placement::Moving, &messages)).collect();
    assert_eq!(orders.len(), 6);
    let orders: HashSet<_> = (0..200).map(|seed| order(seed, Placement::Pinned, &messages)).collect();
    assert_eq!(orders.len(), 1, "the keys share a thread");
}

#[test]
fn abort_returns_queued_messages() {
    let mut pool = Pool::builder().workers(1).simulate(0, Gate::opened()).unwrap();
    for number in 0..3 {
        pool.submit(Message::new(1, number)).unwrap();
    }
    pool.step();
    let returned: Vec<i32> = pool.abort().returned.into_iter().map(|message| message.payload).collect();
    assert_eq!(returned, [1, 2]);
    assert!(pool.submit(Message::new(1, 3)).is_err() && !pool.step());
}

#[test]
fn simulation_supports_ask() {
    enum Request {
        Retried(Reply<u32>),
        Unanswered(Option<Reply<u32>>),
    }
    let replies = std::sync::Mutex::new(Vec::new());
    let handler = move |message: &mut Message<Request>, context: &mut Context<'_, Request>| match &mut message.payload {
        Request::Retried(_) if context.attempt() == 1 => Err("again"),
        Request::Retried(reply) => reply.send(7).map_err(|_| "the caller no longer waits"),
        Request::Unanswered(reply) => {
            replies.lock().unwrap().extend(reply.take());
            Ok(())
        }
    };
    let mut pool = Pool::builder().workers(2).retry(Retry::new(2)).simulate(0, handler).unwrap();
    assert_eq!(pool.ask(|reply| Message::new(1, Request::Retried(reply))).unwrap(), 7);
    let unanswered = pool.ask(|reply| Message::new(1, Request::Unanswered(Some(reply))));
    assert!(matches!(unanswered, Err(AskError::Unanswered)));
}
