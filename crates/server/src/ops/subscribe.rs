//! Subscribing and unsubscribing.

use std::sync::Arc;

use bytes::Bytes;
use tidewire_live::{First, Mark, Mode, Subscription, Whole};
use tidewire_store::{Filter, Query, StoreError};

use crate::ops::command::{Followed, Subscribe};
use crate::ops::handler::Serving;
use crate::protocol::reply::{Data, Outcome};
use crate::push::subscription::{Beginning, Forward, Place, Source};
use crate::session::caller::Caller;
use crate::{Code, RequestError};

impl Serving {
    pub(crate) async fn subscribe(&self, ask: Subscribe, caller: Caller, rows: Option<Filter>) -> Outcome {
        let Subscribe { query, mode, since, is_told } = ask;
        let place = Place::take(&self.core, &self.connection.subscription_count)?;
        let number = self.core.next_subscription();
        if let Followed::Named { name, params } = &query
            && self.core.host.has(name)
        {
            let source = Source::Programmatic { name: name.as_str().into(), params: Box::new(params.clone()) };
            let beginning = Beginning { number, source, mode, is_told, rows: None, place };
            return self.follow_host(beginning, since.is_some(), caller).await;
        }
        let (mut subscription, rows) = self.follow(&query, mode, since.as_deref(), &caller, rows).await?;
        let first = Opening {
            number,
            key: is_told.then(|| self.key_of(&query)).flatten(),
            is_computed: self.query_of(&query).is_ok_and(|query| query.aggregate.is_some()),
            mark: is_told.then(|| subscription.mark().to_string()),
            resumed: since.is_some().then(|| matches!(subscription.first(), First::Resumed(_))),
        };
        let data = first.reply(subscription.take_first(), self.core.options.max_result_bytes)?;
        let source = match query {
            Followed::Named { name, params } => {
                Source::Named { name: name.into(), params: params.into_iter().collect() }
            }
            Followed::Inline(query) => Source::Inline(query),
        };
        let beginning = Beginning { number, source, mode, is_told, rows, place };
        let forward = Forward::live(beginning, &self.connection, subscription);
        self.connection.keep(&forward)?;
        forward.deliver();
        Ok(data)
    }

    /// Follows a query with the rights that hold for the bucket that it asks when it is followed.
    async fn follow(
        &self,
        query: &Followed,
        mode: Mode,
        since: Option<&str>,
        caller: &Caller,
        mut rows: Option<Filter>,
    ) -> Result<(Subscription, Option<Filter>), RequestError> {
        // Whatever is no position of ours is one of long ago.
        let mark: Option<Mark> = since.and_then(|since| since.parse().ok());
        loop {
            let live = &self.core.live;
            let subscription = match query {
                Followed::Inline(query) => {
                    live.subscribe(restricted((**query).clone(), rows.as_ref()), mode, mark).await?
                }
                Followed::Named { name, params } => {
                    live.subscribe_named(name, params.clone(), rows.clone(), mode, mark).await?
                }
            };
            let now = self.may_follow(caller, query)?;
            if now == rows {
                return Ok((subscription, rows));
            }
            // The name stands for another query since it was looked up.
            rows = now;
        }
    }

    /// Follows code of the host, which has no history: whoever was away is told all.
    async fn follow_host(&self, beginning: Beginning, was_away: bool, caller: Caller) -> Outcome {
        if beginning.mode == Mode::Delta {
            let message = "a programmatic query has no deltas: subscribe without \"mode\"";
            return Err(RequestError::new(Code::ValidationError, message));
        }
        let Source::Programmatic { name, params } = &beginning.source else {
            return Err(RequestError::new(Code::QueryNotDefined, "the query is not defined"));
        };
        let (core, asked_by, name, params) = (Arc::clone(&self.core), caller.clone(), name.clone(), params.clone());
        // It is code that may take its time.
        let answered = tokio::task::spawn_blocking(move || core.host.answer(&name, &params, &asked_by)).await;
        let answer = answered.map_err(|error| RequestError::internal(&error))??;
        let mark = beginning.is_told.then(|| answer.mark());
        let first = Opening {
            number: beginning.number,
            key: None,
            is_computed: true,
            mark,
            resumed: was_away.then_some(false),
        };
        let data = first.reply(First::Whole(Whole::Json(answer.text.clone())), self.core.options.max_result_bytes)?;
        let forward = Forward::host(beginning, &self.connection, answer.text);
        self.connection.keep(&forward)?;
        self.core.host.follow(&forward, caller);
        // Not waited for: what it pushes comes after the reply in any case, and a reply that came too late would leave a subscription
        // of which nobody knows.
        let (core, number) = (Arc::clone(&self.core), forward.number);
        drop(tokio::task::spawn_blocking(move || core.host.ask(number)));
        Ok(data)
    }

