//! Commands that cannot be sent over a shared connection.
//!
//! Replies are matched by their order, and all tasks are one connection to the server. So a command that does not have exactly
//! one reply would shift the replies of others, a command that changes the state of the connection would change it for everyone
//! until the next reconnect, and a blocking command would make everyone wait. They are refused by name, before a byte of them is
//! written.
//!
//! Related commands that do none of this are allowed: `CLIENT` when it reads (`ID`, `INFO`, `LIST`, `GETNAME`, `GETREDIR`,
//! `TRACKINGINFO`) or concerns other connections (`KILL`, `PAUSE`, `UNPAUSE`, `UNBLOCK`), and `CLIENT SETINFO`, which only sets a
//! label; `PUBLISH` and `PUBSUB`; commands that keep the whole server busy, for which a separate connection would be no better
//! (`SAVE`, `MIGRATE`, `DEBUG SLEEP`); and `SHUTDOWN`, after which there is nothing to share. The server itself prevents scripts
//! from doing any of it. A renamed command (`rename-command`) is not recognized.

use std::fmt::{self, Display, Formatter};

/// A command that cannot go over a connection that others share.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotShared {
    /// The command, with its subcommand or option if it is only this one: `CLIENT TRACKING`, `XREAD BLOCK`.
    pub name: &'static str,
    /// What it would do to the others.
    pub harm: Harm,
    /// What to do instead.
    pub instead: &'static str,
}

/// What a command would do to others on the same connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Harm {
    /// It is not answered by exactly one reply, so they would get each other's.
    Replies,
    /// It changes the connection, also for them, until the connection is made anew.
    Connection,
    /// It may not be answered at once, and they would wait for their replies, too.
    Waiting,
}

impl Display for NotShared {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not for a connection that is shared: {}; {}", self.name, self.harm, self.instead)
    }
}

impl Display for Harm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Replies => "it has not exactly one reply, and others would get the wrong ones",
            Self::Connection => "it would change the connection for all, until there is another connection",
            Self::Waiting => "all would have to wait for it",
        })
    }
}

/// What is refused. A second word is the subcommand, and that of `XREAD` one of its options.
static REFUSED: [NotShared; 43] = {
    use Harm::{Connection, Replies, Waiting};
    [
        row("SUBSCRIBE", Replies, NOT_YET),
        row("PSUBSCRIBE", Replies, NOT_YET),
        row("SSUBSCRIBE", Replies, NOT_YET),
        row("UNSUBSCRIBE", Replies, NOT_YET),
        row("PUNSUBSCRIBE", Replies, NOT_YET),
        row("SUNSUBSCRIBE", Replies, NOT_YET),
        row("MONITOR", Replies, TOOL),
        row("SYNC", Replies, TOOL),
        row("PSYNC", Replies, TOOL),
        row("REPLCONF", Replies, TOOL),
        row("CLIENT REPLY", Replies, "ask for `Ignore` if the reply does not matter"),
        row("SELECT", Connection, "set `Options::database`, with a client for each database"),
        row("AUTH", Connection, "set `Options::login` or `Options::credentials`"),
        row("HELLO", Connection, "the client says it when it connects, with what `Options` has"),
        row("RESET", Connection, "start another client for what is to be different"),
        row("QUIT", Connection, "use `Client::close`"),
        row("MULTI", Connection, TRANSACTION),
        row("EXEC", Connection, TRANSACTION),
        row("DISCARD", Connection, TRANSACTION),
        row("WATCH", Connection, TRANSACTION),
        row("UNWATCH", Connection, TRANSACTION),
        row("READONLY", Connection, NOT_YET),
        row("READWRITE", Connection, NOT_YET),
        row("ASKING", Connection, NOT_YET),
        row("CLIENT SETNAME", Connection, "set `Options::name`"),
        row("CLIENT TRACKING", Connection, NOT_YET),
        row("CLIENT CACHING", Connection, NOT_YET),
        row("CLIENT NO-EVICT", Connection, NOT_YET),
        row("CLIENT NO-TOUCH", Connection, NOT_YET),
        // These two are Valkey's.
        row("CLIENT CAPA", Connection, NOT_YET),
        row("CLIENT IMPORT-SOURCE", Connection, NOT_YET),
        row("BLPOP", Waiting, "use LPOP, and ask again"),
        row("BRPOP", Waiting, "use RPOP, and ask again"),
        row("BLMPOP", Waiting, "use LMPOP, and ask again"),
        row("BLMOVE", Waiting, "use LMOVE, and ask again"),
        row("BRPOPLPUSH", Waiting, "use LMOVE, and ask again"),
        row("BZPOPMIN", Waiting, "use ZPOPMIN, and ask again"),
        row("BZPOPMAX", Waiting, "use ZPOPMAX, and ask again"),
        row("BZMPOP", Waiting, "use ZMPOP, and ask again"),
        row("XREAD BLOCK", Waiting, "leave BLOCK out, and ask again"),
        row("XREADGROUP BLOCK", Waiting, "leave BLOCK out, and ask again"),
        // Without anything to wait for they say what the commands before them have reached, which may be anybody's.
        row("WAIT", Waiting, NOT_YET),
        row("WAITAOF", Waiting, NOT_YET),
    ]
};

