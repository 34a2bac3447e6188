//! `PocketBase`, which sends events to subscribers over HTTP (server-sent events).

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use serde_json::Value as Json;
use tempfile::TempDir;
use tidewire_testkit::Port;

use super::client::{lossy, position};
use super::peers;
use super::process::{ServerProcess, spawn};

/// The required program.
pub(super) const PROGRAM: &str = "pocketbase";

/// The id of the row, from the migration in `bench/peers/pocketbase`.
const ROW: &str = "row000000000007";

/// A running server, with its data folder and reserved port.
pub(super) struct PocketBase {
    pub(super) process: ServerProcess,
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
    PocketBase { process: ServerProcess::listening(process, port.addr().to_string()), _folder: folder, _port: port }
}

/// Encodes a request on a persistent connection.
fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let headers = format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}");
    format!("{method} {path} HTTP/1.1\r\n{headers}\r\n\r\n{body}").into_bytes()
}

/// Encodes an update of the count of the row.
pub(super) fn update(count: u64) -> Vec<u8> {
    request("PATCH", &format!("/api/collections/rows/records/{ROW}"), &format!(r#"{{"count":{count}}}"#))
}

/// Opens a subscription to the row. Returns the connection that receives the events.
pub(super) fn subscribe(address: &str) -> TcpStream {
    let mut events = TcpStream::connect(address).expect("the server accepts");
    events.write_all(&request("GET", "/api/realtime", "")).expect("the server reads");
    let first = read_until(&mut events, is_event);
    let (_, data) = first.split_once("data:").expect("an event has data");
    let connected: Json = serde_json::from_str(data.lines().next().unwrap_or_default()).expect("data is JSON");
    let id = connected["clientId"].as_str().expect("a client has an id");
    let body = format!(r#"{{"clientId":"{id}","subscriptions":["rows/{ROW}"]}}"#);
    let mut control = TcpStream::connect(address).expect("the server accepts");
    control.write_all(&request("POST", "/api/realtime", &body)).expect("the server reads");
    let response = read_until(&mut control, is_response);
    assert!(response.starts_with("HTTP/1.1 204 "), "{response}");
    events
}

/// Returns whether the bytes end with a complete event and its HTTP chunk.
pub(super) fn is_event(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\n\n\r\n")
}

/// Returns whether the bytes are a complete response, with a content length or without a body.
pub(super) fn is_response(bytes: &[u8]) -> bool {
    let Some(head) = position(bytes, b"\r\n\r\n") else { return false };
    let headers = lossy(&bytes[..head]).to_ascii_lowercase();
    let length = headers.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |length| length.trim().parse().expect("a length is a number"));
    bytes.len() == head + 4 + length
}

fn read_until(socket: &mut TcpStream, is_complete: fn(&[u8]) -> bool) -> String {
    let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
    while !is_complete(&input) {
        let length = socket.read(&mut bytes).expect("the server answers");
        assert!(length > 0, "the server closed the connection after {}", lossy(&input));
        input.extend_from_slice(&bytes[..length]);
    }
    lossy(&input)
}
