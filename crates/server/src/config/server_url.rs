//! The URL of a running server, for commands that connect to it.

use std::fmt;

use url::Url;

/// The URL of a running server: `ws://` or `wss://`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerUrl {
    /// Whether the connection uses TLS.
    pub is_secure: bool,
    /// The host, an IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The path of the WebSocket endpoint.
    pub path: String,
}

impl ServerUrl {
    /// Parses a URL. Returns `None` if it is not a WebSocket URL, or if it has unused parts, such as a user.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let url = Url::parse(text).ok()?;
        let is_secure = match url.scheme() {
            "ws" => false,
            "wss" => true,
            _ => return None,
        };
        let has_more = url.fragment().is_some() || url.query().is_some() || !url.username().is_empty();
        if has_more || url.password().is_some() {
            return None;
        }
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        Some(Self { is_secure, host, port: url.port_or_known_default()?, path: url.path().to_owned() })
    }

    /// Returns the host and port as in the URL.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.is_secure { "wss" } else { "ws" }, self.authority(), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_urls_are_parsed() {
        for (text, url, authority) in [
            ("ws://127.0.0.1:8080/", "ws://127.0.0.1:8080/", "127.0.0.1:8080"),
            ("wss://tide.example/live", "wss://tide.example:443/live", "tide.example:443"),
            ("ws://[::1]:9", "ws://[::1]:9/", "[::1]:9"),
            ("WS://Tide.example", "ws://tide.example:80/", "tide.example:80"),
        ] {
            let parsed = ServerUrl::parse(text).unwrap();
            assert_eq!((parsed.to_string(), parsed.authority()), (url.to_owned(), authority.to_owned()));
        }
        for text in ["", "localhost:8080", "http://a", "ws://", "ws://a:b@c/", "ws://a/?q", "ws://a/#f", "ws://a:99999"]
        {
            assert_eq!(ServerUrl::parse(text), None, "{text}");
        }
    }
}
