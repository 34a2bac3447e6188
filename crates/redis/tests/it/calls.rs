//! All functions of `commands` against a real server, in both protocols: the types of the replies are right.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::Deserialize;
use tidewire_redis::commands::*;
use tidewire_redis::{
    Client, Error, ErrorCode, FromValue, Ignore, Invocation, Pipeline, ReplyTypes, Request, Script, Serde, Value,
};
use tokio::runtime::{Builder, Runtime};

use crate::servers::{options, resp2_and_resp3};

/// A client that waits for each reply.
struct Caller {
    runtime: Runtime,
    client: Client,
}

impl Caller {
    fn send<T: FromValue>(&self, request: Request<T>) -> Result<T, Error> {
        self.runtime.block_on(self.client.send(request))
    }

    #[track_caller]
    fn ok<T: FromValue>(&self, request: Request<T>) -> T {
        let shown = format!("{request:?}");
        self.send(request).unwrap_or_else(|error| panic!("{shown}: {error}"))
    }

    #[track_caller]
    fn is<T: FromValue + PartialEq + Debug>(&self, request: Request<T>, expected: impl Into<T>) {
        let shown = format!("{request:?}");
        match self.send(request) {
            Ok(result) => assert_eq!(result, expected.into(), "{shown}"),
            Err(error) => panic!("{shown}: {error}"),
        }
    }

    fn pipeline<S: ReplyTypes>(&self, pipeline: Pipeline<S>) -> S::Results {
        self.runtime.block_on(self.client.pipeline(pipeline)).expect("replies")
    }

    /// Returns the result, and whether the source of the script was sent.
    fn invoke<T: FromValue>(&self, invocation: &Invocation<T>) -> (Result<T, Error>, bool) {
        let before = self.scripts_run_by_source();
        let result = self.runtime.block_on(self.client.invoke(invocation));
        (result, self.scripts_run_by_source() > before)
    }

    /// Returns the number of scripts that the server was sent by source.
    fn scripts_run_by_source(&self) -> u32 {
        let calls = |line: &str| {
            let calls = line.strip_prefix("cmdstat_eval:calls=").or(line.strip_prefix("cmdstat_eval_ro:calls="))?;
            calls.split(',').next()?.parse::<u32>().ok()
        };
        self.ok(info(Some("commandstats"))).lines().filter_map(calls).sum()
    }
}

/// Runs a test with RESP2 and with RESP3.
fn in_both_versions(test: impl Fn(&Caller)) {
    for (server, is_resp2) in resp2_and_resp3() {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let client = runtime.block_on(async { Client::start(options(server.port())) });
        let caller = Caller { runtime, client };
        let reply = caller.ok(config_get("port").returning::<Value>());
        assert_eq!(matches!(reply, Value::Array(_)), is_resp2, "{reply:?}");
        test(&caller);
    }
}

#[expect(clippy::unnecessary_wraps, reason = "it is what is compared with")]
fn some(text: &'static str) -> Option<Bytes> {
    Some(Bytes::from(text))
}

