//! The RESP example, tested with redis-cli and redis-benchmark.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[path = "../../examples/redis_server.rs"]
#[expect(dead_code, reason = "its main is not run")]
mod redis_server;

/// Runs `work` with the port of a server that runs the example.
fn with_server<T>(work: impl FnOnce(u16) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = runtime.spawn(redis_server::serve(listener, async { drop(stopped.await) }));
    let done = work(port);
    drop(stop);
    runtime.block_on(serving).unwrap().unwrap();
    done
}

fn run(program: &str, port: u16, arguments: &[&str]) -> String {
    let output = Command::new(program).args(["-p", &port.to_string()]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn redis_cli_reads_and_writes_strings() {
    with_server(|port| {
        assert_eq!(run("redis-cli", port, &["PING"]), "PONG\n");
        assert_eq!(run("redis-cli", port, &["SET", "tide", "high"]), "OK\n");
        assert_eq!(run("redis-cli", port, &["-3", "GET", "tide"]), "high\n");
        assert_eq!(run("redis-cli", port, &["DEL", "tide", "none"]), "1\n");
        assert_eq!(run("redis-cli", port, &["GET", "tide"]), "\n");
        assert!(run("redis-cli", port, &["FLY"]).starts_with("ERR unknown command"));
    });
}

#[test]
fn published_messages_reach_subscribers() {
    with_server(|port| {
        for version in ["-2", "-3"] {
            let port_text = port.to_string();
            let mut listener = Command::new("redis-cli")
                .args(["-p", &port_text, version, "SUBSCRIBE", "tides"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(listener.stdout.take().unwrap()).lines().map(Result::unwrap);
            assert!(lines.any(|line| line.contains("subscribe")));
            while run("redis-cli", port, &["PUBLISH", "tides", "it is high"]) != "1\n" {}
            assert!(lines.any(|line| line.contains("it is high")));
            listener.kill().unwrap();
            listener.wait().unwrap();
        }
    });
}

#[test]
fn redis_benchmark_completes() {
    with_server(|port| {
        let table =
            run("redis-benchmark", port, &["-t", "ping_mbulk,set,get", "-n", "2000", "-P", "16", "-q", "--csv"]);
        for test in ["PING_MBULK", "SET", "GET"] {
            assert!(table.contains(test), "{table}");
        }
    });
}
