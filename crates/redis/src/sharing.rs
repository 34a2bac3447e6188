//! Commands that cannot be sent over a shared connection.
//!
//! Replies are matched to requests by their order, and all tasks use one connection. A command without exactly one reply would
//! shift the replies of other tasks, a command that changes the state of the connection would change it for all tasks until the
//! next reconnect, and a blocking command would delay all of them. They are rejected by name, with
//! [`CommandError::NotShareable`](crate::CommandError::NotShareable), before a byte of them is written.
//!
//! Related commands that do none of this are allowed: `CLIENT` when it reads (`ID`, `INFO`, `LIST`, `GETNAME`, `GETREDIR`,
//! `TRACKINGINFO`) or concerns other connections (`KILL`, `PAUSE`, `UNPAUSE`, `UNBLOCK`), and `CLIENT SETINFO`, which only sets a
//! label; `PUBLISH` and `PUBSUB`; commands that keep the whole server busy, for which a separate connection would be no better
//! (`SAVE`, `MIGRATE`, `DEBUG SLEEP`); and `SHUTDOWN`, after which there is nothing to share. The server itself prevents scripts
//! from doing any of it. A renamed command (`rename-command`) is not recognized.

use std::fmt::{self, Display, Formatter};

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

/// The rejected commands. A second word is a subcommand, and for `XREAD` and `XREADGROUP` an option.
static REJECTED: [NotShareable; 43] = {
    use Hazard::{Blocking, ConnectionState, ReplyOrder};
    [
        row("SUBSCRIBE", ReplyOrder, NOT_YET),
        row("PSUBSCRIBE", ReplyOrder, NOT_YET),
        row("SSUBSCRIBE", ReplyOrder, NOT_YET),
        row("UNSUBSCRIBE", ReplyOrder, NOT_YET),
        row("PUNSUBSCRIBE", ReplyOrder, NOT_YET),
        row("SUNSUBSCRIBE", ReplyOrder, NOT_YET),
        row("MONITOR", ReplyOrder, TOOL),
        row("SYNC", ReplyOrder, TOOL),
        row("PSYNC", ReplyOrder, TOOL),
        row("REPLCONF", ReplyOrder, TOOL),
        row("CLIENT REPLY", ReplyOrder, "use `Ignore` as the type of a reply that does not matter"),
        row("SELECT", ConnectionState, "set `Options::database`, and use a client for each database"),
        row("AUTH", ConnectionState, "set `Options::login` or `Options::credentials`"),
        row("HELLO", ConnectionState, "the client sends it when it connects, as `Options` says"),
        row("RESET", ConnectionState, "use another client with other `Options`"),
        row("QUIT", ConnectionState, "use `Client::close`"),
        row("MULTI", ConnectionState, TRANSACTION),
        row("EXEC", ConnectionState, TRANSACTION),
        row("DISCARD", ConnectionState, TRANSACTION),
        row("WATCH", ConnectionState, TRANSACTION),
        row("UNWATCH", ConnectionState, TRANSACTION),
        row("READONLY", ConnectionState, NOT_YET),
        row("READWRITE", ConnectionState, NOT_YET),
        row("ASKING", ConnectionState, NOT_YET),
        row("CLIENT SETNAME", ConnectionState, "set `Options::name`"),
        row("CLIENT TRACKING", ConnectionState, NOT_YET),
        row("CLIENT CACHING", ConnectionState, NOT_YET),
        row("CLIENT NO-EVICT", ConnectionState, NOT_YET),
        row("CLIENT NO-TOUCH", ConnectionState, NOT_YET),
        // These two are Valkey's.
        row("CLIENT CAPA", ConnectionState, NOT_YET),
        row("CLIENT IMPORT-SOURCE", ConnectionState, NOT_YET),
        row("BLPOP", Blocking, "use LPOP and poll"),
        row("BRPOP", Blocking, "use RPOP and poll"),
        row("BLMPOP", Blocking, "use LMPOP and poll"),
        row("BLMOVE", Blocking, "use LMOVE and poll"),
        row("BRPOPLPUSH", Blocking, "use LMOVE and poll"),
        row("BZPOPMIN", Blocking, "use ZPOPMIN and poll"),
        row("BZPOPMAX", Blocking, "use ZPOPMAX and poll"),
        row("BZMPOP", Blocking, "use ZMPOP and poll"),
        row("XREAD BLOCK", Blocking, "omit BLOCK and poll"),
        row("XREADGROUP BLOCK", Blocking, "omit BLOCK and poll"),
        // Even if they do not block, they report on the last write of the connection, which may be of another task.
        row("WAIT", Blocking, NOT_YET),
        row("WAITAOF", Blocking, NOT_YET),
    ]
};

