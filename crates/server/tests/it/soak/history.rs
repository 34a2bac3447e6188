//! The results that subscribers received, compared across subscribers of the same query.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{HashMap, HashSet};
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value as Json, json};

use super::query::LiveQuery;

/// The results of a query that a subscriber received, over all its connections.
pub(super) struct History {
    pub(super) query: LiveQuery,
    pub(super) is_delta: bool,
    /// The last position received.
    pub(super) position: Option<String>,
    /// The result at that position; null without a result.
    pub(super) state: Json,
    /// All positions received.
    positions: HashSet<String>,
    cross_check: Arc<CrossCheck>,
    /// The key field of the records.
    key: String,
}

impl History {
    pub(super) fn new(query: LiveQuery, is_delta: bool, cross_check: &Arc<CrossCheck>) -> Self {
        let cross_check = Arc::clone(cross_check);
        let (positions, key) = (HashSet::new(), String::new());
        Self { query, is_delta, position: None, state: Json::Null, positions, cross_check, key }
    }

    /// Returns the parameters of a subscription that resumes from the last position, or starts again.
    pub(super) fn subscribe(&self, should_resume: bool) -> Json {
        let mut params = self.query.subscribe();
        params["pos"] = json!(true);
        if self.is_delta {
            params["mode"] = json!("delta");
        }
        if let Some(position) = self.position.as_ref().filter(|_| should_resume) {
            params["since"] = json!(position);
        }
        params
    }

    /// Applies the reply to a subscription.
    pub(super) fn apply_reply(&mut self, reply: &Json) {
        let position = reply["pos"].as_str().unwrap_or_else(|| panic!("a reply must have a position: {reply}"));
        reply["key"].as_str().expect("a reply names the key").clone_into(&mut self.key);
        if reply.get("resumed") == Some(&json!(true)) {
            self.cross_check.resumed();
            // An unchanged aggregate is not sent.
            if let Some(delta) = reply.get("data") {
                self.apply(delta);
            }
        } else {
            self.state = reply["data"].clone();
        }
        // The position may be unchanged, but must not be an earlier one.
        if self.position.as_deref() == Some(position) {
            self.compare(position);
        } else {
            self.move_to(position);
        }
    }

    /// Applies a push.
    pub(super) fn apply_push(&mut self, push: &Json) {
        let position = push["pos"].as_str().unwrap_or_else(|| panic!("a push must have a position: {push}")).to_owned();
        match push.get("data") {
            Some(data) if self.is_delta && data.get("reset").is_some() => self.state = data["reset"].clone(),
            Some(data) if self.is_delta => self.apply(data),
            Some(data) => self.state = data.clone(),
            None => self.state = Json::Null,
        }
        self.move_to(&position);
    }

    fn move_to(&mut self, position: &str) {
        let config = &self.query.config;
        assert!(self.positions.insert(position.to_owned()), "{config}: {position} was received before");
        self.cross_check.record_order(&self.query, self.position.as_deref(), position);
        self.position = Some(position.to_owned());
        self.compare(position);
    }

    fn compare(&self, position: &str) {
        self.query.check(&self.state);
        self.cross_check.compare(&self.query, position, &self.state, self.is_delta);
    }

    /// Applies a delta to the result, as the protocol specifies.
    fn apply(&mut self, delta: &Json) {
        let list = |name: &str| delta[name].as_array().unwrap_or_else(|| panic!("no \"{name}\": {delta}"));
        let (added, changed, removed) = (list("added"), list("changed"), list("removed"));
        if added.is_empty() && changed.is_empty() && removed.is_empty() {
            return;
        }
        let is_indexed = self.query.is_indexed();
        let Some(rows) = self.state.as_array_mut() else { panic!("a delta for {}: {delta}", self.state) };
        let index_of =
            |entry: &Json| usize::try_from(entry["index"].as_u64().expect("an index")).expect("a short list");
        let find = |rows: &[Json], key: &Json| {
            let index = rows.iter().position(|row| row[&self.key] == *key);
            index.unwrap_or_else(|| panic!("{key} of {delta} is not in the result: {rows:?}"))
        };
        for entry in removed.iter().rev() {
            let index = if is_indexed { index_of(entry) } else { find(rows, entry) };
            rows.remove(index);
        }
        for (number, entry) in added.iter().enumerate() {
            if is_indexed {
                rows.insert(index_of(entry), entry["record"].clone());
                continue;
            }
            let at = delta.get("at").map(|at| at[number].as_u64().expect("an index for each"));
            let index = at.map_or(rows.len(), |at| usize::try_from(at).expect("a short list"));
            rows.insert(index, entry.clone());
        }
        for entry in changed {
            if is_indexed {
                rows[index_of(entry)] = entry["record"].clone();
            } else {
                let index = find(rows, &entry[&self.key]);
                rows[index] = entry.clone();
            }
        }
    }
}

