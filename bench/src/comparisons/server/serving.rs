//! The server itself, over a store with rows.

use std::future;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tidewire::{Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tokio::runtime;

use super::super::conn::allow_files;
use super::process::Served;
use super::row::{self, BUCKET, QUERY};
use crate::role::Role;

pub(super) const ROLE: Role = Role { name: "server", play };

/// How many rows go into a commit.
const AT_ONCE: u64 = 10_000;

/// Starts it with so many rows and for so many connections, in this folder or in memory.
pub(super) fn start(rows: u64, connections: usize, folder: Option<&Path>) -> Served {
    let folder = folder.map_or("", |folder| folder.to_str().expect("the folder of this program is text"));
    Served::new(ROLE.start(&[rows.to_string(), connections.to_string(), folder.to_owned()]), "listening on ")
}

fn play(arguments: &[String]) {
    let [rows, connections, folder] = arguments else { panic!("the server is told two numbers and a folder") };
    allow_files(connections.parse().expect("a number of connections"));
    let store = open(folder);
    define(&store);
    fill(&store, rows.parse().expect("a number of rows"));
    // What a server has where there is one core.
    let runtime =
        runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        let mut options = ServerOptions::default();
        options.port = 0;
        // Nobody answers pings here.
        options.heartbeat.interval = Duration::from_hours(1);
        let server = Server::start(store, options).await.expect("the server starts");
        println!("listening on {}", server.address());
        future::pending::<()>().await;
    });
}

/// Opens the store in this folder, or one in memory if it has no name.
pub(super) fn open(folder: &str) -> Store {
    let options = StoreOptions::default();
    if folder.is_empty() { Store::memory(options) } else { Store::open(folder, options).expect("the store opens").0 }
}

pub(super) fn define(store: &Store) {
    let number = json!({"type": "number"});
    let schema = json!({"id": number, "count": number, "text": {"type": "string"}});
    store.define_bucket(BUCKET, json!({"key": "id", "schema": schema})).wait().expect("a bucket can be defined");
    let query = json!({"bucket": BUCKET, "filter": {"id": "{{ params.id }}"}});
    store.define_query(QUERY, query).wait().expect("a query can be defined");
}

fn fill(store: &Store, rows: u64) {
    for first in (0..rows).step_by(usize::try_from(AT_ONCE).expect("64 bits")) {
        let some = (first..rows.min(first + AT_ONCE)).map(row::record).collect();
        store.insert_many(BUCKET, some).wait().expect("rows are stored");
    }
}
