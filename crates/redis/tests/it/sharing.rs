//! Commands that cannot be sent over a shared connection.

use tidewire_redis::sharing::Hazard;
use tidewire_redis::{
    Client, Command, CommandError, Error, FromValue, Ignore, Pipeline, RequestOutcome, Transaction, TransactionError,
    Value, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer, wait_until_async};

use crate::servers::options;

fn command(words: &str) -> Command {
    let mut words = words.split(' ');
    Command::new(words.next().unwrap()).args(words)
}

/// Returns the hazard of a rejected command.
fn hazard(error: &Error) -> Hazard {
    match error {
        Error::Command(CommandError::NotShareable(refused)) => refused.hazard,
        other => panic!("{other:?}"),
    }
}

/// All commands that cannot be shared, with typical arguments, by hazard.
const HAZARDOUS: [(Hazard, &[&str]); 3] = [
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
            "SCRIPT DEBUG SYNC",
            "CLUSTER SYNCSLOTS FINISH",
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
    (
        Hazard::Blocking,
        &[
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
            "WAIT 1 0",
            "WAITAOF 0 1 0",
        ],
    ),
];

#[tokio::test]
async fn rejected_commands_do_not_affect_other_tasks() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let mut number = 0;
    for (expected, all) in &HAZARDOUS[..2] {
        for words in *all {
            let refused = command(words).returning::<Ignore>();
            let pipeline = Pipeline::new().then(commands::incr("n")).then(refused.clone());
            let (before, alone, among, after) = tokio::join!(
                client.send(commands::echo(number)),
                client.send(refused),
                client.pipeline(pipeline),
                client.send(commands::echo(number + 1)),
            );
            for error in [alone.unwrap_err(), among.unwrap_err()] {
                assert_eq!((hazard(&error), error.outcome()), (*expected, Some(RequestOutcome::NeverSent)), "{words}");
                assert!(!error.is_retryable());
            }
            assert_eq!((before.unwrap(), after.unwrap()), (number.to_string().into(), (number + 1).to_string().into()));
            number += 2;
        }
    }
    // Only the echoes were sent, and none of the commands in the pipelines.
    wait_until_async("all are counted", PATIENCE, async || client.stats().replies >= number).await;
    assert_eq!((client.stats().requests, client.status().borrow().generation), (number, 1));
    assert!(!client.send(commands::exists("n")).await.unwrap());
}

#[tokio::test]
async fn blocking_commands_are_rejected_in_pipelines_and_transactions() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    for words in HAZARDOUS[2].1 {
        let blocking = || command(words).returning::<Ignore>();
        let pipeline = Pipeline::new().then(commands::incr("n")).then(blocking()).then(commands::incr("n"));
        let error = client.pipeline(pipeline).await.unwrap_err();
        assert_eq!((hazard(&error), error.outcome()), (Hazard::Blocking, Some(RequestOutcome::NeverSent)), "{words}");
        let transaction = Transaction::new().then(commands::incr("n")).then(blocking());
        let TransactionError::Request(error) = client.transaction(transaction).await.unwrap_err() else {
            panic!("{words}")
        };
        assert_eq!((hazard(&error), error.outcome()), (Hazard::Blocking, Some(RequestOutcome::NeverSent)), "{words}");
    }
    for words in ["WAIT 1 0", "WAITAOF 0 1 0"] {
        let error = client.send(command(words).returning::<Ignore>()).await.unwrap_err();
        assert_eq!(hazard(&error), Hazard::Blocking, "{words}");
    }
    assert!(!client.exists("n").await.unwrap());
    assert_eq!(client.stats().exclusive.opened, 0);
}

/// The ACL categories of commands that may have a hazard.
const SUSPICIOUS: [&str; 5] = ["@admin", "@blocking", "@connection", "@pubsub", "@transaction"];

/// Other suspicious commands, and those that scripts cannot call. Each has one immediate reply and does not change the connection. A
/// name without a subcommand stands for all its subcommands that are not in [`HAZARDOUS`].
const HARMLESS: [&str; 45] = [
    "command",
    "echo",
    "ping",
    "publish",
    "pubsub",
    "spublish",
    "client|getname",
    "client|getredir",
    "client|help",
    "client|id",
    "client|info",
    "client|list",
    "client|setinfo",
    "client|trackinginfo",
    // About other connections.
    "client|kill",
    "client|pause",
    "client|unblock",
    "client|unpause",
    // About the whole server.
    "acl",
    "bgrewriteaof",
    "bgsave",
    "cluster",
    "commandlog",
    "config",
    "debug",
    "failover",
    "lastsave",
    "latency",
    "module",
    "pfdebug",
    "pfselftest",
    "replicaof",
    "role",
    "save",
    "shutdown",
    "slaveof",
    "slowlog",
    // The server runs only commands in scripts that do not affect the connection.
    "eval",
    "eval_ro",
    "evalsha",
    "evalsha_ro",
    "fcall",
    "fcall_ro",
    "function",
    "script",
];

/// Returns the names of all commands in a reply to `COMMAND`, with their flags and ACL categories. A command with subcommands is
/// replaced by them.
fn listed(reply: &Value) -> Vec<(String, Vec<String>)> {
    let mut all = Vec::new();
    for command in Vec::<Vec<Value>>::from_value(reply.clone()).unwrap() {
        let subcommands = listed(&command[9]);
        if subcommands.is_empty() {
            let texts = |index: usize| Vec::<String>::from_value(command[index].clone()).unwrap();
            all.push((String::from_value(command[0].clone()).unwrap(), [texts(2), texts(6)].concat()));
        }
        all.extend(subcommands);
    }
    all
}

#[tokio::test]
async fn all_hazardous_commands_of_a_real_server_are_found() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    let all = listed(&client.send(Command::new("COMMAND").returning()).await.unwrap());
    assert!(all.len() > 300, "{all:?}");
    for (name, marks) in all {
        let words = name.replace('|', " ");
        let is_hazardous = HAZARDOUS.iter().flat_map(|(_, commands)| *commands).any(|command| {
            command.get(..words.len()).is_some_and(|start| start.eq_ignore_ascii_case(&words))
                && matches!(command.as_bytes().get(words.len()), None | Some(b' '))
        });
        let is_suspicious = marks.iter().any(|mark| mark == "noscript" || SUSPICIOUS.contains(&&**mark));
        let parent = name.split('|').next().unwrap();
        let is_harmless = HARMLESS.contains(&&*name) || HARMLESS.contains(&parent);
        assert!(
            is_hazardous || is_harmless || !is_suspicious,
            "{name} {marks:?}: add it to `sharing.rs`, or to HARMLESS if it has one immediate reply and does not change \
             the connection"
        );
        // Only with this option.
        let option: &[&str] = if matches!(&*name, "xread" | "xreadgroup") { &["BLOCK", "0"] } else { &[] };
        assert_eq!(command(&words).args(option).check().is_err(), is_hazardous, "{name}");
    }
}
