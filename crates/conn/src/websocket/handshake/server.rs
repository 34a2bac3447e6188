//! The handshake of a server without an HTTP library: parses a request, and accepts or refuses it.

use std::str;

use bytes::{Bytes, BytesMut};
use httparse::{EMPTY_HEADER, Request};

use super::{
    HeadReader, HeadTooLarge, MAX_HEADERS, ServerHandshakeError, check_upgrade, fields, is_token, list, values,
};

/// The handshake of a server. The caller passes the received bytes to [`decode`](Self::decode), and sends the response:
/// [`UpgradeRequest::accept`], or [`ServerHandshakeError::refusal`] after an error.
///
/// ```
/// use bytes::BytesMut;
/// use tidewire_conn::websocket::{ServerHandshake, ServerHandshakeError};
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

/// A valid request to upgrade to a WebSocket, which may be accepted.
#[derive(Debug, Clone)]
pub struct UpgradeRequest {
    path: String,
    /// The `Sec-WebSocket-Accept` of the response.
    accept: String,
    subprotocols: Vec<String>,
    /// Names and values.
    headers: Vec<(Bytes, Bytes)>,
}

impl ServerHandshake {
    /// Creates a handshake.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the request from the front of `input` and checks it. Returns `None` if it is incomplete. Bytes after the request belong
    /// to the WebSocket.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<UpgradeRequest>, ServerHandshakeError> {
        let head = self.reader.take(input).map_err(|HeadTooLarge| ServerHandshakeError::HeadTooLarge)?;
        let Some(head) = head else { return Ok(None) };
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = Request::new(&mut headers);
        // httparse skips leading empty lines and accepts bare line feeds. Then it finds another end of the head than `HeadReader`, and
        // the request is rejected.
        if request.parse(&head)? != httparse::Status::Complete(head.len()) {
            return Err(httparse::Error::Token.into());
        }
        UpgradeRequest::check(&head, &request).map(Some)
    }
}

impl UpgradeRequest {
    fn check(head: &Bytes, request: &Request) -> Result<Self, ServerHandshakeError> {
        let headers = &*request.headers;
        let fields = fields(headers);
        let accept = check_upgrade(request.method.unwrap_or_default(), request.version == Some(1), &fields)?;
        let path = request.path.ok_or(ServerHandshakeError::NotGet)?;
        let subprotocols = values(&fields, "sec-websocket-protocol").flat_map(list).map(|name| {
            let name = str::from_utf8(name).ok().filter(|name| is_token(name.as_bytes()));
            name.map(str::to_owned).ok_or(ServerHandshakeError::InvalidSubprotocol)
        });
        Ok(Self {
            path: path.to_owned(),
            accept,
            subprotocols: subprotocols.collect::<Result<_, _>>()?,
            headers: headers
                .iter()
                .map(|header| (head.slice_ref(header.name.as_bytes()), head.slice_ref(header.value)))
                .collect(),
        })
    }

    /// Returns the path of the request, including its query.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the subprotocols that the client offers, the preferred one first.
    pub fn subprotocols(&self) -> impl Iterator<Item = &str> {
        self.subprotocols.iter().map(String::as_str)
    }

    /// Returns the value of the first header with this name. Case is ignored.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let mut headers = self.headers.iter();
        headers.find(|(other, _)| other.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| &**value)
    }

    /// Returns the response that accepts the upgrade, with one of the offered subprotocols or none.
    pub fn accept(&self, subprotocol: Option<&str>) -> Result<Vec<u8>, ServerHandshakeError> {
        let accept = &self.accept;
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

    fn decode(lines: &[&str]) -> Result<Option<UpgradeRequest>, ServerHandshakeError> {
        ServerHandshake::new().decode(&mut BytesMut::from((lines.concat() + "\r\n").as_bytes()))
    }

    #[test]
    fn requests_are_checked() {
        use ServerHandshakeError as Error;
        let version_8 = UPGRADE.replace("13", "8");
        let cases: [(&[&str], Error, &str); 17] = [
            (&["\x16\x03\x01\r\n"], Error::Malformed(httparse::Error::Token), "400"),
            (&["\r\n\r\n", GET, UPGRADE, KEY], Error::Malformed(httparse::Error::Token), "400"),
            (&[GET, &"X: y\r\n".repeat(80)], Error::Malformed(httparse::Error::TooManyHeaders), "431"),
            (&[&GET.replace("GET", "POST"), UPGRADE, KEY], Error::NotGet, "400"),
            (&[&GET.replace("1.1", "1.0"), UPGRADE, KEY], Error::NotGet, "400"),
            (&["GET / HTTP/1.1\r\n", UPGRADE, KEY], Error::NotGet, "400"),
            (&[GET], Error::NotUpgrade, "426"),
            (&[GET, &UPGRADE.replace("websocket", "h2c"), KEY], Error::NotUpgrade, "426"),
            (&[&GET.replace("GET", "POST")], Error::NotUpgrade, "426"),
            (&[GET, &UPGRADE.replace(", Upgrade", ""), KEY], Error::NoConnectionUpgrade, "400"),
            (&[GET, UPGRADE, KEY, "Content-Length: 4\r\n"], Error::HasBody, "400"),
            (&[GET, UPGRADE, KEY, "Transfer-Encoding: chunked\r\n"], Error::HasBody, "400"),
            (&[GET, &version_8, KEY], Error::UnsupportedVersion, "426"),
            (&[GET, UPGRADE], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, KEY, KEY], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25j\r\n"], Error::InvalidKey, "400"),
            (&[GET, UPGRADE, KEY, "Sec-WebSocket-Protocol: a b\r\n"], Error::InvalidSubprotocol, "400"),
        ];
        for (lines, error, status) in cases {
            assert_eq!(decode(lines).unwrap_err(), error, "{lines:?}");
            assert!(error.refusal().starts_with(format!("HTTP/1.1 {status} ").as_bytes()), "{lines:?}");
            assert!(error.refusal().ends_with(b"\r\n\r\n"));
        }
    }

    #[test]
    fn offered_subprotocol_can_be_accepted() {
        let protocols = "Sec-WebSocket-Protocol: v2, v1\r\nsec-websocket-protocol:v0\r\n";
        let request = decode(&[GET, UPGRADE, KEY, protocols]).unwrap().unwrap();
        assert_eq!(request.subprotocols().collect::<Vec<_>>(), ["v2", "v1", "v0"]);
        let plain = String::from_utf8(request.accept(None).unwrap()).unwrap();
        assert!(plain.contains("\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"));
        assert!(!plain.contains("Protocol:"));
        let chosen = String::from_utf8(request.accept(Some("v1")).unwrap()).unwrap();
        assert!(chosen.ends_with("\r\nSec-WebSocket-Protocol: v1\r\n\r\n"));
        assert_eq!(request.accept(Some("v3")), Err(ServerHandshakeError::UnofferedSubprotocol));
    }

    #[test]
    fn key_of_the_rfc_example_is_accepted() {
        assert!(decode(&[GET, UPGRADE, "Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEC==\r\n"]).unwrap().is_some());
    }
}
