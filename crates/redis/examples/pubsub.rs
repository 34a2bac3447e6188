//! A subscriber that keeps a copy of a value, through a restart of the server.
//!
//! ```sh
//! cargo run -p tidewire-redis --example pubsub
//! ```

use tidewire_redis::pubsub::Event;
use tidewire_redis::{Client, Error, Options, WhileDown, commands};
use tidewire_testkit::RedisServer;

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut server = RedisServer::options().config("appendonly yes").config("appendfsync always").start();
    let client = Client::start(Options::default().address(server.addr()).while_down(WhileDown::Queue));

    // Subscribe before the first read, so that no change between the two is missed.
    let mut changes = client.subscribe(["tide:changed"]).await?;
    let mut tide = read_tide(&client).await?;
    println!("at first: {tide:?}");

    set_tide(&client, "low").await?;
    for turn in 0..3 {
        match changes.next().await.transpose()? {
            Some(Event::Message(message)) => {
                tide = Some(String::from_utf8_lossy(&message.payload).into_owned());
                println!("message: {tide:?}");
            }
            // Messages may have been missed, so the copy is read again.
            Some(Event::Gap { generation }) => {
                tide = read_tide(&client).await?;
                println!("connection {generation}, read again: {tide:?}");
            }
            Some(Event::Dropped { count }) => println!("too slow, missed {count}"),
            Some(_) | None => break,
        }
        match turn {
            0 => {
                server.kill();
                server.restart();
            }
            1 => set_tide(&client, "high").await?,
            _ => {}
        }
    }
    assert_eq!(tide.as_deref(), Some("high"));

    let stats = client.stats().pubsub;
    println!("{} messages over {} connections", stats.messages, stats.generation);
    Ok(())
}

async fn set_tide(client: &Client, tide: &str) -> Result<(), Error> {
    client.send(commands::set("tide", tide)).await?;
    client.send(commands::publish("tide:changed", tide)).await?;
    Ok(())
}

async fn read_tide(client: &Client) -> Result<Option<String>, Error> {
    loop {
        match client.send(commands::get("tide").returning()).await {
            // A read can be sent again.
            Err(Error::Lost { .. }) => {}
            read => return read,
        }
    }
}
