//! A server whose clients log in, over a store whose time is ours.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use serde_json::{Map, Value as Json, json};
use tidewire::auth::{Auth, DefaultAccess, Permissions, Rule, StaticToken, StaticTokens};
use tidewire::{Server, ServerOptions};
use tidewire_store::{Clock, Draft, Store, StoreError, StoreOptions};

use crate::client::{Client, options, serve_store};

/// When every house is opened.
pub(crate) const NOON: u64 = 1_700_000_000_000;

/// A server whose clients log in, over a store whose time is ours.
pub(crate) struct House {
    pub(crate) server: Server,
    pub(crate) store: Store,
    time: Arc<AtomicU64>,
}

impl House {
    pub(crate) async fn open(auth: Auth) -> Self {
        Self::open_with(options().auth(auth)).await
    }

    pub(crate) async fn open_with(options: ServerOptions) -> Self {
        let time = Arc::new(AtomicU64::new(NOON));
        let told = Arc::clone(&time);
        let store = Store::memory(StoreOptions::default().clock(Clock::new(move || told.load(SeqCst))));
        let server = serve_store(store.clone(), options).await;
        Self { server, store, time }
    }

    /// Later, by so many milliseconds.
    pub(crate) fn advance(&self, millis: u64) {
        self.time.fetch_add(millis, SeqCst);
    }

    /// Somebody who has not logged in.
    pub(crate) async fn stranger(&self) -> Client {
        Client::connect(&self.server).await
    }

    /// Somebody who has, with this token.
    pub(crate) async fn client(&self, token: &str) -> Client {
        let mut client = self.stranger().await;
        client.ask("auth.login", json!({"token": token})).await;
        client
    }

    /// Changes the store behind the server's back.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Draft) -> Result<T, StoreError> + Send + 'static,
    ) -> T {
        self.store.write(work).await.unwrap()
    }

    /// A bucket whose key is `id`, with these records.
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
        other => panic!("an object was expected, not {other}"),
    }
}

/// Tokens that are called like their users.
pub(crate) fn tokens(tokens: impl IntoIterator<Item = StaticToken>) -> Auth {
    let named = tokens.into_iter().map(|token| (token.user_id.clone(), token));
    Auth::new(StaticTokens::new(named).unwrap())
}

/// Somebody in these roles.
pub(crate) fn user(user_id: &str, roles: &[&str]) -> StaticToken {
    StaticToken::new(user_id, roles.iter().copied())
}

/// The same, of whom more is known.
pub(crate) fn known(user_id: &str, roles: &[&str], metadata: Json) -> StaticToken {
    user(user_id, roles).metadata(object(metadata))
}

/// Only what these rules allow.
pub(crate) fn only(auth: Auth, rules: impl IntoIterator<Item = Rule>) -> Auth {
    auth.permissions(Permissions::new(DefaultAccess::Deny, rules))
}

/// A rule of a role for its own rows in all buckets.
pub(crate) fn own_rows(role: &str) -> Rule {
    Rule::new(role, ["store.*"]).on_rows(json!({"owner": "{{ session.userId }}"})).unwrap()
}

/// The ids of records.
pub(crate) fn ids(records: &Json) -> Vec<&str> {
    records.as_array().unwrap().iter().map(|record| record["id"].as_str().unwrap()).collect()
}
