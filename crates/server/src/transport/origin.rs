//! Checks the `Origin` and `Host` of browser pages.
//!
//! A browser lets any page open a WebSocket to any server, and sends the origin of the page. If clients must log in, a page of another
//! origin has no token, because browsers do not send tokens on their own. If no login is required, only the origin distinguishes a local
//! page from an arbitrary website. The origin alone is not sufficient: an attacker can make a domain resolve to the address of this server
//! (DNS rebinding), and then the page has the same origin as the server. So the `Host` header must have a name that an attacker cannot own.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Limit of the part of a header that is included in an error.
const MAX_SHOWN_BYTES: usize = 100;
/// Limit of the number of headers of one name that are included in an error.
const MAX_SHOWN_HEADERS: usize = 3;
/// Limit of a DNS name.
const MAX_NAME_BYTES: usize = 253;

/// The origins that are allowed. A request without `Origin` is always allowed, because it is not from a browser page.
#[derive(Debug, Clone, Copy)]
pub(super) enum OriginRule<'o> {
    /// Every origin, because clients must log in.
    Any,
    /// The origins of `allowedOrigins`.
    Listed(&'o [String]),
    /// Pages from this machine and from the server's own host. The host must be an IP address, `localhost` or in `allowedHosts`.
    OwnHost {
        /// `allowedHosts`.
        allowed_hosts: &'o [String],
    },
}

/// The error of a request that is rejected because of its `Origin` or `Host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OriginError {
    pub(super) problem: OriginProblem,
    /// `Origin` as received, shortened and escaped.
    pub(super) origin: String,
    /// `Host` as received, shortened and escaped.
    pub(super) host: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OriginProblem {
    /// The origin is not in `allowedOrigins`.
    NotListed,
    /// There is not exactly one `Origin` header with a valid host.
    InvalidOrigin,
    /// The page is neither from this machine nor from the server's own host.
    ForeignOrigin,
    /// There is not exactly one valid `Host` header, or its host is a name that an attacker may own.
    UnknownHost,
}

impl OriginProblem {
    /// Returns the setting that would allow the request.
    pub(super) fn setting(self) -> &'static str {
        match self {
            Self::NotListed | Self::InvalidOrigin | Self::ForeignOrigin => "allowedOrigins",
            Self::UnknownHost => "allowedHosts",
        }
    }
}

impl fmt::Display for OriginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { problem, origin, host } = self;
        match problem {
            OriginProblem::NotListed => write!(f, "Origin {origin} is not in the setting `allowedOrigins`"),
            OriginProblem::InvalidOrigin => write!(
                f,
                "Origin {origin} is not allowed: if no login is required, expected one origin such as \
                 \"http://localhost:3000\"; to allow others, set `allowedOrigins` or require a login"
            ),
            OriginProblem::ForeignOrigin => write!(
                f,
                "Origin {origin} is not allowed: if no login is required, pages must be from localhost or from the server's own \
                 host, which is {host}; to allow others, set `allowedOrigins` or require a login"
            ),
            OriginProblem::UnknownHost => write!(
                f,
                "Host {host} is not allowed for a page from Origin {origin}: if no login is required, it must be an IP address, \
                 localhost or a name in the setting `allowedHosts`"
            ),
        }
    }
}

/// Checks the `Origin` and `Host` headers of a request. There may be zero or more of each.
pub(super) fn check(rule: OriginRule<'_>, origins: &[&[u8]], hosts: &[&[u8]]) -> Result<(), OriginError> {
    if origins.is_empty() {
        return Ok(());
    }
    let error = |problem| Err(OriginError { problem, origin: quote_headers(origins), host: quote_headers(hosts) });
    let allowed_hosts = match rule {
        OriginRule::Any => return Ok(()),
        OriginRule::Listed(allowed) => {
            let is_listed = |origin: &&[u8]| allowed.iter().any(|allowed| allowed.as_bytes() == *origin);
            return if origins.iter().all(is_listed) { Ok(()) } else { error(OriginProblem::NotListed) };
        }
        OriginRule::OwnHost { allowed_hosts } => allowed_hosts,
    };
    let Some(origin) = single_value(origins).and_then(origin_host) else { return error(OriginProblem::InvalidOrigin) };
    let Some(host) = single_value(hosts).and_then(Host::parse) else { return error(OriginProblem::UnknownHost) };
    if !origin.is_loopback() && origin != host {
        return error(OriginProblem::ForeignOrigin);
    }
    let is_known = match host {
        Host::Address(_) => true,
        Host::Name(_) => {
            host == Host::Name("localhost") || allowed_hosts.iter().any(|allowed| host == Host::Name(allowed))
        }
    };
    if is_known { Ok(()) } else { error(OriginProblem::UnknownHost) }
}

/// Returns whether a string is a host name without a port.
pub(crate) fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    text.len() <= MAX_NAME_BYTES && text.split('.').all(is_label)
}

