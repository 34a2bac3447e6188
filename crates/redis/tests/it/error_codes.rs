//! The codes of errors of a real server, and whether the same request may succeed later.

use tidewire_redis::{Client, Error, ErrorCode, FromValue, Login, Request, Script, commands};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};

use crate::servers::{command, options};

/// Sends a request that the server refuses with this code.
async fn refused<T: FromValue>(client: &Client, request: Request<T>, code: ErrorCode) {
    match client.send(request).await {
        Err(error @ Error::Server(_)) => {
            assert_eq!(error.code(), Some(&code));
            assert_eq!(error.is_retryable(), code.is_temporary(), "{error}");
        }
        other => panic!("{code}: {:?}", other.map(|_| ())),
    }
}

async fn ok(client: &Client, words: &[&str]) {
    client.send(command(words)).await.unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

#[tokio::test]
async fn refused_writes_and_reads() {
    let server = RedisServer::options().user("reader", "on >secret ~* +get").start();
    let client = Client::start(options(server.port()));
    let set = || commands::set("k", "v");
    client.send(set()).await.unwrap();
    let dumped = client.send(commands::dump("k")).await.unwrap().unwrap();
    refused(&client, commands::restore("k", None, &dumped, false), ErrorCode::BusyKey).await;

    ok(&client, &["CONFIG", "SET", "maxmemory", "1"]).await;
    refused(&client, set(), ErrorCode::OutOfMemory).await;
    ok(&client, &["CONFIG", "SET", "maxmemory", "0", "min-replicas-to-write", "1"]).await;
    refused(&client, set(), ErrorCode::NoReplicas).await;
    ok(&client, &["CONFIG", "SET", "min-replicas-to-write", "0"]).await;

    let reader = Client::start(options(server.port()).login(Login::new("secret").user("reader")));
    refused(&reader, set(), ErrorCode::NoPermission).await;
    assert_eq!(reader.send(commands::get("k").returning::<String>()).await.unwrap(), "v");

    // A replica whose primary cannot be reached.
    ok(&client, &["REPLICAOF", "127.0.0.1", "1"]).await;
    refused(&client, set(), ErrorCode::ReadOnly).await;
    ok(&client, &["CONFIG", "SET", "replica-serve-stale-data", "no"]).await;
    refused(&client, commands::get("k"), ErrorCode::MasterDown).await;
    ok(&client, &["REPLICAOF", "NO", "ONE"]).await;
    client.send(set()).await.unwrap();
}

#[tokio::test]
async fn cluster_node_without_all_slots() {
    let server =
        RedisServer::options().config("cluster-enabled yes").config("cluster-require-full-coverage no").start();
    let client = Client::start(options(server.port()));
    refused(&client, commands::get("a"), ErrorCode::ClusterDown).await;
    // The slot of `a`.
    ok(&client, &["CLUSTER", "ADDSLOTS", "15495"]).await;
    wait_until_async("the slot is served", PATIENCE, async || client.send(commands::get("a")).await.is_ok()).await;
    refused(&client, commands::mget(["a", "b"]), ErrorCode::CrossSlot).await;
    refused(&client, commands::get("b"), ErrorCode::ClusterDown).await;
}

#[tokio::test]
async fn server_busy_with_a_script() {
    let server = RedisServer::options().config("lua-time-limit 1").start();
    let [runner, client] = [(); 2].map(|()| Client::start(options(server.port())));
    for (source, code) in [
        ("while true do end", None),
        ("redis.call('SET', KEYS[1], 'v') while true do end", Some(ErrorCode::Unkillable)),
    ] {
        let endless = Script::new(source).returning::<i64>().key("k");
        let running = tokio::spawn({
            let runner = runner.clone();
            async move { runner.invoke(&endless).await }
        });
        wait_until_async("the script runs", PATIENCE, async || {
            matches!(client.send(commands::get("k")).await, Err(error) if error.code() == Some(&ErrorCode::Busy))
        })
        .await;
        refused(&client, commands::get("k"), ErrorCode::Busy).await;
        match code {
            None => {
                client.send(commands::script_kill()).await.unwrap();
                assert!(matches!(running.await.unwrap(), Err(Error::Server(_))));
            }
            Some(code) => refused(&client, commands::script_kill(), code).await,
        }
    }
}