const NOT_YET: &str = "it is not supported yet";
const TOOL: &str = "use a tool such as redis-cli";
const TRANSACTION: &str = "use a `Script`, which is atomic";

const fn row(name: &'static str, hazard: Hazard, instead: &'static str) -> NotShareable {
    NotShareable { name, hazard, instead }
}

/// For each pair of first letters, a bit set of the lengths of rejected names. It rules out nearly every other command.
static LENGTHS: [u16; 1 << 10] = {
    let mut lengths = [0; 1 << 10];
    let mut index = 0;
    while index < REJECTED.len() {
        let name = REJECTED[index].name.as_bytes();
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

/// Returns the reason if an encoded command is rejected.
pub(crate) fn find_rejection(command: &[u8]) -> Option<&'static NotShareable> {
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
    REJECTED.iter().filter(|row| row.name.as_bytes()[0] == first).find(|row| match row.name.split_once(' ') {
        None => is(name, row.name),
        Some((command, "BLOCK")) => is(name, command) && blocks(words.clone()),
        Some((command, second)) => is(name, command) && words.clone().next().is_some_and(|word| is(word, second)),
    })
}

fn is(word: &[u8], expected: &str) -> bool {
    word.eq_ignore_ascii_case(expected.as_bytes())
}

/// Whether `BLOCK` is an option of `XREAD` or `XREADGROUP`, and not the name of a stream or of a group.
fn blocks(mut arguments: Words<'_>) -> bool {
    while let Some(word) = arguments.next() {
        if is(word, "BLOCK") {
            return true;
        }
        let values = match word {
            word if is(word, "STREAMS") => return false,
            word if is(word, "GROUP") => 2,
            word if is(word, "COUNT") => 1,
            _ => 0,
        };
        for _ in 0..values {
            arguments.next();
        }
    }
    false
}

/// The words of an encoded command.
#[derive(Clone)]
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn of(command: &'a [u8]) -> Option<Self> {
        after_line(command).map(|(_, rest)| Self(rest))
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
    fn all_rejected_commands_are_found_in_any_case() {
        for row in &REJECTED {
            assert_eq!(rejected(row.name), Some(row.name));
            assert_eq!(rejected(&row.name.to_lowercase()), Some(row.name));
            assert_eq!(rejected(&format!("{} more than one", row.name)), Some(row.name));
            assert!(row.name.split(' ').all(|word| word.len() < 16), "{row:?}");
        }
        assert_eq!(rejected("sElEcT 3"), Some("SELECT"));
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
    fn errors_say_what_to_do_instead() {
        let error = |words| command(words).check().unwrap_err().to_string();
        assert_eq!(
            error("select 1"),
            "SELECT cannot be sent over a shared connection: it would change the connection for all tasks, until the next \
             reconnect; set `Options::database`, and use a client for each database"
        );
        assert_eq!(
            error("BLPOP l 0"),
            "BLPOP cannot be sent over a shared connection: it would delay the replies of all tasks; use LPOP and poll"
        );
    }

    #[test]
    fn invalid_name_is_reported_first() {
        assert!(matches!(Command::new("SELECT 1").check(), Err(CommandError::Name { .. })));
    }
}
