//! A worker that handles the entries of the stream `orders`. Start it several times, and add orders with redis-cli. It may be killed at
//! any time: no order is lost.
//!
//! ```sh
//! cargo run -p tidewire-redis --example stream_worker -- redis://127.0.0.1:6379 billing-1
//! redis-cli XADD orders '*' boat Tern crew 3
//! ```

use std::time::Duration;

use serde::Deserialize;
use tidewire_redis::stream::{Delivery, Worker, WorkerOptions};
use tidewire_redis::{Client, Options, commands};

#[derive(Debug, Deserialize)]
struct Order {
    boat: String,
    crew: u32,
}

/// Handles an order. It may be called more than once for an order, so its effect is the same then: it sets a field of a hash.
async fn bill(client: Client, delivery: Delivery) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let order: Order = delivery.deserialize()?;
    client.send(commands::hset("bills", [(delivery.id.to_string(), order.crew * 100)])).await?;
    println!("order {} of {} was billed, delivery {}", delivery.id, order.boat, delivery.deliveries);
    Ok(())
}

/// Runs a worker until Ctrl-C, and then waits for the order that it handles.
pub(crate) async fn work(url: &str, consumer: &str) -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::start(Options::from_url(url)?.max_backoff(Duration::from_secs(1)));
    // Short times, to see the effect of a kill soon.
    let options = WorkerOptions::default()
        .group("billing")
        .consumer(consumer)
        .min_idle(Duration::from_secs(2))
        .claim_interval(Duration::from_millis(200))
        .min_backoff(Duration::from_millis(100))
        .max_deliveries(20);
    let worker = Worker::new(&client, "orders", options);
    let handle = worker.handle();
    let billing = client.clone();
    let mut run = std::pin::pin!(worker.run(move |delivery| bill(billing.clone(), delivery)));
    println!("{consumer} waits for orders");
    tokio::select! {
        ended = &mut run => return Ok(ended?),
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    handle.stop();
    run.await?;
    println!("{:?}", handle.stats());
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let consumer = arguments.next().unwrap_or_else(|| "billing-1".to_owned());
    work(&url, &consumer).await
}