/// A host without a port.
#[derive(Debug, Clone, Copy)]
enum Host<'h> {
    Address(IpAddr),
    Name(&'h str),
}

impl PartialEq for Host<'_> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Address(one), Self::Address(other)) => one == other,
            (Self::Name(one), Self::Name(other)) => one.eq_ignore_ascii_case(other),
            _ => false,
        }
    }
}

impl<'h> Host<'h> {
    /// Parses `host` or `host:port`.
    fn parse(text: &'h str) -> Option<Self> {
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (address, port) = rest.split_once(']')?;
            (Self::Address(address.parse::<Ipv6Addr>().ok()?.to_canonical()), port)
        } else {
            let (name, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            let address = name.parse::<Ipv4Addr>().ok().map(|address| Self::Address(address.into()));
            (address.or_else(|| is_host_name(name).then_some(Self::Name(name)))?, port)
        };
        let is_port = |digits: &str| digits.parse::<u16>().is_ok() && !digits.starts_with('+');
        (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(host)
    }

    /// Returns whether it is this machine. Browsers resolve names below `localhost` themselves, so an attacker cannot own one.
    fn is_loopback(&self) -> bool {
        match self {
            Self::Address(address) => address.is_loopback(),
            Self::Name(name) => {
                let last = name.rsplit('.').next();
                last.is_some_and(|label| label.eq_ignore_ascii_case("localhost"))
            }
        }
    }
}

/// Returns the host of an origin: `scheme://host` or `scheme://host:port`.
fn origin_host(origin: &str) -> Option<Host<'_>> {
    let (scheme, host) = origin.split_once("://")?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    Host::parse(host).filter(|_| is_scheme)
}

/// Returns the value of a header that occurs exactly once.
fn single_value<'h>(headers: &[&'h [u8]]) -> Option<&'h str> {
    let [header] = headers else { return None };
    std::str::from_utf8(header).ok()
}

