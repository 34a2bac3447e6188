//! A cache that the server keeps up to date: a setting that is read often and changed by another client.
//!
//! ```sh
//! cargo run -p tidewire-redis --example cache
//! ```

use std::time::Duration;

use tidewire_redis::cache::CacheOptions;
use tidewire_redis::{Client, Options, commands};
use tidewire_testkit::RedisServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = RedisServer::start();
    run(&server, |line| println!("{line}")).await
}

pub(crate) async fn run(server: &RedisServer, mut print: impl FnMut(String)) -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::default().address(server.addr());
    let admin = Client::connect(options.clone()).await?;
    let client = Client::connect(options.cache(CacheOptions::default().max_bytes(16 << 20))).await?;

    admin.send(commands::set("setting:banner", "Welcome")).await?;
    let banner = || client.cached(commands::get("setting:banner").returning::<String>());
    for _ in 0..100_000 {
        banner().await?;
    }
    let stats = client.stats();
    print(format!("{}: {} hits, {} request", banner().await?, stats.cache.hits, stats.requests));

    admin.send(commands::set("setting:banner", "Closed")).await?;
    // The invalidation is under way.
    while banner().await? != "Closed" {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    print(format!("Closed: {} invalidated", client.stats().cache.invalidated));

    client.close(Duration::from_secs(1)).await;
    Ok(())
}
