//! Peers that are old, unusual, or not Redis at all.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tidewire_redis::resp::DecoderOptions;
use tidewire_redis::{
    Client, Command, ConnectionError, ConnectionState, Error, Login, Options, Pipeline, RequestOutcome, RequestPhase,
    Value, WhileDown, commands,
};
use tidewire_testkit::{PATIENCE, RedisServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::servers::{Scripted, answer, command, greeting, options};

/// Returns the error of the connection.
fn connection_error(error: &Error) -> String {
    match error {
        Error::Lost { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

#[tokio::test]
async fn http_server_is_detected_and_retried() {
    let server = Scripted::start(|mut stream, _| async move {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let client = Client::start(options(server.port()));
    let error = client.send(command(&["PING"])).await.unwrap_err();
    // The request was not even sent, so this is not about its reply.
    assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
    assert!(connection_error(&error).contains("'H'"), "{}", connection_error(&error));
    let mut status = client.status();
    let status = status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap();
    assert!(matches!(status.last_error.as_deref(), Some(ConnectionError::Protocol(_))), "{status:?}");
    assert_eq!(status.generation, 0);
}

#[tokio::test]
async fn server_that_is_silent_or_closes_is_retried() {
    for is_silent in [true, false] {
        let server = Scripted::start(move |mut stream, _| async move {
            if is_silent {
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
        })
        .await;
        let options = options(server.port()).connect_timeout(Duration::from_millis(30));
        let client = Client::start(options);
        let error = client.send(command(&["PING"])).await.unwrap_err();
        assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
        let mut status = client.status();
        let failed = status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap().clone();
        let is_late = matches!(failed.last_error.as_deref(), Some(ConnectionError::ConnectTimedOut));
        assert_eq!(is_late, is_silent, "{failed:?}");
        tidewire_testkit::wait_until_async("it is tried again", PATIENCE, async || server.accepted() > 3).await;
    }
}

#[tokio::test]
async fn server_without_hello_uses_resp2() {
    for refusal in ["-ERR unknown command 'HELLO'\r\n", "-NOPROTO unsupported protocol version\r\n"] {
        let commands = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let received = std::sync::Arc::clone(&commands);
        let server = Scripted::answering(move |words, _| {
            received.lock().unwrap().push(words.join(" "));
            match &*words[0] {
                "HELLO" => refusal.to_owned(),
                "GET" => "$-1\r\n".to_owned(),
                "CLIENT" if words[1] == "SETINFO" => "-ERR unknown subcommand\r\n".to_owned(),
                _ => "+OK\r\n".to_owned(),
            }
        })
        .await;
        let options = options(server.port()).login(Login::new("p")).name("n").database(3);
        let client = Client::start(options);
        assert_eq!(client.send(command(&["GET", "a"])).await.unwrap(), Value::Null);
        let commands = commands.lock().unwrap().clone();
        let expected = ["HELLO 3 AUTH default p SETNAME n", "AUTH p", "CLIENT SETNAME n", "CLIENT ID", "SELECT 3"];
        assert_eq!(commands[..5], expected);
    }
}

#[tokio::test]
async fn loading_server_is_retried_and_refusal_is_final() {
    for (words, is_for_good) in [
        ("-ERR max number of clients reached\r\n", false),
        ("-LOADING Redis is loading the dataset in memory\r\n", false),
        ("-WRONGPASS invalid username-password pair\r\n", true),
        ("-NOAUTH HELLO must be called with the client already authenticated\r\n", true),
        ("-DENIED Redis is running in protected mode\r\n", true),
    ] {
        let server = Scripted::answering(move |asked, connection| match greeting(asked) {
            Some(_) if asked[0] == "HELLO" && connection < 3 => words.to_owned(),
            Some(reply) => reply,
            None => "+PONG\r\n".to_owned(),
        })
        .await;
        let options = options(server.port()).while_down(WhileDown::Queue);
        let client = Client::start(options);
        let ended = client.send(command(&["PING"])).await;
        if is_for_good {
            // It is not an answer to the request, which was never sent.
            let error = ended.unwrap_err();
            assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
            client.status().wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
            assert_eq!(server.accepted(), 1);
        } else {
            assert_eq!(ended.unwrap(), Value::Simple("PONG".into()), "{words}");
            assert_eq!(server.accepted(), 4);
        }
    }
}

#[tokio::test]
async fn old_server_rejects_handshake_without_password() {
    // It checks the name of a command before the authentication.
    let server = Scripted::answering(|words, _| match &*words[0] {
        "HELLO" => "-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n".to_owned(),
        _ => "-NOAUTH Authentication required.\r\n".to_owned(),
    })
    .await;
    let client = Client::start(options(server.port()));
    let error = client.send(command(&["PING"])).await.unwrap_err();
    assert!(matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{error:?}");
    let mut status = client.status();
    let closed = status.wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
    assert!(matches!(closed.last_error.as_deref(), Some(ConnectionError::Refused(_))), "{closed:?}");
}

#[tokio::test]
async fn unexpected_reply_goes_to_no_request() {
    // Two replies to the first command on the first connection.
    let server = Scripted::answering(move |words, connection| match (greeting(words), connection) {
        (Some(reply), _) => reply,
        (None, 0) => format!("+{0}\r\n+stray\r\n", words[1]),
        (None, _) => format!("+{}\r\n", words[1]),
    })
    .await;
    let client = Client::start(options(server.port()));
    assert_eq!(client.send(command(&["ECHO", "1"])).await.unwrap(), Value::Simple("1".into()));
    // It may or may not be sent before the unexpected reply is read, but it does not get that reply.
    match client.send(command(&["ECHO", "2"])).await {
        Ok(value) => assert_eq!(value, Value::Simple("2".into())),
        Err(error) => assert!(matches!(error, Error::Lost { .. }), "{error:?}"),
    }
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    assert_eq!(client.send(command(&["ECHO", "3"])).await.unwrap(), Value::Simple("3".into()));
}

#[tokio::test]
async fn replies_are_delivered_after_a_write_error() {
    const ASKED: usize = 100;
    // It answers all requests at once, and closes before another one can be sent.
    let server = Scripted::start(|mut stream, _| async move {
        let received = AtomicUsize::new(0);
        answer(&mut stream, |words| match greeting(words) {
            Some(reply) => Some(reply),
            None => (received.fetch_add(1, SeqCst) + 1 < ASKED).then(String::new),
        })
        .await;
        stream.set_zero_linger().unwrap();
        let _ = stream.write_all("+OK\r\n".repeat(ASKED).as_bytes()).await;
    })
    .await;
    let options = options(server.port()).while_down(WhileDown::Fail);
    let client = Client::start(options);
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    let mut asked = JoinSet::new();
    for _ in 0..ASKED {
        let client = client.clone();
        asked.spawn(async move {
            let first = client.send(command(&["ECHO", "1"])).await;
            // It is written before the others have their replies.
            (first, client.send(command(&["ECHO", "2"])).await)
        });
    }
    while let Some(ended) = asked.join_next().await {
        let (first, second) = ended.unwrap();
        assert_eq!(first.expect("its reply has come"), Value::Simple("OK".into()));
        assert!(matches!(second, Err(Error::Lost { .. })), "{second:?}");
    }
}

#[tokio::test]
async fn reply_above_the_limit_fails_only_its_request() {
    let server = RedisServer::start();
    let options = options(server.port()).decoder(DecoderOptions::default().max_bulk(1000));
    let client = Client::start(options);
    client.send(command(&["SETRANGE", "long", "1000", "x"])).await.unwrap();
    let (before, long, after) = tokio::join!(
        client.send(command(&["ECHO", "before"])),
        client.send(command(&["GET", "long"])),
        client.send(command(&["ECHO", "after"])),
    );
    assert_eq!(before.unwrap(), Value::Bulk("before".into()));
    let long = long.unwrap_err();
    assert!(matches!(long, Error::Protocol(_)), "{long:?}");
    let after = after.unwrap_err();
    assert!(matches!(after, Error::Lost { outcome: RequestOutcome::MaybeExecuted, .. }), "{after:?}");
    let mut status = client.status();
    let open = status.wait_for(|status| status.generation == 2).await.unwrap().clone();
    assert!(matches!(open.last_error.as_deref(), Some(ConnectionError::Protocol(_))), "{open:?}");
    assert_eq!(client.send(command(&["ECHO", "again"])).await.unwrap(), Value::Bulk("again".into()));
}

#[tokio::test]
async fn invalid_late_reply_is_not_the_error_of_another_request() {
    // The first reply comes after the second command, and is invalid.
    let server = Scripted::answering(move |words, _| match greeting(words) {
        Some(reply) => reply,
        None if words.iter().any(|word| word == "next") => "?\r\n".to_owned(),
        // The probe is not answered either.
        None => String::new(),
    })
    .await;
    let client = Client::start(options(server.port()));
    client.status().wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
    let hasty = client.with_timeout(Duration::from_millis(50));
    let late = hasty.send(command(&["ECHO", "late"])).await.unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Waiting }), "{late:?}");
    let next = client.send(command(&["ECHO", "next"])).await.unwrap_err();
    assert!(matches!(next, Error::Lost { .. }), "{next:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pushes_between_replies_are_skipped() {
    let server = RedisServer::options().config("enable-debug-command yes").start();
    let client = Client::start(options(server.port()));
    for turn in 0..200 {
        // It makes the server send a push before a reply.
        let push = Command::new("DEBUG").arg("PROTOCOL").arg("push").returning::<String>();
        let pipeline = Pipeline::new().then(commands::echo(turn)).then(push.clone()).then(commands::echo(-turn));
        let ((one, reply, two), other, three) = tokio::join!(
            async { client.pipeline(pipeline).await.unwrap() },
            client.send(push),
            client.send(commands::echo(turn))
        );
        assert_eq!([one.unwrap(), two.unwrap(), three.unwrap()], [turn, -turn, turn].map(|turn| turn.to_string()));
        assert_eq!(reply.unwrap(), other.unwrap());
    }
    tidewire_testkit::wait_until_async("pushes are counted", PATIENCE, async || client.stats().pushes == 400).await;
    assert_eq!(client.status().borrow().generation, 1);
}

#[tokio::test]
async fn unix_sockets_work() {
    let mut server = RedisServer::start();
    let url = format!("unix://{}?db=2&name=local&min_backoff_ms=1", server.unix_socket().display());
    let client = Client::start(Options::from_url(&url).unwrap());
    assert_eq!(client.send(command(&["CLIENT", "GETNAME"])).await.unwrap(), Value::Bulk("local".into()));
    client.send(command(&["SET", "k", "v"])).await.unwrap();
    assert_eq!(server.cli(["-n", "2", "GET", "k"]).trim(), "v");
    server.kill();
    client.status().wait_for(|status| status.state != ConnectionState::Open).await.unwrap();
    server.restart();
    client.status().wait_for(|status| status.generation == 2).await.unwrap();
    assert_eq!(client.send(command(&["PING"])).await.unwrap(), Value::Simple("PONG".into()));
}

#[tokio::test]
async fn input_after_the_handshake_goes_to_no_request() {
    let server = Scripted::answering(move |words, connection| match greeting(words) {
        Some(reply) if words.iter().any(|word| word == "LIB-VER") && connection == 0 => reply + "+STRAY\r\n",
        Some(reply) => reply,
        None => "+PONG\r\n".to_owned(),
    })
    .await;
    let client = Client::start(options(server.port()));
    let mut status = client.status();
    status.wait_for(|status| status.state == ConnectionState::Open && status.generation == 2).await.unwrap();
    assert_eq!(client.send(command(&["PING"])).await.unwrap(), Value::Simple("PONG".into()));
}

/// Returns the running timers of sockets to this port, and the time left in hundredths of a second. `02` is keepalive.
#[cfg(target_os = "linux")]
fn timers(port: u16) -> Vec<(String, u64)> {
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = sockets.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let to_port = rows.filter(|row| row[2].ends_with(&format!(":{port:04X}")) && row[3] == "01");
    to_port
        .map(|row| {
            let (timer, left) = row[5].split_once(':').unwrap();
            (timer.to_owned(), u64::from_str_radix(left, 16).unwrap())
        })
        .collect()
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn idle_connection_has_keepalive() {
    let server = RedisServer::start();
    let client = Client::start(options(server.port()));
    client.send(command(&["PING"])).await.unwrap();
    // Another timer may run until the last segment is acknowledged.
    let is_kept_alive = async || matches!(&timers(server.port())[..], [(timer, ..=3000)] if timer == "02");
    tidewire_testkit::wait_until_async("it is kept alive", PATIENCE, is_kept_alive).await;
}
