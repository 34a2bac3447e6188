//! Scripts that the server has, does not have, or forgets.

use tidewire_redis::{Client, Command, Error, ErrorCode, Pipeline, Script, commands};
use tidewire_testkit::RedisServer;

use crate::servers::options;

#[tokio::test]
async fn script_runs_once_whether_cached_or_not() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let counting = Script::new("return redis.call('INCR', KEYS[1])");
    let count = counting.returning::<i64>().key("n");
    for expected in 1..10 {
        if expected % 3 == 0 {
            client.send(commands::script_flush()).await.unwrap();
        }
        assert_eq!(client.invoke(&count).await.unwrap(), expected);
    }
    // A script that fails is not sent again.
    let failing = Script::new("redis.call('INCR', KEYS[1]) return redis.error_reply('MINE no')");
    let failure = client.invoke(&failing.returning::<i64>().key("m")).await.unwrap_err();
    assert_eq!(failure.code(), Some(&ErrorCode::Other("MINE".into())));
    assert_eq!(client.send(commands::get("m").returning::<i64>()).await.unwrap(), 1);
}

#[tokio::test]
async fn missing_script_in_a_pipeline_is_the_error_of_one_command() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let script = Script::new("return redis.call('INCR', KEYS[1])");
    let count = script.returning::<i64>().key("n");
    let pipeline = || {
        let by_digest = |command: Command| command.returning::<i64>();
        let before = Pipeline::new().then(commands::incr("a")).then(by_digest(count.by_digest()));
        before.then(commands::incr("b"))
    };
    let (before, missing, after) = client.pipeline(pipeline()).await.unwrap();
    assert_eq!((before.unwrap(), after.unwrap()), (1, 1));
    assert!(matches!(&missing, Err(Error::Server(error)) if error.code == ErrorCode::NoScript), "{missing:?}");
    // It is cached after it was loaded or sent by source.
    client.send(script.load()).await.unwrap();
    let (.., found, _) = client.pipeline(pipeline()).await.unwrap();
    assert_eq!(found.unwrap(), 1);
    client.send(commands::script_flush()).await.unwrap();
    let whole = Pipeline::new().then(count.by_source().returning::<i64>()).then(count.by_digest().returning::<i64>());
    let (first, second) = client.pipeline(whole).await.unwrap();
    assert_eq!((first.unwrap(), second.unwrap()), (2, 3));
}
