//! The server itself.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::command::{Command, ToArgument};
use crate::convert::{FromValue, Ignore};
use crate::error::ConversionError;
use crate::request::Request;
use crate::resp::Value;

/// The time of a server.
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

/// Checks that the server answers.
pub fn ping() -> Request<Ignore> {
    Command::new("PING").returning()
}

/// Returns the message.
pub fn echo(message: impl ToArgument) -> Request<bytes::Bytes> {
    Command::new("ECHO").arg(message).returning()
}

/// Returns the time of the server.
pub fn time() -> Request<ServerTime> {
    Command::new("TIME").returning()
}

/// Returns the number of keys.
pub fn dbsize() -> Request<u64> {
    Command::new("DBSIZE").returning()
}

/// Returns information about the server, of one section or of the default ones.
pub fn info(section: Option<&str>) -> Request<String> {
    Command::new("INFO").args(section).returning()
}

/// Returns the settings whose names match a pattern.
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

/// Returns the ID of the connection on the server.
pub fn client_id() -> Request<u64> {
    Command::new("CLIENT").arg("ID").returning()
}

/// Publishes a message to a channel and returns the number of receivers on this server.
pub fn publish(channel: impl ToArgument, message: impl ToArgument) -> Request<u64> {
    Command::new("PUBLISH").arg(channel).arg(message).returning()
}

/// Sends a message to the subscribers of a shard channel, and returns the number of receivers on this server. Since Redis 7.
pub fn spublish(channel: impl ToArgument, message: impl ToArgument) -> Request<u64> {
    Command::new("SPUBLISH").arg(channel).arg(message).returning()
}

/// Returns the memory that a key uses, in bytes.
pub fn memory_usage(key: impl ToArgument) -> Request<Option<u64>> {
    Command::new("MEMORY").arg("USAGE").arg(key).returning()
}
