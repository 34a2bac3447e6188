//! The encoding of options, and the conversion of unusual replies.

use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::convert::FromValue;
use crate::request::Request;
use crate::resp::{Decoder, Message, Value};

#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "requests are made in place")]
fn is<T>(request: Request<T>, expected: &str) {
    let mut bytes = bytes::BytesMut::from(request.command().as_bytes());
    let Ok(Some(Message::Reply(Value::Array(arguments)))) = Decoder::default().decode(&mut bytes) else {
        panic!("not one command: {request:?}");
    };
    let words: Vec<_> = arguments.into_iter().map(|argument| String::from_value(argument).expect("text")).collect();
    assert_eq!(words.join(" "), expected);
    assert!(bytes.is_empty(), "more than one command");
}

fn text(text: &'static str) -> Value {
    Value::from(text)
}

fn id(milliseconds: u64, sequence: u64) -> StreamId {
    StreamId { milliseconds, sequence }
}

#[test]
fn options_of_set() {
    let second = Duration::from_secs(1);
    is(set_with("k", "v", SetOptions::default()), "SET k v");
    is(set_with("k", "v", SetOptions::default().if_present().expiry(Expiry::Keep)), "SET k v XX KEEPTTL");
    is(set_get("k", "v", SetOptions::default().if_absent().expire_in(second)), "SET k v NX GET PX 1000");
    is(set_with("k", 1, SetOptions::default().expiry(Expiry::At(UNIX_EPOCH + second))), "SET k 1 PXAT 1000");
    is(set_with("k", 1, SetOptions::default().expiry(Expiry::Never)), "SET k 1");
    is(getex("k", Expiry::Never), "GETEX k PERSIST");
    is(getex("k", Expiry::Keep), "GETEX k");
}

#[test]
fn short_time_to_live_is_not_rounded_to_none() {
    is(expire("k", Duration::from_nanos(1)), "PEXPIRE k 1");
    is(expire_if("k", Duration::from_micros(1500), ExpireIf::Longer), "PEXPIRE k 2 GT");
    is(expire_at("k", UNIX_EPOCH - Duration::from_secs(5)), "PEXPIREAT k 0");
    is(restore("k", Some(Duration::ZERO), "v", false), "RESTORE k 1 v");
    is(restore("k", None, "v", true), "RESTORE k 0 v REPLACE");
}

#[test]
fn timeouts_of_blocking_commands() {
    let (short, second) = (Duration::from_nanos(1), Duration::from_secs(1));
    is(blpop(["a", "b"], short), "BLPOP a b 0.001");
    is(brpop(["a"], Duration::MAX), "BRPOP a 0");
    is(bzmpop(["a"], ScoreEnd::Lowest, 2, second), "BZMPOP 1 1 a MIN COUNT 2");
    is(wait(1, short), "WAIT 1 1");
    is(waitaof(true, 2, second), "WAITAOF 1 2 1000");
    is(waitaof(false, 0, Duration::MAX), "WAITAOF 0 0 0");
    is(xread_blocking([("s", StreamStart::Now)], None, Duration::MAX), "XREAD BLOCK 0 STREAMS s $");
}

#[test]
fn times_to_live() {
    for (reply, expected) in [
        (-2, Some(TimeToLive::NoKey)),
        (-1, Some(TimeToLive::Never)),
        (1500, Some(TimeToLive::In(Duration::from_millis(1500)))),
        (-3, None),
    ] {
        assert_eq!(TimeToLive::from_value(reply.into()).ok(), expected);
    }
}

#[test]
fn scores_stand_before_members() {
    is(zadd("k", [("a", 1.0), ("b", f64::INFINITY)], ZaddOptions::default()), "ZADD k 1 a inf b");
    let options = ZaddOptions::default().condition(Existence::Present).change(ScoreChange::Greater).count_changed(true);
    is(zadd("k", [("a", 1e20)], options), "ZADD k XX GT CH 100000000000000000000 a");
    is(
        zrangebyscore("k", ScoreBound::Excluding(1.5), f64::INFINITY, Some(Limit { offset: 0, count: 10 })),
        "ZRANGEBYSCORE k (1.5 inf WITHSCORES LIMIT 0 10",
    );
    is(zunionstore("t", ["a", "b"]), "ZUNIONSTORE t 2 a b");
}