/// Compares the results of all subscribers: equal queries have equal results at equal positions, in one order of positions.
#[derive(Debug, Default)]
pub(super) struct CrossCheck(Mutex<Observations>);

#[derive(Debug, Default)]
struct Observations {
    /// The hash of each result by query and position, and whether the first subscriber built it from deltas.
    states: HashMap<(String, String), (u64, bool)>,
    /// The pairs of successive positions of each query.
    order: HashMap<String, HashSet<(String, String)>>,
    compared: usize,
    across: usize,
    resumed: usize,
}

impl CrossCheck {
    fn with<T>(&self, work: impl FnOnce(&mut Observations) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn resumed(&self) {
        self.with(|observed| observed.resumed += 1);
    }

    fn record_order(&self, query: &LiveQuery, last: Option<&str>, next: &str) {
        if let Some(last) = last {
            let step = (last.to_owned(), next.to_owned());
            self.with(|observed| observed.order.entry(query.identity()).or_default().insert(step));
        }
    }

    fn compare(&self, query: &LiveQuery, position: &str, state: &Json, is_delta: bool) {
        let mut hasher = DefaultHasher::new();
        state.to_string().hash(&mut hasher);
        let hash = hasher.finish();
        let known = self.with(|observed| match observed.states.entry((query.identity(), position.to_owned())) {
            Entry::Vacant(vacant) => {
                vacant.insert((hash, is_delta));
                None
            }
            Entry::Occupied(known) => {
                let known = *known.get();
                observed.compared += 1;
                observed.across += usize::from(known.1 != is_delta);
                Some(known)
            }
        });
        if let Some((other, was_delta)) = known {
            let (config, params) = (&query.config, &query.params);
            assert_eq!(
                hash, other,
                "{config} {params} at {position} (delta: {is_delta}, other: {was_delta}) is {state}"
            );
        }
    }

    /// Checks that all subscribers received the positions in one order. Returns a summary.
    pub(super) fn finish(&self) -> String {
        self.with(|observed| {
            for (query, steps) in &observed.order {
                check_order(query, steps);
            }
            assert!(observed.across > 0, "no delta and snapshot subscribers were ever at the same position");
            let positions = observed.states.len();
            let Observations { compared, across, resumed, .. } = observed;
            format!(
                "{positions} positions, {compared} comparisons ({across} of delta with snapshot), {resumed} resumed"
            )
        })
    }
}

/// Checks that the successor pairs have no cycle, by topological sort.
fn check_order(query: &str, steps: &HashSet<(String, String)>) {
    let mut before: HashMap<&str, usize> = HashMap::new();
    let mut after: HashMap<&str, Vec<&str>> = HashMap::new();
    for (last, next) in steps {
        before.entry(last).or_default();
        *before.entry(next).or_default() += 1;
        after.entry(last).or_default().push(next);
    }
    let mut ready: Vec<&str> = before.iter().filter(|(_, count)| **count == 0).map(|(position, _)| *position).collect();
    let mut sorted = 0;
    while let Some(position) = ready.pop() {
        sorted += 1;
        for next in after.remove(position).unwrap_or_default() {
            let count = before.get_mut(next).expect("every position is counted");
            *count -= 1;
            if *count == 0 {
                ready.push(next);
            }
        }
    }
    assert_eq!(sorted, before.len(), "subscribers of {query} received positions in different orders");
}
