//! The examples run.

#[path = "../../examples/cache.rs"]
#[expect(dead_code, reason = "`main` is for the command line")]
mod cache;
#[path = "../../examples/pubsub.rs"]
mod pubsub;

use tidewire_testkit::RedisServer;

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
