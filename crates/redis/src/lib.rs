//! An async client for Redis and Valkey.
//!
//! ```
//! use tidewire_redis::{Client, Options};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let url = "redis://127.0.0.1:6379";
//! #   let redis = tidewire_testkit::RedisServer::start();
//! #   let url = &format!("redis://{}", redis.addr());
//!     let client = Client::connect(Options::from_url(url)?).await?;
//!
//!     client.set("greeting", "hello").await?;
//!     let greeting: Option<String> = client.get("greeting").await?;
//!     assert_eq!(greeting.as_deref(), Some("hello"));
//!
//!     let visits = client.incr("visits").await?;
//!     assert_eq!(visits, 1);
//!     Ok(())
//! }
//! ```
//!
//! All tasks share the connection of a [`Client`]: clone it freely. Requests that are sent at the same time are written together, and
//! each task gets its own reply.
//!
//! - **At most once.** A request that may have reached the server is never sent again. Every [`Error`] says whether the server may
//!   have executed the command ([`Error::outcome`]).
//! - **Deadlines.** Every request ends within its timeout, also while there is no connection. A blocking command has its own timeout in
//!   addition.
//! - **Reconnects.** A lost connection is replaced, with backoff. [`States`] is a stream of what happens to it.
//! - **Bounds.** Commands and bytes in flight are limited, and so is the size of replies.
//! - **Isolation.** A task that times out or is cancelled does not affect the replies of others. Commands that would are
//!   [found by name](sharing): a blocking one, such as `BLPOP`, is sent over another connection, and one that changes the connection,
//!   such as `SELECT`, is rejected.
//!
//! A program that keeps the task of one connection busy uses a [`ClientSet`]. With the feature `tls`, `rediss://` connects over TLS.
//!
//! # Commands
//!
//! The everyday commands are methods of the client. A [`Request`] is a command and the type of its reply, which is any type that
//! implements [`FromValue`]. The common commands are functions in [`commands`]; [`Command`] builds any other. Commands of a
//! [`Pipeline`] are sent together, those of a [`Transaction`] are also executed together, a [`Script`] is sent by its digest, and
//! structs are hashes with the help of serde ([`Fields`], [`Serde`]).
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use tidewire_redis::{Client, Command, Fields, Options, Pipeline, Script, Serde, commands};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Boat {
//!     name: String,
//!     crew: u8,
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let redis = tidewire_testkit::RedisServer::start();
//! # let client = Client::start(Options::default().address(redis.addr()));
//! // A command that is not in `commands`.
//! client.send(commands::set("tide", "high")).await?;
//! let length: u64 = client.send(Command::new("STRLEN").arg("tide").returning()).await?;
//! assert_eq!(length, 4);
//!
//! // A struct as a hash.
//! let tern = Boat { name: "Tern".into(), crew: 3 };
//! client.send(commands::hset("boat:1", Fields::of(&tern)?)).await?;
//! let Serde(boat) = client.send(commands::hgetall("boat:1").returning::<Serde<Option<Boat>>>()).await?;
//! assert_eq!(boat, Some(tern));
//!
//! // A pipeline, with a result for each command.
//! let pipeline = Pipeline::new().then(commands::incr("visits")).then(commands::key_type("tide"));
//! let (visits, kind) = client.pipeline(pipeline).await?;
//! assert_eq!((visits?, &*kind?), (1, "string"));
//!
//! // A script.
//! let double = Script::new("return 2 * ARGV[1]").returning::<i64>().arg(21);
//! assert_eq!(client.invoke(&double).await?, 42);
//! # Ok(())
//! # }
//! ```
//!
//! # Pub/sub
//!
//! [`Client::subscribe`] returns a stream of messages, which survives reconnects: see [`pubsub`].
//!
//! # Streams
//!
//! A [`stream::Worker`] handles the entries of streams as a consumer of a group, at least once.
//!
//! # Without I/O
//!
//! [`resp`] has the codec, for servers and for other clients: a decoder and an encoder of RESP3 and RESP2.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod buffer;
pub mod cache;
mod client;
mod command;
pub mod commands;
mod connection;
mod convert;
pub mod credentials;
mod driver;
mod error;
mod everyday;
mod exclusive;
mod fields;
mod health;
pub mod observe;
mod options;
mod pipeline;
pub mod pubsub;
mod request;
pub mod resp;
mod rotation;
mod script;
mod set;
pub mod sharing;
pub mod stream;
mod sync;
mod tasks;
#[cfg(feature = "tls")]
pub mod tls;
mod transaction;
mod url;
mod watch;

pub use client::Client;
pub use command::{Command, CommandError, ToArgument, ToPair};
pub use connection::{ConnectionState, States, Status};
pub use convert::{FromValue, Ignore, Serde};
pub use driver::Connection;
pub use error::{ConnectionError, ConversionError, Error, ErrorCode, RequestOutcome, RequestPhase, ServerError};
pub use exclusive::{UnclaimedHook, UnclaimedReply};
pub use fields::Fields;
pub use options::{Address, Login, Options, WhenFull, WhileDown};
pub use pipeline::{Append, Pipeline, ReplyTypes};
pub use request::Request;
pub use resp::value::Value;
pub use script::{Invocation, Script};
pub use set::{ClientSet, ClientSetOptions};
pub use transaction::{Transaction, TransactionError};
pub use url::UrlError;
pub use watch::{WatchOptions, WatchedConnection};

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/redis.md")]
struct Manual;
