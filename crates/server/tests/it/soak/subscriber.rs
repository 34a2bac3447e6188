//! Who follows queries, over as many connections as it takes.

use std::net::SocketAddr;

use serde_json::{Value as Json, json};

use super::history::History;
use super::link::{Leave, Link, Lost};

/// Who follows queries.
pub(super) struct Subscriber {
    addr: SocketAddr,
    is_slow: bool,
    link: Option<Link>,
    /// What it follows, and as which subscription of this connection.
    followed: Vec<(History, Option<String>)>,
}

impl Subscriber {
    pub(super) fn new(addr: SocketAddr, is_slow: bool, histories: Vec<History>) -> Self {
        let followed = histories.into_iter().map(|history| (history, None)).collect();
        Self { addr, is_slow, link: None, followed }
    }

    pub(super) fn count(&self) -> usize {
        self.followed.len()
    }

    pub(super) fn history(&self, which: usize) -> &History {
        &self.followed[which].0
    }

    /// The connection, if there is one.
    pub(super) fn link(&mut self) -> Result<&mut Link, Lost> {
        self.link.as_mut().ok_or(Lost)
    }

    /// Is connected, and follows all that it follows.
    pub(super) async fn enter(&mut self, mut goes_on: impl FnMut() -> bool) -> Result<(), Lost> {
        if self.link.is_none() {
            self.link = Some(Link::connect(self.addr, self.is_slow).await);
        }
        for which in 0..self.followed.len() {
            if self.followed[which].1.is_none() {
                self.subscribe(which, goes_on()).await?;
            }
        }
        Ok(())
    }

    /// The connection is lost.
    pub(super) fn lose(&mut self) {
        self.link = None;
        for (_, subscription) in &mut self.followed {
            *subscription = None;
        }
    }

    pub(super) async fn leave(&mut self, how: Leave) {
        if let Some(link) = self.link.take() {
            link.leave(how).await;
        }
        self.lose();
    }

    async fn subscribe(&mut self, which: usize, goes_on: bool) -> Result<(), Lost> {
        let params = self.followed[which].0.subscribe(goes_on);
        let reply = self.request("store.subscribe", &params).await?;
        let (history, subscription) = &mut self.followed[which];
        *subscription = Some(reply["subscriptionId"].as_str().expect("a subscription has an id").to_owned());
        history.begin(&reply);
        Ok(())
    }

    pub(super) async fn unsubscribe(&mut self, which: usize) -> Result<(), Lost> {
        let Some(subscription) = self.followed[which].1.clone() else { return Ok(()) };
        let reply = self.request("store.unsubscribe", &json!({"subscriptionId": subscription})).await?;
        assert_eq!(reply, json!({"unsubscribed": true}));
        // Whatever is pushed to it from here on is for nobody.
        self.followed[which].1 = None;
        Ok(())
    }

    /// Asks, until the server has room for the answer, and gives the data of the reply.
    pub(super) async fn request(&mut self, operation: &str, params: &Json) -> Result<Json, Lost> {
        loop {
            let id = self.link()?.send(operation, params).await?;
            let reply = loop {
                let message = self.link()?.expect(operation).await?;
                if message.get("id").is_some() {
                    assert_eq!(message["id"], json!(id), "replies come in order: {message}");
                    break message;
                }
                self.take(&message)?;
            };
            match reply["code"].as_str() {
                None => return Ok(reply["data"].clone()),
                Some("BACKPRESSURE") => {}
                // The server is about to end, or too busy to say whether it was done.
                Some("SHUTTING_DOWN" | "TIMEOUT") => return Err(Lost),
                Some(_) => panic!("{operation} {params}: {reply}"),
            }
        }
    }

    /// Takes what was pushed.
    pub(super) fn take(&mut self, push: &Json) -> Result<(), Lost> {
        assert_eq!(push["channel"], "subscription", "{push}");
        let id = push["subscriptionId"].as_str().expect("a push names its subscription");
        let followed = self.followed.iter_mut().find(|(_, subscription)| subscription.as_deref() == Some(id));
        let (history, _) = followed.unwrap_or_else(|| panic!("nobody follows {id} here: {push}"));
        if let Some(error) = push.get("error") {
            assert_eq!(error["code"], "SHUTTING_DOWN", "nothing else ends a subscription here: {push}");
            return Err(Lost);
        }
        history.take(push);
        Ok(())
    }
}
