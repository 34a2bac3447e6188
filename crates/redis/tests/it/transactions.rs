//! Transactions, with and without watched keys.

use std::time::Duration;

use tidewire_redis::{
    Client, Command, ConnectionState, Error, ErrorCode, Login, RequestOutcome, Transaction, TransactionError, Value,
    WatchOptions, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};
use tokio::task::JoinSet;

use crate::servers::{Scripted, greeting, old_and_new, options};

#[tokio::test]
async fn each_command_has_its_own_result() {
    for (server, _) in old_and_new() {
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
    let TransactionError::Aborted { refused } = &error else { panic!("{error:?}") };
    assert_eq!(refused.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1, 2]);
    assert!(!error.is_retryable());
    assert!(error.to_string().contains("command 2 failed with ERR unknown command"), "{error}");
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
        .watch(["n"], options, async |watched| {
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
    let client = Client::start(options(server.port()));
    let mut attempts = 0;
    let error = client
        .watch(["n"], WatchOptions::default().max_attempts(3), async |watched| {
            attempts += 1;
            watched.send(commands::get("n")).await?;
            // Over another connection, after `WATCH`.
            client.incr("n").await?;
            Ok::<_, TransactionError>(Transaction::new().then(commands::set("n", 100)))
        })
        .await
        .unwrap_err();
    assert!(matches!(error, TransactionError::Changed) && error.is_retryable(), "{error:?}");
    assert_eq!((attempts, client.get::<u64>("n").await.unwrap()), (3, 3));
}

#[tokio::test]
async fn next_caller_finds_no_watched_keys() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()).max_exclusive(1));
    // The body fails.
    let failed = client
        .watch(["a"], WatchOptions::default(), async |_| Err::<Transaction<()>, _>(TransactionError::Changed))
        .await;
    assert!(matches!(failed, Err(TransactionError::Changed)));
    assert_eq!(client.stats().exclusive.open, 1, "the connection stays open");
    // An empty transaction.
    client
        .watch(["a"], WatchOptions::default(), async |_| Ok::<_, TransactionError>(Transaction::new()))
        .await
        .unwrap();
    // The future is dropped in the body.
    let stuck = client.watch(["a"], WatchOptions::default(), async |watched| {
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
    client.set("a", "changed").await.unwrap();
    let (set,) = client
        .watch(["b"], WatchOptions::default().max_attempts(1), async |watched| {
            watched.send(commands::get("b")).await?;
            client.set("a", "changed again").await?;
            Ok::<_, TransactionError>(Transaction::new().then(commands::set("b", "1")))
        })
        .await
        .unwrap();
    set.unwrap();
}

#[tokio::test]
async fn watch_over_a_lost_connection_is_an_error() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let error = client
        .watch(["n"], WatchOptions::default(), async |_| {
            server.cli(["CLIENT", "KILL", "TYPE", "normal"]);
            client.status().wait_for(|status| status.generation == 2).await.unwrap();
            Ok::<_, TransactionError>(Transaction::new().then(commands::incr("n")))
        })
        .await
        .unwrap_err();
    let TransactionError::Request(error) = error else { panic!("{error:?}") };
    assert!(matches!(error, Error::Lost { .. } | Error::Closed { .. }), "{error:?}");
    assert_eq!(client.status().borrow().state, ConnectionState::Open);
    increment(&client, 1).await.unwrap();
}
