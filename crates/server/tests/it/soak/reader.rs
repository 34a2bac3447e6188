//! A client that subscribes to queries, reconnects, may be slow, and must end with the results of the store.

use serde_json::json;
use tokio::sync::watch;

use super::Progress;
use super::connection::{CloseMethod, ConnectionLost};
use super::query::{TOTAL_FUNDS, rows};
use super::rng::Rng;
use super::subscriber::Subscriber;

/// The behaviour of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behavior {
    /// Reads continuously and stays connected.
    Steady,
    /// Reads continuously, and sometimes reconnects, unsubscribes or reads both account buckets.
    Reconnecting,
    /// Reads a message only after a number of further writes.
    Slow,
}

/// A client that subscribes to queries.
pub(super) struct Reader {
    pub(super) subscriber: Subscriber,
    pub(super) behavior: Behavior,
    pub(super) rng: Rng,
    pub(super) progress: watch::Receiver<Progress>,
}

impl Reader {
    /// Reads until all writes are done, and then checks its results against the store.
    pub(super) async fn run(mut self) {
        while !self.progress.borrow().is_done {
            if self.step().await.is_err() {
                self.subscriber.reset_connection();
            }
        }
        while self.converge().await.is_err() {
            self.subscriber.reset_connection();
        }
        let method = *self.rng.pick(&[CloseMethod::Close, CloseMethod::Drop, CloseMethod::Reset]);
        self.subscriber.disconnect(method).await;
    }

    async fn step(&mut self) -> Result<(), ConnectionLost> {
        // A subscription that does not resume must be correct too, but is tested less often.
        let rng = &mut self.rng;
        self.subscriber.connect_and_subscribe(|| !rng.one_in(4)).await?;
        if self.behavior == Behavior::Slow {
            let until = self.progress.borrow().written + 10 + self.rng.below(40);
            let ready = self.progress.wait_for(|progress| progress.is_done || progress.written >= until).await;
            drop(ready.expect("the run outlives its readers"));
        }
        let message = tokio::select! {
            message = self.subscriber.connection()?.receive() => message?,
            over = self.progress.wait_for(|progress| progress.is_done) => {
                drop(over.expect("the run outlives its readers"));
                return Ok(());
            }
        };
        self.subscriber.apply_push(&message)?;
        if self.behavior == Behavior::Reconnecting && self.rng.one_in(20) {
            self.act_randomly().await?;
        }
        Ok(())
    }

    async fn act_randomly(&mut self) -> Result<(), ConnectionLost> {
        match self.rng.below(6) {
            0 => self.subscriber.disconnect(CloseMethod::Close).await,
            1 => self.subscriber.disconnect(CloseMethod::Drop).await,
            2 => self.subscriber.disconnect(CloseMethod::Reset).await,
            3 => self.check_accounts().await?,
            _ => {
                let index = self.rng.below(self.subscriber.count());
                self.subscriber.unsubscribe(index).await?;
            }
        }
        Ok(())
    }

    /// Reads both account buckets in one transaction: the amounts must match.
    async fn check_accounts(&mut self) -> Result<(), ConnectionLost> {
        let read = |bucket: &str| json!({"op": "where", "bucket": bucket, "filter": {}});
        let operations = json!({"operations": [read("left"), read("right")]});
        let both = self.subscriber.request("store.transaction", &operations).await?;
        let (left, right) = (&both["results"][0]["data"], &both["results"][1]["data"]);
        assert_eq!(rows(left).len(), rows(right).len());
        for (left, right) in rows(left).iter().zip(rows(right)) {
            let funds = left["amount"].as_i64().zip(right["amount"].as_i64()).map(|(left, right)| left + right);
            let is_consistent = left["id"] == right["id"] && left["n"] == right["n"];
            let expected = if left["owner"] == "marker" { 0 } else { TOTAL_FUNDS };
            assert!(is_consistent && funds == Some(expected), "partial transaction: {left} {right}");
        }
        Ok(())
    }

    /// Waits until all results equal those of the store. No client writes any more, so they must not change after that.
    async fn converge(&mut self) -> Result<(), ConnectionLost> {
        let subscriber = &mut self.subscriber;
        subscriber.connect_and_subscribe(|| true).await?;
        for index in 0..subscriber.count() {
            let query = subscriber.history(index).query.clone();
            let expected = subscriber.request("store.query", &query.query()).await?;
            while subscriber.history(index).state != expected {
                let expected_push =
                    format!("{} to become {expected} from {}", query.config, subscriber.history(index).state);
                let push = subscriber.connection()?.expect(&expected_push).await?;
                subscriber.apply_push(&push)?;
            }
        }
        let positions = |subscriber: &Subscriber| -> Vec<Option<String>> {
            (0..subscriber.count()).map(|index| subscriber.history(index).position.clone()).collect()
        };
        let before = positions(subscriber);
        subscriber.request("store.buckets", &json!({})).await?;
        assert_eq!(positions(subscriber), before, "a push without a change");
        Ok(())
    }
}
