//! Sorted sets.

use std::fmt::Write;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use super::string::Existence;
use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Options of `ZADD`. By default members are added and scores replaced, and what is returned is how many are new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ZaddOptions {
    /// Only new members, or only those that there are.
    pub condition: Option<Existence>,
    /// Replace a score only by a greater or by a smaller one. New members are added in any case.
    pub change: Option<ScoreChange>,
    /// Count changed scores, too.
    pub count_changed: bool,
}

/// Which scores may replace others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScoreChange {
    /// Greater ones.
    Greater,
    /// Smaller ones.
    Smaller,
}

impl ZaddOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only new members.
    #[must_use]
    pub fn if_absent(mut self) -> Self {
        self.condition = Some(Existence::Absent);
        self
    }

    /// Only members that there are.
    #[must_use]
    pub fn if_present(mut self) -> Self {
        self.condition = Some(Existence::Present);
        self
    }

    /// Only greater scores.
    #[must_use]
    pub fn if_greater(mut self) -> Self {
        self.change = Some(ScoreChange::Greater);
        self
    }

    /// Only smaller scores.
    #[must_use]
    pub fn if_smaller(mut self) -> Self {
        self.change = Some(ScoreChange::Smaller);
        self
    }

    /// Count changed scores, too.
    #[must_use]
    pub fn count_changed(mut self) -> Self {
        self.count_changed = true;
        self
    }

    fn add_to(self, command: Command) -> Command {
        let change = self.change.map(|change| match change {
            ScoreChange::Greater => "GT",
            ScoreChange::Smaller => "LT",
        });
        command.args(self.condition.map(Existence::word)).args(change).flag("CH", self.count_changed)
    }
}

/// An end of a range of scores.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ScoreBound {
    /// This score is in the range. Infinite ones are everything.
    Including(f64),
    /// This score is just not in the range.
    Excluding(f64),
}

impl From<f64> for ScoreBound {
    fn from(score: f64) -> Self {
        Self::Including(score)
    }
}

impl ToArgument for ScoreBound {
    fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Self::Including(score) => score.with_bytes(f),
            Self::Excluding(score) => {
                let mut text = String::from("(");
                // A string takes whatever is written to it.
                let _ = write!(text, "{score}");
                f(text.as_bytes())
            }
        }
    }
}

/// Adds members with their scores, and returns how many are new. The pairs are a member and its score.
pub fn zadd<M: ToArgument>(
    key: impl ToArgument,
    members: impl IntoIterator<Item = (M, f64)>,
    options: ZaddOptions,
) -> Request<u64> {
    let mut command = options.add_to(Command::new("ZADD").arg(key));
    for (member, score) in members {
        command.push(score);
        command.push(member);
    }
    command.returning()
}

/// Adds to the score of a member, and returns the sum.
pub fn zincrby(key: impl ToArgument, by: f64, member: impl ToArgument) -> Request<f64> {
    Command::new("ZINCRBY").arg(key).arg(by).arg(member).returning()
}

/// Removes members, and returns how many there were.
pub fn zrem(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("ZREM").arg(key).args(members).returning()
}

/// The score of a member.
pub fn zscore(key: impl ToArgument, member: impl ToArgument) -> Request<Option<f64>> {
    Command::new("ZSCORE").arg(key).arg(member).returning()
}