fn all<const N: usize>(texts: [&'static str; N]) -> Vec<Bytes> {
    texts.map(Bytes::from).into()
}

fn set_of<const N: usize>(texts: [&'static str; N]) -> HashSet<Bytes> {
    all(texts).into_iter().collect()
}

fn scored<const N: usize>(members: [(&'static str, f64); N]) -> Vec<(Bytes, f64)> {
    members.map(|(member, score)| (Bytes::from(member), score)).into()
}

const HOUR: Duration = Duration::from_hours(1);

#[test]
fn strings() {
    in_both_versions(|c| {
        c.is(get("k"), None);
        c.is(set("k", "v"), ());
        c.is(get("k"), some("v"));
        c.is(set_with("k", "w", SetOptions::default().if_absent()), false);
        c.is(set_with("k", "w", SetOptions::default().if_present().expire_in(HOUR)), true);
        c.is(set_get("k", "x", SetOptions::default().expiry(Expiry::Keep)), some("w"));
        assert!(matches!(c.ok(ttl("k")), TimeToLive::In(left) if left <= HOUR));
        c.is(getex("k", Expiry::Keep), some("x"));
        c.is(getex("k", Expiry::Never), some("x"));
        c.is(ttl("k"), TimeToLive::Never);
        c.is(set_with("k", "y", SetOptions::default().expiry(Expiry::At(SystemTime::now() + HOUR))), true);
        c.is(getdel("k"), some("y"));
        c.is(mset([("a", 1), ("b", 2)]), ());
        c.is(msetnx(&HashMap::from([("b", "x"), ("c", "x")])), false);
        c.is(mget(["a", "none", "b"]), vec![some("1"), None, some("2")]);
        c.is(mget(["a", "none", "b"]).returning::<[Option<u8>; 3]>(), [Some(1), None, Some(2)]);
        c.is(incr("a"), 2);
        c.is(incrby("a", 10), 12);
        c.is(decr("a"), 11);
        c.is(decrby("a", 10), 1);
        c.is(incrbyfloat("a", 0.5), 1.5);
        c.is(incrbyfloat("huge", 1e20), 1e20);
        c.is(append("s", "hello"), 5_u64);
        c.is(strlen("s"), 5_u64);
        c.is(setrange("s", 1, "a"), 5_u64);
        c.is(getrange("s", 0, -2), Bytes::from("hall"));
        c.is(setbit("bits", 7, true), false);
        c.is(getbit("bits", 7), true);
        c.is(bitcount("bits"), 1_u64);
    });
}

#[test]
fn keys() {
    in_both_versions(|c| {
        c.ok(mset([("a", 1), ("b", 2)]));
        c.is(exists("a"), true);
        c.is(exists_count(["a", "b", "c"]), 2_u64);
        c.is(key_type("a"), "string");
        c.is(ttl("c"), TimeToLive::NoKey);
        c.is(expire("a", HOUR), true);
        c.is(expire("c", HOUR), false);
        c.is(expire_if("a", 2 * HOUR, ExpireIf::Shorter), false);
        c.is(expire_if("a", 2 * HOUR, ExpireIf::Longer), true);
        c.is(expire_at("a", SystemTime::now() + HOUR), true);
        c.is(expire_at_if("a", SystemTime::now() + HOUR, ExpireIf::None), false);
        c.is(persist("a"), true);
        c.is(copy("a", "b", false), false);
        c.is(copy("a", "b", true), true);
        c.is(rename("b", "c"), ());
        c.is(renamenx("c", "a"), false);
        c.is(touch(["a", "c"]), 2_u64);
        assert!(c.ok(randomkey()).is_some());
        let dumped = c.ok(dump("a")).expect("a key");
        c.is(restore("d", Some(HOUR), &dumped, false), ());
        c.is(restore("d", None, &dumped, true), ());
        let (cursor, found) = c.ok(scan(0, &ScanOptions::default().pattern("[cd]").count(1000).key_type("string")));
        assert_eq!((cursor, found.into_iter().collect::<HashSet<_>>()), (0, set_of(["c", "d"])));
        c.is(del(["a", "none"]), 1_u64);
        c.is(unlink(["c", "d"]), 2_u64);
        c.is(randomkey(), None);
    });
}

#[test]
fn hashes() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct Boat {
        name: String,
        crew: u8,
    }

    in_both_versions(|c| {
        c.is(hset("h", [("name", "Tern"), ("crew", "3")]), 2_u64);
        c.is(hgetall("h").returning::<Serde<Boat>>(), Serde(Boat { name: "Tern".into(), crew: 3 }));
        c.is(hgetall("h"), HashMap::from([("name".into(), "Tern".into()), ("crew".into(), "3".into())]));
        c.is(hgetall("none"), HashMap::new());
        c.is(hget("h", "name"), some("Tern"));
        c.is(hmget("h", ["crew", "none"]), vec![some("3"), None]);
        c.is(hsetnx("h", "crew", 4), false);
        c.is(hincrby("h", "crew", 2), 5);
        c.is(hincrbyfloat("h", "width", 1.5), 1.5);
        c.is(hstrlen("h", "name"), 4_u64);
        c.is(hexists("h", "none"), false);
        c.is(hdel("h", ["width", "none"]), 1_u64);
        match c.send(hexpire("h", HOUR, ["crew", "none"])) {
            Ok(results) => assert_eq!(results, [1, -2]),
            // Before Redis 7.4 and Valkey 9.
            Err(error) => assert!(error.to_string().contains("unknown command"), "{error}"),
        }
        c.is(hlen("h"), 2_u64);
        c.is(hkeys("h").returning::<HashSet<String>>(), HashSet::from(["name".to_owned(), "crew".to_owned()]));
        c.is(hvals("h"), all(["Tern", "5"]));
        let pairs = vec![("name".into(), "Tern".into()), ("crew".into(), "5".into())];
        c.is(hscan("h", 0, &ScanOptions::default().count(10)), (0, pairs));
        assert_eq!(c.ok(hrandfield("h", -3)).len(), 3);
    });
}

#[test]
fn lists() {
    in_both_versions(|c| {
        c.is(rpush("l", ["b", "c"]), 2_u64);
        c.is(lpush("l", ["a"]), 3_u64);
        c.is(lpushx("none", ["a"]), 0_u64);
        c.is(rpushx("l", ["d"]), 4_u64);
        c.is(lrange("l", 0, -1), all(["a", "b", "c", "d"]));
        c.is(llen("l"), 4_u64);
        c.is(lindex("l", -1), some("d"));
        c.is(lset("l", 0, "A"), ());
        c.is(lpos("l", "c"), Some(2));
        c.is(lpos("l", "none"), None);
        c.is(linsert_before("l", "b", "a2"), 5);
        c.is(linsert_after("l", "none", "x"), -1);
        c.is(lrem("l", 0, "a2"), 1_u64);
        c.is(lmove("l", ListEnd::Left, "m", ListEnd::Right), some("A"));
        c.is(lpop("l"), some("b"));
        c.is(rpop("l"), some("d"));
        c.is(lpop_many("none", 2), None);
        c.is(rpop_many("l", 2), Some(all(["c"])));
        c.is(ltrim("m", 1, 0), ());
        c.is(lrange("m", 0, -1), vec![]);
    });
}

#[test]
fn sets() {
    in_both_versions(|c| {
        c.is(sadd("s", ["a", "b", "c"]), 3_u64);
        c.is(sadd("t", ["b", "c", "d"]), 3_u64);
        c.is(srem("s", ["c", "x"]), 1_u64);
        c.is(smembers("s"), set_of(["a", "b"]));
        c.is(sismember("s", "a"), true);
        c.is(smismember("s", ["a", "x"]), vec![true, false]);
        c.is(scard("s"), 2_u64);
        c.is(sinter(["s", "t"]), set_of(["b"]));
        c.is(sunion(["s", "t"]), set_of(["a", "b", "c", "d"]));
        c.is(sdiff(["s", "t"]), set_of(["a"]));
        c.is(sinterstore("u", ["s", "t"]), 1_u64);
        c.is(sunionstore("u", ["s", "t"]), 4_u64);
        c.is(sdiffstore("u", ["s", "t"]), 1_u64);
        c.is(smove("s", "t", "a"), true);
        assert_eq!(c.ok(srandmember("t", -9)).len(), 9);
        c.is(sscan("s", 0, &ScanOptions::default()), (0, all(["b"])));
        c.is(spop("s"), some("b"));
        c.is(spop("s"), None);
        assert_eq!(c.ok(spop_many("t", 3)).len(), 3);
    });
}

#[test]
fn sorted_sets() {
    in_both_versions(|c| {
        c.is(zadd("z", [("a", 1.0), ("b", 2.5), ("c", f64::INFINITY)], ZaddOptions::default()), 3_u64);
        let greater =
            ZaddOptions::default().condition(Existence::Present).change(ScoreChange::Greater).count_changed(true);
        c.is(zadd("z", [("a", 0.0), ("b", 3.0), ("x", 1.0)], greater), 1_u64);
        c.is(zrange("z", 0, -1), scored([("a", 1.0), ("b", 3.0), ("c", f64::INFINITY)]));
        c.is(zrange("none", 0, -1), vec![]);
        let smaller = ZaddOptions::default().change(ScoreChange::Smaller);
        c.is(zadd("w", [("a", 2.0)], smaller), 1_u64);
        c.is(zadd("w", [("a", 3.0)], smaller), 0_u64);
        c.is(zscore("w", "a"), Some(2.0));
        c.is(zadd("w", [("a", 1.0)], smaller.count_changed(true)), 1_u64);
        c.is(zadd("w", [("a", 9.0), ("b", 9.0)], ZaddOptions::default().condition(Existence::Absent)), 1_u64);
        c.is(zrangebyscore("w", ScoreBound::Including(1.0), ScoreBound::Excluding(9.0), None), scored([("a", 1.0)]));
        c.is(zrevrange("z", 0, 0), scored([("c", f64::INFINITY)]));
        c.is(
            zrangebyscore("z", ScoreBound::Excluding(1.0), 10.0, Some(Limit { offset: 0, count: 5 })),
            scored([("b", 3.0)]),
        );
        c.is(zrevrangebyscore("z", 3.0, f64::NEG_INFINITY, None), scored([("b", 3.0), ("a", 1.0)]));
        c.is(zscore("z", "c"), Some(f64::INFINITY));
        c.is(zscore("z", "none"), None);
        c.is(zmscore("z", ["a", "none"]), vec![Some(1.0), None]);
        c.is(zincrby("z", 0.5, "a"), 1.5);
        c.is(zcard("z"), 3_u64);
        c.is(zcount("z", 0.0, ScoreBound::Excluding(3.0)), 1_u64);
        c.is(zrank("z", "b"), Some(1));
        c.is(zrevrank("z", "none"), None);
        c.is(zscan("z", 0, &ScanOptions::default().pattern("a")), (0, scored([("a", 1.5)])));
        c.is(zunionstore("u", ["z", "none"]), 3_u64);
        c.is(zinterstore("u", ["z", "z"]), 3_u64);
        c.is(zpopmin("u", 1), scored([("a", 3.0)]));
        c.is(zpopmax("u", 5), scored([("c", f64::INFINITY), ("b", 6.0)]));
        c.is(zpopmax("u", 5), vec![]);
        c.is(zremrangebyscore("z", 0.0, 2.0), 1_u64);
        c.is(zremrangebyrank("z", 0, 0), 1_u64);
        c.is(zrem("z", ["c", "b"]), 1_u64);
    });
}

#[test]
fn streams_and_groups() {
    let id = |milliseconds| StreamId { milliseconds, sequence: 0 };
    let entry = |milliseconds| StreamEntry { id: id(milliseconds), fields: vec![("f".into(), "v".into())] };
    let at = |milliseconds| XaddOptions::default().id(id(milliseconds));
    in_both_versions(|c| {
        c.is(xadd("s", [("f", "v")], XaddOptions::default().only_existing(true)), None);
        for milliseconds in 1..=3 {
            c.is(xadd("s", [("f", "v")], at(milliseconds)), Some(id(milliseconds)));
        }
        c.is(xlen("s"), 3_u64);
        c.is(xrange("s", StreamId::ZERO, StreamId::MAX, Some(2)), vec![entry(1), entry(2)]);
        c.is(xrevrange("s", StreamId::MAX, StreamId::ZERO, Some(1)), vec![entry(3)]);
        c.is(xread([("s", id(2)), ("none", id(0))], Some(5)), Some(vec![("s".into(), vec![entry(3)])]));
        c.is(xread([("s", id(3))], None), None);

        c.is(xgroup_create("s", "g", StreamStart::Beginning, false), ());
        let again = c.send(xgroup_create("s", "g", StreamStart::Now, false)).expect_err("it exists");
        assert_eq!(again.code(), Some(&ErrorCode::BusyGroup));
        let none = c.send(xreadgroup("none", "c", [("s", GroupRead::New)], XreadgroupOptions::default()));
        assert_eq!(none.expect_err("no group").code(), Some(&ErrorCode::NoGroup));
        c.is(xgroup_createconsumer("s", "g", "c"), true);
        c.is(xpending("s", "g"), PendingSummary { count: 0, range: None, consumers: vec![] });
        let two = XreadgroupOptions::default().count(2);
        c.is(xreadgroup("g", "c", [("s", GroupRead::New)], two), Some(vec![("s".into(), vec![entry(1), entry(2)])]));
        let summary = PendingSummary { count: 2, range: Some((id(1), id(2))), consumers: vec![("c".into(), 2)] };
        c.is(xpending("s", "g"), summary);
        let pending = c.ok(xpending_range("s", "g", Duration::ZERO, id(0), StreamId::MAX, 10));
        assert_eq!(
            (pending.len(), pending[1].id, &pending[1].consumer[..], pending[1].deliveries),
            (2, id(2), &b"c"[..], 1)
        );

        // A pending entry that is deleted has no fields.
        c.is(xdel("s", [id(1)]), 1_u64);
        let again = [("s", GroupRead::Pending(id(0)))];
        let deleted = StreamEntry { id: id(1), fields: vec![] };
        c.is(xreadgroup("g", "c", again, two), Some(vec![("s".into(), vec![deleted, entry(2)])]));
        c.is(xclaim("s", "g", "d", Duration::ZERO, [id(2)]), vec![Some(entry(2))]);
        let claimed = Claimed { next: StreamId::ZERO, entries: vec![entry(2)], deleted: vec![id(1)] };
        c.is(xautoclaim("s", "g", "e", Duration::ZERO, StreamId::ZERO, Some(10)), claimed);
        c.is(xack("s", "g", [id(2), id(3)]), 1_u64);
        c.is(xgroup_delconsumer("s", "g", "e"), 0_u64);
        c.is(xgroup_setid("s", "g", StreamStart::After(id(2))), ());
        c.is(
            xreadgroup("g", "c", [("s", GroupRead::New)], XreadgroupOptions::default().no_ack(true)),
            Some(vec![("s".into(), vec![entry(3)])]),
        );
        c.is(xreadgroup("g", "c", [("s", GroupRead::New)], two), None);
        c.is(xgroup_destroy("s", "g"), true);
        c.is(xadd("s", [("f", "v")], at(4).trim(Trim::To(2))), Some(id(4)));
        c.is(xtrim("s", Trim::Before(id(4))), 1_u64);
        c.is(xtrim("s", Trim::ToAbout(1)), 0_u64);
        c.is(xtrim("s", Trim::BeforeAbout(id(4))), 0_u64);
    });
}

#[test]
fn scripts_and_functions() {
    in_both_versions(|c| {
        c.is(script_flush(), ());
        let script = Script::new("return {KEYS[1], ARGV[1], redis.call('INCR', KEYS[1])}");
        c.is(script_exists([script.digest()]), vec![false]);
        let invocation = script.returning::<(String, i64, i64)>().key("n").arg(7);
        assert!(matches!(c.invoke(&invocation), (Ok((key, 7, 1)), true) if key == "n"));
        assert!(matches!(c.invoke(&invocation), (Ok((_, 7, 2)), false)));
        c.is(script_flush(), ());
        c.is(script.load(), script.digest());
        assert!(matches!(c.invoke(&invocation), (Ok((_, 7, 3)), false)));

        // A script that fails is not sent again.
        let failing = Script::new("redis.call('INCR', KEYS[1]) return redis.error_reply('MINE no')");
        c.ok(failing.load());
        let (result, was_sent) = c.invoke(&failing.returning::<Ignore>().key("m"));
        assert_eq!(result.expect_err("the error of the script").code(), Some(&ErrorCode::Other("MINE".into())));
        assert!(!was_sent);
        c.is(get("m"), some("1"));
        let reading = Script::new("return 5").returning::<u8>().read_only();
        assert!(matches!(c.invoke(&reading), (Ok(5), true)));
        let idle = c.send(script_kill()).expect_err("nothing runs");
        assert_eq!(idle.code(), Some(&ErrorCode::NotBusy));

        let library = "#!lua name=tide\nredis.register_function{function_name='twice', callback=function(keys, args) \
                       return 2 * args[1] end, flags={'no-writes'}}";
        c.is(function_load(library, false), "tide");
        c.is(function_load(library, true), "tide");
        c.is(fcall::<i64>("twice", ["k"], [4]), 8);
        c.is(fcall_ro::<i64>("twice", None::<&str>, [4]), 8);
        c.is(function_delete("tide"), ());
        c.is(function_flush(), ());
    });
}

#[test]
fn server_commands() {
    in_both_versions(|c| {
        c.is(ping(), Ignore);
        c.is(echo("a"), Bytes::from("a"));
        assert!(c.ok(time()).0 > SystemTime::UNIX_EPOCH + HOUR);
        c.is(dbsize(), 0_u64);
        assert!(c.ok(info(Some("server"))).contains("redis_version"));
        c.is(config_set("maxmemory-samples", 7), ());
        c.is(config_get("maxmemory-samples"), HashMap::from([("maxmemory-samples".into(), "7".into())]));
        assert!(c.ok(client_id()) > 0);
        c.is(publish("channel", "message"), 0_u64);
        c.is(memory_usage("none"), None);
        // The other functions change only this database.
        let elsewhere =
            Script::new("redis.call('SELECT', 1) return redis.call('SET', KEYS[1], 'v')").returning::<Ignore>();
        let databases = || c.ok(info(Some("keyspace"))).lines().filter(|line| line.starts_with("db")).count();
        for (flush, expected) in [(flushdb(), 1), (flushall(), 0)] {
            c.ok(set("k", "v"));
            c.invoke(&elsewhere.clone().key("k")).0.expect("a key in database 1");
            assert_eq!(databases(), 2);
            c.is(flush, ());
            assert_eq!(databases(), expected);
        }
    });
}

#[test]
fn pipeline_has_a_result_for_each_command() {
    in_both_versions(|c| {
        c.ok(rpush("l", ["a"]));
        let (set, wrong, text, ignored) = c.pipeline(
            Pipeline::new()
                .then(set("k", "v"))
                .then(incr("l"))
                .then(get("k").returning::<u8>())
                .then(lrange("l", 0, -1).returning::<Ignore>()),
        );
        assert!(set.is_ok() && ignored.is_ok());
        assert_eq!(wrong.expect_err("a list").code(), Some(&ErrorCode::WrongType));
        assert!(matches!(text, Err(Error::Conversion(_))));

        let many: Pipeline<Vec<_>> = (0..1000).map(|n| incrby("n", n)).collect();
        let sums: Vec<_> = c.pipeline(many).into_iter().map(|sum| sum.expect("a sum")).collect();
        let expected: Vec<i64> = (0..1000).map(|n| n * (n + 1) / 2).collect();
        assert_eq!(sums, expected);
    });
}
