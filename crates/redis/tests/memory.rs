//! Memory use of decoding, conversions and commands, measured by a counting allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bytes::{BufMut, Bytes, BytesMut};
use tidewire_redis::resp::{Decoder, DecoderOptions, Message};
use tidewire_redis::{Command, FromValue, Value, commands};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Counts the allocations of each thread, freed or not, so that tests do not disturb each other.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every method passes its arguments to `System` unchanged and returns its result; counting only touches cells without a
// destructor, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

fn count(bytes: usize) {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    BYTES.set(BYTES.get() + bytes);
}

/// Returns the number of allocations, and of allocated bytes.
fn cost<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = (ALLOCATIONS.get(), BYTES.get());
    let done = work();
    (done, ALLOCATIONS.get() - before.0, BYTES.get() - before.1)
}

#[test]
fn announced_length_does_not_allocate() {
    let deep = "*1048000\r\n%1\r\n".to_owned() + &"*1\r\n".repeat(50);
    let attributes = "|500000\r\n".to_owned() + &"|1\r\n".repeat(50);
    for (wire, most) in [
        // Memory for a first read and a few values, although the announced data does not arrive.
        ("$536870912\r\n", 70 << 10),
        ("*3\r\n$536870912\r\nabc", 70 << 10),
        ("=536870912\r\ntxt:", 70 << 10),
        ("$?\r\n;536870912\r\na", 70 << 10),
        ("*1048576\r\n", 2 << 10),
        ("%524288\r\n:1\r\n", 2 << 10),
        (">1048576\r\n+a\r\n", 2 << 10),
        ("|524287\r\n", 2 << 10),
        (&deep, 32 << 10),
        (&attributes, 32 << 10),
        // Above the limits.
        ("$536870913\r\n", 0),
        ("$99999999999999999999999\r\n", 0),
        ("*1048577\r\n", 0),
        ("%524289\r\n", 0),
        ("|99999999999999999999\r\n", 0),
        (":99999999999999999999\r\n", 0),
        ("HTTP/1.1 400 Bad Request\r\n", 0),
    ] {
        let (mut decoder, mut input) = (Decoder::default(), BytesMut::from(wire));
        let (decoded, _, bytes) = cost(|| decoder.decode(&mut input));
        assert!(bytes <= most, "{bytes} bytes for {wire:?}");
        assert_eq!(decoded.is_err(), most == 0, "{wire:?}");
    }
}

/// Memory grows with the received bytes, up to the length of the string and the read-ahead.
#[test]
fn string_memory_is_at_most_twice_the_received_bytes() {
    const LEN: usize = 3_000_000;
    let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
    input.put_slice(format!("${LEN}\r\n").as_bytes());
    let mut arrived = 0;
    while arrived < LEN + 2 {
        assert_eq!(decoder.decode(&mut input), Ok(None));
        let free = input.capacity() - input.len();
        assert!(free > 0, "no free capacity at {arrived}");
        assert!(
            input.capacity() <= (2 * arrived).clamp(64 << 10, LEN + 2) + (4 << 10),
            "{} at {arrived}",
            input.capacity()
        );
        let n = free.min(10_000).min(LEN + 2 - arrived);
        input.put_bytes(b'x', n);
        arrived += n;
    }
    let end = input.len() - 2;
    input[end..].copy_from_slice(b"\r\n");
    let Ok(Some(Message::Reply(Value::Bulk(bytes)))) = decoder.decode(&mut input) else { panic!("it is whole") };
    assert_eq!(bytes.len(), LEN);
}

/// Small strings in chunks do not each keep a large buffer.
#[test]
fn chunked_strings_keep_no_large_buffer() {
    let wire = format!("*?\r\n{}.\r\n", "$?\r\n;1\r\na\r\n;1\r\nb\r\n;0\r\n".repeat(1000));
    let mut input = BytesMut::with_capacity(1 << 20);
    input.put_slice(wire.as_bytes());
    let (decoded, _, bytes) = cost(|| Decoder::default().decode(&mut input));
    assert!(matches!(decoded, Ok(Some(Message::Reply(Value::Array(items)))) if items.len() == 1000));
    assert!(bytes < 200 << 10, "{bytes} bytes");
}

