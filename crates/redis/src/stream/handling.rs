//! The handling of one entry: the call of the handler, and what follows from its result.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

use tokio::time::sleep;

use super::Delivery;
use super::group::Group;
use super::held::EntryKey;
use super::options::backoff;
use super::stats::Counters;
use super::worker::is_final;
use crate::{Error, ErrorCode};

/// The bytes of an error of a handler that are kept.
const MAX_ERROR_BYTES: usize = 4096;

/// How the handling of an entry ended.
pub(super) enum Outcome {
    /// It was acknowledged, or moved to the dead-letter stream.
    Done,
    /// It stays pending, to be handled again.
    Failed { deliveries: u64 },
    /// It is no longer pending for this worker.
    Gone,
    /// The worker cannot go on.
    Ended(Error),
}

/// Calls the handler, and acknowledges or moves the entry.
pub(super) async fn handle<H, F, E>(
    group: &Group,
    counters: &Counters,
    handler: &H,
    key: EntryKey,
    delivery: Delivery,
) -> Outcome
where
    H: Fn(Delivery) -> F,
    F: Future<Output = Result<(), E>>,
    E: Display,
{
    let max_deliveries = group.options.max_deliveries;
    let (id, deliveries) = (delivery.id, delivery.deliveries);
    if deliveries > max_deliveries {
        // No handler has ended, or the entry could not be moved when the last one had.
        let error = format!("delivered {max_deliveries} times without an acknowledgement or a known error");
        return bury(group, counters, key, &delivery, deliveries - 1, &error).await;
    }
    counters.count(|stats| stats.delivered += 1);
    let call = async { handler(delivery.clone()).await.map_err(|error| shortened(format!("{error:#}"))) };
    let result = match catch_panic(call).await {
        Ok(result) => result,
        Err(panic) => Err(shortened(format!("the handler panicked: {}", panic_text(&*panic)))),
    };
    let Err(error) = result else { return acknowledge(group, counters, key).await };
    counters.count(|stats| stats.failed += 1);
    tracing::warn!(%id, deliveries, error, "handler of a stream entry failed");
    if deliveries < max_deliveries {
        return Outcome::Failed { deliveries };
    }
    bury(group, counters, key, &delivery, deliveries, &error).await
}

/// Acknowledges an entry that was handled. Repeated until it succeeds, because otherwise the entry would be handled again.
async fn acknowledge(group: &Group, counters: &Counters, key: EntryKey) -> Outcome {
    let mut failures = 0;
    loop {
        match group.acknowledge(key).await {
            Ok(()) => {
                counters.count(|stats| stats.acknowledged += 1);
                return Outcome::Done;
            }
            Err(error) if is_final(&error) => return Outcome::Ended(error),
            // The stream was replaced by a value of another type.
            Err(error) if error.code() == Some(&ErrorCode::WrongType) => return Outcome::Gone,
            Err(error) => {
                failures += 1;
                counters.count(|stats| stats.errors += 1);
                tracing::warn!(id = %key.1, %error, failures, "stream entry was not acknowledged; trying again");
                let options = group.client.options();
                sleep(backoff(options.min_backoff, options.max_backoff, failures)).await;
            }
        }
    }
}

/// Moves an entry to the dead-letter stream. If that fails, it is tried again after a backoff.
async fn bury(
    group: &Group,
    counters: &Counters,
    key: EntryKey,
    delivery: &Delivery,
    deliveries: u64,
    error: &str,
) -> Outcome {
    let id = delivery.id;
    match group.bury(key.0, delivery, deliveries, error).await {
        Ok(true) => {
            counters.count(|stats| stats.dead_lettered += 1);
            tracing::warn!(%id, deliveries, error, "stream entry moved to the dead-letter stream");
            Outcome::Done
        }
        Ok(false) => Outcome::Gone,
        Err(failure) if is_final(&failure) => Outcome::Ended(failure),
        Err(failure) => {
            counters.count(|stats| stats.errors += 1);
            tracing::warn!(%id, error = %failure, "stream entry was not moved to the dead-letter stream; trying again");
            Outcome::Failed { deliveries: delivery.deliveries }
        }
    }
}

/// Runs a future. A panic is an error.
async fn catch_panic<F: Future>(future: F) -> Result<F::Output, Box<dyn Any + Send>> {
    let mut future = pin!(future);
    // After a panic the future is not polled again.
    std::future::poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("with a value that is not text")
}

fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_ERROR_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_error_is_cut_between_characters() {
        assert_eq!(shortened("short".to_owned()), "short");
        let long = shortened(format!("x{}", "é".repeat(4000)));
        assert_eq!((long.len(), long.chars().last()), (MAX_ERROR_BYTES - 1, Some('é')));
    }
}
