//! The server's side, for those without an HTTP stack: it reads a request, and accepts or refuses it.

use std::str;

use base64::Engine;
use base64::alphabet;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use bytes::{Bytes, BytesMut};
use httparse::{EMPTY_HEADER, Request};

use super::{HeadReader, HeadTooLarge, MAX_HEAD, MAX_HEADERS, accept_key, has_token, is_token, list, only, values};

/// Keys are decoded leniently in what encodes nothing: the example in RFC 6455 itself has bits set there.
const KEYS: GeneralPurpose =
    GeneralPurpose::new(&alphabet::STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));

/// The handshake of a server: feeds what comes to [`decode`](Self::decode), then sends the answer of the
/// [request](UpgradeRequest::accept) or of the [error](ServerHandshakeError::refusal).
///
/// ```
/// use bytes::BytesMut;
/// use tidewire_conn::{ServerHandshake, ServerHandshakeError};
///
/// let mut input = BytesMut::from(&b"GET / HTTP/1.1\r\nHost: tide.example\r\n\r\n"[..]);
/// let refused = ServerHandshake::new().decode(&mut input).unwrap_err();
/// assert_eq!(refused, ServerHandshakeError::NotUpgrade);
/// assert!(refused.refusal().starts_with(b"HTTP/1.1 426 Upgrade Required\r\n"));
/// ```
#[derive(Debug, Default)]
pub struct ServerHandshake {
    reader: HeadReader,
}

/// A request to speak WebSocket, which is in order and may be accepted.
#[derive(Debug, Clone)]
pub struct UpgradeRequest {
    path: String,
    key: String,
    subprotocols: Vec<String>,
    /// Names and values.
    headers: Vec<(Bytes, Bytes)>,
}

/// Why a connection did not become a WebSocket, as its server sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerHandshakeError {
    /// The request goes on and on.
    #[error("the head of the request is longer than {MAX_HEAD} bytes")]
    HeadTooLarge,
    /// The request is not HTTP.
    #[error("the request is not HTTP")]
    Malformed(#[from] httparse::Error),
    /// The request is not a GET of HTTP/1.1 with a host.
    #[error("the request is not a GET of HTTP/1.1 with a host")]
    NotGet,
    /// The client does not ask for a WebSocket.
    #[error("the request does not ask for an upgrade to websocket")]
    NotUpgrade,
    /// The client speaks another version.
    #[error("the client's Sec-WebSocket-Version is not 13")]
    UnsupportedVersion,
    /// The client's key is missing, or none.
    #[error("the client's Sec-WebSocket-Key is not one of 16 bytes in base64")]
    InvalidKey,
    /// The client's subprotocols are not a list of tokens.
    #[error("the client's Sec-WebSocket-Protocol is not a list of tokens")]
    InvalidSubprotocol,
    /// The subprotocol to be accepted was not offered.
    #[error("the subprotocol to be accepted was not offered: choose one of those in the request, or none")]
    UnofferedSubprotocol,
}

impl ServerHandshakeError {
    /// The answer to send before the connection is closed.
    pub fn refusal(&self) -> &'static [u8] {
        match self {
            Self::HeadTooLarge | Self::Malformed(httparse::Error::TooManyHeaders) => {
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            }
            Self::Malformed(_) | Self::NotGet | Self::InvalidKey | Self::InvalidSubprotocol => {
                b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            }
            Self::NotUpgrade | Self::UnsupportedVersion => {
                b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\
                  Sec-WebSocket-Version: 13\r\nContent-Length: 0\r\n\r\n"
            }
            Self::UnofferedSubprotocol => {
                b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            }
        }
    }
}

impl ServerHandshake {
    /// A handshake of which nothing has come.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the request from the front of `input`, and checks it; `None` if it is not all there. What follows is the
    /// WebSocket's.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<UpgradeRequest>, ServerHandshakeError> {
        let head = self.reader.take(input).map_err(|HeadTooLarge| ServerHandshakeError::HeadTooLarge)?;
        let Some(head) = head else { return Ok(None) };
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = Request::new(&mut headers);
        // Empty lines before it are no part of the request, and bare line feeds may end it early: then the end that was found is not
        // its end.
        if request.parse(&head)? != httparse::Status::Complete(head.len()) {
            return Err(httparse::Error::Token.into());
        }
        UpgradeRequest::check(&head, &request).map(Some)
    }
}

