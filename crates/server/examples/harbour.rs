//! A program that embeds the server: it validates tokens, checks permissions, implements a query in code, and uses an in-process client. A
//! pilot logs in, subscribes to the query, and reports ships.
//!
//! ```sh
//! cargo run -p tidewire --example harbour
//! ```

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, PermissionCheck, Session, TokenValidator, Validation};
use tidewire::{ProgrammaticQuery, RequestError, Server, ServerOptions, View};
use tidewire_store::{QueryOutput, Store, StoreOptions};

#[tokio::main]
async fn main() -> Result<()> {
    run(|line| println!("{line}")).await
}

#[derive(Serialize, Deserialize)]
struct Ship {
    name: String,
    tons: u64,
}

/// The result of the query `load`.
#[derive(Serialize, Deserialize)]
struct Load {
    ships: usize,
    tons: u64,
}

/// Starts a server over an in-memory store, with auth and a programmatic query.
async fn open() -> Result<Server> {
    let store = Store::memory(StoreOptions::default());
    let schema = json!({"name": {"type": "string"}, "tons": {"type": "number", "min": 0}});
    store.define_bucket("ships", json!({"key": "name", "schema": schema})).await?;

    let auth = Auth::new(Badges).check(Harbourmaster);
    let options = ServerOptions::default().port(0).auth(auth).query("load", LoadQuery);
    Ok(Server::start(store, options).await?)
}

/// Validates tokens. It returns a future, so a real validator may query a database.
struct Badges;

impl TokenValidator for Badges {
    fn validate<'a>(&'a self, token: &'a str, _now: u64) -> Validation<'a> {
        Box::pin(async move { Ok((token == "badge-17").then(|| Session::new("mara", ["pilot"]))) })
    }
}

/// Lets only the harbourmaster clear a bucket. The permission rules decide on all other operations.
struct Harbourmaster;

impl PermissionCheck for Harbourmaster {
    fn check(&self, session: &Session, operation: &str, _resource: &str) -> Option<bool> {
        (operation == "store.clear").then(|| session.roles.iter().any(|role| role == "harbourmaster"))
    }
}

/// A query for the number of ships and their load. The server computes it again when a ship changes.
#[derive(Debug)]
struct LoadQuery;

impl ProgrammaticQuery for LoadQuery {
    fn buckets(&self) -> Vec<String> {
        vec!["ships".to_owned()]
    }

    fn compute(&self, view: &View<'_>, _params: &Map<String, Json>) -> Result<Json, RequestError> {
        let QueryOutput::Records(ships) = view.query(&json!({"bucket": "ships"}))? else { return Ok(Json::Null) };
        let tons = ships.iter().filter_map(|ship| ship["tons"].as_u64()).sum();
        Ok(json!(Load { ships: ships.len(), tons }))
    }
}

/// Runs a day in the harbour, as the pilot sees it.
pub(crate) async fn run(mut show: impl FnMut(String)) -> Result<()> {
    let server = open().await?;
    let pilot = server.client(None);
    let session: Json = pilot.request("auth.login", json!({"token": "badge-17"})).await?;
    show(format!("logged in as {}", session["userId"]));
    let mut load = pilot.subscribe::<Load>(json!({"query": "load"})).await?;
    for (name, tons) in [("Ida", 40), ("Jette", 72)] {
        pilot.insert::<Ship>("ships", Ship { name: name.to_owned(), tons }).await?;
        let push = load.next().await?;
        if let Some(Load { ships, tons }) = push.data {
            show(format!("after {name}: {ships} ships, {tons} tons"));
        }
    }
    if let Err(refused) = pilot.request::<Json>("store.clear", json!({"bucket": "ships"})).await {
        show(refused.to_string());
    }
    server.stop(Duration::from_secs(5)).await;
    if let Err(ended) = load.next().await {
        show(ended.to_string());
    }
    Ok(())
}
