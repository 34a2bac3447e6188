use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context as TaskContext, Waker};
use std::time::{Duration, Instant};

use tidewire_pool::{AskError, Context, DeadLetterReason, Message, Overflow, Pool, Reply};
use tidewire_testkit::{PATIENCE, wait_until};

use crate::gate::Gate;

enum Request {
    Double(u32, Reply<u32>),
    Ignore(#[expect(dead_code, reason = "it is dropped with the message")] Reply<u32>),
    Fail(#[expect(dead_code, reason = "it stays in the dead letter")] Reply<u32>),
    Panic(#[expect(dead_code, reason = "it stays in the dead letter")] Reply<u32>),
}

fn pool(gate: &Gate<()>) -> Pool<Request> {
    let gate = gate.clone();
    let handler = move |message: &mut Message<Request>, _: &mut Context<'_, Request>| {
        gate.pass();
        match &mut message.payload {
            Request::Double(number, reply) => reply.send(*number * 2).map_err(|_| "the caller no longer waits"),
            Request::Ignore(_) => Ok(()),
            Request::Fail(_) => Err("cannot"),
            Request::Panic(_) => panic!("boom"),
        }
    };
    Pool::builder().workers(1).messages(2).overflow(Overflow::DropOldest).start(handler).unwrap()
}

#[tokio::test]
async fn ask_returns_a_reply_or_an_error() {
    let pool = pool(&Gate::opened());
    assert_eq!(pool.ask(|reply| Message::new(1, Request::Double(21, reply))).await.unwrap(), 42);
    let ignored = pool.ask(|reply| Message::new(1, Request::Ignore(reply))).await;
    assert!(matches!(ignored, Err(AskError::Unanswered)));
    let failed = pool.ask(|reply| Message::new(1, Request::Fail(reply))).await;
    assert!(matches!(failed, Err(AskError::DeadLettered(DeadLetterReason::Failed(error))) if error == "cannot"));
    let panicked = pool.ask(|reply| Message::new(1, Request::Panic(reply))).await;
    assert!(matches!(panicked, Err(AskError::DeadLettered(DeadLetterReason::Panicked(text))) if text == "boom"));
    let past = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    let expired = pool.ask(|reply| Message::new(1, Request::Double(1, reply)).deadline(past)).await;
    assert!(matches!(expired, Err(AskError::DeadLettered(DeadLetterReason::Expired))));
    assert_eq!(pool.dead_letters().len(), 3, "the payloads are stored with their `Reply`, and the asks have ended");

    pool.drain(PATIENCE);
    let late = pool.ask(|reply| Message::new(1, Request::Double(1, reply))).await;
    assert!(matches!(late, Err(AskError::NotSubmitted(error)) if error.to_string() == "the pool is shutting down"));
}

#[tokio::test(flavor = "multi_thread")]
async fn ask_fails_if_message_is_displaced_or_returned() {
    let gate = Gate::closed();
    let pool = Arc::new(pool(&gate));
    let ask = |number| {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move { pool.ask(|reply| Message::new(1, Request::Double(number, reply))).await })
    };
    let handled = ask(1);
    wait_until("the first message is being handled", PATIENCE, || gate.inside() == 1);
    let displaced = ask(2);
    wait_until("the second message is queued", PATIENCE, || pool.depth() == 2);
    let returned = ask(3);
    assert!(matches!(displaced.await.unwrap(), Err(AskError::DeadLettered(DeadLetterReason::Displaced))));
    wait_until("the third message is queued", PATIENCE, || pool.stats().submitted == 3);
    let shutdown = pool.abort();
    assert_eq!((shutdown.returned.len(), shutdown.running), (1, 1));
    assert!(matches!(returned.await.unwrap(), Err(AskError::Returned)));
    gate.open();
    assert_eq!(handled.await.unwrap().unwrap(), 2);
}

#[tokio::test]
async fn all_merged_asks_end() {
    let gate = Gate::<()>::closed();
    let handler = {
        let gate = gate.clone();
        move |_: &mut Message<Vec<Reply<u32>>>, _: &mut Context<'_, Vec<Reply<u32>>>| {
            gate.pass();
            Err::<(), _>("stored as a dead letter, with its replies")
        }
    };
    let merge = Overflow::Coalesce(Arc::new(|queued: &mut Vec<Reply<u32>>, mut new| queued.append(&mut new)));
    let pool = Pool::builder().workers(1).messages(2).overflow(merge).start(handler).unwrap();
    let ask = || pool.ask(|reply| Message::new(1, vec![reply]));
    let open = async {
        wait_until("the first message is being handled", PATIENCE, || gate.inside() == 1);
        gate.open();
    };
    let (first, second, third, ()) = tokio::join!(ask(), ask(), ask(), open);
    for ended in [first, second, third] {
        assert!(matches!(ended, Err(AskError::DeadLettered(DeadLetterReason::Failed(_)))));
    }
    assert_eq!(pool.stats().merged, 1);
}

