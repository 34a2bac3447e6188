//! `PocketBase`, whose subscribers are sent events over HTTP.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use serde_json::Value as Json;
use tempfile::TempDir;
use tidewire_testkit::Port;

use super::client::{lossy, position};
use super::peers;
use super::process::{Served, spawn};

/// What the contender needs.
pub(super) const PROGRAM: &str = "pocketbase";

/// The row that is followed: see the migration.
const ROW: &str = "row000000000007";

/// A server, and what it has to be kept with.
pub(super) struct PocketBase {
    pub(super) served: Served,
    _folder: TempDir,
    _port: Port,
}

pub(super) fn start(folder: TempDir) -> PocketBase {
    let port = Port::reserve();
    let mut command = Command::new(peers::program(PROGRAM));
    command.args(["serve", "--automigrate=false", "--http"]).arg(port.addr().to_string());
    command.arg("--migrationsDir").arg(peers::file("pocketbase")).arg("--dir").arg(folder.path());
    let process = spawn(command);
    process.wait_for_line("Server started at ");
    PocketBase { served: Served::listening(process, port.addr().to_string()), _folder: folder, _port: port }
}

/// A request, on a connection that stays.
fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let headers = format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}");
    format!("{method} {path} HTTP/1.1\r\n{headers}\r\n\r\n{body}").into_bytes()
}

/// What changes the count of the row.
pub(super) fn update(count: u64) -> Vec<u8> {
    request("PATCH", &format!("/api/collections/rows/records/{ROW}"), &format!(r#"{{"count":{count}}}"#))
}

/// Somebody who is told of the row from now on.
pub(super) fn subscribe(address: &str) -> TcpStream {
    let mut events = TcpStream::connect(address).expect("the server accepts");
    events.write_all(&request("GET", "/api/realtime", "")).expect("the server reads");
    let first = read_until(&mut events, is_event);
    let (_, data) = first.split_once("data:").expect("an event has data");
    let told: Json = serde_json::from_str(data.lines().next().unwrap_or_default()).expect("data is JSON");
    let id = told["clientId"].as_str().expect("a client has an id");
    let body = format!(r#"{{"clientId":"{id}","subscriptions":["rows/{ROW}"]}}"#);
    let mut asking = TcpStream::connect(address).expect("the server accepts");
    asking.write_all(&request("POST", "/api/realtime", &body)).expect("the server reads");
    let answer = read_until(&mut asking, is_response);
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    events
}

/// Whether this ends with an event, and with it the chunk that it is sent in.
pub(super) fn is_event(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\n\n\r\n")
}

/// Whether this is a whole response that has a length, or no body.
pub(super) fn is_response(bytes: &[u8]) -> bool {
    let Some(head) = position(bytes, b"\r\n\r\n") else { return false };
    let headers = lossy(&bytes[..head]).to_ascii_lowercase();
    let length = headers.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |length| length.trim().parse().expect("a length is a number"));
    bytes.len() == head + 4 + length
}

fn read_until(socket: &mut TcpStream, is_whole: fn(&[u8]) -> bool) -> String {
    let (mut heard, mut bytes) = (Vec::new(), [0; 4096]);
    while !is_whole(&heard) {
        let length = socket.read(&mut bytes).expect("the server answers");
        assert!(length > 0, "the server left after {}", lossy(&heard));
        heard.extend_from_slice(&bytes[..length]);
    }
    lossy(&heard)
}
