//! Live queries: which subscribers a commit concerns, and what has changed for them.
//!
//! [`Live`] runs beside a store. A subscriber gets the result of its query at one position, and then every change of it, as a
//! [`Delta`] or as a whole result. A slow subscriber gets the newest result, and slows neither the store nor other subscribers.
//!
//! ```
//! use serde_json::json;
//! use tidewire_live::{Event, Live, Mode};
//! use tidewire_store::{Query, Store, StoreOptions};
//!
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! let store = Store::memory(StoreOptions::default());
//! store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).await?;
//! let live = Live::new(store.clone());
//! let high = Query::new("harbours").filter(json!({"tide": "high"}))?.fields(["id"]);
//! let mut high = live.subscribe(high, Mode::Delta).await?;
//! store.insert("harbours", json!({"id": 1, "tide": "high"})).await?;
//! let Event::Delta { delta, .. } = high.next().await? else { unreachable!() };
//! assert_eq!(delta.encoded(), r#"{"added":[{"id":1}],"changed":[],"removed":[]}"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Underneath is a [`Matcher`], which has no thread, clock or socket: it takes commits in order, and returns what has changed for
//! each query.
//!
//! # What a commit costs
//!
//! An index of the filters finds the queries that a change can concern: by the value of a field for equality and `$in`, by the
//! intervals that contain it for ranges and prefixes. Only a filter with neither is evaluated for every change of its bucket. The
//! queries that are found are checked with the whole filter, and their results are maintained incrementally: a query keeps all
//! rows that match, in its order, so a window is refilled without reading the store, and sums, extremes and groups are
//! maintained. Equal queries of different subscribers are one query; another subscriber takes a few dozen bytes.
//!
//! # What runs where, and its limits
//!
//! One thread applies commits and delivers events. It evaluates only queries that take less than about half a millisecond. Background
//! threads evaluate all others on a snapshot, bring the result up to date from the store's history, and encode results above
//! 64 KiB. So a costly query delays its own subscribers only. See [`LiveOptions`] for the limits of evaluations, results, work and
//! memory, and [`LiveError`] and [`SubscriptionEnd`] for what happens beyond them.

mod background;
mod bits;
mod delta;
mod driver;
mod evaluation;
mod event_queue;
mod fanout;
mod index;
mod live;
mod lock;
mod mark;
mod matcher;
mod net_change;
mod query;
mod resume;
mod rows;
mod shared;
mod subscription;
mod totals;

mod wake;

pub use delta::Delta;
pub use live::{Live, LiveError, LiveOptions, LiveStats, MemoryLimit, SubscribeOptions};
pub use mark::{Mark, ParseMarkError};
pub use matcher::{Committed, EndedQuery, Matcher, MatcherStats, QueryId, SubscribeError, Update};
pub use query::{QueryResult, ResultChange};
pub use subscription::{Event, First, Mode, Subscription, SubscriptionEnd};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
