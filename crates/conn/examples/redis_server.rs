//! A custom codec: a small RESP server for `redis-cli` and `redis-benchmark`, with strings and channels.
//!
//! `cargo run -p tidewire-conn --example redis_server -- 127.0.0.1:7379` serves until Ctrl-C.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use tidewire_conn::codec::{Batch, Codec};
use tidewire_conn::{
    ConnectionContext, ConnectionId, FrameLike, Protocol, PushHandle, PushPolicy, PushPriority, Reply, ServiceOrder,
    Shutdown, Supervisor,
};
use tidewire_redis::Value;
use tidewire_redis::resp::{DecodeError, Decoder, Message, Version};
use tokio::net::TcpListener;

/// A command, a reply, or a message of a channel.
pub(crate) struct RespFrame(Message);

impl FrameLike for RespFrame {
    fn size(&self) -> usize {
        let (Message::Push(parts) | Message::Reply(Value::Array(parts))) = &self.0 else { return 16 };
        parts.iter().filter_map(Value::as_bytes).map(Bytes::len).sum::<usize>() + 16
    }
}

/// The codec of a RESP server, in the version that the client has selected.
pub(crate) struct Resp {
    decoder: Decoder,
    version: Version,
    output: BytesMut,
}

impl Codec for Resp {
    type Frame = RespFrame;
    type Error = DecodeError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<RespFrame>, DecodeError> {
        let message = self.decoder.decode(input)?;
        if let Some([hello, version, ..]) = message.as_ref().map(words).as_deref()
            && hello.eq_ignore_ascii_case(b"HELLO")
        {
            self.version = if version == "3" { Version::Resp3 } else { Version::Resp2 };
        }
        Ok(message.map(RespFrame))
    }

    fn finish(&mut self, input: &BytesMut) -> Result<(), DecodeError> {
        self.decoder.finish(input)
    }

    fn encode(&mut self, frame: &RespFrame, output: &mut Batch) -> Result<(), DecodeError> {
        self.output.clear();
        // All messages of this server can be encoded in both versions.
        let _ = frame.0.encode(self.version, &mut self.output);
        output.put(&self.output);
        Ok(())
    }

    fn has_partial_frame(&self, input: &BytesMut) -> bool {
        self.decoder.is_midway(input)
    }
}

/// Returns the words of a command. The vector is empty if the message is not a command.
fn words(message: &Message) -> Vec<Bytes> {
    let Message::Reply(Value::Array(words)) = message else { return Vec::new() };
    words.iter().filter_map(Value::as_bytes).cloned().collect()
}

