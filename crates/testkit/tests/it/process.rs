use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::{env, panic, thread};

use tidewire_testkit::{PATIENCE, Process, RedisServer, is_rerun, is_running, rerun, wait_until};

fn shell(script: &str) -> Process {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Process::spawn(command)
}

#[test]
fn output_is_captured_line_by_line_from_both_pipes() {
    let mut process = shell("echo the port is 4711; echo oh dear >&2; exit 3");
    assert_eq!(process.wait_for_line("port is "), "4711");
    assert_eq!(process.wait_for_line("oh "), "dear");
    assert_eq!(process.wait().code(), Some(3));
    assert_eq!((process.stdout(), process.stderr()), ("the port is 4711".to_owned(), "oh dear".to_owned()));
}

#[test]
fn missing_line_is_reported_with_the_actual_output() {
    let process = shell("echo all I have to say");
    let panic = panic::catch_unwind(|| process.wait_for_line("something else")).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("never printed \"something else\"") && message.contains("all I have to say"), "{message}");
}

#[test]
fn the_output_is_complete_after_wait() {
    for _ in 0..20 {
        let mut process = shell("echo so long; echo farewell >&2");
        process.wait();
        let output = process.output();
        assert!(output.contains("so long") && output.contains("farewell"), "{output:?}");
    }
}

#[test]
fn the_memory_for_output_is_bounded() {
    let mut process = shell("seq 1 200000; echo done");
    process.wait_for_line("done");
    process.wait();
    assert_eq!(process.output().lines().count(), 1000);
}

#[test]
fn signals_end_a_process() {
    let mut asked = shell("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done");
    asked.wait_for_line("ready");
    asked.terminate();
    asked.wait_for_line("bye");
    assert_eq!(asked.wait().code(), Some(7));

    let mut interrupted = shell("trap 'exit 8' INT; echo ready; while :; do sleep 0.01; done");
    interrupted.wait_for_line("ready");
    interrupted.interrupt();
    assert_eq!(interrupted.wait().code(), Some(8));

    let mut killed = shell("trap '' TERM; echo ready; while :; do sleep 0.01; done");
    killed.wait_for_line("ready");
    killed.kill();
    assert_eq!(killed.wait().signal(), Some(9));
}

#[test]
fn a_child_outlives_the_thread_that_started_it() {
    let process = thread::spawn(|| shell("echo ready; exec sleep 1000")).join().unwrap();
    process.wait_for_line("ready");
    assert!(is_running(process.pid()));
}

#[test]
fn drop_kills_the_process_even_in_a_panic() {
    let process = shell("exec sleep 1000");
    let pid = process.pid();
    let panicked = panic::catch_unwind(panic::AssertUnwindSafe(move || {
        let _dropped_while_unwinding = process;
        panic!("the test failed");
    }));
    assert!(panicked.is_err());
    assert!(!is_running(pid));
}

/// The outer test kills or fails its own rerun, which runs a server and a child, and checks that neither survives.
#[test]
fn no_child_survives_its_test() {
    const HOW: &str = "HOW_TO_DIE";
    if is_rerun() {
        let redis = RedisServer::start();
        let child = shell("exec sleep 1000");
        child.pause();
        println!("redis is {}", redis.pid());
        println!("child is {}", child.pid());
        match env::var(HOW).as_deref() {
            Ok("panic") => panic!("as planned"),
            Ok("abort") => std::process::abort(),
            Ok("exit") => std::process::exit(0),
            _ => loop {
                thread::park();
            },
        }
    }
    for how in ["panic", "abort", "exit", "kill"] {
        // A process that dies without unwinding leaves its temporary directory behind. This one is removed by the outer test.
        let folder = tempfile::tempdir().unwrap();
        let mut command = rerun("process::no_child_survives_its_test");
        command.env(HOW, how).env("TMPDIR", folder.path());
        let mut test = Process::spawn(command);
        let pids = ["redis is ", "child is "].map(|what| test.wait_for_line(what).parse().unwrap());
        if how == "kill" {
            assert!(pids.iter().all(|&pid| is_running(pid)));
            test.kill();
        }
        test.wait();
        wait_until("its children have ended", PATIENCE, || pids.iter().all(|&pid| !is_running(pid)));
    }
}
