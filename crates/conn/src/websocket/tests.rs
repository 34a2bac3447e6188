//! Tests of the codec in both roles, with input that is split anywhere.

use std::io::IoSlice;

use bytes::{BufMut, Bytes, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::codec::{Batch, Codec};
use crate::{Frame, Head};

const KEY: [u8; 4] = [0x1f, 0x80, 0xa7, 0x03];

/// The role of the codec that reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    Client,
}

use Role::{Client, Server};

impl Role {
    fn codec(self, options: WebSocketOptions) -> WebSocket {
        match self {
            Server => WebSocket::server(options),
            Client => WebSocket::client(options),
        }
    }

    fn other(self) -> Self {
        if self == Server { Client } else { Server }
    }

    /// Returns a frame as this role receives it, with any first byte.
    fn frame(self, first: u8, payload: &[u8]) -> Vec<u8> {
        let masked = if self == Server { 0x80 } else { 0 };
        let mut bytes = vec![first];
        match payload.len() {
            len @ 0..126 => bytes.push(masked | u8::try_from(len).unwrap()),
            len @ 126..65536 => {
                bytes.push(masked | 0x7e);
                bytes.put_u16(u16::try_from(len).unwrap());
            }
            len => {
                bytes.push(masked | 0x7f);
                bytes.put_u64(len as u64);
            }
        }
        if self == Server {
            bytes.extend(KEY);
            bytes.extend(payload.iter().zip(KEY.iter().cycle()).map(|(byte, key)| byte ^ key));
        } else {
            bytes.extend(payload);
        }
        bytes
    }
}

fn roles() -> impl Strategy<Value = Role> {
    prop::sample::select(vec![Server, Client])
}

/// Returns all bytes that a batch would write.
fn written(batch: &mut Batch) -> Vec<u8> {
    let mut bytes = Vec::new();
    while !batch.is_empty() {
        let mut slices = [IoSlice::new(&[]); 16];
        let filled = batch.slices(&mut slices);
        let before = bytes.len();
        bytes.extend(slices[..filled].iter().flat_map(|slice| slice.iter()));
        batch.advance(bytes.len() - before);
    }
    bytes
}

/// The result of decoding a stream.
#[derive(Debug, Default, PartialEq, Eq)]
struct Received {
    messages: Vec<Message>,
    error: Option<WebSocketError>,
    /// The control frames that the codec sent itself.
    replies: Vec<Message>,
    /// The error if the stream ended after these bytes.
    finish: Option<WebSocketError>,
    is_closed: bool,
}

/// A codec and its input, fed as an actor does: fills the free capacity, and reserves more only when none is left.
struct Receiver {
    role: Role,
    codec: WebSocket,
    input: BytesMut,
    replies: Batch,
    received: Received,
}

impl Receiver {
    fn new(role: Role, options: WebSocketOptions) -> Self {
        let (codec, input) = (role.codec(options), BytesMut::new());
        Self { role, codec, input, replies: Batch::default(), received: Received::default() }
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.received.error.is_none() {
            if self.input.len() == self.input.capacity() {
                self.input.reserve(64);
            }
            let n = bytes.len().min(self.input.capacity() - self.input.len());
            self.input.put_slice(&bytes[..n]);
            bytes = &bytes[n..];
            loop {
                let decoded = self.codec.decode(&mut self.input);
                self.codec.encode_control(&mut self.replies, true);
                match decoded {
                    Ok(Some(message)) => self.received.messages.push(message),
                    Ok(None) => break,
                    Err(error) => {
                        self.received.error = Some(error);
                        break;
                    }
                }
            }
        }
    }

    fn done(mut self) -> Received {
        self.received.finish = self.codec.finish(&self.input).err();
        self.received.is_closed = self.codec.is_closed();
        self.received.replies = parse_frames(self.role, &written(&mut self.replies));
        self.received
    }
}

