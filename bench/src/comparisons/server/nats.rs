//! A minimal NATS client over WebSocket: subscribe and publish.

use std::process::Command;

use tidewire_testkit::PATIENCE;

use super::client::{self, Client, contains, lossy};
use super::peers;
use super::process::{ServerProcess, spawn};

/// The required program.
pub(super) const PROGRAM: &str = "nats-server";

pub(super) fn start() -> ServerProcess {
    let mut command = Command::new(peers::program(PROGRAM));
    command.arg("--config").arg(peers::file("nats.conf"));
    ServerProcess::new(spawn(command), "Listening for websocket clients on ws://")
}

/// Connects a client. It subscribes to the subject "rows" if `is_subscriber`.
pub(super) fn connect(address: &str, is_subscriber: bool) -> Client {
    let mut client = Client::connect(address);
    let info = client.receive();
    assert!(info.starts_with(b"INFO "), "{}", lossy(&info));
    let subscribe = if is_subscriber { "SUB rows 1\r\n" } else { "" };
    let request = format!("CONNECT {{\"verbose\":false,\"pedantic\":false}}\r\n{subscribe}PING\r\n");
    client.write(&client::binary(request.as_bytes()));
    let reply = client.receive();
    assert!(contains(&reply, b"PONG"), "{}", lossy(&reply));
    client
}

/// Waits for the ping that the server sends to each client after two seconds, and sends a pong. The configured interval of further pings
/// is an hour.
pub(super) fn answer_ping(client: &mut Client) {
    client.socket.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let ping = client.receive();
    assert!(ping == b"PING\r\n", "{}", lossy(&ping));
    client.write(&client::binary(b"PONG\r\n"));
}

/// Encodes a message to publish.
pub(super) fn publication(text: &str) -> Vec<u8> {
    client::binary(format!("PUB rows {}\r\n{text}\r\n", text.len()).as_bytes())
}
