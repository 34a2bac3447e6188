//! Client-side caching.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tidewire_redis::cache::{CacheOptions, CacheStats};
use tidewire_redis::{
    Client, Command, CommandError, ConnectionState, Error, Login, Options, Request, Value, WhileDown, commands,
};
use tidewire_testkit::{CloseMode, FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async};
use tokio::task::JoinSet;

use crate::servers::{Scripted, greeting, options};

fn caching(port: u16) -> Options {
    options(port).cache(CacheOptions::default())
}

async fn get(client: &Client, key: &str) -> Option<String> {
    client.cached(commands::get(key).returning()).await.unwrap()
}

/// Returns how often the server has executed a command.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.cli(["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

fn cache(client: &Client) -> CacheStats {
    client.stats().cache
}

#[tokio::test(flavor = "multi_thread")]
async fn second_read_is_answered_from_memory() {
    let server = RedisServer::start();
    server.cli(["SET", "tide", "high"]);
    server.cli(["HSET", "boat", "name", "Tern", "crew", "3"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    for _ in 0..10 {
        assert_eq!(get(&client, "tide").await.as_deref(), Some("high"));
        // Null is kept as well.
        assert_eq!(get(&client, "nothing").await, None);
        let boat: Vec<(String, String)> = client.cached(commands::hgetall("boat").returning()).await.unwrap();
        assert_eq!(boat.len(), 2);
        // Another command of the same key has its own reply, and each caller its own type.
        let crew: u8 = client.cached(Command::new("HGET").arg("boat").arg("crew").returning()).await.unwrap();
        let text: String = client.cached(Command::new("HGET").arg("boat").arg("crew").returning()).await.unwrap();
        assert_eq!((crew, &*text), (3, "3"));
    }
    assert_eq!(["get", "hgetall", "hget"].map(|command| calls(&server, command)), [2, 1, 1]);
    let stats = cache(&client);
    assert_eq!((stats.is_tracking, stats.misses, stats.hits, stats.entries), (true, 4, 46, 4));
    assert!(stats.bytes > 4 * 256, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn change_by_another_client_removes_the_entries_of_the_key() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    let other = Client::connect(options(server.port())).await.unwrap();
    for (change, expected) in [
        (vec!["SET", "k", "2"], Some("2")),
        (vec!["APPEND", "k", "x"], Some("2x")),
        (vec!["DEL", "k"], None),
        (vec!["SET", "k", "3"], Some("3")),
        (vec!["PEXPIRE", "k", "1"], None),
        (vec!["SET", "k", "4"], Some("4")),
        (vec!["FLUSHALL"], None),
        (vec!["MSET", "k", "5", "l", "6"], Some("5")),
        (vec!["EVAL", "return redis.call('SET', KEYS[1], 7)", "1", "k"], Some("7")),
        (vec!["RENAME", "l", "k"], Some("6")),
    ] {
        get(&client, "k").await;
        let _: u64 = client.cached(commands::strlen("k").returning()).await.unwrap();
        assert_eq!(cache(&client).entries, 2, "{change:?}");
        let before = cache(&client);
        let request = Command::new(change[0]).args(&change[1..]).returning::<Value>();
        other.send(request).await.unwrap();
        wait_until_async("both entries are removed", PATIENCE, async || cache(&client).entries == 0).await;
        let after = cache(&client);
        match change[0] {
            "FLUSHALL" => assert_eq!(after.flushes, before.flushes + 1),
            _ => assert_eq!(after.invalidated, before.invalidated + 2, "{change:?}"),
        }
        wait_until_async("the new value", PATIENCE, async || get(&client, "k").await.as_deref() == expected).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn own_write_removes_the_entry() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    for number in 1..=100 {
        client.send(commands::set("k", number)).await.unwrap();
        let expected = number.to_string();
        wait_until_async("the new value", PATIENCE, async || get(&client, "k").await.as_ref() == Some(&expected)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_reads_are_not_tracked() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    // The handshake has made the server track the next command.
    let _: Option<String> = client.send(commands::get("first").returning()).await.unwrap();
    for key in ["a", "b", "c"] {
        let _: Option<String> = client.send(commands::get(key).returning()).await.unwrap();
    }
    get(&client, "d").await;
    assert!(server.cli(["INFO", "stats"]).contains("tracking_total_keys:2"), "{}", server.cli(["INFO", "stats"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_reads_of_a_command_load_once() {
    let server = RedisServer::start();
    server.cli(["SET", "k", "v"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    server.pause();
    let mut readers = JoinSet::new();
    for _ in 0..1000 {
        let client = client.clone();
        readers.spawn(async move { get(&client, "k").await });
    }
    let waiting = async || cache(&client).misses + cache(&client).coalesced == 1000;
    wait_until_async("all readers wait", PATIENCE, waiting).await;
    server.resume();
    while let Some(value) = readers.join_next().await {
        assert_eq!(value.unwrap().as_deref(), Some("v"));
    }
    let stats = cache(&client);
    assert_eq!((calls(&server, "get"), stats.misses, stats.coalesced), (1, 1, 999));
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_that_goes_away_does_not_fail_the_others() {
    let server = RedisServer::start();
    server.cli(["SET", "k", "v"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    server.pause();
    let read = |client: &Client| {
        let client = client.clone();
        tokio::spawn(async move { get(&client, "k").await })
    };
    let leader = read(&client);
    wait_until_async("the command is written", PATIENCE, async || client.stats().in_flight == 2).await;
    let others = [read(&client), read(&client)];
    wait_until_async("the others wait", PATIENCE, async || cache(&client).coalesced == 2).await;
    leader.abort();
    assert!(leader.await.unwrap_err().is_cancelled());
    server.resume();
    for other in others {
        assert_eq!(other.await.unwrap().as_deref(), Some("v"));
    }
    assert_eq!((calls(&server, "get"), cache(&client).entries), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn load_that_all_readers_have_left_is_forgotten() {
    let server = RedisServer::start();
    server.cli(["SET", "k", "v"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    server.pause();
    let reader = tokio::spawn({
        let client = client.clone();
        async move { get(&client, "k").await }
    });
    wait_until_async("the command is written", PATIENCE, async || client.stats().in_flight == 2).await;
    reader.abort();
    assert!(reader.await.unwrap_err().is_cancelled());
    server.resume();
    assert_eq!(get(&client, "k").await.as_deref(), Some("v"));
    let stats = cache(&client);
    assert_eq!((stats.misses, stats.coalesced, stats.entries), (2, 0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_with_a_longer_timeout_reads_again() {
    let server = RedisServer::start();
    server.cli(["SET", "k", "v"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    server.pause();
    let short = tokio::spawn({
        let client = client.with_timeout(Duration::from_millis(200));
        async move { client.cached(commands::get("k").returning::<String>()).await }
    });
    wait_until_async("the command is written", PATIENCE, async || cache(&client).misses == 1).await;
    let long = tokio::spawn({
        let client = client.clone();
        async move { get(&client, "k").await }
    });
    wait_until_async("the other reads", PATIENCE, async || cache(&client).coalesced + cache(&client).misses >= 2).await;
    let ended = short.await.unwrap();
    assert!(matches!(ended, Err(Error::TimedOut { .. })), "{ended:?}");
    wait_until_async("the other has sent it", PATIENCE, async || cache(&client).misses == 2).await;
    server.resume();
    assert_eq!(long.await.unwrap().as_deref(), Some("v"));
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_with_a_shorter_timeout_does_not_wait_for_the_load() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    server.pause();
    let leader = tokio::spawn({
        let client = client.clone();
        async move { get(&client, "k").await }
    });
    wait_until_async("the command is written", PATIENCE, async || cache(&client).misses == 1).await;
    let short = client.with_timeout(Duration::from_millis(20));
    let ended = short.cached(commands::get("k").returning::<Option<String>>()).await;
    assert!(matches!(ended, Err(Error::TimedOut { .. })), "{ended:?}");
    assert_eq!(client.stats().timeouts.waiting, 1);
    server.resume();
    assert_eq!(leader.await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_not_kept() {
    let server = RedisServer::start();
    server.cli(["LPUSH", "k", "v"]);
    let client = Client::connect(caching(server.port())).await.unwrap();
    for _ in 0..2 {
        let ended = client.cached(commands::get("k").returning::<String>()).await;
        assert!(matches!(ended, Err(Error::Server(_))), "{ended:?}");
    }
    assert_eq!((cache(&client).misses, cache(&client).entries), (2, 0));
    // A reply that does not convert is one for other callers. An invalidation of `k` may still come, so it is another key.
    server.cli(["SET", "text", "v"]);
    let ended = client.cached(commands::get("text").returning::<u64>()).await;
    assert!(matches!(ended, Err(Error::Conversion(_))), "{ended:?}");
    assert_eq!(get(&client, "text").await.as_deref(), Some("v"));
    assert_eq!((cache(&client).misses, cache(&client).hits), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_commands_are_rejected_before_anything_is_sent() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    for command in [Command::new("SET").arg("k").arg(1), Command::new("MGET").arg("k"), Command::new("PING")] {
        let ended = client.cached::<Value>(command).await;
        assert!(matches!(ended, Err(Error::Command(CommandError::NotCacheable(_)))), "{ended:?}");
    }
    assert_eq!((client.stats().requests, server.cli(["EXISTS", "k"])), (0, "0".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_empties_the_cache() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::connect(caching(proxy.addr().port())).await.unwrap();
    let mut states = client.states();
    for round in 0..20_u64 {
        let key = format!("k{round}");
        server.cli(["SET", &key, "old"]);
        assert_eq!(get(&client, &key).await.as_deref(), Some("old"));
        proxy.cut(CloseMode::Reset);
        while states.next().await.unwrap().state != ConnectionState::Failed {}
        assert_eq!(cache(&client).entries, 0, "the state was published before the cache was empty");
        // No invalidation of this reaches the client.
        server.cli(["SET", &key, "new"]);
        client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
        assert_eq!(get(&client, &key).await.as_deref(), Some("new"));
        assert!(cache(&client).is_tracking);
        // The new connection is tracked as well.
        server.cli(["SET", &key, "newer"]);
        wait_until_async("the newest value", PATIENCE, async || get(&client, &key).await.as_deref() == Some("newer"))
            .await;
    }
    assert!(cache(&client).flushes >= 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_client_reads_nothing_from_memory() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    get(&client, "k").await;
    client.close(PATIENCE).await;
    let ended = client.cached(commands::get("k").returning::<Option<String>>()).await;
    assert!(matches!(ended, Err(Error::Closed { .. })), "{ended:?}");
    assert_eq!((cache(&client).entries, cache(&client).bytes), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_work_without_tracking() {
    let refused = |rules: &str| RedisServer::options().user("app", format!("on >pass ~* +@all {rules}")).start();
    let resp2 = RedisServer::options().config("rename-command HELLO \"\"").start();
    for (server, login) in [
        (refused("-client|tracking"), Some(Login::new("pass").user("app"))),
        (refused("-client|caching"), Some(Login::new("pass").user("app"))),
        (resp2, None),
    ] {
        let mut options = caching(server.port());
        options.login = login;
        let client = Client::connect(options).await.unwrap();
        server.cli(["SET", "k", "1"]);
        assert_eq!(get(&client, "k").await.as_deref(), Some("1"));
        server.cli(["SET", "k", "2"]);
        assert_eq!(get(&client, "k").await.as_deref(), Some("2"));
        let stats = cache(&client);
        assert_eq!((stats.is_tracking, stats.bypassed, stats.entries), (false, 2, 0));
    }
    // A client without a cache reads like `send`.
    let server = RedisServer::start();
    let client = Client::connect(options(server.port())).await.unwrap();
    for _ in 0..2 {
        assert_eq!(get(&client, "k").await, None);
    }
    assert_eq!((calls(&server, "get"), cache(&client)), (2, CacheStats::default()));
}

#[tokio::test(flavor = "multi_thread")]
async fn exclusive_connections_are_not_tracked() {
    let server = RedisServer::start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    let popped: Option<(String, String)> =
        client.send(Command::new("BLPOP").arg("list").arg("0.01").returning()).await.unwrap();
    assert_eq!((popped, client.stats().exclusive.open), (None, 1));
    assert_eq!(calls(&server, "client|tracking"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_the_server_forgets_are_removed() {
    let server = RedisServer::options().config("tracking-table-max-keys 10").start();
    let client = Client::connect(caching(server.port())).await.unwrap();
    for key in 0..100 {
        get(&client, &key.to_string()).await;
    }
    wait_until_async("only tracked keys are kept", PATIENCE, async || cache(&client).entries <= 10).await;
    assert!(cache(&client).invalidated >= 90);
}

#[tokio::test(flavor = "multi_thread")]
async fn entry_is_read_again_at_its_maximum_age() {
    let server = RedisServer::start();
    let cache_options = CacheOptions::default().max_age(Duration::from_millis(30));
    let client = Client::connect(options(server.port()).cache(cache_options)).await.unwrap();
    wait_until_async("an entry was too old", PATIENCE, async || {
        get(&client, "k").await;
        cache(&client).expired > 0
    })
    .await;
    assert!(calls(&server, "get") >= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_has_a_limit() {
    let server = RedisServer::start();
    let limits = CacheOptions::default().max_bytes(20_000).max_entry_bytes(5_000);
    let client = Client::connect(options(server.port()).cache(limits)).await.unwrap();
    server.cli(["SET", "large", &"x".repeat(5_000)]);
    for _ in 0..2 {
        assert_eq!(get(&client, "large").await.unwrap().len(), 5_000);
    }
    assert_eq!((cache(&client).oversized, cache(&client).entries), (2, 0));
    for key in 0..500 {
        get(&client, &key.to_string()).await;
        assert!(cache(&client).bytes <= 20_000);
    }
    let stats = cache(&client);
    assert_eq!(usize::try_from(stats.evicted).unwrap() + stats.entries, 500);
    assert!(stats.entries > 20_000 / 512, "{stats:?}");
}

/// A client, and the newest number that it has read of each counter.
struct Reader {
    client: Client,
    newest: [AtomicU64; COUNTERS],
    reads: AtomicU64,
}

const COUNTERS: usize = 3;

impl Reader {
    /// Reads a counter and checks that the number is not older than one that was read before. `is_cached` with different commands.
    async fn read(&self, counter: usize, is_cached: bool) {
        let key = format!("counter{counter}");
        let whole = Command::new("GETRANGE").arg(&key).arg(0).arg(-1);
        let request: Request<String> = if coin() { whole.returning() } else { commands::get(&key).returning() };
        let newest = self.newest[counter].load(SeqCst);
        let ended = if is_cached { self.client.cached(request).await } else { self.client.send(request).await };
        match ended {
            Ok(number) => {
                let number = number.parse().unwrap();
                assert!(number >= newest, "{key}: read {number} after {newest}, cached: {is_cached}");
                self.newest[counter].fetch_max(number, SeqCst);
                self.reads.fetch_add(1, SeqCst);
            }
            Err(Error::Lost { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// Returns true or false at random.
fn coin() -> bool {
    random(2) == 0
}

fn random(limit: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) % limit
}

/// All reads of a client have one order: the server answers in order, and sends the invalidation of a change before any later reply. So a
/// cached read must not be older than a read, cached or not, that has ended before it began.
async fn reads_are_monotonic(while_down: WhileDown) {
    let server = Arc::new(RedisServer::start());
    let proxy = FaultProxy::start(server.addr());
    for counter in 0..COUNTERS {
        server.cli(["SET", &format!("counter{counter}"), "0"]);
    }
    // So small that entries are evicted as well.
    let limits = CacheOptions::default().max_bytes(1200);
    let client = Client::connect(options(proxy.addr().port()).while_down(while_down).cache(limits)).await.unwrap();
    let reader = Arc::new(Reader { client: client.clone(), newest: Default::default(), reads: AtomicU64::new(0) });
    let mut tasks = JoinSet::new();
    for number in 0..6 {
        let reader = Arc::clone(&reader);
        tasks.spawn(async move {
            loop {
                let counter = usize::try_from(random(COUNTERS as u64)).unwrap();
                reader.read(counter, number > 0).await;
            }
        });
    }
    let other = Client::connect(options(server.port())).await.unwrap();
    for writer in [other, client.clone()] {
        tasks.spawn(async move {
            loop {
                let incr = commands::incr(format!("counter{}", random(COUNTERS as u64)));
                match writer.send(incr).await {
                    Ok(_) | Err(Error::Lost { .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
                for _ in 0..random(20) {
                    tokio::task::yield_now().await;
                }
            }
        });
    }
    for round in 0..60 {
        match round % 6 {
            0 => proxy.cut(CloseMode::Reset),
            1 => {
                server.pause();
                tokio::task::yield_now().await;
                server.resume();
            }
            2 => {
                let ids = server.cli(["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
                assert!(ids.parse::<u64>().is_ok(), "{ids}");
            }
            3 => proxy.inject(Faults::default().delay(Duration::from_millis(1))),
            4 => proxy.heal(),
            // Another database: the client is sent the same as for its own.
            _ => assert_eq!(server.cli(["-n", "1", "FLUSHDB"]), "OK"),
        }
        let target = reader.reads.load(SeqCst) + 200;
        wait_until_async("200 more reads", PATIENCE, async || {
            if let Some(ended) = tasks.try_join_next() {
                ended.unwrap();
            }
            reader.reads.load(SeqCst) >= target
        })
        .await;
    }
    let stats = cache(&client);
    assert!(stats.hits > 100 && stats.discarded > 10 && stats.invalidated > 100 && stats.evicted > 0, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_read_is_never_older_than_a_read_before() {
    reads_are_monotonic(WhileDown::WaitForAttempt).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_read_is_never_older_than_a_read_before_if_requests_wait_for_the_connection() {
    reads_are_monotonic(WhileDown::Queue).await;
}

/// Answers `ECHO push` with a push before the reply, and `GET` with `1` and the push of its key behind it, if there is one.
async fn pushing(pushes: &'static [String]) -> Scripted {
    Scripted::answering(move |words, _| match &*words[0] {
        "ECHO" => format!("{}$0\r\n\r\n", pushes[words[1].parse::<usize>().unwrap()]),
        "GET" => {
            let push = words[1].strip_prefix("raced").map(|push| &*pushes[push.parse::<usize>().unwrap()]);
            format!("$1\r\n1\r\n{}", push.unwrap_or_default())
        }
        _ => greeting(words).unwrap_or_else(|| "-ERR unknown command\r\n".to_owned()),
    })
    .await
}

fn invalidate(keys: &str) -> String {
    format!(">2\r\n$10\r\ninvalidate\r\n{keys}")
}

#[tokio::test(flavor = "multi_thread")]
async fn invalidation_behind_a_reply_prevents_that_it_is_kept() {
    let pushes = [invalidate("*1\r\n$6\r\nraced0\r\n"), invalidate("_\r\n"), invalidate("*1\r\n$1\r\nk\r\n")];
    let server = pushing(Vec::leak(pushes.to_vec())).await;
    let client = Client::connect(caching(server.port())).await.unwrap();
    for (key, kept) in [("raced0", 0), ("raced1", 0), ("raced2", 1)] {
        for _ in 0..20 {
            assert_eq!(get(&client, key).await.as_deref(), Some("1"));
            // Whether it came before or after the entry was stored, the push is handled before the reply to this.
            let _ = client.send(commands::echo(2)).await.unwrap();
            assert_eq!(cache(&client).entries, kept, "{key}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_invalidation_removes_all_entries() {
    let mut many = "*200001\r\n".to_owned();
    for number in 0..200_000 {
        write!(many, "$6\r\n{number:06}\r\n").unwrap();
    }
    many += "$1\r\nk\r\n";
    let cases = [
        (invalidate("*1\r\n$1\r\nk\r\n"), 0),
        (invalidate("_\r\n"), 0),
        (invalidate(&many), 0),
        (invalidate("*1\r\n$5\r\nother\r\n"), 1),
        (invalidate("*0\r\n"), 1),
        (">2\r\n$7\r\nmessage\r\n_\r\n".to_owned(), 1),
        (">1\r\n:1\r\n".to_owned(), 1),
        (invalidate(":5\r\n"), 0),
        (invalidate("$1\r\nk\r\n"), 0),
        (invalidate("*2\r\n:1\r\n*1\r\n$1\r\nk\r\n"), 0),
        (invalidate("%1\r\n$1\r\nk\r\n$1\r\nk\r\n"), 0),
        (">1\r\n$10\r\ninvalidate\r\n".to_owned(), 0),
        (">3\r\n$10\r\ninvalidate\r\n*0\r\n*0\r\n".to_owned(), 0),
    ];
    let server = pushing(Vec::leak(cases.iter().map(|(push, _)| push.clone()).collect())).await;
    let client = Client::connect(caching(server.port())).await.unwrap();
    for (index, (push, kept)) in cases.iter().enumerate() {
        get(&client, "k").await;
        assert_eq!(cache(&client).entries, 1);
        let _ = client.send(commands::echo(index)).await.unwrap();
        assert_eq!(cache(&client).entries, *kept, "{}", &push[..push.len().min(80)]);
    }
    assert_eq!(client.status().borrow().generation, 1);
}

#[test]
#[ignore = "measures the time of a hit, in a release build"]
fn speed_of_hits() {
    const READS: u32 = 2_000_000;
    let server = RedisServer::start();
    server.cli(["SET", "user:1234:name", "a string of thirty-two bytes ...."]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let read = async |client: &Client| {
        let since = Instant::now();
        for _ in 0..READS {
            let name: String = client.cached(commands::get("user:1234:name").returning()).await.unwrap();
            assert_eq!(name.len(), 33);
        }
        since.elapsed().as_nanos() / u128::from(READS)
    };
    runtime.block_on(async {
        let client = Client::connect(caching(server.port())).await.unwrap();
        for _ in 0..5 {
            println!("{} ns for a hit", read(&client).await);
        }
        let mut readers = JoinSet::new();
        for _ in 0..2 {
            let client = client.clone();
            readers.spawn(async move { read(&client).await });
        }
        println!("{:?} ns for a hit of one key by two tasks", readers.join_all().await);
        let since = Instant::now();
        for _ in 0..READS {
            drop(std::hint::black_box(commands::get("user:1234:name")));
        }
        println!("{} ns of it for the command", since.elapsed().as_nanos() / u128::from(READS));
    });
}