#[test]
fn reply_needs_one_allocation_per_aggregate() {
    let array = format!("*1000\r\n{}", "$5\r\nhello\r\n".repeat(1000));
    for (wire, most) in [
        ("$5\r\nhello\r\n", 0),
        ("+OK\r\n", 0),
        ("+hello\r\n", 0),
        (":1234567\r\n", 0),
        (",1.5\r\n", 0),
        ("_\r\n", 0),
        ("*0\r\n", 0),
        (&array, 1),
        ("%2\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n*2\r\n:1\r\n:2\r\n", 2),
    ] {
        let mut decoder = Decoder::new(DecoderOptions::default());
        let mut input = BytesMut::with_capacity(64 << 10);
        // The first string makes the input shareable, the first aggregates the stack.
        input.put_slice(b"*1\r\n*1\r\n$1\r\na\r\n");
        let first = decoder.decode(&mut input).unwrap();
        for _ in 0..3 {
            input.put_slice(wire.as_bytes());
            let (decoded, allocations, _) = cost(|| decoder.decode(&mut input));
            assert!(matches!(decoded, Ok(Some(_))), "{wire:?}: {decoded:?}");
            assert_eq!(allocations, most, "for {wire:?}");
        }
        drop(first);
    }
}

#[test]
fn conversion_needs_one_allocation_per_collection() {
    let strings = || Value::Array(vec![Value::Bulk(Bytes::from_static(b"hello")); 1000]);
    let (converted, allocations, _) = cost(|| Bytes::from_value(Value::Bulk(Bytes::from_static(b"hello"))));
    assert_eq!((converted, allocations), (Ok("hello".into()), 0));

    let value = strings();
    let (converted, allocations, _) = cost(|| Vec::<Bytes>::from_value(value));
    assert!(converted.is_ok_and(|items| items.len() == 1000) && allocations <= 1, "{allocations}");
    let value = strings();
    let (converted, allocations, _) = cost(|| Vec::<Option<Bytes>>::from_value(value));
    assert!(converted.is_ok_and(|items| items.len() == 1000) && allocations <= 1, "{allocations}");
    let value = strings();
    let (converted, allocations, _) = cost(|| Vec::<(Bytes, Bytes)>::from_value(value));
    assert!(converted.is_ok_and(|items| items.len() == 500) && allocations <= 1, "{allocations}");
    let value = Value::Array(vec![Value::from(7); 5]);
    let (converted, allocations, _) = cost(|| <(u8, u16, u32, u64, i64)>::from_value(value));
    assert_eq!((converted, allocations), (Ok((7, 7, 7, 7, 7)), 0));
}

#[test]
fn large_value_is_copied_once() {
    let value = vec![b'x'; 1 << 20];
    let (_, allocations, bytes) = cost(|| commands::set("a:key", &value));
    assert!(allocations == 1 && bytes < value.len() + 1024, "{allocations} allocations, {bytes} bytes");
}

#[test]
fn small_command_does_not_allocate() {
    let (_, allocations, _) = cost(|| commands::get("a:key:of:usual:length"));
    assert_eq!(allocations, 0);
    let (_, allocations, _) = cost(|| commands::set("a:key", [b'x'; 64]));
    assert_eq!(allocations, 0);
    let (hset, allocations, _) = cost(|| commands::hset("a:key", [("field", 1), ("other", 2)]));
    assert_eq!(allocations, 0);
    for request in [hset.returning::<Value>(), Command::new("CLIENT").arg("REPLY").arg("OFF").returning()] {
        let (_, allocations, _) = cost(|| request.command().check());
        assert_eq!(allocations, 0, "a check allocates nothing");
    }
}