/// Parses the frames that a codec of this role wrote, independently of the codec.
fn parse_frames(role: Role, mut bytes: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while let [first, second, rest @ ..] = bytes {
        assert_eq!(second & 0x80 != 0, role == Client, "clients mask, servers do not");
        let (len, rest) = match second & 0x7f {
            126 => (usize::from(u16::from_be_bytes([rest[0], rest[1]])), &rest[2..]),
            127 => (usize::try_from(u64::from_be_bytes(rest[..8].try_into().unwrap())).unwrap(), &rest[8..]),
            len => (usize::from(len), rest),
        };
        let (key, rest) = if role == Client { rest.split_at(4) } else { (&[0][..], rest) };
        let (payload, rest) = rest.split_at(len);
        let payload: Bytes = payload.iter().zip(key.iter().cycle()).map(|(byte, key)| byte ^ key).collect();
        bytes = rest;
        messages.push(match first {
            0x81 => Message::Text(Text::try_from(payload).unwrap()),
            0x82 => Message::Binary(Frame::from(payload)),
            0x88 if payload.is_empty() => Message::Close(None),
            0x88 => {
                let code = CloseCode::new(u16::from_be_bytes([payload[0], payload[1]]));
                Message::close(code, String::from_utf8(payload[2..].to_vec()).unwrap())
            }
            0x89 => Message::Ping(payload),
            0x8a => Message::Pong(payload),
            first => panic!("first byte {first:#x}"),
        });
    }
    assert!(bytes.is_empty());
    messages
}

fn receive(role: Role, options: WebSocketOptions, wire: &[u8], sizes: &[usize]) -> Received {
    let (mut receiver, mut rest, mut sizes) = (Receiver::new(role, options), wire, sizes.iter().cycle());
    while !rest.is_empty() {
        let (piece, next) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
        receiver.feed(piece);
        rest = next;
    }
    receiver.done()
}

fn receive_all(role: Role, wire: &[u8]) -> Received {
    receive(role, WebSocketOptions::default(), wire, &[usize::MAX])
}

/// A message, the positions where it is split into fragments, and the control frames between them.
#[derive(Debug, Clone)]
struct Sent {
    message: Message,
    cuts: Vec<Index>,
    between: Vec<Message>,
}

fn control() -> impl Strategy<Value = Message> {
    let payload = || prop_oneof![vec(any::<u8>(), 0..4), vec(any::<u8>(), 0..=125)].prop_map(Bytes::from);
    prop_oneof![payload().prop_map(Message::Ping), payload().prop_map(Message::Pong)]
}

fn message(max: usize) -> impl Strategy<Value = Message> {
    prop_oneof![
        "[ -~]{0,300}".prop_map(Message::text),
        "\\PC{0,30}".prop_map(Message::text),
        vec(any::<u8>(), 0..=max).prop_map(Message::binary),
    ]
}

fn sent(max: usize) -> impl Strategy<Value = Sent> {
    (message(max), prop_oneof![Just(Vec::new()), vec(any::<Index>(), 0..5)], vec(control(), 0..3))
        .prop_map(|(message, cuts, between)| Sent { message, cuts, between })
}

fn close() -> impl Strategy<Value = Message> {
    prop_oneof![
        Just(Message::Close(None)),
        "\\PC{0,30}".prop_map(|reason| Message::close(CloseCode::NORMAL, reason)),
        Just(Message::close(CloseCode::new(4999), "x".repeat(123))),
    ]
}

fn control_frame(role: Role, message: &Message) -> Vec<u8> {
    match message {
        Message::Ping(payload) => role.frame(0x89, payload),
        Message::Pong(payload) => role.frame(0x8a, payload),
        Message::Close(None) => role.frame(0x88, &[]),
        Message::Close(Some(close)) => {
            role.frame(0x88, &[&close.code.get().to_be_bytes(), close.reason.as_bytes()].concat())
        }
        data => panic!("{data:?}"),
    }
}

