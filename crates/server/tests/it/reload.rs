//! `Server::reload`: replaces the validator while the server runs.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session, TokenValidator, Validation};
use tidewire::{ReloadError, Server};
use tidewire_testkit::Certificates;
use tokio::sync::Semaphore;

use crate::client::{Client, options, serve};
use crate::metrics_page::metric;
use crate::test_server::{TestServer, tokens, user};

/// Returns options of a reload with this auth.
fn with(auth: Auth) -> tidewire::ServerOptions {
    options().auth(auth)
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_ends_sessions_of_removed_tokens_only() {
    let test = TestServer::start(tokens([user("ann", &["writer"]), user("bob", &["writer"])])).await;
    let (mut ann, mut bob) = (test.client("ann").await, test.client("bob").await);
    // The embedding program created this session without a token, so it is not affected.
    let local = test.server.client(Session::new("ann", ["writer"]));
    assert_eq!(test.server.reload(&with(tokens([user("bob", &["writer"]), user("eve", &["reader"])]))).unwrap(), 1);
    assert_eq!(ann.push().await["event"], "session_revoked");
    assert_eq!(ann.closed().await, (4002, "session_revoked".to_owned()));
    bob.call("store.buckets", json!({})).await;
    local.request::<Json>("store.buckets", json!({})).await.unwrap();
    assert_eq!(metric(&test.server, "sessions_revoked_total").await, 1);
    let mut other = test.anonymous().await;
    assert_eq!(other.call_err("auth.login", json!({"token": "ann"})).await.0, "UNAUTHORIZED");
    other.call("auth.login", json!({"token": "eve"})).await;
    // The user is not revoked: a new token can log in.
    assert_eq!(test.server.reload(&with(tokens([user("bob", &["writer"]), user("ann", &["writer"])]))).unwrap(), 1);
    assert_eq!(other.closed().await.0, 4002);
    test.client("ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_cannot_turn_auth_or_tls_on_or_off() {
    let test = TestServer::start(tokens([user("ann", &["writer"])])).await;
    assert!(matches!(test.server.reload(&options()), Err(ReloadError::Auth)));
    let dir = tempfile::tempdir().unwrap();
    let Certificates { server: certificate, server_key: key, .. } = Certificates::generate(dir.path());
    let secure = with(tokens([user("eve", &["writer"])])).tls(tidewire::TlsFiles { certificate, key });
    assert!(matches!(test.server.reload(&secure), Err(ReloadError::Tls)));
    test.client("ann").await;

    let open = serve(options()).await;
    assert!(matches!(open.reload(&secure), Err(ReloadError::Auth)));
    assert_eq!(open.reload(&options()).unwrap(), 0);
    Client::connect(&open).await.call("store.buckets", json!({})).await;
}

/// Accepts every token, once it has a permit.
struct BlockingValidator {
    started: Semaphore,
    permits: Semaphore,
}

impl TokenValidator for BlockingValidator {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.started.add_permits(1);
            self.permits.acquire().await.unwrap().forget();
            Ok(Some(Session::new(token, ["writer"])))
        })
    }
}

/// Rejects every token and every existing session.
struct RejectAll;

impl TokenValidator for RejectAll {
    fn validate<'a>(&'a self, _: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async { Ok(None) })
    }

    fn still_accepts(&self, _: &Session) -> bool {
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn login_validated_before_a_reload_is_rejected() {
    let validator = Arc::new(BlockingValidator { started: Semaphore::new(0), permits: Semaphore::new(0) });
    let server: Server = serve(with(Auth::new(Arc::clone(&validator)))).await;
    let mut client = Client::connect(&server).await;
    let id = client.send("auth.login", json!({"token": "ann"})).await;
    validator.started.acquire().await.unwrap().forget();
    assert_eq!(server.reload(&with(Auth::new(RejectAll))).unwrap(), 0);
    validator.permits.add_permits(1);
    assert_eq!(client.reply(id).await["code"], "SESSION_REVOKED");
    assert_eq!(client.call("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.call_err("store.buckets", json!({})).await.0, "UNAUTHORIZED");
}