impl UpgradeRequest {
    fn check(head: &Bytes, request: &Request) -> Result<Self, ServerHandshakeError> {
        let headers = &*request.headers;
        let is_get = request.method == Some("GET") && request.version == Some(1) && only(headers, "host").is_some();
        let Some(path) = request.path.filter(|_| is_get) else { return Err(ServerHandshakeError::NotGet) };
        if !has_token(headers, "upgrade", "websocket") || !has_token(headers, "connection", "upgrade") {
            return Err(ServerHandshakeError::NotUpgrade);
        }
        if only(headers, "sec-websocket-version") != Some(b"13") {
            return Err(ServerHandshakeError::UnsupportedVersion);
        }
        let key = only(headers, "sec-websocket-key").and_then(|key| str::from_utf8(key).ok());
        let is_key = |key: &&str| KEYS.decode(key).is_ok_and(|nonce| nonce.len() == 16);
        let key = key.filter(is_key).ok_or(ServerHandshakeError::InvalidKey)?;
        let subprotocols = values(headers, "sec-websocket-protocol").flat_map(list).map(|name| {
            let name = str::from_utf8(name).ok().filter(|name| is_token(name.as_bytes()));
            name.map(str::to_owned).ok_or(ServerHandshakeError::InvalidSubprotocol)
        });
        Ok(Self {
            path: path.to_owned(),
            key: key.to_owned(),
            subprotocols: subprotocols.collect::<Result<_, _>>()?,
            headers: headers
                .iter()
                .map(|header| (head.slice_ref(header.name.as_bytes()), head.slice_ref(header.value)))
                .collect(),
        })
    }

    /// What is asked for, with its query.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The subprotocols that the client offers, the best first.
    pub fn subprotocols(&self) -> impl Iterator<Item = &str> {
        self.subprotocols.iter().map(String::as_str)
    }

    /// The value of the first header of this name, whatever its case.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let mut headers = self.headers.iter();
        headers.find(|(other, _)| other.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| &**value)
    }

    /// The answer that makes the connection a WebSocket, with one of the offered subprotocols or none.
    pub fn accept(&self, subprotocol: Option<&str>) -> Result<Vec<u8>, ServerHandshakeError> {
        let accept = accept_key(&self.key);
        let subprotocol = match subprotocol {
            None => String::new(),
            Some(chosen) if self.subprotocols().any(|offered| offered == chosen) => {
                format!("Sec-WebSocket-Protocol: {chosen}\r\n")
            }
            Some(_) => return Err(ServerHandshakeError::UnofferedSubprotocol),
        };
        let response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {accept}\r\n{subprotocol}\r\n"
        );
        Ok(response.into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GET: &str = "GET / HTTP/1.1\r\nHost: tide\r\n";
    const UPGRADE: &str = "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n";
    const KEY: &str = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

    fn asked(lines: &[&str]) -> Result<Option<UpgradeRequest>, ServerHandshakeError> {
        ServerHandshake::new().decode(&mut BytesMut::from((lines.concat() + "\r\n").as_bytes()))
    }

    #[test]
    fn requests_are_checked() {
        use ServerHandshakeError as Error;
        let version_8 = UPGRADE.replace("13", "8");
        let cases: [(&[&str], Error, &str); 14] = [
            (&["\x16\x03\x01\r\n"], Error::Malformed(httparse::Error::Token), "400"),
            (&["\r\n\r\n", GET, UPGRADE, KEY], Error::Malformed(httparse::Error::Token), "400"),
            (&[GET, &"X: y\r\n".repeat(80)], Error::Malformed(httparse::Error::TooManyHeaders), "431"),
            (&[&GET.replace("GET", "POST"), UPGRADE, KEY], Error::NotGet, "400"),
            (&[&GET.replace("1.1", "1.0"), UPGRADE, KEY], Error::NotGet, "400"),
            (&["GET / HTTP/1.1\r\n", UPGRADE, KEY], Error::NotGet, "400"),
            (&[GET], Error::NotUpgrade, "426"),
            (&[GET, &UPGRADE.replace("websocket", "h2c"), KEY], Error::NotUpgrade, "426"),
            (&[GET, &UPGRADE.replace(", Upgrade", ""), KEY], Error::NotUpgrade, "426"),
            (&[GET, &version_8, KEY], Error::UnsupportedVersion, "426"),
            (&[GET, UPGRADE], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, KEY, KEY], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25j\r\n"], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, KEY, "Sec-WebSocket-Protocol: a b\r\n"], Error::InvalidSubprotocol, "400"),
        ];
        for (lines, error, status) in cases {
            assert_eq!(asked(lines).unwrap_err(), error, "{lines:?}");
            assert!(error.refusal().starts_with(format!("HTTP/1.1 {status} ").as_bytes()), "{lines:?}");
            assert!(error.refusal().ends_with(b"\r\n\r\n"));
        }
    }

    #[test]
    fn what_is_offered_may_be_accepted() {
        let protocols = "Sec-WebSocket-Protocol: v2, v1\r\nsec-websocket-protocol:v0\r\n";
        let request = asked(&[GET, UPGRADE, KEY, protocols]).unwrap().unwrap();
        assert_eq!(request.subprotocols().collect::<Vec<_>>(), ["v2", "v1", "v0"]);
        let plain = String::from_utf8(request.accept(None).unwrap()).unwrap();
        assert!(plain.contains("\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"));
        assert!(!plain.contains("Protocol:"));
        let chosen = String::from_utf8(request.accept(Some("v1")).unwrap()).unwrap();
        assert!(chosen.ends_with("\r\nSec-WebSocket-Protocol: v1\r\n\r\n"));
        assert_eq!(request.accept(Some("v3")), Err(ServerHandshakeError::UnofferedSubprotocol));
    }

    #[test]
    fn the_key_of_the_rfc_is_accepted() {
        assert!(asked(&[GET, UPGRADE, "Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEC==\r\n"]).unwrap().is_some());
    }
}
