//! The forwarding headers of trusted proxies: `Forwarded` (RFC 7239), `X-Forwarded-For` and `X-Forwarded-Host`.
//!
//! Every proxy appends the address of its peer. Lists are read from the end, and the first address that is not a trusted proxy is
//! the client. Anything before it was sent by the client, may be forged, and is ignored. A proxy that sets one of the two headers
//! usually passes the other one through unchanged, so if both are present, they must agree.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::origin::quote_headers;
use crate::Network;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Limit of the port of a node, which may be a number or an obfuscated name.
const MAX_PORT_BYTES: usize = 32;

/// The client and host of a request according to trusted proxies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Forwarded {
    pub(super) client: Option<IpAddr>,
    /// The `Host` that the client sent.
    pub(super) host: Option<String>,
}

/// Why the forwarding headers of a trusted proxy are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ForwardedError {
    #[error("{header} is malformed or has no client address: {value}")]
    Invalid { header: HeaderName, value: String },
    #[error(
        "forwarded and x-forwarded-for have different client addresses, {one} and {other}; the proxy must remove the header that it does not set"
    )]
    Contradiction { one: IpAddr, other: IpAddr },
}

/// Returns whether a request has forwarding headers.
pub(super) fn is_forwarded(headers: &HeaderMap) -> bool {
    [header::FORWARDED, X_FORWARDED_FOR, X_FORWARDED_HOST].iter().any(|name| headers.contains_key(name))
}

/// Reads the forwarding headers of a request from a trusted proxy.
pub(super) fn read(headers: &HeaderMap, trusted: &[Network]) -> Result<Forwarded, ForwardedError> {
    let standard = find_client(headers, &header::FORWARDED, trusted, |line| ForwardedParser(line).elements())?;
    let x_forwarded = find_client(headers, &X_FORWARDED_FOR, trusted, |line| {
        let items = line.split(',').map(str::trim).filter(|item| !item.is_empty());
        Some(items.map(|item| Element { node: Some(item.to_owned()), host: None }).collect())
    })?;
    if let (Some((one, _)), Some((other, _))) = (&standard, &x_forwarded)
        && one != other
    {
        return Err(ForwardedError::Contradiction { one: *one, other: *other });
    }
    let client = standard.as_ref().or(x_forwarded.as_ref()).map(|(client, _)| *client);
    let host = match standard.and_then(|(_, host)| host) {
        Some(host) => Some(host),
        None => last_host(headers)?,
    };
    Ok(Forwarded { client, host })
}

/// Returns whether an address belongs to a trusted proxy.
pub(super) fn is_trusted(trusted: &[Network], address: IpAddr) -> bool {
    trusted.iter().any(|network| network.contains(address))
}

/// Returns the address and host of the last element that is not a trusted proxy, or of the first element if all are trusted. Elements
/// before it are not validated.
fn find_client(
    headers: &HeaderMap,
    name: &HeaderName,
    trusted: &[Network],
    parse: impl Fn(&str) -> Option<Vec<Element>>,
) -> Result<Option<(IpAddr, Option<String>)>, ForwardedError> {
    let lines: Vec<&[u8]> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
    let invalid = || ForwardedError::Invalid { header: name.clone(), value: quote_headers(&lines) };
    let mut farthest = None;
    for line in lines.iter().rev() {
        let elements = std::str::from_utf8(line).ok().and_then(&parse).ok_or_else(invalid)?;
        for Element { node, host } in elements.into_iter().rev() {
            let client = node.as_deref().and_then(parse_address).ok_or_else(invalid)?;
            farthest = Some((client, host));
            if !is_trusted(trusted, client) {
                return Ok(farthest);
            }
        }
    }
    Ok(farthest)
}

/// Returns the last `X-Forwarded-Host`, which was set by the nearest proxy.
fn last_host(headers: &HeaderMap) -> Result<Option<String>, ForwardedError> {
    let Some(line) = headers.get_all(X_FORWARDED_HOST).iter().next_back() else { return Ok(None) };
    match std::str::from_utf8(line.as_bytes()) {
        Ok(line) => Ok(line.rsplit(',').next().map(|host| host.trim().to_owned())),
        Err(_) => Err(ForwardedError::Invalid { header: X_FORWARDED_HOST, value: quote_headers(&[line.as_bytes()]) }),
    }
}

