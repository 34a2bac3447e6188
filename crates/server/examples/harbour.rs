//! A harbour that is a program of its own: it knows whose badge is whose, decides what is not in any rule, and answers a query in
//! code. A pilot logs in, follows that query, and reports ships.
//!
//! ```sh
//! cargo run -p tidewire --example harbour
//! ```

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Map, Value as Json, json};
use tidewire::{
    Auth, PermissionCheck, ProgrammaticQuery, RequestError, Server, ServerOptions, Session, TokenValidator, Validation,
    View,
};
use tidewire_store::{Answer, Store, StoreOptions};
use tokio::net::TcpStream;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

#[tokio::main]
async fn main() -> Result<()> {
    run(|line| println!("{line}")).await
}

/// The host: a store, its own auth and query, and a server over them.
async fn open() -> Result<Server> {
    let store = Store::memory(StoreOptions::default());
    let schema = json!({"name": {"type": "string"}, "tons": {"type": "number", "min": 0}});
    store.define_bucket("ships", json!({"key": "name", "schema": schema})).await?;

    let mut auth = Auth::new(Arc::new(Badges));
    auth.check = Some(Arc::new(Harbourmaster));
    let mut options = ServerOptions::default();
    options.port = 0;
    options.auth = Some(auth);
    options.queries.insert("load".to_owned(), Arc::new(Load));
    Ok(Server::start(store, options).await?)
}

/// Knows whose badge it is. Yours asks a database: it may take its time.
struct Badges;

impl TokenValidator for Badges {
    fn validate<'a>(&'a self, token: &'a str, _now: u64) -> Validation<'a> {
        Box::pin(async move { Ok((token == "badge-17").then(|| Session::new("mara", ["pilot"]))) })
    }
}

/// Decides what nobody but the harbourmaster may do, and leaves the rest to the rules, of which there are none here.
struct Harbourmaster;

impl PermissionCheck for Harbourmaster {
    fn check(&self, session: &Session, operation: &str, _resource: &str) -> Option<bool> {
        (operation == "store.clear").then(|| session.roles.iter().any(|role| role == "harbourmaster"))
    }
}

/// How many ships there are, and what they carry. It is asked again whenever a ship has changed.
#[derive(Debug)]
struct Load;

impl ProgrammaticQuery for Load {
    fn buckets(&self) -> Vec<String> {
        vec!["ships".to_owned()]
    }

    fn answer(&self, view: &View<'_>, _params: &Map<String, Json>) -> Result<Json, RequestError> {
        let Answer::Records(ships) = view.query(&json!({"bucket": "ships"}))? else { return Ok(Json::Null) };
        let tons: u64 = ships.iter().filter_map(|ship| ship["tons"].as_u64()).sum();
        Ok(json!({"ships": ships.len(), "tons": tons}))
    }
}

/// A day in the harbour, as the pilot sees it.
pub(crate) async fn run(mut show: impl FnMut(String)) -> Result<()> {
    let server = open().await?;
    let mut pilot = Client::connect(&server.url()).await?;
    let session = pilot.ask(json!({"type": "auth.login", "token": "badge-17"})).await?;
    show(format!("logged in as {}", session["userId"]));
    let subscribed = pilot.ask(json!({"type": "store.subscribe", "query": "load"})).await?;
    show(format!("at first: {}", subscribed["data"]));

    for (name, tons) in [("Ida", 40), ("Jette", 72)] {
        pilot.ask(json!({"type": "store.insert", "bucket": "ships", "data": {"name": name, "tons": tons}})).await?;
        let push = pilot.receive().await?;
        show(format!("after {name}: {}", push["data"]));
    }
    if let Err(refused) = pilot.ask(json!({"type": "store.clear", "bucket": "ships"})).await {
        show(refused.to_string());
    }

    // It tells all who are there, and waits until they have left, or for five seconds.
    let stopping = tokio::spawn(server.stop(Duration::from_secs(5)));
    let notice = pilot.receive().await?;
    show(format!("the harbour closes in {} ms", notice["gracePeriodMs"]));
    drop(pilot);
    Ok(stopping.await?)
}

/// A client as small as it can be: one request at a time, each message a JSON object.
struct Client(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Client {
    async fn connect(url: &str) -> Result<Self> {
        let mut client = Self(connect_async(url).await?.0);
        let welcome = client.receive().await?;
        if welcome["type"] == "welcome" { Ok(client) } else { bail!("no welcome: {welcome}") }
    }

    /// The data of the reply.
    async fn ask(&mut self, mut request: Json) -> Result<Json> {
        request["id"] = json!(1);
        self.0.send(Message::text(request.to_string())).await?;
        let mut reply = self.receive().await?;
        if reply["type"] == "result" { Ok(reply["data"].take()) } else { bail!("refused: {reply}") }
    }

    async fn receive(&mut self) -> Result<Json> {
        let message = self.0.next().await.context("the server has left")??;
        Ok(serde_json::from_str(message.to_text()?)?)
    }
}