    /// The field by which the records of a query are told apart.
    fn key_of(&self, followed: &Followed) -> Option<String> {
        let query = self.query_of(followed).ok()?;
        let snapshot = self.core.store.snapshot();
        snapshot.state.bucket(&query.bucket).ok().map(|bucket| bucket.definition().key.clone())
    }

    pub(crate) fn unsubscribe(&self, subscription: &str) -> Outcome {
        let number = subscription.strip_prefix("sub-").and_then(|number| number.parse().ok());
        // A number can be written in other ways than a name.
        let number = number.filter(|number: &u64| subscription == format!("sub-{number}"));
        if number.is_some_and(|number| self.connection.unsubscribe(number)) {
            return Ok(Data::text("{\"unsubscribed\":true}"));
        }
        let shown: String = subscription.chars().take(64).collect();
        let message = format!("this connection has no subscription \"{shown}\"");
        Err(RequestError::new(Code::NotFound, message))
    }

    /// Somebody else is logged in: what they may not follow ends, and what they may follow shows them their rows.
    pub(crate) async fn review(&self, caller: &Caller) -> Result<(), RequestError> {
        for forward in self.connection.subscriptions() {
            let followed = match &forward.source {
                Source::Inline(query) => Followed::Inline(query.clone()),
                Source::Named { name, params } => {
                    Followed::Named { name: name.to_string(), params: params.iter().cloned().collect() }
                }
                Source::Programmatic { name, params } => {
                    Followed::Named { name: name.to_string(), params: (**params).clone() }
                }
            };
            let entered = caller.enter(Some(crate::ops::table::Operation::StoreSubscribe));
            let rows = match entered.and_then(|()| self.may_follow(caller, &followed)) {
                Ok(rows) => rows,
                Err(error) => {
                    forward.revoke(&error);
                    continue;
                }
            };
            if let Source::Programmatic { .. } = &forward.source {
                let (core, number, caller) = (Arc::clone(&self.core), forward.number, caller.clone());
                let asked = tokio::task::spawn_blocking(move || core.host.change_caller(number, caller)).await;
                asked.map_err(|error| RequestError::internal(&error))?;
            } else if let Some(live) = forward.see(rows.as_ref()) {
                let replaced = match self.query_of(&followed) {
                    Ok(query) => {
                        self.core.live.replace(live, restricted(query, rows.as_ref())).await.map_err(Into::into)
                    }
                    Err(error) => Err(error.into()),
                };
                // It may be ending just now, by another's doing. That is no reason not to log in.
                if let Err(error) = replaced {
                    forward.revoke(&error);
                }
            }
        }
        Ok(())
    }

    fn query_of(&self, followed: &Followed) -> Result<Query, StoreError> {
        match followed {
            Followed::Inline(query) => Ok((**query).clone()),
            Followed::Named { name, params } => self.core.store.snapshot().state.query(name, params),
        }
    }
}

fn restricted(query: Query, rows: Option<&Filter>) -> Query {
    match rows {
        Some(rows) => query.restrict(rows),
        None => query,
    }
}

/// What a subscription is told first, beside its data.
struct Opening {
    number: u64,
    /// The field by which records are told apart, if somebody wants to know.
    key: Option<String>,
    /// Whether its result is no list of records.
    is_computed: bool,
    mark: Option<String>,
    resumed: Option<bool>,
}

impl Opening {
    fn reply(self, first: First, max: usize) -> Outcome {
        let data = match first {
            First::Whole(Whole::Json(json)) => json,
            First::Resumed(Some(delta)) => delta.encoded(),
            First::Resumed(None) if !self.is_computed => {
                Bytes::from_static(b"{\"added\":[],\"changed\":[],\"removed\":[]}")
            }
            // There was nothing to compute it of, or what was computed is as it was.
            _ => Bytes::new(),
        };
        if data.len() > max {
            return Err(RequestError::too_large(max));
        }
        Ok(Data::written(data.len() + 160, |out| {
            out.extend_from_slice(format!("{{\"subscriptionId\":\"sub-{}\"", self.number).as_bytes());
            if let Some(key) = &self.key {
                out.extend_from_slice(b",\"key\":");
                crate::protocol::reply::append_string(out, key);
            }
            if let Some(mark) = self.mark {
                out.extend_from_slice(format!(",\"pos\":\"{mark}\"").as_bytes());
            }
            if let Some(resumed) = self.resumed {
                out.extend_from_slice(format!(",\"resumed\":{resumed}").as_bytes());
            }
            if !data.is_empty() {
                out.extend_from_slice(b",\"data\":");
                out.extend_from_slice(&data);
            }
            out.push(b'}');
        }))
    }
}