/// Returns the bytes of a session, as `role` receives them, and the expected result.
fn session(role: Role, sent: &[Sent], close: Option<&Message>) -> (Vec<u8>, Received) {
    let (mut wire, mut expected) = (Vec::new(), Received::default());
    for Sent { message, cuts, between } in sent {
        let (opcode, payload) = match message {
            Message::Text(text) => (1, text.as_frame().body()),
            Message::Binary(frame) => (2, frame.body()),
            control => panic!("{control:?}"),
        };
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(payload.len() + 1)).collect();
        cuts.sort_unstable();
        let (mut start, mut between) = (0, between.iter());
        for (n, &cut) in cuts.iter().chain([&payload.len()]).enumerate() {
            let fin = if n == cuts.len() { 0x80 } else { 0 };
            let opcode = if n == 0 { opcode } else { 0 };
            wire.extend(role.frame(fin | opcode, &payload[start..cut]));
            start = cut;
            if n < cuts.len()
                && let Some(control) = between.next()
            {
                wire.extend(control_frame(role, control));
                match control {
                    Message::Ping(payload) => expected.replies.push(Message::Pong(payload.clone())),
                    pong => expected.messages.push(pong.clone()),
                }
            }
        }
        expected.messages.push(message.clone());
    }
    expected.finish = Some(WebSocketError::NoClose);
    if let Some(close) = close {
        wire.extend(control_frame(role, close));
        expected.messages.push(close.clone());
        expected.replies.push(match close {
            Message::Close(Some(close)) => Message::close(close.code, ""),
            _ => Message::Close(None),
        });
        expected.finish = None;
        expected.is_closed = true;
    }
    (wire, expected)
}

proptest! {
    #[test]
    fn input_in_chunks_decodes_to_the_same_messages(
        role in roles(),
        sent in vec(sent(3000), 0..6),
        close in prop::option::of(close()),
        sizes in vec(1..2000usize, 1..20),
    ) {
        let (wire, expected) = session(role, &sent, close.as_ref());
        for sizes in [&sizes[..], &[1], &[usize::MAX]] {
            prop_assert_eq!(&receive(role, WebSocketOptions::default(), &wire, sizes), &expected);
        }
    }

    #[test]
    fn input_split_anywhere_decodes_to_the_same_messages(
        role in roles(),
        sent in vec(sent(50), 0..3),
        close in prop::option::of(close()),
    ) {
        let (wire, expected) = session(role, &sent, close.as_ref());
        for cut in 1..wire.len() {
            prop_assert_eq!(&receive(role, WebSocketOptions::default(), &wire, &[cut, usize::MAX]), &expected);
        }
    }

    #[test]
    fn encoded_messages_are_decoded_by_the_other_role(
        role in roles(),
        messages in vec(prop_oneof![4 => message(3000), 1 => control()], 0..8),
        head in "[a-z]{0,94}",
        sizes in vec(1..2000usize, 1..20),
    ) {
        let mut codec = role.other().codec(WebSocketOptions::default());
        let mut batch = Batch::default();
        let mut expected = Received { finish: Some(WebSocketError::NoClose), ..Received::default() };
        for mut message in messages {
            match &mut message {
                Message::Text(text) => *text = text.clone().with_head(&head).unwrap(),
                Message::Binary(frame) => *frame = Frame::new(Head::new(head.as_bytes()).unwrap(), frame.body().clone()),
                _ => {}
            }
            codec.encode(&message, &mut batch).unwrap();
            match message {
                Message::Ping(payload) => expected.replies.push(Message::Pong(payload)),
                message => expected.messages.push(message),
            }
        }
        let wire = written(&mut batch);
        prop_assert_eq!(receive(role, WebSocketOptions::default(), &wire, &sizes), expected);
    }

    #[test]
    fn invalid_input_fails_alike_in_any_chunks_and_within_limits(
        role in roles(),
        sent in vec(sent(300), 0..4),
        wrong in vec((any::<Index>(), any::<u8>()), 0..4),
        sizes in vec(1..300usize, 1..20),
        limits in (0..400usize, 0..400usize, 0..4usize),
    ) {
        let (max_frame, max_message, max_fragments) = limits;
        let options = WebSocketOptions { max_frame, max_message, max_fragments };
        let (mut wire, _) = session(role, &sent, None);
        for (at, byte) in wrong {
            if !wire.is_empty() {
                let at = at.index(wire.len());
                wire[at] = byte;
            }
        }
        let expected = receive(role, options, &wire, &[usize::MAX]);
        prop_assert_eq!(expected.error.is_some(), expected.is_closed);
        for sizes in [&sizes[..], &[1]] {
            prop_assert_eq!(&receive(role, options, &wire, sizes), &expected);
        }

        let mut receiver = Receiver::new(role, options);
        for piece in wire.chunks(sizes[0]) {
            receiver.feed(piece);
            let capacity = receiver.codec.message_capacity();
            prop_assert!(capacity <= 2 * max_message.max(8), "{} of {}", capacity, max_message);
        }
    }

    #[test]
    fn memory_of_random_input_is_bounded(
        role in roles(),
        max in 1..10_000usize,
        pieces in vec(vec(any::<u8>(), 0..3000), 0..20),
        opcode in 1..3u8,
        fin in any::<bool>(),
        keeps_frames in any::<bool>(),
    ) {
        let options = WebSocketOptions { max_frame: max, max_message: max, max_fragments: 8 };
        let mut receiver = Receiver::new(role, options);
        for piece in pieces {
            // A valid header, so that more of the input is decoded.
            receiver.feed(&role.frame(opcode | if fin { 0x80 } else { 0 }, &piece));
            prop_assert!(receiver.input.capacity() <= max + 2 * 4096, "{} of {max}", receiver.input.capacity());
            prop_assert!(receiver.codec.message_capacity() <= 2 * max.max(8));
            if !keeps_frames {
                receiver.received.messages.clear();
            }
        }
    }
}

