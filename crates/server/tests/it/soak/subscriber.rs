//! A subscriber that keeps its results across connections.

use std::net::SocketAddr;

use serde_json::{Value as Json, json};

use super::connection::{CloseMethod, Connection, ConnectionLost};
use super::history::History;

/// A subscriber that keeps its results across connections.
pub(super) struct Subscriber {
    addr: SocketAddr,
    is_slow: bool,
    connection: Option<Connection>,
    /// The queries, each with its subscription id on the current connection.
    queries: Vec<(History, Option<String>)>,
}

impl Subscriber {
    pub(super) fn new(addr: SocketAddr, is_slow: bool, histories: Vec<History>) -> Self {
        let queries = histories.into_iter().map(|history| (history, None)).collect();
        Self { addr, is_slow, connection: None, queries }
    }

    pub(super) fn count(&self) -> usize {
        self.queries.len()
    }

    pub(super) fn history(&self, index: usize) -> &History {
        &self.queries[index].0
    }

    /// Returns the current connection, or an error if it is lost.
    pub(super) fn connection(&mut self) -> Result<&mut Connection, ConnectionLost> {
        self.connection.as_mut().ok_or(ConnectionLost)
    }

    /// Connects if necessary, and subscribes to all queries without a subscription.
    pub(super) async fn connect_and_subscribe(
        &mut self,
        mut should_resume: impl FnMut() -> bool,
    ) -> Result<(), ConnectionLost> {
        if self.connection.is_none() {
            self.connection = Some(Connection::connect(self.addr, self.is_slow).await);
        }
        for index in 0..self.queries.len() {
            if self.queries[index].1.is_none() {
                self.subscribe(index, should_resume()).await?;
            }
        }
        Ok(())
    }

    /// Drops the connection and its subscriptions.
    pub(super) fn reset_connection(&mut self) {
        self.connection = None;
        for (_, subscription) in &mut self.queries {
            *subscription = None;
        }
    }

    pub(super) async fn disconnect(&mut self, method: CloseMethod) {
        if let Some(connection) = self.connection.take() {
            connection.disconnect(method).await;
        }
        self.reset_connection();
    }

    async fn subscribe(&mut self, index: usize, should_resume: bool) -> Result<(), ConnectionLost> {
        let params = self.queries[index].0.subscribe(should_resume);
        let reply = self.request("store.subscribe", &params).await?;
        let (history, subscription) = &mut self.queries[index];
        *subscription = Some(reply["subscriptionId"].as_str().expect("a subscription has an id").to_owned());
        history.apply_reply(&reply);
        Ok(())
    }

    pub(super) async fn unsubscribe(&mut self, index: usize) -> Result<(), ConnectionLost> {
        let Some(subscription) = self.queries[index].1.clone() else { return Ok(()) };
        let reply = self.request("store.unsubscribe", &json!({"subscriptionId": subscription})).await?;
        assert_eq!(reply, json!({"unsubscribed": true}));
        // A later push of the subscription would fail the test.
        self.queries[index].1 = None;
        Ok(())
    }

    /// Sends a request, and repeats it on backpressure. Returns the data of the reply.
    pub(super) async fn request(&mut self, operation: &str, params: &Json) -> Result<Json, ConnectionLost> {
        loop {
            let id = self.connection()?.send(operation, params).await?;
            let reply = loop {
                let message = self.connection()?.expect(operation).await?;
                if message.get("id").is_some() {
                    assert_eq!(message["id"], json!(id), "replies must come in order: {message}");
                    break message;
                }
                self.apply_push(&message)?;
            };
            match reply["code"].as_str() {
                None => return Ok(reply["data"].clone()),
                Some("BACKPRESSURE") => {}
                // The server shuts down, or timed out: it is unknown whether the request took effect.
                Some("SHUTTING_DOWN" | "TIMEOUT") => return Err(ConnectionLost),
                Some(_) => panic!("{operation} {params}: {reply}"),
            }
        }
    }

    /// Applies a push.
    pub(super) fn apply_push(&mut self, push: &Json) -> Result<(), ConnectionLost> {
        assert_eq!(push["channel"], "subscription", "{push}");
        let id = push["subscriptionId"].as_str().expect("a push must name its subscription");
        let entry = self.queries.iter_mut().find(|(_, subscription)| subscription.as_deref() == Some(id));
        let (history, _) = entry.unwrap_or_else(|| panic!("no subscription {id}: {push}"));
        if let Some(error) = push.get("error") {
            assert_eq!(error["code"], "SHUTTING_DOWN", "only a shutdown may end a subscription: {push}");
            return Err(ConnectionLost);
        }
        history.apply_push(push);
        Ok(())
    }
}
