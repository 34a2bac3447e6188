use std::collections::HashMap;
use std::sync::mpsc;
use std::thread::{self, ThreadId};

use tidewire_pool::{Context, Key, Message, Observed, Pool, TraceContext, TraceError};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

#[test]
fn malformed_headers_are_rejected() {
    for header in [
        "",
        "-",
        "00",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-extra",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
    ] {
        assert_eq!(header.parse::<TraceContext>(), Err(TraceError::Malformed), "{header}");
    }
    for header in [
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
    ] {
        assert_eq!(header.parse::<TraceContext>(), Err(TraceError::Zero));
    }
}

#[test]
fn unknown_fields_of_a_later_version_are_ignored() {
    let later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what.else".parse::<TraceContext>().unwrap();
    assert_eq!(later.trace_id(), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
    assert_eq!(later.span_id(), 0x00f0_67aa_0ba9_02b7);
    assert!(later.is_sampled());
}

#[test]
fn child_of_none_is_none() {
    assert!(TraceContext::NONE.child().is_none());
    assert!(TraceContext::current().is_none());
    let root = TraceContext::root();
    assert_ne!(root, TraceContext::root());
    assert_eq!(root.to_string().parse(), Ok(root));
}

/// A message and its trace, as the handler observes them.
struct Observation {
    key: Key,
    payload: u32,
    thread: ThreadId,
    message: TraceContext,
    current: TraceContext,
    context: TraceContext,
}

fn observed(message: &Message<u32>, context: &Context<'_, u32>) -> Observation {
    Observation {
        key: message.key,
        payload: message.payload,
        thread: thread::current().id(),
        message: message.trace,
        current: TraceContext::current(),
        context: context.trace(),
    }
}

/// Every message has a follow-up with another key, which may be handled on another thread.
#[test]
fn workers_see_the_trace_of_their_message() {
    let (sender, results) = mpsc::channel();
    let handler = move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
        sender.send(observed(message, context)).map_err(|_| "the test has ended")?;
        match message.payload {
            0 => context.submit(Message::new(message.key.0 + 1000, 1)).map_err(|_| "full"),
            _ => Ok(()),
        }
    };
    let pool = Pool::builder().workers(4).start(Observed::new(handler)).unwrap();
    let traces: HashMap<Key, TraceContext> = (0..200).map(|key| (Key(key), TraceContext::root())).collect();
    for (&key, &trace) in &traces {
        // Every second message has no trace, to detect a worker that does not clear the previous trace.
        let trace = if key.0 % 2 == 0 { trace } else { TraceContext::NONE };
        pool.submit(Message::new(key, 0).trace(trace)).unwrap();
    }
    assert!(pool.drain(PATIENCE).returned.is_empty());
    drop(pool);

    let (first, second): (Vec<Observation>, Vec<Observation>) =
        results.iter().partition(|observed| observed.payload == 0);
    assert_eq!((first.len(), second.len()), (200, 200));
    let mut spans = HashMap::new();
    for observed in &first {
        assert_eq!(observed.current, observed.context);
        if observed.key.0 % 2 == 0 {
            assert_eq!(observed.message, traces[&observed.key]);
            assert_eq!(observed.current.trace_id(), observed.message.trace_id());
        } else {
            assert!(observed.message.is_none() && !observed.current.is_none());
        }
        assert_ne!(observed.current.span_id(), observed.message.span_id());
        spans.insert(observed.current.trace_id(), observed.current);
    }
    assert_eq!(spans.len(), 200, "every message without a trace starts a new one");
    for observed in &second {
        assert_eq!(
            observed.message,
            spans[&observed.message.trace_id()],
            "the parent of a follow-up is the span of the message that caused it"
        );
        assert_eq!((observed.current, observed.current.trace_id()), (observed.context, observed.message.trace_id()));
    }
    assert!(TraceContext::current().is_none());
}

/// The thread that handled the first message of a key is blocked with another key when the second one arrives.
#[test]
fn moved_key_keeps_the_trace_of_its_message() {
    let gate = Gate::<()>::closed();
    let (sender, results) = mpsc::channel();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<u32>, context: &mut Context<'_, u32>| {
            sender.send(observed(message, context)).map_err(|_| "the test has ended")?;
            if message.payload == 0 {
                gate.pass();
            }
            Ok::<(), &str>(())
        }
    };
    let pool = Pool::builder().workers(2).start(Observed::new(handler)).unwrap();
    let submit = |key, payload| {
        let trace = TraceContext::root();
        pool.submit(Message::new(key, payload).trace(trace)).unwrap();
        trace
    };
    let next = || results.recv_timeout(PATIENCE).unwrap();

    // Keys 1 and 3 have the same home shard. The worker that handles key 1 first is blocked before key 1 is submitted again.
    let mut threads = Vec::new();
    for round in 1..100 {
        let trace = submit(1, 1);
        let observed = next();
        assert_eq!((observed.message, observed.current.trace_id()), (trace, trace.trace_id()));
        threads.push(observed.thread);
        submit(3, 0);
        let blocked = next();
        wait_until("a worker is blocked", PATIENCE, || gate.inside() == 1);
        let trace = submit(1, 2);
        let observed = next();
        assert_eq!((observed.payload, observed.message, observed.current.trace_id()), (2, trace, trace.trace_id()));
        assert_ne!(observed.thread, blocked.thread);
        threads.push(observed.thread);
        gate.open();
        wait_until("the handler has returned", PATIENCE, || pool.stats().handled == 3 * round);
        gate.close();
        if threads.iter().any(|&thread| thread != threads[0]) {
            break;
        }
    }
    assert!(threads.iter().any(|&thread| thread != threads[0]), "the key did not move");
}
