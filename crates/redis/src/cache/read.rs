//! Commands whose replies can be cached.
//!
//! A command can be cached if it reads one key, its first argument, and if its reply depends on nothing else: not on the time (`TTL`), on
//! chance (`SRANDMEMBER`), or on the connection. The server tracks exactly the keys of commands that only read.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;

use crate::sharing::Words;
use crate::{Command, CommandError};

/// A command whose reply cannot be cached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotCacheable {
    /// The name of the command.
    pub name: Box<str>,
}

impl Display for NotCacheable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be cached: expected a command that reads exactly one key, one of ", self.name)?;
        for (index, name) in READS.iter().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str("; read several keys with a cached command for each, and send other commands with `Client::send`")
    }
}

/// The commands that can be cached, by the length of their names.
static READS: [&str; 48] = [
    "GET",
    "HGET",
    "HLEN",
    "LLEN",
    "LPOS",
    "TYPE",
    "XLEN",
    "HKEYS",
    "HMGET",
    "HVALS",
    "SCARD",
    "ZCARD",
    "ZRANK",
    "BITPOS",
    "EXISTS",
    "GEOPOS",
    "GETBIT",
    "LINDEX",
    "LRANGE",
    "STRLEN",
    "SUBSTR",
    "XRANGE",
    "ZCOUNT",
    "ZRANGE",
    "ZSCORE",
    "GEODIST",
    "GEOHASH",
    "HEXISTS",
    "HGETALL",
    "HSTRLEN",
    "ZMSCORE",
    "BITCOUNT",
    "GETRANGE",
    "SMEMBERS",
    "ZREVRANK",
    "GEOSEARCH",
    "SISMEMBER",
    "XREVRANGE",
    "ZLEXCOUNT",
    "ZREVRANGE",
    "EXPIRETIME",
    "SMISMEMBER",
    "BITFIELD_RO",
    "PEXPIRETIME",
    "ZRANGEBYLEX",
    "ZRANGEBYSCORE",
    "ZREVRANGEBYLEX",
    "ZREVRANGEBYSCORE",
];

/// The length of the longest name.
const MAX_NAME_BYTES: usize = 16;

/// For each length, the index of the first name that is at least as long. Nearly all names are found after a few comparisons.
static STARTS: [usize; MAX_NAME_BYTES + 2] = {
    let mut starts = [0; MAX_NAME_BYTES + 2];
    let mut len = 0;
    while len < starts.len() {
        let mut index = 0;
        while index < READS.len() && READS[index].len() < len {
            index += 1;
        }
        starts[len] = index;
        len += 1;
    }
    starts
};

/// Returns where the key of an encoded command is, if its reply can be cached.
pub(super) fn find_key(command: &Command) -> Result<Range<usize>, CommandError> {
    command.check_encoding()?;
    key_range(command.as_bytes())
        .ok_or_else(|| CommandError::NotCacheable(NotCacheable { name: command.name().into() }))
}

fn key_range(command: &[u8]) -> Option<Range<usize>> {
    let mut words = Words::of(command)?;
    let name = words.next()?;
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let mut rows = READS[STARTS[name.len()]..STARTS[name.len() + 1]].iter();
    let row = rows.find(|row| name.eq_ignore_ascii_case(row.as_bytes()))?;
    let key = words.next()?;
    let end = command.len() - words.rest().len() - "\r\n".len();
    // All arguments of `EXISTS` are keys.
    (*row != "EXISTS" || words.next().is_none()).then_some(end - key.len()..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(words: &str) -> Option<String> {
        let mut words = words.split(' ');
        let command = Command::new(words.next().unwrap_or_default()).args(words);
        let key = find_key(&command).ok()?;
        Some(String::from_utf8_lossy(&command.as_bytes()[key]).into_owned())
    }

    #[test]
    fn all_names_are_found_in_any_case() {
        assert!(READS.is_sorted_by_key(|name| name.len()));
        for name in READS {
            assert_eq!(key(&format!("{name} k")).as_deref(), Some("k"), "{name}");
            assert_eq!(key(&format!("{} k", name.to_lowercase())).as_deref(), Some("k"), "{name}");
            assert_eq!(key(&format!("{name}X k")), None);
            assert_eq!(key(name), None, "{name} without a key");
        }
    }

    #[test]
    fn key_is_the_first_argument() {
        assert_eq!(key("HMGET h a b").as_deref(), Some("h"));
        assert_eq!(key("EXISTS a").as_deref(), Some("a"));
        let command = Command::new("LRANGE").arg("a\r\n$1\r\n").arg(0).arg(-1);
        let key = find_key(&command).unwrap();
        assert_eq!(&command.as_bytes()[key], b"a\r\n$1\r\n");
    }

    #[test]
    fn other_commands_are_rejected() {
        for words in [
            "SET a b",
            "GETEX a",
            "MGET a",
            "EXISTS a b",
            "TTL a",
            "SRANDMEMBER s",
            "SINTER a b",
            "EVAL_RO x 1 k",
            "G k",
            "AVERYLONGNAMEOFACOMMAND k",
        ] {
            assert_eq!(key(words), None, "{words}");
        }
        let error = find_key(&Command::new("MGET").arg("a").arg("b")).unwrap_err().to_string();
        assert!(error.starts_with("MGET cannot be cached: expected a command that reads exactly one key"), "{error}");
        assert!(error.contains("GET, HGET, ") && error.contains("with a cached command for each"), "{error}");
    }

    #[test]
    fn invalid_command_is_reported_first() {
        assert!(matches!(find_key(&Command::new("GET a")), Err(CommandError::Name { .. })));
    }
}
