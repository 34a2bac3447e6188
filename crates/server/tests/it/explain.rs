//! `auth.explain`: why somebody may or may not do something.

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Rule, Tier};

use crate::house::{House, known, only, own_rows, tokens, user};

fn auth() -> Auth {
    let people = [
        user("ada", &["admin"]),
        user("ann", &["member"]),
        user("rea", &["reader"]),
        known("red", &["mate"], json!({"crew": "red"})),
    ];
    let rules = [
        own_rows("member").on_buckets(["boats"]),
        Rule::new("mate", ["store.get"]).on_rows(json!({"crew": "{{ session.metadata.crew }}"})).unwrap(),
        Rule::new("mate", ["store.get"]).on_rows(json!({"n": {"$lt": 5}})).unwrap(),
        Rule::new("admin", ["*"]),
        Rule::new("reader", ["*"]),
    ];
    only(tokens(people), rules)
}

async fn house(auth: Auth) -> House {
    let house = House::open(auth).await;
    house.bucket("boats", [json!({"id": "a", "owner": "ann"}), json!({"id": "b", "owner": "bob"})]).await;
    house
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_explained_with_tier_rules_and_rows() {
    let house = house(auth()).await;
    let mut ada = house.client("ada").await;
    let member = json!({"index": 0, "role": "member", "allow": ["store.*"], "buckets": ["boats"],
        "where": {"owner": "{{ session.userId }}"}});
    let tier = |required: &str| json!({"required": required, "has": "write", "source": "auth.defaultTier"});
    let ask = |operation: &str, bucket: Option<&str>| json!({"userId": "ann", "roles": ["member"], "operation": operation, "bucket": bucket});
    assert_eq!(
        ada.ask("auth.explain", ask("store.insert", Some("boats"))).await,
        json!({
            "allowed": true, "tier": tier("write"), "rules": [member], "rowFilter": {"owner": "ann"}, "decidedBy": "rules",
            "reason": "rule 0 (role \"member\") allows it, on the rows that match the row filter",
        })
    );
    assert_eq!(
        ada.ask("auth.explain", ask("store.get", Some("ports"))).await,
        json!({
            "allowed": false, "tier": tier("read"), "rules": [], "rowFilter": null, "decidedBy": "default",
            "reason": "no rule of its roles covers store.get on \"ports\", and the default is to deny; \
                       its rules name the buckets boats",
        })
    );
    assert_eq!(
        ada.ask("auth.explain", ask("store.dropBucket", Some("boats"))).await,
        json!({
            "allowed": false, "tier": tier("admin"), "rules": [member], "rowFilter": null, "decidedBy": "rules",
            "reason": "store.dropBucket affects all rows, and rule 0 (role \"member\") allows it only on rows that match a filter",
        })
    );
    assert_eq!(
        ada.ask("auth.explain", ask("server.stats", None)).await,
        json!({
            "allowed": false, "tier": tier("admin"), "rules": [], "rowFilter": null, "decidedBy": "tier",
            "reason": "server.stats needs the tier admin, the session has write (auth.defaultTier), and no rule of its roles \
                       covers server.stats",
        })
    );
    let transaction = ada.ask("auth.explain", ask("store.transaction", Some("boats"))).await;
    assert!(transaction["reason"].as_str().unwrap().ends_with("also needs its own permission"), "{transaction}");
    let reader = json!({"roles": ["reader"], "operation": "store.insert", "bucket": "boats"});
    let reader = ada.ask("auth.explain", reader).await;
    assert_eq!(reader["tier"], json!({"required": "write", "has": "read", "source": "role reader"}));
    assert_eq!((&reader["allowed"], &reader["decidedBy"]), (&json!(false), &json!("tier")));
    assert!(reader["reason"].as_str().unwrap().contains("rules cannot raise the tier of a built-in role"), "{reader}");
    // The filters of several rules are joined, with the values of the session.
    let mate = json!({"roles": ["mate"], "metadata": {"crew": "red"}, "operation": "store.get", "bucket": "boats"});
    let mate = ada.ask("auth.explain", mate).await;
    assert_eq!(mate["rowFilter"], json!({"$or": [{"crew": "red"}, {"n": {"$lt": 5}}]}));
    // A value that the session lacks matches no row.
    let lost = json!({"roles": ["mate"], "operation": "store.get", "bucket": "boats"});
    assert_eq!(ada.ask("auth.explain", lost).await["rowFilter"], json!({"n": {"$lt": 5}}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_explained_as_it_is_logged_in() {
    let house = house(auth()).await;
    let mut ada = house.client("ada").await;
    let mut other = house.stranger().await;
    let connections = house.server.connections();
    let id = connections.last().unwrap().connection_id.clone();
    let ask = json!({"connectionId": id, "operation": "store.get", "bucket": "boats"});
    let stranger = ada.ask("auth.explain", ask.clone()).await;
    assert_eq!((&stranger["allowed"], &stranger["reason"]), (&json!(false), &json!("a login is required")));
    assert_eq!(stranger["tier"], json!({"required": "read", "has": null, "source": "not logged in"}));
    other.ask("auth.login", json!({"token": "red"})).await;
    let red = ada.ask("auth.explain", ask.clone()).await;
    assert_eq!(red["rowFilter"], json!({"$or": [{"crew": "red"}, {"n": {"$lt": 5}}]}));
    assert_eq!(
        ada.fail("auth.explain", json!({"connectionId": "conn-99", "operation": "store.get"})).await.0,
        "NOT_FOUND"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_without_a_login_are_explained() {
    let house = house(auth().required(false).anonymous_tier(Tier::Read)).await;
    let mut ada = house.client("ada").await;
    let explain = |operation: &str| json!({"operation": operation, "bucket": "boats"});
    let get = ada.ask("auth.explain", explain("store.get")).await;
    assert_eq!(get["reason"], "no login is required, and clients without one have the tier read");
    assert_eq!(get["tier"], json!({"required": "read", "has": "read", "source": "auth.anonymousTier"}));
    let insert = ada.ask("auth.explain", explain("store.insert")).await;
    assert_eq!((&insert["allowed"], &insert["decidedBy"]), (&json!(false), &json!("tier")));
    let login = ada.ask("auth.explain", json!({"operation": "auth.login"})).await;
    assert_eq!((&login["allowed"], &login["decidedBy"]), (&json!(true), &json!("connection")));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_for_administrators_and_its_parameters_are_checked() {
    let house = house(auth()).await;
    let ask = json!({"operation": "store.get", "bucket": "boats"});
    assert_eq!(house.stranger().await.fail("auth.explain", ask.clone()).await.0, "UNAUTHORIZED");
    for user in ["ann", "rea"] {
        assert_eq!(house.client(user).await.fail("auth.explain", ask.clone()).await.0, "FORBIDDEN", "{user}");
    }
    let mut ada = house.client("ada").await;
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
        let (code, error) = ada.fail("auth.explain", params.clone()).await;
        assert_eq!((&*code, &error["message"]), ("VALIDATION_ERROR", &json!(message)), "{params}");
    }
    let unknown: Json = ada.fail("auth.explained", json!({})).await.1;
    assert_eq!(unknown["code"], "UNKNOWN_OPERATION");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_auth_has_nothing_to_explain() {
    let server = crate::client::serve(crate::client::options()).await;
    let mut client = crate::client::Client::connect(&server).await;
    assert_eq!(client.fail("auth.explain", json!({"operation": "store.get"})).await.0, "UNKNOWN_OPERATION");
}
