//! The format of messages, and the order of replies.

use serde_json::{Value as Json, json};
use tidewire::auth::Auth;

use crate::client::{Client, RoleTokens, options, serve, wait_for_connections};
use crate::raw_client::{RawClient, TEXT, frame};

#[tokio::test(flavor = "multi_thread")]
async fn welcome_is_first_and_states_whether_login_is_required() {
    for (auth, required) in [(None, false), (Some(true), true), (Some(false), false)] {
        let mut options = options();
        options.auth = auth.map(|required| Auth::new(RoleTokens).required(required));
        let server = serve(options).await;
        let welcome = Client::connect(&server).await.welcome;
        let time = welcome["serverTime"].as_u64().unwrap();
        assert!(time > 1_600_000_000_000);
        let expected = json!({"type": "welcome", "version": "1.0.0", "serverTime": time, "requiresAuth": required});
        assert_eq!(welcome, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_finite_number_is_a_valid_request_id() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    for id in ["0", "-0", "-7", "1.5", "-2.25e-3", "1e3", "1E+3", "9007199254740993", "1e308", "0.1"] {
        raw.send(&format!(r#"{{"id":{id},"type":"store.buckets"}}"#)).await;
        let reply = raw.json().await;
        assert_eq!(reply["type"], "result", "{id}");
        assert_eq!(reply["id"].as_f64(), Some(id.parse().unwrap()), "{id}");
        raw.send(&format!(r#"{{"type":"no.such","id":{id}}}"#)).await;
        let reply = raw.json().await;
        assert_eq!(reply["code"], "UNKNOWN_OPERATION", "{id}");
        assert_eq!(reply["id"].as_f64(), Some(id.parse().unwrap()), "{id}");
    }
    // A long number is echoed as the same double.
    let long = format!("1{}", "0".repeat(300));
    raw.send(&format!(r#"{{"id":{long},"type":"store.buckets"}}"#)).await;
    assert_eq!(raw.json().await["id"].as_f64(), Some(1e300));
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_have_exactly_the_documented_members() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    raw.send(r#" { "id" : 1 , "type" : "store.buckets" , "params" : [] , "extra" : {"type":"x","id":2} } "#).await;
    let (_, reply) = raw.frame().await.unwrap();
    assert_eq!(reply, br#"{"id":1,"type":"result","data":{"count":0,"names":[]}}"#);
    raw.send(r#"{"id":2,"type":"store.all","bucket":"none","query":7}"#).await;
    let error = raw.json().await;
    let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["id", "type", "code", "message"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_answered_with_id_zero() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    for (text, code) in [
        ("", "PARSE_ERROR"),
        (" ", "PARSE_ERROR"),
        ("{", "PARSE_ERROR"),
        ("hello", "PARSE_ERROR"),
        (r#"{"id":5,"type":"store.buckets""#, "PARSE_ERROR"),
        (r#"{"id":5,"type":"store.buckets"} x"#, "PARSE_ERROR"),
        (r#"{"id":5,"type":"store.buckets"}{"id":6,"type":"store.buckets"}"#, "PARSE_ERROR"),
        (r#"{"id":5,"type":"store.buckets",}"#, "PARSE_ERROR"),
        (r#"{"id":5,'type':"store.buckets"}"#, "PARSE_ERROR"),
        (r#"{"id":NaN,"type":"store.buckets"}"#, "PARSE_ERROR"),
        (r#"{"id":Infinity,"type":"store.buckets"}"#, "PARSE_ERROR"),
        (r#"{"id":05,"type":"store.buckets"}"#, "PARSE_ERROR"),
        (r#"[{"id":5,"type":"store.buckets"}]"#, "PARSE_ERROR"),
        ("null", "PARSE_ERROR"),
        ("true", "PARSE_ERROR"),
        ("7", "PARSE_ERROR"),
        ("\"store.buckets\"", "PARSE_ERROR"),
        ("\u{feff}{\"id\":5,\"type\":\"store.buckets\"}", "PARSE_ERROR"),
        ("{}", "INVALID_REQUEST"),
        (r#"{"id":5}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":""}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":null}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":7}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":["store.buckets"]}"#, "INVALID_REQUEST"),
        (r#"{"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":null,"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":"5","type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":[5],"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":true,"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":1e999,"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":-1e999,"type":"store.buckets"}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":"pong"}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":"pong","timestamp":null}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":"pong","timestamp":"5"}"#, "INVALID_REQUEST"),
        (r#"{"id":5,"type":"pong","timestamp":1e999}"#, "INVALID_REQUEST"),
    ] {
        raw.send(text).await;
        let reply = raw.json().await;
        assert_eq!(reply["id"], json!(0), "{text}");
        assert_eq!((&reply["type"], &reply["code"]), (&json!("error"), &json!(code)), "{text}");
        assert!(!reply["message"].as_str().unwrap().is_empty());
    }
    // The connection is still served.
    raw.send(r#"{"id":5,"type":"store.buckets"}"#).await;
    assert_eq!(raw.json().await["id"], 5);
    wait_for_connections(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ping_is_not_an_operation_and_needs_no_login() {
    let options = options().auth(Auth::new(RoleTokens));
    let server = serve(options).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.call_err("ping", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(client.call_err("pings", json!({})).await.0, "UNAUTHORIZED");
    assert_eq!(client.call_err("store.get", json!({})).await.0, "UNAUTHORIZED", "before the parameters are checked");
    assert_eq!(client.call_err("auth.nothing", json!({})).await.0, "UNKNOWN_OPERATION");
    assert_eq!(client.call("auth.whoami", json!({})).await, json!({"authenticated": false}));
    client.call("auth.login", json!({"token": "mara:admin"})).await;
    for name in ["nothing", "store", "store.", ".", "stores.get", "Store.get", "store.get ", "identity.login", "auth."]
    {
        assert_eq!(client.call_err(name, json!({})).await.0, "UNKNOWN_OPERATION", "{name}");
    }
    assert_eq!(client.call_err("rules.stats", json!({})).await.0, "RULES_NOT_AVAILABLE");
}

/// Checks a reply.
type Check = Box<dyn Fn(&Json)>;

/// Returns a request, and the check of its reply given the number of inserts before it.
fn nth_request(turn: u64) -> (Json, Check) {
    let (id, key) = (json!(turn), format!("k{}", turn / 10));
    let inserted = turn / 10 + 1;
    let is = move |path: &'static str, expected: Json| -> Check {
        Box::new(move |reply| assert_eq!(reply.pointer(path), Some(&expected), "{reply}"))
    };
    match turn % 10 {
        0 => {
            let data = json!({"id": key, "n": turn});
            (json!({"id": id, "type": "store.insert", "bucket": "b", "data": data}), is("/data/_version", json!(1)))
        }
        1 => (json!({"id": id, "type": "store.get", "bucket": "b", "key": key}), is("/data/_version", json!(1))),
        2 => {
            let data = json!({"n": -1});
            let update = json!({"id": id, "type": "store.update", "bucket": "b", "key": key, "data": data});
            (update, is("/data/_version", json!(2)))
        }
        3 => (json!({"id": id, "type": "store.get", "bucket": "b", "key": key}), is("/data/n", json!(-1))),
        4 => (json!({"id": id, "type": "store.count", "bucket": "b"}), is("/data", json!(inserted))),
        5 => (json!({"id": id, "type": "store.nothing"}), is("/code", json!("UNKNOWN_OPERATION"))),
        6 => {
            let config = json!({"bucket": "b", "aggregate": {"op": "count"}});
            let config = if turn % 20 == 6 { json!({"bucket": "b"}) } else { config };
            (json!({"id": id, "type": "store.query", "config": config, "bucket": "b"}), Box::new(|_| ()))
        }
        7 => {
            let data = json!({"id": key});
            let insert = json!({"id": id, "type": "store.insert", "bucket": "none", "data": data});
            (insert, is("/code", json!("BUCKET_NOT_DEFINED")))
        }
        8 => {
            let subscribe = json!({"id": id, "type": "store.subscribe", "config": {"bucket": "b"}});
            (subscribe, is("/data/data/0/id", json!("k0")))
        }
        _ => {
            let subscription = format!("sub-{}", turn / 10 + 1);
            let unsubscribe = json!({"id": id, "type": "store.unsubscribe", "subscriptionId": subscription});
            (unsubscribe, is("/data/unsubscribed", json!(true)))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_are_answered_in_order() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string", "required": true}}});
    client.call("store.defineBucket", json!({"name": "b", "config": config})).await;
    let mut raw = RawClient::websocket(&server).await;
    let all: Vec<_> = (0..200).map(nth_request).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|(request, _)| frame(TEXT, request.to_string().as_bytes())).collect();
    raw.write(&bytes).await;
    for (request, check) in &all {
        let reply = loop {
            let message = raw.json().await;
            if message["type"] != "push" {
                break message;
            }
        };
        assert_eq!(reply["id"], request["id"], "{request}: {reply}");
        check(&reply);
    }
    wait_for_connections(&server, 2).await;
    assert_eq!(server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn write_is_answered_before_it_is_pushed() {
    let server = serve(options()).await;
    let mut raw = RawClient::websocket(&server).await;
    let config = r#"{"key":"id","schema":{"id":{"type":"string"}}}"#;
    raw.send(&format!(r#"{{"id":1,"type":"store.defineBucket","name":"b","config":{config}}}"#)).await;
    raw.json().await;
    // This holds even if the write was sent before the reply to the subscription.
    let mut bytes = frame(TEXT, br#"{"id":0,"type":"store.subscribe","config":{"bucket":"b"}}"#);
    for id in 1..=300 {
        let insert = format!(r#"{{"id":{id},"type":"store.insert","bucket":"b","data":{{"id":"{id}"}}}}"#);
        bytes.extend(frame(TEXT, insert.as_bytes()));
    }
    raw.write(&bytes).await;
    let (mut answered, mut pushed) = (None, 0);
    while pushed < 300 {
        let message = raw.json().await;
        if message["type"] == "push" {
            let seen = message["data"].as_array().unwrap().len();
            assert!(seen > pushed, "each push shows more than the one before");
            assert!(answered.is_some_and(|answered| seen as u64 <= answered), "{seen} pushed, {answered:?} answered");
            pushed = seen;
        } else {
            answered = message["id"].as_u64();
        }
    }
}
