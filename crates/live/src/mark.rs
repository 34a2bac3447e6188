//! Marks: the position of a subscriber, as text that it can store and resume from.

use std::fmt;
use std::str::FromStr;

use tidewire_store::{Position, Query};

/// A position in the commits of a store, as of a query. It is text to whoever keeps it.
///
/// ```
/// use tidewire_live::Mark;
///
/// let text = "00000000000000070000000000000001cbf29ce484222325";
/// let mark: Mark = text.parse()?;
/// assert_eq!(mark.position().sequence, 1);
/// assert_eq!(mark.to_string(), text);
/// # Ok::<(), tidewire_live::ParseMarkError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark {
    position: Position,
    query: u64,
}

/// A text that is no mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a position is 48 hexadecimal digits, as it was given out")]
pub struct ParseMarkError;

impl Mark {
    pub(crate) fn new(position: Position, query: u64) -> Self {
        Self { position, query }
    }

    /// The commit that the subscriber is current to.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Whether it is of a query with this hash.
    pub(crate) fn is_of(&self, query: u64) -> bool {
        self.query == query
    }
}

/// The same for equal queries, also in another process.
pub(crate) fn hash(query: &Query) -> u64 {
    let canonical = query.canonical();
    canonical.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}{:016x}", self.position.epoch, self.position.sequence, self.query)
    }
}

impl FromStr for Mark {
    type Err = ParseMarkError;

    fn from_str(text: &str) -> Result<Self, ParseMarkError> {
        if text.len() != 48 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ParseMarkError);
        }
        let number = |from: usize| u64::from_str_radix(&text[from..from + 16], 16).map_err(|_| ParseMarkError);
        Ok(Self { position: Position { epoch: number(0)?, sequence: number(16)? }, query: number(32)? })
    }
}
