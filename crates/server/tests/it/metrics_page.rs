//! The `/metrics` page as a scraper reads it.

use std::collections::BTreeMap;

use tidewire::Server;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::raw_client::RawClient;

/// The samples of one page, by name and labels, without the prefix `tidewire_`.
#[derive(Debug)]
pub(crate) struct MetricsPage {
    /// The type of each metric, from its `# TYPE` line.
    pub(crate) types: BTreeMap<String, String>,
    samples: BTreeMap<String, String>,
}

impl MetricsPage {
    /// Reads the page of a server.
    pub(crate) async fn read(server: &Server) -> Self {
        Self::try_read(server).await.expect("no socket permit for the scraper")
    }

    /// Reads the page, or returns `None` if the server has no permit for another socket.
    pub(crate) async fn try_read(server: &Server) -> Option<Self> {
        let mut raw = RawClient::connect(server).await;
        // The server may close a rejected socket before the request is written.
        let _ = raw.stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: tide\r\nConnection: close\r\n\r\n").await;
        if !raw.has_response().await {
            return None;
        }
        let (status, _, text) = raw.response().await;
        (status == 200).then(|| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let (mut types, mut samples) = (BTreeMap::new(), BTreeMap::new());
        for line in text.lines() {
            if let Some(line) = line.strip_prefix("# TYPE tidewire_") {
                let (name, kind) = line.split_once(' ').unwrap();
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "duplicate metric {name}");
            } else if !line.starts_with('#') {
                let (name, value) = line.strip_prefix("tidewire_").unwrap().rsplit_once(' ').unwrap();
                assert!(samples.insert(name.to_owned(), value.to_owned()).is_none(), "duplicate sample {name}");
            }
        }
        Self { types, samples }
    }

    /// Returns the text of a sample, by its name with labels as on the page.
    pub(crate) fn text(&self, sample: &str) -> Option<&str> {
        self.samples.get(sample).map(String::as_str)
    }

    /// Returns the value of a sample. Panics if it is missing.
    pub(crate) fn get(&self, sample: &str) -> u64 {
        let text = self.text(sample).unwrap_or_else(|| panic!("{sample} is not on the page: {self:?}"));
        text.parse().unwrap_or_else(|_| panic!("{sample} is {text}"))
    }

    /// Returns the number of requests to an operation with this outcome.
    pub(crate) fn requests(&self, operation: &str, outcome: &str) -> u64 {
        let sample = format!("operation_requests_total{{operation=\"{operation}\",outcome=\"{outcome}\"}}");
        self.text(&sample).map_or(0, |text| text.parse().unwrap())
    }

    /// Returns the number of connections that ended for this reason.
    pub(crate) fn ended(&self, reason: &str) -> u64 {
        self.get(&format!("connections_ended_total{{reason=\"{reason}\"}}"))
    }
}

/// Reads the current value of one metric.
pub(crate) async fn metric(server: &Server, name: &str) -> u64 {
    MetricsPage::read(server).await.get(name)
}

/// Waits until the page satisfies the condition.
pub(crate) async fn wait_for_metrics(
    server: &Server,
    what: &str,
    condition: impl Fn(&MetricsPage) -> bool,
) -> MetricsPage {
    wait_until_async(what, PATIENCE, async || condition(&MetricsPage::read(server).await)).await;
    MetricsPage::read(server).await
}
