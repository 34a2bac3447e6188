//! A real browser: which pages can open a WebSocket to a server that requires no login.
//!
//! The browser resolves `evil.example` to this machine, as in a DNS rebinding attack. Each page reports the result of its WebSocket
//! to the site it came from, and is redirected to the next page.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;
use tidewire_testkit::{PATIENCE, Process, wait_until, wait_until_async};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::client::{options, serve, wait_for_connections};
use crate::metrics_page::metric;

/// Starting a browser on a loaded machine takes long.
const BROWSER_PATIENCE: Duration = Duration::from_mins(2);

/// A browser with its own profile.
struct Browser {
    process: Process,
    profile: TempDir,
}

impl Browser {
    fn open(url: &str) -> Self {
        let profile = tempfile::Builder::new().prefix("tidewire-browser-").tempdir().unwrap();
        let mut command = Command::new("chromium");
        command.args([
            "--headless",
            // Tests may run as root in a container, where the sandbox and the shared memory of the browser do not work.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-extensions",
            "--no-first-run",
            "--host-resolver-rules=MAP evil.example 127.0.0.1",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg(url);
        // The processes of the browser form a group. Processes that leave the group have the profile in their environment.
        command.process_group(0).env("HOME", profile.path());
        let process = Process::try_spawn(command).unwrap_or_else(|error| {
            panic!(
                "cannot start chromium: {error}. Install it with `scripts/need chromium chromium`, or run `make test`"
            )
        });
        Self { process, profile }
    }

    /// Closes the browser and waits until all its processes have ended.
    fn close(mut self) {
        self.process.terminate();
        self.process.wait();
        let (group, profile) = (self.process.pid().to_string(), self.profile.path());
        wait_until("all processes of the browser have ended", PATIENCE, || processes(&group, profile) == 0);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Only after a failed test. Otherwise the browser has been closed.
        let group = i32::try_from(self.process.pid()).ok().and_then(Pid::from_raw);
        if let Some(group) = group.filter(|_| self.process.try_wait().is_none()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Returns the number of processes in this group, or with this directory in their environment.
fn processes(group: &str, profile: &Path) -> usize {
    let profile = profile.as_os_str().as_encoded_bytes();
    let is_of_browser = |process: &Path| {
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        // The fields after the name are state, parent and group.
        let is_in_group = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.split(' ').nth(2) == Some(group));
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        is_in_group || environment.windows(profile.len()).any(|part| part == profile)
    };
    fs::read_dir("/proc")
        .unwrap()
        .filter(|entry| entry.as_ref().is_ok_and(|entry| is_of_browser(&entry.path())))
        .count()
}

/// A page and the URL of its WebSocket.
struct Visit {
    page: String,
    socket: String,
}

/// Serves the pages, and forwards handshakes to the server as if they had arrived on its port.
struct Site {
    visits: Vec<Visit>,
    server: SocketAddr,
    outcomes: mpsc::Sender<String>,
}

impl Site {
    fn serve(self, listener: TcpListener) -> JoinHandle<()> {
        let site = Arc::new(self);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(Arc::clone(&site).respond(socket));
            }
        })
    }

    async fn respond(self: Arc<Self>, mut socket: TcpStream) {
        // A browser opens connections it does not use.
        let Some((head, body)) = request(&mut socket).await else { return };
        if head.to_lowercase().contains("\r\nupgrade: websocket\r\n") {
            let mut server = TcpStream::connect(self.server).await.unwrap();
            server.write_all(head.as_bytes()).await.unwrap();
            // Either side may end the connection.
            let _ = copy_bidirectional(&mut socket, &mut server).await;
            return;
        }
        let number = head.split(' ').nth(1).and_then(|path| path.trim_start_matches('/').parse::<usize>().ok());
        let content = match number {
            Some(number) if head.starts_with("POST ") => {
                let _ = self.outcomes.send(format!("{number} {body}")).await;
                self.visits.get(number + 1).map(|visit| visit.page.clone()).unwrap_or_default()
            }
            Some(number) => page(&self.visits[number].socket),
            None => String::new(),
        };
        let length = content.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        // The browser may have closed the connection.
        let _ = socket.write_all(format!("{head}{content}").as_bytes()).await;
    }
}

/// Reads the head and the body of a request.
async fn request(socket: &mut TcpStream) -> Option<(String, String)> {
    let mut input = Vec::new();
    loop {
        if let Some(end) = input.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8(input[..end + 4].to_vec()).unwrap();
            let lines = head.to_lowercase();
            let length =
                lines.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()).unwrap_or("0");
            if input.len() == end + 4 + length.parse::<usize>().unwrap() {
                return Some((head, String::from_utf8(input.split_off(end + 4)).unwrap()));
            }
        }
        if socket.read_buf(&mut input).await.ok()? == 0 {
            return None;
        }
    }
}

/// Returns a page that reports the first message of its WebSocket, or its failure, and then loads the page named in the response.
fn page(socket: &str) -> String {
    format!(
        r#"<!DOCTYPE html><script>
        let isReported = false;
        async function report(outcome) {{
            if (isReported) return;
            isReported = true;
            const response = await fetch(location.pathname, {{ method: "POST", body: outcome }});
            const next = await response.text();
            if (next) location = next;
        }}
        const socket = new WebSocket("{socket}");
        socket.onmessage = (event) => report(JSON.parse(event.data).type);
        socket.onerror = () => report("rejected");
        </script>"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_page_cannot_connect_and_local_page_can() {
    let server = serve(options()).await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let site = listener.local_addr().unwrap().port();
    let open_to_evil = options().allowed_origins([format!("http://evil.example:{site}")]);
    let open_to_evil = serve(open_to_evil).await;

    let cases = [
        // A page of the same origin.
        ("localhost", format!("ws://localhost:{site}/"), "welcome"),
        // A page of this machine on another port.
        ("localhost", server.url(), "welcome"),
        // A page of a foreign origin.
        ("evil.example", server.url(), "rejected"),
        // The same with DNS rebinding: for the browser, the page and the server have the same origin.
        ("evil.example", format!("ws://evil.example:{site}/"), "rejected"),
        // The server rejects the page, and not the browser: a server that allows this origin accepts it.
        ("evil.example", open_to_evil.url(), "welcome"),
    ];
    let visit = |(number, (host, socket, _)): (usize, &(&str, String, &str))| Visit {
        page: format!("http://{host}:{site}/{number}"),
        socket: socket.clone(),
    };
    let visits: Vec<Visit> = cases.iter().enumerate().map(visit).collect();
    let first = visits[0].page.clone();
    let (outcomes, mut reported) = mpsc::channel(cases.len());
    let serving = Site { visits, server: server.address(), outcomes }.serve(listener);

    let browser = tokio::task::spawn_blocking(move || Browser::open(&first)).await.unwrap();
    for (number, (host, socket, expected)) in cases.iter().enumerate() {
        let outcome = timeout(BROWSER_PATIENCE, reported.recv()).await;
        let outcome = outcome.unwrap_or_else(|_| panic!("no report from the browser: {}", browser.process.output()));
        assert_eq!(outcome.unwrap(), format!("{number} {expected}"), "a page of {host} that connects to {socket}");
    }
    assert_eq!(metric(&server, "origins_refused_total").await, 2);
    assert_eq!(metric(&server, "connections_admitted_total").await, 2);
    tokio::task::spawn_blocking(|| browser.close()).await.unwrap();
    wait_until_async("the sockets of the browser are closed", PATIENCE, async || open_to_evil.connection_count() == 0)
        .await;
    wait_for_connections(&server, 0).await;
    serving.abort();
}