/// Parses the address of a node: `192.0.2.1`, `192.0.2.1:80`, `[2001:db8::1]`, `[2001:db8::1]:80`, or IPv6 without brackets as in
/// `X-Forwarded-For`.
fn parse_address(node: &str) -> Option<IpAddr> {
    if let Ok(address) = node.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let (address, port) = if let Some(rest) = node.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        (address.parse::<Ipv6Addr>().ok()?.to_canonical(), port)
    } else {
        let (address, port) = node.split_at(node.find(':')?);
        (address.parse::<Ipv4Addr>().ok()?.into(), port)
    };
    let is_port = |port: &str| {
        let is_character = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        (1..=MAX_PORT_BYTES).contains(&port.len()) && port.bytes().all(is_character)
    };
    (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(address)
}

/// The element of one proxy.
#[derive(Default)]
struct Element {
    /// The peer of the proxy.
    node: Option<String>,
    /// The host that the peer requested.
    host: Option<String>,
}

/// The unparsed rest of a `Forwarded` header.
struct ForwardedParser<'l>(&'l str);

impl ForwardedParser<'_> {
    /// Parses `for=192.0.2.1;host=tide.example, for="[2001:db8::1]"`. Returns `None` if anything is malformed.
    fn elements(mut self) -> Option<Vec<Element>> {
        let mut elements = Vec::new();
        loop {
            // A list may have empty elements.
            self.skip_spaces();
            if self.skip(',') {
                continue;
            }
            if self.0.is_empty() {
                return Some(elements);
            }
            elements.push(self.element()?);
            self.skip_spaces();
            if !self.0.is_empty() && !self.skip(',') {
                return None;
            }
        }
    }

    fn element(&mut self) -> Option<Element> {
        let mut element = Element::default();
        loop {
            self.skip_spaces();
            let name = self.token(is_token_character)?.to_ascii_lowercase();
            if !self.skip('=') {
                return None;
            }
            let value = self.value()?;
            let known = match name.as_str() {
                "for" => Some(&mut element.node),
                "host" => Some(&mut element.host),
                _ => None,
            };
            // A name may occur only once in an element.
            if let Some(known) = known
                && known.replace(value).is_some()
            {
                return None;
            }
            self.skip_spaces();
            if !self.skip(';') {
                return Some(element);
            }
        }
    }

    fn value(&mut self) -> Option<String> {
        if !self.skip('"') {
            // RFC 7239 requires quotes around a value with a colon or bracket, but some proxies omit them.
            return self.token(|c| is_token_character(c) || ":[]".contains(c)).map(str::to_owned);
        }
        let mut value = String::new();
        let mut characters = self.0.char_indices();
        while let Some((index, c)) = characters.next() {
            match c {
                '"' => {
                    self.0 = &self.0[index + 1..];
                    return Some(value);
                }
                '\\' => value.push(characters.next()?.1),
                _ => value.push(c),
            }
        }
        None
    }

    fn token(&mut self, is_part: impl Fn(char) -> bool) -> Option<&str> {
        let (token, rest) = self.0.split_at(self.0.find(|c| !is_part(c)).unwrap_or(self.0.len()));
        self.0 = rest;
        (!token.is_empty()).then_some(token)
    }

    fn skip_spaces(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t']);
    }

    fn skip(&mut self, c: char) -> bool {
        let rest = self.0.strip_prefix(c);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }
}

