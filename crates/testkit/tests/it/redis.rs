use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::panic;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tidewire_testkit::{Process, RedisServer, ServerProgram, is_rerun, rerun};

/// Sends inline commands and returns the first `lines` lines of the answer.
fn talk(stream: &mut (impl Read + Write), commands: &str, lines: usize) -> String {
    stream.write_all(commands.as_bytes()).unwrap();
    let mut answer = String::new();
    let mut stream = BufReader::new(stream);
    for _ in 0..lines {
        stream.read_line(&mut answer).unwrap();
    }
    answer
}

fn tcp(addr: SocketAddr) -> TcpStream {
    TcpStream::connect(addr).unwrap()
}

#[test]
fn a_restarted_server_is_empty_on_the_same_port() {
    let mut redis = RedisServer::start();
    let (addr, pid) = (redis.addr(), redis.pid());
    let mut client = tcp(addr);
    assert_eq!(talk(&mut client, "SET a 1\r\n", 1), "+OK\r\n");

    redis.kill();
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "the connection died with the server");
    assert_eq!(TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);

    redis.restart();
    assert_eq!(redis.addr(), addr);
    assert_ne!(redis.pid(), pid);
    assert_eq!(talk(&mut tcp(addr), "EXISTS a\r\n", 1), ":0\r\n");
}

#[test]
fn persisted_data_survives_a_kill() {
    let mut redis = RedisServer::options().config("appendonly yes").config("appendfsync always").start();
    assert_eq!(redis.cli(["SET", "a", "two words"]), "OK");
    redis.kill();
    redis.restart();
    assert_eq!(redis.cli(["GET", "a"]), "two words");
}

#[test]
fn stop_is_graceful_even_when_paused() {
    let mut redis = RedisServer::options().config("appendonly yes").config("appendfsync no").start();
    redis.cli(["SET", "a", "1"]);
    redis.pause();
    redis.stop();
    redis.restart();
    assert_eq!(redis.cli(["GET", "a"]), "1");
}

#[test]
fn a_paused_server_accepts_and_does_not_answer() {
    let redis = RedisServer::start();
    redis.pause();
    let mut client = tcp(redis.addr());
    client.write_all(b"PING\r\n").unwrap();
    client.set_nonblocking(true).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    client.set_nonblocking(false).unwrap();
    redis.resume();
    assert_eq!(talk(&mut client, "", 1), "+PONG\r\n");
}

#[test]
fn password_and_acl_user() {
    let redis = RedisServer::options()
        .password("it's \"quoted\" \\ so")
        .user("reader", "on >secret ~public:* +get +ping")
        .start();
    assert!(talk(&mut tcp(redis.addr()), "PING\r\n", 1).starts_with("-NOAUTH"));
    assert_eq!(redis.cli(["SET", "public:a", "1"]), "OK");

    let answers =
        talk(&mut tcp(redis.addr()), "AUTH reader secret\r\nGET public:a\r\nGET private:a\r\nSET public:a 2\r\n", 5);
    let answers: Vec<_> = answers.lines().collect();
    assert_eq!(answers[..3], ["+OK", "$1", "1"]);
    assert!(answers[3..].iter().all(|answer| answer.starts_with("-NOPERM")), "{answers:?}");
}

#[test]
fn unix_socket() {
    let redis = RedisServer::start();
    let mut client = UnixStream::connect(redis.unix_socket()).unwrap();
    assert_eq!(talk(&mut client, "PING\r\n", 1), "+PONG\r\n");
}

#[test]
fn tls_with_a_client_certificate() {
    let program = if RedisServer::supports_tls() { ServerProgram::from_env() } else { ServerProgram::Redis };
    let redis = RedisServer::options().program(program).tls(true).config("tls-auth-clients yes").start();
    let files = redis.certificates();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&files.authority).unwrap()).unwrap();
    let trusting = || ClientConfig::builder().with_root_certificates(roots.clone());
    let connect = |config: ClientConfig, host: &str| {
        let name = ServerName::try_from(host.to_owned()).unwrap();
        StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), tcp(redis.tls_addr()))
    };

    for host in ["localhost", "127.0.0.1"] {
        let certificate = vec![CertificateDer::from_pem_file(&files.client).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&files.client_key).unwrap();
        let shown = trusting().with_client_auth_cert(certificate, key).unwrap();
        assert_eq!(talk(&mut connect(shown, host), "PING\r\n", 1), "+PONG\r\n");
    }

    let mut anonymous = connect(trusting().with_no_client_auth(), "localhost");
    let refused = anonymous.write_all(b"PING\r\n").and_then(|()| anonymous.read(&mut [0]));
    assert!(refused.is_err(), "a client without a certificate was accepted");
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let panic = panic::catch_unwind(|| RedisServer::options().config("no-such-directive 1").start()).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("no-such-directive"), "{message}");
}

#[test]
fn missing_program_is_named_with_how_to_install_it() {
    if is_rerun() {
        RedisServer::start();
        return;
    }
    for (program, message) in [
        (
            "redis",
            "cannot start redis-server: No such file or directory (os error 2). It comes with the Debian package redis-server",
        ),
        ("valkey", "cannot start valkey-server: No such file or directory (os error 2). Install Valkey"),
        (
            "/no/such/server",
            "cannot start /no/such/server: No such file or directory (os error 2). Expected the path of",
        ),
        ("keydb", "expected `redis`, `valkey` or the absolute path of a program in TIDEWIRE_TEST_SERVER, got `keydb`"),
    ] {
        let mut command = rerun("redis::missing_program_is_named_with_how_to_install_it");
        command.env("PATH", "").env("TIDEWIRE_TEST_SERVER", program);
        let mut test = Process::spawn(command);
        test.wait_for_line(message);
        assert_eq!(test.wait().code(), Some(101));
    }
}

#[test]
fn options_choose_the_program() {
    let redis = RedisServer::options().program(ServerProgram::Redis).start();
    assert!(!redis.cli(["INFO", "server"]).contains("valkey_version"));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("redis-server");
    std::os::unix::fs::symlink(std::fs::read_link(format!("/proc/{}/exe", redis.pid())).unwrap(), &path).unwrap();
    let linked = RedisServer::options().program(ServerProgram::Path(path.clone())).start();
    assert!(linked.cli(["INFO", "server"]).contains(&format!("executable:{}", path.display())));
}

#[test]
fn program_without_tls_is_recognized() {
    let dir = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        ServerProgram::Path(path)
    };
    assert!(!script("without", "#!/bin/sh\necho '# Failed finding TLS support.'; exit 1").supports_tls());
    let broken = script("broken", "#!/bin/sh\necho out of memory; exit 1");
    let panic = panic::catch_unwind(|| broken.supports_tls()).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("did not start with TLS:\nout of memory"), "{message}");
}
