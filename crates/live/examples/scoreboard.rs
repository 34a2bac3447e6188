//! A live scoreboard: prints the best players whenever they change.
//!
//! ```sh
//! cargo run -p tidewire-live --example scoreboard
//! ```

use anyhow::{Result, anyhow, bail};
use serde_json::{Value as Json, json};
use tidewire_live::{Event, First, Live, Mode, QueryResult};
use tidewire_store::Direction::Desc;
use tidewire_store::{Query, Store, StoreOptions};

fn main() -> Result<()> {
    play(&["ann", "bob", "cyd", "dan", "eve"], 8, |line| println!("{line}"))
}

/// Plays a number of rounds, and shows the best three players whenever they change.
pub(crate) fn play(players: &[&'static str], rounds: i64, mut show: impl FnMut(String)) -> Result<()> {
    let store = Store::memory(StoreOptions::default());
    let schema = json!({"name": {"type": "string"}, "score": {"type": "number", "default": 0}});
    store.define_bucket("players", json!({"key": "name", "schema": schema})).wait()?;
    for name in players {
        store.insert("players", json!({"name": name})).wait()?;
    }

    let live = Live::new(store.clone());
    let best = Query::new("players").sort("score", Desc).limit(3).fields(["name", "score"]);
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let mut board = live.subscribe(best, Mode::Delta).await?;
        let First::Snapshot(QueryResult::Json(first)) = board.first() else { bail!("expected a snapshot first") };
        let mut shown: Vec<Json> = serde_json::from_slice(first)?;
        show(line(&shown));

        let players: Vec<&'static str> = players.to_vec();
        let game = std::thread::spawn(move || game(&store, &players, rounds));
        // Deltas, or a snapshot after falling behind. The game is over when its bucket is dropped.
        while let Ok(event) = board.next().await {
            match event {
                Event::Delta { delta, .. } => delta.apply(&mut shown),
                Event::Snapshot { result: QueryResult::Json(json), .. } => shown = serde_json::from_slice(&json)?,
                other => bail!("expected records, got {other:?}"),
            }
            show(line(&shown));
        }
        game.join().map_err(|_| anyhow!("the game panicked"))?
    })
}

/// Runs all players concurrently, then drops the bucket.
fn game(store: &Store, players: &[&'static str], rounds: i64) -> Result<()> {
    std::thread::scope(|scope| {
        let players = players.iter().map(|name| scope.spawn(move || score(store, name, rounds)));
        let players: Vec<_> = players.collect();
        players.into_iter().try_for_each(|player| player.join().map_err(|_| anyhow!("a player panicked"))?)
    })?;
    Ok(store.drop_bucket("players").wait()?)
}

fn score(store: &Store, name: &'static str, rounds: i64) -> Result<()> {
    for round in 0..rounds {
        let scored = store.write(move |draft| {
            let score = draft.get("players", &json!(name))?.map(|row| row.to_record()["score"].clone());
            let score = score.as_ref().and_then(Json::as_i64).unwrap_or(0);
            // Each player scores high in a different round.
            let points = (round * 7 + name.bytes().map(i64::from).sum::<i64>()) % 5;
            draft.update("players", &json!(name), json!({"score": score + points}), None)
        });
        scored.wait()?;
    }
    Ok(())
}

fn line(shown: &[Json]) -> String {
    let entry = |record: &Json| format!("{} {}", record["name"].as_str().unwrap_or_default(), record["score"]);
    shown.iter().map(entry).collect::<Vec<_>>().join("  ")
}
