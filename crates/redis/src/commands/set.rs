//! Sets.

use std::collections::HashSet;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Adds members and returns how many are new.
pub fn sadd(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SADD").arg(key).args(members).returning()
}

/// Removes members and returns how many existed.
pub fn srem(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SREM").arg(key).args(members).returning()
}

/// Returns all members.
pub fn smembers(key: impl ToArgument) -> Request<HashSet<Bytes>> {
    Command::new("SMEMBERS").arg(key).returning()
}

/// Returns whether a value is a member.
pub fn sismember(key: impl ToArgument, member: impl ToArgument) -> Request<bool> {
    Command::new("SISMEMBER").arg(key).arg(member).returning()
}

/// Returns whether values are members, in the order of the values.
pub fn smismember(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<Vec<bool>> {
    Command::new("SMISMEMBER").arg(key).args(members).returning()
}

/// Returns the number of members.
pub fn scard(key: impl ToArgument) -> Request<u64> {
    Command::new("SCARD").arg(key).returning()
}

/// Removes and returns a random member.
pub fn spop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("SPOP").arg(key).returning()
}

/// Removes and returns random members.
pub fn spop_many(key: impl ToArgument, count: u64) -> Request<HashSet<Bytes>> {
    Command::new("SPOP").arg(key).arg(count).returning()
}

/// Returns random members: at most `count` different ones, or exactly `-count` with repetitions if it is negative.
pub fn srandmember(key: impl ToArgument, count: i64) -> Request<Vec<Bytes>> {
    Command::new("SRANDMEMBER").arg(key).arg(count).returning()
}

/// Moves a member to another set. Returns false if it is not a member.
pub fn smove(source: impl ToArgument, target: impl ToArgument, member: impl ToArgument) -> Request<bool> {
    Command::new("SMOVE").arg(source).arg(target).arg(member).returning()
}

/// Returns the intersection of sets.
pub fn sinter(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SINTER").args(keys).returning()
}

/// Returns the union of sets.
pub fn sunion(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SUNION").args(keys).returning()
}

/// Returns the members of the first set that are in no other.
pub fn sdiff(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SDIFF").args(keys).returning()
}

/// Stores the intersection of sets and returns its size.
pub fn sinterstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SINTERSTORE").arg(target).args(keys).returning()
}

/// Stores the union of sets and returns its size.
pub fn sunionstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SUNIONSTORE").arg(target).args(keys).returning()
}

/// Stores the members of the first set that are in no other, and returns their number.
pub fn sdiffstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SDIFFSTORE").arg(target).args(keys).returning()
}

/// Returns some of the members. Start with the cursor 0.
pub fn sscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<Bytes>> {
    options.add_to(Command::new("SSCAN").arg(key).arg(cursor)).returning()
}
