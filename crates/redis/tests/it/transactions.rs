//! Transactions, with and without watched keys.

use std::time::Duration;

use tidewire_redis::{
    Client, Command, ConnectionState, Error, ErrorCode, Login, RequestOutcome, Transaction, TransactionError, Value,
    WatchOptions, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};
use tokio::task::JoinSet;

use crate::servers::{Scripted, greeting, options, resp2_and_resp3};

#[tokio::test]
async fn each_command_has_its_own_result() {
    for (server, _) in resp2_and_resp3() {
        let client = Client::start(options(server.port()));
        let transaction = Transaction::new()
            .then(commands::set("text", "x"))
            .then(commands::incr("text"))
            .then(commands::get("text").returning::<String>());
        assert_eq!((transaction.len(), transaction.is_empty()), (3, false));
        let (set, wrong, get) = client.transaction(transaction).await.unwrap();
        set.unwrap();
        assert_eq!(wrong.unwrap_err().code(), Some(&ErrorCode::Err));
        assert_eq!(get.unwrap(), "x");
        let numbers: Transaction<Vec<_>> = (0..50).map(|_| commands::incr("n")).collect();
        let numbers = client.transaction(numbers).await.unwrap();
        assert_eq!(numbers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), (1..=50).collect::<Vec<_>>());
        let mut one_type = Transaction::vector();
        one_type.push(commands::incr("n"));
        one_type.push(Command::new("DECR").arg("n"));
        assert_eq!(one_type.check(), Ok(()));
        let values = client.transaction(one_type).await.unwrap();
        assert_eq!(values.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [51, 50]);
        client.transaction(Transaction::new()).await.unwrap();
    }
}

#[tokio::test]
async fn refused_command_aborts_the_whole() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let transaction = Transaction::new()
        .then(commands::incr("n"))
        .then(Command::new("NOSUCHCOMMAND").returning::<Value>())
        .then(Command::new("GET").returning::<Value>());
    let error = client.transaction(transaction).await.unwrap_err();
    let TransactionError::Aborted { refused, .. } = &error else { panic!("{error:?}") };
    assert_eq!(refused.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 2]);
    assert!(!error.is_retryable());
    assert!(error.to_string().contains("it refused command 2 with ERR unknown command"), "{error}");
    assert!(!client.exists("n").await.unwrap());
}

#[tokio::test]
async fn command_that_cannot_be_sent_is_an_error_before_anything_is_sent() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for words in ["MULTI", "EXEC", "WATCH k", "SUBSCRIBE c", "BLPOP k 0", "WAIT 1 0", "SELECT 1"] {
        let (name, arguments) = words.split_once(' ').unwrap_or((words, ""));
        let command = Command::new(name).args(arguments.split_terminator(' ')).returning::<Value>();
        let error = client.transaction(Transaction::new().then(commands::incr("n")).then(command)).await.unwrap_err();
        let TransactionError::Request(error) = error else { panic!("{words}: {error:?}") };
        assert!(matches!(&error, Error::Command(_)), "{words}: {error:?}");
        assert_eq!(error.outcome(), Some(RequestOutcome::NeverSent));
    }
    assert_eq!(client.stats().requests, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_comes_between_the_commands_of_a_transaction() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut tasks = JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        tasks.spawn(async move {
            for _ in 0..50 {
                let pair = Transaction::new().then(commands::incr("n")).then(commands::decr("n"));
                let (up, down) = client.transaction(pair).await.unwrap();
                assert_eq!((up.unwrap(), down.unwrap()), (1, 0));
                // Requests of other tasks are in the same batches.
                assert_eq!(client.get::<Option<i64>>("n").await.unwrap().unwrap_or(0), 0);
            }
        });
    }
    tasks.join_all().await;
}

#[tokio::test]
async fn user_without_multi_executes_nothing() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all -multi").start();
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    let error = client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap_err();
    let TransactionError::Request(Error::Server(error)) = error else { panic!("{error:?}") };
    assert_eq!(error.code, ErrorCode::NoPermission);
    assert!(!client.exists("n").await.unwrap());
    // The permission is checked again with the next transaction.
    server.cli(["ACL", "SETUSER", "app", "+multi"]);
    let (number,) = client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap();
    assert_eq!(number.unwrap(), 1);
    // Taken away later, the commands are executed one by one, and the error says so.
    server.cli(["ACL", "SETUSER", "app", "-multi"]);
    let error = client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap_err();
    assert!(matches!(error, TransactionError::NotAtomic(_)), "{error:?}");
}

#[tokio::test]
async fn user_without_exec_does_not_leave_the_connection_in_a_transaction() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all -exec").start();
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap_err();
    client.set("a", "1").await.unwrap();
    assert_eq!(client.get::<String>("a").await.unwrap(), "1");
}

