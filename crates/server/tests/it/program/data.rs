//! What it keeps.

use std::collections::HashSet;

use futures_util::StreamExt as _;
use serde_json::{Value as Json, json};
use tokio_tungstenite::tungstenite::Message;

use super::{Place, Running, log};
use crate::client::{Client, notes};

async fn texts(server: &Running) -> HashSet<String> {
    let all = server.client().await.ask("store.all", json!({"bucket": "notes"})).await;
    all.as_array().unwrap().iter().map(|note| note["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_and_defined_is_there_after_a_restart() {
    let place = Place::new();
    let server = place.start(&[]);
    let mut client = server.client().await;
    client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
    client.ask("store.defineQuery", json!({"name": "all", "config": {"bucket": "notes"}})).await;
    let note = client.ask("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    drop(client);
    server.stop();

    let server = place.start(&[]);
    let mut client = server.client().await;
    assert_eq!(client.ask("store.get", json!({"bucket": "notes", "key": note["id"]})).await, note);
    assert_eq!(client.ask("store.subscribe", json!({"query": "all"})).await["data"], json!([note]));
    drop(client);
    let process = server.stop();
    let opened = log(&process).into_iter().find(|line| line["message"] == "the data is open").unwrap();
    assert_eq!(opened["was_closed"], true, "{opened}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_write_that_was_answered_survives_a_kill() {
    let place = Place::new();
    let mut answered: HashSet<String> = HashSet::new();
    for round in 0..4 {
        let mut server = place.start(&[]);
        let mut client = server.client().await;
        if round == 0 {
            client.ask("store.defineBucket", json!({"name": "notes", "config": notes()})).await;
        }
        assert!(answered.is_subset(&texts(&server).await), "round {round}");
        for number in 0..400 {
            let data = json!({"text": format!("{round}-{number}")});
            client.send("store.insert", json!({"bucket": "notes", "data": data})).await;
        }
        // It is killed with some of them answered, some on their way, and some not read.
        for _ in 0..50 * round {
            answered.insert(text_of(&client.receive().await));
        }
        server.process.kill();
        while let Some(Ok(Message::Text(text))) = client.socket.next().await {
            answered.insert(text_of(&serde_json::from_str(text.as_str()).unwrap()));
        }
    }
    let server = place.start(&[]);
    let kept = texts(&server).await;
    assert!(answered.is_subset(&kept), "{:?}", answered.difference(&kept).collect::<Vec<_>>());
    assert!(answered.len() >= 150, "{}", answered.len());
    server.stop();
}

fn text_of(reply: &Json) -> String {
    reply["data"]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_definitions_of_the_file_are_applied_and_stop_the_start_if_they_do_not_fit() {
    let place = Place::new();
    let file =
        |bucket: &Json| json!({"buckets": {"notes": bucket}, "queries": {"all": {"bucket": "notes"}}}).to_string();
    place.file("app.json", file(&notes()));
    let server = place.start(&["--config", "app.json"]);
    let mut client = server.client().await;
    let note = client.ask("store.insert", json!({"bucket": "notes", "data": {"text": "low tide"}})).await;
    assert_eq!(client.ask("store.subscribe", json!({"query": "all"})).await["data"], json!([note]));
    drop(client);
    assert_eq!(outcomes(&server.stop()), ["bucket notes Created", "query all Created"]);

    let mut other = notes();
    other["schema"]["text"]["type"] = json!("number");
    place.file("other.json", file(&other));
    let refused = place.run(&["--port", "0", "--config", "other.json"]);
    assert_eq!((refused.code, &*refused.stdout), (Some(1), ""));
    let told: Vec<&str> = refused.stderr.lines().rev().take(2).collect();
    assert_eq!(told[0], "  schema.text.type: stored is \"string\", the file says \"number\"");
    assert!(told[1].starts_with("other.json:1:21: bucket \"notes\": it is stored with another definition"), "{told:?}");

    let mut more = notes();
    more["schema"]["tags"] = json!({"type": "array"});
    place.file("more.json", file(&more));
    let server = place.start(&["--config", "more.json"]);
    let mut client = Client::connect_to(&server.url).await;
    assert_eq!(client.ask("store.get", json!({"bucket": "notes", "key": note["id"]})).await, note);
    let (code, _) = client.fail("store.insert", json!({"bucket": "notes", "data": {"text": "t", "tags": 1}})).await;
    assert_eq!(code, "VALIDATION_ERROR");
    drop(client);
    assert_eq!(outcomes(&server.stop()), ["bucket notes Updated", "query all Unchanged"]);
}

fn outcomes(process: &tidewire_testkit::Process) -> Vec<String> {
    let text = |line: &Json, key: &str| line[key].as_str().unwrap().to_owned();
    let lines = log(process).into_iter().filter(|line| line["message"] == "a definition of the file");
    lines.map(|line| ["kind", "name", "outcome"].map(|key| text(&line, key)).join(" ")).collect()
}
