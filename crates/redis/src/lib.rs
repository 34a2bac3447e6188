//! A client of Redis and Valkey.
//!
//! A [`Client`] has one connection, which any number of tasks share: requests that are sent at the same time are written
//! together, and each task gets its own reply. A lost connection is replaced, and nothing is ever sent twice: an [`Error`] says
//! whether the server may have executed the command. A task that gives up does not affect the replies of others, and every
//! request has a deadline.
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use tidewire_redis::{Client, Command, Fields, Options, Pipeline, Script, Serde, commands};
//!
//! # let redis = tidewire_testkit::RedisServer::start();
//! # let url = format!("redis://{}", redis.addr());
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let client = Client::start(Options::from_url(&url)?);
//!
//! // One command, one type.
//! client.send(commands::set("tide", "high")).await?;
//! let tide = client.send(commands::get("tide").returning::<Option<String>>()).await?;
//! assert_eq!(tide.as_deref(), Some("high"));
//!
//! // Any command, by hand.
//! let length: i64 = client.send(Command::new("STRLEN").arg("tide").returning()).await?;
//! assert_eq!(length, 4);
//!
//! // A struct, by serde.
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Boat {
//!     name: String,
//!     crew: u8,
//! }
//! let tern = Boat { name: "Tern".into(), crew: 3 };
//! client.send(commands::hset("boat:1", Fields::of(&tern)?)).await?;
//! let Serde(boat) = client.send(commands::hgetall("boat:1").returning::<Serde<Option<Boat>>>()).await?;
//! assert_eq!(boat, Some(tern));
//!
//! // Several at once, with a result for each.
//! let (count, kind) = client.pipeline(Pipeline::new().then(commands::incr("visits")).then(commands::key_type("tide"))).await?;
//! assert_eq!((count?, &*kind?), (1, "string"));
//!
//! // A script, sent as a whole only if the server does not have it.
//! let double = Script::new("return 2 * ARGV[1]").returning::<i64>().arg(21);
//! assert_eq!(client.invoke(&double).await?, 42);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Request`] is a command and the type of its reply, by [`FromValue`]. The common commands are in [`commands`], any other is
//! built with [`Command`]. The states of the connection are a stream, [`States`].
//!
//! The parts without I/O are public as well, for servers and for other clients: a [`Decoder`] takes replies and pushes from the
//! front of the input, however it is split, and [`encode_command`] writes commands.

mod buffer;
mod client;
mod command;
pub mod commands;
mod connection;
mod convert;
mod credentials;
mod error;
mod fields;
mod observe;
mod options;
mod pipeline;
mod request;
mod resp;
mod script;
mod sharing;
mod slow;
mod stats;
mod sync;
mod url;

pub use client::Client;
pub use command::{Command, CommandError, ToArgument, ToPair};
pub use connection::{Connection, State, States, Status};
pub use convert::{FromValue, Ignore, Serde};
pub use credentials::{Credentials, LoginError, LoginFuture};
pub use error::{ConversionError, Error, ErrorCode, Fault, Outcome, Phase, ServerError};
pub use fields::Fields;
pub use options::{Address, Login, Options, WhenFull, WhileDown};
pub use pipeline::{Append, Pipeline, Slots};
pub use request::Request;
pub(crate) use request::read_reply;
pub use resp::{
    Attributed, DecodeError, DecodeErrorKind, Decoder, DecoderOptions, EncodeError, Message, Output, Value, Version,
    encode_command,
};
pub use script::{Invocation, Script};
pub use sharing::{Harm, NotShared};
pub use slow::{Slow, SlowCommand};
pub use stats::{ClientStats, Latency, TimeoutStats};
pub use url::UrlError;
