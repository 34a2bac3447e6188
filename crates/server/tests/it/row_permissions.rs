//! Row permissions: rules that apply to some rows of a bucket.

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, Rule, StaticTokens};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::QueryOutput;

use crate::client::{Client, options};
use crate::test_server::{TestServer, allow_only, ids, object, own_rows, tokens, user, user_with_metadata};

/// Starts a server with boats of ann and bob.
async fn serve_boats() -> TestServer {
    let people = [user("ann", &["member"]), user("bob", &["member"]), user("sea", &["seer"])];
    let rules = [own_rows("member"), Rule::new("seer", ["store.*"])];
    let test = TestServer::start(allow_only(tokens(people), rules)).await;
    test.bucket("boats", boats()).await;
    test.query("boats", json!({"bucket": "boats"})).await;
    test
}

fn boats() -> Vec<Json> {
    let boat = |id: &str, owner: &str, n: u64| json!({"id": id, "owner": owner, "n": n});
    vec![
        boat("b1", "bob", 100),
        boat("a1", "ann", 1),
        boat("b2", "bob", 200),
        boat("a2", "ann", 2),
        boat("b3", "bob", 300),
    ]
}

/// Reads all boats as a user who sees every row.
async fn all(test: &TestServer) -> Json {
    test.client("sea").await.call("store.all", json!({"bucket": "boats"})).await
}

