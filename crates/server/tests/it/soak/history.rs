//! What a subscriber was told, and what others were told of the same query.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{HashMap, HashSet};
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value as Json, json};

use super::query::Asked;

/// What a subscriber knows of a query, over all its connections.
pub(super) struct History {
    pub(super) asked: Asked,
    pub(super) is_delta: bool,
    /// Where it stands, as it was told last.
    pub(super) position: Option<String>,
    /// The result there; null if there is none.
    pub(super) state: Json,
    /// All positions that it was told.
    told: HashSet<String>,
    twins: Arc<Twins>,
    /// The field by which records are known.
    key: String,
}

impl History {
    pub(super) fn new(asked: Asked, is_delta: bool, twins: &Arc<Twins>) -> Self {
        let twins = Arc::clone(twins);
        let (told, key) = (HashSet::new(), String::new());
        Self { asked, is_delta, position: None, state: Json::Null, told, twins, key }
    }

    /// The parameters of a subscription that goes on from here, or begins anew.
    pub(super) fn subscribe(&self, goes_on: bool) -> Json {
        let mut params = self.asked.subscribe();
        params["pos"] = json!(true);
        if self.is_delta {
            params["mode"] = json!("delta");
        }
        if let Some(position) = self.position.as_ref().filter(|_| goes_on) {
            params["since"] = json!(position);
        }
        params
    }

    /// The reply to a subscription.
    pub(super) fn begin(&mut self, reply: &Json) {
        let position = reply["pos"].as_str().unwrap_or_else(|| panic!("a reply has a position: {reply}"));
        reply["key"].as_str().expect("a reply names the key").clone_into(&mut self.key);
        if reply.get("resumed") == Some(&json!(true)) {
            self.twins.resumed();
            // What was computed and is as it was is not told.
            if let Some(delta) = reply.get("data") {
                self.apply(delta);
            }
        } else {
            self.state = reply["data"].clone();
        }
        // It may be where it was, and nowhere else where it has been.
        if self.position.as_deref() == Some(position) {
            self.compare(position);
        } else {
            self.move_to(position);
        }
    }

    /// A push.
    pub(super) fn take(&mut self, push: &Json) {
        let position = push["pos"].as_str().unwrap_or_else(|| panic!("a push has a position: {push}")).to_owned();
        match push.get("data") {
            Some(data) if self.is_delta && data.get("reset").is_some() => self.state = data["reset"].clone(),
            Some(data) if self.is_delta => self.apply(data),
            Some(data) => self.state = data.clone(),
            None => self.state = Json::Null,
        }
        self.move_to(&position);
    }

    fn move_to(&mut self, position: &str) {
        let config = &self.asked.config;
        assert!(self.told.insert(position.to_owned()), "{config}: {position} was told before");
        self.twins.follows(&self.asked, self.position.as_deref(), position);
        self.position = Some(position.to_owned());
        self.compare(position);
    }

    fn compare(&self, position: &str) {
        self.asked.check(&self.state);
        self.twins.compare(&self.asked, position, &self.state, self.is_delta);
    }

    /// Makes the new result of the old one, as the protocol says.
    fn apply(&mut self, delta: &Json) {
        let list = |name: &str| delta[name].as_array().unwrap_or_else(|| panic!("no \"{name}\": {delta}"));
        let (added, changed, removed) = (list("added"), list("changed"), list("removed"));
        if added.is_empty() && changed.is_empty() && removed.is_empty() {
            return;
        }
        let is_indexed = self.asked.is_indexed();
        let Some(rows) = self.state.as_array_mut() else { panic!("a delta for {}: {delta}", self.state) };
        let index = |entry: &Json| usize::try_from(entry["index"].as_u64().expect("an index")).expect("a short list");
        let find = |rows: &[Json], key: &Json| {
            let place = rows.iter().position(|row| row[&self.key] == *key);
            place.unwrap_or_else(|| panic!("{key} is not among what {delta} is for: {rows:?}"))
        };
        for entry in removed.iter().rev() {
            let place = if is_indexed { index(entry) } else { find(rows, entry) };
            rows.remove(place);
        }
        for (number, entry) in added.iter().enumerate() {
            if is_indexed {
                rows.insert(index(entry), entry["record"].clone());
                continue;
            }
            let at = delta.get("at").map(|at| at[number].as_u64().expect("an index for each"));
            let place = at.map_or(rows.len(), |at| usize::try_from(at).expect("a short list"));
            rows.insert(place, entry.clone());
        }
        for entry in changed {
            if is_indexed {
                rows[index(entry)] = entry["record"].clone();
            } else {
                let place = find(rows, &entry[&self.key]);
                rows[place] = entry.clone();
            }
        }
    }
}

