//! The handshake of a client: the request, and the check of the response.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use httparse::{EMPTY_HEADER, Response};

use super::{
    HeadReader, HeadTooLarge, MAX_HEAD_BYTES, MAX_HEADERS, accept_key, fields, has_token, is_token, single_value,
    values,
};

/// The handshake of a client. The caller sends [`request`](Self::request) and passes the received bytes to
/// [`decode`](Self::decode).
///
/// ```
/// use bytes::BytesMut;
/// use tidewire_conn::websocket::{ClientHandshake, ServerHandshake};
///
/// let mut client = ClientHandshake::new("tide.example", "/chat")?.subprotocol("v1")?;
/// let mut to_server = BytesMut::from(&client.request()[..]);
///
/// let request = ServerHandshake::new().decode(&mut to_server)?.expect("the head is complete");
/// let mut to_client = BytesMut::from(&request.accept(Some("v1"))?[..]);
///
/// let upgraded = client.decode(&mut to_client)?.expect("the head is complete");
/// assert_eq!(upgraded.subprotocol.as_deref(), Some("v1"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ClientHandshake {
    host: String,
    path: String,
    /// The random `Sec-WebSocket-Key`, which the response must match.
    key: String,
    subprotocols: Vec<String>,
    /// Additional header lines.
    headers: String,
    reader: HeadReader,
}

/// The result of a client handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Upgraded {
    /// The subprotocol that the server chose from those offered.
    pub subprotocol: Option<String>,
}

/// Why a client handshake failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientHandshakeError {
    /// The host is empty, or has invalid characters.
    #[error("invalid host {host:?}; expected a host and an optional port, such as `example.org:8080`")]
    InvalidHost {
        /// The invalid host.
        host: String,
    },
    /// The path does not begin with a slash, or has characters that must be escaped.
    #[error("invalid path {path:?}; expected a percent-encoded path such as `/chat?room=7`")]
    InvalidPath {
        /// The invalid path.
        path: String,
    },
    /// A subprotocol is not a token, or is offered twice.
    #[error("invalid subprotocol {subprotocol:?}; expected a token that is not offered yet")]
    InvalidSubprotocol {
        /// The invalid subprotocol.
        subprotocol: String,
    },
    /// A header has a name that is not a token, or that the handshake itself sets.
    #[error("invalid header name {name:?}; expected a token that the handshake does not set itself")]
    InvalidHeaderName {
        /// The invalid name.
        name: String,
    },
    /// A header has a value with characters other than visible ASCII, spaces and tabs.
    #[error("invalid value of header `{name}`; expected visible ASCII, spaces and tabs")]
    InvalidHeaderValue {
        /// The name of the header.
        name: String,
    },
    /// The head of the response is too long.
    #[error("the head of the response is longer than {MAX_HEAD_BYTES} bytes")]
    HeadTooLarge,
    /// The response is not HTTP.
    #[error("the response is not valid HTTP")]
    Malformed(#[from] httparse::Error),
    /// The server refused the upgrade.
    #[error("the server refused the upgrade: expected status 101, got {status}")]
    Refused {
        /// The status of the response.
        status: u16,
    },
    /// The response has no valid `Upgrade` and `Connection` headers.
    #[error("the server did not switch to the WebSocket protocol")]
    NotUpgraded,
    /// The response does not match the key of the request.
    #[error("`Sec-WebSocket-Accept` of the response does not match the key of the request")]
    WrongAccept,
    /// The server selected an extension, although none was offered.
    #[error("the server selected an extension that was not offered")]
    UnofferedExtension,
    /// The server chose a subprotocol that was not offered.
    #[error("the server chose a subprotocol that was not offered")]
    UnofferedSubprotocol,
}

