//! Hashes.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use super::milliseconds;
use crate::command::{Command, ToArgument, ToPair};
use crate::request::Request;

/// The value of a field.
pub fn hget(key: impl ToArgument, field: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("HGET").arg(key).arg(field).returning()
}

/// Sets fields, and returns how many are new. Those of a struct are [`Fields`](crate::Fields).
pub fn hset(key: impl ToArgument, pairs: impl IntoIterator<Item: ToPair>) -> Request<u64> {
    Command::new("HSET").arg(key).pairs(pairs).returning()
}

/// Sets a field if there is none.
pub fn hsetnx(key: impl ToArgument, field: impl ToArgument, value: impl ToArgument) -> Request<bool> {
    Command::new("HSETNX").arg(key).arg(field).arg(value).returning()
}

/// The values of fields, in their order.
pub fn hmget(key: impl ToArgument, fields: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<Bytes>>> {
    Command::new("HMGET").arg(key).args(fields).returning()
}

/// All fields. A struct can be made of them with [`Serde`](crate::Serde).
pub fn hgetall(key: impl ToArgument) -> Request<HashMap<Bytes, Bytes>> {
    Command::new("HGETALL").arg(key).returning()
}

/// Deletes fields, and returns how many there were.
pub fn hdel(key: impl ToArgument, fields: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("HDEL").arg(key).args(fields).returning()
}

/// Whether there is such a field.
pub fn hexists(key: impl ToArgument, field: impl ToArgument) -> Request<bool> {
    Command::new("HEXISTS").arg(key).arg(field).returning()
}

/// How many fields there are.
pub fn hlen(key: impl ToArgument) -> Request<u64> {
    Command::new("HLEN").arg(key).returning()
}

/// The names of the fields.
pub fn hkeys(key: impl ToArgument) -> Request<Vec<Bytes>> {
    Command::new("HKEYS").arg(key).returning()
}

/// The values of the fields.
pub fn hvals(key: impl ToArgument) -> Request<Vec<Bytes>> {
    Command::new("HVALS").arg(key).returning()
}

/// Adds to a field, and returns the sum.
pub fn hincrby(key: impl ToArgument, field: impl ToArgument, by: i64) -> Request<i64> {
    Command::new("HINCRBY").arg(key).arg(field).arg(by).returning()
}

/// Adds to a field, and returns the sum.
pub fn hincrbyfloat(key: impl ToArgument, field: impl ToArgument, by: f64) -> Request<f64> {
    Command::new("HINCRBYFLOAT").arg(key).arg(field).arg(by).returning()
}

/// The length of the value of a field.
pub fn hstrlen(key: impl ToArgument, field: impl ToArgument) -> Request<u64> {
    Command::new("HSTRLEN").arg(key).arg(field).returning()
}

/// Some of the fields and values. Begin with the cursor 0.
pub fn hscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<(Bytes, Bytes)>> {
    options.add_to(Command::new("HSCAN").arg(key).arg(cursor)).returning()
}

/// Any fields, and their values: at most so many different ones, or if negative exactly so many that may be the same.
pub fn hrandfield(key: impl ToArgument, count: i64) -> Request<Vec<(Bytes, Bytes)>> {
    Command::new("HRANDFIELD").arg(key).arg(count).arg("WITHVALUES").returning()
}

/// Lets fields live for so long. For each: -2 if there is none, 1 if so, 2 if it was deleted. It needs Redis 7.4.
pub fn hexpire(
    key: impl ToArgument,
    after: Duration,
    fields: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<Vec<i64>> {
    Command::new("HPEXPIRE").arg(key).arg(milliseconds(after)).arg("FIELDS").counted(fields).returning()
}
