//! A client's view of a Redis server that is killed and restarted, and of a network that drops everything.
//!
//! `cargo run -p tidewire-testkit --example outage`

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::time::Duration;

use tidewire_testkit::{FaultProxy, Faults, RedisServer};

pub(crate) fn main() {
    let mut redis = RedisServer::options().config("appendonly yes").config("appendfsync always").start();
    let proxy = FaultProxy::start(redis.addr());
    println!("redis-server (pid {}) on {}, behind a proxy on {}", redis.pid(), redis.addr(), proxy.addr());

    println!("SET tide high   -> {}", ask(&proxy, "SET tide high").expect("the server answers"));

    redis.kill();
    println!("killed          -> {}", ask(&proxy, "GET tide").expect_err("the server is down"));

    redis.restart();
    println!("restarted       -> {}", ask(&proxy, "STRLEN tide").expect("the server answers again"));

    proxy.inject(Faults::default().half_open(true));
    let silence = ask(&proxy, "GET tide").expect_err("nothing comes back");
    println!("half-open       -> {silence}");
    assert_eq!(silence.kind(), ErrorKind::WouldBlock);
}

fn ask(proxy: &FaultProxy, command: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(proxy.addr())?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    write!(stream, "{command}\r\n")?;
    let mut answer = String::new();
    match BufReader::new(stream).read_line(&mut answer)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(answer.trim_end().to_owned()),
    }
}
