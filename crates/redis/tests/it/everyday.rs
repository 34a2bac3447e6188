//! The everyday commands as methods.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tidewire_redis::commands::TimeToLive;
use tidewire_redis::{Client, Error};
use tidewire_testkit::RedisServer;

use crate::servers::options;

#[tokio::test]
async fn methods_send_their_commands() -> Result<(), Error> {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.ping().await?;

    client.set("k", "v").await?;
    assert_eq!(client.get::<Option<String>>("k").await?, Some("v".into()));
    assert!(!client.set_if_absent("k", "w").await?);
    assert!(client.set_if_absent("l", "w").await?);
    client.set_for("m", "x", Duration::from_secs(100)).await?;
    assert!(matches!(client.ttl("m").await?, TimeToLive::In(left) if left > Duration::from_secs(10)));
    assert!(client.expire("k", Duration::from_secs(100)).await?);
    assert!(matches!(client.ttl("k").await?, TimeToLive::In(_)));
    assert_eq!(client.getdel::<String>("k").await?, "v");
    assert!(!client.exists("k").await?);
    client.mset([("a", "1"), ("b", "2")]).await?;
    assert_eq!(client.mget::<Vec<Option<u8>>>(["a", "b", "none"]).await?, [Some(1), Some(2), None]);
    assert_eq!(client.del(["a", "b", "none"]).await?, 2);

    let numbers = (client.incr("n").await?, client.incrby("n", 5).await?, client.decr("n").await?);
    assert_eq!(numbers, (1, 6, 5));

    assert_eq!(client.hset("hash", [("f", "1"), ("g", "2")]).await?, 2);
    assert_eq!(client.hget::<u8>("hash", "f").await?, 1);
    assert_eq!(client.hincrby("hash", "f", 4).await?, 5);
    assert_eq!(client.hdel("hash", ["g"]).await?, 1);
    assert_eq!(client.hgetall::<HashMap<String, u8>>("hash").await?, HashMap::from([("f".into(), 5)]));

    assert_eq!((client.rpush("list", ["b", "c"]).await?, client.lpush("list", ["a"]).await?), (2, 3));
    assert_eq!(client.lrange::<Vec<String>>("list", 0, -1).await?, ["a", "b", "c"]);
    assert_eq!(client.lpop::<String>("list").await?, "a");
    assert_eq!(client.rpop::<Option<String>>("list").await?, Some("c".into()));
    assert_eq!(client.llen("list").await?, 1);
    assert_eq!(client.blpop::<(String, String)>(["list"], Duration::from_secs(1)).await?, ("list".into(), "b".into()));

    assert_eq!(client.sadd("set", ["a", "b"]).await?, 2);
    assert!(client.sismember("set", "a").await?);
    assert_eq!(client.srem("set", ["a"]).await?, 1);
    assert_eq!(client.smembers::<HashSet<String>>("set").await?, HashSet::from(["b".into()]));

    assert_eq!((client.zincrby("scores", 1.5, "a").await?, client.zscore("scores", "b").await?), (1.5, None));
    assert_eq!(client.zscore("scores", "a").await?, Some(1.5));
    assert_eq!(client.publish("channel", "message").await?, 0);
    assert_eq!(client.spublish("channel", "message").await?, 0);
    Ok(())
}
