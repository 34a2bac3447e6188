#[path = "../../examples/harbour.rs"]
#[allow(dead_code, reason = "its main is not run here")]
mod harbour;

#[tokio::test(flavor = "multi_thread")]
async fn harbour_example_prints_every_ship() {
    let mut lines = Vec::new();
    harbour::run(|line| lines.push(line)).await.unwrap();
    let expected = [
        "logged in as \"mara\"",
        "after Ida: 1 ships, 40 tons",
        "after Jette: 2 ships, 112 tons",
        "FORBIDDEN: store.clear on \"ships\" is not permitted",
        "SHUTTING_DOWN: the server is shutting down",
    ];
    assert_eq!(lines, expected);
}
