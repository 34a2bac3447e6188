//! Hashes.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use super::milliseconds;
use crate::command::{Command, ToArgument, ToPair};
use crate::request::Request;

/// Returns the value of a field.
pub fn hget(key: impl ToArgument, field: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("HGET").arg(key).arg(field).returning()
}

/// Sets fields and returns how many are new. [`Fields`](crate::Fields) are those of a struct.
pub fn hset(key: impl ToArgument, pairs: impl IntoIterator<Item: ToPair>) -> Request<u64> {
    Command::new("HSET").arg(key).pairs(pairs).returning()
}

/// Sets a field if it does not exist.
pub fn hsetnx(key: impl ToArgument, field: impl ToArgument, value: impl ToArgument) -> Request<bool> {
    Command::new("HSETNX").arg(key).arg(field).arg(value).returning()
}

/// Returns the values of fields, in the order of the fields.
pub fn hmget(key: impl ToArgument, fields: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<Bytes>>> {
    Command::new("HMGET").arg(key).args(fields).returning()
}

/// Returns all fields and values. [`Serde`](crate::Serde) makes a struct of them.
pub fn hgetall(key: impl ToArgument) -> Request<HashMap<Bytes, Bytes>> {
    Command::new("HGETALL").arg(key).returning()
}

/// Deletes fields and returns how many existed.
pub fn hdel(key: impl ToArgument, fields: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("HDEL").arg(key).args(fields).returning()
}

/// Returns whether a field exists.
pub fn hexists(key: impl ToArgument, field: impl ToArgument) -> Request<bool> {
    Command::new("HEXISTS").arg(key).arg(field).returning()
}

/// Returns the number of fields.
pub fn hlen(key: impl ToArgument) -> Request<u64> {
    Command::new("HLEN").arg(key).returning()
}

/// Returns the names of all fields.
pub fn hkeys(key: impl ToArgument) -> Request<Vec<Bytes>> {
    Command::new("HKEYS").arg(key).returning()
}

/// Returns the values of all fields.
pub fn hvals(key: impl ToArgument) -> Request<Vec<Bytes>> {
    Command::new("HVALS").arg(key).returning()
}

/// Increments the number in a field and returns the result.
pub fn hincrby(key: impl ToArgument, field: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("HINCRBY").arg(key).arg(field).arg(by).returning()
}

/// Increments the floating point number in a field and returns the result.
pub fn hincrbyfloat(key: impl ToArgument, field: impl ToArgument, by: f64) -> Request<f64> {
    Command::new("HINCRBYFLOAT").arg(key).arg(field).arg(by).returning()
}

/// Returns the length of the value of a field in bytes.
pub fn hstrlen(key: impl ToArgument, field: impl ToArgument) -> Request<u64> {
    Command::new("HSTRLEN").arg(key).arg(field).returning()
}

/// Returns some of the fields and values. Start with the cursor 0.
pub fn hscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<(Bytes, Bytes)>> {
    options.add_to(Command::new("HSCAN").arg(key).arg(cursor)).returning()
}

/// Returns random fields and their values: at most `count` different ones, or exactly `-count` with repetitions if it is
/// negative.
pub fn hrandfield(key: impl ToArgument, count: i64) -> Request<Vec<(Bytes, Bytes)>> {
    Command::new("HRANDFIELD").arg(key).arg(count).arg("WITHVALUES").returning()
}

/// Sets the time to live of fields. The reply has a number for each: 1 if it was set, 2 if the field was deleted because the time
/// is zero, -2 if the field does not exist. It needs Redis 7.4.
pub fn hexpire(
    key: impl ToArgument,
    after: Duration,
    fields: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<Vec<i64>> {
    Command::new("HPEXPIRE").arg(key).arg(milliseconds(after)).arg("FIELDS").counted(fields).returning()
}
