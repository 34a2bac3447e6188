//! Commands that cannot be sent over a shared connection.

use tidewire_redis::sharing::Hazard;
use tidewire_redis::{
    Client, Command, CommandError, Error, Ignore, Pipeline, RequestOutcome, Transaction, TransactionError, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};

use crate::servers::options;

fn command(words: &str) -> Command {
    let mut words = words.split(' ');
    Command::new(words.next().unwrap()).args(words)
}

/// Returns the hazard of a rejected command.
fn harm(error: &Error) -> Hazard {
    match error {
        Error::Command(CommandError::NotShareable(refused)) => refused.hazard,
        other => panic!("{other:?}"),
    }
}

/// Commands that are rejected wherever they are sent, with typical arguments, and their hazards.
const HARMFUL: [(Hazard, &[&str]); 2] = [
    (
        Hazard::ReplyOrder,
        &[
            "SUBSCRIBE a b",
            "PSUBSCRIBE a*",
            "SSUBSCRIBE a",
            "UNSUBSCRIBE",
            "PUNSUBSCRIBE",
            "SUNSUBSCRIBE",
            "MONITOR",
            "SYNC",
            "PSYNC ? -1",
            "REPLCONF ACK 1",
            "CLIENT REPLY SKIP",
            "client reply off",
        ],
    ),
    (
        Hazard::ConnectionState,
        &[
            "SELECT 1",
            "select 1",
            "AUTH password",
            "HELLO 2",
            "RESET",
            "QUIT",
            "MULTI",
            "EXEC",
            "DISCARD",
            "WATCH k",
            "UNWATCH",
            "READONLY",
            "READWRITE",
            "ASKING",
            "CLIENT SETNAME other",
            "CLIENT TRACKING ON",
            "CLIENT CACHING YES",
            "CLIENT NO-EVICT ON",
            "CLIENT NO-TOUCH ON",
            "CLIENT CAPA redirect",
            "CLIENT IMPORT-SOURCE ON",
        ],
    ),
];

/// Blocking commands, which are rejected within a pipeline.
const BLOCKING: [&str; 11] = [
    "BLPOP none 0",
    "BRPOP none 0",
    "BLMPOP 0 1 none LEFT",
    "BLMOVE none to LEFT RIGHT 0",
    "BRPOPLPUSH none to 0",
    "BZPOPMIN none 0",
    "BZPOPMAX none 0",
    "BZMPOP 0 1 none MIN",
    "XREAD BLOCK 0 STREAMS none $",
    "XREAD COUNT 1 BLOCK 0 STREAMS none $",
    "XREADGROUP GROUP g c BLOCK 0 STREAMS none >",
];

#[tokio::test]
async fn rejected_commands_do_not_affect_other_tasks() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut number = 0;
    for (expected, all) in HARMFUL {
        for words in all {
            let refused = command(words).returning::<Ignore>();
            let pipeline = Pipeline::new().then(commands::incr("n")).then(refused.clone());
            let (before, alone, among, after) = tokio::join!(
                client.send(commands::echo(number)),
                client.send(refused),
                client.pipeline(pipeline),
                client.send(commands::echo(number + 1)),
            );
            for error in [alone.unwrap_err(), among.unwrap_err()] {
                assert_eq!((harm(&error), error.outcome()), (expected, Some(RequestOutcome::NeverSent)), "{words}");
                assert!(!error.is_retryable());
            }
            assert_eq!((before.unwrap(), after.unwrap()), (number.to_string().into(), (number + 1).to_string().into()));
            number += 2;
        }
    }
    // Nothing but the echoes was sent, not even the harmless commands of the pipelines.
    wait_until_async("all are counted", PATIENCE, async || client.stats().replies >= number).await;
    assert_eq!((client.stats().requests, client.status().borrow().generation), (number, 1));
    assert!(!client.send(commands::exists("n")).await.unwrap());
}

#[tokio::test]
async fn blocking_commands_are_rejected_in_pipelines_and_transactions() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for words in BLOCKING.into_iter().chain(["WAIT 1 0", "WAITAOF 0 1 0"]) {
        let blocking = || command(words).returning::<Ignore>();
        let pipeline = Pipeline::new().then(commands::incr("n")).then(blocking()).then(commands::incr("n"));
        let error = client.pipeline(pipeline).await.unwrap_err();
        assert_eq!((harm(&error), error.outcome()), (Hazard::Blocking, Some(RequestOutcome::NeverSent)), "{words}");
        let transaction = Transaction::new().then(commands::incr("n")).then(blocking());
        let TransactionError::Request(error) = client.transaction(transaction).await.unwrap_err() else {
            panic!("{words}")
        };
        assert_eq!((harm(&error), error.outcome()), (Hazard::Blocking, Some(RequestOutcome::NeverSent)), "{words}");
    }
    for words in ["WAIT 1 0", "WAITAOF 0 1 0"] {
        let error = client.send(command(words).returning::<Ignore>()).await.unwrap_err();
        assert_eq!(harm(&error), Hazard::Blocking, "{words}");
    }
    assert!(!client.exists("n").await.unwrap());
    assert_eq!(client.stats().exclusive.opened, 0);
}

/// Other commands of servers that have one immediate reply and do not change the connection, with their subcommands.
const HARMLESS: [&str; 17] = [
    "ping",
    "echo",
    "publish",
    "spublish",
    "pubsub",
    "command",
    "client|id",
    "client|info",
    "client|list",
    "client|help",
    "client|getname",
    "client|getredir",
    "client|trackinginfo",
    // About other connections.
    "client|kill",
    "client|pause",
    "client|unpause",
    "client|unblock",
];

#[test]
fn all_hazardous_commands_of_a_real_server_are_rejected() {
    let server = RedisServer::start();
    for category in ["blocking", "pubsub", "connection", "transaction"] {
        for listed in server.cli(["ACL", "CAT", category]).split_whitespace() {
            let mut command = command(&listed.replace('|', " "));
            if category == "blocking" && listed.starts_with("xread") {
                command = command.arg("BLOCK").arg(0);
            }
            let parent = listed.split('|').next().unwrap();
            let is_harmless = HARMLESS.contains(&listed) || HARMLESS.contains(&parent);
            assert_eq!(command.check().is_ok(), is_harmless, "{listed}");
        }
    }
}
