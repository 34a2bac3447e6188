//! The header of the PROXY protocol, version 2: the address of the client, sent by a proxy that does not read what it forwards.
//!
//! The header comes before everything else, also before TLS. Exactly its bytes are read from the stream, so the rest is left for
//! whatever follows.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The bytes with which a header begins. No HTTP request and no TLS handshake begins with them.
pub(super) const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, family, and the length of the rest.
const HEAD_BYTES: usize = 16;
/// The limit of the rest: addresses, and additional fields that are skipped.
const MAX_REST_BYTES: usize = 4096;

const TCP4_BYTES: usize = 12;
const TCP6_BYTES: usize = 36;

/// Why a header is not accepted.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyHeaderError {
    #[error("expected a header of the PROXY protocol version 2")]
    NoHeader,
    #[error("version 1 of the PROXY protocol is not supported; use version 2 (`send-proxy-v2` in HAProxy)")]
    Version1,
    #[error("version and command are {0:#04x}; expected 0x20 or 0x21")]
    Command(u8),
    #[error("address family and transport are {0:#04x}, which the PROXY protocol does not define")]
    Family(u8),
    #[error("the header has {0} bytes after its first 16; the limit is {MAX_REST_BYTES}")]
    TooLong(usize),
    #[error("the header has {0} bytes of addresses, which is too short for its address family")]
    TooShort(usize),
    #[error("the header did not arrive in time")]
    TimedOut,
    #[error("only a trusted proxy may send a header of the PROXY protocol")]
    NotTrusted,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads the header and nothing after it. Returns the address of the client, or `None` if the proxy does not tell it: the connection is
/// its own, for example to check the health of the server, or does not come from TCP.
pub(super) async fn read_header(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head).await?;
    let head = Head::parse(&head)?;
    let mut rest = vec![0; head.rest_bytes];
    stream.read_exact(&mut rest).await?;
    head.client(&rest)
}

/// The fixed part of a header.
#[derive(Debug)]
struct Head {
    source: Source,
    rest_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
enum Source {
    Tcp4,
    Tcp6,
    /// The proxy itself, or a client that has no address of TCP.
    Unknown,
}

impl Head {
    fn parse(head: &[u8; HEAD_BYTES]) -> Result<Self, ProxyHeaderError> {
        let [.., command, family, high, low] = *head;
        if !head.starts_with(&SIGNATURE) {
            let is_version_1 = head.starts_with(b"PROXY ");
            return Err(if is_version_1 { ProxyHeaderError::Version1 } else { ProxyHeaderError::NoHeader });
        }
        let source = match (command, family) {
            (0x21, 0x11) => Source::Tcp4,
            (0x21, 0x21) => Source::Tcp6,
            // A connection of the proxy itself, whatever its family. Unspecified, UDP and Unix sockets.
            (0x20, _) | (0x21, 0x00 | 0x12 | 0x22 | 0x31 | 0x32) => Source::Unknown,
            (0x21, _) => return Err(ProxyHeaderError::Family(family)),
            _ => return Err(ProxyHeaderError::Command(command)),
        };
        let rest_bytes = usize::from(u16::from_be_bytes([high, low]));
        if rest_bytes > MAX_REST_BYTES {
            return Err(ProxyHeaderError::TooLong(rest_bytes));
        }
        Ok(Self { source, rest_bytes })
    }

