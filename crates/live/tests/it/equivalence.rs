//! The equivalence property: after any commits, a subscriber has the same result as a new query.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use tidewire_live::{Matcher, MatcherStats, QueryId, ResultChange};

use crate::client::{DecodedResult, apply_change, current_result, fresh_result};
use crate::strategies::{TestStore, commit, definition, initial_records, query};

/// A subscriber that applies the changes of its query.
struct TestSubscriber {
    query: QueryId,
    result: DecodedResult,
    /// Whether the subscriber missed a commit and waits for a snapshot.
    is_behind: bool,
}

/// Five times the default number of cases, which `PROPTEST_CASES` sets.
fn more_cases() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases * 5, ..config }
}

proptest! {
    #![proptest_config(more_cases())]

    #[test]
    fn deltas_give_the_same_result_as_a_new_query(
        definition in definition(),
        first in initial_records(),
        queries in vec(query(), 1..8),
        commits in vec((commit(), vec((0..12_u8, any::<bool>()), 0..3)), 1..10),
    ) {
        let mut store = TestStore::new(&definition);
        let mut live = Matcher::new(store.position);
        let mut subscribers: HashMap<u64, (usize, TestSubscriber)> = HashMap::new();
        live.commit(store.position, &store.commit(&first));
        for (id, index) in (0..).zip(0..queries.len()) {
            let query = live.subscribe(id, &queries[index], store.state.bucket("b").unwrap(), store.now).unwrap();
            let result = current_result(&mut live, query);
            subscribers.insert(id, (index, TestSubscriber { query, result, is_behind: false }));
        }
        for ((steps, time), choices) in commits {
            store.now += time;
            let before: HashMap<u64, DecodedResult> =
                subscribers.iter().map(|(id, (_, subscriber))| (*id, current_result(&mut live, subscriber.query))).collect();
            let changes = store.commit(&steps);
            let committed = live.commit(store.position, &changes);
            prop_assert_eq!(live.position(), store.position);
            let bucket = store.state.bucket("b").unwrap();
            let is_swept = bucket.expired(store.now).next().is_none();
            for (id, (index, subscriber)) in &mut subscribers {
                let update = committed.updates.iter().find(|update| update.query == subscriber.query);
                let now = current_result(&mut live, subscriber.query);
                prop_assert_eq!(
                    update.is_some(), now != before[id],
                    "an update for each changed result: {:?} {:?} {:?}", queries[*index], before[id], now
                );
                subscriber.is_behind |= choices.iter().any(|(choice, _)| u64::from(*choice) == *id);
                if let Some(update) = update.filter(|_| !subscriber.is_behind) {
                    subscriber.result = apply_change(&subscriber.result, &update.change, &mut live, subscriber.query);
                    prop_assert_eq!(&subscriber.result, &now, "{:?}", queries[*index]);
                }
                if is_swept {
                    prop_assert_eq!(&now, &fresh_result(&queries[*index], bucket, store.now), "{:?}", queries[*index]);
                }
            }
            // Between commits, subscribers that are behind get a snapshot, and others subscribe and unsubscribe.
            for (choice, is_reset) in choices {
                let id = u64::from(choice);
                match subscribers.get_mut(&id) {
                    Some((_, subscriber)) if is_reset => {
                        subscriber.result = current_result(&mut live, subscriber.query);
                        subscriber.is_behind = false;
                    }
                    Some(_) => {
                        subscribers.remove(&id);
                        prop_assert!(live.unsubscribe(id) && !live.unsubscribe(id));
                    }
                    None => {
                        let index = usize::from(choice) % queries.len();
                        let query = live.subscribe(id, &queries[index], bucket, store.now).unwrap();
                        prop_assert!(live.subscribers(query).contains(&id));
                        prop_assert_eq!(live.query_of(id), Some(query));
                        let result = current_result(&mut live, query);
                        if is_swept {
                            prop_assert_eq!(&result, &fresh_result(&queries[index], bucket, store.now));
                        }
                        subscribers.insert(id, (index, TestSubscriber { query, result, is_behind: false }));
                    }
                }
            }
        }
        for id in subscribers.keys() {
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
        first in initial_records(),
        queries in vec(query(), 1..8),
        commits in vec((commit(), any::<bool>()), 1..10),
    ) {
        let mut store = TestStore::new(&definition);
        let mut live = Matcher::new(store.position);
        store.commit(&first);
        for (id, query) in (0..).zip(&queries) {
            live.subscribe(id, query, store.state.bucket("b").unwrap(), store.now).unwrap();
        }
        for ((steps, time), is_lost) in commits {
            store.now += time;
            let changes = store.commit(&steps);
            if is_lost {
                continue;
            }
            for update in live.commit(store.position, &changes).updates {
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
