//! Invalid input. It affects at most its own connection.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};
use tidewire::Server;
use tidewire::auth::Auth;
use tidewire_testkit::{PATIENCE, wait_until_async};

use crate::client::{Client, RoleTokens, options, serve, wait_for_connections};
use crate::raw_client::{CLOSE, RawClient, TEXT, frame};

/// Another connection, which invalid input must not affect.
struct Bystander(Client);

impl Bystander {
    async fn new(server: &Server) -> Self {
        let mut client = Client::connect(server).await;
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
        client.call("store.defineBucket", json!({"name": "b", "config": config})).await;
        client.call("store.subscribe", json!({"config": {"bucket": "b"}})).await;
        Self(client)
    }

    /// Asserts that it is served and receives pushes, and that it is the only connection left.
    async fn assert_unaffected(&mut self, server: &Server) {
        self.0.call("store.insert", json!({"bucket": "b", "data": {"id": "here"}})).await;
        assert_eq!(self.0.push().await["data"][0]["id"], "here");
        self.0.call("store.delete", json!({"bucket": "b", "key": "here"})).await;
        assert_eq!(self.0.push().await["data"], json!([]));
        wait_for_connections(server, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn protocol_violations_close_the_connection_with_their_code() {
    let server = serve(options()).await;
    let mut bystander = Bystander::new(&server).await;
    let long_control = frame(0x89, &[b'x'; 126]);
    let text = br#"{"id":1,"type":"store.buckets"}"#;
    let mut unmasked = vec![TEXT, u8::try_from(text.len()).unwrap()];
    unmasked.extend_from_slice(text);
    let continued_twice = [frame(0x01, b"{"), frame(TEXT, b"}")].concat();
    let many: Vec<u8> =
        std::iter::once(frame(0x01, b"x")).chain((0..1024).map(|_| frame(0x00, b"x"))).flatten().collect();
    let split_text = [frame(0x01, b"\xe6\xbd"), frame(0x80, b"x")].concat();
    for (violation, bytes, code) in [
        ("reserved bit 1", frame(0xc1, text), 1002),
        ("reserved bit 2", frame(0xa1, text), 1002),
        ("reserved bit 3", frame(0x91, text), 1002),
        ("no mask", unmasked, 1002),
        ("an unknown opcode", frame(0x83, text), 1002),
        ("an unknown control opcode", frame(0x8b, b""), 1002),
        ("a fragmented ping", frame(0x09, b"x"), 1002),
        ("a fragmented close", frame(0x08, b""), 1002),
        ("a long ping", long_control, 1002),
        ("a continuation without a message", frame(0x80, text), 1002),
        ("a message within another", continued_twice, 1002),
        ("a length that is not minimal", vec![TEXT, 0xfe, 0, 5, 1, 2, 3, 4], 1002),
        ("a length with its highest bit set", vec![TEXT, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4], 1002),
        ("an enormous length", vec![TEXT, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4], 1009),
        ("too many fragments", many, 1009),
        ("invalid UTF-8", frame(TEXT, b"{\"id\":1,\"type\":\"\xff\"}"), 1007),
        ("a surrogate in UTF-8", frame(TEXT, b"\xed\xa0\x80"), 1007),
        ("half a character", frame(TEXT, b"\"\xe6\xbd"), 1007),
        ("half a character in a fragment", split_text, 1007),
        ("a close of one byte", frame(CLOSE, &[3]), 1002),
        ("a close with 999", frame(CLOSE, &999_u16.to_be_bytes()), 1002),
        ("a close with 1005", frame(CLOSE, &1005_u16.to_be_bytes()), 1002),
        ("a close with 1006", frame(CLOSE, &1006_u16.to_be_bytes()), 1002),
        ("a close with 5000", frame(CLOSE, &5000_u16.to_be_bytes()), 1002),
        ("a close with an invalid UTF-8 reason", frame(CLOSE, &[0x03, 0xe8, 0xff]), 1007),
        ("a close with 3000", frame(CLOSE, &3000_u16.to_be_bytes()), 3000),
        ("a close with 4999", frame(CLOSE, &4999_u16.to_be_bytes()), 4999),
    ] {
        let mut raw = RawClient::websocket(&server).await;
        // The subscription must end with the connection.
        raw.send(r#"{"id":1,"type":"store.subscribe","config":{"bucket":"b"}}"#).await;
        assert_eq!(raw.json().await["type"], "result");
        raw.write(&bytes).await;
        let (closed, reason) = raw.closed().await;
        assert_eq!(closed, code, "{violation}: {reason}");
        bystander.assert_unaffected(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fragments_with_interleaved_pings_are_accepted() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    let text = "{\"id\":1,\"type\":\"潮.汐\"}".as_bytes();
    let mut bytes = frame(0x01, b"");
    for byte in text {
        bytes.extend(frame(0x00, &[*byte]));
        bytes.extend(frame(0x89, b"x"));
    }
    bytes.extend(frame(0x80, b""));
    raw.write(&bytes).await;
    for _ in text {
        assert_eq!(raw.frame().await, Some((10, b"x".to_vec())));
    }
    assert_eq!(raw.json().await["code"], "UNKNOWN_OPERATION");
}

async fn expect(raw: &mut RawClient, text: &str, code: &str) -> Json {
    raw.send(text).await;
    let reply = raw.json().await;
    let got = reply.get("code").and_then(Json::as_str).unwrap_or("result");
    let excerpt: String = text.chars().take(100).collect();
    assert_eq!(got, code, "{excerpt}: {}", reply.to_string().chars().take(300).collect::<String>());
    assert!(!reply.to_string().contains("INTERNAL"));
    reply
}

#[tokio::test(flavor = "multi_thread")]
async fn deeply_nested_or_wide_json_is_rejected_without_harm() {
    let server = serve(options()).await;
    let bystander = Bystander::new(&server).await;
    let mut raw = RawClient::websocket(&server).await;
    let deep = |open: &str, close: &str, depth: usize| format!("{}0{}", open.repeat(depth), close.repeat(depth));
    for (value, code) in [(deep("[", "]", 100_000), "PARSE_ERROR"), (deep("{\"a\":", "}", 100_000), "INVALID_REQUEST")]
    {
        expect(&mut raw, &value, code).await;
        expect(&mut raw, &format!(r#"{{"id":1,"type":"store.buckets","x":{value}}}"#), "result").await;
        expect(&mut raw, &format!(r#"{{"id":{value},"type":"store.buckets"}}"#), "INVALID_REQUEST").await;
        expect(&mut raw, &format!(r#"{{"id":1,"type":{value}}}"#), "INVALID_REQUEST").await;
        for members in [
            format!(r#""type":"store.insert","bucket":"b","data":{{"id":"x","d":{value}}}"#),
            format!(r#""type":"store.insert","bucket":"b","data":{value}"#),
            format!(r#""type":"store.insert","bucket":{value},"data":{{}}"#),
            format!(r#""type":"store.get","bucket":"b","key":{value}"#),
            format!(r#""type":"store.where","bucket":"b","filter":{{"d":{value}}}"#),
            format!(r#""type":"store.subscribe","config":{{"bucket":"b","filter":{value}}}"#),
            format!(r#""type":"store.transaction","operations":{value}"#),
            format!(r#""type":"store.transaction","operations":[{value}]"#),
            format!(r#""type":"store.defineBucket","name":"c","config":{{"key":"id","schema":{value}}}"#),
            format!(r#""type":"store.first","bucket":"b","n":{value}"#),
        ] {
            let reply = expect(&mut raw, &format!("{{\"id\":1,{members}}}"), "VALIDATION_ERROR").await;
            assert_eq!(reply["id"], 1);
        }
    }
    let deep = deep("{\"a\":", "}", 100_000);
    let subscribe = format!(r#"{{"id":1,"type":"store.subscribe","query":"q","params":{deep}}}"#);
    expect(&mut raw, &subscribe, "VALIDATION_ERROR").await;
    // An array that is never closed is also rejected.
    let unclosed = "[".repeat(1 << 20);
    expect(&mut raw, &unclosed, "PARSE_ERROR").await;
    let mut wide = String::from(r#"{"id":1,"type":"store.buckets""#);
    for number in 0.. {
        write!(wide, ",\"{number}\":0").unwrap();
        if wide.len() > (1 << 20) - 100 {
            break;
        }
    }
    wide.push('}');
    expect(&mut raw, &wide, "result").await;
    let wide = wide.replace(r#"{"id":1,"type":"store.buckets""#, r#"{"id":"wide""#);
    let insert = format!(r#"{{"id":1,"type":"store.insert","bucket":"b","data":{wide}}}"#);
    assert!(insert.len() <= 1 << 20);
    raw.send(&insert).await;
    // The store may accept or reject a record of that size, but not with an internal error.
    let reply = raw.json().await;
    assert_ne!(reply["code"], "INTERNAL_ERROR");
    raw.send(r#"{"id":1,"type":"store.clear","bucket":"b"}"#).await;
    raw.json().await;
    drop(raw);
    wait_for_connections(&server, 1).await;
    drop(bystander);
    Bystander(Client::connect(&server).await).0.call("store.count", json!({"bucket": "b"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_out_of_range_and_lone_surrogates_are_rejected() {
    let server = serve(options()).await;
    let mut bystander = Bystander::new(&server).await;
    let mut raw = RawClient::websocket(&server).await;
    let long = "9".repeat(400);
    for number in ["1e999", "-1e999", &long] {
        expect(&mut raw, &format!(r#"{{"id":1,"type":"store.buckets","x":{number}}}"#), "result").await;
        for members in [
            format!(r#""type":"store.insert","bucket":"b","data":{{"id":"x","n":{number}}}"#),
            format!(r#""type":"store.get","bucket":"b","key":{number}"#),
            format!(r#""type":"store.where","bucket":"b","filter":{{"n":{number}}}"#),
            format!(r#""type":"store.first","bucket":"b","n":{number}"#),
            format!(r#""type":"store.paginate","bucket":"b","limit":{number}"#),
            format!(r#""type":"store.update","bucket":"b","key":"x","data":{{}},"version":{number}"#),
        ] {
            expect(&mut raw, &format!("{{\"id\":1,{members}}}"), "VALIDATION_ERROR").await;
        }
        expect(&mut raw, &format!(r#"{{"id":{number},"type":"store.buckets"}}"#), "INVALID_REQUEST").await;
    }
    for lone in [r"\ud800", r"a\udfff", r"\ud800x", r"\ud800\ud800"] {
        expect(&mut raw, &format!(r#"{{"id":1,"type":"store.buckets","x":"{lone}"}}"#), "result").await;
        let reply = expect(&mut raw, &format!(r#"{{"id":1,"type":"{lone}"}}"#), "INVALID_REQUEST").await;
        assert_eq!(reply["id"], 0);
        for members in [
            format!(r#""type":"store.all","bucket":"{lone}""#),
            format!(r#""type":"store.get","bucket":"b","key":"{lone}""#),
            format!(r#""type":"store.insert","bucket":"b","data":{{"id":"x","s":"{lone}"}}"#),
            format!(r#""type":"store.insert","bucket":"b","data":{{"id":"x","{lone}":1}}"#),
            format!(r#""type":"store.where","bucket":"b","filter":{{"{lone}":1}}"#),
            format!(r#""type":"store.subscribe","query":"{lone}""#),
            format!(r#""type":"store.unsubscribe","subscriptionId":"{lone}""#),
        ] {
            let reply = expect(&mut raw, &format!("{{\"id\":1,{members}}}"), "VALIDATION_ERROR").await;
            let message = reply["message"].as_str().unwrap();
            assert!(!message.ends_with("got a string"), "the message must name the error: {message}");
        }
    }
    // Surrogate pairs and U+0000 are valid.
    let data = r#"{"id":"\ud83c\udf0a","zero":"\u0000"}"#;
    let reply =
        expect(&mut raw, &format!(r#"{{"id":1,"type":"store.insert","bucket":"b","data":{data}}}"#), "result").await;
    assert_eq!(reply["data"]["id"], "🌊");
    // Received before the next write, whose result might replace it.
    bystander.0.push().await;
    expect(&mut raw, r#"{"id":1,"type":"store.delete","bucket":"b","key":"🌊"}"#, "result").await;
    bystander.0.push().await;
    drop(raw);
    bystander.assert_unaffected(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn last_of_duplicate_members_wins() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    let reply = expect(&mut raw, r#"{"id":1,"id":2,"type":"x","type":"store.buckets"}"#, "result").await;
    assert_eq!(reply["id"], 2);
    expect(&mut raw, r#"{"id":1,"id":"2","type":"store.buckets"}"#, "INVALID_REQUEST").await;
    expect(&mut raw, r#"{"id":1,"type":"store.buckets","type":7}"#, "INVALID_REQUEST").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_of_wrong_types_are_rejected() {
    let server = serve(options()).await;
    let mut bystander = Bystander::new(&server).await;
    let mut raw = RawClient::websocket(&server).await;
    for value in ["null", "true", "-1", "1.5", "\"\"", "[]", "[[]]", "{\"\":[]}"] {
        for operation in [
            "insert",
            "update",
            "upsert",
            "insertMany",
            "where",
            "findOne",
            "first",
            "last",
            "paginate",
            "sum",
            "avg",
            "min",
            "max",
            "subscribe",
            "unsubscribe",
            "transaction",
            "defineBucket",
            "updateBucket",
            "defineQuery",
            "getBucketSchema",
            "dropBucket",
            "undefineQuery",
        ] {
            let mut text = format!(r#"{{"id":1,"type":"store.{operation}","bucket":"b""#);
            for name in [
                "key",
                "data",
                "filter",
                "n",
                "limit",
                "field",
                "query",
                "config",
                "params",
                "operations",
                "name",
                "updates",
                "subscriptionId",
                "mode",
                "since",
                "pos",
                "idempotencyKey",
                "version",
                "after",
            ] {
                write!(text, ",\"{name}\":{value}").unwrap();
            }
            text.push('}');
            raw.send(&text).await;
            let reply = raw.json().await;
            assert_eq!(reply["id"], 1);
            assert_ne!(reply["code"], "INTERNAL_ERROR", "{text}: {reply}");
            if reply["type"] == "result" {
                assert!(["where", "findOne"].contains(&operation), "{text}: {reply}");
            }
        }
    }
    drop(raw);
    bystander.assert_unaffected(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_in_a_validator_closes_its_connection_and_is_counted() {
    let server = serve(options().auth(Auth::new(RoleTokens).required(false))).await;
    let mut bystander = Bystander::new(&server).await;
    bystander.assert_unaffected(&server).await;
    for count in 1..=3 {
        let mut client = Client::connect(&server).await;
        client.call("store.subscribe", json!({"config": {"bucket": "b"}})).await;
        let before = client.send("store.count", json!({"bucket": "b"})).await;
        client.send("auth.login", json!({"token": "panic"})).await;
        client.send("store.count", json!({"bucket": "b"})).await;
        assert_eq!(client.reply(before).await["data"], 0, "requests before the panic are answered");
        assert_eq!(client.closed().await, (1011, "internal_error".to_owned()));
        wait_until_async("the connection has closed", PATIENCE, async || server.connection_count() == 1).await;
        let stats = server.stats();
        assert_eq!((stats.panics, stats.subscriptions), (count, 1));
        bystander.0.call("store.count", json!({"bucket": "b"})).await;
    }
}
