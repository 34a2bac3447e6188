//! Servers that send too much, or too little at a time: other tasks run, and deadlines are kept.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tidewire_redis::resp::DecodeErrorKind;
use tidewire_redis::{Client, ConnectionError, ConnectionState, Error, RequestOutcome, RequestPhase, Value, WhileDown};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::servers::{Scripted, answer, command, greeting, options};

/// A server that completes the handshake and then repeats this without end.
async fn flooding(text: &'static str) -> Scripted {
    let bytes = text.repeat(1000);
    Scripted::start(move |mut stream, _| {
        let bytes = bytes.clone();
        async move {
            // It reads the last command of the handshake, and nothing after it.
            answer(&mut stream, |words| greeting(words).filter(|_| words.iter().all(|word| word != "LIB-VER"))).await;
            let _ = stream.write_all(b"+OK\r\n").await;
            while stream.write_all(bytes.as_bytes()).await.is_ok() {}
        }
    })
    .await
}

#[tokio::test]
async fn endless_pushes_delay_neither_deadlines_nor_close() {
    let server = flooding(">2\r\n+message\r\n$5\r\nhello\r\n").await;
    let client = Client::start(options(server.port()));
    wait_until_async("pushes come", PATIENCE, async || client.stats().pushes > 10_000).await;
    let hasty = client.with_timeout(Duration::from_millis(20));
    let late = tokio::time::timeout(PATIENCE / 4, hasty.send(command(&["PING"]))).await;
    let late = late.expect("it ends at its deadline").unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Waiting | RequestPhase::Queued }), "{late:?}");
    let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::from_millis(20))).await;
    closed.expect("it closes within the grace period");
    assert_eq!(client.status().borrow().generation, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_pushes_do_not_delay_requests_of_several_tasks() {
    let server = Scripted::start(|mut stream, _| async move {
        let received = AtomicUsize::new(0);
        answer(&mut stream, |words| match greeting(words) {
            Some(reply) => Some(reply),
            None => (received.fetch_add(1, SeqCst) == 0).then(String::new),
        })
        .await;
        let _ = stream.write_all(b"+OK\r\n+OK\r\n").await;
        let bytes = ">2\r\n+message\r\n$5\r\nhello\r\n".repeat(10_000);
        while stream.write_all(bytes.as_bytes()).await.is_ok() {}
    })
    .await;
    let client = Client::start(options(server.port()));
    // Before there is a connection, so that it takes both together.
    let (one, two) = tokio::join!(client.send(command(&["PING"])), client.send(command(&["PING"])));
    assert!(one.is_ok() && two.is_ok());
    wait_until_async("pushes come", PATIENCE, async || client.stats().pushes > 10_000).await;
    let hasty = client.with_timeout(Duration::from_millis(20));
    let late = tokio::time::timeout(PATIENCE / 4, hasty.send(command(&["PING"]))).await;
    let late = late.expect("it ends at its deadline").unwrap_err();
    assert!(matches!(late, Error::TimedOut { .. }), "{late:?}");
    let closed = tokio::time::timeout(PATIENCE / 4, client.close(Duration::from_millis(20))).await;
    closed.expect("it closes within the grace period");
}

#[tokio::test]
async fn endless_replies_are_dropped() {
    let server = flooding("+OK\r\n").await;
    let options = options(server.port()).while_down(WhileDown::Fail);
    let client = Client::start(options);
    let mut states = client.states();
    for _ in 0..5 {
        let failed = loop {
            let status = states.next().await.unwrap();
            if status.state == ConnectionState::Failed {
                break status;
            }
        };
        let error = failed.last_error.unwrap();
        assert!(matches!(&*error, ConnectionError::UnexpectedReply), "{error:?}");
    }
}

#[tokio::test]
async fn endless_pushes_do_not_extend_the_connect_timeout() {
    let server = Scripted::start(|mut stream, _| async move {
        while stream.write_all(b">1\r\n+hello\r\n").await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let options = options(server.port()).connect_timeout(Duration::from_millis(50));
    let client = Client::start(options);
    let error =
        tokio::time::timeout(PATIENCE / 4, client.send(command(&["PING"]))).await.expect("it ends").unwrap_err();
    assert!(
        matches!(error, Error::Lost { outcome: RequestOutcome::NeverSent, source: ConnectionError::ConnectTimedOut }),
        "{error:?}"
    );
}

#[tokio::test]
async fn replies_can_arrive_byte_by_byte() {
    let server = Scripted::start(|mut stream, _| async move {
        stream.set_nodelay(true).unwrap();
        let (mut received, mut asked) = (Vec::new(), 0);
        loop {
            // Three commands of the handshake, and then pairs of commands.
            let reply = match asked {
                0 => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned(),
                1 | 2 => "+OK\r\n".to_owned(),
                number => format!(">1\r\n+push\r\n*2\r\n$1\r\n{}\r\n:{number}\r\n", number % 10),
            };
            let known = received.len();
            while !received[known..].contains(&b'*') {
                if !matches!(stream.read_buf(&mut received).await, Ok(1..)) {
                    return;
                }
            }
            for byte in reply.bytes() {
                if stream.write_all(&[byte]).await.is_err() {
                    return;
                }
                tokio::task::yield_now().await;
            }
            asked += 1;
        }
    })
    .await;
    let client = Client::start(options(server.port()));
    for number in 3..20_i64 {
        let reply = client.send(command(&["PING"])).await.unwrap();
        let digit = bytes::Bytes::from((number % 10).to_string());
        assert_eq!(reply, Value::Array(vec![Value::Bulk(digit), Value::Integer(number)]));
    }
}

#[tokio::test]
async fn announced_length_without_data_affects_only_its_request() {
    let server = Scripted::answering(|words, connection| match (greeting(words), connection) {
        (Some(reply), _) => reply,
        // The probe is not answered either.
        (None, _) if words[0] == "PING" => String::new(),
        (None, 0) => "$536870912\r\nab".to_owned(),
        (None, 1) => "*1048576\r\n".to_owned(),
        (None, 2) => "$536870913\r\n".to_owned(),
        (None, _) => "+a\r\n".to_owned(),
    })
    .await;
    // So that the peer soon counts as unresponsive.
    let options = options(server.port()).connect_timeout(Duration::from_millis(200)).while_down(WhileDown::Queue);
    let client = Client::start(options);
    for generation in [1, 2] {
        client.status().wait_for(|status| status.generation == generation).await.unwrap();
        let late = client.with_timeout(Duration::from_millis(50)).send(command(&["ECHO", "a"])).await.unwrap_err();
        assert!(matches!(late, Error::TimedOut { .. }), "{late:?}");
        client.status().wait_for(|status| status.generation > generation).await.unwrap();
    }
    let error = client.send(command(&["ECHO", "a"])).await.unwrap_err();
    let Error::Protocol(error) = error else { panic!("{error:?}") };
    assert!(matches!(error.kind, DecodeErrorKind::BulkTooLong { len: 536_870_913, .. }), "{error}");
    assert_eq!(client.send(command(&["ECHO", "a"])).await.unwrap(), Value::Simple("a".into()));
}
