//! Subscriptions, over a real server.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidewire_redis::pubsub::{
    Event, KeyspaceError, KeyspaceOptions, SubscribeOptions, Subscription, WhenSlow, keyspace,
};
use tidewire_redis::{Client, CommandError, Error, ErrorCode, Login, RequestOutcome, WhileDown, commands};
use tidewire_testkit::{CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async};

use crate::servers::{Scripted, answer, greeting, options, resp2_and_resp3};

/// Waits for the next event.
async fn next(subscription: &mut Subscription) -> Event {
    next_result(subscription).await.expect("the subscription goes on").expect("no error")
}

async fn next_result(subscription: &mut Subscription) -> Option<Result<Event, Error>> {
    tokio::time::timeout(PATIENCE, subscription.next()).await.expect("an event in time")
}

/// Waits for the next message, and returns its payload. Gaps are skipped.
async fn payload(subscription: &mut Subscription) -> String {
    loop {
        match next(subscription).await {
            Event::Message(message) => return String::from_utf8(message.payload.to_vec()).unwrap(),
            Event::Gap { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn is_gap(event: &Event) -> bool {
    matches!(event, Event::Gap { .. })
}

/// Publishes with a client of its own, so that nothing depends on the connection under test. Returns the number of receivers.
fn publish(server: &RedisServer, channel: &str, payload: &str) -> u64 {
    server.cli(["PUBLISH", channel, payload]).parse().unwrap()
}

/// Returns the channels on the server, and the number of connections that have subscribed to each. Patterns are a number.
fn on_server(server: &RedisServer) -> (BTreeSet<String>, String) {
    let lines = |command: &[&str]| {
        server.cli(command).lines().map(str::to_owned).filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    let mut found = BTreeSet::new();
    for (list, count) in [("CHANNELS", "NUMSUB"), ("SHARDCHANNELS", "SHARDNUMSUB")] {
        let names = lines(&["PUBSUB", list]);
        if names.is_empty() {
            continue;
        }
        let mut command = vec!["PUBSUB", count];
        command.extend(names.iter().map(String::as_str));
        found.extend(lines(&command).chunks(2).map(|pair| format!("{}:{}", pair[0], pair[1])));
    }
    (found, server.cli(["PUBSUB", "NUMPAT"]))
}

/// Waits until the channels on the server are these, each subscribed by one connection.
async fn server_has(server: &RedisServer, channels: &[&str], patterns: usize) {
    let wanted = (channels.iter().map(|channel| format!("{channel}:1")).collect(), patterns.to_string());
    wait_until_async(&format!("the server has {wanted:?}"), PATIENCE, async || on_server(server) == wanted).await;
}

fn pubsub_connections(server: &RedisServer) -> usize {
    server.cli(["CLIENT", "LIST", "TYPE", "pubsub"]).lines().filter(|line| !line.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn hundred_subscriptions_of_a_channel_receive_all_messages_in_order() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let mut subscriptions = Vec::new();
        for _ in 0..100 {
            subscriptions.push(client.subscribe(["news"]).await.unwrap());
        }
        server_has(&server, &["news"], 0).await;
        for number in 0..200 {
            let receivers = client.send(commands::publish("news", number)).await.unwrap();
            assert_eq!(receivers, 1, "one connection for all");
        }
        for subscription in &mut subscriptions {
            for number in 0..200 {
                assert_eq!(payload(subscription).await, number.to_string());
            }
        }
        let stats = client.stats().pubsub;
        assert_eq!((stats.subscriptions, stats.channels, stats.messages, stats.dropped), (100, 1, 200, 0));
        assert_eq!((stats.is_open, stats.generation, stats.connect_attempts, stats.connections_lost), (true, 1, 1, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_name_their_channel_and_pattern() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let mut channels = client.subscribe(["a", "b", "a"]).await.unwrap();
        let mut patterns = client.psubscribe(["[ab]*", "b*"]).await.unwrap();
        let mut shards = client.ssubscribe(["{b}1", "{b}2"]).await.unwrap();
        assert_eq!(client.send(commands::publish("b", b"\0\xff x")).await.unwrap(), 3);
        assert_eq!(client.send(commands::spublish("{b}2", "shard")).await.unwrap(), 1);
        let Event::Message(message) = next(&mut channels).await else { panic!("not a message") };
        assert_eq!(
            (&*message.channel, message.pattern.clone(), &*message.payload),
            (&b"b"[..], None, &b"\0\xff x"[..])
        );
        let mut found = BTreeSet::new();
        for _ in 0..2 {
            let Event::Message(message) = next(&mut patterns).await else { panic!("not a message") };
            assert_eq!(message.channel, "b");
            found.extend(message.pattern.clone());
        }
        assert_eq!(found, ["[ab]*".into(), "b*".into()].into());
        let Event::Message(message) = next(&mut shards).await else { panic!("not a message") };
        assert_eq!((&*message.channel, &*message.payload), (&b"{b}2"[..], &b"shard"[..]));
        server_has(&server, &["a", "b", "{b}1", "{b}2"], 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn channel_is_unsubscribed_when_its_last_subscription_is_dropped() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let one = client.subscribe(["a", "b"]).await.unwrap();
    let mut two = client.subscribe(["b", "c"]).await.unwrap();
    let patterns = client.psubscribe(["p*"]).await.unwrap();
    server_has(&server, &["a", "b", "c"], 1).await;
    drop((one, patterns));
    server_has(&server, &["b", "c"], 0).await;
    publish(&server, "b", "still");
    assert_eq!(payload(&mut two).await, "still");
    assert_eq!(pubsub_connections(&server), 1);
    drop(two);
    server_has(&server, &[], 0).await;
    wait_until_async("the connection is closed", PATIENCE, async || !client.stats().pubsub.is_open).await;
    // A connection without subscriptions is not of the type pubsub.
    wait_until_async("the socket is closed", PATIENCE, async || server.cli(["CLIENT", "LIST"]).lines().count() == 2)
        .await;
    let mut again = client.subscribe(["d"]).await.unwrap();
    publish(&server, "d", "new connection");
    // A new subscription has missed nothing.
    let Event::Message(message) = next(&mut again).await else { panic!("not a message") };
    assert_eq!(message.payload, "new connection");
    assert_eq!(client.stats().pubsub.generation, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_channel_is_named_and_leaves_others_alone() {
    for config in ["rename-command HELLO \"\"", "timeout 0"] {
        let options_of_server = RedisServer::options().user("app", "on >secret ~* +@all resetchannels &ok*");
        let server = options_of_server.config(config).start();
        let login = Login::new("secret").user("app");
        let client = Client::start(options(server.port()).login(login));
        let mut good = client.subscribe(["ok1"]).await.unwrap();
        let error = client.subscribe(["ok2", "bad", "ok3"]).await.unwrap_err();
        assert_eq!(error.code(), Some(&ErrorCode::NoPermission));
        assert!(error.to_string().contains("\"bad\""), "{error}");
        let error = client.psubscribe(["no*"]).await.unwrap_err();
        assert!(error.to_string().contains("\"no*\""), "{error}");
        server_has(&server, &["ok1"], 0).await;
        publish(&server, "ok1", "works");
        assert_eq!(payload(&mut good).await, "works");
        assert_eq!(client.stats().pubsub.connect_attempts, 1, "{config}");
        client.close(PATIENCE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn channel_that_is_refused_after_a_reconnect_ends_its_subscription_only() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all resetchannels &a &b").start();
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    let mut one = client.subscribe(["a"]).await.unwrap();
    let mut both = client.subscribe(["a", "b"]).await.unwrap();
    publish(&server, "b", "last");
    // The server ends connections that have subscribed to a channel that is forbidden now.
    server.cli(["ACL", "SETUSER", "app", "resetchannels", "&a"]);
    assert!(is_gap(&next(&mut one).await));
    assert_eq!(payload(&mut both).await, "last");
    let error = loop {
        match next_result(&mut both).await {
            Some(Ok(event)) => assert!(is_gap(&event), "{event:?}"),
            Some(Err(error)) => break error,
            None => panic!("it ends with an error"),
        }
    };
    assert!(error.code() == Some(&ErrorCode::NoPermission) && error.to_string().contains("\"b\""), "{error}");
    assert!(next_result(&mut both).await.is_none());
    server_has(&server, &["a"], 0).await;
    publish(&server, "a", "still");
    assert_eq!(payload(&mut one).await, "still");
}

#[tokio::test]
async fn invalid_channels_are_rejected_before_anything_is_sent() {
    let server = Scripted::answering(|_, _| panic!("nothing is sent over the pub/sub connection")).await;
    let (client, _connection) = Client::new(options(server.port()));
    for error in [
        client.subscribe(None::<&str>).await.unwrap_err(),
        client.psubscribe([""; 0]).await.unwrap_err(),
        client.ssubscribe([""; 0]).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Command(CommandError::NoChannels)), "{error:?}");
    }
    let error = client.ssubscribe(["{a}1", "{a}2", "{b}1"]).await.unwrap_err();
    assert!(matches!(error, Error::Command(CommandError::ShardChannelSlots { .. })), "{error:?}");
    assert!(error.to_string().contains("\"{a}1\" and \"{b}1\""), "{error}");
    assert_eq!(client.stats().pubsub.subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_are_restored_after_every_kind_of_loss() {
    let mut server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let quick = Duration::from_millis(200);
    let client = Client::start(options(proxy.addr().port()).pubsub_ping_after(quick).connect_timeout(quick));
    let mut channels = client.subscribe(["a", "b"]).await.unwrap();
    let mut same = client.subscribe(["b"]).await.unwrap();
    let mut patterns = client.psubscribe(["p*"]).await.unwrap();
    let mut shards = client.ssubscribe(["s"]).await.unwrap();
    for fault in ["kill", "CLIENT KILL", "pause", "reset", "close", "half open"] {
        let before = client.stats().pubsub.generation;
        let is_restored = async || client.stats().pubsub.generation > before && client.stats().pubsub.is_open;
        match fault {
            "kill" => {
                server.kill();
                server.restart();
            }
            "CLIENT KILL" => drop(server.cli(["CLIENT", "KILL", "TYPE", "pubsub"])),
            "pause" => {
                server.pause();
                let lost = client.stats().pubsub.connections_lost;
                let is_lost = async || client.stats().pubsub.connections_lost > lost;
                wait_until_async("the server is found dead", PATIENCE, is_lost).await;
                server.resume();
            }
            "reset" => proxy.cut(CloseMode::Reset),
            "close" => proxy.cut(CloseMode::Graceful),
            _ => {
                proxy.inject(Faults::default().half_open(true));
                let lost = client.stats().pubsub.connections_lost;
                let is_lost = async || client.stats().pubsub.connections_lost > lost;
                wait_until_async("the connection is found dead", PATIENCE, is_lost).await;
                proxy.heal();
                // The server does not know that the old connections are dead.
                proxy.cut(CloseMode::Reset);
            }
        }
        wait_until_async(&format!("subscriptions are restored after {fault}"), PATIENCE, is_restored).await;
        server_has(&server, &["a", "b", "s"], 1).await;
        for channel in ["a", "b", "pp"] {
            publish(&server, channel, fault);
        }
        server.cli(["SPUBLISH", "s", fault]);
        for (subscription, messages) in [(&mut channels, 2), (&mut same, 1), (&mut patterns, 1), (&mut shards, 1)] {
            assert!(is_gap(&next(subscription).await), "{fault}");
            for _ in 0..messages {
                assert_eq!(payload(subscription).await, fault);
            }
        }
    }
    // Nothing is received twice.
    for (subscription, channel) in [(&mut channels, "b"), (&mut same, "b"), (&mut patterns, "pp")] {
        publish(&server, channel, "end");
        assert_eq!(payload(subscription).await, "end");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_channels_are_restored() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let names: Vec<String> = (0..20_000).map(|number| format!("channel:{number}")).collect();
    let mut many = client.subscribe(&names).await.unwrap();
    server.cli(["CLIENT", "KILL", "TYPE", "pubsub"]);
    // The desired set changes meanwhile.
    let more = client.subscribe(["more"]);
    let ended = more.await;
    assert!(matches!(ended, Ok(_) | Err(Error::Lost { .. })), "{ended:?}");
    while !is_gap(&next(&mut many).await) {}
    wait_until_async("all are restored", PATIENCE, async || {
        server.cli(["PUBSUB", "CHANNELS", "channel:*"]).lines().count() == names.len()
    })
    .await;
    publish(&server, "channel:19999", "x");
    assert_eq!(payload(&mut many).await, "x");
    drop((many, ended));
    server_has(&server, &[], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connection_is_kept_open_by_pings() {
    for (server, _) in resp2_and_resp3() {
        let options = options(server.port()).pubsub_ping_after(Duration::from_millis(1));
        let client = Client::start(options);
        let mut news = client.subscribe(["news"]).await.unwrap();
        let pings = async || {
            server.cli(["INFO", "commandstats"]).lines().any(|line| {
                line.strip_prefix("cmdstat_ping:calls=").and_then(|rest| rest.split(',').next()?.parse().ok())
                    > Some(20_u64)
            })
        };
        wait_until_async("there are pings", PATIENCE, pings).await;
        publish(&server, "news", "x");
        assert_eq!(payload(&mut news).await, "x");
        assert_eq!(client.stats().pubsub.connections_lost, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_subscriber_loses_the_oldest_messages_and_is_told_how_many() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let small = SubscribeOptions::default().max_messages(10);
    let mut slow = client.subscribe_with(["news"], small).await.unwrap();
    let mut fast = client.subscribe(["news"]).await.unwrap();
    for number in 0..100 {
        client.send(commands::publish("news", number)).await.unwrap();
    }
    for number in 0..100 {
        assert_eq!(payload(&mut fast).await, number.to_string());
    }
    wait_until_async("messages are dropped", PATIENCE, async || slow.dropped() == 90).await;
    assert_eq!(next(&mut slow).await, Event::Dropped { count: 90 });
    for number in 90..100 {
        assert_eq!(payload(&mut slow).await, number.to_string());
    }
    assert_eq!((client.stats().pubsub.dropped, fast.dropped()), (90, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_a_subscription_are_limited() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut slow = client.subscribe_with(["news"], SubscribeOptions::default().max_bytes(100_000)).await.unwrap();
    let large = "x".repeat(30_000);
    for _ in 0..10 {
        client.send(commands::publish("news", &large)).await.unwrap();
    }
    client.send(commands::publish("news", "last")).await.unwrap();
    wait_until_async("all are read", PATIENCE, async || client.stats().pubsub.messages == 11).await;
    wait_until_async("old ones are dropped", PATIENCE, async || slow.dropped() == 7).await;
    assert_eq!(next(&mut slow).await, Event::Dropped { count: 7 });
    for _ in 0..3 {
        assert_eq!(payload(&mut slow).await, large);
    }
    assert_eq!(payload(&mut slow).await, "last");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_slow_subscriber_loses_nothing() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let patient = SubscribeOptions::default().max_messages(2).when_slow(WhenSlow::Wait);
    let mut slow = client.subscribe_with(["news"], patient).await.unwrap();
    let mut other = client.subscribe(["news"]).await.unwrap();
    let abandoned = client.subscribe_with(["news"], patient).await.unwrap();
    for number in 0..500 {
        client.send(commands::publish("news", number)).await.unwrap();
    }
    // It does not keep the others waiting after it is dropped.
    wait_until_async("it is full", PATIENCE, async || client.stats().pubsub.messages == 3).await;
    drop(abandoned);
    for number in 0..500 {
        assert_eq!(payload(&mut slow).await, number.to_string());
        assert_eq!(payload(&mut other).await, number.to_string());
    }
    let stats = client.stats().pubsub;
    assert_eq!((stats.messages, stats.dropped, stats.connections_lost), (500, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_ends_a_connection_above_its_output_limit_and_the_gap_says_so() {
    let server = RedisServer::options().config("client-output-buffer-limit pubsub 1mb 0 0").start();
    let client = Client::start(options(server.port()));
    let patient = SubscribeOptions::default().max_messages(1).when_slow(WhenSlow::Wait);
    let mut slow = client.subscribe_with(["news"], patient).await.unwrap();
    let large = "x".repeat(100_000);
    wait_until_async("the server ends the connection", PATIENCE, async || {
        client.send(commands::publish("news", &large)).await.unwrap() == 0
    })
    .await;
    while !is_gap(&next(&mut slow).await) {}
    client.send(commands::publish("news", "after")).await.unwrap();
    assert_eq!(payload(&mut slow).await, "after");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_future_while_subscribing_unsubscribes() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let kept = client.subscribe(["kept"]).await.unwrap();
    for turn in 0..200 {
        let task = tokio::spawn({
            let client = client.clone();
            async move { client.subscribe([format!("dropped:{turn}"), "kept".to_owned()]).await }
        });
        if turn % 2 == 0 {
            tokio::task::yield_now().await;
        }
        task.abort();
        let _ = task.await;
    }
    server_has(&server, &["kept"], 0).await;
    assert_eq!(client.stats().pubsub.subscriptions, 1);
    drop(kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_the_client_ends_subscriptions_after_their_messages() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut news = client.subscribe(["news"]).await.unwrap();
    publish(&server, "news", "last");
    wait_until_async("it is received", PATIENCE, async || client.stats().pubsub.messages == 1).await;
    client.close(PATIENCE).await;
    assert_eq!(payload(&mut news).await, "last");
    assert!(next_result(&mut news).await.is_none());
    assert!(next_result(&mut news).await.is_none());
    let error = client.subscribe(["more"]).await.unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::NeverSent }), "{error:?}");
    wait_until_async("the connection is closed", PATIENCE, async || pubsub_connections(&server) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_keeps_the_client_open_and_the_driver_ends_it() {
    let server = RedisServer::start();
    let (client, connection) = Client::new(options(server.port()));
    let driver = tokio::spawn(connection.run());
    let mut news = client.subscribe(["news"]).await.unwrap();
    drop(client);
    publish(&server, "news", "x");
    assert_eq!(payload(&mut news).await, "x");
    driver.abort();
    assert!(next_result(&mut news).await.is_none());

    let (client, connection) = Client::new(options(server.port()));
    let driver = tokio::spawn(connection.run());
    drop(client.subscribe(["news"]).await.unwrap());
    drop(client);
    driver.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn while_down_decides_about_subscriptions_in_an_outage() {
    let mut server = RedisServer::start();
    for (choice, waits) in [(WhileDown::Queue, true), (WhileDown::WaitForAttempt, false), (WhileDown::Fail, false)] {
        // The second attempt is far away.
        let slow = Duration::from_mins(10);
        let backoff = if waits { Duration::from_millis(1) } else { slow };
        let options = options(server.port()).while_down(choice).min_backoff(backoff).max_backoff(backoff);
        let client = Client::start(options);
        let kept = client.subscribe(["kept"]).await.unwrap();
        server.kill();
        wait_until_async("it is lost", PATIENCE, async || client.stats().pubsub.connect_attempts > 1).await;
        if waits {
            let subscribing = tokio::spawn({
                let client = client.clone();
                async move { client.subscribe(["more"]).await }
            });
            wait_until_async("it waits", PATIENCE, async || client.stats().pubsub.subscriptions == 2).await;
            server.restart();
            drop(subscribing.await.unwrap().unwrap());
        } else {
            wait_until_async("it fails", PATIENCE, async || {
                matches!(client.subscribe(["more"]).await, Err(Error::Lost { outcome: RequestOutcome::NeverSent, .. }))
            })
            .await;
            server.restart();
        }
        drop(kept);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_ends_an_attempt_to_subscribe() {
    let server = Scripted::deaf().await;
    let client = Client::start(options(server.port()));
    let error = client.with_timeout(Duration::from_millis(20)).subscribe(["a"]).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    let error = client.with_timeout(Duration::ZERO).subscribe(["a"]).await.unwrap_err();
    assert_eq!(error.outcome(), Some(RequestOutcome::NeverSent), "{error:?}");
    assert_eq!(client.stats().pubsub.subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_reconnect_a_loss_ends_subscriptions_with_its_error() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).reconnect(false));
    let mut news = client.subscribe(["news"]).await.unwrap();
    server.cli(["CLIENT", "KILL", "TYPE", "pubsub"]);
    let last = next_result(&mut news).await;
    assert!(matches!(last, Some(Err(Error::Lost { .. }))), "{last:?}");
    assert!(next_result(&mut news).await.is_none());
    // Another subscription has another connection.
    let mut again = client.subscribe(["news"]).await.unwrap();
    publish(&server, "news", "x");
    assert_eq!(payload(&mut again).await, "x");
}

#[tokio::test]
async fn nothing_but_subscriptions_and_pings_goes_over_their_connection() {
    let commands = Arc::new(Mutex::new(Vec::<(usize, String)>::new()));
    let seen = Arc::clone(&commands);
    let server = Scripted::answering(move |words, connection| {
        seen.lock().unwrap().push((connection, words[0].clone()));
        match &*words[0] {
            "SUBSCRIBE" => ">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n".to_owned(),
            "UNSUBSCRIBE" => ">3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:0\r\n".to_owned(),
            _ => greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned()),
        }
    })
    .await;
    let client = Client::start(options(server.port()).pubsub_ping_after(Duration::from_millis(1)));
    let news = client.subscribe(["a"]).await.unwrap();
    let has = |name: &str| commands.lock().unwrap().iter().any(|(_, word)| word == name);
    let mut dropped = Some(news);
    for number in 0.. {
        client.send(commands::set("k", number)).await.unwrap();
        if has("PING") && number > 100 {
            dropped = None;
        }
        if has("UNSUBSCRIBE") {
            break;
        }
    }
    assert!(dropped.is_none());
    let commands = commands.lock().unwrap();
    let of_pubsub = commands.iter().find(|(_, word)| word == "SUBSCRIBE").unwrap().0;
    let words: BTreeSet<_> =
        commands.iter().filter(|(connection, _)| *connection == of_pubsub).map(|(_, word)| &**word).collect();
    assert_eq!(words, ["CLIENT", "HELLO", "PING", "SUBSCRIBE", "UNSUBSCRIBE"].into(), "with the handshake");
    let shared = commands.iter().filter(|(connection, _)| *connection != of_pubsub);
    assert!(shared.map(|(_, word)| word).all(|word| matches!(&**word, "HELLO" | "CLIENT" | "SET")));
}

#[tokio::test]
async fn channel_that_the_server_ends_is_subscribed_again() {
    // As a cluster does when it moves a slot. The second attempt is refused.
    for is_moved in [true, false] {
        let server = Scripted::start(move |mut stream, _| async move {
            let asked = std::sync::atomic::AtomicUsize::new(0);
            answer(&mut stream, |words| {
                let confirmed = ">3\r\n$10\r\nssubscribe\r\n$1\r\ns\r\n:1\r\n";
                Some(match (&*words[0], asked.load(std::sync::atomic::Ordering::SeqCst)) {
                    ("SSUBSCRIBE", 0) => {
                        asked.store(1, std::sync::atomic::Ordering::SeqCst);
                        format!("{confirmed}>3\r\n$12\r\nsunsubscribe\r\n$1\r\ns\r\n:0\r\n")
                    }
                    ("SSUBSCRIBE", _) if is_moved => "-MOVED 7 10.0.0.1:6379\r\n".to_owned(),
                    ("SSUBSCRIBE", _) => {
                        format!("{confirmed}>3\r\n$8\r\nsmessage\r\n$1\r\ns\r\n$1\r\nx\r\n>2\r\n+other\r\n+push\r\n")
                    }
                    _ => greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned()),
                })
            })
            .await;
        })
        .await;
        let client = Client::start(options(server.port()));
        let mut shard = client.ssubscribe(["s"]).await.unwrap();
        if is_moved {
            let last = next_result(&mut shard).await;
            assert!(matches!(&last, Some(Err(error)) if error.code() == Some(&ErrorCode::Moved)), "{last:?}");
            assert!(next_result(&mut shard).await.is_none());
        } else {
            assert!(is_gap(&next(&mut shard).await));
            assert_eq!(payload(&mut shard).await, "x");
        }
    }
}

#[tokio::test]
async fn unexpected_replies_end_the_connection_and_nothing_else() {
    for reply in [
        "+OK\r\n",
        ":1\r\n",
        "*0\r\n",
        ">1\r\n$7\r\nmessage\r\n",
        "*2\r\n$5\r\nhello\r\n$1\r\na\r\n",
        ">3\r\n$9\r\nsubscribe\r\n$1\r\nb\r\n:1\r\n",
        "*3\r\n$7\r\nmessage\r\n*0\r\n$1\r\nb\r\n",
        "?\r\n",
    ] {
        let server = Scripted::start(move |mut stream, number| async move {
            answer(&mut stream, |words| {
                Some(match &*words[0] {
                    "SUBSCRIBE" if number == 0 || number == 1 => reply.to_owned(),
                    "SUBSCRIBE" => ">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n".to_owned(),
                    _ => greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned()),
                })
            })
            .await;
        })
        .await;
        let client = Client::start(options(server.port()).while_down(WhileDown::Queue));
        drop(client.subscribe(["a"]).await.unwrap_or_else(|error| panic!("{reply:?}: {error}")));
        assert!(client.stats().pubsub.connections_lost > 0, "{reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_server_is_tried_again_when_subscriptions_are_restored() {
    let server = Scripted::start(|mut stream, number| async move {
        answer(&mut stream, |words| {
            Some(match &*words[0] {
                "SUBSCRIBE" if (2..5).contains(&number) => "-BUSY Redis is busy running a script.\r\n".to_owned(),
                "SUBSCRIBE" => ">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n".to_owned(),
                "CLOSE" => return None,
                _ => greeting(words).unwrap_or_else(|| "+OK\r\n".to_owned()),
            })
        })
        .await;
    })
    .await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], server.port()).into());
    let client = Client::start(options(proxy.addr().port()));
    let mut subscription = client.subscribe(["a"]).await.unwrap();
    proxy.cut(CloseMode::Reset);
    assert!(is_gap(&next(&mut subscription).await));
    assert!(proxy.forwarded_bytes(Direction::ToServer) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn keyspace_notifications_are_parsed() {
    let server = RedisServer::options().config("notify-keyspace-events KEA").start();
    let client = Client::start(options(server.port()).database(3));
    let mut keys = keyspace(&client, KeyspaceOptions::keys("user:*")).await.unwrap();
    let mut events = keyspace(&client, KeyspaceOptions::events(["del", "set"])).await.unwrap();
    client.send(commands::set("other", 1)).await.unwrap();
    client.send(commands::set("user:1", 1)).await.unwrap();
    client.send(commands::del(["user:1"])).await.unwrap();
    for (subscription, expected) in [
        (&mut keys, &[("user:1", "set"), ("user:1", "del")][..]),
        (&mut events, &[("other", "set"), ("user:1", "set"), ("user:1", "del")]),
    ] {
        for (key, event) in expected {
            let next = tokio::time::timeout(PATIENCE, subscription.next()).await.unwrap();
            let Some(Ok(Event::Message(found))) = next else { panic!("{next:?}") };
            assert_eq!((&*found.key, &*found.event), (key.as_bytes(), event.as_bytes()));
        }
        assert_eq!(subscription.dropped(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keyspace_notifications_that_are_off_are_an_error_unless_the_setting_is_secret() {
    let server = RedisServer::options().user("app", "on >secret ~* &* +@all -config").start();
    let client = Client::start(options(server.port()));
    let error = keyspace(&client, KeyspaceOptions::events(["expired"])).await.unwrap_err();
    assert!(matches!(&error, KeyspaceError::Disabled { missing, .. } if &**missing == "Ex"), "{error:?}");
    assert!(error.to_string().contains("CONFIG SET notify-keyspace-events"), "{error}");
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    let mut events = keyspace(&client, KeyspaceOptions::events(["expired"]).database(0)).await.unwrap();
    server.cli(["CONFIG", "SET", "notify-keyspace-events", "Ex"]);
    server.cli(["SET", "k", "v", "PX", "1"]);
    let next = tokio::time::timeout(PATIENCE, events.next()).await.unwrap();
    assert!(matches!(&next, Some(Ok(Event::Message(event))) if event.key == "k"), "{next:?}");
}

/// Random faults and changes, the same ones for the same seed. `TIDEWIRE_PUBSUB_STEPS` makes it longer.
#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_survive_a_thousand_faults_and_changes() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("TIDEWIRE_SEED").unwrap_or_else(|| fastrand::u64(..));
    let steps = number("TIDEWIRE_PUBSUB_STEPS").unwrap_or(1000);
    println!("TIDEWIRE_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let options = options(proxy.addr().port())
        .while_down(WhileDown::Queue)
        .min_backoff(Duration::from_micros(100))
        .max_backoff(Duration::from_millis(2));
    let client = Client::start(options);
    // Keeps the connection open.
    let mut held: Vec<(String, Subscription)> = vec![("base".to_owned(), client.subscribe(["base"]).await.unwrap())];
    let mut joining = tokio::task::JoinSet::new();
    let mut wanted_losses = 0;
    for _ in 0..steps {
        let name = format!("c{}", random.u8(0..8));
        match random.u8(0..10) {
            mode @ 0..2 => {
                proxy.heal();
                wait_until_async("the connection is open", PATIENCE, async || client.stats().pubsub.is_open).await;
                proxy.cut(if mode == 0 { CloseMode::Reset } else { CloseMode::Graceful });
                wanted_losses += 1;
                let is_lost = async || client.stats().pubsub.connections_lost >= wanted_losses;
                wait_until_async("the connection is lost", PATIENCE, is_lost).await;
            }
            2 => {
                // Until it is healed, every connection is cut: in the handshake, while subscriptions are restored, or later.
                let direction = if random.bool() { Direction::ToClient } else { Direction::ToServer };
                proxy.inject(Faults::default().cut(Cut::after(random.u64(0..1200), direction)));
            }
            3 => proxy.heal(),
            4 | 5 if held.len() > 1 => drop(held.swap_remove(random.usize(1..held.len()))),
            6 => joining.abort_all(),
            _ => {
                let client = client.clone();
                joining.spawn(async move {
                    let subscription = client.subscribe([&*name, "shared"]).await;
                    (name, subscription)
                });
            }
        }
        while let Some(joined) = joining.try_join_next() {
            if let Ok((name, subscription)) = joined {
                held.push((name, subscription.expect("it waits for a connection")));
            }
        }
        if random.bool() {
            tokio::task::yield_now().await;
        }
    }
    proxy.heal();
    while let Some(joined) = joining.join_next().await {
        if let Ok((name, subscription)) = joined {
            held.push((name, subscription.expect("it waits for a connection")));
        }
    }
    wait_until_async("the connection is open", PATIENCE, async || client.stats().pubsub.is_open).await;
    proxy.cut(CloseMode::Reset);
    let mut wanted: BTreeSet<&str> = held.iter().map(|(name, _)| &**name).collect();
    if held.len() > 1 {
        wanted.insert("shared");
    }
    let wanted: Vec<_> = wanted.into_iter().collect();
    let generation = client.stats().pubsub.generation;
    wait_until_async("it is open again", PATIENCE, async || client.stats().pubsub.generation > generation).await;
    server_has(&server, &wanted, 0).await;
    for name in &wanted {
        publish(&server, name, &format!("final {name}"));
        publish(&server, name, &format!("end {name}"));
    }
    let generation = client.stats().pubsub.generation;
    for (name, subscription) in &mut held {
        while next(subscription).await != (Event::Gap { generation }) {}
        let names = if *name == "base" { vec!["base"] } else { vec![&**name, "shared"] };
        let messages = names.iter().flat_map(|name| [format!("final {name}"), format!("end {name}")]);
        let mut expected: Vec<_> = messages.collect();
        for _ in 0..expected.len() {
            let found = payload(subscription).await;
            let at = expected.iter().position(|expected| *expected == found);
            expected.remove(at.unwrap_or_else(|| panic!("{found} was received twice or by another subscription")));
        }
    }
    let lost = client.stats().pubsub.connections_lost;
    println!("{lost} connections were lost, {} subscriptions were held", held.len());
    assert!(lost > steps / 20, "the faults had no effect: {lost}");
}
