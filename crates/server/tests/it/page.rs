//! The page of `/metrics`, as a scraper reads it.

use std::collections::BTreeMap;

use tidewire::Server;
use tidewire_testkit::{PATIENCE, wait_until_async};
use tokio::io::AsyncWriteExt as _;

use crate::raw::Raw;

/// The samples of one page, by name and labels, without the prefix `tidewire_`.
#[derive(Debug)]
pub(crate) struct Page {
    /// The names after `# TYPE`, each with its type.
    pub(crate) types: BTreeMap<String, String>,
    samples: BTreeMap<String, String>,
}

impl Page {
    /// Reads the page of a server.
    pub(crate) async fn of(server: &Server) -> Self {
        Self::try_of(server).await.expect("the server has a permit for another socket")
    }

    /// Reads the page of a server that may have no permit for another socket.
    pub(crate) async fn try_of(server: &Server) -> Option<Self> {
        let mut raw = Raw::connect(server).await;
        // A socket that is refused may be closed before it is written to.
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
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} is there twice");
            } else if !line.starts_with('#') {
                let (name, value) = line.strip_prefix("tidewire_").unwrap().rsplit_once(' ').unwrap();
                assert!(samples.insert(name.to_owned(), value.to_owned()).is_none(), "{name} is there twice");
            }
        }
        Self { types, samples }
    }

    /// The text of a sample: the name, and its labels as they are on the page.
    pub(crate) fn text(&self, sample: &str) -> Option<&str> {
        self.samples.get(sample).map(String::as_str)
    }

    /// The value of a sample that must be there.
    pub(crate) fn get(&self, sample: &str) -> u64 {
        let text = self.text(sample).unwrap_or_else(|| panic!("{sample} is not on the page: {self:?}"));
        text.parse().unwrap_or_else(|_| panic!("{sample} is {text}"))
    }

    /// Requests to an operation with this outcome.
    pub(crate) fn requests(&self, operation: &str, outcome: &str) -> u64 {
        let sample = format!("operation_requests_total{{operation=\"{operation}\",outcome=\"{outcome}\"}}");
        self.text(&sample).map_or(0, |text| text.parse().unwrap())
    }

    /// Connections that have ended for this reason.
    pub(crate) fn ended(&self, reason: &str) -> u64 {
        self.get(&format!("connections_ended_total{{reason=\"{reason}\"}}"))
    }
}

/// The value of one metric now.
pub(crate) async fn metric(server: &Server, name: &str) -> u64 {
    Page::of(server).await.get(name)
}

/// Waits until the page shows this.
pub(crate) async fn wait_for(server: &Server, what: &str, condition: impl Fn(&Page) -> bool) -> Page {
    wait_until_async(what, PATIENCE, async || condition(&Page::of(server).await)).await;
    Page::of(server).await
}
