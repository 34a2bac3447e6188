//! `auth.explain`: why a session may or may not perform an operation.

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Rule, Tier};

use crate::test_server::{TestServer, allow_only, own_rows, tokens, user, user_with_metadata};

fn auth() -> Auth {
    let people = [
        user("ada", &["admin"]),
        user("ann", &["member"]),
        user("rea", &["reader"]),
        user_with_metadata("red", &["mate"], json!({"crew": "red"})),
    ];
    let rules = [
        own_rows("member").on_buckets(["boats"]),
        Rule::new("mate", ["store.get"]).on_rows(json!({"crew": "{{ session.metadata.crew }}"})).unwrap(),
        Rule::new("mate", ["store.get"]).on_rows(json!({"n": {"$lt": 5}})).unwrap(),
        Rule::new("admin", ["*"]),
        Rule::new("reader", ["*"]),
    ];
    allow_only(tokens(people), rules)
}

async fn start_server(auth: Auth) -> TestServer {
    let test = TestServer::start(auth).await;
    test.bucket("boats", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "bob"})]).await;
    test
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_a_session_by_tier_rules_and_rows() {
    let test = start_server(auth()).await;
    let mut ada = test.client("ada").await;
    let member = json!({"index": 0, "role": "member", "allow": ["store.*"], "buckets": ["boats"],
        "where": {"owner": "{{ session.userId }}"}});
    let tier = |required: &str| json!({"required": required, "has": "write", "source": "auth.defaultTier"});
    let params = |operation: &str, bucket: Option<&str>| json!({"userId": "ann", "roles": ["member"], "operation": operation, "bucket": bucket});
    assert_eq!(
        ada.call("auth.explain", params("store.insert", Some("boats"))).await,
        json!({
            "allowed": true, "tier": tier("write"), "rules": [member], "rowFilter": {"owner": "ann"}, "decidedBy": "rules",
            "reason": "rule 0 (role \"member\") allows it, on the rows that match the row filter",
        })
    );
    assert_eq!(
        ada.call("auth.explain", params("store.get", Some("ports"))).await,
        json!({
            "allowed": false, "tier": tier("read"), "rules": [], "rowFilter": null, "decidedBy": "default",
            "reason": "no rule of the session's roles covers store.get on \"ports\", and the default is to deny; \
                       its rules name the buckets boats",
        })
    );
    assert_eq!(
        ada.call("auth.explain", params("store.dropBucket", Some("boats"))).await,
        json!({
            "allowed": false, "tier": tier("admin"), "rules": [member], "rowFilter": null, "decidedBy": "rules",
            "reason": "store.dropBucket affects all rows, and rule 0 (role \"member\") allows it only on rows that match a filter",
        })
    );
    assert_eq!(
        ada.call("auth.explain", params("server.stats", None)).await,
        json!({
            "allowed": false, "tier": tier("admin"), "rules": [], "rowFilter": null, "decidedBy": "tier",
            "reason": "server.stats needs the tier admin, the session has write (auth.defaultTier), and no rule of its roles \
                       covers server.stats",
        })
    );
    let transaction = ada.call("auth.explain", params("store.transaction", Some("boats"))).await;
    assert!(transaction["reason"].as_str().unwrap().ends_with("also needs its own permission"), "{transaction}");
    let reader = json!({"roles": ["reader"], "operation": "store.insert", "bucket": "boats"});
    let reader = ada.call("auth.explain", reader).await;
    assert_eq!(reader["tier"], json!({"required": "write", "has": "read", "source": "role reader"}));
    assert_eq!((&reader["allowed"], &reader["decidedBy"]), (&json!(false), &json!("tier")));
    assert!(reader["reason"].as_str().unwrap().contains("rules cannot raise the tier of a built-in role"), "{reader}");
    // The filters of several rules are combined with `$or`, with values from the session.
    let mate = json!({"roles": ["mate"], "metadata": {"crew": "red"}, "operation": "store.get", "bucket": "boats"});
    let mate = ada.call("auth.explain", mate).await;
    assert_eq!(mate["rowFilter"], json!({"$or": [{"crew": "red"}, {"n": {"$lt": 5}}]}));
    // A rule whose value the session lacks matches no row.
    let without_crew = json!({"roles": ["mate"], "operation": "store.get", "bucket": "boats"});
    assert_eq!(ada.call("auth.explain", without_crew).await["rowFilter"], json!({"n": {"$lt": 5}}));
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_a_connection_by_its_current_session() {
    let test = start_server(auth()).await;
    let mut ada = test.client("ada").await;
    let mut other = test.anonymous().await;
    let connections = test.server.connections();
    let id = connections.last().unwrap().connection_id.clone();
    let params = json!({"connectionId": id, "operation": "store.get", "bucket": "boats"});
    let anonymous = ada.call("auth.explain", params.clone()).await;
    assert_eq!((&anonymous["allowed"], &anonymous["reason"]), (&json!(false), &json!("a login is required")));
    assert_eq!(anonymous["tier"], json!({"required": "read", "has": null, "source": "not logged in"}));
    other.call("auth.login", json!({"token": "red"})).await;
    let red = ada.call("auth.explain", params.clone()).await;
    assert_eq!(red["rowFilter"], json!({"$or": [{"crew": "red"}, {"n": {"$lt": 5}}]}));
    assert_eq!(
        ada.call_err("auth.explain", json!({"connectionId": "conn-99", "operation": "store.get"})).await.0,
        "NOT_FOUND"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_anonymous_clients() {
    let test = start_server(auth().required(false).anonymous_tier(Tier::Read)).await;
    let mut ada = test.client("ada").await;
    let explain = |operation: &str| json!({"operation": operation, "bucket": "boats"});
    let get = ada.call("auth.explain", explain("store.get")).await;
    assert_eq!(get["reason"], "no login is required, and clients without one have the tier read");
    assert_eq!(get["tier"], json!({"required": "read", "has": "read", "source": "auth.anonymousTier"}));
    let insert = ada.call("auth.explain", explain("store.insert")).await;
    assert_eq!((&insert["allowed"], &insert["decidedBy"]), (&json!(false), &json!("tier")));
    let login = ada.call("auth.explain", json!({"operation": "auth.login"})).await;
    assert_eq!((&login["allowed"], &login["decidedBy"]), (&json!(true), &json!("connection")));
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_requires_the_admin_tier_and_checks_its_parameters() {
    let test = start_server(auth()).await;
    let params = json!({"operation": "store.get", "bucket": "boats"});
    assert_eq!(test.anonymous().await.call_err("auth.explain", params.clone()).await.0, "UNAUTHORIZED");
    for user in ["ann", "rea"] {
        assert_eq!(test.client(user).await.call_err("auth.explain", params.clone()).await.0, "FORBIDDEN", "{user}");
    }
    let mut ada = test.client("ada").await;
    for (params, message) in [
        (json!({}), "\"operation\" is missing; expected a non-empty string"),
        (json!({"operation": "store.gett"}), "unknown operation \"store.gett\"; did you mean \"store.get\"?"),
        (json!({"operation": "store.get", "bucket": 7}), "\"bucket\" must be a non-empty string, got 7"),
        (json!({"operation": "store.get", "roles": "admin"}), "\"roles\" must be an array, got a string"),
        (json!({"operation": "store.get", "roles": [1]}), "\"roles[0]\" must be a string"),
        (
            json!({"operation": "store.get", "roles": vec!["r"; 101]}),
            "\"roles\" has 101 elements; at most 100 are allowed",
        ),
        (json!({"operation": "store.get", "metadata": []}), "\"metadata\" must be an object, got an array"),
        (
            json!({"operation": "store.get", "connectionId": "conn-1", "userId": "ann"}),
            "\"connectionId\" cannot be combined with \"userId\", \"roles\" or \"metadata\"",
        ),
    ] {
        let (code, error) = ada.call_err("auth.explain", params.clone()).await;
        assert_eq!((&*code, &error["message"]), ("VALIDATION_ERROR", &json!(message)), "{params}");
    }
    let unknown: Json = ada.call_err("auth.explained", json!({})).await.1;
    assert_eq!(unknown["code"], "UNKNOWN_OPERATION");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_auth_has_no_explain() {
    let server = crate::client::serve(crate::client::options()).await;
    let mut client = crate::client::Client::connect(&server).await;
    assert_eq!(client.call_err("auth.explain", json!({"operation": "store.get"})).await.0, "UNKNOWN_OPERATION");
}
