//! The central property: after any commits, a subscriber has the same result as a new query.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use tidewire_live::{Matcher, MatcherStats, QueryId, ResultChange};

use crate::follower::{Shown, answer, followed, whole};
use crate::world::{World, commit, definition, first, query};

/// A subscriber of a query.
struct Follower {
    query: QueryId,
    result: Shown,
    /// Whether the subscriber missed the last commit and waits for a snapshot.
    is_behind: bool,
}

/// More cases than the default, scaled by `PROPTEST_CASES`.
fn many() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases * 5, ..config }
}

proptest! {
    #![proptest_config(many())]

    #[test]
    fn deltas_give_the_same_result_as_a_new_query(
        definition in definition(),
        first in first(),
        queries in vec(query(), 1..8),
        commits in vec((commit(), vec((0..12_u8, any::<bool>()), 0..3)), 1..10),
    ) {
        let mut world = World::new(&definition);
        let mut live = Matcher::new(world.position);
        let mut followers: HashMap<u64, (usize, Follower)> = HashMap::new();
        live.commit(world.position, &world.commit(&first));
        for (id, place) in (0..).zip(0..queries.len()) {
            let query = live.subscribe(id, &queries[place], world.state.bucket("b").unwrap(), world.now).unwrap();
            let result = whole(&mut live, query);
            followers.insert(id, (place, Follower { query, result, is_behind: false }));
        }
        for ((steps, time), choices) in commits {
            world.now += time;
            let before: HashMap<u64, Shown> =
                followers.iter().map(|(id, (_, follower))| (*id, whole(&mut live, follower.query))).collect();
            let changes = world.commit(&steps);
            let committed = live.commit(world.position, &changes);
            prop_assert_eq!(live.position(), world.position);
            let bucket = world.state.bucket("b").unwrap();
            let is_swept = bucket.expired(world.now).next().is_none();
            for (id, (place, follower)) in &mut followers {
                let update = committed.updates.iter().find(|update| update.query == follower.query);
                let now = whole(&mut live, follower.query);
                prop_assert_eq!(update.is_some(), now != before[id], "told of what changes: {:?} {:?} {:?}", queries[*place], before[id], now);
                follower.is_behind |= choices.iter().any(|(choice, _)| u64::from(*choice) == *id);
                if let Some(update) = update.filter(|_| !follower.is_behind) {
                    follower.result = followed(&follower.result, &update.change, &mut live, follower.query);
                    prop_assert_eq!(&follower.result, &now, "{:?}", queries[*place]);
                }
                if is_swept {
                    prop_assert_eq!(&now, &answer(&queries[*place], bucket, world.now), "{:?}", queries[*place]);
                }
            }
            // Between commits, subscribers that are behind get a snapshot, and others subscribe and unsubscribe.
            for (choice, is_reset) in choices {
                let id = u64::from(choice);
                match followers.get_mut(&id) {
                    Some((_, follower)) if is_reset => {
                        follower.result = whole(&mut live, follower.query);
                        follower.is_behind = false;
                    }
                    Some(_) => {
                        followers.remove(&id);
                        prop_assert!(live.unsubscribe(id) && !live.unsubscribe(id));
                    }
                    None => {
                        let place = usize::from(choice) % queries.len();
                        let query = live.subscribe(id, &queries[place], bucket, world.now).unwrap();
                        prop_assert!(live.subscribers(query).contains(&id));
                        prop_assert_eq!(live.query_of(id), Some(query));
                        let result = whole(&mut live, query);
                        if is_swept {
                            prop_assert_eq!(&result, &answer(&queries[place], bucket, world.now));
                        }
                        followers.insert(id, (place, Follower { query, result, is_behind: false }));
                    }
                }
            }
        }
        for id in followers.keys() {
            prop_assert!(live.unsubscribe(*id));
        }
        let MatcherStats { queries, subscribers, buckets, unindexed, rows, encoded_bytes, .. } = live.stats();
        prop_assert_eq!((queries, subscribers, buckets, unindexed, rows, encoded_bytes), (0, 0, 0, 0, 0, 0));
    }
}

proptest! {
    /// A lost commit makes results wrong, but the matcher does not panic, and is empty after all subscribers have left.
    #[test]
    fn lost_commit_does_not_panic_or_leak(
        definition in definition(),
        first in first(),
        queries in vec(query(), 1..8),
        commits in vec((commit(), any::<bool>()), 1..10),
    ) {
        let mut world = World::new(&definition);
        let mut live = Matcher::new(world.position);
        world.commit(&first);
        for (id, query) in (0..).zip(&queries) {
            live.subscribe(id, query, world.state.bucket("b").unwrap(), world.now).unwrap();
        }
        for ((steps, time), is_lost) in commits {
            world.now += time;
            let changes = world.commit(&steps);
            if is_lost {
                continue;
            }
            for update in live.commit(world.position, &changes).updates {
                if let ResultChange::Records(delta) = update.change {
                    delta.apply(&mut Vec::new());
                    delta.encoded();
                }
                live.result(update.query).unwrap();
            }
        }
        for id in 0..queries.len() as u64 {
            prop_assert!(live.unsubscribe(id));
        }
        prop_assert_eq!((live.stats().queries, live.stats().rows, live.stats().buckets), (0, 0, 0));
    }
}
