//! Logging in and out.

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
use crate::house::{House, NOON, tokens, user};

fn people() -> Auth {
    let brief = user("brief", &["writer"]).expiry(TokenExpiry::After(Duration::from_secs(1)));
    let over = user("over", &["writer"]).expiry(TokenExpiry::At(NOON));
    tokens([user("ann", &["writer", "diver"]), user("bob", &[]), brief, over])
}

async fn message_of(client: &mut Client, operation: &str, params: Json) -> (String, String) {
    let (code, error) = client.fail(operation, params).await;
    (code, error["message"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_logs_in_and_out() {
    let house = House::open(people()).await;
    let mut client = house.stranger().await;
    assert_eq!(client.welcome["requiresAuth"], true);
    let nobody = json!({"authenticated": false});
    assert_eq!(client.ask("auth.whoami", json!({})).await, nobody);
    assert_eq!(client.ask("auth.logout", json!({})).await, json!({"loggedOut": true}));
    let ann = json!({"userId": "ann", "roles": ["writer", "diver"], "expiresAt": null});
    assert_eq!(client.ask("auth.login", json!({"token": "ann"})).await, ann);
    let mut whoami = ann.clone();
    whoami["authenticated"] = json!(true);
    assert_eq!(client.ask("auth.whoami", json!({})).await, whoami);
    client.ask("store.buckets", json!({})).await;
    // Somebody else on the same connection.
    let bob = client.ask("auth.login", json!({"token": "bob"})).await;
    assert_eq!(bob, json!({"userId": "bob", "roles": [], "expiresAt": null}));
    assert_eq!(client.ask("auth.whoami", json!({})).await["userId"], "bob");
    let brief = client.ask("auth.login", json!({"token": "brief"})).await;
    assert_eq!(brief["expiresAt"], NOON + 1000);
    assert_eq!(client.ask("auth.logout", json!({})).await, json!({"loggedOut": true}));
    assert_eq!(client.ask("auth.whoami", json!({})).await, nobody);
    assert_eq!(client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_fails_keeps_whoever_was_there() {
    let house = House::open(people()).await;
    for is_in in [false, true] {
        let mut client = house.stranger().await;
        if is_in {
            client.ask("auth.login", json!({"token": "ann"})).await;
        }
        for (params, code) in [
            (json!({}), "VALIDATION_ERROR"),
            (json!({"token": ""}), "VALIDATION_ERROR"),
            (json!({"token": null}), "VALIDATION_ERROR"),
            (json!({"token": 7}), "VALIDATION_ERROR"),
            (json!({"token": ["ann"]}), "VALIDATION_ERROR"),
            (json!({"token": "nobody"}), "UNAUTHORIZED"),
            (json!({"token": "ANN"}), "UNAUTHORIZED"),
            (json!({"token": "over"}), "UNAUTHORIZED"),
        ] {
            let (failed, error) = client.fail("auth.login", params.clone()).await;
            assert_eq!(failed, code, "{params}");
            assert!(error.get("details").is_none(), "{error}");
            assert_eq!(client.ask("auth.whoami", json!({})).await["authenticated"], is_in, "{params}");
        }
        let id = client.send("store.buckets", json!({})).await;
        assert_eq!(client.reply(id).await["type"] == "result", is_in);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_do_not_learn_what_there_is() {
    let house = House::open(people()).await;
    let mut client = house.stranger().await;
    for operation in
        ["store.get", "store.gett", "rules.emit", "audit.query", "identity.login", "frob", "x.y", "Auth.login"]
    {
        let failed = message_of(&mut client, operation, json!({})).await;
        assert_eq!(failed.0, "UNAUTHORIZED", "{operation}");
    }
    // These are not asked who they are, and are not there either.
    for operation in ["auth.x", "auth.", "auth.Login", "auth.login.x", "ping"] {
        assert_eq!(client.fail(operation, json!({})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
    let mut client = house.client("bob").await;
    for operation in ["store.gett", "identity.login", "frob", "x.y", "Auth.login", "auth.x", "ping"] {
        assert_eq!(client.fail(operation, json!({})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
    // What is for administrators is so also where it is not there.
    assert_eq!(client.fail("audit.query", json!({})).await.0, "FORBIDDEN");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_need_not_log_in_may() {
    let house = House::open(tokens([user("rea", &["reader"])]).required(false)).await;
    let mut client = house.stranger().await;
    assert_eq!(client.welcome["requiresAuth"], false);
    let bucket = |name: &str| json!({"name": name, "config": {"key": "id", "schema": {"id": {"type": "string"}}}});
    client.ask("store.defineBucket", bucket("a")).await;
    client.ask("auth.login", json!({"token": "rea"})).await;
    // Whoever has logged in is what they are.
    assert_eq!(client.fail("store.defineBucket", bucket("b")).await.0, "FORBIDDEN");
    client.ask("auth.logout", json!({})).await;
    client.ask("store.defineBucket", bucket("b")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_logins_has_none() {
    let server = serve(options()).await;
    let mut client = Client::connect(&server).await;
    assert_eq!(client.welcome["requiresAuth"], false);
    for operation in ["auth.login", "auth.logout", "auth.whoami"] {
        assert_eq!(client.fail(operation, json!({"token": "ann"})).await.0, "UNKNOWN_OPERATION", "{operation}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_when_its_time_is_over() {
    let house = House::open(people()).await;
    let mut client = house.client("brief").await;
    house.advance(999);
    client.ask("store.buckets", json!({})).await;
    house.advance(1);
    // These do not ask, and do not end it.
    assert_eq!(client.ask("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.fail("auth.login", json!({"token": "nobody"})).await.0, "UNAUTHORIZED");
    let expired = ("UNAUTHORIZED".to_owned(), "Session expired".to_owned());
    assert_eq!(message_of(&mut client, "store.buckets", json!({})).await, expired);
    let (code, message) = message_of(&mut client, "store.buckets", json!({})).await;
    assert_eq!(code, "UNAUTHORIZED");
    assert_ne!(message, "Session expired", "only the first late request is told");
    let again = client.ask("auth.login", json!({"token": "brief"})).await;
    assert_eq!(again["expiresAt"], NOON + 2000);
    client.ask("store.buckets", json!({})).await;
    // The first late request is any that needs a session, whether there is such an operation or not.
    house.advance(1000);
    assert_eq!(message_of(&mut client, "store.gett", json!({})).await, expired);
    // Logging out is as good as ever.
    client.ask("auth.login", json!({"token": "brief"})).await;
    house.advance(1000);
    assert_eq!(client.ask("auth.logout", json!({})).await, json!({"loggedOut": true}));
    assert_ne!(message_of(&mut client, "store.buckets", json!({})).await, expired);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_nobody_needs_ends_as_well() {
    let house = House::open(people().required(false)).await;
    let mut client = house.client("brief").await;
    house.advance(1000);
    let expired = ("UNAUTHORIZED".to_owned(), "Session expired".to_owned());
    assert_eq!(message_of(&mut client, "store.buckets", json!({})).await, expired);
    client.ask("store.buckets", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_pushed_to_a_session_that_is_over() {
    let house = House::open(people()).await;
    house.bucket("notes", []).await;
    let mut client = house.client("brief").await;
    let plain = client.ask("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let told = client.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    let delta = client.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "mode": "delta"})).await;
    house.advance(1000);
    house.write(|draft| draft.insert("notes", crate::house::object(json!({"id": "a"})))).await;
    // It has asked for nothing, and hears only that those have ended that it is told about.
    let mut ended = Vec::new();
    for _ in 0..2 {
        let push = client.push().await;
        assert_eq!(push["error"], json!({"code": "UNAUTHORIZED", "message": "Session expired"}), "{push}");
        ended.push(push["subscriptionId"].clone());
    }
    ended.sort_by_key(Json::to_string);
    assert_eq!(ended, [told["subscriptionId"].clone(), delta["subscriptionId"].clone()]);
    // They have not come back with another login.
    client.ask("auth.login", json!({"token": "ann"})).await;
    assert_eq!(
        client.fail("store.unsubscribe", json!({"subscriptionId": plain["subscriptionId"]})).await.0,
        "NOT_FOUND"
    );
    client.ask("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert!(client.is_silent().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_late_request_ends_what_is_followed() {
    let house = House::open(people()).await;
    house.bucket("notes", []).await;
    let mut client = house.client("brief").await;
    client.ask("store.subscribe", json!({"config": {"bucket": "notes"}})).await;
    let told = client.ask("store.subscribe", json!({"config": {"bucket": "notes"}, "pos": true})).await;
    house.advance(1000);
    assert_eq!(client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
    let push = client.push().await;
    assert_eq!(push["subscriptionId"], told["subscriptionId"]);
    assert_eq!(push["error"]["code"], "UNAUTHORIZED");
    client.ask("auth.login", json!({"token": "ann"})).await;
    client.ask("store.insert", json!({"bucket": "notes", "data": {}})).await;
    assert!(client.is_silent().await);
    assert_eq!(house.server.stats().subscriptions, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_use_no_ones_budget() {
    let limit = RateLimit::new(3, Duration::from_secs(1));
    let house = House::open_with(options().auth(people()).rate_limit(limit)).await;
    let mut client = house.stranger().await;
    for _ in 0..9 {
        assert_eq!(client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
    }
    // Logins count for the address, and what comes after for the user, on whatever connection.
    client.ask("auth.login", json!({"token": "ann"})).await;
    let mut other = house.client("ann").await;
    for client in [&mut client, &mut other] {
        client.ask("store.buckets", json!({})).await;
    }
    client.ask("store.buckets", json!({})).await;
    let (code, error) = other.fail("store.buckets", json!({})).await;
    assert_eq!((&*code, &error["details"]), ("RATE_LIMITED", &json!({"retryAfterMs": 1000})));
    // Bob has a budget of his own; the address had one login left.
    let mut bob = house.client("bob").await;
    bob.ask("store.buckets", json!({})).await;
    let mut late = house.stranger().await;
    assert_eq!(late.fail("auth.login", json!({"token": "bob"})).await.0, "RATE_LIMITED");
    house.advance(1000);
    late.ask("auth.login", json!({"token": "bob"})).await;
}

/// Cannot find out.
struct Broken;

impl TokenValidator for Broken {
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
async fn a_validator_that_fails_tells_nothing_and_keeps_the_session() {
    let house = House::open(Auth::new(Broken)).await;
    let mut client = house.client("good").await;
    let failed = message_of(&mut client, "auth.login", json!({"token": "bad"})).await;
    assert_eq!(failed, ("INTERNAL_ERROR".to_owned(), "Internal server error".to_owned()));
    client.ask("store.buckets", json!({})).await;
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
async fn signed_tokens_of_every_algorithm_are_somebodys() {
    let claims = json!({"sub": "mara", "roles": ["writer"], "exp": 2_000_000_000});
    let own = signed(&json!({"alg": "HS256"}), &claims, SECRET);
    let secret = (JwtAlgorithm::Hs256, JwtKey::Secret(SECRET.to_vec()), own.as_str());
    let public = |(algorithm, pem, token): (_, &str, _)| (algorithm, JwtKey::PublicKey(pem.to_owned()), token);
    for (algorithm, key, token) in SIGNED.map(public).into_iter().chain([secret]) {
        let house = House::open(jwt(JwtOptions::new(JwtKeys::One(algorithm, key.clone())))).await;
        let mut client = house.stranger().await;
        // Neither one that is not signed, nor one whose signature is made with what everybody knows.
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
            assert_eq!(client.fail("auth.login", json!({"token": forged})).await.0, "UNAUTHORIZED", "{algorithm:?}");
            assert_eq!(client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
        }
        let mara = client.ask("auth.login", json!({"token": token})).await;
        assert_eq!(mara, json!({"userId": "mara", "roles": ["writer"], "expiresAt": 2_000_000_000_000_u64}));
        client.ask("store.buckets", json!({})).await;
        house.advance(2_000_000_000_000 - NOON);
        assert_eq!(client.fail("store.buckets", json!({})).await.1["message"], "Session expired");
        assert_eq!(client.fail("auth.login", json!({"token": token})).await.0, "UNAUTHORIZED");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_tokens_are_for_somebody_by_somebody_and_for_a_time() {
    let house = House::open(jwt(hs256().issuer("harbour").audience("tides"))).await;
    let mut client = house.stranger().await;
    let token = |change: &dyn Fn(&mut Json)| {
        let mut claims = json!({"sub": "mara", "iss": "harbour", "aud": ["tides"], "exp": NOON / 1000 + 10});
        change(&mut claims);
        json!({"token": signed(&json!({"alg": "HS256"}), &claims, SECRET)})
    };
    let wrong: [&dyn Fn(&mut Json); 9] = [
        &|claims| claims["exp"] = json!(NOON / 1000),
        &|claims| claims["exp"] = json!("tomorrow"),
        &|claims| claims["nbf"] = json!(NOON / 1000 + 1),
        &|claims| claims["iss"] = json!("market"),
        &|claims| claims["iss"] = json!(null),
        &|claims| claims["aud"] = json!("boats"),
        &|claims| claims["aud"] = json!([]),
        &|claims| claims["sub"] = json!(""),
        &|claims| claims["roles"] = json!({"admin": true}),
    ];
    for change in wrong {
        assert_eq!(client.fail("auth.login", token(change)).await.0, "UNAUTHORIZED");
    }
    client.ask("auth.login", token(&|claims| claims["nbf"] = json!(NOON / 1000))).await;
    house.advance(1000);
    client.ask("auth.login", token(&|claims| claims["nbf"] = json!(NOON / 1000 + 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_token_and_its_session_end_at_the_maximum_age() {
    let house = House::open(jwt(hs256().max_age(Duration::from_secs(10)))).await;
    let mut client = house.stranger().await;
    let token = |claims: &Json| json!({"token": signed(&json!({"alg": "HS256"}), claims, SECRET)});
    assert_eq!(client.fail("auth.login", token(&json!({"sub": "mara"}))).await.0, "UNAUTHORIZED", "without `iat`");
    let mara = json!({"sub": "mara", "iat": NOON / 1000, "exp": NOON / 1000 + 3600});
    assert_eq!(client.ask("auth.login", token(&mara)).await["expiresAt"], NOON + 10_000);
    house.advance(9_999);
    client.ask("store.buckets", json!({})).await;
    house.advance(1);
    assert_eq!(client.fail("store.buckets", json!({})).await.1["message"], "Session expired");
    assert_eq!(client.fail("auth.login", token(&mara)).await.0, "UNAUTHORIZED");
}
