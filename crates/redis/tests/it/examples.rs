//! The examples run. `stream_worker` is run by the tests of faults, which kill it.

#[path = "../../examples/cache.rs"]
#[expect(dead_code, reason = "`main` is for the command line")]
mod cache;
#[path = "../../examples/pubsub.rs"]
mod pubsub;
#[path = "../../examples/queue.rs"]
mod queue;
#[path = "../../examples/stream_worker.rs"]
#[expect(dead_code, reason = "its main reads the arguments of the process")]
pub(crate) mod stream_worker;

use tidewire_redis::Client;
use tidewire_testkit::RedisServer;

use crate::servers::options;

#[tokio::test]
async fn cache_example_runs() {
    let mut printed = Vec::new();
    cache::run(&RedisServer::start(), |line| printed.push(line)).await.unwrap();
    assert_eq!(printed, ["Welcome: 99999 hits, 1 request", "Closed: 1 invalidated"]);
}

#[test]
fn pubsub_example_runs() {
    pubsub::main().unwrap();
}

#[test]
fn queue_example_runs() {
    queue::main().unwrap();
}

#[tokio::test]
async fn queue_example_finishes_the_jobs_of_an_earlier_run_first() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for job in ["a", "b", "c"] {
        queue::add(&client, job).await.unwrap();
    }
    assert_eq!(queue::Worker::new(&client, "one").take().await.unwrap().as_deref(), Some("a"));
    // Another worker does not have it.
    let two = queue::Worker::new(&client, "two");
    assert_eq!(two.take().await.unwrap().as_deref(), Some("b"));
    assert_eq!(queue::work(&queue::Worker::new(&client, "one")).await.unwrap(), ["a", "c"]);
    assert_eq!(queue::work(&two).await.unwrap(), ["b"]);
    assert_eq!(server.cli(["KEYS", "*"]), "");
}
