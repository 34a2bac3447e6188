//! Sets.

use std::collections::HashSet;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Adds members, and returns how many are new.
pub fn sadd(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SADD").arg(key).args(members).returning()
}

/// Removes members, and returns how many there were.
pub fn srem(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SREM").arg(key).args(members).returning()
}

/// All members.
pub fn smembers(key: impl ToArgument) -> Request<HashSet<Bytes>> {
    Command::new("SMEMBERS").arg(key).returning()
}

/// Whether this is a member.
pub fn sismember(key: impl ToArgument, member: impl ToArgument) -> Request<bool> {
    Command::new("SISMEMBER").arg(key).arg(member).returning()
}

/// Whether these are members, in their order.
pub fn smismember(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<Vec<bool>> {
    Command::new("SMISMEMBER").arg(key).args(members).returning()
}

/// How many members there are.
pub fn scard(key: impl ToArgument) -> Request<u64> {
    Command::new("SCARD").arg(key).returning()
}

/// Takes any member.
pub fn spop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("SPOP").arg(key).returning()
}

/// Takes any members.
pub fn spop_many(key: impl ToArgument, count: u64) -> Request<HashSet<Bytes>> {
    Command::new("SPOP").arg(key).arg(count).returning()
}

/// Any members: at most so many different ones, or if negative exactly so many that may be the same.
pub fn srandmember(key: impl ToArgument, count: i64) -> Request<Vec<Bytes>> {
    Command::new("SRANDMEMBER").arg(key).arg(count).returning()
}

/// Moves a member to another set. False if it is none.
pub fn smove(source: impl ToArgument, target: impl ToArgument, member: impl ToArgument) -> Request<bool> {
    Command::new("SMOVE").arg(source).arg(target).arg(member).returning()
}

/// What is in all of the sets.
pub fn sinter(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SINTER").args(keys).returning()
}

/// What is in any of the sets.
pub fn sunion(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SUNION").args(keys).returning()
}

/// What is in the first of the sets and in no other.
pub fn sdiff(keys: impl IntoIterator<Item: ToArgument>) -> Request<HashSet<Bytes>> {
    Command::new("SDIFF").args(keys).returning()
}

/// Makes a set of what is in all of the sets, and returns its size.
pub fn sinterstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SINTERSTORE").arg(target).args(keys).returning()
}

/// Makes a set of what is in any of the sets, and returns its size.
pub fn sunionstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SUNIONSTORE").arg(target).args(keys).returning()
}

/// Makes a set of what is in the first of the sets and in no other, and returns its size.
pub fn sdiffstore(target: impl ToArgument, keys: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("SDIFFSTORE").arg(target).args(keys).returning()
}

/// Some of the members. Begin with the cursor 0.
pub fn sscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<Bytes>> {
    options.add_to(Command::new("SSCAN").arg(key).arg(cursor)).returning()
}
