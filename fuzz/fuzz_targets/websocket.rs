//! Arbitrary bytes, in arbitrary pieces, in both roles: no panic, bounded memory, and the same messages, replies and error as in one
//! piece.

#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use tidewire_conn::codec::Codec;
use tidewire_conn::websocket::{Message, WebSocket, WebSocketOptions};
use tidewire_fuzz::{decode_pieces, split};

fuzz_target!(|data: &[u8]| {
    let Some(([role, max_frame, max_message, max_fragments], sizes, wire)) = split(data) else { return };
    let is_server = role % 2 == 0;
    let options = WebSocketOptions::default()
        .max_frame(max_frame.into())
        .max_message(usize::from(max_message) * 2)
        .max_fragments(max_fragments.into());
    let max_capacity = options.max_frame + 14 + 4096;

    let run = |sizes, max_capacity| {
        let (decoded, control) = decode_pieces(codec(is_server, options), wire, sizes, max_capacity);
        // A client masks with random keys, so the decoded replies are compared and not their bytes.
        let mut peer = codec(!is_server, WebSocketOptions::default());
        let mut control = BytesMut::from(&control[..]);
        let mut replies = Vec::new();
        while let Some(reply) = peer.decode(&mut control).expect("the replies are valid frames") {
            replies.push(reply);
        }
        assert!(control.is_empty());
        (decoded, replies)
    };
    let whole = run(&[], usize::MAX);
    assert_eq!(whole, run(&sizes, max_capacity));
    assert_eq!(whole, run(&[1], max_capacity));

    for message in &whole.0.frames {
        if let Message::Text(text) = message {
            assert!(std::str::from_utf8(text.as_frame().body()).is_ok());
        }
    }
});

fn codec(is_server: bool, options: WebSocketOptions) -> WebSocket {
    if is_server { WebSocket::server(options) } else { WebSocket::client(options) }
}
