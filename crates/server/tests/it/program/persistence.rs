//! Records and definitions across restarts.

use std::collections::HashSet;

use futures_util::StreamExt as _;
use serde_json::{Value as Json, json};
use tokio_tungstenite::tungstenite::Message;

use super::{ServerProcess, WorkDir, log};
use crate::client::{Client, notes_config};

async fn texts(server: &ServerProcess) -> HashSet<String> {
    let all = server.client().await.call("store.all", json!({"bucket": "notes"})).await;
    all.as_array().unwrap().iter().map(|note| note["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_and_definitions_survive_a_restart() {
    let dir = WorkDir::new();
    let server = dir.start(&[]);
    let mut client = server.client().await;
    client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
    client.call("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    let note = client.call("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    drop(client);
    server.stop();

    let server = dir.start(&[]);
    let mut client = server.client().await;
    assert_eq!(client.call("store.get", json!({"bucket": "notes", "key": note["id"]})).await, note);
    assert_eq!(client.call("store.subscribe", json!({"query": "all"})).await["data"], json!([note]));
    drop(client);
    let process = server.stop();
    let opened = log(&process).into_iter().find(|line| line["message"] == "data directory opened").unwrap();
    assert_eq!(opened["was_closed"], true, "{opened}");
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_writes_survive_a_kill() {
    let dir = WorkDir::new();
    let mut acknowledged: HashSet<String> = HashSet::new();
    for round in 0..4 {
        let mut server = dir.start(&[]);
        let mut client = server.client().await;
        if round == 0 {
            client.call("store.defineBucket", json!({"name": "notes", "config": notes_config()})).await;
        }
        assert!(acknowledged.is_subset(&texts(&server).await), "round {round}");
        for number in 0..400 {
            let data = json!({"text": format!("{round}-{number}")});
            client.send("store.insert", json!({"bucket": "notes", "data": data})).await;
        }
        // The kill finds some writes acknowledged, some in flight and some unread.
        for _ in 0..50 * round {
            acknowledged.insert(text_of(&client.receive().await));
        }
        server.process.kill();
        while let Some(Ok(Message::Text(text))) = client.socket.next().await {
            acknowledged.insert(text_of(&serde_json::from_str(text.as_str()).unwrap()));
        }
    }
    let server = dir.start(&[]);
    let stored = texts(&server).await;
    assert!(acknowledged.is_subset(&stored), "{:?}", acknowledged.difference(&stored).collect::<Vec<_>>());
    assert!(acknowledged.len() >= 150, "{}", acknowledged.len());
    server.stop();
}

fn text_of(reply: &Json) -> String {
    reply["data"]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_in_the_file_are_applied_and_incompatible_ones_rejected() {
    let dir = WorkDir::new();
    let file =
        |bucket: &Json| json!({"buckets": {"notes": bucket}, "queries": {"all": {"bucket": "notes"}}}).to_string();
    dir.file("app.json", file(&notes_config()));
    let server = dir.start(&["--config", "app.json"]);
    let mut client = server.client().await;
    let note = client.call("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    assert_eq!(client.call("store.subscribe", json!({"query": "all"})).await["data"], json!([note]));
    drop(client);
    assert_eq!(outcomes(&server.stop()), ["bucket notes Created", "query all Created"]);

    let mut other = notes_config();
    other["schema"]["text"]["type"] = json!("number");
    dir.file("other.json", file(&other));
    let rejected = dir.run(&["--port", "0", "--config", "other.json"]);
    assert_eq!((rejected.code, &*rejected.stdout), (Some(1), ""));
    let lines: Vec<&str> = rejected.stderr.lines().rev().take(2).collect();
    assert_eq!(lines[0], "  schema.text.type: stored \"string\", file \"number\"");
    assert!(lines[1].starts_with("other.json:1:21: bucket \"notes\": the stored definition differs"), "{lines:?}");

    let mut more = notes_config();
    more["schema"]["tags"] = json!({"type": "array"});
    dir.file("more.json", file(&more));
    let server = dir.start(&["--config", "more.json"]);
    let mut client = Client::connect_to(&server.url).await;
    assert_eq!(client.call("store.get", json!({"bucket": "notes", "key": note["id"]})).await, note);
    let (code, _) = client.call_err("store.insert", json!({"bucket": "notes", "data": {"text": "t", "tags": 1}})).await;
    assert_eq!(code, "VALIDATION_ERROR");
    drop(client);
    assert_eq!(outcomes(&server.stop()), ["bucket notes Updated", "query all Unchanged"]);
}

fn outcomes(process: &tidewire_testkit::Process) -> Vec<String> {
    let text = |line: &Json, key: &str| line[key].as_str().unwrap().to_owned();
    let lines = log(process).into_iter().filter(|line| line["message"] == "definition applied");
    lines.map(|line| ["kind", "name", "outcome"].map(|key| text(&line, key)).join(" ")).collect()
}
