//! A client that follows queries, comes, goes, breaks off and may be slow, and has the store's results in the end.

use serde_json::json;
use tokio::sync::watch;

use super::Course;
use super::chance::Chance;
use super::link::{Leave, Lost};
use super::query::{FUNDS, rows};
use super::subscriber::Subscriber;

/// How a follower behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// Reads what comes, and stays.
    Steady,
    /// Reads what comes; goes, comes back, unsubscribes and asks.
    Restless,
    /// Reads a message only when so much more has been written.
    Slow,
}

/// A client that follows queries.
pub(super) struct Follower {
    pub(super) subscriber: Subscriber,
    pub(super) manner: Manner,
    pub(super) chance: Chance,
    pub(super) course: watch::Receiver<Course>,
}

impl Follower {
    /// Follows until all is over, and has then what the store has.
    pub(super) async fn run(mut self) {
        while !self.course.borrow().is_over {
            if self.go_on().await.is_err() {
                self.subscriber.lose();
            }
        }
        while self.end().await.is_err() {
            self.subscriber.lose();
        }
        let how = *self.chance.pick(&[Leave::Close, Leave::Drop, Leave::Reset]);
        self.subscriber.leave(how).await;
    }

    async fn go_on(&mut self) -> Result<(), Lost> {
        // Whoever begins anew has to be right as well, but less often.
        let chance = &mut self.chance;
        self.subscriber.enter(|| !chance.one_in(4)).await?;
        if self.manner == Manner::Slow {
            let until = self.course.borrow().written + 10 + self.chance.below(40);
            let ready = self.course.wait_for(|course| course.is_over || course.written >= until).await;
            drop(ready.expect("the course does not end before its followers"));
        }
        let message = tokio::select! {
            message = self.subscriber.link()?.receive() => message?,
            over = self.course.wait_for(|course| course.is_over) => {
                drop(over.expect("the course does not end before its followers"));
                return Ok(());
            }
        };
        self.subscriber.take(&message)?;
        if self.manner == Manner::Restless && self.chance.one_in(20) {
            self.act().await?;
        }
        Ok(())
    }

    async fn act(&mut self) -> Result<(), Lost> {
        match self.chance.below(6) {
            0 => self.subscriber.leave(Leave::Close).await,
            1 => self.subscriber.leave(Leave::Drop).await,
            2 => self.subscriber.leave(Leave::Reset).await,
            3 => self.audit().await?,
            _ => {
                let which = self.chance.below(self.subscriber.count());
                self.subscriber.unsubscribe(which).await?;
            }
        }
        Ok(())
    }

    /// Looks at both buckets of accounts at once: what one has lost, the other has won.
    async fn audit(&mut self) -> Result<(), Lost> {
        let read = |bucket: &str| json!({"op": "where", "bucket": bucket, "filter": {}});
        let operations = json!({"operations": [read("left"), read("right")]});
        let both = self.subscriber.request("store.transaction", &operations).await?;
        let (left, right) = (&both["results"][0]["data"], &both["results"][1]["data"]);
        assert_eq!(rows(left).len(), rows(right).len());
        for (left, right) in rows(left).iter().zip(rows(right)) {
            let funds = left["amount"].as_i64().zip(right["amount"].as_i64()).map(|(left, right)| left + right);
            let is_whole = left["id"] == right["id"] && left["n"] == right["n"];
            let expected = if left["owner"] == "marker" { 0 } else { FUNDS };
            assert!(is_whole && funds == Some(expected), "half a transaction: {left} {right}");
        }
        Ok(())
    }

    /// Nothing is written any more: what it has must become what there is, and stay so.
    async fn end(&mut self) -> Result<(), Lost> {
        let subscriber = &mut self.subscriber;
        subscriber.enter(|| true).await?;
        for which in 0..subscriber.count() {
            let asked = subscriber.history(which).asked.clone();
            let expected = subscriber.request("store.query", &asked.query()).await?;
            while subscriber.history(which).state != expected {
                let waited = format!("{} to become {expected} from {}", asked.config, subscriber.history(which).state);
                let push = subscriber.link()?.expect(&waited).await?;
                subscriber.take(&push)?;
            }
        }
        let positions = |subscriber: &Subscriber| -> Vec<Option<String>> {
            (0..subscriber.count()).map(|which| subscriber.history(which).position.clone()).collect()
        };
        let before = positions(subscriber);
        subscriber.request("store.buckets", &json!({})).await?;
        assert_eq!(positions(subscriber), before, "something was pushed though nothing has changed");
        Ok(())
    }
}
