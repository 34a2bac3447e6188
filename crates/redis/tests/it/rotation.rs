//! Logins that change while connections are open.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tidewire_redis::credentials::{Credentials, LoginFuture, RotatingLogin};
use tidewire_redis::pubsub::Event;
use tidewire_redis::{
    Client, Command, ConnectionState, Error, Login, Options, Pipeline, Request, Transaction, TransactionError,
    WhileDown, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::servers::options;

const ALLOWED: &str = "~* &* +@all";

fn server() -> RedisServer {
    RedisServer::options()
        .user("ada", format!("on >first >second {ALLOWED}"))
        .user("bob", format!("on >third {ALLOWED}"))
        .start()
}

fn ada(password: &str) -> Login {
    Login::new(password).user("ada")
}

fn whoami() -> Request<String> {
    Command::new("ACL").arg("WHOAMI").returning()
}

/// Returns the users of the connections of the client in `CLIENT LIST`.
fn users(server: &RedisServer) -> Vec<String> {
    let list = server.cli(["CLIENT", "LIST"]);
    let of_client = list.lines().filter(|line| line.contains("name=rotating "));
    of_client.map(|line| line.split(" user=").nth(1).unwrap().split(' ').next().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn password_is_rotated_without_an_error() {
    let server = server();
    let login = RotatingLogin::new(ada("first"));
    let client = Client::connect(options(server.port()).credentials(login.clone())).await.unwrap();
    let (done, is_done) = watch::channel(false);
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (client, is_done) = (client.clone(), is_done.clone());
        tasks.spawn(async move {
            let mut sent = 0;
            while !*is_done.borrow() {
                sent += 1;
                assert_eq!(client.send(commands::incr(format!("count:{task}"))).await.unwrap(), sent);
            }
        });
    }
    for rotation in 1..=20_u64 {
        login.set(ada(if rotation % 2 == 0 { "first" } else { "second" }));
        wait_until_async("it is sent", PATIENCE, async || client.stats().logins.changed >= rotation).await;
    }
    login.set(ada("second"));
    wait_until_async("it is sent", PATIENCE, async || client.stats().logins.changed >= 21).await;
    server.cli(["ACL", "SETUSER", "ada", "<first"]);
    done.send_replace(true);
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!((client.stats().logins.refused, client.status().borrow().generation), (0, 1));

    // The next connection uses the new password, too.
    server.cli(["CLIENT", "KILL", "USER", "ada"]);
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    assert_eq!(client.send(whoami()).await.unwrap(), "ada");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_open_connections_change_their_user() {
    let server = server();
    let login = RotatingLogin::new(ada("first"));
    let client = Client::connect(options(server.port()).name("rotating").credentials(login.clone())).await.unwrap();
    // One exclusive connection is idle, and one is blocked.
    client.send(commands::blpop(["none"], Duration::from_millis(1))).await.unwrap();
    let blocked = |count: usize| {
        let client = client.clone();
        let server = &server;
        async move {
            let mut waiting = JoinSet::new();
            for _ in 0..count {
                let client = client.clone();
                waiting.spawn(async move { client.send(commands::blpop(["list"], Duration::ZERO)).await });
            }
            let blocked = format!("blocked_clients:{count}");
            wait_until_async("it blocks", PATIENCE, async || server.cli(["INFO", "clients"]).contains(&blocked)).await;
            waiting
        }
    };
    let both = blocked(2).await;
    drop(both);
    wait_until_async("both are idle", PATIENCE, async || client.stats().exclusive.in_use == 0).await;
    let mut one = blocked(1).await;
    assert_eq!(users(&server), ["ada"; 3]);

    login.set(Login::new("third").user("bob"));
    wait_until_async("two have changed", PATIENCE, async || {
        users(&server).iter().filter(|user| *user == "bob").count() == 2
    })
    .await;
    assert_eq!(client.send(whoami()).await.unwrap(), "bob");
    // The third one changes after its element has come.
    client.send(commands::rpush("list", ["element"])).await.unwrap();
    assert!(one.join_next().await.unwrap().unwrap().unwrap().is_some());
    wait_until_async("all have changed", PATIENCE, async || users(&server) == ["bob"; 3]).await;
    assert_eq!(client.stats().logins.changed, 3);
    assert_eq!((client.stats().exclusive.opened, client.status().borrow().generation), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn login_changes_between_two_pipelines() {
    let server = server();
    let login = RotatingLogin::new(ada("first"));
    let client = Client::connect(options(server.port()).credentials(login.clone())).await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let client = client.clone();
        tasks.spawn(async move {
            let mut seen = [false; 2];
            while seen != [true; 2] {
                let mut pipeline = Pipeline::<Vec<String>>::vector();
                (0..50).for_each(|_| pipeline.push(whoami()));
                let names: Vec<_> = client.pipeline(pipeline).await.unwrap().into_iter().map(Result::unwrap).collect();
                assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
                seen[usize::from(names[0] == "bob")] = true;
            }
        });
    }
    let mut turn = 0;
    while !tasks.is_empty() {
        turn += 1;
        login.set(if turn % 2 == 0 { ada("first") } else { Login::new("third").user("bob") });
        wait_until_async("it is sent", PATIENCE, async || client.stats().logins.changed >= turn).await;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap();
        }
    }
}

#[tokio::test]
async fn permission_of_transactions_is_checked_after_a_change_of_the_login() {
    let server = RedisServer::options()
        .user("ada", format!("on >first {ALLOWED}"))
        .user("bob", format!("on >third {ALLOWED} -multi"))
        .start();
    let login = RotatingLogin::new(ada("first"));
    let client = Client::connect(options(server.port()).credentials(login.clone())).await.unwrap();
    let transaction = || Transaction::new().then(commands::incr("n"));
    assert_eq!(client.transaction(transaction()).await.unwrap().0.unwrap(), 1);
    login.set(Login::new("third").user("bob"));
    wait_until_async("the login has changed", PATIENCE, async || client.stats().logins.changed == 1).await;
    let error = client.transaction(transaction()).await.unwrap_err();
    assert!(matches!(error, TransactionError::Request(Error::Server(_))), "{error:?}");
    assert_eq!(server.cli(["GET", "n"]), "1", "nothing was executed");
}

#[tokio::test]
async fn subscribed_connection_changes_its_user() {
    let server = server();
    let login = RotatingLogin::new(ada("first"));
    let client = Client::connect(options(server.port()).name("rotating").credentials(login.clone())).await.unwrap();
    let mut news = client.subscribe(["news"]).await.unwrap();
    assert_eq!(users(&server), ["ada"; 2]);

    login.set(Login::new("third").user("bob"));
    wait_until_async("both have changed", PATIENCE, async || users(&server) == ["bob"; 2]).await;
    login.set(ada("wrong"));
    wait_until_async("both are refused", PATIENCE, async || client.stats().logins.refused == 2).await;
    assert_eq!(client.stats().logins.changed, 2);

    // Subscriptions, messages and the order of replies are not affected.
    let mut weather = client.subscribe(["weather"]).await.unwrap();
    server.cli(["PUBLISH", "news", "high tide"]);
    server.cli(["PUBLISH", "weather", "fog"]);
    for (subscription, expected) in [(&mut news, "high tide"), (&mut weather, "fog")] {
        let Some(Ok(Event::Message(message))) = subscription.next().await else { panic!("expected {expected}") };
        assert_eq!(message.payload, expected);
    }
    assert_eq!(users(&server), ["bob"; 2]);
}

#[tokio::test]
async fn refused_login_leaves_the_connection_as_it_is() {
    let server = server();
    let login = RotatingLogin::new(ada("first"));
    let options = options(server.port()).credentials(login.clone()).while_down(WhileDown::Queue);
    let client = Client::connect(options).await.unwrap();
    login.set(ada("wrong"));
    wait_until_async("it is refused", PATIENCE, async || client.stats().logins.refused == 1).await;
    assert_eq!(client.send(whoami()).await.unwrap(), "ada");
    assert_eq!(client.status().borrow().generation, 1);

    // The next connection is refused until the login is right.
    let mut status = client.status();
    server.cli(["CLIENT", "KILL", "USER", "ada"]);
    status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    login.set(ada("second"));
    assert_eq!(client.send(whoami()).await.unwrap(), "ada");
}

/// A provider that panics, hangs and fails after it has announced a change.
struct Unreliable {
    calls: AtomicUsize,
    changed: watch::Sender<()>,
}

impl Credentials for Unreliable {
    fn login(&self) -> LoginFuture<'_> {
        let call = self.calls.fetch_add(1, SeqCst);
        assert!(call != 1, "the second call panics");
        Box::pin(async move {
            match call {
                0 => Ok(ada("first")),
                2 => std::future::pending().await,
                3 => Err(Arc::new(std::io::Error::other("no login")) as _),
                _ => Ok(Login::new("third").user("bob")),
            }
        })
    }

    fn changes(&self) -> Option<watch::Receiver<()>> {
        Some(self.changed.subscribe())
    }
}

#[tokio::test]
async fn provider_that_fails_after_a_change_is_asked_again() {
    let server = server();
    let provider = Arc::new(Unreliable { calls: AtomicUsize::new(0), changed: watch::Sender::new(()) });
    let options: Options = options(server.port()).connect_timeout(Duration::from_secs(1));
    let client = Client::connect(options.credentials(Arc::clone(&provider))).await.unwrap();
    provider.changed.send_replace(());
    wait_until_async("it has failed", PATIENCE, async || client.stats().logins.provider_failures > 0).await;
    assert!(["ada", "bob"].contains(&&*client.send(whoami()).await.unwrap()));
    wait_until_async("it is changed", PATIENCE, async || client.stats().logins.changed == 1).await;
    assert_eq!(client.send(whoami()).await.unwrap(), "bob");
    assert_eq!((client.stats().logins.provider_failures, client.status().borrow().generation), (3, 1));
}
