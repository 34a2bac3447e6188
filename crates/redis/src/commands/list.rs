//! Lists.

use bytes::Bytes;

use crate::command::{Command, ToArgument};
use crate::request::Request;

/// One of the ends of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Where the first element is.
    Left,
    /// Where the last element is.
    Right,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            Self::Left => "LEFT",
            Self::Right => "RIGHT",
        }
    }
}

/// Adds elements on the left, one after the other, and returns the new length.
pub fn lpush(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("LPUSH").arg(key).args(elements).returning()
}

/// Adds elements on the right, and returns the new length.
pub fn rpush(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("RPUSH").arg(key).args(elements).returning()
}

/// Adds elements on the left if there is such a list, and returns the new length.
pub fn lpushx(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("LPUSHX").arg(key).args(elements).returning()
}

/// Adds elements on the right if there is such a list, and returns the new length.
pub fn rpushx(key: impl ToArgument, elements: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("RPUSHX").arg(key).args(elements).returning()
}

/// Takes the first element.
pub fn lpop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("LPOP").arg(key).returning()
}

/// Takes the last element.
pub fn rpop(key: impl ToArgument) -> Request<Option<Bytes>> {
    Command::new("RPOP").arg(key).returning()
}

/// Takes the first elements. `None` if there is no such list.
pub fn lpop_many(key: impl ToArgument, count: u64) -> Request<Option<Vec<Bytes>>> {
    Command::new("LPOP").arg(key).arg(count).returning()
}

/// Takes the last elements, the last first. `None` if there is no such list.
pub fn rpop_many(key: impl ToArgument, count: u64) -> Request<Option<Vec<Bytes>>> {
    Command::new("RPOP").arg(key).arg(count).returning()
}

/// Elements from one to another. Both are in it; negative ones count from the end.
pub fn lrange(key: impl ToArgument, first: i64, last: i64) -> Request<Vec<Bytes>> {
    Command::new("LRANGE").arg(key).arg(first).arg(last).returning()
}

/// How many elements there are.
pub fn llen(key: impl ToArgument) -> Request<u64> {
    Command::new("LLEN").arg(key).returning()
}

/// An element. Negative ones count from the end.
pub fn lindex(key: impl ToArgument, index: i64) -> Request<Option<Bytes>> {
    Command::new("LINDEX").arg(key).arg(index).returning()
}

/// Replaces an element. It is an error if there is none.
pub fn lset(key: impl ToArgument, index: i64, element: impl ToArgument) -> Request<()> {
    Command::new("LSET").arg(key).arg(index).arg(element).returning()
}

/// Removes elements that are equal to this, and returns how many: the first so many, the last if negative, all if 0.
pub fn lrem(key: impl ToArgument, count: i64, element: impl ToArgument) -> Request<u64> {
    Command::new("LREM").arg(key).arg(count).arg(element).returning()
}

/// Keeps only the elements from one to another.
pub fn ltrim(key: impl ToArgument, first: i64, last: i64) -> Request<()> {
    Command::new("LTRIM").arg(key).arg(first).arg(last).returning()
}

/// Adds an element before another. Returns the new length, -1 if the other is not there, 0 if there is no such list.
pub fn linsert_before(key: impl ToArgument, other: impl ToArgument, element: impl ToArgument) -> Request<i64> {
    Command::new("LINSERT").arg(key).arg("BEFORE").arg(other).arg(element).returning()
}

/// Adds an element after another. Returns the new length, -1 if the other is not there, 0 if there is no such list.
pub fn linsert_after(key: impl ToArgument, other: impl ToArgument, element: impl ToArgument) -> Request<i64> {
    Command::new("LINSERT").arg(key).arg("AFTER").arg(other).arg(element).returning()
}

/// Where an element is.
pub fn lpos(key: impl ToArgument, element: impl ToArgument) -> Request<Option<u64>> {
    Command::new("LPOS").arg(key).arg(element).returning()
}

/// Moves an element from an end of a list to an end of another, which may be the same, and returns it.
pub fn lmove(source: impl ToArgument, from: End, target: impl ToArgument, to: End) -> Request<Option<Bytes>> {
    Command::new("LMOVE").arg(source).arg(target).arg(from.word()).arg(to.word()).returning()
}
