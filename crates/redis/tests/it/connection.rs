//! A client and a real server.

use std::time::Duration;

use tidewire_redis::{Client, ConnectionState, Error, RequestOutcome, Value};
use tidewire_testkit::RedisServer;

use crate::servers::{command, options};

#[tokio::test(flavor = "multi_thread")]
async fn each_task_gets_its_own_replies() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut tasks = Vec::new();
    for task in 0..64 {
        let client = client.clone();
        tasks.push(tokio::spawn(async move {
            for turn in 0..200 {
                let (key, value) = (format!("k{task}"), format!("{task}-{turn}"));
                assert_eq!(client.send(command(&["SET", &key, &value])).await.unwrap(), Value::Simple("OK".into()));
                assert_eq!(client.send(command(&["GET", &key])).await.unwrap(), Value::Bulk(value.into()));
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let status = client.status();
    assert_eq!((status.borrow().state, status.borrow().generation), (ConnectionState::Open, 1));
    client.close(Duration::from_secs(5)).await;
    let refused = client.send(command(&["PING"])).await.unwrap_err();
    assert!(matches!(refused, Error::Closed { outcome: RequestOutcome::NeverSent }), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_reconnects_to_a_restarted_server() {
    let mut server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.send(command(&["SET", "a", "1"])).await.unwrap();
    server.kill();
    let mut status = client.status();
    status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    server.restart();
    status.wait_for(|status| status.state == ConnectionState::Open && status.generation == 2).await.unwrap();
    assert_eq!(client.send(command(&["PING"])).await.unwrap(), Value::Simple("PONG".into()));
}
