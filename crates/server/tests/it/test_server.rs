//! A server that requires login, over an in-memory store with a manual clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, Permissions, Rule, StaticToken, StaticTokens};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Clock, Draft, Store, StoreError, StoreOptions};

use crate::client::{Client, options, serve_store};

/// The initial time of the clock, in milliseconds since the epoch.
pub(crate) const START_MILLIS: u64 = 1_700_000_000_000;

/// A server that requires login, over an in-memory store with a manual clock.
pub(crate) struct TestServer {
    pub(crate) server: Server,
    pub(crate) store: Store,
    time: Arc<AtomicU64>,
}

impl TestServer {
    pub(crate) async fn start(auth: Auth) -> Self {
        Self::start_with(options().auth(auth)).await
    }

    pub(crate) async fn start_with(options: ServerOptions) -> Self {
        let time = Arc::new(AtomicU64::new(START_MILLIS));
        let clock = Arc::clone(&time);
        let store = Store::memory(StoreOptions::default().clock(Clock::new(move || clock.load(SeqCst))));
        let server = serve_store(store.clone(), options).await;
        Self { server, store, time }
    }

    /// Advances the clock.
    pub(crate) fn advance(&self, millis: u64) {
        self.time.fetch_add(millis, SeqCst);
    }

    /// Connects a client that does not log in.
    pub(crate) async fn anonymous(&self) -> Client {
        Client::connect(&self.server).await
    }

    /// Connects a client and logs it in with this token.
    pub(crate) async fn client(&self, token: &str) -> Client {
        let mut client = self.anonymous().await;
        client.call("auth.login", json!({"token": token})).await;
        client
    }

    /// Writes to the store directly, without the server.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
    ) -> T {
        self.store.write(work).await.unwrap()
    }

    /// Defines a bucket with the key `id` and inserts these records.
    pub(crate) async fn bucket(&self, name: &str, records: impl IntoIterator<Item = Json>) {
        let (name, records): (_, Vec<Json>) = (name.to_owned(), records.into_iter().collect());
        let config = json!({"key": "id", "schema": {"id": {"type": "string", "generated": "uuid"}}});
        self.write(move |draft| {
            draft.define_bucket(&name, &config)?;
            draft.insert_many(&name, records.into_iter().map(object))
        })
        .await;
    }

    pub(crate) async fn query(&self, name: &str, config: Json) {
        let name = name.to_owned();
        self.write(move |draft| draft.define_query(&name, &config)).await;
    }
}

pub(crate) fn object(json: Json) -> Map<String, Json> {
    match json {
        Json::Object(members) => members,
        other => panic!("expected an object, got {other}"),
    }
}

/// Returns auth options with static tokens. Each token is equal to the id of its user.
pub(crate) fn tokens(tokens: impl IntoIterator<Item = StaticToken>) -> Auth {
    let named = tokens.into_iter().map(|token| (token.user_id.clone(), token));
    Auth::new(StaticTokens::new(named).unwrap())
}

/// Returns a user with these roles.
pub(crate) fn user(user_id: &str, roles: &[&str]) -> StaticToken {
    StaticToken::new(user_id, roles.iter().copied())
}

/// Returns a user with these roles and metadata.
pub(crate) fn user_with_metadata(user_id: &str, roles: &[&str], metadata: Json) -> StaticToken {
    user(user_id, roles).metadata(object(metadata))
}

/// Sets permissions that deny everything except what these rules allow.
pub(crate) fn allow_only(auth: Auth, rules: impl IntoIterator<Item = Rule>) -> Auth {
    auth.permissions(Permissions::new(DefaultAccess::Deny, rules))
}

/// Returns a rule that lets a role use its own rows in all buckets.
pub(crate) fn own_rows(role: &str) -> Rule {
    Rule::new(role, ["store.*"]).on_rows(json!({"owner": "{{ session.userId }}"})).unwrap()
}

/// Returns the ids of records.
pub(crate) fn ids(records: &Json) -> Vec<&str> {
    records.as_array().unwrap().iter().map(|record| record["id"].as_str().unwrap()).collect()
}
