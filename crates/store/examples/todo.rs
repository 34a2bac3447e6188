//! A persistent to-do list.
//!
//! ```sh
//! cargo run -p tidewire-store --example todo -- add "buy milk"
//! cargo run -p tidewire-store --example todo -- list
//! ```

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value as Json, json};
use tidewire_store::{Query, Store, StoreOptions};

const HELP: &str = "\
todo add TEXT      adds an item; two items cannot have the same text
todo done NUMBER   marks an item as done
todo list          lists the open items, oldest first, and counts the done ones
todo tidy          removes the done items

The items are stored in the directory $TODO_DATA, or ./todo-data by default.
";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let data = std::env::var_os("TODO_DATA").unwrap_or_else(|| "todo-data".into());
    print!("{}", run(Path::new(&data), &arguments)?);
    Ok(())
}

/// Runs one command and returns its output.
pub(crate) fn run(data: &Path, arguments: &[&str]) -> Result<String> {
    let (store, _) = Store::open(data, StoreOptions::default())
        .with_context(|| format!("cannot open the list in {}", data.display()))?;
    define(&store)?;
    let mut out = String::new();
    match arguments {
        ["add", text] => {
            let todo = store.insert("todos", json!({"text": text})).wait()?.to_record();
            writeln!(out, "{} {text}", todo["id"])?;
        }
        ["done", number] => {
            let id: u64 = number.parse().with_context(|| format!("expected the number of an item, got {number}"))?;
            let todo = store.update("todos", id, json!({"done": true}), None).wait()?.to_record();
            writeln!(out, "done: {}", todo["text"].as_str().unwrap_or_default())?;
        }
        ["list"] => {
            for todo in store.query_named("open", &Map::new())?.into_records() {
                writeln!(out, "{} {}", todo["id"], todo["text"].as_str().unwrap_or_default())?;
            }
            writeln!(out, "{} done", done(&store)?.len())?;
        }
        ["tidy"] => {
            let done = done(&store)?;
            let count = done.len();
            // One write removes all of them or none: an item may have changed since it was read.
            store
                .write(move |draft| {
                    for todo in done {
                        draft.delete("todos", &todo["id"], todo["_version"].as_u64())?;
                    }
                    Ok(())
                })
                .wait()?;
            writeln!(out, "{count} removed")?;
        }
        [] => out.push_str(HELP),
        _ => bail!("unknown command\n\n{HELP}"),
    }
    store.close()?;
    Ok(out)
}

/// Defines the bucket and the query on the first run.
fn define(store: &Store) -> Result<()> {
    if store.snapshot().state.bucket("todos").is_ok() {
        return Ok(());
    }
    store
        .write(|draft| {
            let schema = json!({
                "id": {"type": "number", "generated": "autoincrement"},
                "text": {"type": "string", "required": true, "minLength": 1, "unique": true},
                "done": {"type": "boolean", "default": false},
            });
            draft.define_bucket("todos", &json!({"key": "id", "schema": schema, "indexes": ["done"]}))?;
            let open = json!({"bucket": "todos", "filter": {"done": false}, "sort": {"_createdAt": "asc"}});
            draft.define_query("open", &open)
        })
        .wait()?;
    Ok(())
}

fn done(store: &Store) -> Result<Vec<Json>> {
    Ok(store.query(&Query::new("todos").filter(json!({"done": true}))?)?.into_records())
}
