//! Live queries: who must hear of a change, and what has changed for them.
//!
//! [`Live`] runs beside a store: whoever subscribes to a query has its result at one position, and hears of every commit that
//! changes it from there on, as a [`Delta`] or whole. A subscriber that is slow gets the newest result, and slows nobody.
//!
//! ```
//! use serde_json::json;
//! use tidewire_live::{Live, Mode};
//! use tidewire_store::{Query, Store, StoreOptions};
//!
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! let store = Store::memory(StoreOptions::default());
//! store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).await?;
//! let live = Live::new(store.clone());
//! let mut all = live.subscribe(Query::all("harbours"), Mode::Whole, None).await?;
//! store.insert("harbours", serde_json::from_value(json!({"id": 1, "tide": "high"}))?).await?;
//! println!("{:?}", all.next().await?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Underneath is a [`Matcher`], which has no thread, clock or socket: it is fed with commits, in order, and says what has changed
//! for whom.
//!
//! # What a commit costs
//!
//! A change leads to the queries that it can concern through an index of their filters: by the value of a field for equality and
//! `$in`, by the intervals that contain it for ranges and beginnings. Only a filter that has neither is tried with every change of
//! its bucket. What is found is tried with the whole filter, and its result is brought up to date from what it was: a query keeps
//! all rows that it means, in its order, so that a window is refilled without reading the store, and sums, extremes and groups are
//! maintained. Equal queries are one, whoever asks; a further subscriber takes a few dozen bytes.

mod bits;
mod delta;
mod driver;
mod fanout;
mod index;
mod live;
mod mark;
mod matcher;
mod net;
mod query;
mod resume;
mod rows;
mod subscription;
mod totals;
mod waiting;
mod wake;

pub use delta::Delta;
pub use live::{Live, LiveError, LiveOptions, LiveStats};
pub use mark::{Mark, NoMark};
pub use matcher::{Committed, Ended, Matcher, MatcherStats, QueryId, SubscribeError, Update};
pub use query::{Outcome, Whole};
pub use subscription::{End, Event, First, Mode, Subscription};