const NOT_YET: &str = "it is not supported yet";
const TOOL: &str = "use a tool that is made for it, such as redis-cli";
const TRANSACTION: &str = "use a `Script`, which nothing comes between";

const fn row(name: &'static str, harm: Harm, instead: &'static str) -> NotShared {
    NotShared { name, harm, instead }
}

/// For two letters, the lengths of the names that begin with them, as bits. Nearly every other command is told from them by this.
static LENGTHS: [u16; 1 << 10] = {
    let mut lengths = [0; 1 << 10];
    let mut index = 0;
    while index < REFUSED.len() {
        let name = REFUSED[index].name.as_bytes();
        let mut len = 0;
        while len < name.len() && name[len] != b' ' {
            len += 1;
        }
        lengths[beginning(name[0], name[1])] |= 1 << len;
        index += 1;
    }
    lengths
};

/// Where two letters stand, whatever their case.
const fn beginning(first: u8, second: u8) -> usize {
    (first as usize & 31) << 5 | (second as usize & 31)
}

/// Why an encoded command is refused, if it is.
pub(crate) fn refusal(command: &[u8]) -> Option<&'static NotShared> {
    let name = match command {
        // Nearly always there are fewer than ten arguments, and fewer than ten letters.
        [_, _, b'\r', _, _, len, b'\r', _, rest @ ..] => rest.get(..digit(*len))?,
        _ => Words::of(command)?.next()?,
    };
    let ([first, second, ..], len @ ..16) = (name, name.len()) else { return None };
    if LENGTHS[beginning(*first, *second)] & 1 << len == 0 { None } else { find(Words::of(command)?) }
}

fn find(mut words: Words<'_>) -> Option<&'static NotShared> {
    let name = words.next()?;
    let first = name.first()?.to_ascii_uppercase();
    REFUSED.iter().filter(|row| row.name.as_bytes()[0] == first).find(|row| match row.name.split_once(' ') {
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

/// What stands in the first line after its first byte, and what follows the line.
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
    fn refused(words: &str) -> Option<&'static str> {
        match command(words).check() {
            Ok(()) => None,
            Err(CommandError::NotShared(row)) => Some(row.name),
            Err(other) => panic!("{words}: {other}"),
        }
    }

    #[test]
    fn whatever_is_in_the_table_is_found_however_it_is_written() {
        for row in &REFUSED {
            assert_eq!(refused(row.name), Some(row.name));
            assert_eq!(refused(&row.name.to_lowercase()), Some(row.name));
            assert_eq!(refused(&format!("{} more than one", row.name)), Some(row.name));
            assert!(row.name.split(' ').all(|word| word.len() < 16), "{row:?}");
        }
        assert_eq!(refused("sElEcT 3"), Some("SELECT"));
    }

    #[test]
    fn what_is_like_them_passes() {
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
            assert_eq!(refused(words), None, "{words}");
        }
        // Names that are long enough to have their bit thrown away.
        assert_eq!(refused(&"s".repeat(64 + 6)), None);
    }

    #[test]
    fn options_are_found_wherever_they_stand() {
        for words in ["XREAD BLOCK 0 STREAMS s 0", "xread count 5 block 10 streams s 0"] {
            assert_eq!(refused(words), Some("XREAD BLOCK"), "{words}");
        }
        for words in ["XREADGROUP GROUP g c BLOCK 0 STREAMS s >", "XREADGROUP BLOCK 0 GROUP STREAMS c STREAMS s >"] {
            assert_eq!(refused(words), Some("XREADGROUP BLOCK"), "{words}");
        }
        assert_eq!(refused("XREADGROUP GROUP streams c NOACK BLOCK 0 STREAMS s >"), Some("XREADGROUP BLOCK"));
    }

    #[test]
    fn it_is_said_what_why_and_what_instead() {
        let said = |words| command(words).check().map_err(|error| error.to_string());
        let select = "SELECT is not for a connection that is shared: it would change the connection for all, until there is \
                      another connection; set `Options::database`, with a client for each database";
        assert_eq!(said("select 1"), Err(select.to_owned()));
        let pop =
            "BLPOP is not for a connection that is shared: all would have to wait for it; use LPOP, and ask again";
        assert_eq!(said("BLPOP l 0"), Err(pop.to_owned()));
    }

    #[test]
    fn a_name_that_is_none_is_said_first() {
        assert!(matches!(Command::new("SELECT 1").check(), Err(CommandError::Name { .. })));
    }
}
