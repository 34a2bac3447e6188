//! The server itself.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::command::{Command, ToArgument};
use crate::convert::{FromValue, Ignore};
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// What the clock of the server shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerTime(pub SystemTime);

impl FromValue for ServerTime {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        let error = ConversionError::new("seconds and microseconds", &value);
        let (seconds, micros) = <(u64, u32)>::from_value(value)?;
        let time = Duration::from_secs(seconds).checked_add(Duration::from_micros(micros.into()));
        time.and_then(|time| UNIX_EPOCH.checked_add(time)).map(Self).ok_or(error)
    }
}

/// Whether the server answers.
pub fn ping() -> Request<Ignore> {
    Command::new("PING").returning()
}

/// The same message back.
pub fn echo(message: impl ToArgument) -> Request<bytes::Bytes> {
    Command::new("ECHO").arg(message).returning()
}

/// What the clock of the server shows.
pub fn time() -> Request<ServerTime> {
    Command::new("TIME").returning()
}

/// How many keys there are.
pub fn dbsize() -> Request<u64> {
    Command::new("DBSIZE").returning()
}

/// Facts about the server, of a section or of the usual ones.
pub fn info(section: Option<&str>) -> Request<String> {
    Command::new("INFO").args(section).returning()
}

/// Settings whose names match.
pub fn config_get(pattern: impl ToArgument) -> Request<HashMap<String, String>> {
    Command::new("CONFIG").arg("GET").arg(pattern).returning()
}

/// Changes a setting.
pub fn config_set(name: impl ToArgument, value: impl ToArgument) -> Request<()> {
    Command::new("CONFIG").arg("SET").arg(name).arg(value).returning()
}

/// Deletes all keys of the database.
pub fn flushdb() -> Request<()> {
    Command::new("FLUSHDB").returning()
}

/// Deletes all keys of all databases.
pub fn flushall() -> Request<()> {
    Command::new("FLUSHALL").returning()
}

/// The number that the server knows the connection by.
pub fn client_id() -> Request<u64> {
    Command::new("CLIENT").arg("ID").returning()
}

/// Sends a message to a channel, and returns how many connections of this server got it.
pub fn publish(channel: impl ToArgument, message: impl ToArgument) -> Request<u64> {
    Command::new("PUBLISH").arg(channel).arg(message).returning()
}

/// The memory that a key takes, in bytes.
pub fn memory_usage(key: impl ToArgument) -> Request<Option<u64>> {
    Command::new("MEMORY").arg("USAGE").arg(key).returning()
}