async fn code(client: &mut Client, operation: &str, params: Json) -> String {
    let id = client.send(operation, params).await;
    client.reply(id).await["code"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_return_visible_rows() {
    let test = serve_boats().await;
    let mut ann = test.client("ann").await;
    let mut call = async |operation: &str, params: Json| {
        let mut params = params;
        params["bucket"] = json!("boats");
        ann.call(operation, params).await
    };
    assert_eq!(call("store.get", json!({"key": "a1"})).await["n"], 1);
    assert_eq!(call("store.get", json!({"key": "b1"})).await, Json::Null);
    assert_eq!(ids(&call("store.all", json!({})).await), ["a1", "a2"]);
    assert_eq!(ids(&call("store.where", json!({"filter": {}})).await), ["a1", "a2"]);
    assert_eq!(ids(&call("store.where", json!({"filter": {"owner": "bob"}})).await), [""; 0]);
    assert_eq!(ids(&call("store.where", json!({"filter": {"$or": [{"owner": "bob"}, {"n": 2}]}})).await), ["a2"]);
    assert_eq!(call("store.findOne", json!({"filter": {"n": {"$gt": 1}}})).await["id"], "a2");
    assert_eq!(call("store.findOne", json!({"filter": {"id": "b1"}})).await, Json::Null);
    assert_eq!(call("store.count", json!({})).await, 2);
    assert_eq!(call("store.count", json!({"filter": {"owner": {"$neq": "ann"}}})).await, 0);
    assert_eq!(ids(&call("store.first", json!({"n": 1})).await), ["a1"]);
    assert_eq!(ids(&call("store.first", json!({"n": 9})).await), ["a1", "a2"]);
    assert_eq!(ids(&call("store.last", json!({"n": 1})).await), ["a2"]);
    for (operation, expected) in [("sum", json!(3)), ("avg", json!(1.5)), ("min", json!(1)), ("max", json!(2))] {
        let params = json!({"field": "n"});
        assert_eq!(call(&format!("store.{operation}"), params).await.as_f64(), expected.as_f64(), "{operation}");
        let none = call(&format!("store.{operation}"), json!({"field": "n", "filter": {"owner": "bob"}})).await;
        assert!(none.is_null() || none.as_f64() == Some(0.0), "{operation}: {none}");
    }
    let page = call("store.paginate", json!({"limit": 1})).await;
    assert_eq!(
        (ids(&page["records"]), &page["hasMore"], &page["nextCursor"]),
        (vec!["a1"], &json!(true), &json!("a1"))
    );
    let page = call("store.paginate", json!({"limit": 1, "after": "a1"})).await;
    assert_eq!(
        (ids(&page["records"]), &page["hasMore"], &page["nextCursor"]),
        (vec!["a2"], &json!(false), &json!("a2"))
    );
    // As a cursor, a hidden row is treated like a missing one.
    let nowhere = json!({"records": [], "hasMore": false});
    for after in ["b1", "b2", "none"] {
        assert_eq!(call("store.paginate", json!({"limit": 9, "after": after})).await, nowhere, "{after}");
    }
    let sorted = call("store.query", json!({"sort": {"n": "desc"}, "limit": 1})).await;
    assert_eq!(ids(&sorted), ["a2"]);
    assert_eq!(ids(&call("store.query", json!({"sort": {"n": "desc"}, "offset": 1})).await), ["a1"]);
    let groups = call("store.query", json!({"aggregate": {"function": "count", "groupBy": "owner"}})).await;
    assert_eq!(groups.as_array().unwrap().len(), 1, "{groups}");
    assert!(!groups.to_string().contains("bob"), "{groups}");
    let max = json!({"aggregate": {"function": "max", "field": "n"}});
    assert_eq!(call("store.query", max).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn live_queries_return_visible_rows() {
    let test = serve_boats().await;
    let mut ann = test.client("ann").await;
    let subscribe = |config: Json, mode: &str| json!({"config": config, "mode": mode});
    let sorted = json!({"bucket": "boats", "sort": {"n": "desc"}, "limit": 2, "fields": ["id"]});
    let aggregate = json!({"bucket": "boats", "aggregate": {"function": "sum", "field": "n"}});
    let mut subscriptions = Vec::new();
    for (params, first) in [
        (json!({"query": "boats"}), None),
        (subscribe(json!({"bucket": "boats"}), "delta"), None),
        (subscribe(sorted.clone(), "whole"), Some(json!([{"id": "a2"}, {"id": "a1"}]))),
        (subscribe(sorted, "delta"), Some(json!([{"id": "a2"}, {"id": "a1"}]))),
        (subscribe(aggregate, "whole"), Some(json!(3))),
    ] {
        let subscribed = ann.call("store.subscribe", params).await;
        match first {
            Some(first) => assert_eq!(subscribed["data"], first),
            None => assert_eq!(ids(&subscribed["data"]), ["a1", "a2"]),
        }
        subscriptions.push(subscribed["subscriptionId"].clone());
    }
    // Writes of bob to his rows are not pushed to ann.
    let mut bob = test.client("bob").await;
    bob.call("store.insert", json!({"bucket": "boats", "data": {"id": "b4", "owner": "bob", "n": 9}})).await;
    bob.call("store.update", json!({"bucket": "boats", "key": "b1", "data": {"n": 7}})).await;
    bob.call("store.delete", json!({"bucket": "boats", "key": "b2"})).await;
    bob.call("store.clear", json!({"bucket": "boats"})).await;
    bob.call("store.insert", json!({"bucket": "boats", "data": {"id": "b5", "owner": "bob", "n": 500}})).await;
    // A boat changes its owner to ann and back: it is added, then removed.
    for (owner, n) in [("ann", 5), ("bob", 6)] {
        let give = move |draft: &mut tidewire_store::Draft| {
            draft.update("boats", &json!("b5"), object(json!({"owner": owner, "n": n})), None)
        };
        test.write(give).await;
        let mut seen = Vec::new();
        for _ in 0..subscriptions.len() {
            let push = ann.push().await;
            assert!(!push.to_string().contains("bob"), "{push}");
            seen.push((push["subscriptionId"].clone(), push["data"].clone()));
        }
        let data = |index: usize| &seen.iter().find(|(id, _)| *id == subscriptions[index]).unwrap().1;
        if owner == "ann" {
            assert_eq!(ids(data(0)), ["a1", "a2", "b5"]);
            assert_eq!(ids(&data(1)["added"]), ["b5"]);
            assert_eq!(*data(2), json!([{"id": "b5"}, {"id": "a2"}]));
            assert_eq!(*data(4), 8);
        } else {
            assert_eq!(ids(data(0)), ["a1", "a2"]);
            assert_eq!(data(1)["removed"], json!(["b5"]));
            assert_eq!(*data(2), json!([{"id": "a2"}, {"id": "a1"}]));
            assert_eq!(*data(4), 3);
        }
    }
    assert_eq!(ann.call("store.count", json!({"bucket": "boats"})).await, 2);
    ann.discard_pushes();
    assert!(ann.has_no_pushes().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn position_of_another_session_cannot_be_resumed() {
    let test = serve_boats().await;
    let mut client = test.client("bob").await;
    let params = |since: Option<&Json>| json!({"config": {"bucket": "boats"}, "mode": "delta", "since": since});
    let first = client.call("store.subscribe", json!({"config": {"bucket": "boats"}, "pos": true})).await;
    let resumed = client.call("store.subscribe", params(Some(&first["pos"]))).await;
    assert_eq!(resumed["resumed"], true);
    client.call("auth.login", json!({"token": "ann"})).await;
    client.discard_pushes();
    let restarted = client.call("store.subscribe", params(Some(&first["pos"]))).await;
    assert_eq!((&restarted["resumed"], ids(&restarted["data"])), (&json!(false), vec!["a1", "a2"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_affect_only_rows_that_are_and_stay_visible() {
    let test = serve_boats().await;
    let mut ann = test.client("ann").await;
    let before = all(&test).await;
    let of = |owner: &str, id: &str| json!({"id": id, "owner": owner, "n": 0});
    let one = |op: Json| json!({"operations": [{"op": "count", "bucket": "boats"}, op]});
    for (operation, params, expected) in [
        // A record must not have another owner, or no owner.
        ("store.insert", json!({"data": of("bob", "x")}), "FORBIDDEN"),
        ("store.insert", json!({"data": {"id": "x"}}), "FORBIDDEN"),
        // A hidden row is not replaced: its key is taken, like a unique value.
        ("store.insert", json!({"data": of("ann", "b1")}), "ALREADY_EXISTS"),
        ("store.insertMany", json!({"data": [of("ann", "x"), of("bob", "y")]}), "FORBIDDEN"),
        ("store.insertMany", json!({"data": [of("ann", "x"), of("ann", "b1")]}), "ALREADY_EXISTS"),
        ("store.update", json!({"key": "b1", "data": {"n": 0}}), "NOT_FOUND"),
        ("store.update", json!({"key": "b1", "data": {"owner": "ann"}}), "NOT_FOUND"),
        ("store.update", json!({"key": "b1", "data": {}, "version": 1}), "NOT_FOUND"),
        ("store.update", json!({"key": "b1", "data": {}, "version": 7}), "NOT_FOUND"),
        ("store.update", json!({"key": "none", "data": {}, "version": 7}), "NOT_FOUND"),
        ("store.update", json!({"key": "a1", "data": {"owner": "bob"}}), "FORBIDDEN"),
        ("store.update", json!({"key": "a1", "data": {"owner": null}}), "FORBIDDEN"),
        ("store.upsert", json!({"data": of("ann", "b1")}), "ALREADY_EXISTS"),
        ("store.upsert", json!({"data": of("bob", "a1")}), "FORBIDDEN"),
        ("store.upsert", json!({"data": of("bob", "x")}), "FORBIDDEN"),
        ("store.transaction", one(json!({"op": "insert", "bucket": "boats", "data": of("bob", "x")})), "FORBIDDEN"),
        ("store.transaction", one(json!({"op": "insert", "bucket": "boats", "data": of("ann", "b1")})), "CONFLICT"),
        ("store.transaction", one(json!({"op": "update", "bucket": "boats", "key": "b1", "data": {}})), "NOT_FOUND"),
        (
            "store.transaction",
            one(json!({"op": "update", "bucket": "boats", "key": "a1", "data": {"owner": "bob"}})),
            "FORBIDDEN",
        ),
    ] {
        let mut params = params;
        params["bucket"] = json!("boats");
        let (code, error) = ann.call_err(operation, params.clone()).await;
        assert_eq!(code, expected, "{operation} {params}: {error}");
        match &*code {
            "CONFLICT" => assert_eq!(error["details"], json!({"bucket": "boats", "key": "b1"})),
            "ALREADY_EXISTS" => {
                assert_eq!(error["details"], json!({"bucket": "boats", "field": "id", "value": "b1"}));
            }
            _ => assert!(error.get("details").is_none(), "{error}"),
        }
        assert!(!error.to_string().contains("bob"), "{error}");
        assert_eq!(all(&test).await, before, "{operation} {params}");
    }
    let reads = json!({"operations": [
        {"op": "get", "bucket": "boats", "key": "b1"},
        {"op": "get", "bucket": "boats", "key": "a1"},
        {"op": "where", "bucket": "boats", "filter": {}},
        {"op": "findOne", "bucket": "boats", "filter": {"owner": "bob"}},
        {"op": "count", "bucket": "boats"},
    ]});
    let results = ann.call("store.transaction", reads).await;
    let data = |index: usize| &results["results"][index]["data"];
    assert_eq!((data(0), &data(1)["id"], ids(data(2))), (&Json::Null, &json!("a1"), vec!["a1", "a2"]));
    assert_eq!((data(3), data(4)), (&Json::Null, &json!(2)));
    // There is no restriction on her own rows.
    let bucket = |params: Json| {
        let mut params = params;
        params["bucket"] = json!("boats");
        params
    };
    ann.call("store.insert", bucket(json!({"data": of("ann", "a3")}))).await;
    ann.call("store.insert", bucket(json!({"data": of("ann", "a3")}))).await;
    ann.call("store.insertMany", bucket(json!({"data": [of("ann", "a4")]}))).await;
    ann.call("store.upsert", bucket(json!({"data": {"id": "a3", "n": 3}}))).await;
    ann.call("store.update", bucket(json!({"key": "a1", "data": {"n": 7}, "version": 1}))).await;
    assert_eq!(ann.call("store.delete", bucket(json!({"key": "a2"}))).await, json!({"deleted": true}));
    assert_eq!(ann.call("store.delete", bucket(json!({"key": "none"}))).await, json!({"deleted": true}));
    assert_eq!(ids(&all(&test).await), ["b1", "a1", "b2", "b3", "a3", "a4"]);
    assert_eq!(ann.call("store.clear", bucket(json!({}))).await, json!({"cleared": true}));
    assert_eq!(ids(&all(&test).await), ["b1", "b2", "b3"]);
}

/// Sends a request about a row. Returns the reply, with the key replaced by a placeholder.
async fn reply_without_key(client: &mut Client, key: &str, operation: &str, params: &Json) -> String {
    let params: Json = serde_json::from_str(&params.to_string().replace("KEY", key)).unwrap();
    let id = client.send(operation, params).await;
    let mut reply = client.reply(id).await;
    reply["id"] = json!(0);
    reply.to_string().replace(key, "KEY")
}

/// Regression: deletes, references, and inserts and transactions that fail in any case revealed whether a hidden row exists.
#[tokio::test(flavor = "multi_thread")]
async fn hidden_rows_cannot_be_distinguished_from_missing_ones() {
    let test = serve_boats().await;
    let note = json!({"key": "id", "schema": {
        "id": {"type": "string", "generated": "uuid"}, "n": {"type": "number"}, "boat": {"type": "string", "ref": "boats"},
    }});
    test.write(move |draft| {
        draft.define_bucket("notes", &note)?;
        draft.insert("notes", object(json!({"id": "note", "owner": "ann"})))
    })
    .await;
    let before = all(&test).await;
    let mut ann = test.client("ann").await;
    let step = |step: Json| ("store.transaction", json!({"operations": [step]}));
    let to_others = json!({"id": "KEY", "owner": "bob"});
    let mut requests = vec![
        ("store.get", json!({"bucket": "boats", "key": "KEY"})),
        ("store.where", json!({"bucket": "boats", "filter": {"id": "KEY"}})),
        ("store.findOne", json!({"bucket": "boats", "filter": {"id": {"$in": ["KEY"]}}})),
        ("store.count", json!({"bucket": "boats", "filter": {"id": "KEY"}})),
        ("store.sum", json!({"bucket": "boats", "field": "n", "filter": {"id": "KEY"}})),
        ("store.max", json!({"bucket": "boats", "field": "n", "filter": {"id": "KEY"}})),
        ("store.paginate", json!({"bucket": "boats", "limit": 2, "after": "KEY"})),
        ("store.query", json!({"bucket": "boats", "filter": {"id": "KEY"}, "aggregate": {"function": "count"}})),
        ("store.update", json!({"bucket": "boats", "key": "KEY", "data": {"n": 1}})),
        ("store.update", json!({"bucket": "boats", "key": "KEY", "data": {"owner": "ann"}})),
        ("store.update", json!({"bucket": "boats", "key": "KEY", "data": {}, "version": 1})),
        ("store.update", json!({"bucket": "boats", "key": "KEY", "data": {}, "version": 9})),
        ("store.delete", json!({"bucket": "boats", "key": "KEY"})),
        ("store.delete", json!({"bucket": "boats", "key": "KEY", "version": 1})),
        ("store.delete", json!({"bucket": "boats", "key": "KEY", "version": 9})),
        ("store.delete", json!({"bucket": "boats", "key": "KEY", "idempotencyKey": "delete KEY"})),
        ("store.delete", json!({"bucket": "boats", "key": "KEY", "idempotencyKey": "delete KEY"})),
        // These writes also fail if the row does not exist, with the same error.
        ("store.insert", json!({"bucket": "boats", "data": to_others})),
        ("store.insertMany", json!({"bucket": "boats", "data": [to_others]})),
        ("store.upsert", json!({"bucket": "boats", "data": to_others})),
        ("store.upsert", json!({"bucket": "boats", "data": {"id": "KEY", "n": 1}})),
        ("store.upsert", json!({"bucket": "boats", "data": to_others, "idempotencyKey": "upsert KEY"})),
        // A reference to a hidden row is invalid.
        ("store.insert", json!({"bucket": "notes", "data": {"owner": "ann", "boat": "KEY"}})),
        ("store.insertMany", json!({"bucket": "notes", "data": [{"owner": "ann", "boat": "KEY"}]})),
        ("store.upsert", json!({"bucket": "notes", "data": {"id": "note", "boat": "KEY"}})),
        ("store.update", json!({"bucket": "notes", "key": "note", "data": {"boat": "KEY"}})),
    ];
    requests.extend([
        step(json!({"op": "get", "bucket": "boats", "key": "KEY"})),
        step(json!({"op": "where", "bucket": "boats", "filter": {"id": "KEY"}})),
        step(json!({"op": "findOne", "bucket": "boats", "filter": {"id": "KEY"}})),
        step(json!({"op": "count", "bucket": "boats", "filter": {"id": "KEY"}})),
        step(json!({"op": "insert", "bucket": "boats", "data": to_others})),
        step(json!({"op": "insert", "bucket": "notes", "data": {"owner": "ann", "boat": "KEY"}})),
        step(json!({"op": "update", "bucket": "boats", "key": "KEY", "data": {}})),
        step(json!({"op": "update", "bucket": "boats", "key": "KEY", "data": {}, "version": 9})),
        step(json!({"op": "update", "bucket": "notes", "key": "note", "data": {"boat": "KEY"}})),
        step(json!({"op": "delete", "bucket": "boats", "key": "KEY"})),
        step(json!({"op": "delete", "bucket": "boats", "key": "KEY", "version": 9})),
    ]);
    for (operation, params) in &requests {
        let hidden = reply_without_key(&mut ann, "b1", operation, params).await;
        assert_eq!(hidden, reply_without_key(&mut ann, "x9", operation, params).await, "{operation} {params}");
        assert!(!hidden.contains("bob") && !hidden.contains("100"), "{hidden}");
    }
    assert_eq!(all(&test).await, before);
    // Visible rows can be referenced.
    ann.call("store.update", json!({"bucket": "notes", "key": "note", "data": {"boat": "a1"}})).await;
}

/// Row filters apply to references only if the role can read the bucket. Otherwise any existing record can be referenced.
#[tokio::test(flavor = "multi_thread")]
async fn role_without_read_access_can_reference_records() {
    let auth = allow_only(tokens([user("ann", &["member"])]), [own_rows("member").on_buckets(["notes"])]);
    let test = TestServer::start(auth).await;
    test.bucket("boats", boats()).await;
    let note = json!({"key": "id", "schema": {"id": {"type": "string"}, "boat": {"type": "string", "ref": "boats"}}});
    test.write(move |draft| draft.define_bucket("notes", &note)).await;
    let mut ann = test.client("ann").await;
    let insert = |boat: &str| json!({"bucket": "notes", "data": {"id": boat, "owner": "ann", "boat": boat}});
    assert_eq!(code(&mut ann, "store.insert", insert("b1")).await, "");
    assert_eq!(code(&mut ann, "store.insert", insert("x9")).await, "VALIDATION_ERROR");
}

/// Regression: a role with row filters could end the subscriptions of other users and see their filters.
#[tokio::test(flavor = "multi_thread")]
async fn role_with_hidden_rows_cannot_undefine_queries() {
    let test = serve_boats().await;
    let mut bob = test.client("bob").await;
    bob.call("store.subscribe", json!({"query": "boats", "pos": true})).await;
    let mut ann = test.client("ann").await;
    assert_eq!(code(&mut ann, "store.undefineQuery", json!({"name": "boats"})).await, "FORBIDDEN");
    // The error does not reveal which queries exist.
    assert_eq!(code(&mut ann, "store.undefineQuery", json!({"name": "none"})).await, "FORBIDDEN");
    assert!(bob.has_no_pushes().await);
    test.client("sea").await.call("store.undefineQuery", json!({"name": "boats"})).await;
    assert_eq!(bob.push().await["error"]["code"], "QUERY_NOT_DEFINED");
}

#[tokio::test(flavor = "multi_thread")]
async fn role_with_hidden_rows_sees_the_names_of_queries_it_can_subscribe_to() {
    let people = [user("ann", &["member"]), user("two", &["member", "all"]), user("sea", &["seer"])];
    let rules = [
        own_rows("member").on_buckets(["boats"]),
        Rule::new("member", ["store.listQueries"]),
        Rule::new("member", ["store.subscribe"]).on_buckets(["ports"]),
        Rule::new("all", ["store.subscribe"]).on_buckets(["boats"]),
        Rule::new("seer", ["store.listQueries"]),
    ];
    let test = TestServer::start(allow_only(tokens(people), rules)).await;
    for bucket in ["boats", "ports", "secrets"] {
        test.bucket(bucket, []).await;
        test.query(&format!("of-{bucket}"), json!({"bucket": bucket, "filter": {"id": "b1"}})).await;
    }
    let query = |bucket: &str| json!({"name": format!("of-{bucket}"), "type": "declarative", "activeSubscriptions": 0});
    let defined = |bucket: &str| {
        let mut query = query(bucket);
        query["config"] = json!({"bucket": bucket, "filter": {"id": "b1"}});
        query
    };
    for (user_id, expected) in [
        // A definition may contain values of hidden rows.
        ("ann", json!([query("boats"), defined("ports")])),
        ("two", json!([defined("boats"), defined("ports")])),
        // This user has no row filter.
        ("sea", json!([defined("boats"), defined("ports"), defined("secrets")])),
    ] {
        let listed = test.client(user_id).await.call("store.listQueries", json!({})).await;
        assert_eq!(listed["queries"], expected, "{user_id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unique_violation_does_not_reveal_the_hidden_row() {
    let test = serve_boats().await;
    let config = json!({"key": "id", "schema": {
        "id": {"type": "string", "generated": "uuid"}, "name": {"type": "string", "unique": true}}});
    test.write(move |draft| {
        draft.define_bucket("names", &config)?;
        draft.insert("names", object(json!({"id": "hidden-key", "owner": "bob", "name": "kestrel"})))
    })
    .await;
    let mut ann = test.client("ann").await;
    let data = json!({"bucket": "names", "data": {"owner": "ann", "name": "kestrel"}});
    let (code, error) = ann.call_err("store.insert", data).await;
    assert_eq!(code, "ALREADY_EXISTS");
    assert_eq!(error["details"], json!({"bucket": "names", "field": "name", "value": "kestrel"}));
    assert!(!error.to_string().contains("hidden-key") && !error.to_string().contains("bob"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_on_all_rows_require_access_to_all_rows() {
    let test = serve_boats().await;
    let mut ann = test.client("ann").await;
    let config = json!({"key": "id", "schema": {"id": {"type": "string"}}});
    for (operation, params) in [
        ("store.stats", json!({})),
        ("store.dropBucket", json!({"name": "boats"})),
        ("store.updateBucket", json!({"name": "boats", "updates": {}})),
        ("store.defineBucket", json!({"name": "more", "config": config})),
    ] {
        assert_eq!(code(&mut ann, operation, params).await, "FORBIDDEN", "{operation}");
    }
    // Defining a query does not expose rows.
    ann.call("store.defineQuery", json!({"name": "mine", "config": {"bucket": "boats"}})).await;
    assert_eq!(ids(&ann.call("store.subscribe", json!({"query": "mine"})).await["data"]), ["a1", "a2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_several_roles_are_combined() {
    let people = [
        user_with_metadata("one", &["member"], json!({})),
        user_with_metadata("two", &["member", "mate"], json!({"crew": "red"})),
        user_with_metadata("three", &["mate"], json!({"crew": "red"})),
        user_with_metadata("four", &["mate"], json!({"crew": null})),
        user_with_metadata("five", &["mate"], json!({})),
        user_with_metadata("six", &["red", "guest"], json!({})),
        user_with_metadata("seven", &["lister"], json!({"ids": ["1", "3"]})),
    ];
    let reads = ["store.all", "store.subscribe"];
    let where_ = |role: &str, filter: Json| Rule::new(role, reads).on_rows(filter).unwrap();
    let rules = [
        where_("member", json!({"owner": "{{ session.userId }}"})),
        where_("mate", json!({"crew": "{{ session.metadata.crew }}"})),
        where_("guest", json!({"crew": {"$in": "{{ session.roles }}"}})),
        where_("lister", json!({"id": {"$in": "{{ session.metadata.ids }}"}})),
    ];
    let test = TestServer::start(allow_only(tokens(people), rules)).await;
    let row = |id: &str, owner: &str, crew: &str| json!({"id": id, "owner": owner, "crew": crew});
    let rows = [row("1", "one", "blue"), row("2", "two", "blue"), row("3", "one", "red"), json!({"id": "4"})];
    test.bucket("b", rows).await;
    for (user_id, expected) in [
        ("one", vec!["1", "3"]),
        ("two", vec!["2", "3"]),
        ("three", vec!["3"]),
        ("four", vec![]),
        ("five", vec![]),
        ("six", vec!["3"]),
        ("seven", vec!["1", "3"]),
    ] {
        let mut client = test.client(user_id).await;
        assert_eq!(ids(&client.call("store.all", json!({"bucket": "b"})).await), expected, "{user_id}");
        let subscribed = client.call("store.subscribe", json!({"config": {"bucket": "b"}})).await;
        assert_eq!(ids(&subscribed["data"]), expected, "{user_id}");
        assert_eq!(code(&mut client, "store.count", json!({"bucket": "b"})).await, "FORBIDDEN", "{user_id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_filters_apply_per_operation() {
    let rules = [Rule::new("member", ["store.all", "store.get"]), own_rows("member")];
    let test = TestServer::start(allow_only(tokens([user("ann", &["member"])]), rules)).await;
    test.bucket("boats", boats()).await;
    let mut ann = test.client("ann").await;
    assert_eq!(ann.call("store.all", json!({"bucket": "boats"})).await.as_array().unwrap().len(), 5);
    assert_eq!(ann.call("store.count", json!({"bucket": "boats"})).await, 2);
    assert_eq!(ann.call("store.get", json!({"bucket": "boats", "key": "b1"})).await["n"], 100);
    assert_eq!(code(&mut ann, "store.update", json!({"bucket": "boats", "key": "b1", "data": {}})).await, "NOT_FOUND");
}

/// Returns one boat by key, all visible boats, and whether another bucket can be read.
#[derive(Debug)]
struct VisibleBoats;

impl ProgrammaticQuery for VisibleBoats {
    fn buckets(&self) -> Vec<String> {
        vec!["boats".to_owned()]
    }

    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        let one = view.get("boats", &params["key"])?;
        let QueryOutput::Records(all) = view.query(&json!({"bucket": "boats", "fields": ["id"]}))? else {
            panic!("expected records")
        };
        let secret = view.query(&json!({"bucket": "secrets"})).is_ok();
        Ok(json!({"one": one.map(|boat| boat["id"].clone()), "all": all, "secret": secret}))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_query_sees_the_rows_of_its_caller() {
    let auth = allow_only(tokens([user("ann", &["member"])]), [own_rows("member").on_buckets(["boats"])]);
    let test = TestServer::start_with(options().auth(auth).query("looks", VisibleBoats)).await;
    test.bucket("boats", boats()).await;
    test.bucket("secrets", [json!({"id": "s"})]).await;
    let mut ann = test.client("ann").await;
    let all = json!([{"id": "a1"}, {"id": "a2"}]);
    for (key, one) in [("a1", json!("a1")), ("b1", json!(null))] {
        let looks = ann.call("store.subscribe", json!({"query": "looks", "params": {"key": key}})).await;
        assert_eq!(looks["data"], json!({"one": one, "all": all, "secret": false}));
    }
    test.write(|draft| draft.insert("boats", object(json!({"id": "b9", "owner": "bob"})))).await;
    test.write(|draft| draft.insert("boats", object(json!({"id": "a9", "owner": "ann"})))).await;
    for _ in 0..2 {
        let push = ann.push().await;
        assert_eq!(push["data"]["all"], json!([{"id": "a1"}, {"id": "a2"}, {"id": "a9"}]));
    }
}

/// Returns auth options with two tokens of the same user with different metadata.
fn crews() -> Auth {
    let crew = |crew: &str| user_with_metadata("ann", &["mate"], json!({"crew": crew}));
    let named = [("red", crew("red")), ("blue", crew("blue"))];
    let auth = Auth::new(StaticTokens::new(named).unwrap());
    let rule = Rule::new("mate", ["store.*"]).on_rows(json!({"crew": "{{ session.metadata.crew }}"}));
    allow_only(auth, [rule.unwrap()])
}

#[tokio::test(flavor = "multi_thread")]
async fn replayed_reply_reveals_no_more_than_a_new_one() {
    let test = TestServer::start(crews()).await;
    test.bucket("b", [json!({"id": "old", "crew": "red"})]).await;
    let mut client = test.client("red").await;
    let red = |id: &str| json!({"id": id, "crew": "red"});
    let requests = [
        ("store.insert", json!({"data": red("one")})),
        ("store.insertMany", json!({"data": [red("two"), red("three")]})),
        ("store.upsert", json!({"data": red("four")})),
        ("store.update", json!({"key": "old", "data": {"n": 1}})),
        ("store.transaction", json!({"operations": [{"op": "get", "bucket": "b", "key": "old"}]})),
        ("store.transaction", json!({"operations": [{"op": "where", "bucket": "b", "filter": {}}]})),
        ("store.transaction", json!({"operations": [{"op": "insert", "bucket": "b", "data": red("five")}]})),
        ("store.delete", json!({"key": "five"})),
    ];
    let with_key = |index: usize, params: &Json| {
        let mut params = params.clone();
        (params["bucket"], params["idempotencyKey"]) = (json!("b"), json!(format!("key-{index}")));
        params
    };
    let mut first = Vec::new();
    for (index, (operation, params)) in requests.iter().enumerate() {
        first.push(client.call(operation, with_key(index, params)).await);
    }
    client.call("auth.login", json!({"token": "blue"})).await;
    for (index, (operation, params)) in requests.iter().enumerate() {
        let id = client.send(operation, with_key(index, params)).await;
        let reply = client.reply(id).await;
        if *operation == "store.delete" {
            assert_eq!(reply["data"], json!({"deleted": true}));
        } else {
            assert_eq!(reply["code"], "FORBIDDEN", "{operation}: {reply}");
            assert!(!reply.to_string().contains("red"), "{reply}");
        }
    }
    client.call("auth.login", json!({"token": "red"})).await;
    for (index, (operation, params)) in requests.iter().enumerate() {
        assert_eq!(client.call(operation, with_key(index, params)).await, first[index], "{operation}");
    }
}
