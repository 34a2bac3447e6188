//! Commands that cannot be sent over a shared connection.
//!
//! Replies are matched to requests by their order, and all tasks use one connection. A command without exactly one reply would
//! shift the replies of other tasks, a command that changes the state of the connection would change it for all tasks until the
//! next reconnect, and a blocking command would delay all of them. They are found by name. Some are sent over another connection; the
//! others are rejected, with [`CommandError::NotShareable`](crate::CommandError::NotShareable), before a byte of them is written.
//!
//! # Blocking commands
//!
//! [`Client::send`](crate::Client::send) sends `BLPOP`, `XREAD` with `BLOCK` and the like over an exclusive connection. `WAIT` and
//! `WAITAOF` can end a [`Pipeline`](crate::Pipeline), which is then sent over an exclusive connection. Anywhere else in a pipeline or
//! transaction they are rejected.
//!
//! # Similar commands
//!
//! Related commands that do none of this are shared: `CLIENT` when it reads (`ID`, `INFO`, `LIST`, `GETNAME`, `GETREDIR`,
//! `TRACKINGINFO`) or concerns other connections (`KILL`, `PAUSE`, `UNPAUSE`, `UNBLOCK`), and `CLIENT SETINFO`, which only sets a
//! label; `PUBLISH` and `PUBSUB`; commands that keep the whole server busy, for which a separate connection would be no better
//! (`SAVE`, `MIGRATE`, `DEBUG SLEEP`); and `SHUTDOWN`, after which there is nothing to share. The server itself prevents scripts
//! from doing any of it. A renamed command (`rename-command`) is not recognized.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::time::Duration;

/// A command that cannot be sent over a shared connection.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotShareable {
    /// The name of the command, with the subcommand or option that is rejected: `CLIENT TRACKING`, `XREAD BLOCK`.
    pub name: &'static str,
    /// What it would do to other tasks.
    pub hazard: Hazard,
    /// What to do instead.
    pub instead: &'static str,
    rule: Rule,
}

/// How the client handles a command that cannot be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// It is rejected.
    Reject,
    /// It is sent over an exclusive connection, alone. Where its timeout is.
    Exclusive(Timeout),
    /// It is sent over an exclusive connection, at the end of a pipeline. Its timeout is the last argument, in milliseconds.
    PipelineEnd,
}

/// Where a blocking command has its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timeout {
    /// The first argument, in seconds.
    First,
    /// The last argument, in seconds.
    Last,
    /// After `BLOCK`, in milliseconds.
    Block,
}

/// The connection that a command is sent over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The connection that all tasks share.
    Shared,
    /// An exclusive one, for a command that may block for this time. [`Duration::MAX`] means that there is no limit.
    Exclusive(Duration),
}

/// What a command would do to other tasks on the same connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hazard {
    /// It does not have exactly one reply, so other tasks would get wrong replies.
    ReplyOrder,
    /// It changes the state of the connection for all tasks, until the next reconnect.
    ConnectionState,
    /// It may block, and delay the replies of all tasks.
    Blocking,
}

impl Display for NotShareable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be sent over a shared connection: {}; {}", self.name, self.hazard, self.instead)
    }
}

impl Display for Hazard {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReplyOrder => "it does not have exactly one reply, so other tasks would get wrong replies",
            Self::ConnectionState => "it would change the connection for all tasks, until the next reconnect",
            Self::Blocking => "it would delay the replies of all tasks",
        })
    }
}

