//! Options from a URL.
//!
//! No error quotes a part of the URL that may contain a password: an `@`, `/`, `?` or `#` that is not encoded splits it, and the
//! pieces end up in the port, the database or a parameter.

use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::{Address, Login, Options, WhenFull, WhileDown};

/// Why a URL cannot be parsed. No error quotes a part of the URL that may contain a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// There is no scheme.
    #[error("the URL has no scheme; expected redis://host or unix:///path")]
    NoScheme,
    /// The scheme is unknown.
    #[error("unknown scheme {scheme:?}; expected redis://, rediss:// or unix://")]
    Scheme {
        /// The scheme.
        scheme: String,
    },
    /// The scheme is `rediss`, and the feature `tls` is not enabled.
    #[error("rediss:// needs TLS; enable the feature `tls` of tidewire-redis")]
    Tls,
    /// There is an `@` after the host.
    #[error(
        "unexpected '@' after the host; in a user or password write '/' as %2F, '?' as %3F and '#' as %23, and '@' elsewhere \
         as %40"
    )]
    StrayAt,
    /// There is a fragment.
    #[error("unexpected '#'; write it as %23")]
    Fragment,
    /// A percent sign is not followed by two hexadecimal digits.
    #[error("expected two hexadecimal digits after '%' in the {part}; write '%' as %25")]
    Percent {
        /// The part of the URL.
        part: &'static str,
    },
    /// A part is not UTF-8 once it is decoded.
    #[error("the {part} is not UTF-8 once it is decoded")]
    Utf8 {
        /// The part of the URL.
        part: &'static str,
    },
    /// There is no host.
    #[error("the URL has no host; expected redis://host")]
    NoHost,
    /// The host is invalid.
    #[error(
        "the host has a space, a control character or a bracket that is not closed; expected a name or an IP address"
    )]
    Host,
    /// The host is an invalid IPv6 address, or has no brackets.
    #[error("expected an IPv6 address in brackets as the host, like [::1]")]
    Ipv6,
    /// The port is invalid.
    #[error("expected a number from 1 to 65535 as the port")]
    Port,
    /// The database is invalid.
    #[error("expected a number from 0 to 4294967295 as the database, after the '/' that follows the host")]
    Database,
    /// There is no path of a Unix socket.
    #[error("the URL has no path; expected unix:///path/to/redis.sock")]
    NoPath,
    /// There is a host in a `unix` URL.
    #[error("unexpected host in a unix:// URL; expected three slashes before the path, as in unix:///run/redis.sock")]
    UnixHost,
    /// A parameter has no value.
    #[error("parameter {position} has no '='; expected name=value")]
    NoValue {
        /// Its position, from 1.
        position: usize,
    },
    /// A parameter is unknown.
    #[error("unknown parameter at position {position}; did you mean {nearest:?}?")]
    Unknown {
        /// Its position, from 1.
        position: usize,
        /// The parameter with the most similar name.
        nearest: &'static str,
    },
    /// A setting is given twice.
    #[error("{name:?} is given twice; remove one of them")]
    Twice {
        /// The name of the parameter.
        name: &'static str,
    },
    /// The value of a parameter is invalid.
    #[error("expected {expected} as the value of {name:?}")]
    Value {
        /// The name of the parameter.
        name: &'static str,
        /// The values that it can have.
        expected: &'static str,
    },
}

impl Options {
    /// Parses a URL. Options that it does not have keep their defaults.
    ///
    /// * `redis://[user][:password]@host[:port][/database]`
    /// * `rediss://…`, the same over TLS. Needs the feature `tls`.
    /// * `unix:///path`
    ///
    /// All can have parameters: `db`, `user`, `password`, `name`, `no_evict` and `no_touch` (`true`, `false`), `connect_timeout_ms`,
    /// `timeout_ms`, `tcp_user_timeout_ms`, `while_down` (`wait_for_attempt`, `fail`, `queue`), `reconnect` (`true`, `false`),
    /// `min_backoff_ms`, `max_backoff_ms`, `backoff_reset_after_ms`, `max_in_flight`, `max_in_flight_bytes`, `when_full` (`wait`, `fail`),
    /// `max_exclusive`, `max_bulk`, `max_elements`, `max_depth`, `max_line`, `trace`. Parts can be percent-encoded, and characters with a
    /// meaning in URLs must be.
    ///
    /// ```
    /// use tidewire_redis::{Address, Options};
    ///
    /// let options = Options::from_url("redis://:s%40crets@[::1]:7000/2?timeout_ms=500")?;
    /// assert_eq!(options.address, Address::Tcp { host: "::1".into(), port: 7000 });
    /// assert_eq!(options.database, 2);
    /// # Ok::<(), tidewire_redis::UrlError>(())
    /// ```
    pub fn from_url(url: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = url.split_once("://").ok_or(UrlError::NoScheme)?;
        let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        if scheme.is_empty() || !scheme.bytes().all(is_scheme) {
            return Err(UrlError::NoScheme);
        }
        let mut options = Self::default();
        let scheme = scheme.to_ascii_lowercase();
        let mut given = Vec::new();
        let query = match &*scheme {
            "redis" => tcp(rest, &mut options, &mut given)?,
            "unix" => unix(rest, &mut options)?,
            #[cfg(feature = "tls")]
            "rediss" => {
                options.tls = Some(crate::tls::TlsOptions::default());
                tcp(rest, &mut options, &mut given)?
            }
            #[cfg(not(feature = "tls"))]
            "rediss" => return Err(UrlError::Tls),
            _ => return Err(UrlError::Scheme { scheme }),
        };
        if let Some(query) = query {
            parameters(query, &mut options, given)?;
        }
        Ok(options)
    }
}

