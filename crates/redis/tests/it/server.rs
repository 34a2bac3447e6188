//! All types of a real server, in both protocols.

use std::io::{Read, Write};
use std::net::TcpStream;

use bytes::BytesMut;
use tidewire_redis::Value;
use tidewire_redis::resp::{Decoder, DecoderOptions, Message, encode_command};
use tidewire_testkit::{PATIENCE, RedisServer};

struct Conversation {
    stream: TcpStream,
    decoder: Decoder,
    input: BytesMut,
}

impl Conversation {
    fn with(server: &RedisServer, options: DecoderOptions) -> Self {
        let stream = TcpStream::connect(server.addr()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, decoder: Decoder::new(options), input: BytesMut::new() }
    }

    fn next(&mut self) -> Message {
        loop {
            if let Some(message) = self.decoder.decode(&mut self.input).unwrap() {
                return message;
            }
            // A few bytes at a time, so that everything is split somewhere.
            let mut piece = [0; 7];
            let n = self.stream.read(&mut piece).unwrap();
            assert!(n > 0, "the server has gone");
            self.input.extend_from_slice(&piece[..n]);
        }
    }

    fn ask(&mut self, command: &str) -> Value {
        let mut output = Vec::new();
        encode_command(&command.split(' ').collect::<Vec<_>>(), &mut output);
        self.stream.write_all(&output).unwrap();
        match self.next() {
            Message::Reply(value) => value,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn all_types_of_a_real_server_are_decoded() {
    let server = RedisServer::options().config("enable-debug-command yes").start();
    let options = DecoderOptions::default().keep_attributes(true);
    let mut redis = Conversation::with(&server, options);
    let items = |of: fn(i64) -> Value| (0..3).map(of).collect::<Vec<_>>();

    let Value::Array(hello) = redis.ask("HELLO 2") else { panic!("RESP2 has no maps") };
    assert!(hello.contains(&"proto".into()), "{hello:?}");
    assert_eq!(redis.ask("DEBUG PROTOCOL null"), Value::Null);
    assert_eq!(redis.ask("BLPOP nothing 0.01"), Value::Null);
    assert_eq!(redis.ask("DEBUG PROTOCOL set"), Value::Array(items(Value::Integer)));

    let Value::Map(hello) = redis.ask("HELLO 3") else { panic!("RESP3 has maps") };
    assert!(hello.contains(&("proto".into(), 3.into())), "{hello:?}");
    assert_eq!(redis.ask("DEBUG PROTOCOL string"), "Hello World".into());
    assert_eq!(redis.ask("DEBUG PROTOCOL integer"), 12345.into());
    assert_eq!(redis.ask("DEBUG PROTOCOL double"), Value::Double("3.141".parse().unwrap()));
    assert_eq!(redis.ask("DEBUG PROTOCOL null"), Value::Null);
    assert_eq!(redis.ask("DEBUG PROTOCOL array"), Value::Array(items(Value::Integer)));
    assert_eq!(redis.ask("DEBUG PROTOCOL set"), Value::Set(items(Value::Integer)));
    let map = (0..3).map(|n| (n.into(), Value::Boolean(n == 1))).collect();
    assert_eq!(redis.ask("DEBUG PROTOCOL map"), Value::Map(map));
    assert_eq!(redis.ask("DEBUG PROTOCOL true"), Value::Boolean(true));
    assert_eq!(redis.ask("DEBUG PROTOCOL false"), Value::Boolean(false));
    let digits = "1234567999999999999999999999999999999";
    assert_eq!(redis.ask("DEBUG PROTOCOL bignum"), Value::BigNumber(digits.into()));
    let verbatim = Value::Verbatim(*b"txt", "This is a verbatim\nstring".into());
    assert_eq!(redis.ask("DEBUG PROTOCOL verbatim"), verbatim);
    let Value::Attributed(attributed) = redis.ask("DEBUG PROTOCOL attrib") else { panic!("it has attributes") };
    assert_eq!(attributed.attributes.len(), 1);
    assert_eq!(attributed.value.as_bytes().map(|bytes| &bytes[..5]), Some(&b"Some "[..]));
    let error = redis.ask("NONSENSE");
    assert!(error.as_error().is_some_and(|text| text.starts_with(b"ERR unknown command")), "{error:?}");
    assert_eq!(redis.ask("ZADD z inf a -inf b 1.5e300 c"), 3.into());
    let scores = [("b", f64::NEG_INFINITY), ("c", 1.5e300), ("a", f64::INFINITY)];
    let scores = scores.map(|(member, score)| Value::Array(vec![member.into(), Value::Double(score)])).to_vec();
    assert_eq!(redis.ask("ZRANGE z 0 -1 WITHSCORES"), Value::Array(scores));
}

#[test]
fn real_push_is_decoded_between_replies() {
    let server = RedisServer::start();
    let mut redis = Conversation::with(&server, DecoderOptions::default());
    redis.ask("HELLO 3");
    assert_eq!(redis.ask("CLIENT TRACKING on"), Value::Simple("OK".into()));
    assert_eq!(redis.ask("GET tide"), Value::Null);
    server.cli(["SET", "tide", "high"]);
    let invalidated = vec!["invalidate".into(), Value::Array(vec!["tide".into()])];
    assert_eq!(redis.next(), Message::Push(invalidated));
    assert_eq!(redis.ask("GET tide"), "high".into());
}
