//! A real browser: which of its pages can open a WebSocket to a server that needs no login.
//!
//! The browser resolves `evil.example` to this machine, as the DNS of an attacker does who rebinds a name. Each page reports what
//! became of its WebSocket to the site that it came from, and is sent on to the next page.

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

use crate::client::{is_left_with, options, serve};
use crate::page::metric;

/// Starting a browser on a loaded machine takes long.
const BROWSER_PATIENCE: Duration = Duration::from_mins(2);

/// A browser, with a profile of its own.
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
            // The tests may run as root and in a container, where its sandbox and its shared memory do not work.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-extensions",
            "--no-first-run",
            "--host-resolver-rules=MAP evil.example 127.0.0.1",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg(url);
        // Its processes are one group, and those that leave the group have this in their environment.
        command.process_group(0).env("HOME", profile.path());
        let process = Process::try_spawn(command).unwrap_or_else(|error| {
            panic!(
                "cannot start chromium: {error}. Install it with `scripts/need chromium chromium`, or run `make test`"
            )
        });
        Self { process, profile }
    }

    /// Closes the browser, and waits until all of its processes have ended.
    fn close(mut self) {
        self.process.terminate();
        self.process.wait();
        let (group, profile) = (self.process.pid().to_string(), self.profile.path());
        wait_until("all processes of the browser have ended", PATIENCE, || processes(&group, profile) == 0);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // After a failed test; otherwise it has been closed.
        let group = i32::try_from(self.process.pid()).ok().and_then(Pid::from_raw);
        if let Some(group) = group.filter(|_| self.process.try_wait().is_none()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// How many processes are in this group, or have this directory in their environment.
fn processes(group: &str, profile: &Path) -> usize {
    let profile = profile.as_os_str().as_encoded_bytes();
    let is_of_browser = |process: &Path| {
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        // After the name: state, parent, group.
        let is_in_group = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.split(' ').nth(2) == Some(group));
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        is_in_group || environment.windows(profile.len()).any(|part| part == profile)
    };
    fs::read_dir("/proc")
        .unwrap()
        .filter(|entry| entry.as_ref().is_ok_and(|entry| is_of_browser(&entry.path())))
        .count()
}

/// A page, and where it opens its WebSocket.
struct Visit {
    page: String,
    socket: String,
}

/// Serves the pages, and passes handshakes on to the server, as if they had come to its own port.
struct Site {
    visits: Vec<Visit>,
    server: SocketAddr,
    verdicts: mpsc::UnboundedSender<String>,
}

impl Site {
    fn serve(self, listener: TcpListener) -> JoinHandle<()> {
        let site = Arc::new(self);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(Arc::clone(&site).answer(socket));
            }
        })
    }

    async fn answer(self: Arc<Self>, mut socket: TcpStream) {
        // A browser opens connections that it does not use.
        let Some((head, body)) = request(&mut socket).await else { return };
        if head.to_lowercase().contains("\r\nupgrade: websocket\r\n") {
            let mut server = TcpStream::connect(self.server).await.unwrap();
            server.write_all(head.as_bytes()).await.unwrap();
            // The browser or the server ends it.
            let _ = copy_bidirectional(&mut socket, &mut server).await;
            return;
        }
        let number = head.split(' ').nth(1).and_then(|path| path.trim_start_matches('/').parse::<usize>().ok());
        let content = match number {
            Some(number) if head.starts_with("POST ") => {
                let _ = self.verdicts.send(format!("{number} {body}"));
                self.visits.get(number + 1).map(|visit| visit.page.clone()).unwrap_or_default()
            }
            Some(number) => page(&self.visits[number].socket),
            None => String::new(),
        };
        let length = content.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        // The browser may have gone.
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

/// A page that reports the first message of its WebSocket, or that there is none, and goes on to the page that it is told.
fn page(socket: &str) -> String {
    format!(
        r#"<!DOCTYPE html><script>
        let isTold = false;
        async function tell(verdict) {{
            if (isTold) return;
            isTold = true;
            const response = await fetch(location.pathname, {{ method: "POST", body: verdict }});
            const next = await response.text();
            if (next) location = next;
        }}
        const socket = new WebSocket("{socket}");
        socket.onmessage = (event) => tell(JSON.parse(event.data).type);
        socket.onerror = () => tell("refused");
        </script>"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_stranger_cannot_connect_and_a_page_of_this_machine_can() {
    let server = serve(options()).await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let site = listener.local_addr().unwrap().port();
    let open_to_evil = options().allowed_origins([format!("http://evil.example:{site}")]);
    let open_to_evil = serve(open_to_evil).await;

    let cases = [
        // A page of the own origin.
        ("localhost", format!("ws://localhost:{site}/"), "welcome"),
        // A page of this machine, on another port.
        ("localhost", server.url(), "welcome"),
        // A page of a stranger.
        ("evil.example", server.url(), "refused"),
        // The same with DNS rebinding: to the browser, page and server have one origin.
        ("evil.example", format!("ws://evil.example:{site}/"), "refused"),
        // It is the server that refuses, not the browser: another server admits the page.
        ("evil.example", open_to_evil.url(), "welcome"),
    ];
    let visit = |(number, (host, socket, _)): (usize, &(&str, String, &str))| Visit {
        page: format!("http://{host}:{site}/{number}"),
        socket: socket.clone(),
    };
    let visits: Vec<Visit> = cases.iter().enumerate().map(visit).collect();
    let first = visits[0].page.clone();
    let (verdicts, mut reported) = mpsc::unbounded_channel();
    let serving = Site { visits, server: server.address(), verdicts }.serve(listener);

    let browser = tokio::task::spawn_blocking(move || Browser::open(&first)).await.unwrap();
    for (number, (host, socket, expected)) in cases.iter().enumerate() {
        let verdict = timeout(BROWSER_PATIENCE, reported.recv()).await;
        let verdict = verdict.unwrap_or_else(|_| panic!("no verdict from the browser: {}", browser.process.output()));
        assert_eq!(verdict.unwrap(), format!("{number} {expected}"), "a page of {host} that connects to {socket}");
    }
    assert_eq!(metric(&server, "origins_refused_total").await, 2);
    assert_eq!(metric(&server, "connections_admitted_total").await, 2);
    tokio::task::spawn_blocking(|| browser.close()).await.unwrap();
    wait_until_async("its sockets are closed", PATIENCE, async || open_to_evil.connection_count() == 0).await;
    is_left_with(&server, 0).await;
    serving.abort();
}
