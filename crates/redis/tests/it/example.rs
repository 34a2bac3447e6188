//! The example `reconnect`, and its output in docs/redis.md.

#[path = "../../examples/reconnect.rs"]
mod reconnect;

use tidewire_testkit::{Process, is_rerun, rerun};

/// Returns a line without the error in it, which depends on what the client does when the server is killed.
fn without_error(line: &str) -> &str {
    let end =
        line.find(", last error").or(line.find("the connection is lost").map(|at| at + "the connection is lost".len()));
    &line[..end.unwrap_or(line.len())]
}

#[test]
fn output_of_the_example_is_as_documented() {
    if is_rerun() {
        return reconnect::main().unwrap();
    }
    let mut example = Process::spawn(rerun("example::output_of_the_example_is_as_documented"));
    let status = example.wait();
    let output = example.output();
    assert!(status.success(), "{output}");

    let (_, documented) = include_str!("../../../../docs/redis.md").split_once("```text\n").unwrap();
    let (documented, _) = documented.split_once("```").unwrap();
    // States are printed by one task and replies by another, so only the order of each is certain.
    for is_state in [true, false] {
        let lines = |text: &'static str| text.lines().filter(move |line| line.starts_with("    ") == is_state);
        let printed: Vec<_> = output.lines().map(without_error).collect();
        let mut rest = &printed[..];
        for line in lines(documented).filter(|line| *line != "...") {
            let found = rest.iter().position(|printed| *printed == without_error(line));
            rest = &rest[found.unwrap_or_else(|| panic!("{line:?} is missing in:\n{output}")) + 1..];
        }
    }
    assert!(output.contains("1 connections lost"), "{output}");
}
