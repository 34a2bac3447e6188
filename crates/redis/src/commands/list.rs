//! Lists.

use bytes::Bytes;

use crate::command::{Command, ToArgument};
use crate::request::Request;

/// An end of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListEnd {
    /// The first element.
    Left,
    /// The last element.
    Right,
}

impl ListEnd {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Left => "LEFT",
            Self::Right => "RIGHT",
        }
    }
}

/// Prepends elements one by one, so the last is first, and returns the new length.
pub fn lpush(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("LPUSH").arg(key).args(elements).returning()
}

/// Appends elements and returns the new length.
pub fn rpush(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("RPUSH").arg(key).args(elements).returning()
}

/// Prepends elements if the list exists, and returns the new length.
pub fn lpushx(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("LPUSHX").arg(key).args(elements).returning()
}

/// Appends elements if the list exists, and returns the new length.
pub fn rpushx(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("RPUSHX").arg(key).args(elements).returning()
}

/// Removes and returns the first element.
pub fn lpop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("LPOP").arg(key).returning()
}

/// Removes and returns the last element.
pub fn rpop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("RPOP").arg(key).returning()
}

/// Removes and returns the first elements. `None` if the list does not exist.
pub fn lpop_many(key: impl ToArgument, count: u64) -> Request<Option<Vec<Bytes>>> {
    Command::new("LPOP").arg(key).arg(count).returning()
}

/// Removes and returns the last elements, the last one first. `None` if the list does not exist.
pub fn rpop_many(key: impl ToArgument, count: u64) -> Request<Option<Vec<Bytes>>> {
    Command::new("RPOP").arg(key).arg(count).returning()
}

/// Returns the elements from `start` to `stop`, both inclusive. Negative positions count from the end.
pub fn lrange(key: impl ToArgument, start: i64, stop: i64) -> Request<Vec<Bytes>> {
    Command::new("LRANGE").arg(key).arg(start).arg(stop).returning()
}

/// Returns the length of a list.
pub fn llen(key: impl ToArgument) -> Request<u64> {
    Command::new("LLEN").arg(key).returning()
}

/// Returns an element by its position. Negative positions count from the end.
pub fn lindex(key: impl ToArgument, index: i64) -> Request<Option<Bytes>> {
    Command::new("LINDEX").arg(key).arg(index).returning()
}

/// Replaces an element. It is an error if the position does not exist.
pub fn lset(key: impl ToArgument, index: i64, element: impl ToArgument) -> Request<()> {
    Command::new("LSET").arg(key).arg(index).arg(element).returning()
}

/// Removes elements equal to `element` and returns how many: the first `count`, the last if it is negative, all if it is 0.
pub fn lrem(key: impl ToArgument, count: i64, element: impl ToArgument) -> Request<u64> {
    Command::new("LREM").arg(key).arg(count).arg(element).returning()
}

/// Removes all elements except those from `start` to `stop`, both inclusive.
pub fn ltrim(key: impl ToArgument, start: i64, stop: i64) -> Request<()> {
    Command::new("LTRIM").arg(key).arg(start).arg(stop).returning()
}

/// Inserts an element before another. Returns the new length, -1 if the other does not exist, 0 if the list does not exist.
pub fn linsert_before(key: impl ToArgument, other: impl ToArgument, element: impl ToArgument) -> Request<i64> {
    Command::new("LINSERT").arg(key).arg("BEFORE").arg(other).arg(element).returning()
}

/// Inserts an element after another. Returns the new length, -1 if the other does not exist, 0 if the list does not exist.
pub fn linsert_after(key: impl ToArgument, other: impl ToArgument, element: impl ToArgument) -> Request<i64> {
    Command::new("LINSERT").arg(key).arg("AFTER").arg(other).arg(element).returning()
}

/// Returns the position of the first equal element.
pub fn lpos(key: impl ToArgument, element: impl ToArgument) -> Request<Option<u64>> {
    Command::new("LPOS").arg(key).arg(element).returning()
}

/// Moves an element from an end of a list to an end of another, which may be the same, and returns it.
pub fn lmove(source: impl ToArgument, from: ListEnd, target: impl ToArgument, to: ListEnd) -> Request<Option<Bytes>> {
    Command::new("LMOVE").arg(source).arg(target).arg(from.word()).arg(to.word()).returning()
}
