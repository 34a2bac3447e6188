//! The example in the README.

use std::fmt::Write as _;

/// The doctest of the crate root runs against a real server. Its visible lines are the example in the README.
#[test]
fn readme_example_equals_the_doctest_of_the_crate_root() {
    let (_, rest) = include_str!("../../README.md").split_once("```rust\n").unwrap();
    let (readme, _) = rest.split_once("```").unwrap();
    let lines = include_str!("../../src/lib.rs").lines().skip_while(|line| *line != "//! ```").skip(1);
    let mut doctest = String::new();
    for line in lines.take_while(|line| *line != "//! ```") {
        let line = line.trim_start_matches("//!");
        if !line.starts_with(" #   ") {
            writeln!(doctest, "{}", line.strip_prefix(' ').unwrap_or(line)).unwrap();
        }
    }
    assert_eq!(readme, doctest);
}