#[tokio::test]
async fn transaction_without_a_reply_may_have_been_executed() {
    // It completes the check, and then closes the connection at `EXEC`.
    let server = Scripted::start(|mut stream, _| async move {
        let executed = std::sync::Mutex::new(0);
        crate::servers::answer(&mut stream, |words| match &*words[0] {
            "EXEC" => {
                let mut executed = executed.lock().unwrap();
                *executed += 1;
                (*executed == 1).then(|| "*0\r\n".to_owned())
            }
            "MULTI" => Some("+OK\r\n".to_owned()),
            "INCR" => Some("+QUEUED\r\n".to_owned()),
            _ => greeting(words),
        })
        .await;
    })
    .await;
    let client = Client::start(options(server.port()));
    let error = client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap_err();
    let TransactionError::Request(error) = error else { panic!("{error:?}") };
    assert_eq!(error.outcome(), Some(RequestOutcome::MaybeExecuted));
}

/// Adds one to a number by reading and writing it.
async fn increment(client: &Client, attempts: u32) -> Result<(), TransactionError> {
    let options = WatchOptions::default().max_attempts(attempts);
    let (set,) = client
        .watch(["n"], options, |watched| async move {
            let number: Option<u64> = watched.send(commands::get("n").returning()).await?;
            Ok::<_, TransactionError>(Transaction::new().then(commands::set("n", number.unwrap_or(0) + 1)))
        })
        .await?;
    Ok(set?)
}

#[tokio::test(flavor = "multi_thread")]
async fn watched_transactions_lose_no_update() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).max_exclusive(8));
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let client = client.clone();
        tasks.spawn(async move {
            for _ in 0..20 {
                increment(&client, u32::MAX).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(client.get::<u64>("n").await.unwrap(), 160);
    assert!(client.stats().exclusive.opened <= 8);
}

#[tokio::test]
async fn changed_key_is_an_error_after_the_last_attempt() {
    let server = RedisServer::start();
    let client = &Client::start(options(server.port()));
    let mut attempts = 0;
    let error = client
        .watch(["n"], WatchOptions::default().max_attempts(3), |watched| {
            attempts += 1;
            async move {
                watched.send(commands::get("n")).await?;
                // Over another connection, after `WATCH`.
                client.incr("n").await?;
                Ok::<_, TransactionError>(Transaction::new().then(commands::set("n", 100)))
            }
        })
        .await
        .unwrap_err();
    assert!(matches!(error, TransactionError::Changed) && error.is_retryable(), "{error:?}");
    assert_eq!((attempts, client.get::<u64>("n").await.unwrap()), (3, 3));
}

/// Watches `b`, changes `a`, and writes `b`. It fails if the connection still watches `a`.
async fn write_b_beside_a_change_of_a(client: &Client) {
    let (set,) = client
        .watch(["b"], WatchOptions::default().max_attempts(1), |watched| async move {
            watched.send(commands::get("b")).await?;
            client.incr("a").await?;
            Ok::<_, TransactionError>(Transaction::new().then(commands::set("b", "1")))
        })
        .await
        .expect("the connection watches `b` only");
    set.unwrap();
}

#[tokio::test]
async fn next_caller_finds_no_watched_keys() {
    let server = RedisServer::start();
    let client = &Client::start(options(server.port()).max_exclusive(1));
    let failed = client
        .watch(["a"], WatchOptions::default(), |_| async { Err::<Transaction<()>, _>(TransactionError::Changed) })
        .await;
    assert!(matches!(failed, Err(TransactionError::Changed)));
    write_b_beside_a_change_of_a(client).await;
    client
        .watch(["a"], WatchOptions::default(), |_| async { Ok::<_, TransactionError>(Transaction::new()) })
        .await
        .unwrap();
    write_b_beside_a_change_of_a(client).await;
    let invalid = Transaction::new().then(Command::new("SELECT").arg(1).returning::<Value>());
    client
        .watch(["a"], WatchOptions::default(), |_| async { Ok::<_, TransactionError>(invalid.clone()) })
        .await
        .unwrap_err();
    write_b_beside_a_change_of_a(client).await;
    assert_eq!(client.stats().exclusive.opened, 1, "one connection was used for all");

    // The future is dropped in the body.
    let stuck = client.watch(["a"], WatchOptions::default(), |watched| async move {
        watched.send(commands::get("a")).await?;
        std::future::pending::<()>().await;
        Ok::<_, TransactionError>(Transaction::new())
    });
    let mut stuck = Box::pin(stuck);
    wait_until_async("the connection is used", PATIENCE, async || {
        let _ = tokio::time::timeout(Duration::from_millis(1), &mut stuck).await;
        client.stats().exclusive.in_use == 1
    })
    .await;
    drop(stuck);
    write_b_beside_a_change_of_a(client).await;
}

#[tokio::test]
async fn connection_is_closed_if_unwatch_is_refused() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all -unwatch").start();
    let login = Login::new("secret").user("app");
    let client = &Client::start(options(server.port()).max_exclusive(1).login(login));
    client
        .watch(["a"], WatchOptions::default(), |_| async { Ok::<_, TransactionError>(Transaction::new()) })
        .await
        .unwrap();
    write_b_beside_a_change_of_a(client).await;
    assert_eq!(client.stats().exclusive.opened, 2);
}

#[tokio::test]
async fn user_without_multi_cannot_overwrite_a_changed_key() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all -multi").start();
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    let server = &server;
    let error = client
        .watch(["n"], WatchOptions::default(), |_| async move {
            server.cli(["SET", "n", "changed"]);
            Ok::<_, TransactionError>(Transaction::new().then(commands::set("n", "overwritten")))
        })
        .await
        .unwrap_err();
    assert!(matches!(error, TransactionError::Request(Error::Server(_))), "{error:?}");
    assert_eq!(server.cli(["GET", "n"]), "", "nothing was sent");
}

