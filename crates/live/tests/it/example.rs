#[path = "../../examples/scoreboard.rs"]
#[allow(dead_code, reason = "its main is not run here")]
mod scoreboard;

#[test]
fn scoreboard_shows_the_best_until_the_end() {
    let play = || {
        let mut lines = Vec::new();
        scoreboard::play(&["ann", "bob", "cyd", "dan"], 10, |line| lines.push(line)).unwrap();
        lines
    };
    let scores = |line: &str| -> Vec<i64> {
        line.split("  ").map(|entry| entry.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    let lines = play();
    assert_eq!(lines[0], "ann 0  bob 0  cyd 0");
    for line in &lines {
        assert!(scores(line).is_sorted_by(|one, two| one >= two), "{line}");
    }
    // The points do not depend on the order of play.
    assert!(lines.len() > 1);
    assert_eq!(scores(lines.last().unwrap()), scores(play().last().unwrap()));
}
