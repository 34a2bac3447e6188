//! Functions for the common commands. Each returns a [`Request`](crate::Request) with the type of its reply.
//!
//! [`Request::returning`](crate::Request::returning) chooses another type, and [`Command`] builds any other command. Commands that
//! change the state of a connection are not here, because all tasks share the connection.
//!
//! ```
//! use std::time::Duration;
//! use tidewire_redis::commands::{self, SetOptions};
//!
//! let set = commands::set_with("k", "v", SetOptions::default().expire_in(Duration::from_secs(60)).if_absent());
//! assert_eq!(set.command().as_bytes(), b"*6\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n$2\r\nNX\r\n$2\r\nPX\r\n$5\r\n60000\r\n");
//! ```
//!
//! Times are sent in milliseconds. Fractions of a millisecond are rounded up, so that a short time to live is not zero.

mod blocking;
mod group;
mod hash;
mod key;
mod list;
mod scripting;
mod server;
mod set;
mod sorted_set;
mod stream;
mod string;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::command::{Command, ToArgument};

pub use blocking::*;
pub use group::*;
pub use hash::*;
pub use key::*;
pub use list::*;
pub use scripting::*;
pub use server::*;
pub use set::*;
pub use sorted_set::*;
pub use stream::*;
pub use string::*;

/// Returns whole milliseconds, rounded up.
fn milliseconds(duration: Duration) -> u128 {
    duration.as_nanos().div_ceil(1_000_000)
}

/// Returns whole milliseconds since 1970. Earlier times count as 1970: both are in the past.
fn unix_milliseconds(time: SystemTime) -> u128 {
    milliseconds(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

impl Command {
    /// Appends the number of arguments, and the arguments.
    fn counted(self, arguments: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>) -> Self {
        let arguments = arguments.into_iter();
        self.arg(arguments.len()).args(arguments)
    }
}

#[cfg(test)]
mod tests;