/// The commands that cannot be shared. A second word is a subcommand, and for `XREAD` and `XREADGROUP` an option.
static UNSHAREABLE: [NotShareable; 45] = {
    use Hazard::{ConnectionState, ReplyOrder};
    [
        row("SUBSCRIBE", ReplyOrder, "use `Client::subscribe`"),
        row("PSUBSCRIBE", ReplyOrder, "use `Client::psubscribe`"),
        row("SSUBSCRIBE", ReplyOrder, "use `Client::ssubscribe`"),
        row("UNSUBSCRIBE", ReplyOrder, UNSUBSCRIBE),
        row("PUNSUBSCRIBE", ReplyOrder, UNSUBSCRIBE),
        row("SUNSUBSCRIBE", ReplyOrder, UNSUBSCRIBE),
        row("MONITOR", ReplyOrder, TOOL),
        row("SYNC", ReplyOrder, TOOL),
        row("PSYNC", ReplyOrder, TOOL),
        row("REPLCONF", ReplyOrder, TOOL),
        // Valkey's, between the nodes of a cluster.
        row("CLUSTER SYNCSLOTS", ReplyOrder, TOOL),
        // The debugger answers the next script.
        row("SCRIPT DEBUG", ReplyOrder, TOOL),
        row("CLIENT REPLY", ReplyOrder, "use `Ignore` as the type of a reply that does not matter"),
        row("SELECT", ConnectionState, "set `Options::database`, and use a client for each database"),
        row("AUTH", ConnectionState, "set `Options::login` or `Options::credentials`"),
        row("HELLO", ConnectionState, "the client sends it when it connects, as `Options` says"),
        row("RESET", ConnectionState, "use another client with other `Options`"),
        row("QUIT", ConnectionState, "use `Client::close`"),
        row("MULTI", ConnectionState, TRANSACTION),
        row("EXEC", ConnectionState, TRANSACTION),
        row("DISCARD", ConnectionState, "use a `Transaction`, which is sent as a whole or not at all"),
        row("WATCH", ConnectionState, "use `Client::watch`"),
        row("UNWATCH", ConnectionState, "use `Client::watch`"),
        row("READONLY", ConnectionState, CLUSTER),
        row("READWRITE", ConnectionState, CLUSTER),
        row("ASKING", ConnectionState, CLUSTER),
        row("CLIENT SETNAME", ConnectionState, "set `Options::name`"),
        row("CLIENT TRACKING", ConnectionState, CACHE),
        row("CLIENT CACHING", ConnectionState, CACHE),
        row("CLIENT NO-EVICT", ConnectionState, "set `Options::no_evict`"),
        row("CLIENT NO-TOUCH", ConnectionState, "set `Options::no_touch`"),
        // These two are Valkey's.
        row("CLIENT CAPA", ConnectionState, "this client has no capability that a server needs to know"),
        row("CLIENT IMPORT-SOURCE", ConnectionState, TOOL),
        blocking("BLPOP", Timeout::Last),
        blocking("BRPOP", Timeout::Last),
        blocking("BLMPOP", Timeout::First),
        blocking("BLMOVE", Timeout::Last),
        blocking("BRPOPLPUSH", Timeout::Last),
        blocking("BZPOPMIN", Timeout::Last),
        blocking("BZPOPMAX", Timeout::Last),
        blocking("BZMPOP", Timeout::First),
        blocking("XREAD BLOCK", Timeout::Block),
        blocking("XREADGROUP BLOCK", Timeout::Block),
        // Even if they do not block, they report on the last write of the connection, which may be of another task.
        wait("WAIT"),
        wait("WAITAOF"),
    ]
};

const UNSUBSCRIBE: &str = "drop the `Subscription`";
const TOOL: &str = "use a tool such as redis-cli";
const TRANSACTION: &str = "use a `Transaction`";
const CLUSTER: &str = "it is for Redis Cluster, which this client does not support";
const CACHE: &str = "set `Options::cache`, and read with `Client::cached`";

const fn row(name: &'static str, hazard: Hazard, instead: &'static str) -> NotShareable {
    NotShareable { name, hazard, instead, rule: Rule::Reject }
}

const fn blocking(name: &'static str, timeout: Timeout) -> NotShareable {
    let instead = "send it alone with `Client::send`, which gives it an exclusive connection";
    NotShareable { name, hazard: Hazard::Blocking, instead, rule: Rule::Exclusive(timeout) }
}

const fn wait(name: &'static str) -> NotShareable {
    let instead = "append it to a `Pipeline` of the writes that it is to wait for, as the last command";
    NotShareable { name, hazard: Hazard::Blocking, instead, rule: Rule::PipelineEnd }
}

