//! Tests the permissions of every operation, for every kind of client and auth setting.
//!
//! The result of a request of an in-process client is compared with a short model of the rules, and with `auth.explain`.

use serde_json::{Value as Json, json};
use tidewire_store::{Store, StoreOptions};

use super::table::{Operation, OperationId, Scope};
use crate::auth::{Auth, DefaultAccess, Permissions, Rule, Session, StaticToken, StaticTokens, Tier};
use crate::{Code, RequestError, Server, ServerOptions};

/// Returns valid, harmless parameters for an operation.
fn params(operation: &Operation) -> Json {
    match operation.name {
        "store.subscribe" => json!({"config": {"bucket": "b"}}),
        "store.unsubscribe" => json!({"subscriptionId": "sub-0"}),
        "store.transaction" => json!({"operations": [{"op": "count", "bucket": "b"}]}),
        "store.insertMany" => json!({"bucket": "b", "data": [{}]}),
        "store.defineBucket" => json!({"name": "b", "config": {"key": "id", "schema": {"id": {"type": "string"}}}}),
        "store.defineQuery" => json!({"name": "q", "config": {"bucket": "b"}}),
        "store.dropBucket" | "store.undefineQuery" => json!({"name": "none"}),
        "store.updateBucket" | "store.getBucketSchema" => json!({"name": "b", "updates": {}}),
        "auth.explain" => json!({"operation": "store.get"}),
        "auth.login" => json!({"token": "unknown"}),
        // The union of the parameters of all other operations.
        _ => json!({"bucket": "b", "key": "k", "data": {}, "filter": {}, "n": 1, "limit": 1, "field": "n"}),
    }
}

struct Setting {
    is_required: bool,
    default: DefaultAccess,
    has_rules: bool,
    default_tier: Tier,
    anonymous_tier: Option<Tier>,
}

/// The roles of the clients; `None` for a client without a login.
const CLIENTS: [Option<&[&str]>; 7] = [
    None,
    Some(&[]),
    Some(&["reader"]),
    Some(&["writer"]),
    Some(&["admin"]),
    Some(&["custom"]),
    Some(&["custom", "reader"]),
];

impl Setting {
    fn all() -> impl Iterator<Item = Self> {
        let anonymous = [None, Some(Tier::Read), Some(Tier::Write), Some(Tier::Admin)];
        let access = [true, false]
            .into_iter()
            .flat_map(|is_required| [DefaultAccess::Allow, DefaultAccess::Deny].map(|default| (is_required, default)));
        access.flat_map(move |(is_required, default)| {
            [true, false].into_iter().flat_map(move |has_rules| {
                // The two tiers are independent, so four pairs cover all values of both.
                let tiers = anonymous.into_iter().zip([Tier::Write, Tier::Read, Tier::Write, Tier::Admin]);
                tiers.map(move |(anonymous_tier, default_tier)| Self {
                    is_required,
                    default,
                    has_rules,
                    default_tier,
                    anonymous_tier,
                })
            })
        })
    }

    fn options(&self) -> ServerOptions {
        let tokens = StaticTokens::new([("t", StaticToken::new("u", [""; 0]))]).unwrap();
        let roles = ["reader", "writer", "admin", "custom"].iter().filter(|_| self.has_rules);
        let permissions = Permissions::new(self.default, roles.map(|role| Rule::new(*role, ["*"])));
        let mut auth =
            Auth::new(tokens).required(self.is_required).permissions(permissions).default_tier(self.default_tier);
        auth.anonymous_tier = self.anonymous_tier;
        ServerOptions::default().port(0).auth(auth)
    }

    /// Returns the error code if an operation is denied to a client; `None` if it is allowed.
    fn expected_denial(&self, roles: Option<&[&str]>, operation: &Operation) -> Option<Code> {
        let tier = operation.tier?;
        let Some(roles) = roles else {
            let is_allowed = !self.is_required && self.anonymous_tier.is_none_or(|has| has >= tier);
            return (!is_allowed).then_some(Code::Unauthorized);
        };
        let has_rule = self.has_rules && !roles.is_empty();
        let is_high_enough = match roles.iter().filter_map(|role| Tier::of_role(role)).max() {
            Some(has) => has >= tier,
            None => self.default_tier >= tier || has_rule,
        };
        let is_permitted = has_rule || self.default == DefaultAccess::Allow || operation.scope == Scope::Connection;
        (!(is_high_enough && is_permitted)).then_some(Code::Forbidden)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_are_denied_only_without_permission() {
    let mut decisions = 0;
    for setting in Setting::all() {
        let store = Store::memory(StoreOptions::default());
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        store.define_bucket("b", config).await.unwrap();
        let options = setting.options();
        let server = Server::start(store, options.clone()).await.unwrap();
        for roles in CLIENTS {
            let session = roles.map(|roles| Session::new("user", roles.iter().copied()));
            for operation in OperationId::all() {
                let client = server.client(session.clone());
                let outcome: Result<Json, RequestError> = client.request(operation.name, params(&operation)).await;
                let is_denial = |code: &Code| matches!(code, Code::Forbidden | Code::Unauthorized);
                // A login with an unknown token also fails with `UNAUTHORIZED`.
                let code = outcome.as_ref().err().map(|error| error.code);
                let denied = code.filter(is_denial).filter(|_| operation.name != "auth.login");
                let expected = setting.expected_denial(roles, &operation);
                let context = || format!("{} by {roles:?}, {options:?}: {outcome:?}", operation.name);
                assert_eq!(denied, expected, "{}", context());
                // Missing parameters do not change the error.
                let empty: Result<Json, RequestError> = client.request(operation.name, json!({})).await;
                let empty = empty.err().map(|error| error.code).filter(is_denial);
                assert_eq!(empty, expected, "without parameters: {}", context());
                let bucket = operation.scope.names_bucket().then_some("b");
                let explained = options.explain(session.as_ref(), operation.name, bucket).unwrap();
                assert_eq!(explained.is_allowed, expected.is_none(), "{explained:?}: {}", context());
                decisions += 1;
            }
        }
        server.stop(std::time::Duration::ZERO).await;
    }
    assert_eq!(decisions, 32 * CLIENTS.len() * OperationId::all().count());
}
