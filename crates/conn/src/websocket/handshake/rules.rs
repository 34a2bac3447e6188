//! The checks of an upgrade request, for the HTTP parser of this crate and for servers that use an HTTP library.

use std::str;

use base64::Engine;
use base64::alphabet;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};

use super::{MAX_HEAD_BYTES, accept_key, has_token, single_value, values};

/// Accepts non-zero trailing bits, which the example in RFC 6455 has.
const KEYS: GeneralPurpose =
    GeneralPurpose::new(&alphabet::STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));

/// Checks a request to upgrade to a WebSocket, for servers that use an HTTP library. Returns the `Sec-WebSocket-Accept` of the
/// response, which must also have the status 101 and the headers `Upgrade: websocket` and `Connection: Upgrade`.
///
/// `headers` are pairs of a name, in any case, and a value. The error has the status and the headers of the refusal. It is
/// [`NotUpgrade`](ServerHandshakeError::NotUpgrade) for every request without an `Upgrade: websocket` header.
///
/// ```
/// use tidewire_conn::websocket::{ServerHandshakeError, check_upgrade};
///
/// let mut headers: Vec<(&str, &[u8])> = vec![
///     ("host", b"tide.example"),
///     ("connection", b"keep-alive, Upgrade"),
///     ("upgrade", b"websocket"),
///     ("sec-websocket-version", b"13"),
///     ("sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="),
/// ];
/// assert_eq!(check_upgrade("GET", true, &headers).unwrap(), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
///
/// headers[3].1 = b"8";
/// let refused = check_upgrade("GET", true, &headers).unwrap_err();
/// assert_eq!(refused, ServerHandshakeError::UnsupportedVersion);
/// assert_eq!(refused.status(), 426);
/// assert!(refused.headers().contains(&("Sec-WebSocket-Version", "13")));
/// ```
pub fn check_upgrade(
    method: &str,
    is_http_1_1: bool,
    headers: &[(&str, &[u8])],
) -> Result<String, ServerHandshakeError> {
    if !has_token(headers, "upgrade", "websocket") {
        return Err(ServerHandshakeError::NotUpgrade);
    }
    if method != "GET" || !is_http_1_1 || single_value(headers, "host").is_none() {
        return Err(ServerHandshakeError::NotGet);
    }
    if !has_token(headers, "connection", "upgrade") {
        return Err(ServerHandshakeError::NoConnectionUpgrade);
    }
    // A proxy would forward the bytes after the head as a body, but here they would be read as frames.
    let has_length = values(headers, "content-length").any(|length| length.trim_ascii() != b"0");
    if has_length || values(headers, "transfer-encoding").next().is_some() {
        return Err(ServerHandshakeError::HasBody);
    }
    if single_value(headers, "sec-websocket-version") != Some(b"13") {
        return Err(ServerHandshakeError::UnsupportedVersion);
    }
    let key = single_value(headers, "sec-websocket-key").and_then(|key| str::from_utf8(key).ok());
    let is_key = |key: &&str| KEYS.decode(key).is_ok_and(|nonce| nonce.len() == 16);
    key.filter(is_key).map(accept_key).ok_or(ServerHandshakeError::InvalidKey)
}

/// Why a server refuses an upgrade to a WebSocket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerHandshakeError {
    /// The head of the request is too long.
    #[error("the head of the request is longer than {MAX_HEAD_BYTES} bytes")]
    HeadTooLarge,
    /// The request is not HTTP.
    #[error("the request is not valid HTTP")]
    Malformed(#[from] httparse::Error),
    /// The request has no `Upgrade: websocket` header.
    #[error("the request has no `Upgrade: websocket` header")]
    NotUpgrade,
    /// The request is not a GET of HTTP/1.1 with one host.
    #[error("a WebSocket handshake must be a GET request of HTTP/1.1 with one `Host` header")]
    NotGet,
    /// The request has no `Connection: Upgrade` header.
    #[error("the request has no `Connection: Upgrade` header; a proxy may have removed it")]
    NoConnectionUpgrade,
    /// The request has a body.
    #[error("a WebSocket handshake must not have a body")]
    HasBody,
    /// The client uses an unsupported version of the protocol.
    #[error("unsupported `Sec-WebSocket-Version`; expected 13")]
    UnsupportedVersion,
    /// The client's key is missing or invalid.
    #[error("expected one `Sec-WebSocket-Key` of 16 bytes in base64")]
    InvalidKey,
    /// The client's subprotocols are not a list of tokens.
    #[error("expected a list of tokens in `Sec-WebSocket-Protocol`")]
    InvalidSubprotocol,
    /// The server chose a subprotocol that the client did not offer.
    #[error("the chosen subprotocol was not offered; choose one of those in the request, or none")]
    UnofferedSubprotocol,
}

impl ServerHandshakeError {
    /// Returns the HTTP status of the refusal.
    pub fn status(&self) -> u16 {
        match self {
            Self::HeadTooLarge | Self::Malformed(httparse::Error::TooManyHeaders) => 431,
            Self::NotUpgrade | Self::UnsupportedVersion => 426,
            Self::UnofferedSubprotocol => 500,
            Self::Malformed(_)
            | Self::NotGet
            | Self::NoConnectionUpgrade
            | Self::HasBody
            | Self::InvalidKey
            | Self::InvalidSubprotocol => 400,
        }
    }

    /// Returns the headers that the refusal needs in addition to the usual ones.
    pub fn headers(&self) -> &'static [(&'static str, &'static str)] {
        match self.status() {
            426 => &[("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")],
            _ => &[],
        }
    }

    /// Returns the complete HTTP response that refuses the request, for servers without an HTTP library. The connection must be closed
    /// after it.
    pub fn refusal(&self) -> Vec<u8> {
        let (line, connection) = match self.status() {
            400 => ("400 Bad Request", "close"),
            426 => ("426 Upgrade Required", "Upgrade, close"),
            431 => ("431 Request Header Fields Too Large", "close"),
            _ => ("500 Internal Server Error", "close"),
        };
        let mut refusal = format!("HTTP/1.1 {line}\r\n").into_bytes();
        for (name, value) in self.headers() {
            refusal.extend([name, ": ", value, "\r\n"].map(str::as_bytes).concat());
        }
        refusal.extend(format!("Connection: {connection}\r\nContent-Length: 0\r\n\r\n").as_bytes());
        refusal
    }
}