/// For each pair of first letters, a bit set of the lengths of rejected names. It rules out nearly every other command.
static LENGTHS: [u16; 1 << 10] = {
    let mut lengths = [0; 1 << 10];
    let mut index = 0;
    while index < UNSHAREABLE.len() {
        let name = UNSHAREABLE[index].name.as_bytes();
        let mut len = 0;
        while len < name.len() && name[len] != b' ' {
            len += 1;
        }
        lengths[prefix(name[0], name[1])] |= 1 << len;
        index += 1;
    }
    lengths
};

/// Returns the index of a pair of letters, whatever their case.
const fn prefix(first: u8, second: u8) -> usize {
    (first as usize & 31) << 5 | (second as usize & 31)
}

/// Returns the connection for an encoded command, or why it is rejected.
pub(crate) fn route(command: &[u8]) -> Result<Route, &'static NotShareable> {
    match find_unshareable(command) {
        None => Ok(Route::Shared),
        Some(row) => match row.rule {
            Rule::Exclusive(timeout) => Ok(Route::Exclusive(block_time(command, timeout))),
            Rule::Reject | Rule::PipelineEnd => Err(row),
        },
    }
}

/// Returns for how long a command waits, if it is one that may end a pipeline.
pub(crate) fn final_wait(row: &NotShareable, command: &[u8]) -> Option<Duration> {
    (row.rule == Rule::PipelineEnd)
        .then(|| limited(Words::of(command).and_then(Iterator::last).and_then(parse).map(Duration::from_millis)))
}

/// Returns for how long a command may block.
fn block_time(command: &[u8], timeout: Timeout) -> Duration {
    let Some(mut words) = Words::of(command) else { return Duration::ZERO };
    words.next();
    let duration = match timeout {
        Timeout::First => words.next().and_then(seconds),
        Timeout::Last => words.last().and_then(seconds),
        Timeout::Block => option(words, "BLOCK").and_then(parse).map(Duration::from_millis),
    };
    limited(duration)
}

/// A timeout of zero means that there is no limit. To an invalid one the server replies with an error at once.
fn limited(timeout: Option<Duration>) -> Duration {
    match timeout {
        Some(Duration::ZERO) => Duration::MAX,
        Some(timeout) => timeout,
        None => Duration::ZERO,
    }
}

fn seconds(word: &[u8]) -> Option<Duration> {
    Duration::try_from_secs_f64(parse(word)?).ok()
}

fn parse<T: FromStr>(word: &[u8]) -> Option<T> {
    str::from_utf8(word).ok()?.parse().ok()
}

/// Returns the row of an encoded command that cannot be shared.
pub(crate) fn find_unshareable(command: &[u8]) -> Option<&'static NotShareable> {
    let name = match command {
        // Nearly all commands have fewer than ten arguments, and a name of fewer than ten letters.
        [_, _, b'\r', _, _, len, b'\r', _, rest @ ..] => rest.get(..digit(*len))?,
        _ => Words::of(command)?.next()?,
    };
    let ([first, second, ..], len @ ..16) = (name, name.len()) else { return None };
    if LENGTHS[prefix(*first, *second)] & 1 << len == 0 { None } else { find(Words::of(command)?) }
}

