//! Faults of the network and of the server. After each: every request has ended once, no request has the reply of another, and
//! the client works again.

use std::time::Duration;

use tidewire_redis::{
    Client, ConnectionError, ConnectionState, Error, Login, Options, RequestOutcome, RequestPhase, WhileDown, commands,
};
use tidewire_testkit::{CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, RedisServer};

fn options(proxy: &FaultProxy) -> Options {
    Options::default()
        .address(("127.0.0.1", proxy.addr().port()))
        .min_backoff(Duration::from_millis(1))
        .max_backoff(Duration::from_millis(20))
        .timeout(PATIENCE)
}

/// Sends an ECHO and checks that the reply is its own.
async fn ask(client: &Client, number: u64) -> Result<(), Error> {
    let value = client.send(commands::echo(number)).await?;
    assert_eq!(value, number.to_string(), "a reply went to another request");
    Ok(())
}

/// Waits until the client works.
async fn wait_until_it_works(client: &Client, number: u64) {
    let mut status = client.status();
    loop {
        status.wait_for(|status| matches!(status.state, ConnectionState::Open)).await.unwrap();
        if ask(client, number).await.is_ok() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_can_be_cut_at_every_byte() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(&proxy));
    for bytes in 0..40 {
        wait_until_it_works(&client, 0).await;
        proxy.inject(Faults::default().cut(Cut::after(bytes, Direction::ToClient)));
        let (one, two, three) = tokio::join!(ask(&client, 1), ask(&client, 22), ask(&client, 333));
        proxy.heal();
        for ended in [one, two, three] {
            match ended {
                Ok(()) | Err(Error::Lost { .. }) => {}
                Err(other) => panic!("{bytes}: {other:?}"),
            }
        }
    }
    wait_until_it_works(&client, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_connection_is_detected_and_its_late_replies_dropped() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let options = options(&proxy).timeout(Duration::from_millis(100)).connect_timeout(Duration::from_millis(100));
    let client = Client::start(options);
    wait_until_it_works(&client, 0).await;
    proxy.inject(Faults::default().half_open(true));
    let late = ask(&client, 1).await.unwrap_err();
    assert!(matches!(late, Error::TimedOut { phase: RequestPhase::Waiting }), "{late:?}");
    client.status().wait_for(|status| status.state != ConnectionState::Open).await.unwrap();
    proxy.heal();
    wait_until_it_works(&client, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_reply_is_dropped() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let options = options(&proxy).timeout(Duration::from_millis(100));
    let client = Client::start(options);
    wait_until_it_works(&client, 0).await;
    server.pause();
    let (one, two) = tokio::join!(ask(&client, 1), ask(&client, 2));
    assert!(one.is_err() && two.is_err());
    server.resume();
    wait_until_it_works(&client, 3).await;
    assert_eq!(client.status().borrow().generation, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_do_not_shift_replies() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(&proxy));
    wait_until_it_works(&client, 0).await;
    server.pause();
    let gone = tokio::spawn({
        let client = client.clone();
        async move { ask(&client, 1).await }
    });
    let stays = tokio::spawn({
        let client = client.clone();
        async move { ask(&client, 2).await }
    });
    gone.abort();
    server.resume();
    stays.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_password_is_final() {
    let server = RedisServer::options().password("right").start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(&proxy).login(Login::new("wrong")));
    assert!(ask(&client, 1).await.is_err());
    let mut status = client.status();
    let status = status.wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
    assert!(matches!(status.last_error.as_deref(), Some(ConnectionError::Refused(_))), "{status:?}");
    assert_eq!(proxy.accepted_connections(), 1);
    wait_until_it_works(&Client::start(options(&proxy).login(Login::new("right"))), 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_down_decides_about_requests_in_an_outage() {
    let mut server = RedisServer::start();
    for (choice, waits) in [(WhileDown::Queue, true), (WhileDown::Fail, false)] {
        let proxy = FaultProxy::start(server.addr());
        let options = options(&proxy).while_down(choice);
        let client = Client::start(options);
        wait_until_it_works(&client, 0).await;
        server.kill();
        client.status().wait_for(|status| status.state != ConnectionState::Open).await.unwrap();
        let asked = tokio::spawn({
            let client = client.clone();
            async move { ask(&client, 1).await }
        });
        if waits {
            server.restart();
            asked.await.unwrap().unwrap();
        } else {
            let refused = asked.await.unwrap().unwrap_err();
            assert!(matches!(refused, Error::Lost { outcome: RequestOutcome::NeverSent, .. }), "{refused:?}");
            server.restart();
        }
        wait_until_it_works(&client, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn close_waits_for_requests_in_flight() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let client = Client::start(options(&proxy));
    wait_until_it_works(&client, 0).await;
    server.pause();
    let asked = tokio::spawn({
        let client = client.clone();
        async move { ask(&client, 1).await }
    });
    while proxy.forwarded_bytes(Direction::ToServer) == 0
        || !asked.is_finished() && client.status().borrow().state == ConnectionState::Open
    {
        let closing = client.close(PATIENCE);
        server.resume();
        closing.await;
    }
    let ended = asked.await.unwrap();
    assert!(matches!(ended, Ok(()) | Err(Error::Closed { .. })), "{ended:?}");
    assert_eq!(client.status().borrow().state, ConnectionState::Closed);
}

/// A thousand faults under load, the same ones for the same seed.
#[tokio::test(flavor = "multi_thread")]
async fn survives_a_thousand_faults() {
    let seed =
        std::env::var("TIDEWIRE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("TIDEWIRE_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.addr());
    let options = options(&proxy).min_backoff(Duration::from_micros(100)).max_backoff(Duration::from_millis(2));
    let client = Client::start(options);
    let mut workers = Vec::new();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    for worker in 0..16_u64 {
        let (client, stop) = (client.clone(), std::sync::Arc::clone(&stop));
        workers.push(tokio::spawn(async move {
            let (mut done, mut failed) = (0_u64, 0_u64);
            for turn in 0.. {
                if stop.load(std::sync::atomic::Ordering::SeqCst) {
                    break;
                }
                match ask(&client, worker << 32 | turn).await {
                    Ok(()) => done += 1,
                    Err(Error::Lost { .. }) => {
                        failed += 1;
                        tokio::task::yield_now().await;
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
            (done, failed)
        }));
    }
    for fault in 0..1000 {
        wait_until_it_works(&client, 1 << 60 | fault).await;
        let cut = Cut::after(random.u64(0..400), if random.bool() { Direction::ToClient } else { Direction::ToServer });
        match random.u8(0..4) {
            0 => proxy.cut(CloseMode::Reset),
            1 => proxy.cut(CloseMode::Graceful),
            _ => {
                proxy.inject(Faults::default().cut(cut));
            }
        }
        // Some faults are healed before they take effect, and some after.
        if random.bool() {
            let _ = ask(&client, 1 << 61 | fault).await;
        }
        proxy.heal();
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut done = 0;
    for worker in workers {
        done += tokio::time::timeout(PATIENCE, worker).await.expect("every request ends").unwrap().0;
    }
    assert!(done > 0);
    wait_until_it_works(&client, 7).await;
}