    /// The source address in the rest of the header. Additional fields are skipped.
    fn client(&self, rest: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
        let too_short = ProxyHeaderError::TooShort(rest.len());
        match self.source {
            Source::Unknown => Ok(None),
            Source::Tcp4 => {
                let addresses: &[u8; TCP4_BYTES] = rest.first_chunk().ok_or(too_short)?;
                let [a, b, c, d, _, _, _, _, high, low, ..] = *addresses;
                Ok(Some(([a, b, c, d], u16::from_be_bytes([high, low])).into()))
            }
            Source::Tcp6 => {
                let addresses: &[u8; TCP6_BYTES] = rest.first_chunk().ok_or(too_short)?;
                let [.., high, low, _, _] = *addresses;
                let source: [u8; 16] = std::array::from_fn(|index| addresses[index]);
                Ok(Some((source, u16::from_be_bytes([high, low])).into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use proptest::prelude::*;
    use tokio::io::ReadBuf;

    use super::*;

    /// A header with this command and family.
    fn header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let mut header = SIGNATURE.to_vec();
        header.extend([command, family]);
        header.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
        header.extend(rest);
        header
    }

    fn tcp4() -> Vec<u8> {
        vec![192, 0, 2, 1, 198, 51, 100, 2, 0x12, 0x67, 0x1f, 0x90]
    }

    fn tcp6() -> Vec<u8> {
        let mut rest = "2001:db8::1".parse::<std::net::Ipv6Addr>().unwrap().octets().to_vec();
        rest.extend([0xff; 16]);
        rest.extend([0x12, 0x67, 0x1f, 0x90]);
        rest
    }

    /// A stream that gives its bytes in two pieces.
    struct Split<'b> {
        pieces: [&'b [u8]; 2],
    }

    impl AsyncRead for Split<'_> {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let piece = usize::from(self.pieces[0].is_empty());
            let length = self.pieces[piece].len().min(buffer.remaining());
            let (now, later) = self.pieces[piece].split_at(length);
            buffer.put_slice(now);
            self.pieces[piece] = later;
            Poll::Ready(Ok(()))
        }
    }

    /// Reads a header from bytes that are split at this index. Returns it with the bytes that are left.
    fn read(bytes: &[u8], split: usize) -> (Result<Option<SocketAddr>, String>, Vec<u8>) {
        let (first, second) = bytes.split_at(split);
        let mut stream = Split { pieces: [first, second] };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let read = runtime.block_on(read_header(&mut stream)).map_err(|error| error.to_string());
        (read, stream.pieces.concat())
    }

    #[test]
    fn the_client_is_read_and_nothing_after_the_header_is_wherever_it_is_split() {
        let with_fields = |mut rest: Vec<u8>| {
            rest.extend([0x04, 0, 3, 1, 2, 3]);
            rest
        };
        let one = Some("192.0.2.1:4711".parse().unwrap());
        let other = Some("[2001:db8::1]:4711".parse().unwrap());
        for (header, client) in [
            (header(0x21, 0x11, &tcp4()), one),
            (header(0x21, 0x11, &with_fields(tcp4())), one),
            (header(0x21, 0x21, &tcp6()), other),
            (header(0x21, 0x21, &with_fields(tcp6())), other),
            (header(0x21, 0x11, &[tcp4(), vec![0; MAX_REST_BYTES - TCP4_BYTES]].concat()), one),
            (header(0x21, 0x00, &[]), None),
            (header(0x21, 0x00, &tcp4()), None),
            (header(0x21, 0x31, &[b'/'; 216]), None),
            (header(0x21, 0x12, &tcp4()), None),
            (header(0x20, 0x00, &[]), None),
            (header(0x20, 0x11, &tcp4()), None),
            (header(0x20, 0xff, &[1]), None),
        ] {
            let mut bytes = header.clone();
            bytes.extend(b"GET / HTTP/1.1");
            // Of a long header, the ends are enough.
            let splits = (0..=bytes.len()).filter(|split| *split < 100 || *split + 100 > bytes.len());
            for split in splits {
                assert_eq!(read(&bytes, split), (Ok(client), b"GET / HTTP/1.1".to_vec()), "{header:?} at {split}");
            }
            for length in [0, 1, 11, 12, 15, header.len() - 1].into_iter().filter(|length| *length < header.len()) {
                assert!(read(&header[..length], 0).0.is_err(), "{header:?} cut at {length}");
            }
        }
    }

    #[test]
    fn other_headers_are_refused() {
        let mut long = header(0x21, 0x11, &tcp4());
        long[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        for (bytes, text) in [
            (b"GET / HTTP/1.1\r\nHost: tide\r\n\r\n".to_vec(), "expected a header"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello".to_vec(), "expected a header"),
            (b"\r\n\r\n\0\r\nQUIT\r\x21\x11\0\0".to_vec(), "expected a header"),
            (b"PROXY TCP4 192.0.2.1 198.51.100.2 4711 8080\r\n".to_vec(), "version 1"),
            (header(0x22, 0x11, &tcp4()), "0x22"),
            (header(0x11, 0x11, &tcp4()), "0x11; expected"),
            (header(0x31, 0x11, &tcp4()), "0x31"),
            (header(0x21, 0x13, &tcp4()), "0x13"),
            (header(0x21, 0x41, &tcp4()), "0x41"),
            (header(0x21, 0x10, &tcp4()), "0x10"),
            (header(0x21, 0x11, &tcp4()[..11]), "11 bytes of addresses"),
            (header(0x21, 0x21, &tcp4()), "12 bytes of addresses"),
            (header(0x21, 0x11, &[]), "0 bytes of addresses"),
            (header(0x21, 0x11, &[0; MAX_REST_BYTES + 1]), "the limit is 4096"),
            (long, "65535 bytes"),
        ] {
            let (read, _) = read(&bytes, 0);
            let error = read.unwrap_err();
            assert!(error.contains(text), "{error} for {bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(start in 0..=16_usize, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            // Some begin like a header.
            let mut hostile = header(0x21, 0x11, &[])[..start].to_vec();
            hostile.extend(&bytes);
            let (result, rest) = read(&hostile, hostile.len() / 2);
            prop_assert!(hostile.ends_with(&rest));
            if result.is_ok() {
                let length = usize::from(u16::from_be_bytes([hostile[14], hostile[15]]));
                prop_assert_eq!(rest.len(), hostile.len() - HEAD_BYTES - length);
            }
        }
    }
}
