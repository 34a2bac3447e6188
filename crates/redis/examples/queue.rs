//! A job queue of lists, whose jobs survive their workers.
//!
//! ```sh
//! cargo run -p tidewire-redis --example queue
//! ```
//!
//! A worker moves a job from the queue to a list of its own, in one step (`BLMOVE`), and removes it from there when it is done (`LREM`).
//! A job is handled at least once: when a worker starts, it finishes the jobs in its list, which it had when it was killed. If a worker
//! does not come back, its jobs stay in its list until a worker with the same name starts. Jobs have no retries and no dead letters: a
//! [stream](tidewire_redis::stream) with a consumer group has.
//!
//! With `BLPOP` instead of `BLMOVE`, a job is handled at most once: one that was popped is lost with its worker.

use std::error::Error;
use std::time::Duration;

use tidewire_redis::commands::{self, ListEnd};
use tidewire_redis::{Client, Options};
use tidewire_testkit::RedisServer;

/// A worker of the list `jobs`.
pub(crate) struct Worker {
    client: Client,
    /// The list of the jobs that it has taken.
    taken: String,
}

impl Worker {
    pub(crate) fn new(client: &Client, name: &str) -> Self {
        Self { client: client.clone(), taken: format!("jobs:taken:{name}") }
    }

    /// Returns the next job: one that it took in an earlier run, or the oldest of the queue. Returns `None` if there is none for a second.
    pub(crate) async fn take(&self) -> Result<Option<String>, tidewire_redis::Error> {
        let earlier: Option<String> = self.client.send(commands::lindex(&self.taken, -1).returning()).await?;
        if earlier.is_some() {
            return Ok(earlier);
        }
        let wait = Duration::from_secs(1);
        let next = commands::blmove("jobs", ListEnd::Right, &self.taken, ListEnd::Left, wait);
        self.client.send(next.returning()).await
    }

    /// Removes a job that is done.
    pub(crate) async fn finish(&self, job: &str) -> Result<(), tidewire_redis::Error> {
        self.client.send(commands::lrem(&self.taken, 1, job)).await?;
        Ok(())
    }
}

/// Adds a job, which is a text that differs from those of all other jobs.
pub(crate) async fn add(client: &Client, job: &str) -> Result<(), tidewire_redis::Error> {
    client.send(commands::lpush("jobs", [job])).await?;
    Ok(())
}

/// Handles all jobs, and returns them.
pub(crate) async fn work(worker: &Worker) -> Result<Vec<String>, tidewire_redis::Error> {
    let mut done = Vec::new();
    while let Some(job) = worker.take().await? {
        println!("{job}");
        worker.finish(&job).await?;
        done.push(job);
    }
    Ok(done)
}

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let server = RedisServer::start();
    let client = Client::start(Options::default().address(server.addr()));
    for number in 1..=3 {
        add(&client, &format!("job {number}")).await?;
    }

    // This worker does not finish its job.
    let taken = Worker::new(&client, "one").take().await?;
    println!("{taken:?} was taken by a worker that ended");

    // With the same name, it is handled first.
    work(&Worker::new(&client, "one")).await?;
    Ok(())
}