/// What all subscribers were told: equal queries have equal results at equal positions, and all see these in one order.
#[derive(Debug, Default)]
pub(super) struct Twins(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// By query and position: what the result was, and who said so first.
    states: HashMap<(String, String), (u64, bool)>,
    /// By query: which position was told after which.
    order: HashMap<String, HashSet<(String, String)>>,
    compared: usize,
    across: usize,
    resumed: usize,
}

impl Twins {
    fn with<T>(&self, work: impl FnOnce(&mut Told) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn resumed(&self) {
        self.with(|told| told.resumed += 1);
    }

    fn follows(&self, asked: &Asked, last: Option<&str>, next: &str) {
        if let Some(last) = last {
            let step = (last.to_owned(), next.to_owned());
            self.with(|told| told.order.entry(asked.identity()).or_default().insert(step));
        }
    }

    fn compare(&self, asked: &Asked, position: &str, state: &Json, is_delta: bool) {
        let mut hasher = DefaultHasher::new();
        state.to_string().hash(&mut hasher);
        let hash = hasher.finish();
        let known = self.with(|told| match told.states.entry((asked.identity(), position.to_owned())) {
            Entry::Vacant(place) => {
                place.insert((hash, is_delta));
                None
            }
            Entry::Occupied(known) => {
                let known = *known.get();
                told.compared += 1;
                told.across += usize::from(known.1 != is_delta);
                Some(known)
            }
        });
        if let Some((other, was_delta)) = known {
            let (config, params) = (&asked.config, &asked.params);
            assert_eq!(
                hash, other,
                "{config} {params} at {position} (delta: {is_delta}, the other: {was_delta}) is {state}"
            );
        }
    }

    /// That there is one order in which all were told, and what was compared to find that out.
    pub(super) fn finish(&self) -> String {
        self.with(|told| {
            for (query, steps) in &told.order {
                check_order(query, steps);
            }
            assert!(told.across > 0, "no two that follow differently were ever at the same position");
            let positions = told.states.len();
            let Told { compared, across, resumed, .. } = told;
            format!("{positions} positions, {compared} comparisons ({across} of delta with whole), {resumed} resumed")
        })
    }
}

/// Positions that nothing comes before are taken away, until none is left or each that is left has one before it.
fn check_order(query: &str, steps: &HashSet<(String, String)>) {
    let mut before: HashMap<&str, usize> = HashMap::new();
    let mut after: HashMap<&str, Vec<&str>> = HashMap::new();
    for (last, next) in steps {
        before.entry(last).or_default();
        *before.entry(next).or_default() += 1;
        after.entry(last).or_default().push(next);
    }
    let mut free: Vec<&str> = before.iter().filter(|(_, count)| **count == 0).map(|(position, _)| *position).collect();
    let mut taken = 0;
    while let Some(position) = free.pop() {
        taken += 1;
        for next in after.remove(position).unwrap_or_default() {
            let count = before.get_mut(next).expect("every position is counted");
            *count -= 1;
            if *count == 0 {
                free.push(next);
            }
        }
    }
    assert_eq!(taken, before.len(), "subscribers of {query} were told positions in different orders");
}
