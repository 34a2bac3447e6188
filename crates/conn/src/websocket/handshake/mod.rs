//! The handshakes that turn a connection into a WebSocket: an HTTP request and its response.
//!
//! A handshake takes only the head of the request or response from the input. The bytes that follow stay there for the codec. The size
//! of a head is limited, and the head is parsed once, when it is complete.

mod client;
mod rules;
mod server;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use httparse::Header;
use sha1_smol::Sha1;

pub use client::{ClientHandshake, ClientHandshakeError, Upgraded};
pub use rules::{ServerHandshakeError, check_upgrade};
pub use server::{ServerHandshake, UpgradeRequest};

/// Limit of a head, as in common servers, enough for cookies and tokens.
const MAX_HEAD_BYTES: usize = 8192;
/// Limit of the number of header fields, several times the number that browsers and proxies send.
const MAX_HEADERS: usize = 64;

/// Returns the `Sec-WebSocket-Accept` that answers a `Sec-WebSocket-Key`.
fn accept_key(sec_websocket_key: &str) -> String {
    let mut digest = Sha1::from(sec_websocket_key);
    digest.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    STANDARD.encode(digest.digest().bytes())
}

/// The head is longer than `MAX_HEAD_BYTES`.
#[derive(Debug)]
struct HeadTooLarge;

/// Finds the end of a head incrementally, without searching the same bytes twice.
#[derive(Debug, Clone, Default)]
struct HeadReader {
    /// The number of bytes of the input that have been searched.
    searched: usize,
}

impl HeadReader {
    /// Takes a head, including the empty line at its end, from the front of `input`. Returns `None` if it is incomplete.
    fn take(&mut self, input: &mut BytesMut) -> Result<Option<Bytes>, HeadTooLarge> {
        const END: &[u8] = b"\r\n\r\n";
        let searched = self.searched.saturating_sub(END.len() - 1);
        let within = &input[..input.len().min(MAX_HEAD_BYTES)];
        if let Some(at) = within[searched..].windows(END.len()).position(|window| window == END) {
            self.searched = 0;
            return Ok(Some(input.split_to(searched + at + END.len()).freeze()));
        }
        self.searched = within.len();
        if within.len() == MAX_HEAD_BYTES { Err(HeadTooLarge) } else { Ok(None) }
    }
}

/// A field of a head: its name and its value.
type Field<'h> = (&'h str, &'h [u8]);

fn fields<'h>(headers: &[Header<'h>]) -> Vec<Field<'h>> {
    headers.iter().map(|header| (header.name, header.value)).collect()
}

/// Returns the values of all fields with this name.
fn values<'h>(fields: &[Field<'h>], name: &str) -> impl Iterator<Item = &'h [u8]> {
    fields.iter().filter(move |(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| *value)
}

/// Returns the value of the field with this name, if there is exactly one.
fn single_value<'h>(fields: &[Field<'h>], name: &str) -> Option<&'h [u8]> {
    let mut values = values(fields, name);
    values.next().filter(|_| values.next().is_none())
}

/// Whether the lists in the fields with this name contain a token.
fn has_token(fields: &[Field<'_>], name: &str, token: &str) -> bool {
    values(fields, name).flat_map(list).any(|item| item.eq_ignore_ascii_case(token.as_bytes()))
}

/// Returns the items of a comma-separated list.
fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|item| !item.is_empty())
}

/// Whether this is a token of HTTP: a valid name of a field or of a subprotocol.
fn is_token(name: &[u8]) -> bool {
    !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &[u8] = b"GET /chat HTTP/1.1\r\nHost: tide\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
        Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

    #[test]
    fn head_split_anywhere_is_decoded_and_the_rest_is_left() {
        let stream = [REQUEST, b"\x81\x80"].concat();
        for cut in 0..stream.len() {
            let mut server = ServerHandshake::new();
            let mut input = BytesMut::from(&stream[..cut]);
            let mut request = server.decode(&mut input).unwrap();
            assert_eq!(request.is_some(), cut >= REQUEST.len());
            input.extend_from_slice(&stream[cut..]);
            if request.is_none() {
                request = server.decode(&mut input).unwrap();
            }
            assert_eq!(request.unwrap().path(), "/chat");
            assert_eq!(&input[..], b"\x81\x80");
        }
    }

    #[test]
    fn head_above_the_limit_is_rejected() {
        let mut endless = REQUEST[..REQUEST.len() - 2].to_vec();
        endless.extend_from_slice(b"Cookie: ");
        endless.resize(MAX_HEAD_BYTES - 4, b'c');
        endless.extend_from_slice(b"\r\n\r\n");
        assert!(ServerHandshake::new().decode(&mut BytesMut::from(&endless[..])).unwrap().is_some());

        endless.insert(MAX_HEAD_BYTES - 4, b'c');
        for size in [1, 7, 1000, endless.len()] {
            let (mut server, mut input) = (ServerHandshake::new(), BytesMut::new());
            let error = endless.chunks(size).find_map(|piece| {
                input.extend_from_slice(piece);
                server.decode(&mut input).transpose()
            });
            assert_eq!(error.unwrap().unwrap_err(), ServerHandshakeError::HeadTooLarge);
            assert!(input.len() < MAX_HEAD_BYTES + size);
        }
    }

    #[test]
    fn client_and_server_negotiate_a_subprotocol() {
        let client = ClientHandshake::new("tide:80", "/chat?room=7").unwrap();
        let client = client.subprotocol("v1").unwrap().subprotocol("v2").unwrap();
        let mut client = client.header("Origin", "https://tide.example").unwrap();
        let mut input = BytesMut::from(&client.request()[..]);
        let request = ServerHandshake::new().decode(&mut input).unwrap().unwrap();
        assert!(input.is_empty());
        assert_eq!(request.path(), "/chat?room=7");
        assert_eq!(request.header("HOST"), Some(&b"tide:80"[..]));
        assert_eq!(request.header("origin"), Some(&b"https://tide.example"[..]));
        assert_eq!(request.subprotocols().collect::<Vec<_>>(), ["v1", "v2"]);

        let response = [request.accept(Some("v2")).unwrap(), b"\x89\x00".to_vec()].concat();
        for cut in 0..response.len() - 2 {
            let mut input = BytesMut::from(&response[..cut]);
            assert_eq!(client.decode(&mut input).unwrap(), None);
            input.extend_from_slice(&response[cut..]);
            let upgraded = client.decode(&mut input).unwrap().unwrap();
            assert_eq!(upgraded.subprotocol.as_deref(), Some("v2"));
            assert_eq!(&input[..], b"\x89\x00");
        }
    }
}