fn is_token_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trusted() -> Vec<Network> {
        ["10.0.0.0/8", "::1"].iter().map(|network| network.parse().unwrap()).collect()
    }

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn read_from(lines: &[(&str, &str)]) -> Result<Forwarded, ForwardedError> {
        read(&headers(lines), &trusted())
    }

    fn forwarded(client: &str, host: Option<&str>) -> Forwarded {
        Forwarded { client: Some(client.parse().unwrap()), host: host.map(str::to_owned) }
    }

    #[test]
    fn client_is_the_last_untrusted_address() {
        for (values, client) in [
            (&["192.0.2.1"][..], "192.0.2.1"),
            (&["192.0.2.1, 10.0.0.1,10.0.0.2"], "192.0.2.1"),
            (&["203.0.113.9, 192.0.2.1, 10.0.0.1"], "192.0.2.1"),
            (&["203.0.113.9", "192.0.2.1", "10.0.0.1"], "192.0.2.1"),
            // Elements sent by the client are ignored.
            (&["unknown, ;\"=, , 192.0.2.1"], "192.0.2.1"),
            (&["?", "192.0.2.1"], "192.0.2.1"),
            // Only proxies: the first one is used.
            (&["10.0.0.7, 10.0.0.1"], "10.0.0.7"),
            (&["192.0.2.1:4711"], "192.0.2.1"),
            (&["2001:db8::1"], "2001:db8::1"),
            (&["[2001:db8::1]:4711, ::1"], "2001:db8::1"),
            (&["::ffff:192.0.2.1"], "192.0.2.1"),
            (&[", 192.0.2.1 , "], "192.0.2.1"),
        ] {
            let lines: Vec<_> = values.iter().map(|value| ("X-Forwarded-For", *value)).collect();
            assert_eq!(read_from(&lines), Ok(forwarded(client, None)), "{values:?}");
        }
    }

    #[test]
    fn forwarded_is_read_with_its_host() {
        for (values, client, host) in [
            (&["for=192.0.2.1"][..], "192.0.2.1", None),
            (&["For=192.0.2.1;proto=https;by=10.0.0.1;HOST=tide.example"], "192.0.2.1", Some("tide.example")),
            (&["for=\"[2001:db8::1]:4711\" ; host=\"tide.example:80\""], "2001:db8::1", Some("tide.example:80")),
            (&["for=\"192.0.2.1:_port\""], "192.0.2.1", None),
            (&["for=192.0.2.1:80;host=a:80"], "192.0.2.1", Some("a:80")),
            (
                &["for=203.0.113.9;host=evil, for=192.0.2.1;host=tide, for=10.0.0.1;host=inner"],
                "192.0.2.1",
                Some("tide"),
            ),
            (&["for=203.0.113.9", "for=192.0.2.1", "for=\"10.0.0.1\""], "192.0.2.1", None),
            (&["for=unknown;host=x, proto=http, for=192.0.2.1"], "192.0.2.1", None),
            (&["for=\"unfinished", "for=192.0.2.1"], "192.0.2.1", None),
            (&["for=10.0.0.7;host=far, for=10.0.0.1"], "10.0.0.7", Some("far")),
            (&["for=192.0.2.1;x=\"a\\\"b, for=1.1.1.1\""], "192.0.2.1", None),
            (&[" , for=192.0.2.1 ,"], "192.0.2.1", None),
        ] {
            let lines: Vec<_> = values.iter().map(|value| ("Forwarded", *value)).collect();
            assert_eq!(read_from(&lines), Ok(forwarded(client, host)), "{values:?}");
        }
    }

    #[test]
    fn host_of_the_nearest_proxy_is_used() {
        for (value, host) in [("tide.example", "tide.example"), ("evil.example, tide.example:80", "tide.example:80")] {
            let lines = [("X-Forwarded-Host", value), ("X-Forwarded-For", "192.0.2.1")];
            assert_eq!(read_from(&lines), Ok(forwarded("192.0.2.1", Some(host))));
        }
        let lines = [("X-Forwarded-Host", "old"), ("Forwarded", "for=192.0.2.1;host=new")];
        assert_eq!(read_from(&lines), Ok(forwarded("192.0.2.1", Some("new"))));
    }

    #[test]
    fn malformed_headers_are_rejected() {
        for (name, value) in [
            ("X-Forwarded-For", "unknown"),
            ("X-Forwarded-For", "192.0.2.1, unknown"),
            ("X-Forwarded-For", "192.0.2.1, unknown, 10.0.0.1"),
            ("X-Forwarded-For", "192.0.2"),
            ("X-Forwarded-For", "192.0.2.1:"),
            ("X-Forwarded-For", "192.0.2.1:80:80"),
            ("X-Forwarded-For", "[192.0.2.1]"),
            ("X-Forwarded-For", "[2001:db8::1"),
            ("X-Forwarded-For", "[2001:db8::1]80"),
            ("X-Forwarded-For", "\"192.0.2.1\""),
            ("X-Forwarded-For", "192.0.2.1;"),
            ("X-Forwarded-For", "192.0.2.1\u{e9}"),
            ("Forwarded", "for"),
            ("Forwarded", "for="),
            ("Forwarded", "=192.0.2.1"),
            ("Forwarded", "for=unknown"),
            ("Forwarded", "for=_hidden"),
            ("Forwarded", "for=192.0.2.1, host=a"),
            ("Forwarded", "for=192.0.2.1;for=192.0.2.2"),
            ("Forwarded", "for=192.0.2.1;"),
            ("Forwarded", "for=192.0.2.1 for=192.0.2.2"),
            ("Forwarded", "for=\"192.0.2.1"),
            ("Forwarded", "for=\"192.0.2.1\\"),
            ("Forwarded", "for=\"192.0.2.1\"x"),
            // An unbalanced quote of the client that swallows the element of the proxy.
            ("Forwarded", "for=203.0.113.9;x=\", for=192.0.2.1"),
            ("Forwarded", "for=203.0.113.9, x=\", for=\"[2001:db8::1]\""),
        ] {
            let error = read_from(&[(name, value)]).unwrap_err();
            assert!(matches!(error, ForwardedError::Invalid { .. }), "{value}: {error}");
            assert!(error.to_string().starts_with(&name.to_lowercase()), "{error}");
        }
    }

    /// A proxy that sets one header passes the other one through.
    #[test]
    fn both_headers_must_agree() {
        let both = |one, other| read_from(&[("Forwarded", one), ("X-Forwarded-For", other)]);
        assert_eq!(both("for=192.0.2.1", "203.0.113.9, 192.0.2.1"), Ok(forwarded("192.0.2.1", None)));
        let error = both("for=203.0.113.9", "192.0.2.1").unwrap_err();
        assert!(error.to_string().contains("203.0.113.9 and 192.0.2.1"), "{error}");
        assert!(both("for=", "192.0.2.1").is_err());
    }

    #[test]
    fn empty_headers_are_treated_as_absent() {
        assert_eq!(read_from(&[]), Ok(Forwarded::default()));
        assert_eq!(read_from(&[("Forwarded", ""), ("X-Forwarded-For", " , ")]), Ok(Forwarded::default()));
        assert_eq!(read_from(&[("Forwarded", ""), ("X-Forwarded-For", "192.0.2.1")]), Ok(forwarded("192.0.2.1", None)));
        assert!(!is_forwarded(&headers(&[("Host", "a"), ("X-Forwarded-Proto", "https")])));
        for name in ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host"] {
            assert!(is_forwarded(&headers(&[(name, "")])), "{name}");
        }
    }

    proptest! {
        /// A client cannot influence the address that the proxy sends in a separate header line.
        #[test]
        fn header_lines_of_the_client_are_ignored(own in "[ -~]{0,80}", ip in any::<[u8; 4]>()) {
            let client = Ipv4Addr::from(ip);
            prop_assume!(client.octets()[0] != 10);
            let name = client.to_string();
            let lines = [("X-Forwarded-For", own.as_str()), ("X-Forwarded-For", &name)];
            prop_assert_eq!(read_from(&lines).unwrap().client, Some(client.into()));
            let element = format!("for={name}");
            let lines = [("Forwarded", own.as_str()), ("Forwarded", &element)];
            prop_assert_eq!(read_from(&lines).unwrap().client, Some(client.into()));
        }

        /// If the proxy appends to the line of the client, the client can make it invalid but cannot forge an address.
        #[test]
        fn client_cannot_forge_its_address_in_a_shared_line(own in "[ -~]{0,80}") {
            for line in [format!("{own}, 192.0.2.1"), format!("{own},192.0.2.1, 10.0.0.1")] {
                let client = read_from(&[("X-Forwarded-For", &line)]).unwrap().client;
                prop_assert_eq!(client, Some("192.0.2.1".parse().unwrap()));
            }
            let line = format!("{own}, for=192.0.2.1;host=tide");
            if let Ok(read) = read_from(&[("Forwarded", &line)]) {
                prop_assert_eq!(read.client, Some("192.0.2.1".parse().unwrap()));
            }
        }
    }
}