impl FromStr for Options {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        Self::from_url(url)
    }
}

/// Parses what follows `redis://`. Returns the query, and adds the parameters that the URL has given before it.
fn tcp<'a>(rest: &'a str, options: &mut Options, given: &mut Vec<&'static str>) -> Result<Option<&'a str>, UrlError> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    if rest.contains('@') {
        return Err(UrlError::StrayAt);
    }
    let (path, query) = path_and_query(rest)?;
    let host_and_port = match authority.rsplit_once('@') {
        Some((user_info, host_and_port)) => {
            options.login = login(user_info)?;
            host_and_port
        }
        None => authority,
    };
    let (host, port) = parse_host_and_port(host_and_port)?;
    options.address = Address::Tcp { host, port };
    let database = decoded(path.strip_prefix('/').unwrap_or(path), "database")?;
    if !database.is_empty() {
        options.database = number(&database).ok_or(UrlError::Database)?;
        given.push("db");
    }
    if let Some(login) = &options.login {
        given.extend(login.user.is_some().then_some("user"));
        given.extend((!login.password.is_empty()).then_some("password"));
    }
    Ok(query)
}

/// Parses what follows `unix://`. Returns the query.
fn unix<'a>(rest: &'a str, options: &mut Options) -> Result<Option<&'a str>, UrlError> {
    let (path, query) = path_and_query(rest)?;
    match path {
        "" | "/" => return Err(UrlError::NoPath),
        path if !path.starts_with('/') => return Err(UrlError::UnixHost),
        path => options.address = Address::Unix(PathBuf::from(decoded(path, "path")?)),
    }
    Ok(query)
}

fn path_and_query(rest: &str) -> Result<(&str, Option<&str>), UrlError> {
    if rest.contains('#') {
        return Err(UrlError::Fragment);
    }
    Ok(rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query))))
}

fn login(user_info: &str) -> Result<Option<Login>, UrlError> {
    let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
    let (user, password) = (decoded(user, "user")?, decoded(password, "password")?);
    if user.is_empty() && password.is_empty() {
        return Ok(None);
    }
    Ok(Some(Login { user: (!user.is_empty()).then_some(user), password }))
}

fn parse_host_and_port(text: &str) -> Result<(String, u16), UrlError> {
    let (host, port) = if let Some(bracketed) = text.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']').ok_or(UrlError::Host)?;
        let address = decoded(address, "host")?;
        // A link-local address has its interface after a percent sign.
        let bare = address.split_once('%').map_or(&*address, |(bare, _)| bare);
        bare.parse::<Ipv6Addr>().map_err(|_| UrlError::Ipv6)?;
        let port = match port {
            "" => None,
            port => Some(port.strip_prefix(':').ok_or(UrlError::Host)?),
        };
        (address, port)
    } else {
        let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
        if port.is_some_and(|port| port.contains(':')) {
            return Err(UrlError::Ipv6);
        }
        (decoded(host, "host")?, port)
    };
    if host.is_empty() {
        return Err(UrlError::NoHost);
    }
    if host.chars().any(|c| c.is_whitespace() || c.is_control() || "[]/@".contains(c)) {
        return Err(UrlError::Host);
    }
    let port = port.map_or(Some(6379), number).filter(|port| *port > 0).ok_or(UrlError::Port)?;
    Ok((host, port))
}