#[test]
fn every_invalid_input_has_its_close_code() {
    use WebSocketError as Error;
    let code = CloseCode::new;
    let cases: Vec<(Role, Vec<u8>, Error, u16)> = vec![
        (Server, vec![0xc1], Error::ReservedBits { bits: 0b100 }, 1002),
        (Server, vec![0xa1], Error::ReservedBits { bits: 0b010 }, 1002),
        (Client, vec![0x9a], Error::ReservedBits { bits: 0b001 }, 1002),
        (Server, vec![0x83], Error::ReservedOpcode { opcode: 3 }, 1002),
        (Server, vec![0x07], Error::ReservedOpcode { opcode: 7 }, 1002),
        (Client, vec![0x8b], Error::ReservedOpcode { opcode: 11 }, 1002),
        (Client, vec![0x8f], Error::ReservedOpcode { opcode: 15 }, 1002),
        (Server, vec![0x08], Error::FragmentedControl, 1002),
        (Server, vec![0x09], Error::FragmentedControl, 1002),
        (Client, vec![0x0a], Error::FragmentedControl, 1002),
        (Server, vec![0x80], Error::UnexpectedContinuation, 1002),
        (Client, vec![0x00], Error::UnexpectedContinuation, 1002),
        (Server, [Server.frame(0x01, b"a"), vec![0x81]].concat(), Error::InterruptedMessage, 1002),
        (Client, [Client.frame(0x02, b""), vec![0x01]].concat(), Error::InterruptedMessage, 1002),
        (Server, vec![0x81, 0x01], Error::Unmasked, 1002),
        (Server, vec![0x88, 0x00], Error::Unmasked, 1002),
        (Client, vec![0x81, 0x81], Error::Masked, 1002),
        (Client, vec![0x89, 0x80], Error::Masked, 1002),
        (Server, vec![0x89, 0xfe], Error::LongControl, 1002),
        (Client, vec![0x88, 0x7f], Error::LongControl, 1002),
        (Client, vec![0x81, 126, 0, 125], Error::PaddedLength { len: 125 }, 1002),
        (Server, vec![0x82, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff], Error::PaddedLength { len: 0xffff }, 1002),
        (Server, vec![0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0], Error::HugeLength { len: 1 << 63 }, 1002),
        (
            Client,
            vec![0x82, 127, 0x7f, 0, 0, 0, 0, 0, 0, 0],
            Error::FrameTooLarge { len: 0x7f << 56, max_frame: 1 << 20 },
            1009,
        ),
        (
            Client,
            vec![0x82, 127, 0, 0, 0, 0, 0, 0x10, 0, 1],
            Error::FrameTooLarge { len: (1 << 20) + 1, max_frame: 1 << 20 },
            1009,
        ),
        (
            Client,
            [Client.frame(0x02, b"a"), vec![0x80, 127, 0, 0, 0, 0, 0, 0x10, 0, 0]].concat(),
            Error::MessageTooLarge { len: (1 << 20) + 1, max_message: 1 << 20 },
            1009,
        ),
        (Server, Server.frame(0x81, b"\xff"), Error::InvalidUtf8, 1007),
        (Client, Client.frame(0x81, b"a\xc3"), Error::InvalidUtf8, 1007),
        (Client, Client.frame(0x81, b"\xed\xa0"), Error::InvalidUtf8, 1007),
        (Server, [Server.frame(0x01, b"\xc3"), Server.frame(0x80, b"")].concat(), Error::InvalidUtf8, 1007),
        (Server, [Server.frame(0x01, b"\xc3"), Server.frame(0x80, b"a")].concat(), Error::InvalidUtf8, 1007),
        (Server, [Server.frame(0x01, b"\xf4\x8f"), Server.frame(0x00, b"\xbf\xc0")].concat(), Error::InvalidUtf8, 1007),
        (Server, Server.frame(0x88, b"\x03"), Error::ShortClose, 1002),
        (Client, Client.frame(0x88, &999u16.to_be_bytes()), Error::InvalidCloseCode { code: code(999) }, 1002),
        (Client, Client.frame(0x88, &1004u16.to_be_bytes()), Error::InvalidCloseCode { code: code(1004) }, 1002),
        (Server, Server.frame(0x88, &1005u16.to_be_bytes()), Error::InvalidCloseCode { code: code(1005) }, 1002),
        (Server, Server.frame(0x88, &1006u16.to_be_bytes()), Error::InvalidCloseCode { code: code(1006) }, 1002),
        (Server, Server.frame(0x88, &1015u16.to_be_bytes()), Error::InvalidCloseCode { code: code(1015) }, 1002),
        (Server, Server.frame(0x88, &5000u16.to_be_bytes()), Error::InvalidCloseCode { code: code(5000) }, 1002),
        (Server, Server.frame(0x88, b"\x03\xe8\xce\xba\xff"), Error::InvalidCloseReason, 1007),
    ];
    for (role, wire, error, code) in cases {
        assert_eq!(error.close_code(), CloseCode::new(code));
        let before = [Message::text("before")];
        let replies = [Message::close(CloseCode::new(code), "")];
        let stream = [role.frame(0x81, b"before"), wire].concat();
        // The error is found at the first invalid byte, and nothing after it is decoded.
        let after = role.frame(0x89, b"after");
        for cut in 1..=stream.len() {
            let received = receive(role, WebSocketOptions::default(), &stream, &[cut, usize::MAX]);
            assert_eq!(received.error, Some(error), "{stream:x?}");
            let received =
                receive(role, WebSocketOptions::default(), &[&stream[..], &after].concat(), &[cut, usize::MAX]);
            assert_eq!(received.error, Some(error), "{stream:x?}");
            assert_eq!((&received.messages[..], &received.replies[..]), (&before[..], &replies[..]), "{stream:x?}");
            assert!(received.is_closed);
        }
        let received = receive_all(role, &stream[..stream.len() - 1]);
        assert_eq!(received.error, None, "{stream:x?}");
    }
}

