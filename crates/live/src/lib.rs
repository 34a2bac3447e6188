//! Live queries: who must hear of a change, and what has changed for them.
//!
//! [`Live`] is fed with the commits of a store, in order. Whoever subscribes to a query has its result at one position, and hears
//! of every commit that changes it from there on: as a [`Delta`], or whole. It is a core: it has no thread, clock or socket.
//!
//! ```
//! use serde_json::json;
//! use tidewire_live::{Live, Outcome, Whole};
//! use tidewire_store::{Draft, Position, Query, State};
//!
//! let mut draft = Draft::new(State::new(), 1_700_000_000_000);
//! let definition = json!({"key": "id", "schema": {"id": {"type": "number"}, "tide": {"type": "string"}}});
//! draft.define_bucket("harbours", &definition)?;
//! let (state, _) = draft.finish();
//! let mut live = Live::new(Position { epoch: 1, sequence: 0 });
//!
//! let high = json!({"bucket": "harbours", "filter": {"tide": "high"}, "fields": ["id"]});
//! let query = live.subscribe(7, &Query::parse(&high, &Default::default())?, state.bucket("harbours")?, 0)?;
//! assert_eq!(live.whole(query), Some(Whole::Json("[]".into())));
//!
//! let mut draft = Draft::new(state, 1_700_000_000_000);
//! draft.insert("harbours", serde_json::from_value(json!({"id": 1, "tide": "high"}))?)?;
//! draft.insert("harbours", serde_json::from_value(json!({"id": 2, "tide": "low"}))?)?;
//! let (state, changes) = draft.finish();
//!
//! let committed = live.commit(Position { epoch: 1, sequence: 1 }, &changes);
//! let Outcome::Records(delta) = &committed.updates[0].outcome else { unreachable!() };
//! assert_eq!(delta.encoded(), r#"{"added":[{"id":1}],"changed":[],"removed":[]}"#);
//! assert_eq!(live.subscribers(committed.updates[0].query), [7]);
//! assert_eq!(live.whole(query), Some(Whole::Json(r#"[{"id":1}]"#.into())));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a commit costs
//!
//! A change leads to the queries that it can concern through an index of their filters: by the value of a field for equality and
//! `$in`, by the intervals that contain it for ranges and beginnings. Only a filter that has neither is tried with every change of
//! its bucket. What is found is tried with the whole filter, and its result is brought up to date from what it was: a query keeps
//! all rows that it means, in its order, so that a window is refilled without reading the store, and sums, extremes and groups are
//! maintained. Equal queries are one, whoever asks; a further subscriber takes a few dozen bytes.

mod bits;
mod core;
mod delta;
mod index;
mod net;
mod query;
mod rows;
mod totals;

pub use crate::core::{Committed, Ended, Live, LiveStats, QueryId, SubscribeError, Update};
pub use delta::Delta;
pub use query::{Outcome, Whole};
