//! TLS over a real server, with real certificates.

use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidewire_redis::tls::{Authorities, Identity, TlsError, TlsHandshakeError, TlsOptions};
use tidewire_redis::{
    Client, Command, ConnectionError, ConnectionState, Error, Options, Pipeline, RequestOutcome, WhileDown, commands,
};
use tidewire_testkit::{
    Certificates, CloseMode, Cut, Direction, FaultProxy, Faults, PATIENCE, RedisServer, wait_until_async,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

fn server() -> RedisServer {
    RedisServer::options().tls(true).start()
}

fn authorities(certificates: &Certificates) -> Authorities {
    Authorities::from_pem(&fs::read(&certificates.authority).unwrap()).unwrap()
}

fn identity(chain: &Path, key: &Path) -> Identity {
    Identity::from_pem(&fs::read(chain).unwrap(), &fs::read(key).unwrap()).unwrap()
}

/// Returns options for TLS to this address, with the authority of the server.
fn options(server: &RedisServer, address: SocketAddr) -> Options {
    Options::default()
        .address(address)
        .tls(TlsOptions::default().authorities(authorities(server.certificates())))
        .min_backoff(Duration::from_millis(1))
        .max_backoff(Duration::from_millis(20))
        .connect_timeout(PATIENCE)
        .timeout(PATIENCE)
}

/// Returns why the handshake fails.
async fn handshake_error(options: Options) -> Arc<TlsHandshakeError> {
    match Client::connect(options).await.unwrap_err() {
        ConnectionError::Tls(error) => error,
        error => panic!("{error:?}"),
    }
}

#[tokio::test]
async fn url_with_rediss_uses_tls() {
    let server = server();
    let tls = TlsOptions::default().authorities(authorities(server.certificates()));
    let url = format!("rediss://localhost:{}/1", server.tls_addr().port());
    let client = Client::connect(Options::from_url(&url).unwrap().tls(tls)).await.unwrap();
    client.send(commands::set("tide", "high")).await.unwrap();
    let tide: String = client.send(commands::get("tide").returning()).await.unwrap();
    assert_eq!(tide, "high");
    // The exclusive connections use TLS, too.
    let popped = client.send(commands::blpop(["none"], Duration::from_millis(10))).await.unwrap();
    assert_eq!(popped, None);
    let list: String = client.send(Command::new("CLIENT").arg("LIST").returning()).await.unwrap();
    let port = format!("laddr=127.0.0.1:{} ", server.tls_addr().port());
    assert_eq!(list.lines().filter(|line| line.contains(&port)).count(), 2, "{list}");
}

#[tokio::test]
async fn error_says_what_is_wrong_with_the_certificate() {
    let server = server();
    let address = server.tls_addr();
    let stranger = TempDir::new().unwrap();
    let stranger = Certificates::generate(stranger.path());
    // Another authority with the same name, and one with another name.
    for path in [&stranger.authority, &stranger.server] {
        let authorities = Authorities::from_pem(&fs::read(path).unwrap()).unwrap();
        let tls = TlsOptions::default().authorities(authorities);
        let error = handshake_error(options(&server, address).tls(tls)).await;
        assert!(matches!(*error, TlsHandshakeError::UnknownAuthority), "{error:?}");
    }

    let named = |name: &str| TlsOptions::default().authorities(authorities(server.certificates())).server_name(name);
    let error = handshake_error(options(&server, address).tls(named("tide.example"))).await;
    assert!(matches!(*error, TlsHandshakeError::WrongName(_)), "{error:?}");
    assert!(error.to_string().contains("tide.example") && error.to_string().contains("localhost"), "{error}");
    assert!(Client::connect(options(&server, address).tls(named("localhost"))).await.is_ok());

    let Certificates { expired, expired_key, server: chain, server_key, .. } = server.certificates();
    let present = |chain: &Path, key: &Path| {
        let [chain, key] = [chain, key].map(|path| path.display().to_string());
        let reply = server.cli(["CONFIG", "SET", "tls-cert-file", &chain, "tls-key-file", &key]);
        assert_eq!(reply, "OK");
    };
    present(expired, expired_key);
    let error = handshake_error(options(&server, address)).await;
    assert!(matches!(*error, TlsHandshakeError::NotValidNow(_)), "{error:?}");

    // The client tries again, and the certificate is renewed.
    let client = Client::start(options(&server, address).while_down(WhileDown::Queue));
    let mut states = client.states();
    while states.next().await.unwrap().state != ConnectionState::Failed {}
    present(chain, server_key);
    client.send(commands::set("tide", "high")).await.unwrap();
}

#[tokio::test]
async fn server_may_require_a_client_certificate() {
    let server = RedisServer::options().tls(true).config("tls-auth-clients yes").start();
    let tls = || TlsOptions::default().authorities(authorities(server.certificates()));
    let error = handshake_error(options(&server, server.tls_addr())).await;
    assert!(matches!(*error, TlsHandshakeError::IdentityRequired), "{error:?}");

    let folder = TempDir::new().unwrap();
    let stranger = Certificates::generate(folder.path());
    let unknown = tls().identity(identity(&stranger.client, &stranger.client_key));
    let error = handshake_error(options(&server, server.tls_addr()).tls(unknown)).await;
    assert!(matches!(*error, TlsHandshakeError::IdentityRejected(_)), "{error:?}");

    let Certificates { client, client_key, .. } = server.certificates();
    let known = tls().identity(identity(client, client_key));
    let client = Client::connect(options(&server, server.tls_addr()).tls(known)).await.unwrap();
    client.send(commands::set("tide", "high")).await.unwrap();
}

#[tokio::test]
async fn invalid_options_close_the_client_before_anything_is_sent() {
    let server = server();
    let proxy = FaultProxy::start(server.tls_addr());
    let tls = TlsOptions::default().authorities(authorities(server.certificates()));
    let Certificates { server: chain, client_key, .. } = server.certificates();
    let mixed = tls.clone().identity(identity(chain, client_key));
    let nameless = tls.server_name("no name");
    let mut invalid = vec![mixed, nameless];
    if cfg!(not(feature = "native-roots")) {
        invalid.push(TlsOptions::default());
    }
    for tls in invalid {
        let client = Client::start(options(&server, proxy.addr()).tls(tls));
        assert!(client.send(commands::get("tide")).await.is_err());
        let mut status = client.status();
        let status = status.wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
        let Some(ConnectionError::TlsOptions(error)) = status.last_error.as_deref() else { panic!("{status:?}") };
        assert!(matches!(**error, TlsError::Rustls(_) | TlsError::Name { .. } | TlsError::NoAuthority), "{error:?}");
    }
    assert_eq!(proxy.accepted_connections(), 0);
    assert!(matches!(
        Authorities::from_pem(b"-----BEGIN CERTIFICATE-----"),
        Err(TlsError::Pem(_) | TlsError::NoAuthority)
    ));
}

#[tokio::test]
async fn lost_connection_is_replaced() {
    let mut server = server();
    let client = Client::connect(options(&server, server.tls_addr()).while_down(WhileDown::Queue)).await.unwrap();
    assert_eq!(client.send(commands::incr("visits")).await.unwrap(), 1);
    server.kill();
    let mut status = client.status();
    let lost = status.wait_for(|status| status.state != ConnectionState::Open).await.unwrap().clone();
    assert!(
        matches!(lost.last_error.as_deref(), Some(ConnectionError::EndOfStream | ConnectionError::Io(_))),
        "{lost:?}"
    );
    server.restart();
    assert_eq!(client.send(commands::incr("visits")).await.unwrap(), 1);
    assert_eq!(client.status().borrow().generation, 2);
    client.close(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_pipelines_are_sent_and_answered() {
    const LEN: usize = 300_000;
    let server = server();
    let client = Client::connect(options(&server, server.tls_addr())).await.unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..4_u8 {
        let client = client.clone();
        tasks.spawn(async move {
            let value = |index: u8| vec![16 * task + index; LEN];
            let mut sets = Pipeline::vector();
            for index in 0..16 {
                sets.push(commands::set(format!("{task}:{index}"), value(index)));
            }
            for set in client.pipeline(sets).await.unwrap() {
                set.unwrap();
            }
            let mut gets = Pipeline::<Vec<Vec<u8>>>::vector();
            for index in 0..16 {
                gets.push(commands::get(format!("{task}:{index}")).returning());
            }
            for (index, got) in (0..).zip(client.pipeline(gets).await.unwrap()) {
                assert!(got.unwrap() == value(index), "{task}:{index}");
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(client.status().borrow().generation, 1);
}

/// The last bytes of a request wait in the buffer of TLS, because the network is slower than the client.
#[tokio::test]
async fn request_over_a_slow_network_is_sent_completely() {
    let server = server();
    let proxy = FaultProxy::start(server.tls_addr());
    let client = Client::connect(options(&server, proxy.addr())).await.unwrap();
    proxy.inject(Faults::default().bytes_per_second(NonZeroU64::new(128 << 20).unwrap()));
    for len in (4_000_000..6_000_000).step_by(50_000) {
        client.send(commands::set("large", vec![0; len])).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn command_that_was_executed_is_never_reported_as_unsent() {
    let server = server();
    let proxy = FaultProxy::start(server.tls_addr());
    let client = Client::connect(options(&server, proxy.addr())).await.unwrap();
    let padding = "x".repeat(20_000);
    let (mut unsent, mut round) = (0, 0);
    while unsent < 20 && round < 200 {
        let mut status = client.status();
        status.wait_for(|status| status.state == ConnectionState::Open).await.unwrap();
        let bytes = 1 + 7919 * round % 400_000;
        proxy.inject(Faults::default().cut(Cut::after(bytes, Direction::ToServer).mode(CloseMode::Reset)));
        let mut tasks = JoinSet::new();
        for index in 0..40 {
            let (client, key, padding) = (client.clone(), format!("{round}:{index}"), padding.clone());
            tasks.spawn(async move { (client.send(commands::set(&key, padding)).await, key) });
        }
        while let Some(ended) = tasks.join_next().await {
            let (result, key) = ended.unwrap();
            match result {
                Ok(()) => {}
                Err(error) if error.outcome() == Some(RequestOutcome::NeverSent) => {
                    unsent += 1;
                    assert_eq!(server.cli(["EXISTS", &key]), "0", "{key} {error:?}");
                }
                Err(error) => assert!(matches!(error, Error::Lost { .. }), "{error:?}"),
            }
        }
        proxy.heal();
        round += 1;
    }
}

#[tokio::test]
async fn plain_client_at_the_port_for_tls_fails() {
    let server = server();
    let plain = Options::default().address(server.tls_addr()).connect_timeout(PATIENCE);
    let error = Client::connect(plain).await.unwrap_err();
    assert!(matches!(error, ConnectionError::ClosedInHandshake), "{error:?}");
    assert!(error.to_string().contains("TLS"), "{error}");
}

#[tokio::test]
async fn tls_client_at_a_port_without_tls_fails() {
    let server = server();
    // The server waits for the end of a line.
    let silent = options(&server, server.addr()).connect_timeout(Duration::from_millis(500));
    match Client::connect(silent).await.unwrap_err() {
        error @ ConnectionError::ConnectTimedOut => assert!(error.to_string().contains("TLS"), "{error}"),
        // The handshake has a line by chance.
        ConnectionError::Tls(error) => assert!(matches!(*error, TlsHandshakeError::NotTls(_)), "{error:?}"),
        error => panic!("{error:?}"),
    }

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut http = JoinSet::new();
    http.spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let error = handshake_error(options(&server, address)).await;
    assert!(matches!(*error, TlsHandshakeError::NotTls(_)), "{error:?}");
}

#[tokio::test]
async fn close_does_not_wait_for_a_server_that_does_not_read() {
    let server = server();
    let client = Client::connect(options(&server, server.tls_addr())).await.unwrap();
    server.pause();
    let sent = tokio::spawn({
        let client = client.clone();
        async move { client.send(commands::set("large", vec![0; 30_000_000])).await }
    });
    wait_until_async("it is in flight", PATIENCE, async || client.stats().bytes_out > 0).await;
    tokio::time::timeout(PATIENCE, client.close(Duration::from_millis(10))).await.expect("it ends");
    let error = sent.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed { outcome: RequestOutcome::MaybeExecuted }), "{error:?}");
    server.resume();
}
