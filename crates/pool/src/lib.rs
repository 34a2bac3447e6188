//! A thread pool that handles messages in order per key, with bounded queues, deadlines, retries and dead letters.
//!
//! Messages with the same [`Key`] are handled one at a time, in the order in which their submissions returned; messages with
//! different keys run concurrently. An idle worker takes over a waiting key, so a hot or slow key does not delay another.
//! Messages above a bound are subject to an [overflow policy](Overflow), and messages that fail become
//! [dead letters](DeadLetters). Every accepted message is accounted for: handled, dead-lettered or returned.
//!
//! ```
//! use std::convert::Infallible;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use std::time::Duration;
//! use tidewire_pool::{Context, Key, Message, Pool};
//!
//! // The payload is usually an enum that the handler matches exhaustively.
//! enum Account { Deposit(u64), Close }
//!
//! let balance = Arc::new(AtomicU64::new(0));
//! let handler = {
//!     let balance = Arc::clone(&balance);
//!     move |message: &mut Message<Account>, context: &mut Context<'_, Account>| {
//!         match message.payload {
//!             Account::Deposit(amount) => _ = balance.fetch_add(amount, Ordering::Relaxed),
//!             Account::Close => balance.store(0, Ordering::Relaxed),
//!         }
//!         Ok::<(), Infallible>(())
//!     }
//! };
//! let pool = Pool::builder().workers(2).start(handler)?;
//! let alice = Key::of("alice");
//! pool.submit(Message::new(alice, Account::Close))?;
//! pool.submit(Message::new(alice, Account::Deposit(5)))?;
//! pool.submit(Message::new(alice, Account::Deposit(6)))?;
//! let shutdown = pool.drain(Duration::from_secs(10));
//! assert!(shutdown.returned.is_empty());
//! assert_eq!(balance.load(Ordering::Relaxed), 11);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Tests of handlers use the same pool without threads, in virtual time: [`Builder::simulate`].
//!
//! # Decorators
//!
//! Spans, metrics and protection from overload are decorators: [`Observed`], [`Breaker`] and [`Shedding`]. A decorator is a
//! [`Handler`] around a handler. [`PoolMetrics`] is an [`Observer`] of the pool itself:
//!
//! ```
//! # use tidewire_pool::{Context, Message};
//! use std::sync::Arc;
//! use tidewire_pool::{Breaker, BreakerOptions, Observed, Pool, PoolMetrics, Shedding, SheddingOptions};
//!
//! # let handler = |_: &mut Message<()>, _: &mut Context<'_, ()>| Ok::<(), std::convert::Infallible>(());
//! let breaker = Breaker::new(BreakerOptions::default().failures(10));
//! let shedding = Shedding::new(SheddingOptions::default());
//! let handler = Observed::new(shedding.guard(breaker.guard(handler)));
//! let pool = Pool::builder().observer(Arc::new(PoolMetrics::new("orders"))).start(handler)?;
//! # Ok::<(), tidewire_pool::BuildError>(())
//! ```
//!
//! # Metrics and spans
//!
#![doc = include_str!("../metrics.md")]

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/pool.md")]
struct Manual;

mod ask;
mod budget;
mod clock;
mod dead_letters;
mod engine;
mod handler;
mod idle;
mod key;
mod message;
mod observe;
mod options;
mod pool;
mod resilience;
mod simulation;
mod stripe;
mod sync;
mod trace;
mod worker;

pub use ask::{AskError, Reply};
pub use dead_letters::{DeadLetter, DeadLetterReason, DeadLetters};
pub use handler::{Context, Handler};
pub use key::Key;
pub use message::Message;
pub use observe::{Event, Observed, Observer, PoolMetrics};
pub use options::{BuildError, Builder, Merge, Overflow, Placement, Retry};
pub use pool::{Pool, Shutdown, Stats, SubmitError, Submitted};
pub use resilience::{
    Breaker, BreakerError, BreakerHandler, BreakerOptions, BreakerState, Shedding, SheddingError, SheddingHandler,
    SheddingOptions,
};
pub use simulation::Simulation;
pub use trace::{TraceContext, TraceError};
