//! NATS over WebSocket, as far as a subscriber and a publisher need it.

use std::process::Command;

use tidewire_testkit::PATIENCE;

use super::client::{self, Client, contains, lossy};
use super::peers;
use super::process::{Served, spawn};

/// What the contender needs.
pub(super) const PROGRAM: &str = "nats-server";

pub(super) fn start() -> Served {
    let mut command = Command::new(peers::program(PROGRAM));
    command.arg("--config").arg(peers::file("nats.conf"));
    Served::new(spawn(command), "Listening for websocket clients on ws://")
}

/// Somebody who hears of the subject "rows" if `is_subscriber`, and who may publish.
pub(super) fn connect(address: &str, is_subscriber: bool) -> Client {
    let mut client = Client::connect(address);
    let info = client.receive();
    assert!(info.starts_with(b"INFO "), "{}", lossy(&info));
    let subscribe = if is_subscriber { "SUB rows 1\r\n" } else { "" };
    let request = format!("CONNECT {{\"verbose\":false,\"pedantic\":false}}\r\n{subscribe}PING\r\n");
    client.write(&client::binary(request.as_bytes()));
    let answer = client.receive();
    assert!(contains(&answer, b"PONG"), "{}", lossy(&answer));
    client
}

/// Waits for the ping that the server sends everybody two seconds after they came, and answers it. There is none for an hour after
/// that, by its configuration.
pub(super) fn settle(client: &mut Client) {
    client.socket.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let ping = client.receive();
    assert!(ping == b"PING\r\n", "{}", lossy(&ping));
    client.write(&client::binary(b"PONG\r\n"));
}

/// What is sent to publish this.
pub(super) fn publication(text: &str) -> Vec<u8> {
    client::binary(format!("PUB rows {}\r\n{text}\r\n", text.len()).as_bytes())
}