/// Strings by key, and subscribers by channel.
#[derive(Default)]
pub(crate) struct Store {
    strings: Mutex<HashMap<Bytes, Bytes>>,
    channels: Mutex<BTreeMap<Bytes, BTreeMap<ConnectionId, PushHandle<RespFrame>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn integer(count: usize) -> Value {
    Value::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

fn error(text: &'static str) -> Value {
    Value::SimpleError(Bytes::from_static(text.as_bytes()))
}

fn ok() -> Value {
    Value::Simple(Bytes::from_static(b"OK"))
}

impl Store {
    /// Executes a command, and returns its replies.
    fn execute(&self, command: &[Bytes], context: &ConnectionContext<RespFrame>) -> Vec<Message> {
        let Some((name, arguments)) = command.split_first() else {
            return vec![Message::Reply(error("ERR a command is an array of strings"))];
        };
        let value = match (&*name.to_ascii_uppercase(), arguments) {
            (b"PING", []) => Value::Simple(Bytes::from_static(b"PONG")),
            (b"PING" | b"ECHO", [text]) => Value::Bulk(text.clone()),
            (b"GET", [key]) => lock(&self.strings).get(key).map_or(Value::Null, |text| Value::Bulk(text.clone())),
            (b"SET", [key, text]) => {
                // A slice of the input would keep the whole read buffer in memory.
                let (key, text) = (Bytes::copy_from_slice(key), Bytes::copy_from_slice(text));
                lock(&self.strings).insert(key, text);
                ok()
            }
            (b"DEL", keys) => {
                let mut strings = lock(&self.strings);
                integer(keys.iter().filter(|key| strings.remove(*key).is_some()).count())
            }
            (b"SUBSCRIBE", channels) => return self.subscribe(channels, context),
            (b"PUBLISH", [channel, text]) => integer(self.publish(channel, text)),
            (b"HELLO", _) => Value::Map(vec![(Value::from("server"), Value::from("tidewire-conn"))]),
            (b"SELECT" | b"CLIENT", _) => ok(),
            // redis-benchmark and redis-cli send these at startup, and an empty reply is enough.
            (b"CONFIG" | b"COMMAND", _) => Value::Array(Vec::new()),
            _ => error("ERR unknown command or wrong number of arguments"),
        };
        vec![Message::Reply(value)]
    }

    fn subscribe(&self, channels: &[Bytes], context: &ConnectionContext<RespFrame>) -> Vec<Message> {
        let Some(handle) = context.data.as_ref().and_then(|data| data.downcast_ref::<PushHandle<RespFrame>>()) else {
            return vec![Message::Reply(error("ERR the connection is about to end"))];
        };
        let mut known = lock(&self.channels);
        let subscribed = channels.iter().enumerate().map(|(index, channel)| {
            let channel = Bytes::copy_from_slice(channel);
            known.entry(channel.clone()).or_default().insert(context.id(), handle.clone());
            Message::Push(vec![Value::from("subscribe"), Value::Bulk(channel), integer(index + 1)])
        });
        subscribed.collect()
    }

    /// Pushes a text to all subscribers. The push is dropped for a subscriber that does not read. Returns the number of subscribers.
    fn publish(&self, channel: &Bytes, text: &Bytes) -> usize {
        let subscribers: Vec<_> =
            lock(&self.channels).get(channel).into_iter().flatten().map(|(_, handle)| handle.clone()).collect();
        let message = || vec![Value::from("message"), Value::Bulk(channel.clone()), Value::Bulk(text.clone())];
        let push = |handle: &PushHandle<RespFrame>| {
            handle.try_push(RespFrame(Message::Push(message())), PushPriority::Low, PushPolicy::DropIfFull).is_ok()
        };
        subscribers.iter().filter(|handle| push(handle)).count()
    }
}

impl Protocol for Store {
    type Frame = RespFrame;
    type Codec = Resp;
    type ProtocolError = Infallible;

    const ORDER: ServiceOrder = ServiceOrder::RepliesFirst;

    fn codec(&self) -> Resp {
        Resp { decoder: Decoder::default(), version: Version::Resp2, output: BytesMut::new() }
    }

    fn on_connection_setup(&self, handle: PushHandle<RespFrame>, context: &mut ConnectionContext<RespFrame>) {
        context.data = Some(Box::new(handle));
    }

    fn on_frame(&self, command: RespFrame, context: &mut ConnectionContext<RespFrame>) -> Reply<RespFrame, Infallible> {
        Reply::Frames(self.execute(&words(&command.0), context).into_iter().map(RespFrame).collect())
    }

    fn on_connection_closed(&self, _: &tidewire_conn::CloseReason<Self>, context: &mut ConnectionContext<RespFrame>) {
        lock(&self.channels).retain(|_, subscribers| {
            subscribers.remove(&context.id());
            !subscribers.is_empty()
        });
    }
}

/// Serves until the future completes.
pub(crate) async fn serve(listener: TcpListener, until: impl Future<Output = ()>) -> std::io::Result<()> {
    let server = Supervisor::builder(Store::default()).build();
    let serving = server.serve(listener);
    tokio::select! {
        served = serving => served,
        () = until => {
            server.shutdown(Shutdown::default()).await;
            Ok(())
        }
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7379".to_owned());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on {}", listener.local_addr()?);
    serve(listener, async { drop(tokio::signal::ctrl_c().await) }).await
}
