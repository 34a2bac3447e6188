//! Several connections to one server.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use tidewire_redis::{
    Client, ClientSet, ClientSetOptions, ConnectionState, Error, RequestOutcome, WhileDown, commands,
};
use tidewire_testkit::{FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async};
use tokio::task::JoinSet;

use crate::servers::{Scripted, command, greeting, options};

fn of(clients: usize) -> ClientSetOptions {
    ClientSetOptions::default().clients(clients)
}

/// Returns the index of a client in the set.
fn index(set: &ClientSet, client: &Client) -> usize {
    set.clients().iter().position(|other| std::ptr::eq(other, client)).unwrap()
}

/// Waits until the connection of this client is in a state.
async fn state(client: &Client, state: ConnectionState) {
    client.status().wait_for(|status| status.state == state).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn load_is_balanced() {
    const CLIENTS: u64 = 4;
    let server = RedisServer::start();
    let set = ClientSet::connect(options(server.port()).name("web"), of(4)).await.unwrap();
    let list = server.cli(["CLIENT", "LIST"]);
    for index in 0..CLIENTS {
        assert!(list.contains(&format!(" name=web-{index} ")), "{list}");
    }
    let mut tasks = JoinSet::new();
    for _ in 0..32 {
        let set = set.clone();
        tasks.spawn(async move {
            for _ in 0..100 {
                set.least_loaded().send(commands::incr("count")).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let sent = async || set.stats().iter().map(|stats| stats.requests).collect::<Vec<_>>();
    wait_until_async("all are counted", PATIENCE, async || sent().await.iter().sum::<u64>() == 3200).await;
    assert!(sent().await.iter().all(|requests| *requests >= 3200 / CLIENTS / 4), "{:?}", sent().await);
}

#[tokio::test]
async fn busy_client_is_avoided() {
    let server = RedisServer::start();
    let set = ClientSet::connect(options(server.port()), of(3)).await.unwrap();
    server.pause();
    let mut tasks = JoinSet::new();
    for busy in [0, 2] {
        let client = set.clients()[busy].clone();
        tasks.spawn(async move { client.send(commands::incr("count")).await });
    }
    wait_until_async("both are in flight", PATIENCE, async || {
        set.stats().iter().map(|stats| stats.in_flight).sum::<usize>() == 2
    })
    .await;
    for _ in 0..10 {
        assert_eq!(index(&set, set.least_loaded()), 1);
    }
    server.resume();
    tasks.join_all().await.into_iter().for_each(|sent| assert!(sent.is_ok()));
}

#[tokio::test]
async fn requests_for_a_key_are_sent_in_order() {
    let server = RedisServer::start();
    let set = ClientSet::connect(options(server.port()), of(3)).await.unwrap();
    let keys: Vec<_> = (0..50).map(|key| format!("list:{key}")).collect();
    let mut pushes = Vec::new();
    for turn in 0..50 {
        for key in &keys {
            pushes.push(Box::pin(set.for_key(key).send(commands::rpush(key, [turn.to_string()]))));
        }
    }
    // The first poll submits a request.
    let mut replies = Vec::new();
    for push in &mut pushes {
        replies.push(poll_fn(|context| Poll::Ready(push.as_mut().poll(context))).await);
    }
    for (mut push, reply) in pushes.into_iter().zip(replies) {
        match reply {
            Poll::Ready(reply) => reply.unwrap(),
            Poll::Pending => push.as_mut().await.unwrap(),
        };
    }
    let mut used = [0; 3];
    for key in &keys {
        used[index(&set, set.for_key(key))] += 1;
        let list: Vec<usize> = set.for_key(key).send(commands::lrange(key, 0, -1).returning()).await.unwrap();
        assert_eq!(list, (0..50).collect::<Vec<_>>(), "{key}");
    }
    assert!(used.iter().all(|keys| *keys > 5), "{used:?}");
    // Another set has the same clients for the keys.
    let other = ClientSet::connect(options(server.port()), of(3)).await.unwrap();
    assert!(keys.iter().all(|key| index(&set, set.for_key(key)) == index(&other, other.for_key(key))));
}

#[tokio::test]
async fn client_without_a_connection_is_avoided_until_it_is_back() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let set = ClientSet::connect(options(proxy.addr().port()).while_down(WhileDown::Fail), of(3)).await.unwrap();
    let [_, lost, _] = set.clients() else { panic!("three clients") };
    let id = lost.send(commands::client_id()).await.unwrap();
    proxy.inject(Faults::default().refuse(true));
    server.cli(["CLIENT", "KILL", "ID", &id.to_string()]);
    lost.status().wait_for(|status| status.state != ConnectionState::Open).await.unwrap();
    for _ in 0..100 {
        set.least_loaded().send(commands::incr("count")).await.unwrap();
    }
    // Requests for its keys are not sent over another connection.
    let key = (0..10_000).map(|key: u32| key.to_string()).find(|key| std::ptr::eq(set.for_key(key), lost)).unwrap();
    let error = set.for_key(&key).send(commands::incr(&key)).await.unwrap_err();
    assert_eq!(error.outcome(), Some(RequestOutcome::NeverSent), "{error:?}");
    proxy.heal();
    state(lost, ConnectionState::Open).await;
    assert!((0..3).any(|_| std::ptr::eq(set.least_loaded(), lost)));
    set.for_key(&key).send(commands::incr(&key)).await.unwrap();
}

#[tokio::test]
async fn silent_connection_is_replaced_without_a_request() {
    // The first connection stops answering.
    let is_silent = Arc::new(AtomicBool::new(false));
    let server = {
        let is_silent = Arc::clone(&is_silent);
        Scripted::answering(move |words, connection| match greeting(words) {
            Some(reply) => reply,
            None if connection == 0 && is_silent.load(SeqCst) => String::new(),
            None => "+PONG\r\n".to_owned(),
        })
        .await
    };
    let options = options(server.port()).connect_timeout(Duration::from_millis(500));
    let checks = of(1).health_interval(Duration::from_millis(20));
    let set = ClientSet::connect(options, checks).await.unwrap();
    let client = &set.clients()[0];
    client.send(command(&["ECHO", "1"])).await.unwrap();
    assert_eq!(client.stats().health_checks_failed, 0);

    is_silent.store(true, SeqCst);
    wait_until_async("it fails", PATIENCE, async || client.stats().health_checks_failed > 0).await;
    // The server sends nothing, so the connection is replaced, without a request of a caller.
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    state(client, ConnectionState::Open).await;
    client.send(command(&["ECHO", "2"])).await.unwrap();
    assert_eq!(client.stats().timeouts.waiting, 0);
}

#[tokio::test]
async fn connection_that_fails_its_check_is_not_chosen() {
    // A server that executes a long script answers BUSY.
    let is_busy = Arc::new(AtomicBool::new(false));
    let server = {
        let is_busy = Arc::clone(&is_busy);
        Scripted::answering(move |words, connection| match greeting(words) {
            Some(reply) => reply,
            None if connection == 0 && is_busy.load(SeqCst) => "-BUSY Redis is busy\r\n".to_owned(),
            None => "+PONG\r\n".to_owned(),
        })
        .await
    };
    let (set, connections) = ClientSet::new(&options(server.port()), of(2).health_interval(Duration::from_millis(5)));
    // One after another, so that the first client has the first connection.
    for (client, connection) in set.clients().iter().zip(connections) {
        tokio::spawn(connection.run());
        state(client, ConnectionState::Open).await;
    }
    is_busy.store(true, SeqCst);
    wait_until_async("it fails", PATIENCE, async || set.stats()[0].health_checks_failed > 0).await;
    for _ in 0..10 {
        assert_eq!(index(&set, set.least_loaded()), 1);
    }
    is_busy.store(false, SeqCst);
    wait_until_async("it is healthy", PATIENCE, async || index(&set, set.least_loaded()) == 0).await;
    assert_eq!(set.stats()[1].health_checks_failed, 0);
}

#[tokio::test]
async fn requests_fail_while_all_are_down_and_succeed_after_it() {
    let mut server = RedisServer::start();
    let set = ClientSet::connect(options(server.port()), of(2)).await.unwrap();
    server.kill();
    for client in set.clients() {
        client.status().wait_for(|status| status.state != ConnectionState::Open).await.unwrap();
    }
    let error = set.least_loaded().send(commands::incr("count")).await.unwrap_err();
    assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
    server.restart();
    for client in set.clients() {
        state(client, ConnectionState::Open).await;
    }
    assert_eq!(set.least_loaded().send(commands::incr("count")).await.unwrap(), 1);
    server.kill();
    assert!(ClientSet::connect(options(server.port()), of(2)).await.is_err());
}

#[tokio::test]
async fn close_waits_for_the_replies_of_all_clients() {
    let server = RedisServer::start();
    let set = ClientSet::start(options(server.port()), of(3));
    let mut tasks = JoinSet::new();
    for client in set.clients() {
        state(client, ConnectionState::Open).await;
    }
    server.pause();
    for client in set.clients() {
        let client = client.clone();
        tasks.spawn(async move { client.send(commands::incr("count")).await });
    }
    wait_until_async("all are in flight", PATIENCE, async || set.stats().iter().all(|stats| stats.in_flight == 1))
        .await;
    let closing = tokio::spawn({
        let set = set.clone();
        async move { set.close(PATIENCE).await }
    });
    for client in set.clients() {
        state(client, ConnectionState::Closing).await;
    }
    server.resume();
    closing.await.unwrap();
    tasks.join_all().await.into_iter().for_each(|sent| assert!(sent.is_ok()));
    for client in set.clients() {
        assert_eq!(client.status().borrow().state, ConnectionState::Closed);
        assert!(matches!(client.send(commands::incr("count")).await, Err(Error::Closed { .. })));
    }
}
