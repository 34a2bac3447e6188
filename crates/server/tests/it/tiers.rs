//! Access tiers: the roles `reader`, `writer` and `admin`, and tiers of sessions without them.

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, Permissions, Rule, Tier};

use crate::test_server::{TestServer, allow_only, tokens, user, user_with_metadata};

/// Every operation with a tier: its tier, parameters, and error code if it is permitted.
pub(crate) const OPERATIONS: &[(&str, u8, &str, &str)] = &[
    ("store.get", 0, r#"{"bucket":"b","key":"k"}"#, ""),
    ("store.all", 0, r#"{"bucket":"b"}"#, ""),
    ("store.where", 0, r#"{"bucket":"b","filter":{}}"#, ""),
    ("store.findOne", 0, r#"{"bucket":"b","filter":{}}"#, ""),
    ("store.count", 0, r#"{"bucket":"b"}"#, ""),
    ("store.first", 0, r#"{"bucket":"b","n":1}"#, ""),
    ("store.last", 0, r#"{"bucket":"b","n":1}"#, ""),
    ("store.paginate", 0, r#"{"bucket":"b","limit":1}"#, ""),
    ("store.sum", 0, r#"{"bucket":"b","field":"n"}"#, ""),
    ("store.avg", 0, r#"{"bucket":"b","field":"n"}"#, ""),
    ("store.min", 0, r#"{"bucket":"b","field":"n"}"#, ""),
    ("store.max", 0, r#"{"bucket":"b","field":"n"}"#, ""),
    ("store.buckets", 0, "{}", ""),
    ("store.stats", 0, "{}", ""),
    ("store.query", 0, r#"{"bucket":"b"}"#, ""),
    ("store.subscribe", 0, r#"{"query":"q"}"#, ""),
    ("store.unsubscribe", 0, r#"{"subscriptionId":"sub-0"}"#, "NOT_FOUND"),
    ("store.insert", 1, r#"{"bucket":"b","data":{}}"#, ""),
    ("store.insertMany", 1, r#"{"bucket":"b","data":[{}]}"#, ""),
    ("store.upsert", 1, r#"{"bucket":"b","data":{"id":"k"}}"#, ""),
    ("store.update", 1, r#"{"bucket":"b","key":"none","data":{}}"#, "NOT_FOUND"),
    ("store.delete", 1, r#"{"bucket":"b","key":"none"}"#, ""),
    ("store.clear", 1, r#"{"bucket":"b"}"#, ""),
    ("store.transaction", 1, r#"{"operations":[{"op":"count","bucket":"b"}]}"#, ""),
    (
        "store.defineBucket",
        2,
        r#"{"name":"b","config":{"key":"id","schema":{"id":{"type":"string"}}}}"#,
        "ALREADY_EXISTS",
    ),
    ("store.dropBucket", 2, r#"{"name":"none"}"#, "BUCKET_NOT_DEFINED"),
    ("store.updateBucket", 2, r#"{"name":"b","updates":{}}"#, ""),
    ("store.getBucketSchema", 2, r#"{"name":"b"}"#, ""),
    ("store.defineQuery", 2, r#"{"name":"q","config":{"bucket":"b"}}"#, "ALREADY_EXISTS"),
    ("store.undefineQuery", 2, r#"{"name":"none"}"#, "QUERY_NOT_DEFINED"),
    ("store.listQueries", 2, "{}", ""),
    ("rules.getFact", 0, r#"{"key":"k"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.queryFacts", 0, r#"{"pattern":"*"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.getAllFacts", 0, "{}", "RULES_NOT_AVAILABLE"),
    ("rules.subscribe", 0, r#"{"pattern":"*"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.unsubscribe", 0, r#"{"subscriptionId":"sub-0"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.stats", 0, "{}", "RULES_NOT_AVAILABLE"),
    ("rules.emit", 1, r#"{"topic":"t"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.setFact", 1, r#"{"key":"k","value":1}"#, "RULES_NOT_AVAILABLE"),
    ("rules.deleteFact", 1, r#"{"key":"k"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.registerRule", 2, r#"{"rule":{}}"#, "RULES_NOT_AVAILABLE"),
    ("rules.unregisterRule", 2, r#"{"ruleId":"r"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.updateRule", 2, r#"{"ruleId":"r","updates":{}}"#, "RULES_NOT_AVAILABLE"),
    ("rules.enableRule", 2, r#"{"ruleId":"r"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.disableRule", 2, r#"{"ruleId":"r"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.getRule", 2, r#"{"ruleId":"r"}"#, "RULES_NOT_AVAILABLE"),
    ("rules.getRules", 2, "{}", "RULES_NOT_AVAILABLE"),
    ("rules.validateRule", 2, r#"{"rule":{}}"#, "RULES_NOT_AVAILABLE"),
    ("audit.query", 2, "{}", "UNKNOWN_OPERATION"),
    ("procedures.register", 2, r#"{"procedure":{}}"#, "UNKNOWN_OPERATION"),
    ("procedures.unregister", 2, r#"{"name":"p"}"#, "UNKNOWN_OPERATION"),
    ("procedures.update", 2, r#"{"name":"p","updates":{}}"#, "UNKNOWN_OPERATION"),
    ("procedures.get", 0, r#"{"name":"p"}"#, "UNKNOWN_OPERATION"),
    ("procedures.list", 2, "{}", "UNKNOWN_OPERATION"),
    ("procedures.call", 1, r#"{"name":"p"}"#, "UNKNOWN_OPERATION"),
    ("server.stats", 2, "{}", ""),
    ("server.connections", 2, "{}", ""),
    ("auth.explain", 2, r#"{"operation":"store.get"}"#, ""),
];

/// Users, their roles, and their tiers.
const PEOPLE: &[(&str, &[&str], u8)] = &[
    ("rea", &["reader"], 0),
    ("wes", &["writer"], 1),
    ("ada", &["admin"], 2),
    // The highest tier applies.
    ("two", &["writer", "reader", "diver"], 1),
    ("top", &["reader", "admin"], 2),
    // Sessions without a built-in role have the default tier.
    ("cus", &["diver", "Reader", "superadmin"], 1),
    ("non", &[], 1),
];

fn auth() -> Auth {
    tokens(PEOPLE.iter().map(|(name, roles, _)| user(name, roles)))
}

async fn start_server(auth: Auth) -> TestServer {
    let test = TestServer::start(auth).await;
    test.bucket("b", []).await;
    test.query("q", json!({"bucket": "b"})).await;
    test
}

/// Checks every operation of every user against its tier.
async fn check(test: &TestServer, level_of: impl Fn(&str, u8) -> u8) {
    for (name, _, level) in PEOPLE {
        let level = &level_of(name, *level);
        let mut client = test.client(name).await;
        for (operation, tier, params, expected) in OPERATIONS {
            let params: Json = serde_json::from_str(params).unwrap();
            let id = client.send(operation, params).await;
            let reply = client.reply(id).await;
            let code = reply["code"].as_str().unwrap_or_default();
            let expected = if level >= tier { expected } else { "FORBIDDEN" };
            assert_eq!(code, expected, "{name} {operation}: {reply}");
            // The tier is checked before the parameters.
            if level < tier {
                assert_eq!(client.call_err(operation, json!({})).await.0, "FORBIDDEN", "{name} {operation}");
            }
        }
        assert_eq!(client.call("auth.whoami", json!({})).await["userId"], *name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn built_in_roles_set_the_tier() {
    check(&start_server(auth()).await, |_, level| level).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn default_tier_applies_to_sessions_without_a_built_in_role() {
    for (tier, level) in [(Tier::Read, 0), (Tier::Write, 1), (Tier::Admin, 2)] {
        let auth = auth().default_tier(tier);
        let level_of = |name: &str, own: u8| if matches!(name, "cus" | "non") { level } else { own };
        check(&start_server(auth).await, level_of).await;
    }
}

/// Regression: a token without roles had every tier.
#[tokio::test(flavor = "multi_thread")]
async fn token_without_roles_cannot_drop_a_bucket() {
    let test = start_server(tokens([user("non", &[])])).await;
    let mut client = test.client("non").await;
    let (code, error) = client.call_err("store.dropBucket", json!({"name": "b"})).await;
    assert_eq!(code, "FORBIDDEN");
    assert_eq!(error["message"], "this operation requires admin access: the role admin or a permission rule");
    client.call("store.all", json!({"bucket": "b"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_raises_a_custom_role_and_the_default_access_does_not() {
    let people = [user("kee", &["keeper"]), user("wri", &["keeper", "writer"]), user("oth", &["other"])];
    let rule = Rule::new("keeper", ["store.updateBucket", "store.getBucketSchema"]).on_buckets(["b"]);
    let test = start_server(tokens(people).permissions(Permissions::new(DefaultAccess::Allow, [rule]))).await;
    test.bucket("c", []).await;
    let update = |name: &str| json!({"name": name, "updates": {}});
    let mut keeper = test.client("kee").await;
    assert_eq!(keeper.call("store.updateBucket", update("b")).await["updated"], true);
    // The rule does not apply to another bucket or operation.
    assert_eq!(keeper.call_err("store.updateBucket", update("c")).await.0, "FORBIDDEN");
    assert_eq!(keeper.call_err("store.dropBucket", json!({"name": "b"})).await.0, "FORBIDDEN");
    assert_eq!(keeper.call_err("store.dropBucket", json!({})).await.0, "FORBIDDEN");
    assert_eq!(keeper.call_err("store.updateBucket", json!({"name": "b"})).await.0, "VALIDATION_ERROR");
    for other in ["wri", "oth"] {
        let mut client = test.client(other).await;
        assert_eq!(client.call_err("store.updateBucket", update("b")).await.0, "FORBIDDEN", "{other}");
    }
}

/// Login is optional.
#[tokio::test(flavor = "multi_thread")]
async fn anonymous_tier_applies_to_anonymous_clients() {
    for (tier, level) in [(None, 2), (Some(Tier::Read), 0), (Some(Tier::Write), 1), (Some(Tier::Admin), 2)] {
        let mut auth = auth().required(false);
        auth.anonymous_tier = tier;
        let test = start_server(auth).await;
        let mut client = test.anonymous().await;
        for (operation, needed, params, expected) in OPERATIONS {
            let id = client.send(operation, serde_json::from_str(params).unwrap()).await;
            let reply = client.reply(id).await;
            // The code is `UNAUTHORIZED`, because the client may log in.
            let expected = if level >= *needed { *expected } else { "UNAUTHORIZED" };
            assert_eq!(reply["code"].as_str().unwrap_or_default(), expected, "{tier:?} {operation}: {reply}");
        }
        client.call("auth.whoami", json!({})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_continues_after_logout_if_anonymous_clients_can_read() {
    let test = start_server(auth().required(false).anonymous_tier(Tier::Read)).await;
    let mut client = test.client("ada").await;
    client.call("store.subscribe", json!({"query": "q"})).await;
    client.call("auth.logout", json!({})).await;
    test.write(|draft| draft.insert("b", crate::test_server::object(json!({"id": "k"})))).await;
    assert_eq!(client.push().await["data"][0]["id"], "k");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_cannot_raise_a_built_in_role() {
    let rules: Vec<Rule> =
        PEOPLE.iter().flat_map(|(_, roles, _)| roles.iter()).map(|role| Rule::new(*role, ["*"])).collect();
    let auth = auth().permissions(Permissions::new(DefaultAccess::Allow, rules));
    // A rule raises a custom role.
    check(&start_server(auth).await, |name, level| if name == "cus" { 2 } else { level }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admin_role_does_not_replace_a_permission() {
    let auth = allow_only(tokens([user_with_metadata("ada", &["admin"], json!({}))]), [Rule::new("reader", ["*"])]);
    let test = start_server(auth).await;
    let mut client = test.client("ada").await;
    for (operation, _, params, _) in OPERATIONS {
        // Own subscriptions can be cancelled without permission.
        if *operation == "store.unsubscribe" {
            continue;
        }
        let params: Json = serde_json::from_str(params).unwrap();
        assert_eq!(client.call_err(operation, params).await.0, "FORBIDDEN", "{operation}");
        assert_eq!(client.call_err(operation, json!({})).await.0, "FORBIDDEN", "{operation}");
    }
}
