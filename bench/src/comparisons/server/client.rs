//! A minimal blocking WebSocket client. Frames can be encoded in advance.

use std::io::{self, Read, Write as _};
use std::net::TcpStream;

use serde_json::Value as Json;

const TEXT: u8 = 0x81;
const BINARY: u8 = 0x82;
const CLOSE: u8 = 0x88;
const MASKED: u8 = 0x80;
/// A length byte that is followed by a length of two bytes.
const TWO_BYTES: u8 = 0x7e;
/// A length byte that is followed by a length of eight bytes.
const EIGHT_BYTES: u8 = 0x7f;
/// The masking key of all frames.
const KEY: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

/// The request of the WebSocket handshake.
const HANDSHAKE: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

/// A connection, and bytes that were read together with the response of the handshake.
pub(super) struct Client {
    pub(super) socket: TcpStream,
    buffered: Vec<u8>,
}

/// Encodes a text message.
pub(super) fn text(text: &str) -> Vec<u8> {
    frame(TEXT, text.as_bytes())
}

/// Encodes a binary message.
pub(super) fn binary(bytes: &[u8]) -> Vec<u8> {
    frame(BINARY, bytes)
}

/// Encodes a close message.
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

/// Returns the lengths of header and payload of the frame at the start of `bytes`. `None` if the header is incomplete.
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
    /// Connects and completes the WebSocket handshake.
    pub(super) fn connect(address: &str) -> Self {
        let mut client = Self::open(address);
        client.send_handshake();
        client.read_handshake();
        client
    }

    /// Connects to `tidewire` and reads its welcome message.
    pub(super) fn connect_tidewire(address: &str) -> Self {
        let mut client = Self::connect(address);
        client.read_welcome();
        client
    }

    /// Opens a TCP connection, without a handshake.
    pub(super) fn open(address: &str) -> Self {
        let socket = TcpStream::connect(address).expect("the server accepts");
        socket.set_nodelay(true).expect("TCP_NODELAY can be set");
        Self { socket, buffered: Vec::new() }
    }

    /// Sends the request of the WebSocket handshake.
    pub(super) fn send_handshake(&mut self) {
        self.write(HANDSHAKE);
    }

    /// Reads the response of the WebSocket handshake.
    pub(super) fn read_handshake(&mut self) {
        let end = loop {
            if let Some(end) = self.buffered.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            let mut bytes = [0; 1024];
            let length = self.socket.read(&mut bytes).expect("the server answers");
            assert!(length > 0, "the server closed the connection");
            self.buffered.extend_from_slice(&bytes[..length]);
        };
        assert!(self.buffered.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&self.buffered));
        self.buffered.drain(..end);
    }

    /// Reads the welcome message of `tidewire`.
    pub(super) fn read_welcome(&mut self) {
        let welcome = self.receive();
        assert!(welcome.starts_with(b"{") && contains(&welcome, br#""type":"welcome""#), "{}", lossy(&welcome));
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the server reads");
    }

    /// Returns the next frame, including its header.
    pub(super) fn receive_frame(&mut self) -> Vec<u8> {
        let mut frame = read_header(self).expect("the server sends");
        let (header, payload) = lengths(&frame).expect("the header is complete");
        frame.resize(header + payload, 0);
        self.read_exact(&mut frame[header..]).expect("the server sends");
        frame
    }

    /// Returns the payload of the next message.
    pub(super) fn receive(&mut self) -> Vec<u8> {
        let frame = self.receive_frame();
        let (header, _) = lengths(&frame).expect("the frame is complete");
        frame[header..].to_vec()
    }

    /// Sends a request and returns the data of its reply.
    pub(super) fn request(&mut self, request: &str) -> Json {
        self.write(&text(request));
        let reply: Json = serde_json::from_slice(&self.receive()).expect("a reply is JSON");
        assert!(reply["type"] == "result", "unexpected reply to {request}: {reply}");
        reply["data"].clone()
    }

    /// Returns the socket. Panics if bytes after the handshake have been buffered.
    pub(super) fn into_socket(self) -> TcpStream {
        assert!(self.buffered.is_empty(), "no bytes are buffered");
        self.socket
    }
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.buffered.is_empty() {
            return self.socket.read(bytes);
        }
        let count = self.buffered.len().min(bytes.len());
        bytes[..count].copy_from_slice(&self.buffered[..count]);
        self.buffered.drain(..count);
        Ok(count)
    }
}

pub(super) fn contains(bytes: &[u8], part: &[u8]) -> bool {
    position(bytes, part).is_some()
}

/// Returns the index of `part` in `bytes`.
pub(super) fn position(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

pub(super) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
