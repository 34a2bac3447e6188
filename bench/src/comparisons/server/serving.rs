//! The server `tidewire` with a filled store. It logs as the program does by default, so that the cost of spans and log lines is
//! included.

use std::fs::OpenOptions;
use std::future;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::{Heartbeat, Server, ServerOptions};
use tidewire_store::{Store, StoreOptions};
use tokio::runtime;
use tracing_subscriber::EnvFilter;

use super::super::conn::raise_file_limit;
use super::archive;
use super::process::ServerProcess;
use super::row::{self, BUCKET, QUERY};
use crate::role::Role;

pub(super) const ROLE: Role = Role { name: "server", run };

/// Rows per commit while the store is filled: few enough for the limit of 4 MiB per write.
const ROWS_PER_COMMIT: u64 = 2500;

/// Starts a server with this number of rows, for this number of connections. Without a folder the store is in memory.
pub(super) fn start(rows: u64, connections: usize, folder: Option<&Path>) -> ServerProcess {
    start_with_archive(rows, 0, connections, folder)
}

/// Starts a server that also has an [archive](archive) of this number of records.
pub(super) fn start_with_archive(rows: u64, records: u64, connections: usize, folder: Option<&Path>) -> ServerProcess {
    let folder = folder.map_or("", |folder| folder.to_str().expect("the path is valid UTF-8"));
    let arguments = [rows.to_string(), records.to_string(), connections.to_string(), folder.to_owned()];
    ServerProcess::new(ROLE.start(&arguments), "listening on ")
}

fn run(arguments: &[String]) {
    let [rows, records, connections, folder] = arguments else { panic!("expected three numbers and a folder") };
    start_logging();
    raise_file_limit(connections.parse().expect("a number of connections"));
    let store = open(folder);
    define(&store);
    fill(&store, BUCKET, rows.parse().expect("a number of rows"), row::record);
    let records = records.parse().expect("a number of records");
    if records > 0 {
        archive::define(&store);
        fill(&store, archive::BUCKET, records, archive::record);
    }
    // One worker, as the server has on a machine with one core.
    let runtime =
        runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        // The clients do not answer pings.
        let heartbeat = Heartbeat::default().interval(Duration::from_hours(1));
        let options = ServerOptions::default().port(0).heartbeat(heartbeat);
        let server = Server::start(store, options).await.expect("the server starts");
        println!("listening on {}", server.address());
        future::pending::<()>().await;
    });
}

/// Installs the log subscriber that `tidewire` uses without `RUST_LOG` if its standard error is not a terminal: JSON, from level info.
/// The lines go to /dev/null, with one write each under a lock, as with standard error.
fn start_logging() {
    let null = OpenOptions::new().write(true).open("/dev/null").expect("/dev/null can be written");
    let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new("info")).with_writer(Mutex::new(null));
    log.json().flatten_event(true).init();
}

/// Opens the store in this folder, or in memory if the name is empty.
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

fn fill(store: &Store, bucket: &str, rows: u64, record: fn(u64) -> Map<String, Json>) {
    for first in (0..rows).step_by(usize::try_from(ROWS_PER_COMMIT).expect("64 bits")) {
        let some = (first..rows.min(first + ROWS_PER_COMMIT)).map(record);
        store.insert_many(bucket, some).wait().expect("rows are stored");
    }
}
