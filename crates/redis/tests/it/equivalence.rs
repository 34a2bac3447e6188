//! Property tests of the decoder: it decodes any input, split anywhere, like a simple decoder that has the whole input.

use proptest::collection::vec;
use proptest::prelude::*;
use tidewire_redis::Value;
use tidewire_redis::resp::{DecoderOptions, Message};

use crate::reference_decoder;
use crate::wire::{UnusualEncoder, any_message, any_value, decode_pieces, encoded, keeping_attributes};

/// Compares as text, because NaN is not equal to itself.
fn text(messages: &[Message]) -> String {
    format!("{messages:?}")
}

fn without_attributes(value: Value) -> Value {
    let pairs = |pairs: Vec<(Value, Value)>| {
        pairs.into_iter().map(|(key, value)| (without_attributes(key), without_attributes(value))).collect()
    };
    match value.into_bare() {
        Value::Array(items) => Value::Array(items.into_iter().map(without_attributes).collect()),
        Value::Set(items) => Value::Set(items.into_iter().map(without_attributes).collect()),
        Value::Map(items) => Value::Map(pairs(items)),
        other => other,
    }
}

proptest! {
    #[test]
    fn message_can_be_split_at_every_byte(message in any_message(), choices in vec(any::<u8>(), 1..20)) {
        let mut unusual = UnusualEncoder { choices: choices.iter().cycle(), output: Vec::new() };
        unusual.message(&message);
        for wire in [encoded(&message), unusual.output] {
            let whole = (vec![message.clone()], Ok(()));
            prop_assert_eq!(&decode_pieces(keeping_attributes(), &wire, &[1]), &whole);
            for split in 1..=wire.len() {
                prop_assert_eq!(&decode_pieces(keeping_attributes(), &wire, &[split, wire.len()]), &whole);
            }
        }
    }

    #[test]
    fn many_messages_can_be_split_anywhere(
        messages in vec(any_message(), 0..40),
        sizes in vec(1..100_usize, 1..10),
    ) {
        let wire: Vec<u8> = messages.iter().flat_map(encoded).collect();
        prop_assert_eq!(decode_pieces(keeping_attributes(), &wire, &sizes), (messages.clone(), Ok(())));
        let bare: Vec<_> = messages.into_iter().map(|message| match message {
            Message::Reply(value) => Message::Reply(without_attributes(value)),
            Message::Push(items) => Message::Push(items.into_iter().map(without_attributes).collect()),
            other => other,
        }).collect();
        prop_assert_eq!(decode_pieces(DecoderOptions::default(), &wire, &sizes), (bare, Ok(())));
    }

    #[test]
    fn any_input_is_decoded_like_by_the_reference_decoder(
        messages in vec(any_message(), 1..4),
        choices in vec(any::<u8>(), 1..20),
        // Bytes are replaced or removed, mostly by bytes with a meaning in RESP.
        damages in vec((any::<prop::sample::Index>(), prop::sample::select(&b"$*:%~>|=!+-(,#_.;?\r\n0129tfinae:"[..]), any::<bool>()), 0..4),
        limits in (0..40_usize, 0..30_usize, 0..5_usize, 0..40_usize, any::<bool>(), any::<bool>()),
        size in 1..10_usize,
    ) {
        let mut unusual = UnusualEncoder { choices: choices.iter().cycle(), output: Vec::new() };
        for message in &messages {
            unusual.message(message);
        }
        let mut wire = unusual.output;
        for (at, byte, is_kept) in damages {
            let at = at.index(wire.len());
            if is_kept { wire[at] = byte } else { wire.remove(at); }
        }
        let (bulk, elements, depth, line, is_limited, keep) = limits;
        let mut options = DecoderOptions::default().keep_attributes(keep);
        if is_limited {
            options = options.max_bulk(bulk).max_elements(elements).max_depth(depth).max_line(line);
        }
        let (expected, end) = reference_decoder::decode(options, &wire);
        let whole = decode_pieces(options, &wire, &[]);
        prop_assert_eq!((text(&whole.0), whole.1.map_err(|error| error.kind)), (text(&expected), end));
        for sizes in [&[1][..], &[size]] {
            let pieces = decode_pieces(options, &wire, sizes);
            prop_assert_eq!((text(&pieces.0), pieces.1), (text(&whole.0), whole.1));
        }
    }

    #[test]
    fn runs_of_strings_can_be_split_anywhere(
        lens in vec(0..20_usize, 0..200),
        at in any::<prop::sample::Index>(),
        other in any_value(),
        sizes in vec(1..400_usize, 1..10),
    ) {
        let mut items: Vec<_> = lens.iter().map(|&len| Value::Bulk(vec![b'x'; len].into())).collect();
        items.insert(at.index(items.len() + 1), other);
        let pairs = items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect();
        let messages = vec![Message::Reply(Value::Map(pairs)), Message::Push(items.clone()), Message::Reply(Value::Array(items))];
        let wire: Vec<u8> = messages.iter().flat_map(encoded).collect();
        prop_assert_eq!(&decode_pieces(keeping_attributes(), &wire, &[]), &(messages.clone(), Ok(())));
        prop_assert_eq!(&decode_pieces(keeping_attributes(), &wire, &sizes), &(messages, Ok(())));
    }
}

proptest! {
    // Each message has several megabytes.
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn large_messages_can_be_split_anywhere(
        lens in vec(prop_oneof![0..100_usize, 60_000..300_000_usize], 0..6),
        items in vec(any_value(), 0..10),
        repeated in 0..500_usize,
        sizes in vec(prop_oneof![1..100_usize, 1..100_000_usize], 1..10),
    ) {
        let large = lens.iter().map(|&len| Value::Bulk((0..=250).cycle().take(len).collect()));
        let many = items.iter().cycle().take(if items.is_empty() { 0 } else { repeated }).cloned();
        let pairs = many.clone().map(|value| (value.clone(), value));
        let message = Message::Reply(Value::Array(large.chain(many).chain([Value::Map(pairs.collect())]).collect()));
        let sizes: Vec<_> = sizes.into_iter().chain([10_000]).collect();
        let decoded = decode_pieces(keeping_attributes(), &encoded(&message), &sizes);
        prop_assert!(decoded == (vec![message], Ok(())), "pieces of {:?}", sizes);
    }
}