#[test]
fn streams_stand_before_their_positions() {
    is(xread([("a", StreamId::ZERO), ("b", id(5, 1))], Some(10)), "XREAD COUNT 10 STREAMS a b 0-0 5-1");
    let streams = [("a", GroupRead::New), ("b", GroupRead::Pending(id(1, 2)))];
    let options = XreadgroupOptions::default().count(3).no_ack(true);
    is(xreadgroup("g", "c", streams, options), "XREADGROUP GROUP g c COUNT 3 NOACK STREAMS a b > 1-2");
    let options = XaddOptions::default().trim(Trim::ToAbout(100)).only_existing(true);
    is(xadd("s", [("f", 1)], options), "XADD s NOMKSTREAM MAXLEN ~ 100 * f 1");
    is(xadd("s", [("f", 1)], XaddOptions::default().id(StreamId::MAX)), &format!("XADD s {} f 1", StreamId::MAX));
    is(xgroup_create("s", "g", StreamStart::Now, true), "XGROUP CREATE s g $ MKSTREAM");
    is(
        xpending_range("s", "g", Duration::from_secs(1), StreamId::ZERO, id(9, 9), 5),
        "XPENDING s g IDLE 1000 0-0 9-9 5",
    );
}

#[test]
fn hashes_scans_and_functions() {
    is(hset("k", [("f", "v"), ("g", "w")]), "HSET k f v g w");
    is(hexpire("k", Duration::from_secs(1), ["f", "g"]), "HPEXPIRE k 1000 FIELDS 2 f g");
    is(
        scan(0, &ScanOptions::default().pattern("a*").count(100).key_type("hash")),
        "SCAN 0 MATCH a* COUNT 100 TYPE hash",
    );
    is(hscan("k", 7, &ScanOptions::default().key_type("hash")), "HSCAN k 7");
    is(fcall::<i64>("f", ["a"], [1, 2]), "FCALL f 1 a 1 2");
    is(lmove("a", ListEnd::Left, "b", ListEnd::Right), "LMOVE a b LEFT RIGHT");
}

#[test]
fn identifiers_are_read_and_written() {
    for id in [StreamId::ZERO, StreamId::MAX, id(1_700_000_000_000, 3)] {
        let written = id.with_bytes(bytes::Bytes::copy_from_slice);
        assert_eq!(written, id.to_string());
        assert_eq!(StreamId::from_value(Value::Bulk(written)), Ok(id));
    }
    for bad in ["", "1", "1-", "-1", "1-2-3", "a-1"] {
        assert!(StreamId::from_value(text(bad)).is_err(), "{bad}");
    }
}

#[test]
fn entries_that_were_deleted_have_no_fields() {
    let entry = |fields| Value::Array(vec![text("1-1"), fields]);
    let read = StreamEntry::from_value(entry(Value::Null));
    assert_eq!(read, Ok(StreamEntry { id: id(1, 1), fields: vec![] }));
    let full = StreamEntry::from_value(entry(Value::Array(vec![text("f"), text("v")])));
    assert_eq!(full, Ok(StreamEntry { id: id(1, 1), fields: vec![("f".into(), "v".into())] }));

    // Redis 6 has two parts and null for what was deleted, Redis 7 has a third part for that.
    let old = Value::Array(vec![text("0-0"), Value::Array(vec![Value::Null, entry(Value::Array(vec![]))])]);
    let claimed = Claimed::from_value(old).expect("of Redis 6");
    assert_eq!((claimed.next, claimed.entries.len(), claimed.deleted), (StreamId::ZERO, 1, vec![]));
    let new = Value::Array(vec![text("2-0"), Value::Array(vec![]), Value::Array(vec![text("1-1")])]);
    let claimed = Claimed::from_value(new).expect("of Redis 7");
    assert_eq!((claimed.next, claimed.entries.len(), claimed.deleted), (id(2, 0), 0, vec![id(1, 1)]));
}

#[test]
fn pending_summaries_may_be_empty() {
    let empty = Value::Array(vec![0.into(), Value::Null, Value::Null, Value::Null]);
    let summary = PendingSummary::from_value(empty).expect("empty");
    assert_eq!(summary, PendingSummary { count: 0, range: None, consumers: vec![] });
    // The counts are strings.
    let consumers = Value::Array(vec![Value::Array(vec![text("c"), text("2")])]);
    let full = Value::Array(vec![2.into(), text("1-1"), text("2-1"), consumers]);
    let summary = PendingSummary::from_value(full).expect("full");
    assert_eq!((summary.range, summary.consumers), (Some((id(1, 1), id(2, 1))), vec![("c".into(), 2)]));
}

#[test]
fn server_time_is_converted() {
    let reply = Value::Array(vec![text("1"), text("500000")]);
    assert_eq!(ServerTime::from_value(reply), Ok(ServerTime(UNIX_EPOCH + Duration::from_millis(1500))));
    let far = Value::Array(vec![text("18446744073709551615"), text("4294967295")]);
    assert!(ServerTime::from_value(far).is_err());
}