/// Formats headers for an error: quoted, escaped and shortened.
pub(super) fn quote_headers(headers: &[&[u8]]) -> String {
    if headers.is_empty() {
        return "(missing)".to_owned();
    }
    let quoted = headers.iter().take(MAX_SHOWN_HEADERS).map(|header| {
        let more = if header.len() > MAX_SHOWN_BYTES { "…" } else { "" };
        format!("\"{}{more}\"", header[..header.len().min(MAX_SHOWN_BYTES)].escape_ascii())
    });
    let more = (headers.len() > MAX_SHOWN_HEADERS).then(|| "…".to_owned());
    quoted.chain(more).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(rule: OriginRule<'_>, origins: &[&str], hosts: &[&str]) -> Option<OriginProblem> {
        let origins: Vec<&[u8]> = origins.iter().map(|header| header.as_bytes()).collect();
        let hosts: Vec<&[u8]> = hosts.iter().map(|header| header.as_bytes()).collect();
        check(rule, &origins, &hosts).err().map(|error| error.problem)
    }

    #[test]
    fn without_login_local_and_same_host_pages_are_allowed() {
        let allowed = ["tide.example".to_owned()];
        let rule = OriginRule::OwnHost { allowed_hosts: &allowed };
        for (origin, host) in [
            ("http://localhost", "localhost:8080"),
            ("http://localhost:3000", "127.0.0.1:8080"),
            ("https://LOCALHOST:3000", "LocalHost"),
            ("http://app.localhost:5173", "localhost:8080"),
            ("tauri://localhost", "127.0.0.1"),
            ("http://127.0.0.1:3000", "localhost"),
            ("http://127.8.9.10", "192.0.2.1:8080"),
            ("http://[::1]:3000", "[::1]:8080"),
            ("http://[::ffff:127.0.0.1]", "localhost"),
            ("http://192.0.2.1:3000", "192.0.2.1:8080"),
            ("http://192.0.2.1", "[::ffff:192.0.2.1]"),
            ("http://[2001:db8::1]", "[2001:db8:0::1]:8080"),
            ("https://tide.example", "tide.example"),
            ("https://tide.example:8443", "TIDE.example:80"),
            ("http://localhost:3000", "tide.example"),
        ] {
            assert_eq!(problem(rule, &[origin], &[host]), None, "{origin} at {host}");
        }
        // Clients other than browsers send no origin, and their host is not checked.
        for hosts in [&[][..], &["evil.example"], &["a", "b"], &["?"]] {
            assert_eq!(problem(rule, &[], hosts), None, "{hosts:?}");
        }
    }

    #[test]
    fn without_login_foreign_origins_are_rejected() {
        let allowed = ["tide.example".to_owned()];
        let rule = OriginRule::OwnHost { allowed_hosts: &allowed };
        for (origin, host) in [
            ("https://evil.example", "localhost:8080"),
            ("https://evil.example", "127.0.0.1:8080"),
            ("https://evil.example", "tide.example"),
            ("https://tide.example", "localhost"),
            ("https://sub.tide.example", "tide.example"),
            ("https://tide.example.evil.example", "tide.example"),
            ("http://localhost.evil.example", "localhost"),
            ("http://notlocalhost", "localhost"),
            ("http://127.0.0.1.evil.example", "127.0.0.1"),
            ("http://192.0.2.2", "192.0.2.1"),
            ("http://128.0.0.1", "127.0.0.1"),
            ("chrome-extension://abcdef", "localhost"),
        ] {
            assert_eq!(problem(rule, &[origin], &[host]), Some(OriginProblem::ForeignOrigin), "{origin} at {host}");
        }
    }

    #[test]
    fn without_login_unknown_hosts_are_rejected() {
        let allowed = ["tide.example".to_owned()];
        let rule = OriginRule::OwnHost { allowed_hosts: &allowed };
        for (origin, hosts) in [
            ("http://evil.example:8080", &["evil.example:8080"][..]),
            ("http://localhost:3000", &["evil.example"]),
            ("http://sub.tide.example", &["sub.tide.example"]),
            ("http://localhost", &[]),
            ("http://localhost", &["localhost", "localhost"]),
            ("http://localhost", &[""]),
            ("http://localhost", &["localhost."]),
            ("http://localhost", &["localhost:"]),
            ("http://localhost", &["localhost:99999"]),
            ("http://localhost", &["localhost:+80"]),
            ("http://localhost", &["localhost@evil.example"]),
            ("http://localhost", &["localhost/x"]),
            ("http://localhost", &["[::1"]),
            ("http://localhost", &["[::1]x"]),
            ("http://localhost", &["[localhost]"]),
            ("http://localhost", &["127.0.0.1.evil.example"]),
        ] {
            assert_eq!(problem(rule, &[origin], hosts), Some(OriginProblem::UnknownHost), "{origin} at {hosts:?}");
        }
    }

    #[test]
    fn without_login_invalid_origins_are_rejected() {
        let rule = OriginRule::OwnHost { allowed_hosts: &[] };
        for origins in [
            &["null"][..],
            &[""],
            &["localhost"],
            &["//localhost"],
            &["://localhost"],
            &["1http://localhost"],
            &["http:/localhost"],
            &["http://"],
            &["http://localhost/"],
            &["http://localhost/path"],
            &["http://user@localhost"],
            &["http://localhost:port"],
            &["http://localhost http://evil.example"],
            &["http://localhost, http://localhost"],
            &["http://localhost", "http://localhost"],
            &["http://localhost", "https://evil.example"],
            &["http://lo\u{e9}calhost"],
        ] {
            assert_eq!(problem(rule, origins, &["localhost"]), Some(OriginProblem::InvalidOrigin), "{origins:?}");
        }
    }

    #[test]
    fn listed_origins_are_allowed_regardless_of_host() {
        let allowed = ["https://tide.example".to_owned(), "null".to_owned()];
        let rule = OriginRule::Listed(&allowed);
        for (origins, expected) in [
            (&[][..], None),
            (&["https://tide.example"], None),
            (&["null"], None),
            (&["https://tide.example", "null"], None),
            (&["https://TIDE.example"], Some(OriginProblem::NotListed)),
            (&["https://tide.example:8443"], Some(OriginProblem::NotListed)),
            (&["http://localhost"], Some(OriginProblem::NotListed)),
            (&["https://tide.example", "https://evil.example"], Some(OriginProblem::NotListed)),
            (&[""], Some(OriginProblem::NotListed)),
        ] {
            assert_eq!(problem(rule, origins, &["evil.example"]), expected, "{origins:?}");
        }
        assert_eq!(
            problem(OriginRule::Listed(&[]), &["http://localhost"], &["localhost"]),
            Some(OriginProblem::NotListed)
        );
        for origins in [&["null"][..], &["https://evil.example", "?"]] {
            assert_eq!(problem(OriginRule::Any, origins, &[]), None, "{origins:?}");
        }
    }

    #[test]
    fn error_has_the_headers_and_the_setting() {
        let rule = OriginRule::OwnHost { allowed_hosts: &[] };
        let evil: &[u8] = b"http://evil.example";
        let error = check(rule, &[evil], &[b"localhost:8080"]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("\"http://evil.example\"") && text.contains("\"localhost:8080\""), "{text}");
        assert!(text.contains("`allowedOrigins`"), "{text}");
        let text = check(rule, &[evil], &[b"evil.example"]).unwrap_err().to_string();
        assert!(text.contains("Host \"evil.example\"") && text.contains("`allowedHosts`"), "{text}");
        // Long headers and control characters.
        let long = "x".repeat(10_000);
        let error = check(rule, &[b"a\"\n\xff\x1b[31m", long.as_bytes(), b"c", b"d", b"e"], &[]).unwrap_err();
        let shortened = format!(r#""a\"\n\xff\x1b[31m", "{}…", "c", …"#, "x".repeat(100));
        assert_eq!((error.origin, &*error.host), (shortened, "(missing)"));
    }
}
