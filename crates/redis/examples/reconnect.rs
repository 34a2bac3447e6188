//! A server that is killed and restarted, as its client sees it.
//!
//! ```sh
//! cargo run -p tidewire-redis --example reconnect
//! ```

use std::time::Duration;

use tidewire_redis::{Client, ConnectionState, Error, Options, commands};
use tidewire_testkit::RedisServer;

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut server = RedisServer::start();
    let client = Client::start(Options::default().address(server.addr()));

    let mut states = client.states();
    let watching = tokio::spawn(async move {
        while let Some(status) = states.next().await {
            let error = status.last_error.map(|error| format!(", last error: {error}")).unwrap_or_default();
            println!("    {:?}, connection {}{error}", status.state, status.generation);
        }
    });

    for turn in 0..15 {
        match turn {
            5 => server.kill(),
            10 => {
                server.restart();
                client.status().wait_for(|status| status.state == ConnectionState::Open).await?;
            }
            _ => {}
        }
        match client.send(commands::incr("visits")).await {
            Ok(visits) => println!("INCR: {visits}"),
            Err(error @ (Error::Lost { .. } | Error::TimedOut { .. })) => println!("INCR: {error}"),
            Err(other) => return Err(other.into()),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    client.close(Duration::from_secs(1)).await;
    watching.await?;
    let stats = client.stats();
    println!(
        "{} requests, {} attempts to connect, {} connections lost",
        stats.requests, stats.connect_attempts, stats.connections_lost
    );
    Ok(())
}
