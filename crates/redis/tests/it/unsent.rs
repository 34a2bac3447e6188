//! Requests that a connection has taken and not sent: they are taken back, and the others keep their order.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidewire_redis::{Client, ConnectionError, Error, Request, RequestOutcome, RequestPhase, Value, WhileDown};
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::servers::{Scripted, answer, command, greeting, options};

/// The names and first arguments of the commands that a server has read.
type Received = Arc<Mutex<Vec<String>>>;

/// Completes the handshake, and reads nothing after it.
async fn greet(stream: &mut TcpStream) {
    answer(stream, |words| greeting(words).filter(|_| words.iter().all(|word| word != "LIB-VER"))).await;
    stream.write_all(b"+OK\r\n").await.unwrap();
}

/// Answers and records all commands.
async fn answer_and_record(stream: &mut TcpStream, received: &Received) {
    answer(stream, |words| {
        let is_greeting = greeting(words);
        if is_greeting.is_none() {
            received.lock().unwrap().push(words[..words.len().min(2)].join(" "));
        }
        is_greeting.or_else(|| Some("+OK\r\n".to_owned()))
    })
    .await;
}

async fn ask(client: &Client, request: Request<Value>, queued: usize) -> JoinHandle<Result<Value, Error>> {
    let asking = client.clone();
    let asked = tokio::spawn(async move { asking.send(request).await });
    wait_until_async("it is queued", PATIENCE, async || client.stats().queued == queued).await;
    asked
}

/// Larger than the socket buffers.
fn long() -> Request<Value> {
    command(&["SET", "long", &"v".repeat(32 << 20)])
}

#[tokio::test]
async fn request_past_its_deadline_behind_a_stuck_one_is_not_sent() {
    let (received, goes_on) = (Received::default(), Arc::new(Notify::new()));
    let server = Scripted::start({
        let (received, goes_on) = (Arc::clone(&received), Arc::clone(&goes_on));
        move |mut stream, _| {
            let (received, goes_on) = (Arc::clone(&received), Arc::clone(&goes_on));
            async move {
                greet(&mut stream).await;
                goes_on.notified().await;
                answer_and_record(&mut stream, &received).await;
            }
        }
    })
    .await;
    let (client, connection) = Client::new(options(server.port()));
    let hasty = client.with_timeout(Duration::from_millis(300));
    let stuck = ask(&client, long(), 1).await;
    let late = ask(&hasty, command(&["INCR", "late"]), 2).await;
    let last = ask(&client, command(&["INCR", "last"]), 3).await;
    // The connection takes all of them together.
    tokio::spawn(connection.run());
    let late = late.await.unwrap().unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Queued }), "{late:?}");
    goes_on.notify_one();
    assert!(stuck.await.unwrap().is_ok() && last.await.unwrap().is_ok());
    assert_eq!(*received.lock().unwrap(), ["SET long", "INCR last"]);
    wait_until_async("all permits are returned", PATIENCE, async || client.stats().in_flight == 0).await;
}

/// A server whose first connection does not read and is cut on demand. The others read, or are closed at once.
async fn cut_once(cut: &Arc<Notify>, received: &Received, is_answered: bool) -> Scripted {
    let (received, cut) = (Arc::clone(received), Arc::clone(cut));
    Scripted::start(move |mut stream, number| {
        let (received, cut) = (Arc::clone(&received), Arc::clone(&cut));
        async move {
            if number == 0 {
                greet(&mut stream).await;
                cut.notified().await;
            } else if is_answered {
                answer_and_record(&mut stream, &received).await;
            }
        }
    })
    .await
}

#[tokio::test]
async fn unsent_requests_are_first_on_the_next_connection() {
    let (received, cut) = (Received::default(), Arc::new(Notify::new()));
    let server = cut_once(&cut, &received, true).await;
    let options = options(server.port()).while_down(WhileDown::Queue).connect_timeout(PATIENCE);
    let (client, connection) = Client::new(options);
    let hasty = client.with_timeout(Duration::from_secs(1));
    let stuck = ask(&hasty, long(), 1).await;
    let taken = ask(&client, command(&["INCR", "taken"]), 2).await;
    tokio::spawn(connection.run());
    wait_until_async("it is being sent", PATIENCE, async || client.stats().bytes_out > 0).await;
    let queued = ask(&client, command(&["INCR", "queued"]), 1).await;
    // A probe is queued now. It is not sent on the next connection.
    let late = stuck.await.unwrap().unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Writing }), "{late:?}");
    cut.notify_one();
    assert!(taken.await.unwrap().is_ok() && queued.await.unwrap().is_ok());
    assert_eq!(*received.lock().unwrap(), ["INCR taken", "INCR queued"]);
    assert_eq!(client.stats().in_flight, 0);
}

#[tokio::test]
async fn unsent_requests_keep_their_deadline() {
    let (received, cut) = (Received::default(), Arc::new(Notify::new()));
    let server = cut_once(&cut, &received, false).await;
    let options = options(server.port())
        .while_down(WhileDown::Queue)
        .min_backoff(Duration::from_hours(1))
        .max_backoff(Duration::from_hours(1));
    let (client, connection) = Client::new(options);
    let hasty = client.with_timeout(Duration::from_secs(1));
    let stuck = ask(&client, long(), 1).await;
    let late = ask(&hasty, command(&["INCR", "late"]), 2).await;
    tokio::spawn(connection.run());
    wait_until_async("it is being sent", PATIENCE, async || client.stats().bytes_out > 0).await;
    cut.notify_one();
    let lost = stuck.await.unwrap().unwrap_err();
    assert!(matches!(lost, Error::Lost { outcome: RequestOutcome::MaybeExecuted, .. }), "{lost:?}");
    let late = tokio::time::timeout(PATIENCE / 4, late).await.expect("it ends at its deadline").unwrap().unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Connecting }), "{late:?}");
    assert_eq!(client.stats().in_flight, 0);
}

#[tokio::test]
async fn reply_does_not_go_to_an_unsent_request() {
    let server = Scripted::start(|mut stream, _| async move {
        greet(&mut stream).await;
        // The server has read the beginning of the first request, and nothing of the second.
        stream.readable().await.unwrap();
        stream.write_all(b"+FIRST\r\n+SECOND\r\n").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let options = options(server.port()).while_down(WhileDown::Fail);
    let (client, connection) = Client::new(options);
    let first = ask(&client, long(), 1).await;
    let second = ask(&client, command(&["INCR", "a"]), 2).await;
    tokio::spawn(connection.run());
    assert_eq!(first.await.unwrap().unwrap(), Value::Simple("FIRST".into()));
    let second = second.await.unwrap().unwrap_err();
    assert!(
        matches!(second, Error::Lost { outcome: RequestOutcome::NeverSent, source: ConnectionError::UnexpectedReply }),
        "{second:?}"
    );
}