fn find(mut words: Words<'_>) -> Option<&'static NotShareable> {
    let name = words.next()?;
    let first = name.first()?.to_ascii_uppercase();
    UNSHAREABLE.iter().filter(|row| row.name.as_bytes()[0] == first).find(|row| match row.name.split_once(' ') {
        None => is(name, row.name),
        Some((command, "BLOCK")) => is(name, command) && option(words.clone(), "BLOCK").is_some(),
        Some((command, second)) => is(name, command) && words.clone().next().is_some_and(|word| is(word, second)),
    })
}

fn is(word: &[u8], expected: &str) -> bool {
    word.eq_ignore_ascii_case(expected.as_bytes())
}

/// Returns whether a command leaves what its reply has on the server: `XREAD`, and `XREADGROUP` without `NOACK`, whose entries are
/// pending.
pub(crate) fn leaves_entries(command: &[u8]) -> bool {
    let Some(mut words) = Words::of(command) else { return false };
    words.next().is_some_and(|name| is(name, "XREAD") || is(name, "XREADGROUP") && option(words, "NOACK").is_none())
}

/// Returns the word after an option of `XREAD` or `XREADGROUP`, if there is the option. The name of a stream or of a group is not one. It
/// is empty if it is missing.
fn option<'a>(mut arguments: Words<'a>, name: &str) -> Option<&'a [u8]> {
    while let Some(word) = arguments.next() {
        if is(word, name) {
            return Some(arguments.next().unwrap_or_default());
        }
        let values = match word {
            word if is(word, "STREAMS") => return None,
            word if is(word, "GROUP") => 2,
            word if is(word, "COUNT") || is(word, "BLOCK") => 1,
            _ => 0,
        };
        for _ in 0..values {
            arguments.next();
        }
    }
    None
}

/// The words of an encoded command.
#[derive(Clone)]
pub(crate) struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    pub(crate) fn of(command: &'a [u8]) -> Option<Self> {
        after_line(command).map(|(_, rest)| Self(rest))
    }

    /// Returns the encoded words that follow.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (digits, rest) = after_line(self.0)?;
        let len = digits.iter().fold(0, |len, byte| 10 * len + digit(*byte));
        let word = rest.get(..len)?;
        self.0 = rest.get(len + 2..)?;
        Some(word)
    }
}

fn digit(byte: u8) -> usize {
    (byte & 15).into()
}

