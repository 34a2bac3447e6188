use std::time::Duration;

use tidewire_pool::{Builder, Context, Message, Pool, Retry};

fn build_error(builder: Builder<u32>) -> String {
    let handler = |_: &mut Message<u32>, _: &mut Context<'_, u32>| Ok::<(), String>(());
    builder.start(handler).unwrap_err().to_string()
}

#[test]
fn invalid_settings_are_named_in_errors() {
    let builder = Pool::<u32>::builder;
    let second = Duration::from_secs(1);
    for (settings, expected) in [
        (builder().workers(0), "workers is 0: a pool needs at least one worker"),
        (builder().workers(1_000_000), "workers is 1000000: at most 4096 are supported"),
        (builder().messages(0), "messages is 0: no message would ever be accepted"),
        (builder().bytes(0), "bytes is 0: no message would ever be accepted"),
        (builder().key_messages(0), "key_messages is 0: no message would ever be accepted"),
        (builder().key_bytes(0), "key_bytes is 0: no message would ever be accepted"),
        (builder().messages(usize::MAX), "messages is 18446744073709551615: at most 8388608 is supported"),
        (builder().bytes(1 << 40), "bytes is 1099511627776: at most 549755813888 is supported"),
        (builder().messages(10).key_messages(11), "key_messages is 11, which must not exceed the 10 of the whole pool"),
        (builder().bytes(10).key_bytes(11), "key_bytes is 11, which must not exceed the 10 of the whole pool"),
        (builder().name("a\0b"), "name contains a NUL: \"a\\0b\""),
        (builder().retry(Retry::new(0)), "retry.attempts is 0: a message needs at least one attempt"),
        (
            builder().retry(Retry::new(2).first_pause(second * 2).longest_pause(second)),
            "retry.first_pause is 2s, which must not exceed retry.longest_pause, 1s",
        ),
    ] {
        assert_eq!(build_error(settings), expected);
    }
}

#[test]
fn debug_output_shows_workers_and_depth() {
    let handler = |_: &mut Message<u32>, _: &mut Context<'_, u32>| Ok::<(), String>(());
    let pool = Pool::builder().workers(3).start(handler).unwrap();
    assert_eq!(format!("{pool:?}"), "Pool { workers: 3, depth: 0, .. }");
    assert_eq!(pool.workers(), 3);
    assert_eq!(pool.placement(), tidewire_pool::Placement::Moving);
}

/// Returns the niceness of this thread.
#[cfg(target_os = "linux")]
fn niceness() -> i64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The name is in parentheses and may contain spaces. Niceness is the 17th field after it.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(16).unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn threads_have_a_lower_priority_if_set() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let handler = move |_: &mut Message<()>, _: &mut Context<'_, ()>| sender.send(niceness());
    let pool = Pool::builder().workers(1).niceness(3).start(handler).unwrap();
    pool.submit(Message::new(1, ())).unwrap();
    assert_eq!(receiver.recv().unwrap(), (niceness() + 3).min(19));
}
