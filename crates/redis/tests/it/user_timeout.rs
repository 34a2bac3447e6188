//! The TCP user timeout: the kernel closes a connection whose bytes are not acknowledged, although no request times out.

use std::io;
use std::time::Duration;

use tidewire_redis::observe::TimeoutStats;
use tidewire_redis::{Client, ConnectionError, Error, RequestOutcome, commands};
use tidewire_testkit::{PATIENCE, RedisServer, is_rerun, rerun_in_own_network, set_loopback, wait_until_async};
use tokio::time::timeout;

use crate::servers::{Scripted, options};

/// Far longer than the user timeouts here, and shorter than the default.
const DEADLINE: Duration = Duration::from_secs(20);

fn is_closed_by_the_kernel(error: &Error) -> bool {
    let Error::Lost { outcome: RequestOutcome::MaybeExecuted, source: ConnectionError::Io(error) } = error else {
        return false;
    };
    error.kind() == io::ErrorKind::TimedOut
}

#[test]
fn lost_packets_close_the_connection() {
    if !is_rerun() {
        return rerun_in_own_network("user_timeout::lost_packets_close_the_connection");
    }
    set_loopback(true);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let server = RedisServer::start();
        let options = options(server.port()).timeout(Duration::MAX).tcp_user_timeout(Duration::from_secs(1));
        let client = Client::start(options);
        client.send(commands::ping()).await.unwrap();

        set_loopback(false);
        let lost = timeout(DEADLINE, client.send(commands::ping())).await.expect("the kernel closes the connection");
        assert!(is_closed_by_the_kernel(lost.as_ref().unwrap_err()), "{lost:?}");
        assert_eq!(client.stats().timeouts, TimeoutStats::default());

        set_loopback(true);
        wait_until_async("the client has connected again", PATIENCE, async || {
            client.send(commands::ping()).await.is_ok()
        })
        .await;
    });
}

#[tokio::test]
async fn unread_bytes_close_the_connection() {
    let server = Scripted::deaf().await;
    let options = options(server.port()).timeout(Duration::MAX).tcp_user_timeout(Duration::from_millis(200));
    let client = Client::start(options.reconnect(false));
    // More than the buffers of both sockets.
    let large = commands::echo(vec![b'x'; 32 << 20]);
    let lost = timeout(DEADLINE, client.send(large)).await.expect("the kernel closes the connection");
    assert!(is_closed_by_the_kernel(lost.as_ref().unwrap_err()), "{lost:?}");
    assert_eq!(client.stats().timeouts, TimeoutStats::default());
}
