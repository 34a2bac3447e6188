//! A realtime backend. Applications define buckets of JSON records, clients subscribe to live queries over WebSocket, and every commit
//! reaches every subscriber whose result it changes.
//!
//! This is the library behind the program `tidewire`. A [`Server`] serves a [`Store`](tidewire_store::Store) until it is stopped, with the
//! settings of [`ServerOptions`]. The embedding program can use an in-process [`Client`], validate tokens and check permissions ([`auth`]),
//! and implement queries in code ([`ProgrammaticQuery`]).
//!
//! ```
//! use std::time::Duration;
//! use serde_json::{Value, json};
//! use tidewire::{Server, ServerOptions};
//! use tidewire_store::{Store, StoreOptions};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Store::memory(StoreOptions::default());
//! store.define_bucket("tides", json!({"key": "id", "schema": {"id": {"type": "string"}}})).await?;
//! let server = Server::start(store, ServerOptions::default().port(0)).await?;
//! println!("listening on {}", server.url());
//!
//! // A client in this process. Others connect to the URL.
//! let client = server.client(None);
//! let mut tides = client.subscribe::<Vec<Value>>(json!({"config": {"bucket": "tides"}})).await?;
//! client.insert::<Value>("tides", json!({"id": "Brest", "metres": 4.2})).await?;
//! let push = tides.next().await?;
//! assert_eq!(push.data.unwrap()[0]["metres"], 4.2);
//!
//! server.stop(Duration::from_secs(5)).await;
//! # Ok(()) }
//! ```

pub mod auth;
mod client;
pub mod config;
mod machine;
mod metrics;
mod network;
mod ops;
mod options;
mod protocol;
mod push;
mod revoked_users;
mod server;
mod session;
mod state;
mod transport;
mod work;

pub use client::{Client, ClientPush, ClientSubscription};
pub use metrics::ServerStats;
pub use network::{Network, NetworkError};
pub use options::{Backpressure, ConnectionLimits, Heartbeat, Memory, RateLimit, ServerOptions, TlsFiles};
pub use protocol::disconnect::Disconnect;
pub use protocol::error::{Code, RequestError};
pub use push::programmatic::ProgrammaticQuery;
pub use push::view::View;
pub use server::{ReloadError, Server, StartError};
pub use session::connection::ConnectionInfo;
pub use session::explanation::Explanation;

/// Runs the examples of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/embed.md")]
mod guide {}