#[test]
fn text_fails_at_the_first_invalid_byte() {
    let text = format!("{}κόσμε\u{10ffff}", "x".repeat(200)).into_bytes();
    for role in [Server, Client] {
        for wrong in 0..text.len() {
            let mut payload = text.clone();
            payload[wrong] = 0xff;
            let header = role.frame(0x81, &payload).len() - payload.len();
            let in_two = [role.frame(0x01, &payload[..wrong]), role.frame(0x80, &payload[wrong..])].concat();
            let header_in_two = in_two.len() - payload.len();
            for (wire, at) in [(role.frame(0x81, &payload), header + wrong), (in_two, header_in_two + wrong)] {
                assert_eq!(receive_all(role, &wire[..at]).error, None);
                assert_eq!(receive_all(role, &wire[..=at]).error, Some(WebSocketError::InvalidUtf8));
                assert_eq!(
                    receive(role, WebSocketOptions::default(), &wire[..=at], &[1]).error,
                    Some(WebSocketError::InvalidUtf8)
                );
            }
        }
    }
}

#[test]
fn limits_are_inclusive() {
    let options = WebSocketOptions { max_frame: 200, max_message: 300, max_fragments: 3 };
    let run = |frames: &[(u8, usize)]| {
        let wire: Vec<u8> = frames.iter().flat_map(|&(first, len)| Server.frame(first, &vec![b'a'; len])).collect();
        let received = receive(Server, options, &wire, &[usize::MAX]);
        (received.messages.len(), received.error)
    };
    assert_eq!(run(&[(0x82, 200), (0x02, 200), (0x00, 99), (0x80, 1)]), (2, None));
    assert_eq!(run(&[(0x82, 201)]), (0, Some(WebSocketError::FrameTooLarge { len: 201, max_frame: 200 })));
    let error = WebSocketError::MessageTooLarge { len: 301, max_message: 300 };
    assert_eq!(run(&[(0x02, 200), (0x80, 101)]), (0, Some(error)));
    let error = WebSocketError::TooManyFragments { max_fragments: 3 };
    assert_eq!(run(&[(0x02, 1), (0x00, 1), (0x00, 1), (0x80, 1)]), (0, Some(error)));
    assert_eq!(error.close_code(), CloseCode::TOO_BIG);
    // Control frames have a separate limit.
    assert_eq!(run(&[(0x8a, 125)]), (1, None));
    let small = WebSocketOptions { max_frame: 0, max_message: 0, max_fragments: 0 };
    assert_eq!(receive(Server, small, &Server.frame(0x8a, &[0; 125]), &[1]).messages.len(), 1);
}