/// The name of a parameter, a description of its values, and a function that sets it, or returns `None` if the value is invalid.
type Parameter = (&'static str, &'static str, fn(&mut Options, &str) -> Option<()>);

const COUNT: &str = "a whole number";
const MILLIS: &str = "a number of milliseconds";

const PARAMETERS: &[Parameter] = &[
    ("db", "a number from 0 to 4294967295", |options, text| number(text).map(|value| options.database = value)),
    ("user", "text", |options, text| {
        options.login.get_or_insert_with(|| Login::new("")).user = Some(text.to_owned());
        Some(())
    }),
    ("password", "text", |options, text| {
        text.clone_into(&mut options.login.get_or_insert_with(|| Login::new("")).password);
        Some(())
    }),
    ("name", "text", |options, text| {
        options.name = Some(text.to_owned());
        Some(())
    }),
    ("no_evict", "true or false", |options, text| text.parse().ok().map(|value| options.no_evict = value)),
    ("no_touch", "true or false", |options, text| text.parse().ok().map(|value| options.no_touch = value)),
    ("connect_timeout_ms", MILLIS, |options, text| millis(text).map(|value| options.connect_timeout = value)),
    ("timeout_ms", MILLIS, |options, text| millis(text).map(|value| options.timeout = value)),
    ("tcp_user_timeout_ms", MILLIS, |options, text| millis(text).map(|value| options.tcp_user_timeout = value)),
    ("while_down", "wait_for_attempt, fail or queue", |options, text| {
        options.while_down = match text {
            "wait_for_attempt" => WhileDown::WaitForAttempt,
            "fail" => WhileDown::Fail,
            "queue" => WhileDown::Queue,
            _ => return None,
        };
        Some(())
    }),
    ("reconnect", "true or false", |options, text| text.parse().ok().map(|value| options.reconnect = value)),
    ("min_backoff_ms", MILLIS, |options, text| millis(text).map(|value| options.min_backoff = value)),
    ("max_backoff_ms", MILLIS, |options, text| millis(text).map(|value| options.max_backoff = value)),
    ("backoff_reset_after_ms", MILLIS, |options, text| millis(text).map(|value| options.backoff_reset_after = value)),
    ("max_in_flight", COUNT, |options, text| number(text).map(|value| options.max_in_flight = value)),
    ("max_in_flight_bytes", COUNT, |options, text| number(text).map(|value| options.max_in_flight_bytes = value)),
    ("when_full", "wait or fail", |options, text| {
        options.when_full = match text {
            "wait" => WhenFull::Wait,
            "fail" => WhenFull::Fail,
            _ => return None,
        };
        Some(())
    }),
    ("max_exclusive", COUNT, |options, text| number(text).map(|value| options.max_exclusive = value)),
    ("max_bulk", COUNT, |options, text| number(text).map(|value| options.decoder.max_bulk = value)),
    ("max_elements", COUNT, |options, text| number(text).map(|value| options.decoder.max_elements = value)),
    ("max_depth", COUNT, |options, text| number(text).map(|value| options.decoder.max_depth = value)),
    ("max_line", COUNT, |options, text| number(text).map(|value| options.decoder.max_line = value)),
    ("trace", "true or false", |options, text| text.parse().ok().map(|value| options.trace = value)),
];

fn parameters(query: &str, options: &mut Options, mut given: Vec<&'static str>) -> Result<(), UrlError> {
    for (index, pair) in query.split('&').enumerate().filter(|(_, pair)| !pair.is_empty()) {
        let position = index + 1;
        let (name, value) = pair.split_once('=').ok_or(UrlError::NoValue { position })?;
        let known = PARAMETERS.iter().find(|(known, ..)| *known == name);
        let &(name, expected, set) = known.ok_or_else(|| UrlError::Unknown { position, nearest: nearest(name) })?;
        if given.contains(&name) {
            return Err(UrlError::Twice { name });
        }
        given.push(name);
        set(options, &decoded(value, name)?).ok_or(UrlError::Value { name, expected })?;
    }
    Ok(())
}

fn nearest(name: &str) -> &'static str {
    let name = name.to_lowercase();
    let names = PARAMETERS.iter().map(|(known, ..)| *known);
    names.min_by_key(|known| strsim::damerau_levenshtein(&name, known)).unwrap_or_default()
}

fn millis(text: &str) -> Option<Duration> {
    number(text).map(Duration::from_millis)
}

