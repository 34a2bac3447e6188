//! A WebSocket client that costs next to nothing: blocking, and its frames can be made before.

use std::io::{self, Read, Write as _};
use std::net::TcpStream;

use serde_json::Value as Json;

const TEXT: u8 = 0x81;
const BINARY: u8 = 0x82;
const CLOSE: u8 = 0x88;
const MASKED: u8 = 0x80;
/// In place of a length: it follows in two bytes.
const TWO_BYTES: u8 = 0x7e;
/// In place of a length: it follows in eight bytes.
const EIGHT_BYTES: u8 = 0x7f;
const KEY: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

/// The request for a WebSocket, the same for all.
const HANDSHAKE: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

/// A connection, and the bytes behind the handshake that were read with it.
pub(super) struct Client {
    pub(super) socket: TcpStream,
    ahead: Vec<u8>,
}

/// A text message as a client sends it.
pub(super) fn text(text: &str) -> Vec<u8> {
    frame(TEXT, text.as_bytes())
}

/// The same for bytes.
pub(super) fn binary(bytes: &[u8]) -> Vec<u8> {
    frame(BINARY, bytes)
}

/// How a client ends a connection in order.
pub(super) fn close() -> Vec<u8> {
    frame(CLOSE, &1000_u16.to_be_bytes())
}

fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match (u8::try_from(payload.len()), u16::try_from(payload.len())) {
        (Ok(length @ 0..=125), _) => frame.push(MASKED | length),
        (_, Ok(length)) => {
            frame.push(MASKED | TWO_BYTES);
            frame.extend(length.to_be_bytes());
        }
        _ => {
            frame.push(MASKED | EIGHT_BYTES);
            frame.extend((payload.len() as u64).to_be_bytes());
        }
    }
    frame.extend(KEY);
    frame.extend(payload.iter().zip(KEY.iter().cycle()).map(|(byte, key)| byte ^ key));
    frame
}

/// The length of the header and of the payload of the first frame that a server sent. `None` if the header is not complete yet.
pub(super) fn lengths(bytes: &[u8]) -> Option<(usize, usize)> {
    match *bytes {
        [_, length @ 0..=125, ..] => Some((2, length.into())),
        [_, TWO_BYTES, high, low, ..] => Some((4, u16::from_be_bytes([high, low]).into())),
        [_, EIGHT_BYTES, ref rest @ ..] => {
            let (length, _) = rest.split_first_chunk()?;
            Some((10, usize::try_from(u64::from_be_bytes(*length)).expect("64 bits")))
        }
        [_, MASKED..=u8::MAX, ..] => panic!("a server must not mask a frame"),
        _ => None,
    }
}

/// Reads the header of the next frame.
pub(super) fn read_header(input: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut header = vec![0; 2];
    input.read_exact(&mut header)?;
    let more = match header[1] {
        TWO_BYTES => 2,
        EIGHT_BYTES => 8,
        _ => 0,
    };
    header.resize(2 + more, 0);
    input.read_exact(&mut header[2..])?;
    Ok(header)
}

impl Client {
    /// Connects to a server that waits for the client's word.
    pub(super) fn connect(address: &str) -> Self {
        let mut client = Self::open(address);
        client.greet();
        client.be_greeted();
        client
    }

    /// Connects to ours, which has the first word.
    pub(super) fn welcomed(address: &str) -> Self {
        let mut client = Self::connect(address);
        client.be_welcomed();
        client
    }

    /// Connects, and says nothing.
    pub(super) fn open(address: &str) -> Self {
        let socket = TcpStream::connect(address).expect("the server accepts");
        socket.set_nodelay(true).expect("TCP_NODELAY can be set");
        Self { socket, ahead: Vec::new() }
    }

    /// Asks for a WebSocket.
    pub(super) fn greet(&mut self) {
        self.write(HANDSHAKE);
    }

    /// Is given one.
    pub(super) fn be_greeted(&mut self) {
        let end = loop {
            if let Some(end) = self.ahead.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            let mut bytes = [0; 1024];
            let length = self.socket.read(&mut bytes).expect("the server answers");
            assert!(length > 0, "the server left");
            self.ahead.extend_from_slice(&bytes[..length]);
        };
        assert!(self.ahead.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&self.ahead));
        self.ahead.drain(..end);
    }

    /// Reads the first message of a server of ours.
    pub(super) fn be_welcomed(&mut self) {
        let welcome = self.receive();
        assert!(welcome.starts_with(b"{") && contains(&welcome, br#""type":"welcome""#), "{}", lossy(&welcome));
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the server reads");
    }

    /// The next frame, including its header.
    pub(super) fn receive_frame(&mut self) -> Vec<u8> {
        let mut frame = read_header(self).expect("the server sends");
        let (header, payload) = lengths(&frame).expect("the header is complete");
        frame.resize(header + payload, 0);
        self.read_exact(&mut frame[header..]).expect("the server sends");
        frame
    }

    /// The payload of the next message.
    pub(super) fn receive(&mut self) -> Vec<u8> {
        let frame = self.receive_frame();
        let (header, _) = lengths(&frame).expect("it is a frame");
        frame[header..].to_vec()
    }

    /// Sends a request, and gives its data.
    pub(super) fn ask(&mut self, request: &str) -> Json {
        self.write(&text(request));
        let reply: Json = serde_json::from_slice(&self.receive()).expect("a reply is JSON");
        assert!(reply["type"] == "result", "{request} is answered with {reply}");
        reply["data"].clone()
    }

    /// The connection itself, of which nothing was read too early.
    pub(super) fn into_socket(self) -> TcpStream {
        assert!(self.ahead.is_empty(), "nothing else was sent");
        self.socket
    }
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.ahead.is_empty() {
            return self.socket.read(bytes);
        }
        let known = self.ahead.len().min(bytes.len());
        bytes[..known].copy_from_slice(&self.ahead[..known]);
        self.ahead.drain(..known);
        Ok(known)
    }
}

pub(super) fn contains(bytes: &[u8], part: &[u8]) -> bool {
    position(bytes, part).is_some()
}

/// Where `part` begins in `bytes`.
pub(super) fn position(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

pub(super) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
