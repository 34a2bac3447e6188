//! A worker that handles the entries of streams as a consumer of a group.
//!
//! ```
//! use tidewire_redis::stream::{Delivery, Worker, WorkerOptions};
//! use tidewire_redis::{Client, Options, commands};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let redis = tidewire_testkit::RedisServer::start();
//! # let client = Client::start(Options::default().address(redis.addr()));
//! client.send(commands::xadd("orders", [("boat", "Tern")], commands::XaddOptions::default())).await?;
//!
//! let worker = Worker::new(&client, "orders", WorkerOptions::default().group("billing").consumer("billing-1"));
//! let handle = worker.handle();
//! let stop = handle.clone();
//! worker
//!     .run(move |order: Delivery| {
//!         let stop = stop.clone();
//!         async move {
//!             let boat = order.field("boat").ok_or("an order needs the field `boat`")?;
//!             println!("order {} for {boat:?}", order.id);
//!             stop.stop();
//!             Ok::<_, &str>(())
//!         }
//!     })
//!     .await?;
//! assert_eq!(handle.stats().acknowledged, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # Delivery
//!
//! **At least once.** Redis keeps each entry that it delivers in the pending list of the group, until it is acknowledged. The worker
//! acknowledges an entry after the handler has succeeded. An entry is handled again if
//!
//! - the handler fails or panics,
//! - the worker ends before the acknowledgement has arrived: it is killed, its future is dropped, or its grace period ends,
//! - the worker or the server does not respond for longer than [`min_idle`](WorkerOptions::min_idle), so that another worker claims the
//!   entry,
//! - the server loses its newest writes in a crash or failover, or the group is deleted.
//!
//! So handlers must be idempotent. [`Delivery::id`] identifies the entry.
//!
//! **Order.** Entries of a stream are started in the order in which Redis delivers them. With
//! [`max_concurrent`](WorkerOptions::max_concurrent) of 1, one has ended before the next is started; with more, they end in any order.
//! An entry that is retried or claimed is handled after entries that were added later.
//!
//! **Retries.** An entry whose handler failed is handled again after a backoff. After
//! [`max_deliveries`](WorkerOptions::max_deliveries) it is moved to the dead-letter stream. Each delivery counts, also one to a worker
//! that was killed, so an entry that kills its workers is moved as well.
//!
//! **Claims.** While the worker holds an entry, waiting, running or in its backoff, it resets the idle time of the entry three times in
//! each `min_idle`. So a handler may run for longer than `min_idle`, and without a limit: use a timeout in the handler. A handler must
//! not block its thread, because the worker may need it. The worker claims entries that have been idle for `min_idle`, whatever their
//! consumer. Pending entries of its own name, such as those of its last run, are taken at the start. So two workers must not run with
//! the same name at the same time.
//!
//! **Dead letters.** The dead-letter stream gets the fields `dead_letter.stream`, `dead_letter.group`, `dead_letter.id`,
//! `dead_letter.deliveries` and `dead_letter.error`, followed by the fields of the entry. A script adds them and acknowledges the entry,
//! if it is still pending, so it is neither lost nor moved twice. An entry with more than 3000 fields is split into several dead letters
//! with the same first five fields.
//!
//! # Failures
//!
//! The worker repeats requests that fail, with the backoff of [`Options`](crate::Options), until it is stopped or the client is closed.
//! It creates the group and the stream if they do not exist, also later. A group that was deleted has forgotten what was handled:
//! entries that are still in the stream are delivered again, from [`start`](WorkerOptions::start) on.
//!
//! The worker uses one exclusive connection, for `XREADGROUP`. It needs Redis 6.2, and the permission to run scripts.

mod delivery;
mod group;
mod handling;
mod held;
mod options;
mod stats;
mod worker;

pub use delivery::Delivery;
pub use options::WorkerOptions;
pub use stats::WorkerStats;
pub use worker::{Worker, WorkerHandle};