async fn withdraw(client: &Client, account: &str, amount: &i64) -> Result<(), TransactionError> {
    let (set,) = client
        .watch([account], WatchOptions::default(), |watched| async move {
            let balance: i64 = watched.send(commands::get(account).returning()).await?;
            Ok::<_, TransactionError>(Transaction::new().then(commands::set(account, balance - amount)))
        })
        .await?;
    Ok(set?)
}

#[tokio::test]
async fn watch_can_be_spawned_with_borrowed_values() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.set("account", 7).await.unwrap();
    let task = tokio::spawn({
        let client = client.clone();
        async move { withdraw(&client, "account", &3).await }
    });
    task.await.unwrap().unwrap();
    assert_eq!(client.get::<i64>("account").await.unwrap(), 4);
}

#[tokio::test]
async fn reason_of_an_abort_is_kept() {
    let server = RedisServer::options().user("app", "on >secret ~* +@all").start();
    let client = Client::start(options(server.port()).login(Login::new("secret").user("app")));
    let transaction = || Transaction::new().then(commands::incr("n"));
    client.transaction(transaction()).await.unwrap().0.unwrap();
    server.cli(["ACL", "SETUSER", "app", "-exec"]);
    let error = client.transaction(transaction()).await.unwrap_err();
    assert!(matches!(&error, TransactionError::Aborted { refused, .. } if refused.is_empty()), "{error:?}");
    assert!(error.to_string().contains("because of: NOPERM"), "{error}");
    assert!(!error.is_retryable());
    // A reason that is temporary.
    let checked = std::sync::atomic::AtomicBool::new(false);
    let server = Scripted::answering(move |words, _| match &*words[0] {
        "MULTI" => "+OK\r\n".to_owned(),
        "INCR" => "+QUEUED\r\n".to_owned(),
        "EXEC" if !checked.swap(true, std::sync::atomic::Ordering::SeqCst) => "*0\r\n".to_owned(),
        "EXEC" => "-EXECABORT Transaction discarded because of: MASTERDOWN Link with MASTER is down\r\n".to_owned(),
        _ => greeting(words).unwrap_or_default(),
    })
    .await;
    let client = Client::start(options(server.port()));
    let error = client.transaction(transaction()).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
}

#[tokio::test]
async fn timeout_over_an_exclusive_connection_is_counted() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.transaction(Transaction::new().then(commands::incr("n"))).await.unwrap().0.unwrap();
    let hurried = client.with_timeout(Duration::from_millis(300));
    let server = &server;
    let error = hurried
        .watch(["n"], WatchOptions::default(), |watched| async move {
            server.pause();
            watched.send(commands::get("n")).await?;
            Ok::<_, TransactionError>(Transaction::new())
        })
        .await
        .unwrap_err();
    server.resume();
    assert!(matches!(error, TransactionError::Request(Error::TimedOut { .. })), "{error:?}");
    let timeouts = client.stats().timeouts;
    assert!(timeouts.queued + timeouts.connecting + timeouts.waiting >= 1, "{timeouts:?}");
}

#[tokio::test]
async fn watch_over_a_lost_connection_is_an_error() {
    let server = &RedisServer::start();
    let client = &Client::start(options(server.port()));
    let error = client
        .watch(["n"], WatchOptions::default(), |_| async move {
            server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
            client.status().wait_for(|status| status.generation == 2).await.unwrap();
            Ok::<_, TransactionError>(Transaction::new().then(commands::incr("n")))
        })
        .await
        .unwrap_err();
    let TransactionError::Request(error) = error else { panic!("{error:?}") };
    assert!(matches!(error, Error::Lost { .. } | Error::Closed { .. }), "{error:?}");
    assert_eq!(client.status().borrow().state, ConnectionState::Open);
    increment(client, 1).await.unwrap();
}
