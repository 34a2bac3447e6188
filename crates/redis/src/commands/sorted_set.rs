//! Sorted sets.

use std::fmt::Write;

use bytes::Bytes;

use super::key::{ScanOptions, Scanned};
use super::string::Existence;
use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Options of `ZADD`. By default it adds members and replaces scores, and returns the number of new members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ZaddOptions {
    /// Only adds new members, or only updates existing ones. Default: both.
    pub condition: Option<Existence>,
    /// Replaces a score only by a greater or by a smaller one. New members are added in any case. Default: by any.
    pub change: Option<ScoreChange>,
    /// Also counts members whose score has changed. Default: false.
    pub count_changed: bool,
}

/// Which scores may replace others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScoreChange {
    /// Greater ones (`GT`).
    Greater,
    /// Smaller ones (`LT`).
    Smaller,
}

/// Members and their scores.
pub type ScoredMembers = Vec<(Bytes, f64)>;

/// The members that are removed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreEnd {
    /// Those with the lowest scores.
    Lowest,
    /// Those with the highest scores.
    Highest,
}

impl ScoreEnd {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Lowest => "MIN",
            Self::Highest => "MAX",
        }
    }
}

/// A part of a result, for `LIMIT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The number of members to skip.
    pub offset: u64,
    /// The number of members to return, at most.
    pub count: u64,
}

impl ZaddOptions {
    /// Sets [`condition`](#structfield.condition).
    #[must_use]
    pub fn condition(mut self, condition: Existence) -> Self {
        self.condition = Some(condition);
        self
    }

    /// Sets [`change`](#structfield.change).
    #[must_use]
    pub fn change(mut self, change: ScoreChange) -> Self {
        self.change = Some(change);
        self
    }

    /// Sets [`count_changed`](#structfield.count_changed).
    #[must_use]
    pub fn count_changed(mut self, count_changed: bool) -> Self {
        self.count_changed = count_changed;
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

/// A bound of a range of scores.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ScoreBound {
    /// The range includes this score, which may be infinite.
    Including(f64),
    /// The range excludes this score.
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
                // Writing to a string cannot fail.
                let _ = write!(text, "{score}");
                f(text.as_bytes())
            }
        }
    }
}

/// Adds members, each with its score, and returns how many are new.
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

/// Increments the score of a member and returns the result.
pub fn zincrby(key: impl ToArgument, by: f64, member: impl ToArgument) -> Request<f64> {
    Command::new("ZINCRBY").arg(key).arg(by).arg(member).returning()
}

/// Removes members and returns how many existed.
pub fn zrem(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<u64> {
    Command::new("ZREM").arg(key).args(members).returning()
}

/// Returns the score of a member.
pub fn zscore(key: impl ToArgument, member: impl ToArgument) -> Request<Option<f64>> {
    Command::new("ZSCORE").arg(key).arg(member).returning()
}

/// Returns the scores of members, in the order of the members.
pub fn zmscore(key: impl ToArgument, members: impl IntoIterator<Item: ToArgument>) -> Request<Vec<Option<f64>>> {
    Command::new("ZMSCORE").arg(key).args(members).returning()
}

/// Returns the number of members.
pub fn zcard(key: impl ToArgument) -> Request<u64> {
    Command::new("ZCARD").arg(key).returning()
}

/// Returns the number of members with a score in the range.
pub fn zcount(key: impl ToArgument, min: impl Into<ScoreBound>, max: impl Into<ScoreBound>) -> Request<u64> {
    Command::new("ZCOUNT").arg(key).arg(min.into()).arg(max.into()).returning()
}

/// Returns the rank of a member by ascending score, from 0.
pub fn zrank(key: impl ToArgument, member: impl ToArgument) -> Request<Option<u64>> {
    Command::new("ZRANK").arg(key).arg(member).returning()
}

/// Returns the rank of a member by descending score, from 0.
pub fn zrevrank(key: impl ToArgument, member: impl ToArgument) -> Request<Option<u64>> {
    Command::new("ZREVRANK").arg(key).arg(member).returning()
}

/// Returns the members with ranks from `start` to `stop`, both inclusive, and their scores. Negative ranks count from the end.
pub fn zrange(key: impl ToArgument, start: i64, stop: i64) -> Request<ScoredMembers> {
    Command::new("ZRANGE").arg(key).arg(start).arg(stop).arg("WITHSCORES").returning()
}

/// Returns the members with ranks from `start` to `stop` by descending score, both inclusive, and their scores.
pub fn zrevrange(key: impl ToArgument, start: i64, stop: i64) -> Request<ScoredMembers> {
    Command::new("ZREVRANGE").arg(key).arg(start).arg(stop).arg("WITHSCORES").returning()
}

/// Returns the members with a score in the range, and their scores.
pub fn zrangebyscore(
    key: impl ToArgument,
    min: impl Into<ScoreBound>,
    max: impl Into<ScoreBound>,
    limit: Option<Limit>,
) -> Request<ScoredMembers> {
    limited(Command::new("ZRANGEBYSCORE").arg(key).arg(min.into()).arg(max.into()), limit)
}

/// Returns the members with a score in the range by descending score, and their scores.
pub fn zrevrangebyscore(
    key: impl ToArgument,
    max: impl Into<ScoreBound>,
    min: impl Into<ScoreBound>,
    limit: Option<Limit>,
) -> Request<ScoredMembers> {
    limited(Command::new("ZREVRANGEBYSCORE").arg(key).arg(max.into()).arg(min.into()), limit)
}

fn limited(command: Command, limit: Option<Limit>) -> Request<ScoredMembers> {
    let command = command.arg("WITHSCORES");
    match limit {
        Some(limit) => command.arg("LIMIT").arg(limit.offset).arg(limit.count),
        None => command,
    }
    .returning()
}

/// Removes the members with ranks from `start` to `stop`, both inclusive, and returns how many.
pub fn zremrangebyrank(key: impl ToArgument, start: i64, stop: i64) -> Request<u64> {
    Command::new("ZREMRANGEBYRANK").arg(key).arg(start).arg(stop).returning()
}

/// Removes the members with a score in the range, and returns how many.
pub fn zremrangebyscore(key: impl ToArgument, min: impl Into<ScoreBound>, max: impl Into<ScoreBound>) -> Request<u64> {
    Command::new("ZREMRANGEBYSCORE").arg(key).arg(min.into()).arg(max.into()).returning()
}

/// Removes and returns the members with the smallest scores.
pub fn zpopmin(key: impl ToArgument, count: u64) -> Request<ScoredMembers> {
    Command::new("ZPOPMIN").arg(key).arg(count).returning()
}

/// Removes and returns the members with the largest scores.
pub fn zpopmax(key: impl ToArgument, count: u64) -> Request<ScoredMembers> {
    Command::new("ZPOPMAX").arg(key).arg(count).returning()
}

/// Stores the union of sorted sets, with the sums of the scores, and returns its size.
pub fn zunionstore(
    target: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<u64> {
    Command::new("ZUNIONSTORE").arg(target).counted(keys).returning()
}

/// Stores the intersection of sorted sets, with the sums of the scores, and returns its size.
pub fn zinterstore(
    target: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
) -> Request<u64> {
    Command::new("ZINTERSTORE").arg(target).counted(keys).returning()
}

/// Returns some of the members and their scores. Start with the cursor 0.
pub fn zscan(key: impl ToArgument, cursor: u64, options: &ScanOptions) -> Request<Scanned<(Bytes, f64)>> {
    options.add_to(Command::new("ZSCAN").arg(key).arg(cursor)).returning()
}