#[test]
fn announced_length_alone_reserves_no_memory() {
    let options = WebSocketOptions { max_frame: usize::MAX, max_message: usize::MAX, ..Default::default() };
    for first in [0x82, 0x02] {
        let mut receiver = Receiver::new(Client, options);
        receiver.feed(&[first, 127, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        receiver.feed(&[0; 1000]);
        assert_eq!(receiver.received, Received::default());
        assert!(receiver.input.capacity() <= 2 * 1000 + 4096 && receiver.codec.message_capacity() <= 2 * 1000);
    }
}

#[test]
fn largest_message_is_read_within_the_memory_bound() {
    let max = 1 << 20;
    let message = Message::binary(vec![7; max]);
    let mut receiver = Receiver::new(Server, WebSocketOptions::default());
    for _ in 0..2 {
        for piece in Server.frame(0x82, &vec![7; max]).chunks(1000) {
            receiver.feed(piece);
            assert!(receiver.input.capacity() <= max + 14 + 4096, "{}", receiver.input.capacity());
        }
        assert_eq!(receiver.received.messages.pop(), Some(message.clone()));
    }
}

#[test]
fn messages_in_one_frame_are_slices_of_the_input() {
    for spare in [0, 100] {
        let wire = Server.frame(0x81, b"tide");
        let mut input = BytesMut::with_capacity(wire.len() + spare);
        input.put_slice(&wire);
        let payload = input[6..].as_ptr();
        let mut codec = Server.codec(WebSocketOptions::default());
        let Some(Message::Text(text)) = codec.decode(&mut input).unwrap() else { panic!("text was sent") };
        assert_eq!((text.body(), text.body().as_ptr()), ("tide", payload));
    }
}

#[test]
fn no_memory_is_held_between_messages() {
    let mut receiver = Receiver::new(Server, WebSocketOptions::default());
    receiver.feed(&Server.frame(0x01, &[b'a'; 5000]));
    assert!(receiver.codec.message_capacity() >= 5000);
    receiver.feed(&Server.frame(0x89, &[b'p'; 125]));
    receiver.feed(&Server.frame(0x80, b"b"));
    assert_eq!(receiver.received.messages.len(), 1);
    assert_eq!(receiver.codec.message_capacity(), 0);
    assert!(size_of::<WebSocket>() <= 160, "{}", size_of::<WebSocket>());
}

#[test]
fn servers_do_not_copy_large_bodies_and_clients_mask_everything() {
    let frame = Frame::new(Head::new(b"head").unwrap(), Bytes::from(vec![b'x'; Batch::MIN_SHARED_BYTES]));
    let mut batch = Batch::default();
    Server.codec(WebSocketOptions::default()).encode(&Message::Binary(frame.clone()), &mut batch).unwrap();
    let mut slices = [IoSlice::new(&[]); 3];
    assert_eq!(batch.slices(&mut slices), 2);
    assert_eq!(slices[1].as_ptr(), frame.body().as_ptr());

    let mut client = Client.codec(WebSocketOptions::default());
    let mut once = || {
        let mut batch = Batch::default();
        client.encode(&Message::Binary(frame.clone()), &mut batch).unwrap();
        written(&mut batch)
    };
    let (one, two) = (once(), once());
    assert_ne!(one[4..8], two[4..8], "keys differ");
    assert_eq!(one.len(), 8 + frame.len());
    assert_eq!(parse_frames(Client, &one), parse_frames(Client, &two));
}

#[test]
fn pings_are_answered_in_order_before_the_next_message() {
    let mut codec = Server.codec(WebSocketOptions::default());
    let pings: Vec<u8> = (0..10u8).flat_map(|n| Server.frame(0x89, &[n; 5])).collect();
    let mut input = BytesMut::from(&[&pings[..], &Server.frame(0x81, b"x")].concat()[..]);
    assert_eq!(codec.decode(&mut input), Ok(Some(Message::text("x"))));
    let mut output = Batch::default();
    codec.encode(&Message::text("y"), &mut output).unwrap();
    codec.encode_control(&mut output, true);
    let pongs = (0..10u8).map(|n| Message::Pong(Bytes::from(vec![n; 5])));
    let expected: Vec<_> = pongs.chain([Message::text("y")]).collect();
    assert_eq!(parse_frames(Server, &written(&mut output)), expected);
}

/// A peer that sends pings and does not read: the pongs are not encoded meanwhile.
#[test]
fn unanswered_pings_are_bounded_and_the_newest_is_answered() {
    let mut codec = Server.codec(WebSocketOptions::default());
    for n in 0..10_000u32 {
        let mut input = BytesMut::from(&Server.frame(0x89, &n.to_be_bytes().repeat(30))[..]);
        assert_eq!(codec.decode(&mut input), Ok(None));
    }
    let mut output = Batch::default();
    codec.encode_control(&mut output, false);
    assert!(output.len() <= 20 * 1024, "{} bytes", output.len());
    let newest = Message::Pong(Bytes::from(9_999u32.to_be_bytes().repeat(30)));
    assert_eq!(parse_frames(Server, &written(&mut output)).last(), Some(&newest));
}

#[test]
fn nothing_is_sent_after_our_close_or_decoded_after_theirs() {
    let mut receiver = Receiver::new(Client, WebSocketOptions::default());
    let bye = Message::close(CloseCode::AWAY, "bye");
    receiver.codec.encode(&bye, &mut receiver.replies).unwrap();
    receiver.codec.encode(&Message::text("too late"), &mut receiver.replies).unwrap();
    receiver.codec.encode(&Message::Close(None), &mut receiver.replies).unwrap();
    receiver.feed(&Client.frame(0x81, b"unheard"));
    receiver.feed(&Client.frame(0x89, b"unanswered"));
    assert!(receiver.codec.is_closed(), "the connection may end before the peer's close frame");
    assert_eq!(receiver.codec.finish(&receiver.input), Err(WebSocketError::NoClose));
    receiver.feed(&[Client.frame(0x88, b""), Client.frame(0x81, b"after the end")].concat());
    assert!(receiver.codec.is_closed() && receiver.input.is_empty());
    let received = receiver.done();
    assert_eq!((received.messages, received.replies), (vec![Message::Close(None)], vec![bye]));
    assert_eq!((received.error, received.finish), (None, None));
}

#[test]
fn application_may_answer_a_close_frame_itself() {
    let mut codec = Server.codec(WebSocketOptions::default());
    let mut input = BytesMut::from(&Server.frame(0x88, &1000u16.to_be_bytes())[..]);
    assert_eq!(codec.decode(&mut input), Ok(Some(Message::close(CloseCode::NORMAL, ""))));
    assert_eq!(codec.finish(&input), Ok(()));
    assert!(!codec.is_closed());
    let mut output = Batch::default();
    let answers = [Message::text("one more"), Message::close(CloseCode::new(4000), "see you")];
    for answer in &answers {
        codec.encode(answer, &mut output).unwrap();
    }
    codec.encode_control(&mut output, true);
    assert_eq!(parse_frames(Server, &written(&mut output)), answers);
    assert!(codec.is_closed());
}

#[test]
fn error_after_our_close_frame_ends_the_connection() {
    let mut receiver = Receiver::new(Server, WebSocketOptions::default());
    receiver.codec.encode(&Message::Close(None), &mut receiver.replies).unwrap();
    receiver.feed(&[0xff]);
    let received = receiver.done();
    assert_eq!(received.error, Some(WebSocketError::ReservedBits { bits: 7 }));
    assert_eq!((received.replies, received.is_closed), (vec![Message::Close(None)], true));
}

#[test]
fn stream_may_end_only_after_a_close_frame() {
    use WebSocketError as Error;
    let text = Server.frame(0x81, b"tide");
    let ends = [
        (vec![], Some(Error::NoClose)),
        (text.clone(), Some(Error::NoClose)),
        (text[..1].to_vec(), Some(Error::TruncatedHeader)),
        (text[..5].to_vec(), Some(Error::TruncatedHeader)),
        (text[..6].to_vec(), Some(Error::TruncatedFrame { missing: 4 })),
        (text[..9].to_vec(), Some(Error::TruncatedFrame { missing: 1 })),
        (Server.frame(0x88, b"")[..5].to_vec(), Some(Error::TruncatedHeader)),
        (Server.frame(0x89, b"ping")[..8].to_vec(), Some(Error::TruncatedFrame { missing: 2 })),
        (Server.frame(0x01, b"ti"), Some(Error::TruncatedMessage)),
        (Server.frame(0x01, b"ti")[..7].to_vec(), Some(Error::TruncatedFrame { missing: 1 })),
        (Server.frame(0x88, b""), None),
        ([Server.frame(0x01, b"ti"), Server.frame(0x88, b"")].concat(), None),
    ];
    for (wire, finish) in ends {
        for sizes in [[1], [usize::MAX]] {
            let received = receive(Server, WebSocketOptions::default(), &wire, &sizes);
            assert_eq!((received.error, received.finish), (None, finish), "{wire:x?}");
        }
        assert!(finish.is_none_or(|error| error.close_code() == CloseCode::ABNORMAL));
    }
}

#[test]
fn encode_error_leaves_the_batch_unchanged() {
    let mut codec = Server.codec(WebSocketOptions::default());
    let mut batch = Batch::default();
    let long = Bytes::from(vec![0; 126]);
    let cases = [
        (Message::Ping(long.clone()), WebSocketError::ControlTooLong { len: 126 }),
        (Message::Pong(long), WebSocketError::ControlTooLong { len: 126 }),
        (Message::close(CloseCode::NORMAL, "x".repeat(124)), WebSocketError::ControlTooLong { len: 126 }),
        (Message::close(CloseCode::NO_STATUS, ""), WebSocketError::UnsendableCode { code: CloseCode::NO_STATUS }),
    ];
    for (message, error) in cases {
        assert_eq!(codec.encode(&message, &mut batch), Err(error));
        assert!(batch.is_empty() && error.close_code() == CloseCode::INTERNAL);
    }
    codec.encode(&Message::Ping(Bytes::from(vec![0; 125])), &mut batch).unwrap();
    assert_eq!(batch.len(), 127);
}
