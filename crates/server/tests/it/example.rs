#[path = "../../examples/harbour.rs"]
#[allow(dead_code, reason = "its main is not run here")]
mod harbour;

#[tokio::test(flavor = "multi_thread")]
async fn the_pilot_sees_every_ship_until_the_harbour_closes() {
    let mut lines = Vec::new();
    harbour::run(|line| lines.push(line)).await.unwrap();
    let expected = [
        "logged in as \"mara\"",
        "at first: {\"ships\":0,\"tons\":0}",
        "after Ida: {\"ships\":1,\"tons\":40}",
        "after Jette: {\"ships\":2,\"tons\":112}",
        r#"refused: {"id":1,"type":"error","code":"FORBIDDEN","message":"store.clear on \"ships\" is not permitted"}"#,
        "the harbour closes in 5000 ms",
    ];
    assert_eq!(lines, expected);
}