/// A follow-up that carries the `Reply` and becomes a dead letter must end the ask.
#[tokio::test]
async fn ask_passed_to_a_follow_up_ends_with_it() {
    enum Step {
        Request(Option<Reply<u32>>),
        Query(Option<Reply<u32>>),
        Log,
    }
    let works = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let handler = {
        let works = Arc::clone(&works);
        move |message: &mut Message<Step>, context: &mut Context<'_, Step>| match &mut message.payload {
            Step::Request(reply) => {
                let query = Step::Query(reply.take());
                context.submit(Message::new(2, Step::Log)).map_err(|_| "full")?;
                context.submit(Message::new(2, query)).map_err(|_| "full")
            }
            Step::Query(Some(reply)) if works.load(std::sync::atomic::Ordering::SeqCst) => {
                reply.send(1).map_err(|_| "the caller no longer waits")
            }
            Step::Query(_) | Step::Log => Err("broken"),
        }
    };
    let pool = Pool::builder().workers(1).start(handler).unwrap();
    let failed = pool.ask(|reply| Message::new(1, Step::Request(Some(reply)))).await;
    assert!(matches!(failed, Err(AskError::DeadLettered(DeadLetterReason::Failed(error))) if error == "broken"));
    works.store(true, std::sync::atomic::Ordering::SeqCst);
    let answered = pool.ask(|reply| Message::new(1, Step::Request(Some(reply)))).await;
    assert_eq!(answered.unwrap(), 1, "the failure of another follow-up has no effect");
}

#[tokio::test]
async fn ask_fails_if_dead_letters_are_not_stored() {
    let handler = |_: &mut Message<Reply<u32>>, _: &mut Context<'_, Reply<u32>>| Err::<(), _>("cannot");
    let pool = Pool::builder().workers(1).dead_letters(0).start(handler).unwrap();
    let failed = pool.ask(|reply| Message::new(1, reply)).await;
    assert!(matches!(failed, Err(AskError::DeadLettered(DeadLetterReason::Failed(error))) if error == "cannot"));
}

/// While the worker is blocked, any number of asks may be merged. This must neither overflow the stack nor exhaust the memory.
#[test]
fn any_number_of_asks_can_be_merged() {
    let gate = Gate::<()>::closed();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<Reply<u32>>, _: &mut Context<'_, Reply<u32>>| {
            gate.pass();
            message.payload.send(1).map_err(|_| "the caller no longer waits")
        }
    };
    let merge = Overflow::Coalesce(Arc::new(|queued: &mut Reply<u32>, new| *queued = new));
    let pool = Pool::builder().workers(1).messages(2).overflow(merge).start(handler).unwrap();
    let mut context = TaskContext::from_waker(Waker::noop());
    let mut ask = || {
        let mut asking = Box::pin(pool.ask(|reply| Message::new(1, reply)));
        assert!(asking.as_mut().poll(&mut context).is_pending());
        asking
    };
    let first = ask();
    wait_until("the first message is being handled", PATIENCE, || gate.inside() == 1);
    for _ in 0..100_000 {
        drop(ask());
    }
    let last = ask();
    gate.open();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!((runtime.block_on(first).unwrap(), runtime.block_on(last).unwrap()), (1, 1));
    assert_eq!(pool.stats().merged, 100_000);
}

#[tokio::test]
async fn reply_is_not_wanted_after_the_caller_drops_its_future() {
    let gate = Gate::<()>::closed();
    let (sender, results) = std::sync::mpsc::channel();
    let handler = {
        let gate = gate.clone();
        move |message: &mut Message<Reply<u32>>, _: &mut Context<'_, Reply<u32>>| {
            let wanted = message.payload.is_wanted();
            gate.pass();
            sender
                .send((wanted, message.payload.is_wanted(), message.payload.send(1)))
                .map_err(|_| "the test has ended")
        }
    };
    let pool = Pool::builder().workers(1).start(handler).unwrap();
    let ask = || pool.ask(|reply| Message::new(1, reply));

    let mut dropped = Box::pin(ask());
    assert!(dropped.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending());
    wait_until("the message is being handled", PATIENCE, || gate.inside() == 1);
    let timed_out = tokio::time::timeout(Duration::from_millis(1), ask()).await;
    assert!(timed_out.is_err());
    drop(dropped);
    gate.open();
    assert_eq!(
        results.recv().unwrap(),
        (true, false, Err(1)),
        "the future was dropped while the message was being handled"
    );
    assert_eq!(results.recv().unwrap(), (false, false, Err(1)), "the future was dropped while the message was queued");
    assert_eq!(ask().await.unwrap(), 1);
    assert_eq!(results.recv().unwrap(), (true, true, Ok(())));
}

#[test]
fn second_reply_is_returned_to_the_handler() {
    let (sender, results) = std::sync::mpsc::channel();
    let handler = move |message: &mut Message<Reply<u32>>, _: &mut Context<'_, Reply<u32>>| {
        sender.send([message.payload.send(1), message.payload.send(2)]).unwrap();
        Ok::<(), String>(())
    };
    let pool = Pool::builder().workers(1).start(handler).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(pool.ask(|reply| Message::new(1, reply))).unwrap(), 1);
    assert_eq!(results.recv().unwrap(), [Ok(()), Err(2)]);
}