impl ClientHandshake {
    /// Creates a request for `path`, including its query, at `host`, including its port unless it is the default port.
    pub fn new(host: &str, path: &str) -> Result<Self, ClientHandshakeError> {
        if host.is_empty() || !host.bytes().all(|byte| byte.is_ascii_graphic() && !b"/?#@\\".contains(&byte)) {
            return Err(ClientHandshakeError::InvalidHost { host: host.into() });
        }
        if !path.starts_with('/') || !path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
            return Err(ClientHandshakeError::InvalidPath { path: path.into() });
        }
        Ok(Self {
            host: host.into(),
            path: path.into(),
            key: STANDARD.encode(rand::random::<[u8; 16]>()),
            subprotocols: Vec::new(),
            headers: String::new(),
            reader: HeadReader::default(),
        })
    }

    /// Returns a copy of the handshake with a new key, for another connection.
    #[must_use]
    pub fn with_new_key(&self) -> Self {
        Self { key: STANDARD.encode(rand::random::<[u8; 16]>()), reader: HeadReader::default(), ..self.clone() }
    }

    /// Offers a subprotocol, after those that were offered before.
    pub fn subprotocol(mut self, subprotocol: &str) -> Result<Self, ClientHandshakeError> {
        if !is_token(subprotocol.as_bytes()) || self.subprotocols.iter().any(|offered| offered == subprotocol) {
            return Err(ClientHandshakeError::InvalidSubprotocol { subprotocol: subprotocol.into() });
        }
        self.subprotocols.push(subprotocol.into());
        Ok(self)
    }

    /// Adds a header, such as `Origin`, `Authorization` or `Cookie`.
    pub fn header(mut self, name: &str, value: &str) -> Result<Self, ClientHandshakeError> {
        const RESERVED: [&str; 5] = ["host", "upgrade", "connection", "content-length", "transfer-encoding"];
        let lowercase = name.to_ascii_lowercase();
        let is_reserved = RESERVED.contains(&&*lowercase) || lowercase.starts_with("sec-websocket-");
        if !is_token(name.as_bytes()) || is_reserved {
            return Err(ClientHandshakeError::InvalidHeaderName { name: name.into() });
        }
        if !value.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t')) {
            return Err(ClientHandshakeError::InvalidHeaderValue { name: name.into() });
        }
        // Writing to a `String` never fails.
        let _ = write!(self.headers, "{name}: {value}\r\n");
        Ok(self)
    }

    /// Returns the bytes of the request.
    pub fn request(&self) -> Vec<u8> {
        let Self { host, path, key, subprotocols, headers, .. } = self;
        let subprotocols = match &subprotocols[..] {
            [] => String::new(),
            offered => format!("Sec-WebSocket-Protocol: {}\r\n", offered.join(", ")),
        };
        format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{subprotocols}{headers}\r\n"
        )
        .into_bytes()
    }

    /// Takes the response from the front of `input` and checks it. Returns `None` if it is incomplete. Bytes after the response
    /// belong to the WebSocket.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Upgraded>, ClientHandshakeError> {
        let head = self.reader.take(input).map_err(|HeadTooLarge| ClientHandshakeError::HeadTooLarge)?;
        let Some(head) = head else { return Ok(None) };
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut response = Response::new(&mut headers);
        // httparse skips leading empty lines and accepts bare line feeds. Then it finds another end of the head than `HeadReader`, and
        // the response is rejected.
        if response.parse(&head)? != httparse::Status::Complete(head.len()) {
            return Err(httparse::Error::Version.into());
        }
        self.check(&response).map(Some)
    }

    fn check(&self, response: &Response) -> Result<Upgraded, ClientHandshakeError> {
        let headers = &fields(response.headers);
        if let Some(status) = response.code
            && status != 101
        {
            return Err(ClientHandshakeError::Refused { status });
        }
        let upgrade = single_value(headers, "upgrade").is_some_and(|value| value.eq_ignore_ascii_case(b"websocket"));
        if response.version != Some(1) || !upgrade || !has_token(headers, "connection", "upgrade") {
            return Err(ClientHandshakeError::NotUpgraded);
        }
        if single_value(headers, "sec-websocket-accept") != Some(accept_key(&self.key).as_bytes()) {
            return Err(ClientHandshakeError::WrongAccept);
        }
        if values(headers, "sec-websocket-extensions").any(|value| !value.is_empty()) {
            return Err(ClientHandshakeError::UnofferedExtension);
        }
        let subprotocol = match single_value(headers, "sec-websocket-protocol") {
            Some(chosen) => {
                let offered = self.subprotocols.iter().find(|offered| offered.as_bytes() == chosen);
                Some(offered.ok_or(ClientHandshakeError::UnofferedSubprotocol)?.clone())
            }
            None if values(headers, "sec-websocket-protocol").next().is_some() => {
                return Err(ClientHandshakeError::UnofferedSubprotocol);
            }
            None => None,
        };
        Ok(Upgraded { subprotocol })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> ClientHandshake {
        let mut client = ClientHandshake::new("tide", "/").unwrap().subprotocol("v1").unwrap();
        client.key = "dGhlIHNhbXBsZSBub25jZQ==".into();
        client
    }

    const STATUS: &str = "HTTP/1.1 101 Switching Protocols\r\n";
    const UPGRADE: &str = "Upgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n";
    const ACCEPT: &str = "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n";

    fn decode(lines: &[&str]) -> Result<Option<Upgraded>, ClientHandshakeError> {
        client().decode(&mut BytesMut::from((lines.concat() + "\r\n").as_bytes()))
    }

    #[test]
    fn responses_are_checked() {
        use ClientHandshakeError as Error;
        let protocol = |name: &str| format!("Sec-WebSocket-Protocol: {name}\r\n");
        let v1 = protocol("v1");
        assert_eq!(decode(&[STATUS, UPGRADE, ACCEPT]), Ok(Some(Upgraded { subprotocol: None })));
        let subprotocol = Some("v1".into());
        assert_eq!(decode(&[STATUS, UPGRADE, ACCEPT, &v1]), Ok(Some(Upgraded { subprotocol })));

        let cases: [(&[&str], Error); 12] = [
            (&["HTTP/1.1 403 Forbidden\r\n", UPGRADE, ACCEPT], Error::Refused { status: 403 }),
            (&["HTTP/1.0 101 Switching\r\n", UPGRADE, ACCEPT], Error::NotUpgraded),
            (&["SSH-2.0-OpenSSH\r\n"], Error::Malformed(httparse::Error::Version)),
            (&["\r\n", "\r\n", STATUS, UPGRADE, ACCEPT], Error::Malformed(httparse::Error::Version)),
            (&[STATUS, "Upgrade: websocket\r\n", ACCEPT], Error::NotUpgraded),
            (&[STATUS, "Upgrade: h2c\r\nConnection: Upgrade\r\n", ACCEPT], Error::NotUpgraded),
            (&[STATUS, UPGRADE], Error::WrongAccept),
            (&[STATUS, UPGRADE, "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOO=\r\n"], Error::WrongAccept),
            (&[STATUS, UPGRADE, ACCEPT, ACCEPT], Error::WrongAccept),
            (&[STATUS, UPGRADE, ACCEPT, "Sec-WebSocket-Extensions: permessage-deflate\r\n"], Error::UnofferedExtension),
            (&[STATUS, UPGRADE, ACCEPT, &protocol("v2")], Error::UnofferedSubprotocol),
            (&[STATUS, UPGRADE, ACCEPT, &v1, &v1], Error::UnofferedSubprotocol),
        ];
        for (lines, error) in cases {
            assert_eq!(decode(lines), Err(error), "{lines:?}");
        }
    }

    #[test]
    fn request_injection_is_rejected() {
        for host in ["", "a b", "a\r\nX: y", "a/b", "a@b", "ä"] {
            assert!(ClientHandshake::new(host, "/").is_err(), "{host:?}");
        }
        for path in ["", "chat", "/a b", "/a\r\nX: y", "/a\n", "/ä", "/#top", "http://tide/"] {
            assert!(ClientHandshake::new("tide", path).is_err(), "{path:?}");
        }
        for subprotocol in ["", "a b", "a,b", "a\r\nX: y", "v1"] {
            assert!(client().subprotocol(subprotocol).is_err(), "{subprotocol:?}");
        }
        for name in ["", "a b", "a:", "a\r\nX", "Host", "UPGRADE", "Connection", "Sec-WebSocket-Key", "Content-Length"]
        {
            assert!(client().header(name, "").is_err(), "{name:?}");
        }
        for value in ["a\r\nX: y", "a\nX: y", "\0", "\x7f", "ä"] {
            assert!(client().header("X", value).is_err(), "{value:?}");
        }
        assert!(client().header("X", "all\tthe \"rest\" ~").is_ok());
    }

    #[test]
    fn keys_are_random() {
        let keys = [(); 2].map(|()| ClientHandshake::new("tide", "/").unwrap().key);
        assert_ne!(keys[0], keys[1]);
        assert_eq!(keys[0].len(), 24);
    }
}
