//! The container file and the systemd unit. A test whose tools are not installed prints what is missing to the standard error, and
//! passes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tidewire_testkit::wait_until;

use crate::client::Client;

/// Returns a file of the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Runs a program until it exits. Returns `None` if it is not installed.
fn run(program: &str, args: &[&str]) -> Option<Output> {
    Command::new(program).args(args).stdin(Stdio::null()).output().ok()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a program that must succeed. Returns the standard output.
fn succeed(program: &str, args: &[&str]) -> String {
    let output = run(program, args).unwrap_or_else(|| panic!("{program} is not installed"));
    assert!(output.status.success(), "{program} {args:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Writes the unit to `dir`, with the program of this build instead of the installed one. Returns its path.
fn unit(dir: &Path) -> String {
    const PROGRAM: &str = "/usr/local/bin/tidewire";
    let unit = std::fs::read_to_string(repository("contrib/systemd/tidewire.service")).unwrap();
    assert!(unit.contains(PROGRAM), "{unit}");
    let file = dir.join("tidewire.service");
    std::fs::write(&file, unit.replace(PROGRAM, env!("CARGO_BIN_EXE_tidewire"))).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn systemd_accepts_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let unit = unit(dir.path());
    let Some(verified) = run("systemd-analyze", &["verify", &unit]) else {
        eprintln!("systemd-analyze is not installed: the unit was not verified");
        return;
    };
    // Unknown keys are warnings, and leave the exit code at 0.
    assert!(verified.status.success() && text(&verified).is_empty(), "{}", text(&verified));

    let Some(version) = run("systemd-analyze", &["--version"]).map(|output| text(&output)) else { return };
    let version: u32 = version.split_whitespace().nth(1).and_then(|version| version.parse().ok()).unwrap_or(0);
    if version < 250 {
        eprintln!("systemd {version} cannot analyze a unit that is not installed: its sandbox was not checked");
        return;
    }
    // The exposure, from 0 (no access) to 100. Services without a sandbox have 96.
    let args = ["security", "--offline=true", "--no-pager", "--threshold=20", &unit];
    let secure = run("systemd-analyze", &args).unwrap();
    assert!(secure.status.success(), "{}", text(&secure));
}

/// A container. When it is dropped, it is removed together with its volume.
struct Container {
    engine: &'static str,
    id: String,
}

impl Container {
    /// Starts a container on a free port of this machine.
    fn start(engine: &'static str, image: &str) -> Self {
        let id = succeed(engine, &["run", "--detach", "--publish", "127.0.0.1::8080", image]);
        Self { engine, id }
    }

    fn url(&self) -> String {
        let address = succeed(self.engine, &["port", &self.id, "8080/tcp"]);
        format!("ws://{}/", address.lines().next().unwrap())
    }

    fn exec(&self, args: &[&str]) -> String {
        succeed(self.engine, &[&["exec", &*self.id], args].concat())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = run(self.engine, &["rm", "--force", "--volumes", &self.id]);
    }
}

/// Returns the first container engine that is installed and runs.
fn engine() -> Option<&'static str> {
    for engine in ["podman", "docker"] {
        match run(engine, &["info"]) {
            Some(info) if info.status.success() => return Some(engine),
            Some(info) => eprintln!("{engine} does not run: {}", text(&info).lines().last().unwrap_or_default()),
            None => eprintln!("{engine} is not installed"),
        }
    }
    None
}

/// The image is built as a user would build it, which takes minutes the first time.
#[tokio::test(flavor = "multi_thread")]
async fn container_serves_clients_and_keeps_its_data() {
    const IMAGE: &str = "tidewire-test";
    const HEALTH: &[&str] = &["curl", "--fail", "--silent", "http://127.0.0.1:9090/health"];
    let Some(engine) = engine() else {
        eprintln!("no container engine: the container file was not built");
        return;
    };
    let (file, context) = (repository("Containerfile"), repository("."));
    succeed(engine, &["build", "--file", file.to_str().unwrap(), "--tag", IMAGE, context.to_str().unwrap()]);
    let container = Container::start(engine, IMAGE);
    let is_healthy = || {
        let args = [&["exec", &*container.id], HEALTH].concat();
        run(engine, &args).is_some_and(|output| output.status.success())
    };
    wait_until("the server is healthy", Duration::from_mins(1), is_healthy);
    assert_eq!(container.exec(&["id", "-u"]), "10001");
    assert!(container.exec(&["curl", "--silent", "http://127.0.0.1:9090/metrics"]).contains("tidewire_connections 0"));

    let config = json!({"key": "id", "schema": {"id": {"type": "number", "generated": "autoincrement"}}});
    let mut client = Client::connect_to(&container.url()).await;
    client.call("store.defineBucket", json!({"name": "notes", "config": config})).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {"text": "kept"}})).await;
    client.call("server.backup", json!({"name": "first"})).await;
    drop(client);

    // A graceful stop takes at most the grace period and six seconds.
    succeed(engine, &["stop", "--time", "15", &container.id]);
    assert_eq!(succeed(engine, &["inspect", "--format", "{{.State.ExitCode}}", &container.id]), "0");
    succeed(engine, &["start", &container.id]);
    wait_until("the server is healthy again", Duration::from_mins(1), is_healthy);
    let mut client = Client::connect_to(&container.url()).await;
    let note: Json = client.call("store.get", json!({"bucket": "notes", "key": 1})).await;
    assert_eq!(note["text"], "kept");
}
