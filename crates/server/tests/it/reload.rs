//! `Server::reload`: another validator while the server runs.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use tidewire::auth::{Auth, Session, TokenValidator, Validation};
use tidewire::{ReloadError, Server};
use tidewire_testkit::Certificates;
use tokio::sync::Semaphore;

use crate::client::{Client, options, serve};
use crate::house::{House, tokens, user};
use crate::page::metric;

/// The options of a reload with this auth.
fn with(auth: Auth) -> tidewire::ServerOptions {
    options().auth(auth)
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_removed_tokens_end_and_others_go_on() {
    let house = House::open(tokens([user("ann", &["writer"]), user("bob", &["writer"])])).await;
    let (mut ann, mut bob) = (house.client("ann").await, house.client("bob").await);
    // The program gave these sessions itself, so no token takes them away.
    let local = house.server.client(Session::new("ann", ["writer"]));
    assert_eq!(house.server.reload(&with(tokens([user("bob", &["writer"]), user("eve", &["reader"])]))).unwrap(), 1);
    assert_eq!(ann.push().await["event"], "session_revoked");
    assert_eq!(ann.closed().await, (4002, "session_revoked".to_owned()));
    bob.ask("store.buckets", json!({})).await;
    local.request::<Json>("store.buckets", json!({})).await.unwrap();
    assert_eq!(metric(&house.server, "sessions_revoked_total").await, 1);
    let mut stranger = house.stranger().await;
    assert_eq!(stranger.fail("auth.login", json!({"token": "ann"})).await.0, "UNAUTHORIZED");
    stranger.ask("auth.login", json!({"token": "eve"})).await;
    // The user is not revoked: a new token lets it in.
    assert_eq!(house.server.reload(&with(tokens([user("bob", &["writer"]), user("ann", &["writer"])]))).unwrap(), 1);
    assert_eq!(stranger.closed().await.0, 4002);
    house.client("ann").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn auth_and_tls_are_not_turned_on_or_off() {
    let house = House::open(tokens([user("ann", &["writer"])])).await;
    assert!(matches!(house.server.reload(&options()), Err(ReloadError::Auth)));
    let dir = tempfile::tempdir().unwrap();
    let Certificates { server: certificate, server_key: key, .. } = Certificates::generate(dir.path());
    let secure = with(tokens([user("eve", &["writer"])])).tls(tidewire::TlsFiles { certificate, key });
    assert!(matches!(house.server.reload(&secure), Err(ReloadError::Tls)));
    house.client("ann").await;

    let open = serve(options()).await;
    assert!(matches!(open.reload(&secure), Err(ReloadError::Auth)));
    assert_eq!(open.reload(&options()).unwrap(), 0);
    Client::connect(&open).await.ask("store.buckets", json!({})).await;
}

/// Knows every token, after a permit.
struct Slow {
    begun: Semaphore,
    permits: Semaphore,
}

impl TokenValidator for Slow {
    fn validate<'a>(&'a self, token: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async move {
            self.begun.add_permits(1);
            self.permits.acquire().await.unwrap().forget();
            Ok(Some(Session::new(token, ["writer"])))
        })
    }
}

/// Knows no token, and keeps no session.
struct Nobody;

impl TokenValidator for Nobody {
    fn validate<'a>(&'a self, _: &'a str, _: u64) -> Validation<'a> {
        Box::pin(async { Ok(None) })
    }

    fn keeps(&self, _: &Session) -> bool {
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_the_old_validator_accepts_too_late_is_refused() {
    let slow = Arc::new(Slow { begun: Semaphore::new(0), permits: Semaphore::new(0) });
    let server: Server = serve(with(Auth::new(Arc::clone(&slow)))).await;
    let mut client = Client::connect(&server).await;
    let id = client.send("auth.login", json!({"token": "ann"})).await;
    slow.begun.acquire().await.unwrap().forget();
    assert_eq!(server.reload(&with(Auth::new(Nobody))).unwrap(), 0);
    slow.permits.add_permits(1);
    assert_eq!(client.reply(id).await["code"], "SESSION_REVOKED");
    assert_eq!(client.ask("auth.whoami", json!({})).await, json!({"authenticated": false}));
    assert_eq!(client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
}
