//! Permissions by rules and by a custom check.

use std::sync::{Arc, Mutex};

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, PermissionCheck, Permissions, Rule, Session};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::QueryOutput;

use crate::client::{Client, options};
use crate::test_server::{TestServer, allow_only, tokens, user};

/// Starts a server with the buckets `own` and `other`, each with a query.
async fn start_server(auth: Auth) -> TestServer {
    let test = TestServer::start(auth).await;
    for bucket in ["own", "other"] {
        test.bucket(bucket, [json!({"id": "a", "n": 1})]).await;
        test.query(&format!("all-{bucket}"), json!({"bucket": bucket})).await;
    }
    test
}

/// Sends a request. Returns the error code of the reply; empty for a result.
async fn code(client: &mut Client, operation: &str, params: Json) -> String {
    let id = client.send(operation, params).await;
    client.reply(id).await["code"].as_str().unwrap_or_default().to_owned()
}

/// Returns every operation on a bucket, in an order in which each can succeed.
fn requests(bucket: &str) -> Vec<(&'static str, Json)> {
    vec![
        ("store.get", json!({"bucket": bucket, "key": "a"})),
        ("store.all", json!({"bucket": bucket})),
        ("store.where", json!({"bucket": bucket, "filter": {}})),
        ("store.findOne", json!({"bucket": bucket, "filter": {}})),
        ("store.count", json!({"bucket": bucket})),
        ("store.first", json!({"bucket": bucket, "n": 1})),
        ("store.last", json!({"bucket": bucket, "n": 1})),
        ("store.paginate", json!({"bucket": bucket, "limit": 1})),
        ("store.sum", json!({"bucket": bucket, "field": "n"})),
        ("store.avg", json!({"bucket": bucket, "field": "n"})),
        ("store.min", json!({"bucket": bucket, "field": "n"})),
        ("store.max", json!({"bucket": bucket, "field": "n"})),
        ("store.query", json!({"bucket": bucket})),
        ("store.subscribe", json!({"query": format!("all-{bucket}")})),
        ("store.subscribe", json!({"config": {"bucket": bucket}})),
        ("store.subscribe", json!({"config": {"bucket": bucket}, "mode": "delta"})),
        ("store.insert", json!({"bucket": bucket, "data": {}})),
        ("store.insertMany", json!({"bucket": bucket, "data": [{}]})),
        ("store.upsert", json!({"bucket": bucket, "data": {"id": "u"}})),
        ("store.update", json!({"bucket": bucket, "key": "a", "data": {}})),
        ("store.delete", json!({"bucket": bucket, "key": "a"})),
        ("store.transaction", json!({"operations": [{"op": "count", "bucket": bucket}]})),
        ("store.clear", json!({"bucket": bucket})),
        ("store.getBucketSchema", json!({"name": bucket})),
        ("store.updateBucket", json!({"name": bucket, "updates": {}})),
        ("store.defineQuery", json!({"name": format!("more-{bucket}"), "config": {"bucket": bucket}})),
        ("store.undefineQuery", json!({"name": format!("all-{bucket}")})),
        ("store.dropBucket", json!({"name": bucket})),
        ("store.defineBucket", json!({"name": bucket, "config": {"key": "id", "schema": {"id": {"type": "string"}}}})),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_rule_applies_to_its_bucket_in_every_operation() {
    let auth = tokens([user("dee", &["diver"])]);
    let test = start_server(allow_only(auth, [Rule::new("diver", ["store.*"]).on_buckets(["own"])])).await;
    let mut client = test.client("dee").await;
    for (operation, params) in requests("other") {
        let (failed, error) = client.call_err(operation, params.clone()).await;
        assert_eq!(failed, "FORBIDDEN", "{operation} {params}");
        assert!(error.get("details").is_none(), "{error}");
    }
    // The errors do not reveal whether another bucket exists.
    for (operation, params) in requests("none") {
        assert_eq!(code(&mut client, operation, params.clone()).await, expected_for_undefined(operation, &params));
    }
    // Operations without a bucket are not covered by a bucket rule.
    for operation in ["store.buckets", "store.stats", "store.listQueries", "server.stats", "server.connections"] {
        assert_eq!(code(&mut client, operation, json!({})).await, "FORBIDDEN", "{operation}");
    }
    let mixed = json!({"operations": [{"op": "count", "bucket": "own"}, {"op": "get", "bucket": "other", "key": "a"}]});
    assert_eq!(code(&mut client, "store.transaction", mixed).await, "FORBIDDEN");
    for (operation, params) in requests("own") {
        assert_eq!(code(&mut client, operation, params.clone()).await, "", "{operation} {params}");
    }
}

/// Returns the error code for an undefined bucket. An undefined query has no bucket, so it is reported to every user with permission to
/// subscribe.
fn expected_for_undefined(operation: &str, params: &Json) -> &'static str {
    if operation == "store.subscribe" && params.get("query").is_some() { "QUERY_NOT_DEFINED" } else { "FORBIDDEN" }
}

#[tokio::test(flavor = "multi_thread")]
async fn operation_patterns_match_everything_a_prefix_or_a_name() {
    let people = ["all", "store", "get", "rules", "none"].map(|role| user(role, &[role]));
    let rules = [
        Rule::new("all", ["*"]),
        Rule::new("store", ["store.*"]),
        Rule::new("get", ["store.get", "store.count"]),
        Rule::new("rules", ["rules.*"]),
    ];
    let test = start_server(allow_only(tokens(people), rules)).await;
    let get = ("store.get", json!({"bucket": "own", "key": "a"}));
    let schema = ("store.getBucketSchema", json!({"name": "own"}));
    let stats = ("server.stats", json!({}));
    let emit = ("rules.emit", json!({"topic": "t"}));
    let unknown = ("store.gett", json!({}));
    for (role, codes) in [
        ("all", ["", "", "", "RULES_NOT_AVAILABLE", "UNKNOWN_OPERATION"]),
        ("store", ["", "", "FORBIDDEN", "FORBIDDEN", "UNKNOWN_OPERATION"]),
        ("get", ["", "FORBIDDEN", "FORBIDDEN", "FORBIDDEN", "FORBIDDEN"]),
        ("rules", ["FORBIDDEN", "FORBIDDEN", "FORBIDDEN", "RULES_NOT_AVAILABLE", "FORBIDDEN"]),
        ("none", ["FORBIDDEN"; 5]),
    ] {
        let mut client = test.client(role).await;
        for ((operation, params), expected) in [&get, &schema, &stats, &emit, &unknown].into_iter().zip(codes) {
            assert_eq!(code(&mut client, operation, params.clone()).await, expected, "{role} {operation}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn topic_rules_apply_to_their_topics() {
    let rules = [Rule::new("ship", ["rules.*"]).on_topics(["orders.*"])];
    let test = start_server(allow_only(tokens([user("ship", &["ship"])]), rules)).await;
    let mut client = test.client("ship").await;
    for (operation, params, expected) in [
        ("rules.emit", json!({"topic": "orders.new"}), "RULES_NOT_AVAILABLE"),
        ("rules.emit", json!({"topic": "bills.new"}), "FORBIDDEN"),
        ("rules.subscribe", json!({"pattern": "orders.*"}), "RULES_NOT_AVAILABLE"),
        ("rules.subscribe", json!({"pattern": "*"}), "FORBIDDEN"),
        ("rules.stats", json!({}), "FORBIDDEN"),
    ] {
        assert_eq!(code(&mut client, operation, params.clone()).await, expected, "{operation} {params}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_restrict_nothing_under_default_allow() {
    let auth = tokens([user("dee", &["diver", "admin"])])
        .permissions(Permissions::new(DefaultAccess::Allow, [Rule::new("diver", ["store.get"]).on_buckets(["own"])]));
    let test = start_server(auth).await;
    let mut client = test.client("dee").await;
    for (operation, params) in requests("other").into_iter().chain(requests("own")) {
        assert_eq!(code(&mut client, operation, params).await, "", "{operation}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn validation_errors_are_shown_only_to_permitted_users() {
    let people = [user("dee", &["diver"]), user("none", &["none"])];
    let test = start_server(allow_only(tokens(people), [Rule::new("diver", ["store.get"]).on_buckets(["own"])])).await;
    let mut client = test.client("dee").await;
    assert_eq!(code(&mut client, "store.get", json!({"bucket": "own"})).await, "VALIDATION_ERROR");
    assert_eq!(code(&mut client, "store.insert", json!({"bucket": "own"})).await, "FORBIDDEN");
    let mut client = test.client("none").await;
    assert_eq!(code(&mut client, "store.get", json!({"bucket": "own"})).await, "FORBIDDEN");
    // These operations need no permission.
    assert_eq!(code(&mut client, "auth.login", json!({})).await, "VALIDATION_ERROR");
    assert_eq!(code(&mut client, "auth.x", json!({})).await, "UNKNOWN_OPERATION");
    assert_eq!(code(&mut client, "ping", json!({})).await, "UNKNOWN_OPERATION");
    assert_eq!(code(&mut client, "store.unsubscribe", json!({})).await, "VALIDATION_ERROR");
}

#[tokio::test(flavor = "multi_thread")]
async fn own_subscriptions_can_be_cancelled_without_a_rule() {
    let test =
        start_server(allow_only(tokens([user("dee", &["diver"])]), [Rule::new("diver", ["store.subscribe"])])).await;
    let mut client = test.client("dee").await;
    let own = client.call("store.subscribe", json!({"query": "all-own"})).await["subscriptionId"].clone();
    let mut other = test.client("dee").await;
    let params = json!({"subscriptionId": own});
    assert_eq!(code(&mut other, "store.unsubscribe", params.clone()).await, "NOT_FOUND");
    assert_eq!(client.call("store.unsubscribe", params.clone()).await, json!({"unsubscribed": true}));
    assert_eq!(code(&mut client, "store.unsubscribe", params).await, "NOT_FOUND");
}

/// Records the checks. The resource determines the result.
#[derive(Default)]
struct RecordingCheck(Mutex<Vec<(String, String, String)>>);

impl PermissionCheck for RecordingCheck {
    fn check(&self, session: &Session, operation: &str, resource: &str) -> Option<bool> {
        let check = (session.user_id.clone(), operation.to_owned(), resource.to_owned());
        self.0.lock().unwrap().push(check);
        match resource {
            "own" | "all-own" | "secret" => Some(true),
            "other" | "all-other" => Some(false),
            _ => None,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn custom_check_takes_precedence_over_rules() {
    let checks = Arc::new(RecordingCheck::default());
    // The check overrides these rules.
    let rules = [Rule::new("diver", ["*"]).on_buckets(["other", "third"])];
    let test = start_server(allow_only(tokens([user("dee", &["diver"])]), rules).check(Arc::clone(&checks))).await;
    test.bucket("third", []).await;
    let mut client = test.client("dee").await;
    let all = |bucket: &str| json!({"bucket": bucket});
    assert_eq!(code(&mut client, "store.all", all("own")).await, "");
    assert_eq!(code(&mut client, "store.all", all("other")).await, "FORBIDDEN");
    assert_eq!(code(&mut client, "store.all", all("third")).await, "", "the check leaves it to the rules");
    assert_eq!(code(&mut client, "store.all", all("fourth")).await, "FORBIDDEN");
    // A query is checked by its name, a transaction step by step.
    assert_eq!(code(&mut client, "store.subscribe", json!({"query": "all-own"})).await, "");
    assert_eq!(code(&mut client, "store.subscribe", json!({"query": "all-other"})).await, "FORBIDDEN");
    assert_eq!(code(&mut client, "store.subscribe", json!({"config": {"bucket": "other"}})).await, "FORBIDDEN");
    assert_eq!(code(&mut client, "store.subscribe", json!({"query": "secret"})).await, "QUERY_NOT_DEFINED");
    let steps =
        |buckets: [&str; 2]| json!({"operations": buckets.map(|bucket| json!({"op": "count", "bucket": bucket}))});
    assert_eq!(code(&mut client, "store.transaction", steps(["own", "third"])).await, "");
    assert_eq!(code(&mut client, "store.transaction", steps(["own", "other"])).await, "FORBIDDEN");
    // Bucket and query definitions are checked by name.
    assert_eq!(code(&mut client, "store.getBucketSchema", json!({"name": "own"})).await, "");
    let query = |name: &str| json!({"name": name, "config": {"bucket": "own"}});
    assert_eq!(code(&mut client, "store.defineQuery", query("secret")).await, "");
    assert_eq!(code(&mut client, "store.defineQuery", query("public")).await, "FORBIDDEN");
    assert_eq!(code(&mut client, "store.stats", json!({})).await, "FORBIDDEN");
    // These operations are not checked.
    let before = checks.0.lock().unwrap().len();
    client.call("auth.whoami", json!({})).await;
    assert_eq!(code(&mut client, "store.unsubscribe", json!({"subscriptionId": "sub-9"})).await, "NOT_FOUND");
    assert_eq!(checks.0.lock().unwrap().len(), before);
    let checks = checks.0.lock().unwrap();
    assert!(checks.iter().all(|(user, ..)| user == "dee"));
    for (operation, resource) in [
        ("store.all", "fourth"),
        ("store.subscribe", "all-own"),
        ("store.subscribe", "other"),
        ("store.transaction", "third"),
        ("store.getBucketSchema", "own"),
        ("store.defineQuery", "public"),
        ("store.stats", "*"),
    ] {
        assert!(checks.iter().any(|(_, checked, on)| checked == operation && on == resource), "{operation}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn custom_check_is_skipped_for_anonymous_clients_and_insufficient_tiers() {
    let checks = Arc::new(RecordingCheck::default());
    let auth = tokens([user("rea", &["reader"])]).required(false).check(Arc::clone(&checks));
    let test = start_server(auth).await;
    let mut client = test.anonymous().await;
    client.call("store.all", json!({"bucket": "other"})).await;
    client.call("auth.login", json!({"token": "rea"})).await;
    assert_eq!(code(&mut client, "store.insert", json!({"bucket": "own", "data": {}})).await, "FORBIDDEN");
    assert_eq!(checks.0.lock().unwrap().len(), 0);
}

/// The number of records in some buckets.
#[derive(Debug)]
struct Counts(&'static [&'static str]);

impl ProgrammaticQuery for Counts {
    fn buckets(&self) -> Vec<String> {
        self.0.iter().map(|&name| name.to_owned()).collect()
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        let count = |bucket: &&str| match view.query(&json!({"bucket": bucket}))? {
            QueryOutput::Records(records) => Ok(json!(records.len())),
            QueryOutput::Value(other) => panic!("expected records, got {other:?}"),
        };
        self.0.iter().map(count).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programmatic_queries_need_permission_for_all_their_buckets() {
    let people = [user("dee", &["diver"]), user("all", &["all"]), user("none", &["none"])];
    let rules = [Rule::new("diver", ["store.*"]).on_buckets(["own"]), Rule::new("all", ["store.*"])];
    let options = options()
        .auth(allow_only(tokens(people), rules))
        .query("one", Counts(&["own"]))
        .query("both", Counts(&["own", "other"]))
        .query("nothing", Counts(&[]));
    let test = TestServer::start_with(options).await;
    test.bucket("own", []).await;
    test.bucket("other", []).await;
    for (user_id, codes) in [("dee", ["", "FORBIDDEN", "FORBIDDEN"]), ("all", ["", "", ""]), ("none", ["FORBIDDEN"; 3])]
    {
        let mut client = test.client(user_id).await;
        for (query, expected) in ["one", "both", "nothing"].into_iter().zip(codes) {
            assert_eq!(
                code(&mut client, "store.subscribe", json!({"query": query})).await,
                expected,
                "{user_id} {query}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_operation_of_a_transaction_must_be_permitted() {
    let auth = tokens([user("rea", &["careful"]), user("dee", &["direct"]), user("own", &["owner"])]);
    let own = |rule: Rule| rule.on_rows(json!({"n": 2})).unwrap();
    let rules = [
        Rule::new("careful", ["store.transaction", "store.get"]),
        Rule::new("direct", ["store.get", "store.delete"]),
        Rule::new("owner", ["store.transaction"]),
        own(Rule::new("owner", ["store.get", "store.delete"])),
    ];
    let test = start_server(allow_only(auth, rules)).await;
    test.write(|draft| draft.insert("own", crate::test_server::object(json!({"id": "b", "n": 2})))).await;
    let get = |key: &str| json!({"op": "get", "bucket": "own", "key": key});
    let delete = |key: &str| json!({"op": "delete", "bucket": "own", "key": key});
    let all = |steps: &[Json]| json!({"operations": steps});
    let mut careful = test.client("rea").await;
    assert_eq!(code(&mut careful, "store.transaction", all(&[get("a")])).await, "");
    for other in [
        delete("a"),
        json!({"op": "insert", "bucket": "own", "data": {}}),
        json!({"op": "update", "bucket": "own", "key": "a", "data": {}}),
        json!({"op": "where", "bucket": "own", "filter": {}}),
        json!({"op": "findOne", "bucket": "own", "filter": {}}),
        json!({"op": "count", "bucket": "own"}),
    ] {
        assert_eq!(
            code(&mut careful, "store.transaction", all(&[get("a"), other.clone()])).await,
            "FORBIDDEN",
            "{other}"
        );
    }
    let mut direct = test.client("dee").await;
    assert_eq!(code(&mut direct, "store.transaction", all(&[get("a")])).await, "FORBIDDEN");
    // The row filter of each operation applies.
    let mut owner = test.client("own").await;
    let results = owner.call("store.transaction", all(&[get("a"), get("b")])).await;
    assert_eq!((&results["results"][0]["data"], &results["results"][1]["data"]["id"]), (&Json::Null, &json!("b")));
    // A hidden row is treated as missing, and is not deleted.
    assert_eq!(code(&mut owner, "store.transaction", all(&[delete("a")])).await, "");
    assert_eq!(code(&mut owner, "store.transaction", all(&[delete("b")])).await, "");
    let results = careful.call("store.transaction", all(&[get("a"), get("b")])).await;
    assert_eq!((&results["results"][0]["data"]["id"], &results["results"][1]["data"]), (&json!("a"), &Json::Null));
}