/// The scores of members, in their order.
pub fn zmscore(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<f64>>> {
    Command::new("ZMSCORE").arg(key).args(members).returning()
}

/// How many members there are.
pub fn zcard(key: impl ToArgument) -> Request<u64> {
    Command::new("ZCARD").arg(key).returning()
}

/// How many members have a score in the range.
pub fn zcount(key: impl ToArgument, min: impl Into<ScoreBound>, max: impl Into<ScoreBound>) -> Request<u64> {
    Command::new("ZCOUNT").arg(key).arg(min.into()).arg(max.into()).returning()
}

/// How many members have a smaller score.
pub fn zrank(key: impl ToArgument, member: impl ToArgument) -> Request<Option<u64>> {
    Command::new("ZRANK").arg(key).arg(member).returning()
}

/// How many members have a greater score.
pub fn zrevrank(key: impl ToArgument, member: impl ToArgument) -> Request<Option<u64>> {
    Command::new("ZREVRANK").arg(key).arg(member).returning()
}

/// Members from one rank to another, and their scores. Both ranks are in it; negative ones count from the end.
pub fn zrange(key: impl ToArgument, first: i64, last: i64) -> Request<Vec<(Bytes, f64)>> {
    Command::new("ZRANGE").arg(key).arg(first).arg(last).arg("WITHSCORES").returning()
}

/// Members from one rank to another by descending score, and their scores. Both ranks are in it.
pub fn zrevrange(key: impl ToArgument, first: i64, last: i64) -> Request<Vec<(Bytes, f64)>> {
    Command::new("ZREVRANGE").arg(key).arg(first).arg(last).arg("WITHSCORES").returning()
}

/// Members that have a score in the range, and their scores. A limit is an offset and a count.
pub fn zrangebyscore(
    key: impl ToArgument,
    min: impl Into<ScoreBound>,
    max: impl Into<ScoreBound>,
    limit: Option<(u64, u64)>,
) -> Request<Vec<(Bytes, f64)>> {
    limited(Command::new("ZRANGEBYSCORE").arg(key).arg(min.into()).arg(max.into()), limit)
}

/// Members that have a score in the range, by descending score, and their scores. A limit is an offset and a count.
pub fn zrevrangebyscore(
    key: impl ToArgument,
    max: impl Into<ScoreBound>,
    min: impl Into<ScoreBound>,
    limit: Option<(u64, u64)>,
) -> Request<Vec<(Bytes, f64)>> {
    limited(Command::new("ZREVRANGEBYSCORE").arg(key).arg(max.into()).arg(min.into()), limit)
}

fn limited(command: Command, limit: Option<(u64, u64)>) -> Request<Vec<(Bytes, f64)>> {
    let command = command.arg("WITHSCORES");
    match limit {
        Some((offset, count)) => command.arg("LIMIT").arg(offset).arg(count),
        None => command,
    }
    .returning()
}

/// Removes members from one rank to another, and returns how many.
pub fn zremrangebyrank(key: impl ToArgument, first: i64, last: i64) -> Request<u64> {
    Command::new("ZREMRANGEBYRANK").arg(key).arg(first).arg(last).returning()
}

/// Removes members that have a score in the range, and returns how many.
pub fn zremrangebyscore(key: impl ToArgument, min: impl Into<ScoreBound>, max: impl Into<ScoreBound>) -> Request<u64> {
    Command::new("ZREMRANGEBYSCORE").arg(key).arg(min.into()).arg(max.into()).returning()
}

/// Takes the members with the smallest scores.
pub fn zpopmin(key: impl ToArgument, count: u64) -> Request<Vec<(Bytes, f64)>> {
    Command::new("ZPOPMIN").arg(key).arg(count).returning()
}

/// Takes the members with the greatest scores.
pub fn zpopmax(key: impl ToArgument, count: u64) -> Request<Vec<(Bytes, f64)>> {
    Command::new("ZPOPMAX").arg(key).arg(count).returning()
}

/// Makes a sorted set of what is in any of these, with the sums of the scores, and returns its size.
pub fn zunionstore(
    target: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<u64> {
    Command::new("ZUNIONSTORE").arg(target).counted(keys).returning()
}

/// Makes a sorted set of what is in all of these, with the sums of the scores, and returns its size.
pub fn zinterstore(
    target: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<u64> {
    Command::new("ZINTERSTORE").arg(target).counted(keys).returning()
}

/// Some of the members and their scores. Begin with the cursor 0.
pub fn zscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<(Bytes, f64)>> {
    options.add_to(Command::new("ZSCAN").arg(key).arg(cursor)).returning()
}