/// Parses digits. Unlike `parse`, it accepts no sign.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn decoded(text: &str, part: &'static str) -> Result<String, UrlError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' {
            let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
            let (high, low) = (digit(rest.next()), digit(rest.next()));
            let value = high.zip(low).and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
            value.ok_or(UrlError::Percent { part })?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).map_err(|_| UrlError::Utf8 { part })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the address, the user and password, and the database.
    fn parts(url: &str) -> (String, Option<(Option<String>, String)>, u32) {
        let options = Options::from_url(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        let address = match options.address {
            Address::Tcp { host, port } => format!("{host} {port}"),
            Address::Unix(path) => path.display().to_string(),
        };
        (address, options.login.map(|login| (login.user, login.password)), options.database)
    }

    #[test]
    fn addresses_logins_and_databases_are_parsed() {
        let login =
            |user: &str, password: &str| Some(((!user.is_empty()).then(|| user.to_owned()), password.to_owned()));
        for (url, address, who, database) in [
            ("redis://h", "h 6379", None, 0),
            ("REDIS://h/", "h 6379", None, 0),
            ("redis://h:1/0", "h 1", None, 0),
            ("redis://h:65535/4294967295", "h 65535", None, u32::MAX),
            ("redis://@h", "h 6379", None, 0),
            ("redis://:@h", "h 6379", None, 0),
            ("redis://u@h", "h 6379", login("u", ""), 0),
            ("redis://:p@h", "h 6379", login("", "p"), 0),
            ("redis://u:p@h:2/3", "h 2", login("u", "p"), 3),
            ("redis://u:a:b@c@h", "h 6379", login("u", "a:b@c"), 0),
            ("redis://%75%3A:%2F%3f%23%25%C3%A9@h", "h 6379", login("u:", "/?#%é"), 0),
            ("redis://[::1]", "::1 6379", None, 0),
            ("redis://u:p@[fe80::1%25eth0]:7/1", "fe80::1%eth0 7", login("u", "p"), 1),
            ("redis://h?db=5&user=u&password=p%26", "h 6379", login("u", "p&"), 5),
            ("redis://:p@h?user=u", "h 6379", login("u", "p"), 0),
            ("redis://u@h?password=p", "h 6379", login("u", "p"), 0),
            ("unix:///run/redis.sock", "/run/redis.sock", None, 0),
            ("unix:///a%20b@c?db=1&password=p+p", "/a b@c", login("", "p+p"), 1),
        ] {
            assert_eq!(parts(url), (address.to_owned(), who, database), "{url}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn rediss_is_redis_over_tls() {
        assert_eq!(parts("rediss://u:p@h:2/3"), parts("redis://u:p@h:2/3"));
        assert!(Options::from_url("rediss://h").unwrap().tls.is_some());
        assert!(Options::from_url("redis://h").unwrap().tls.is_none());
    }

    #[test]
    fn parameters_set_options() {
        let options = Options::from_url(
            "redis://h?db=1&user=u&password=p&name=n&connect_timeout_ms=2&timeout_ms=3&while_down=queue&reconnect=false&\
             min_backoff_ms=4&max_backoff_ms=5&backoff_reset_after_ms=6&max_in_flight=7&max_in_flight_bytes=8&when_full=fail&max_bulk=9&\
             max_elements=10&max_depth=11&max_line=12&trace=true&no_evict=true&no_touch=true&max_exclusive=13&\
             tcp_user_timeout_ms=13&",
        );
        let options = options.unwrap();
        assert_eq!((options.database, options.name.as_deref(), options.reconnect), (1, Some("n"), false));
        assert_eq!((options.while_down, options.when_full, options.trace), (WhileDown::Queue, WhenFull::Fail, true));
        let times = [
            options.connect_timeout,
            options.timeout,
            options.min_backoff,
            options.max_backoff,
            options.backoff_reset_after,
            options.tcp_user_timeout,
        ];
        assert_eq!(times, [2, 3, 4, 5, 6, 13].map(Duration::from_millis));
        let decoder = options.decoder;
        let counts = [options.max_in_flight, options.max_in_flight_bytes, decoder.max_bulk, decoder.max_elements];
        assert_eq!((counts, decoder.max_depth, decoder.max_line), ([7, 8, 9, 10], 11, 12));
        assert_eq!((options.no_evict, options.no_touch, options.max_exclusive), (true, true, 13));
        let defaults: Options = "redis://h?while_down=wait_for_attempt&when_full=wait&reconnect=true".parse().unwrap();
        assert_eq!((defaults.while_down, defaults.when_full), (WhileDown::WaitForAttempt, WhenFull::Wait));
        assert!(Options::from_url("redis://h?while_down=fail").is_ok_and(|it| it.while_down == WhileDown::Fail));
    }

    #[test]
    fn errors_name_the_part_and_quote_no_password() {
        let value = |name, expected| UrlError::Value { name, expected };
        for (url, expected) in [
            ("", UrlError::NoScheme),
            ("hunter2@h:6379", UrlError::NoScheme),
            ("u:hunter2@h://", UrlError::NoScheme),
            ("://h", UrlError::NoScheme),
            ("http://h", UrlError::Scheme { scheme: "http".to_owned() }),
            #[cfg(not(feature = "tls"))]
            ("rediss://u:hunter2@h", UrlError::Tls),
            ("redis://", UrlError::NoHost),
            ("redis://:1", UrlError::NoHost),
            ("redis://u:hunter2@", UrlError::NoHost),
            ("redis://:hunter2/x@h", UrlError::StrayAt),
            ("redis://:x?hunter2=x@h", UrlError::StrayAt),
            ("redis://:x#hunter2@h", UrlError::StrayAt),
            ("redis://h#hunter2", UrlError::Fragment),
            ("unix:///p#hunter2", UrlError::Fragment),
            ("redis://:hunter2%@h", UrlError::Percent { part: "password" }),
            ("redis://hunter2%4:p@h", UrlError::Percent { part: "user" }),
            ("redis://:hunter2%+4@h", UrlError::Percent { part: "password" }),
            ("redis://:hunter2%ff@h", UrlError::Utf8 { part: "password" }),
            ("redis://h?password=hunter2%zz", UrlError::Percent { part: "password" }),
            ("redis://a b", UrlError::Host),
            ("redis://[::1", UrlError::Host),
            ("redis://[::1]6379", UrlError::Host),
            ("redis://a%00", UrlError::Host),
            ("redis://[::g]", UrlError::Ipv6),
            ("redis://[h]", UrlError::Ipv6),
            ("redis://::1", UrlError::Ipv6),
            ("redis://h:", UrlError::Port),
            ("redis://h:0", UrlError::Port),
            ("redis://h:65536", UrlError::Port),
            ("redis://h:+1", UrlError::Port),
            ("redis://u:hunter2", UrlError::Port),
            ("redis://h/hunter2", UrlError::Database),
            ("redis://h/-1", UrlError::Database),
            ("redis://h/1/2", UrlError::Database),
            ("redis://h/4294967296", UrlError::Database),
            ("unix://", UrlError::NoPath),
            ("unix:///?db=1", UrlError::NoPath),
            ("unix://run/redis.sock", UrlError::UnixHost),
            ("redis://h?hunter2", UrlError::NoValue { position: 1 }),
            ("redis://h?db=1&time_out_ms=1", UrlError::Unknown { position: 2, nearest: "timeout_ms" }),
            ("redis://h?Password=hunter2", UrlError::Unknown { position: 1, nearest: "password" }),
            ("redis://h/1?db=1", UrlError::Twice { name: "db" }),
            ("redis://h/0?db=1", UrlError::Twice { name: "db" }),
            ("redis://h?db=1&db=1", UrlError::Twice { name: "db" }),
            ("redis://:hunter2@h?password=x", UrlError::Twice { name: "password" }),
            ("redis://u@h?user=x", UrlError::Twice { name: "user" }),
            ("redis://h?db=x", value("db", "a number from 0 to 4294967295")),
            ("redis://h?timeout_ms=1s", value("timeout_ms", MILLIS)),
            ("redis://h?timeout_ms=", value("timeout_ms", MILLIS)),
            ("redis://h?reconnect=yes", value("reconnect", "true or false")),
            ("redis://h?while_down=hang", value("while_down", "wait_for_attempt, fail or queue")),
            ("redis://h?when_full=hang", value("when_full", "wait or fail")),
            ("redis://h?max_in_flight=-1", value("max_in_flight", COUNT)),
        ] {
            let error = Options::from_url(url).expect_err(url);
            assert_eq!(error, expected, "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter"), "{url}: {error}");
        }
    }

    #[test]
    fn debug_does_not_show_the_password() {
        let options = Options::from_url("redis://u:hunter2@h").unwrap();
        assert!(!format!("{options:?}").contains("hunter"));
    }

    #[test]
    fn parsing_never_panics() {
        proptest::proptest!(|(url in "(redis|unix)://[a-z%@:/?&=#\\[\\]0-9 é.]{0,40}")| {
            if let Err(error) = Options::from_url(&url) {
                assert!(!error.to_string().is_empty());
            }
        });
    }
}
