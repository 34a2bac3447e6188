//! Commands that block until there is an element or an entry, or until their timeout. Zero and `Duration::MAX` mean that there is no
//! timeout.

use std::time::Duration;

use bytes::Bytes;

use super::list::ListEnd;
use super::milliseconds;
use super::sorted_set::{ScoreEnd, ScoredMembers};
use super::stream::{StreamStart, Streams};
use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Removes and returns the first element of the first list that is not empty, after the key of the list. Blocks while all are empty.
pub fn blpop(keys: impl IntoIterator<Item: ToArgument>, timeout: Duration) -> Request<Option<(Bytes, Bytes)>> {
    Command::new("BLPOP").args(keys).arg(seconds(timeout)).returning()
}

/// Removes and returns the last element of the first list that is not empty, after the key of the list. Blocks while all are empty.
pub fn brpop(keys: impl IntoIterator<Item: ToArgument>, timeout: Duration) -> Request<Option<(Bytes, Bytes)>> {
    Command::new("BRPOP").args(keys).arg(seconds(timeout)).returning()
}

/// Removes and returns up to `count` elements of the first list that is not empty, after the key of the list. Blocks while all are
/// empty. Since Redis 7.
pub fn blmpop(
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
    end: ListEnd,
    count: u64,
    timeout: Duration,
) -> Request<Option<(Bytes, Vec<Bytes>)>> {
    Command::new("BLMPOP").arg(seconds(timeout)).counted(keys).arg(end.word()).arg("COUNT").arg(count).returning()
}

/// Moves an element to another list and returns it. Blocks while the source is empty.
pub fn blmove(
    source: impl ToArgument,
    from: ListEnd,
    target: impl ToArgument,
    to: ListEnd,
    timeout: Duration,
) -> Request<Option<Bytes>> {
    let command = Command::new("BLMOVE").arg(source).arg(target).arg(from.word()).arg(to.word());
    command.arg(seconds(timeout)).returning()
}

/// Removes the member with the lowest score from the first sorted set that is not empty, and returns the key of the set, the member
/// and the score. Blocks while all are empty.
pub fn bzpopmin(keys: impl IntoIterator<Item: ToArgument>, timeout: Duration) -> Request<Option<(Bytes, Bytes, f64)>> {
    Command::new("BZPOPMIN").args(keys).arg(seconds(timeout)).returning()
}

/// Removes the member with the highest score from the first sorted set that is not empty, and returns the key of the set, the
/// member and the score. Blocks while all are empty.
pub fn bzpopmax(keys: impl IntoIterator<Item: ToArgument>, timeout: Duration) -> Request<Option<(Bytes, Bytes, f64)>> {
    Command::new("BZPOPMAX").args(keys).arg(seconds(timeout)).returning()
}

/// Removes up to `count` members from the first sorted set that is not empty, and returns them with their scores, after the key of
/// the set. Blocks while all are empty. Since Redis 7.
pub fn bzmpop(
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
    end: ScoreEnd,
    count: u64,
    timeout: Duration,
) -> Request<Option<(Bytes, ScoredMembers)>> {
    Command::new("BZMPOP").arg(seconds(timeout)).counted(keys).arg(end.word()).arg("COUNT").arg(count).returning()
}

/// Returns entries of the streams, at most `count` of each. Blocks while there are none.
pub fn xread_blocking<K: ToArgument>(
    streams: impl IntoIterator<Item = (K, StreamStart)>,
    count: Option<u64>,
    timeout: Duration,
) -> Request<Option<Streams>> {
    let (keys, starts): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    let command = Command::new("XREAD").option("COUNT", count).arg("BLOCK").arg(block_milliseconds(timeout));
    command.arg("STREAMS").args(keys).args(starts).returning()
}

/// Blocks until this number of replicas have acknowledged the writes before it in its [`Pipeline`](crate::Pipeline), and returns how
/// many have. It must be the last command of the pipeline.
pub fn wait(replicas: u64, timeout: Duration) -> Request<u64> {
    Command::new("WAIT").arg(replicas).arg(block_milliseconds(timeout)).returning()
}

/// Blocks until the server itself, if `local`, and this number of replicas have written the writes before it in its
/// [`Pipeline`](crate::Pipeline) to their append-only files, and returns how many have: 0 or 1, and the number of replicas. It must
/// be the last command of the pipeline. Since Redis 7.2.
pub fn waitaof(local: bool, replicas: u64, timeout: Duration) -> Request<(u64, u64)> {
    Command::new("WAITAOF").arg(u8::from(local)).arg(replicas).arg(block_milliseconds(timeout)).returning()
}

/// Longer timeouts are sent as zero: servers reject those that overflow their clock.
const MAX_TIMEOUT: Duration = Duration::from_hours(24 * 365 * 100);

/// Returns a timeout in milliseconds, rounded up, so that a short one is not zero.
pub(super) fn block_milliseconds(timeout: Duration) -> u128 {
    if timeout > MAX_TIMEOUT { 0 } else { milliseconds(timeout) }
}

/// Returns a timeout in seconds, rounded up to milliseconds.
#[expect(clippy::cast_precision_loss, reason = "a hundred years are exact")]
fn seconds(timeout: Duration) -> f64 {
    block_milliseconds(timeout) as f64 / 1000.0
}
