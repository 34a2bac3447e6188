//! The PROXY protocol, version 2: a TCP proxy sends the address of the client in a header.
//!
//! The header precedes all other bytes, including the TLS handshake. Exactly the bytes of the header are read from the stream.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The first bytes of a header. No HTTP request or TLS handshake starts with them.
pub(super) const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Length of the fixed part: signature, version and command, family, and the length of the rest.
const HEAD_BYTES: usize = 16;
/// Limit of the rest: addresses, and TLV fields, which are skipped.
const MAX_REST_BYTES: usize = 4096;

const TCP4_BYTES: usize = 12;
const TCP6_BYTES: usize = 36;

/// Why a header is rejected.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyHeaderError {
    #[error("expected a PROXY protocol version 2 header")]
    NoHeader,
    #[error("version 1 of the PROXY protocol is not supported; use version 2 (`send-proxy-v2` in HAProxy)")]
    Version1,
    #[error("invalid version and command {0:#04x}; expected 0x20 or 0x21")]
    Command(u8),
    #[error("invalid address family and transport {0:#04x}")]
    Family(u8),
    #[error("the header has {0} bytes after its first 16; the limit is {MAX_REST_BYTES}")]
    TooLong(usize),
    #[error("the header has only {0} bytes of addresses, too few for its address family")]
    TooShort(usize),
    #[error("the header did not arrive within the handshake timeout")]
    TimedOut,
    #[error("received a PROXY protocol header from an untrusted peer")]
    NotTrusted,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads the header and nothing after it. Returns the address of the client, or `None` if the header has none: the connection is the
/// proxy's own, for example a health check, or its client does not use TCP.
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
    address_kind: AddressKind,
    rest_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
enum AddressKind {
    Tcp4,
    Tcp6,
    /// The proxy itself, or a client that does not use TCP.
    Unknown,
}

impl Head {
    fn parse(head: &[u8; HEAD_BYTES]) -> Result<Self, ProxyHeaderError> {
        let [.., command, family, high, low] = *head;
        if !head.starts_with(&SIGNATURE) {
            let is_version_1 = head.starts_with(b"PROXY ");
            return Err(if is_version_1 { ProxyHeaderError::Version1 } else { ProxyHeaderError::NoHeader });
        }
        let address_kind = match (command, family) {
            (0x21, 0x11) => AddressKind::Tcp4,
            (0x21, 0x21) => AddressKind::Tcp6,
            // LOCAL: a connection of the proxy itself. PROXY with an unspecified family, UDP or a Unix socket.
            (0x20, _) | (0x21, 0x00 | 0x12 | 0x22 | 0x31 | 0x32) => AddressKind::Unknown,
            (0x21, _) => return Err(ProxyHeaderError::Family(family)),
            _ => return Err(ProxyHeaderError::Command(command)),
        };
        let rest_bytes = usize::from(u16::from_be_bytes([high, low]));
        if rest_bytes > MAX_REST_BYTES {
            return Err(ProxyHeaderError::TooLong(rest_bytes));
        }
        Ok(Self { address_kind, rest_bytes })
    }

    /// Returns the source address in the rest of the header. TLV fields are skipped.
    fn client(&self, rest: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
        let too_short = ProxyHeaderError::TooShort(rest.len());
        match self.address_kind {
            AddressKind::Unknown => Ok(None),
            AddressKind::Tcp4 => {
                let addresses: &[u8; TCP4_BYTES] = rest.first_chunk().ok_or(too_short)?;
                let [a, b, c, d, _, _, _, _, high, low, ..] = *addresses;
                Ok(Some(([a, b, c, d], u16::from_be_bytes([high, low])).into()))
            }
            AddressKind::Tcp6 => {
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

    /// Returns a header with this command and family.
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

    /// A stream that returns its bytes in two pieces.
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

    /// Reads a header from bytes that arrive in two pieces. Returns the result and the unread bytes.
    fn read(bytes: &[u8], split: usize) -> (Result<Option<SocketAddr>, String>, Vec<u8>) {
        let (first, second) = bytes.split_at(split);
        let mut stream = Split { pieces: [first, second] };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let read = runtime.block_on(read_header(&mut stream)).map_err(|error| error.to_string());
        (read, stream.pieces.concat())
    }

    #[test]
    fn header_is_read_exactly_at_every_split_point() {
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
            // For a long header, only splits near its ends are tested.
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
    fn invalid_headers_are_rejected() {
        let mut long = header(0x21, 0x11, &tcp4());
        long[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        for (bytes, text) in [
            (b"GET / HTTP/1.1\r\nHost: tide\r\n\r\n".to_vec(), "expected a PROXY protocol version 2"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello".to_vec(), "expected a PROXY protocol version 2"),
            (b"\r\n\r\n\0\r\nQUIT\r\x21\x11\0\0".to_vec(), "expected a PROXY protocol version 2"),
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
        fn arbitrary_bytes_are_read_or_rejected(start in 0..=16_usize, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            // Some start like a header.
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