/// Splits the input after its first line. The line is without its first byte.
fn after_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\r')?;
    Some((bytes.get(1..end)?, bytes.get(end + 2..)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Command, CommandError};

    fn command(words: &str) -> Command {
        let mut words = words.split(' ');
        Command::new(words.next().unwrap_or_default()).args(words)
    }

    #[track_caller]
    fn rejected(words: &str) -> Option<&'static str> {
        match command(words).check() {
            Ok(()) => None,
            Err(CommandError::NotShareable(row)) => Some(row.name),
            Err(other) => panic!("{words}: {other}"),
        }
    }

    #[test]
    fn all_unshareable_commands_are_found_in_any_case() {
        for row in &UNSHAREABLE {
            assert_eq!(rejected(row.name), Some(row.name));
            assert_eq!(rejected(&row.name.to_lowercase()), Some(row.name));
            assert_eq!(rejected(&format!("{} more than one", row.name)), Some(row.name));
            assert!(row.name.split(' ').all(|word| word.len() < 16), "{row:?}");
        }
        assert_eq!(rejected("sElEcT 3"), Some("SELECT"));
    }

    #[test]
    fn table_of_the_manual_has_the_same_commands() {
        let manual = include_str!("../../../docs/redis.md");
        for hazard in [Hazard::ReplyOrder, Hazard::ConnectionState, Hazard::Blocking] {
            let start = format!("| `{hazard:?}` |");
            let line = manual.lines().find(|line| line.starts_with(&start)).expect("a line of the table");
            let is_command = |text: &&str| text.chars().all(|c| c.is_ascii_uppercase() || " -".contains(c));
            let mut listed: Vec<_> = line.split('`').skip(1).step_by(2).filter(is_command).collect();
            let mut expected: Vec<_> =
                UNSHAREABLE.iter().filter(|row| row.hazard == hazard).map(|row| row.name).collect();
            listed.sort_unstable();
            expected.sort_unstable();
            assert_eq!(listed, expected);
        }
    }

    #[test]
    fn reads_of_streams_leave_their_entries() {
        for words in
            ["XREAD BLOCK 0 STREAMS s 0", "xreadgroup GROUP NOACK NOACK COUNT NOACK BLOCK NOACK STREAMS NOACK >"]
        {
            assert!(leaves_entries(command(words).as_bytes()), "{words}");
        }
        for words in ["XREADGROUP GROUP g c BLOCK 0 NOACK STREAMS s >", "BLPOP XREAD 0", "PING"] {
            assert!(!leaves_entries(command(words).as_bytes()), "{words}");
        }
    }

    #[test]
    fn similar_commands_are_accepted() {
        for words in [
            "GET k",
            "SET SELECT AUTH",
            "EVAL SELECT 0",
            "SELECTS",
            "SELEC",
            "S",
            "1ELECT",
            "CLIENT",
            "CLIENT ID",
            "CLIENT KILL TRACKING",
            "CLIENT TRACKINGINFO",
            "CLIENT SETINFO LIB-NAME x",
            "CONFIG REPLY",
            "PUBLISH c m",
            "PUBSUB CHANNELS",
            "LPOP BLPOP",
            "XREAD",
            "XREAD COUNT 1 STREAMS block BLOCK 0 0",
            "XREAD COUNT BLOCK STREAMS s 0",
            "XREADGROUP GROUP BLOCK BLOCK COUNT 1 NOACK STREAMS s >",
            "XREADGROUP GROUP streams BLOCK STREAMS s >",
            "ACOMMANDWITHALONGNAME",
        ] {
            assert_eq!(rejected(words), None, "{words}");
        }
        // A length whose bit would overflow.
        assert_eq!(rejected(&"s".repeat(64 + 6)), None);
    }

    #[test]
    fn options_are_found_at_any_position() {
        for words in ["XREAD BLOCK 0 STREAMS s 0", "xread count 5 block 10 streams s 0"] {
            assert_eq!(rejected(words), Some("XREAD BLOCK"), "{words}");
        }
        for words in ["XREADGROUP GROUP g c BLOCK 0 STREAMS s >", "XREADGROUP BLOCK 0 GROUP STREAMS c STREAMS s >"] {
            assert_eq!(rejected(words), Some("XREADGROUP BLOCK"), "{words}");
        }
        assert_eq!(rejected("XREADGROUP GROUP streams c NOACK BLOCK 0 STREAMS s >"), Some("XREADGROUP BLOCK"));
    }

    #[test]
    fn blocking_command_is_sent_over_an_exclusive_connection_with_its_own_timeout() {
        let seconds = Duration::from_secs_f64;
        for (words, block) in [
            ("BLPOP a b 1.5", seconds(1.5)),
            ("brpop a 0", Duration::MAX),
            ("BLMOVE a b LEFT RIGHT 3", seconds(3.0)),
            ("BRPOPLPUSH a b 3", seconds(3.0)),
            ("BZPOPMIN 7 2", seconds(2.0)),
            ("BLMPOP 0.25 1 a LEFT", seconds(0.25)),
            ("BZMPOP 0 1 a MIN", Duration::MAX),
            ("XREAD COUNT 1 BLOCK 1500 STREAMS s 0", seconds(1.5)),
            ("XREADGROUP GROUP g c BLOCK 0 STREAMS s >", Duration::MAX),
            // The server rejects these at once.
            ("BLPOP a never", seconds(0.0)),
            ("BLPOP a -1", seconds(0.0)),
            ("BLPOP a 1e300", seconds(0.0)),
            ("BLPOP", seconds(0.0)),
            ("XREAD BLOCK", seconds(0.0)),
        ] {
            assert_eq!(command(words).route(), Ok(Route::Exclusive(block)), "{words}");
        }
        assert_eq!(command("XREAD STREAMS s 0").route(), Ok(Route::Shared));
    }

    #[test]
    fn errors_say_what_to_do_instead() {
        let error = |words| command(words).check().unwrap_err().to_string();
        assert_eq!(
            error("select 1"),
            "SELECT cannot be sent over a shared connection: it would change the connection for all tasks, until the next \
             reconnect; set `Options::database`, and use a client for each database"
        );
        assert_eq!(
            error("BLPOP l 0"),
            "BLPOP cannot be sent over a shared connection: it would delay the replies of all tasks; send it alone with \
             `Client::send`, which gives it an exclusive connection"
        );
    }

    #[test]
    fn invalid_name_is_reported_first() {
        assert!(matches!(Command::new("SELECT 1").check(), Err(CommandError::Name { .. })));
    }
}
