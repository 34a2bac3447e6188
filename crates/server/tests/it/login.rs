//! Login and logout.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde_json::{Value as Json, json};
use tidewire::RateLimit;
use tidewire::auth::{
    Auth, Jwt, JwtAlgorithm, JwtKey, JwtKeys, JwtOptions, Session, TokenExpiry, TokenValidator, Validation,
    ValidatorFailed,
};

use crate::client::{Client, options, serve};
use crate::test_server::{START_MILLIS, TestServer, tokens, user};

fn auth() -> Auth {
    let brief = user("brief", &["writer"]).expiry(TokenExpiry::After(Duration::from_secs(1)));
    let over = user("over", &["writer"]).expiry(TokenExpiry::At(START_MILLIS));
    tokens([user("ann", &["writer", "diver"]), user("bob", &[]), brief, over])
}

async fn message_of(client: &mut Client, operation: &str, params: Json) -> (String, String) {
    let (code, error) = client.call_err(operation, params).await;
    (code, error["message"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn login_switches_the_session_and_logout_ends_it() {
    let test = TestServer::start(auth()).await;
    let mut client = test.anonymous().await;
    assert_eq!(client.welcome["requiresAuth"], true);
    let anonymous = json!({"authenticated": false});
    assert_eq!(client.call("auth.whoami", json!({})).await, anonymous);
    assert_eq!(client.call("auth.logout", json!({})).await, json!({"loggedOut": true}));
    let ann = json!({"userId": "ann", "roles": ["writer", "diver"], "expiresAt": null});
    assert_eq!(client.call("auth.login", json!({"token": "ann"})).await, ann);
    let mut whoami = ann.clone();
    whoami["authenticated"] = json!(true);
    assert_eq!(client.call("auth.whoami", json!({})).await, whoami);
    client.call("store.buckets", json!({})).await;
    // Another user on the same connection.
    let bob = client.call("auth.login", json!({"token": "bob"})).await;
    assert_eq!(bob, json!({"userId": "bob", "roles": [], "expiresAt": null}));
    assert_eq!(client.call("auth.whoami", json!({})).await["userId"], "bob");
    let brief = client.call("auth.login", json!({"token": "brief"})).await;
    assert_eq!(brief["expiresAt"], START_MILLIS + 1000);
    assert_eq!(client.call("auth.logout", json!({})).await, json!({"loggedOut": true}));
    assert_eq!(client.call("auth.whoami", json!({})).await, anonymous);
    assert_eq!(client.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_login_keeps_the_current_session() {
    let test = TestServer::start(auth()).await;
    for is_logged_in in [false, true] {
        let mut client = test.anonymous().await;
        if is_logged_in {
            client.call("auth.login", json!({"token": "ann"})).await;
        }
        for (params, code) in [
            (json!({}), "VALIDATION_ERROR"),
            (json!({"token": ""}), "VALIDATION_ERROR"),
            (json!({"token": null}), "VALIDATION_ERROR"),
            (json!({"token": 7}), "VALIDATION_ERROR"),
            (json!({"token": ["ann"]}), "VALIDATION_ERROR"),
            (json!({"token": "unknown"}), "UNAUTHORIZED"),
            (json!({"token": "ANN"}), "UNAUTHORIZED"),
            (json!({"token": "over"}), "UNAUTHORIZED"),
        ] {
            let (failed, error) = client.call_err("auth.login", params.clone()).await;
            assert_eq!(failed, code, "{params}");
            assert!(error.get("details").is_none(), "{error}");
            assert_eq!(client.call("auth.whoami", json!({})).await["authenticated"], is_logged_in, "{params}");
        }
        let id = client.send("store.buckets", json!({})).await;
        assert_eq!(client.reply(id).await["type"] == "result", is_logged_in);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_clients_cannot_probe_for_operations() {
    let test = TestServer::start(auth()).await;
    let mut client = test.anonymous().await;
    for operation in
        ["store.get", "store.gett", "rules.emit", "audit.query", "identity.login", "frob", "x.y", "Auth.login"]
    {
        let failed = message_of(&mut client, operation, json!({})).await;
        assert_eq!(failed.0, "UNAUTHORIZED", "{operation}");
    }
    // Operations under `auth.` need no login, so an unknown name is reported as an unknown operation.
    for operation in ["auth.x", "auth.", "auth.Login", "auth.login.x", "ping"] {
        assert_eq!(client.call_err(operation, json!({})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
    let mut client = test.client("bob").await;
    for operation in ["store.gett", "identity.login", "frob", "x.y", "Auth.login", "auth.x", "ping"] {
        assert_eq!(client.call_err(operation, json!({})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
    // Operations for administrators are forbidden even if they are not enabled.
    assert_eq!(client.call_err("audit.query", json!({})).await.0, "FORBIDDEN");
}

#[tokio::test(flavor = "multi_thread")]
async fn optional_login_applies_the_roles_of_the_user() {
    let test = TestServer::start(tokens([user("rea", &["reader"])]).required(false)).await;
    let mut client = test.anonymous().await;
    assert_eq!(client.welcome["requiresAuth"], false);
    let bucket = |name: &str| json!({"name": name, "config": {"key": "id", "schema": {"id": {"type": "string"}}}});
    client.call("store.defineBucket", bucket("a")).await;
    client.call("auth.login", json!({"token": "rea"})).await;
    // A client that has logged in has only the permissions of its user.
    assert_eq!(client.call_err("store.defineBucket", bucket("b")).await.0, "FORBIDDEN");
    client.call("auth.logout", json!({})).await;
    client.call("store.defineBucket", bucket("b")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_auth_has_no_auth_operations() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.welcome["requiresAuth"], false);
    for operation in ["auth.login", "auth.logout", "auth.whoami"] {
        assert_eq!(client.call_err(operation, json!({"token": "ann"})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_expires_at_its_deadline() {
    let test = TestServer::start(auth()).await;
    let mut client = test.client("brief").await;
    test.advance(999);
    client.call("store.buckets", json!({})).await;
    test.advance(1);
    // These operations need no session, and do not end the expired one.
    assert_eq!(client.call("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.call_err("auth.login", json!({"token": "unknown"})).await.0, "UNAUTHORIZED");
    let expired = ("UNAUTHORIZED".to_owned(), "Session expired".to_owned());
    assert_eq!(message_of(&mut client, "store.buckets", json!({})).await, expired);
    let (code, message) = message_of(&mut client, "store.buckets", json!({})).await;
    assert_eq!(code, "UNAUTHORIZED");
    assert_ne!(message, "Session expired", "only the error of the first request after expiry has the reason");
    let again = client.call("auth.login", json!({"token": "brief"})).await;
    assert_eq!(again["expiresAt"], START_MILLIS + 2000);
    client.call("store.buckets", json!({})).await;
    // The first request after expiry may be any that needs a session, even an unknown operation.
    test.advance(1000);
    assert_eq!(message_of(&mut client, "store.gett", json!({})).await, expired);
    // Logout succeeds after expiry.
    client.call("auth.login", json!({"token": "brief"})).await;
    test.advance(1000);
    assert_eq!(client.call("auth.logout", json!({})).await, json!({"loggedOut": true}));
    assert_ne!(message_of(&mut client, "store.buckets", json!({})).await, expired);
}

#[tokio::test(flavor = "multi_thread")]
async fn optional_session_expires_too() {
    let test = TestServer::start(auth().required(false)).await;
    let mut client = test.client("brief").await;
    test.advance(1000);
    let expired = ("UNAUTHORIZED".to_owned(), "Session expired".to_owned());
    assert_eq!(message_of(&mut client, "store.buckets", json!({})).await, expired);
    client.call("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_session_receives_no_pushes() {
    let test = TestServer::start(auth()).await;
    test.bucket("notes", []).await;
    let mut client = test.client("brief").await;
    let plain = client.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let with_position = client.call("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    let delta = client.call("store.subscribe", json!({"config": {"bucket": "notes"}, "mode": "delta"})).await;
    test.advance(1000);
    test.write(|draft| draft.insert("notes", crate::test_server::object(json!({"id": "a"})))).await;
    // Only subscriptions with positions or deltas are notified of their end.
    let mut ended = Vec::new();
    for _ in 0..2 {
        let push = client.push().await;
        assert_eq!(push["error"], json!({"code": "UNAUTHORIZED", "message": "Session expired"}), "{push}");
        ended.push(push["subscriptionId"].clone());
    }
    ended.sort_by_key(Json::to_string);
    assert_eq!(ended, [with_position["subscriptionId"].clone(), delta["subscriptionId"].clone()]);
    // Another login does not restore the subscriptions.
    client.call("auth.login", json!({"token": "ann"})).await;
    assert_eq!(
        client.call_err("store.unsubscribe", json!({"subscriptionId": plain["subscriptionId"]})).await.0,
        "NOT_FOUND"
    );
    client.call("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert!(client.has_no_pushes().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_request_after_expiry_ends_subscriptions() {
    let test = TestServer::start(auth()).await;
    test.bucket("notes", []).await;
    let mut client = test.client("brief").await;
    client.call("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let with_position = client.call("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    test.advance(1000);
    assert_eq!(client.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
    let push = client.push().await;
    assert_eq!(push["subscriptionId"], with_position["subscriptionId"]);
    assert_eq!(push["error"]["code"], "UNAUTHORIZED");
    client.call("auth.login", json!({"token": "ann"})).await;
    client.call("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert!(client.has_no_pushes().await);
    assert_eq!(test.server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_requests_consume_no_rate_limit() {
    let limit = RateLimit::new(3, Duration::from_secs(1));
    let test = TestServer::start_with(options().auth(auth()).rate_limit(limit)).await;
    let mut client = test.anonymous().await;
    for _ in 0..9 {
        assert_eq!(client.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
    }
    // Logins count towards the address, later requests towards the user, across connections.
    client.call("auth.login", json!({"token": "ann"})).await;
    let mut other = test.client("ann").await;
    for client in [&mut client, &mut other] {
        client.call("store.buckets", json!({})).await;
    }
    client.call("store.buckets", json!({})).await;
    let (code, error) = other.call_err("store.buckets", json!({})).await;
    assert_eq!((&*code, &error["details"]), ("RATE_LIMITED", &json!({"retryAfterMs": 1000})));
    // Bob has his own budget. The address had one request left, which this login uses.
    let mut bob = test.client("bob").await;
    bob.call("store.buckets", json!({})).await;
    let mut late = test.anonymous().await;
    assert_eq!(late.call_err("auth.login", json!({"token": "bob"})).await.0, "RATE_LIMITED");
    test.advance(1000);
    late.call("auth.login", json!({"token": "bob"})).await;
}

/// Fails for all tokens but `good`.
struct FailingValidator;

impl TokenValidator for FailingValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            match token {
                "good" => Ok(Some(Session::new("ann", ["writer"]))),
                _ => Err(ValidatorFailed("the directory of people is at 10.0.0.7".into())),
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_validator_reveals_nothing_and_keeps_the_session() {
    let test = TestServer::start(Auth::new(FailingValidator)).await;
    let mut client = test.client("good").await;
    let failed = message_of(&mut client, "auth.login", json!({"token": "bad"})).await;
    assert_eq!(failed, ("INTERNAL_ERROR".to_owned(), "Internal server error".to_owned()));
    client.call("store.buckets", json!({})).await;
}

const SECRET: &[u8] = b"a secret of more than thirty-two bytes";
/// `{"sub":"mara","roles":["writer"],"exp":2000000000,"team":7}`, signed.
const SIGNED: [(JwtAlgorithm, &str, &str); 3] = [
    (
        JwtAlgorithm::Rs256,
        include_str!("../../src/auth/jwt/fixtures/rs256.pem"),
        include_str!("../../src/auth/jwt/fixtures/rs256.jwt"),
    ),
    (
        JwtAlgorithm::Es256,
        include_str!("../../src/auth/jwt/fixtures/es256.pem"),
        include_str!("../../src/auth/jwt/fixtures/es256.jwt"),
    ),
    (
        JwtAlgorithm::EdDsa,
        include_str!("../../src/auth/jwt/fixtures/eddsa.pem"),
        include_str!("../../src/auth/jwt/fixtures/eddsa.jwt"),
    ),
];

fn signed(header: &Json, claims: &Json, secret: &[u8]) -> String {
    let part = |json: &Json| URL_SAFE_NO_PAD.encode(json.to_string());
    let text = format!("{}.{}", part(header), part(claims));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), text.as_bytes());
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn jwt(options: JwtOptions) -> Auth {
    Auth::new(Jwt::new(options).unwrap())
}

fn hs256() -> JwtOptions {
    JwtOptions::new(JwtKeys::One(JwtAlgorithm::Hs256, JwtKey::Secret(SECRET.to_vec())))
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_tokens_of_every_algorithm_log_in() {
    let claims = json!({"sub": "mara", "roles": ["writer"], "exp": 2_000_000_000});
    let own = signed(&json!({"alg": "HS256"}), &claims, SECRET);
    let secret = (JwtAlgorithm::Hs256, JwtKey::Secret(SECRET.to_vec()), own.as_str());
    let public = |(algorithm, pem, token): (_, &str, _)| (algorithm, JwtKey::PublicKey(pem.to_owned()), token);
    for (algorithm, key, token) in SIGNED.map(public).into_iter().chain([secret]) {
        let test = TestServer::start(jwt(JwtOptions::new(JwtKeys::One(algorithm, key.clone())))).await;
        let mut client = test.anonymous().await;
        // Rejects unsigned tokens, and tokens signed with public information.
        let payload = token.split('.').nth(1).unwrap();
        let unsigned = format!("{}.{payload}.", URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#));
        let known =
            if let JwtKey::PublicKey(pem) = &key { pem.as_bytes() } else { b"another secret of thirty-two bytes" };
        for forged in [
            unsigned,
            signed(&json!({"alg": "HS256"}), &claims, known),
            signed(&json!({"alg": algorithm.name()}), &claims, known),
            format!("{}A", &token[..token.len() - 1]).replace('.', ".."),
        ] {
            assert_eq!(
                client.call_err("auth.login", json!({"token": forged})).await.0,
                "UNAUTHORIZED",
                "{algorithm:?}"
            );
            assert_eq!(client.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
        }
        let mara = client.call("auth.login", json!({"token": token})).await;
        assert_eq!(mara, json!({"userId": "mara", "roles": ["writer"], "expiresAt": 2_000_000_000_000_u64}));
        client.call("store.buckets", json!({})).await;
        test.advance(2_000_000_000_000 - START_MILLIS);
        assert_eq!(client.call_err("store.buckets", json!({})).await.1["message"], "Session expired");
        assert_eq!(client.call_err("auth.login", json!({"token": token})).await.0, "UNAUTHORIZED");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_tokens_are_checked_for_issuer_audience_and_validity_period() {
    let test = TestServer::start(jwt(hs256().issuer("harbour").audience("tides"))).await;
    let mut client = test.anonymous().await;
    let token = |change: &dyn Fn(&mut Json)| {
        let mut claims = json!({"sub": "mara", "iss": "harbour", "aud": ["tides"], "exp": START_MILLIS / 1000 + 10});
        change(&mut claims);
        json!({"token": signed(&json!({"alg": "HS256"}), &claims, SECRET)})
    };
    let wrong: [&dyn Fn(&mut Json); 9] = [
        &|claims| claims["exp"] = json!(START_MILLIS / 1000),
        &|claims| claims["exp"] = json!("tomorrow"),
        &|claims| claims["nbf"] = json!(START_MILLIS / 1000 + 1),
        &|claims| claims["iss"] = json!("market"),
        &|claims| claims["iss"] = json!(null),
        &|claims| claims["aud"] = json!("boats"),
        &|claims| claims["aud"] = json!([]),
        &|claims| claims["sub"] = json!(""),
        &|claims| claims["roles"] = json!({"admin": true}),
    ];
    for change in wrong {
        assert_eq!(client.call_err("auth.login", token(change)).await.0, "UNAUTHORIZED");
    }
    client.call("auth.login", token(&|claims| claims["nbf"] = json!(START_MILLIS / 1000))).await;
    test.advance(1000);
    client.call("auth.login", token(&|claims| claims["nbf"] = json!(START_MILLIS / 1000 + 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_token_and_its_session_end_at_the_maximum_age() {
    let test = TestServer::start(jwt(hs256().max_age(Duration::from_secs(10)))).await;
    let mut client = test.anonymous().await;
    let token = |claims: &Json| json!({"token": signed(&json!({"alg": "HS256"}), claims, SECRET)});
    assert_eq!(client.call_err("auth.login", token(&json!({"sub": "mara"}))).await.0, "UNAUTHORIZED", "without `iat`");
    let mara = json!({"sub": "mara", "iat": START_MILLIS / 1000, "exp": START_MILLIS / 1000 + 3600});
    assert_eq!(client.call("auth.login", token(&mara)).await["expiresAt"], START_MILLIS + 10_000);
    test.advance(9_999);
    client.call("store.buckets", json!({})).await;
    test.advance(1);
    assert_eq!(client.call_err("store.buckets", json!({})).await.1["message"], "Session expired");
    assert_eq!(client.call_err("auth.login", token(&mara)).await.0, "UNAUTHORIZED");
}
