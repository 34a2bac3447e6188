//! Live queries over a [`tidewire_store::Store`].
//!
//! A subscriber of [`Live`] gets the result of its query at one position, and then every change of it, as a [`Delta`] or as a
//! snapshot. A slow subscriber gets the newest result, and slows down neither the store nor other subscribers.
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
//! The core is a [`Matcher`] without thread, clock or socket: it applies commits in order, and returns the changed queries.
//!
//! # Cost of a commit
//!
//! An index over the filters finds the queries that a change can affect: by value for equality and `$in`, by interval for ranges and
//! prefixes. Only a filter with neither is evaluated for every change of its bucket. The queries that are found are checked with the
//! full filter, and their results are maintained incrementally: a query retains all matching rows in order, so a window is refilled
//! without reading the store, and sums, minima, maxima and groups are updated. Equal queries are evaluated once; a further
//! subscriber takes a few hundred bytes.
//!
//! # Threads and limits
//!
//! One thread applies commits and delivers events. It evaluates only queries that take less than about half a millisecond.
//! Background threads evaluate all others on a snapshot, catch up from the store's history, and encode results above 64 KiB. So a
//! costly query delays only its own subscribers. [`LiveOptions`] has the limits of evaluations, results, work and memory;
//! [`LiveError`] and [`SubscriptionEnd`] describe what happens beyond them.

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

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/live.md")]
struct Manual;
