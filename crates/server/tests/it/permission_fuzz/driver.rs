//! Sends random requests from several clients and checks every message they receive.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::QueryOutput;

use super::policy::{Access, BARRIER, BUCKETS, Policy};
use super::random::Random;
use crate::client::{Client, options};
use crate::test_server::{TestServer, object};

const CLIENTS: usize = 4;
const ROUNDS: usize = 60;
/// How long a revoked user cannot log in.
const REVOCATION_MILLIS: u64 = 3000;

/// Runs one case.
pub(super) async fn run(seed: u64) {
    println!("seed {seed}");
    let mut simulation = Simulation::new(seed).await;
    for round in 0..ROUNDS {
        simulation.round().await;
        match round % 10 {
            3 => {
                simulation.drain_pushes().await;
                simulation.check_visible_rows().await;
            }
            6 => {
                simulation.drain_pushes().await;
                simulation.pass_time().await;
            }
            9 => {
                simulation.drain_pushes().await;
                simulation.revoke().await;
            }
            _ => {}
        }
    }
    assert!(simulation.seen > 100, "too few records were received for a meaningful test: {}", simulation.seen);
}

struct Simulation {
    seed: u64,
    random: Random,
    policy: Policy,
    test: TestServer,
    participants: Vec<Participant>,
    /// Every version of every record, by its mark: its bucket and contents.
    versions: HashMap<String, (String, Json)>,
    /// The marks of all versions of a key.
    marks_by_key: HashMap<String, Vec<String>>,
    count: usize,
    barriers: u64,
    /// The time since the start, in milliseconds.
    now: u64,
    /// Writes that may be sent again with the same idempotency key.
    repeatable: Vec<(&'static str, Json)>,
    /// The number of marks and keys received.
    seen: usize,
}

/// A client, and the state of the model for it.
struct Participant {
    client: Client,
    person: Option<usize>,
    expires_at: Option<u64>,
    /// The sessions since pushes were last drained: deltas in flight may belong to them.
    previous: Vec<Option<usize>>,
    /// The ids of its open subscriptions.
    subscriptions: HashSet<String>,
    /// All subscriptions with deltas, open or ended: a delta in flight may arrive after the end.
    deltas: HashSet<String>,
    positions: Vec<Json>,
    /// Keys that it has sent or received.
    keys: HashSet<String>,
}

/// A request that was sent.
struct Sent {
    id: u64,
    operation: &'static str,
    params: Json,
}

/// A message that a client received.
struct Received {
    participant: usize,
    message: Json,
    /// The request that it replies to; `None` for a push.
    sent: Option<(&'static str, Json)>,
    /// The sessions to which it may have been sent.
    sessions: Vec<Option<usize>>,
}

/// A programmatic query for one record and all records of the first bucket.
#[derive(Debug)]
struct HostedQuery;

impl ProgrammaticQuery for HostedQuery {
    fn buckets(&self) -> Vec<String> {
        vec![BUCKETS[0].to_owned()]
    }

    fn compute(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        let one = view.get(BUCKETS[0], params.get("key").unwrap_or(&Json::Null))?;
        records(view, BUCKETS[0]).map(|all| json!([one, all]))
    }
}

#[derive(Debug)]
struct BarrierQuery;

impl ProgrammaticQuery for BarrierQuery {
    fn buckets(&self) -> Vec<String> {
        vec![BARRIER.to_owned()]
    }

    fn compute(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        records(view, BARRIER)
    }
}

fn records(view: &View<'_>, bucket: &str) -> Result<Json, RequestError> {
    match view.query(&json!({"bucket": bucket}))? {
        QueryOutput::Records(records) => Ok(records.into()),
        QueryOutput::Value(other) => panic!("expected records, got {other:?}"),
    }
}

impl Simulation {
    async fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let policy = Policy::random(&mut random);
        let options = options()
            .auth(policy.auth())
            .query("hosted", HostedQuery)
            .query("hosted-barrier", BarrierQuery)
            .revocation_ttl(Duration::from_millis(REVOCATION_MILLIS));
        let test = TestServer::start_with(options).await;
        let mut participants = Vec::new();
        for _ in 0..CLIENTS {
            participants.push(Participant::new(test.anonymous().await));
        }
        let mut simulation = Self {
            seed,
            random,
            policy,
            test,
            participants,
            versions: HashMap::new(),
            marks_by_key: HashMap::new(),
            count: 0,
            barriers: 0,
            now: 0,
            repeatable: Vec::new(),
            seen: 0,
        };
        simulation.create_buckets().await;
        simulation
    }

    async fn create_buckets(&mut self) {
        self.test.bucket(BARRIER, []).await;
        for (index, bucket) in BUCKETS.into_iter().enumerate() {
            let config = json!({"key": "id", "schema": {
                "id": {"type": "string", "generated": "uuid"},
                "n": {"type": "number"},
                "name": {"type": "string", "unique": index == 1},
            }, "indexes": ["n"], "etsType": if index == 2 { "ordered_set" } else { "set" }});
            let mut rows = Vec::new();
            for _ in 0..12 {
                let mut record = self.record();
                record["name"] = Json::Null;
                rows.push(object(record));
            }
            let written = self.test.write(move |draft| {
                draft.define_bucket(bucket, &config)?;
                draft.insert_many(bucket, rows)
            });
            for row in written.await {
                self.register(bucket, &Json::Object(row.to_record()));
            }
            self.test.query(&format!("all-{bucket}"), json!({"bucket": bucket})).await;
            let top =
                json!({"bucket": bucket, "sort": {"n": "desc", "mark": "asc"}, "limit": 3, "fields": ["id", "mark"]});
            self.test.query(&format!("top-{bucket}"), top).await;
        }
    }

    /// Returns a record with a new mark and key.
    fn record(&mut self) -> Json {
        let mut record = self.policy.record(&mut self.random);
        record["mark"] = json!(self.mark());
        self.count += 1;
        record["id"] = json!(format!("key{:06}y", self.count));
        record
    }

    fn mark(&mut self) -> String {
        self.count += 1;
        format!("mk{:06}x", self.count)
    }

    /// Returns the key of a record that exists or existed.
    fn key(&mut self) -> Json {
        let count = self.random.below(self.count + 1);
        let keys: Vec<&String> = self.marks_by_key.keys().collect();
        let nearest = keys.iter().min_by_key(|key| (number(key).abs_diff(count), (**key).clone()));
        json!(nearest.expect("no records"))
    }

    fn register(&mut self, bucket: &str, record: &Json) {
        let (Some(mark), Some(key)) = (record["mark"].as_str(), record["id"].as_str()) else { return };
        self.marks_by_key.entry(key.to_owned()).or_default().push(mark.to_owned());
        self.versions.insert(mark.to_owned(), (bucket.to_owned(), record.clone()));
    }

    /// Each client sends requests and receives the replies.
    async fn round(&mut self) {
        let mut sent: Vec<Vec<Sent>> = Vec::new();
        for participant in 0..self.participants.len() {
            let mut own = Vec::new();
            for _ in 0..=self.random.below(3) {
                let (operation, params) = self.request(participant);
                own.push(self.send(participant, operation, params).await);
            }
            sent.push(own);
        }
        let mut received = Vec::new();
        for (participant, sent) in sent.into_iter().enumerate() {
            self.receive(participant, sent, &mut received).await;
        }
        self.check(received);
    }

    async fn send(&mut self, participant: usize, operation: &'static str, params: Json) -> Sent {
        let participant = &mut self.participants[participant];
        participant.keys.extend(find_words(&params.to_string(), "key", 'y'));
        let id = participant.client.send(operation, params.clone()).await;
        Sent { id, operation, params }
    }

    /// Receives the replies to these requests, and the pushes before them.
    async fn receive(&mut self, index: usize, sent: Vec<Sent>, received: &mut Vec<Received>) {
        for Sent { id, operation, params } in sent {
            let reply = self.participants[index].client.reply(id).await;
            let before = self.participants[index].person;
            let login = match operation {
                "auth.login" if reply["type"] == "result" => Some(self.person(&params)),
                "auth.login" if reply["code"] == "SESSION_REVOKED" => Some(None),
                "auth.logout" => Some(None),
                _ => None,
            };
            // A push before the reply to a login may belong to the previous or the new session.
            self.take_pushes(index, &[before, login.unwrap_or(before)], received);
            let participant = &mut self.participants[index];
            if let Some(person) = login {
                participant.previous.push(participant.person);
                participant.person = person;
                participant.expires_at = reply["data"]["expiresAt"].as_u64();
            }
            let data = &reply["data"];
            if operation == "store.subscribe" && reply["type"] == "result" {
                let is_delta = params.get("mode").is_some_and(|mode| mode == "delta");
                let id = data["subscriptionId"].as_str().unwrap().to_owned();
                participant.deltas.extend(is_delta.then(|| id.clone()));
                participant.subscriptions.insert(id);
                participant.positions.extend(data.get("pos").cloned());
            }
            if operation == "store.unsubscribe" && reply["type"] == "result" {
                participant.subscriptions.remove(params["subscriptionId"].as_str().unwrap());
            }
            self.register_results(operation, &params, data);
            received.push(Received {
                participant: index,
                message: reply,
                sent: Some((operation, params)),
                sessions: vec![before],
            });
        }
    }

    fn take_pushes(&mut self, index: usize, sessions: &[Option<usize>], received: &mut Vec<Received>) {
        let participant = &mut self.participants[index];
        for message in participant.client.take_pushes() {
            let is_delta = message["subscriptionId"].as_str().is_some_and(|id| participant.deltas.contains(id));
            let late = participant.previous.iter().copied().filter(|_| is_delta);
            let sessions = sessions.iter().copied().chain(late).collect();
            participant.positions.extend(message.get("pos").cloned());
            received.push(Received { participant: index, message, sent: None, sessions });
        }
    }

    fn person(&self, params: &Json) -> Option<usize> {
        self.policy.people.iter().position(|person| params["token"] == *person.token)
    }

    /// Registers the records that a write returned.
    fn register_results(&mut self, operation: &str, params: &Json, data: &Json) {
        let bucket = params["bucket"].as_str().unwrap_or_default().to_owned();
        match operation {
            "store.insert" | "store.update" | "store.upsert" => self.register(&bucket, data),
            "store.insertMany" => {
                for record in data["records"].as_array().into_iter().flatten() {
                    self.register(&bucket, record);
                }
            }
            "store.transaction" => {
                for (step, result) in params["operations"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .zip(data["results"].as_array().into_iter().flatten())
                {
                    if step["op"] == "insert" || step["op"] == "update" {
                        self.register(step["bucket"].as_str().unwrap(), &result["data"]);
                    }
                }
            }
            _ => {}
        }
    }

    /// Checks that no message contains a record that its client may not see.
    fn check(&mut self, received: Vec<Received>) {
        for Received { participant, message, sent, sessions } in received {
            let text = message.to_string();
            let operation = sent.as_ref().map_or("store.subscribe", |(operation, _)| operation);
            let what = || format!("seed {}: client {participant} as {sessions:?}: {sent:?}\n{text}", self.seed);
            if let Some((operation, params)) = &sent {
                self.check_code(operation, params, &message, sessions[0], &what);
                if *operation == "store.transaction" {
                    self.check_steps(params, &message, sessions[0], &what);
                }
            }
            let is_error = message["type"] == "error";
            let own = sent.as_ref().map(|(_, params)| params.to_string()).unwrap_or_default();
            let mut shown = Vec::new();
            for mark in find_words(&text, "mk", 'x') {
                if is_error && own.contains(&mark) {
                    continue;
                }
                let (bucket, record) =
                    self.versions.get(&mark).unwrap_or_else(|| panic!("{mark} was never written: {}", what()));
                let may_see = |person: &Option<usize>| self.policy.may_see(*person, operation, bucket, record);
                assert!(sessions.iter().any(may_see), "{mark} must not be visible: {record} in {bucket}: {}", what());
                shown.push(record["id"].as_str().unwrap().to_owned());
            }
            // Query definitions are not records, even if they contain keys.
            let keys = if operation == "store.listQueries" { Vec::new() } else { find_words(&text, "key", 'y') };
            for key in keys {
                let marks = self.marks_by_key.get(&key).into_iter().flatten();
                let mut versions = marks.filter_map(|mark| self.versions.get(mark));
                let is_known = self.participants[participant].keys.contains(&key)
                    || versions.any(|(bucket, record)| {
                        sessions.iter().any(|person| self.policy.may_see(*person, operation, bucket, record))
                    });
                assert!(is_known, "{key} must not be visible: {}", what());
                shown.push(key);
            }
            self.seen += shown.len();
            self.participants[participant].keys.extend(shown);
        }
    }

    /// Checks that each step of a transaction is permitted like the corresponding operation.
    fn check_steps(&self, params: &Json, reply: &Json, person: Option<usize>, what: &impl Fn() -> String) {
        let steps = params["operations"].as_array().into_iter().flatten();
        for (index, step) in steps.enumerate() {
            let operation = format!("store.{}", step["op"].as_str().unwrap());
            let bucket = step["bucket"].as_str().unwrap();
            for needed in [&*operation, "store.transaction"] {
                if matches!(self.policy.access(person, needed, Some(bucket)), Access::Nothing) {
                    let code = reply["code"].as_str().unwrap_or_default();
                    assert!(["FORBIDDEN", "UNAUTHORIZED"].contains(&code), "{needed} on {bucket}: {}", what());
                }
            }
            for mark in find_words(&reply["data"]["results"][index]["data"].to_string(), "mk", 'x') {
                let (bucket, record) = &self.versions[&mark];
                let may_see = self.policy.may_see_in_step(person, &operation, bucket, record);
                assert!(may_see, "{mark} must not be visible in step {index}: {record} in {bucket}: {}", what());
            }
        }
    }

    /// Checks the code of a reply against the policy, where the request alone determines it.
    fn check_code(
        &self,
        operation: &str,
        params: &Json,
        reply: &Json,
        person: Option<usize>,
        what: &impl Fn() -> String,
    ) {
        let is_read = [
            "get", "all", "where", "findOne", "count", "first", "last", "paginate", "sum", "avg", "min", "max", "query",
        ];
        let name = operation.strip_prefix("store.").unwrap_or_default();
        let Some(bucket) = params["bucket"].as_str() else { return };
        // Validation errors are shown to a user with access to any bucket.
        if reply["code"] == "VALIDATION_ERROR" && params["filter"]["mark"].get("$regex").is_some() {
            return;
        }
        // An expired session is reported once, also if no login is required.
        if self.participants.iter().any(|participant| participant.person.is_none())
            && reply["message"] == "Session expired"
        {
            return;
        }
        let access = self.policy.access(person, operation, Some(bucket));
        if matches!(access, Access::Nothing) {
            assert_eq!(reply["type"], "error", "{}", what());
            let code = reply["code"].as_str().unwrap();
            assert!(["FORBIDDEN", "UNAUTHORIZED"].contains(&code), "{}", what());
        } else if is_read.contains(&name) {
            assert_ne!(reply["code"], "FORBIDDEN", "{}", what());
        }
    }

    /// Waits until all pushes in flight have arrived.
    async fn drain_pushes(&mut self) {
        let mut received = Vec::new();
        for participant in 0..self.participants.len() {
            if !self.can_subscribe(participant) {
                continue;
            }
            let mut sent = Vec::new();
            for params in [
                json!({"config": {"bucket": BARRIER}}),
                json!({"config": {"bucket": BARRIER}, "mode": "delta"}),
                json!({"query": "hosted-barrier"}),
            ] {
                sent.push(self.send(participant, "store.subscribe", params).await);
            }
            self.receive(participant, sent, &mut received).await;
        }
        // Pushes made together with the first barrier arrive before the second.
        for _ in 0..2 {
            self.barriers += 1;
            let barrier = format!("barrier-{}-", self.barriers);
            let record = object(json!({"id": barrier}));
            self.test.write(move |draft| draft.insert(BARRIER, record)).await;
            for index in 0..self.participants.len() {
                let mut left = if self.can_subscribe(index) { 3 } else { 0 };
                while left > 0 {
                    let push = self.participants[index].client.push().await;
                    left -= usize::from(push.to_string().contains(&barrier));
                    self.participants[index].client.requeue_push(push);
                    let sessions = [self.participants[index].person];
                    self.take_pushes(index, &sessions, &mut received);
                }
            }
        }
        self.check(received);
        for index in 0..self.participants.len() {
            // The pushes of a client without subscriptions were not drained.
            if self.can_subscribe(index) {
                self.participants[index].previous.clear();
                self.unsubscribe_old(index).await;
            }
        }
    }

    fn can_subscribe(&self, index: usize) -> bool {
        self.participants[index].person.is_some() || !self.policy.is_required
    }

    /// Cancels all but a few subscriptions.
    async fn unsubscribe_old(&mut self, index: usize) {
        let mut ids: Vec<String> = self.participants[index].subscriptions.iter().cloned().collect();
        ids.sort_by_key(|id| id["sub-".len()..].parse::<u64>().unwrap());
        let mut sent = Vec::new();
        for (order, id) in ids.into_iter().rev().enumerate() {
            // The last three are those of the barrier.
            if !(3..=10).contains(&order) {
                sent.push(self.send(index, "store.unsubscribe", json!({"subscriptionId": id})).await);
                self.participants[index].subscriptions.remove(&id);
            }
        }
        let mut received = Vec::new();
        self.receive(index, sent, &mut received).await;
        self.check(received);
    }

    /// Checks that each client sees exactly its rows, while no client writes.
    async fn check_visible_rows(&mut self) {
        for index in 0..self.participants.len() {
            let person = self.participants[index].person;
            for bucket in BUCKETS {
                let snapshot = self.test.store.snapshot();
                let all: Vec<Json> =
                    snapshot.state.bucket(bucket).unwrap().rows().map(|row| Json::Object(row.to_record())).collect();
                let own = |operation: &str| -> Vec<&Json> {
                    all.iter().filter(|record| self.policy.may_see(person, operation, bucket, record)).collect()
                };
                let sum =
                    |operation: &str| own(operation).iter().filter_map(|record| record["n"].as_u64()).sum::<u64>();
                let max = own("store.max").iter().filter_map(|record| record["n"].as_u64()).max();
                let expected = [
                    ("store.all", json!({}), json!(own("store.all"))),
                    ("store.count", json!({}), json!(own("store.count").len())),
                    ("store.sum", json!({"field": "n"}), json!(sum("store.sum"))),
                    ("store.max", json!({"field": "n"}), json!(max)),
                    ("store.query", json!({}), json!(own("store.query"))),
                ];
                for (operation, params, expected) in expected {
                    if matches!(self.policy.access(person, operation, Some(bucket)), Access::Nothing) {
                        continue;
                    }
                    let mut params = params;
                    params["bucket"] = json!(bucket);
                    let data = self.participants[index].client.call(operation, params).await;
                    let is_same = match (data.as_f64(), expected.as_f64()) {
                        (Some(data), Some(expected)) => (data - expected).abs() < 0.001,
                        _ => data == expected,
                    };
                    assert!(is_same, "seed {}: {person:?} {operation} {bucket}: {data} not {expected}", self.seed);
                }
            }
        }
    }

    /// Expires some sessions, and checks that they receive no pushes without sending a request.
    async fn pass_time(&mut self) {
        self.test.advance(2000);
        self.now += 2000;
        let now = crate::test_server::START_MILLIS + self.now;
        let mut expired = Vec::new();
        for (index, participant) in self.participants.iter_mut().enumerate() {
            if participant.expires_at.is_some_and(|expires_at| expires_at <= now) {
                (participant.person, participant.expires_at) = (None, None);
                expired.push(index);
            }
        }
        if !self.policy.is_required {
            // They continue as anonymous clients after the error.
            for index in expired {
                assert_eq!(
                    self.participants[index].client.call_err("store.buckets", json!({})).await.0,
                    "UNAUTHORIZED"
                );
            }
            return;
        }
        for bucket in BUCKETS {
            let mut record = self.record();
            record["name"] = Json::Null;
            let row = self.test.write(move |draft| draft.insert(bucket, object(record))).await;
            self.register(bucket, &Json::Object(row.to_record()));
        }
        self.drain_pushes().await;
        let mut received = Vec::new();
        for index in expired {
            let sent = self.send(index, "auth.whoami", json!({})).await;
            self.receive(index, vec![sent], &mut received).await;
        }
        self.check(received);
    }

    /// Revokes a user. All connections of the user must be closed.
    async fn revoke(&mut self) {
        let user = format!("user-{}", self.random.below(4));
        let is_theirs = |participant: &Participant| {
            participant.person.is_some_and(|person| self.policy.people[person].user == user)
        };
        let theirs: Vec<bool> = self.participants.iter().map(is_theirs).collect();
        self.test.server.revoke_user(&user);
        for (index, is_theirs) in theirs.into_iter().enumerate() {
            if is_theirs {
                assert_eq!(self.participants[index].client.closed().await.0, 4002);
                self.participants[index] = Participant::new(self.test.anonymous().await);
            }
        }
    }

    /// Returns a random request of a client.
    fn request(&mut self, participant: usize) -> (&'static str, Json) {
        let is_anonymous = self.participants[participant].person.is_none();
        if self.random.one_in(if is_anonymous && self.policy.is_required { 2 } else { 14 }) {
            return self.account();
        }
        if self.random.one_in(10) && !self.repeatable.is_empty() {
            let index = self.random.below(self.repeatable.len());
            return self.repeatable[index].clone();
        }
        let bucket = self.random.pick(&BUCKETS);
        let with = |params: Json| {
            let mut params = params;
            params["bucket"] = json!(bucket);
            params
        };
        let filter = self.filter();
        match self.random.below(36) {
            0 => ("store.get", with(json!({"key": self.key()}))),
            1 => ("store.all", with(json!({}))),
            2 => ("store.where", with(json!({"filter": filter}))),
            3 => ("store.findOne", with(json!({"filter": filter}))),
            4 => ("store.count", with(json!({"filter": filter}))),
            5 => ("store.first", with(json!({"n": 1 + self.random.below(4)}))),
            6 => ("store.last", with(json!({"n": 1 + self.random.below(4)}))),
            7 => ("store.paginate", with(json!({"limit": 1 + self.random.below(4)}))),
            8 => ("store.paginate", with(json!({"limit": 3, "after": self.key()}))),
            9 => (self.random.pick(&["store.sum", "store.avg", "store.min", "store.max"]), with(json!({"field": "n"}))),
            10 => ("store.min", with(json!({"field": "mark", "filter": filter}))),
            11 => (self.random.pick(&["store.buckets", "store.stats", "store.listQueries"]), json!({})),
            12 => (self.random.pick(&["server.stats", "server.connections", "store.gett"]), json!({})),
            13 => ("store.getBucketSchema", json!({"name": bucket})),
            14 | 15 => ("store.query", with(self.query())),
            16..=20 => ("store.subscribe", self.subscribe_params(participant, bucket)),
            21 => ("store.unsubscribe", json!({"subscriptionId": format!("sub-{}", self.random.below(60))})),
            22 => (
                "store.defineQuery",
                json!({"name": format!("q{}", self.random.below(3)), "config": with(self.query())}),
            ),
            23 => ("store.undefineQuery", json!({"name": format!("q{}", self.random.below(3))})),
            24 => ("store.where", with(json!({"filter": {"mark": {"$regex": "mk"}}}))),
            _ => {
                let (operation, mut params) = self.write(bucket);
                if self.random.one_in(4) {
                    params["idempotencyKey"] = json!(format!("once-{}", self.random.below(40)));
                    self.repeatable.push((operation, params.clone()));
                }
                (operation, params)
            }
        }
    }

    fn account(&mut self) -> (&'static str, Json) {
        match self.random.below(8) {
            0 => ("auth.logout", json!({})),
            1 => ("auth.login", json!({"token": "unknown"})),
            _ => {
                let index = self.random.below(self.policy.people.len());
                ("auth.login", json!({"token": self.policy.people[index].token}))
            }
        }
    }

    fn write(&mut self, bucket: &'static str) -> (&'static str, Json) {
        let mut patch = json!({"mark": self.mark()});
        let record = self.policy.record(&mut self.random);
        for field in ["owner", "team", "role", "n", "public"] {
            if self.random.one_in(4) {
                patch[field] = record[field].clone();
            }
        }
        let mut data = self.record();
        if self.random.one_in(4) {
            data["id"] = self.key();
        }
        let key = self.key();
        let version = self.random.one_in(4).then(|| 1 + self.random.below(3));
        match self.random.below(16) {
            0..=3 => ("store.insert", json!({"bucket": bucket, "data": data})),
            4 => ("store.insertMany", json!({"bucket": bucket, "data": [data, self.record()]})),
            5 | 6 => {
                patch["id"] = key;
                ("store.upsert", json!({"bucket": bucket, "data": patch}))
            }
            7..=9 => ("store.update", json!({"bucket": bucket, "key": key, "data": patch, "version": version})),
            10 => ("store.delete", json!({"bucket": bucket, "key": key, "version": version})),
            11 if self.random.one_in(4) => ("store.clear", json!({"bucket": bucket})),
            _ => {
                let steps: Vec<Json> = (0..=self.random.below(4)).map(|_| self.step()).collect();
                ("store.transaction", json!({"operations": steps}))
            }
        }
    }

    /// Returns a random step of a transaction.
    fn step(&mut self) -> Json {
        let (bucket, key, filter) = (self.random.pick(&BUCKETS), self.key(), self.filter());
        let version = self.random.one_in(4).then(|| 1 + self.random.below(3));
        let mut step = match self.random.below(7) {
            0 => json!({"op": "get", "key": key}),
            1 => json!({"op": "where", "filter": filter}),
            2 => json!({"op": "findOne", "filter": filter}),
            3 => json!({"op": "count", "filter": filter}),
            4 => {
                let mut data = self.record();
                if self.random.one_in(4) {
                    data["id"] = key;
                }
                json!({"op": "insert", "data": data})
            }
            5 => {
                let mut patch = json!({"mark": self.mark()});
                if self.random.one_in(2) {
                    patch["owner"] = self.policy.record(&mut self.random)["owner"].clone();
                }
                json!({"op": "update", "key": key, "data": patch, "version": version})
            }
            _ => json!({"op": "delete", "key": key, "version": version}),
        };
        step["bucket"] = json!(bucket);
        step
    }

    fn filter(&mut self) -> Json {
        match self.random.below(6) {
            0 => json!({}),
            1 => json!({"owner": format!("user-{}", self.random.below(4))}),
            2 => json!({"n": {"$gte": self.random.below(10)}}),
            3 => json!({"mark": {"$startsWith": "mk"}}),
            4 => json!({"$or": [{"public": true}, {"n": self.random.below(10)}]}),
            _ => json!({"id": self.key()}),
        }
    }

    /// Returns a random query without its bucket.
    fn query(&mut self) -> Json {
        let direction = self.random.pick(&["asc", "desc"]);
        let field = self.random.pick(&["n", "mark", "id"]);
        match self.random.below(6) {
            0 => json!({"filter": self.filter()}),
            1 => json!({"sort": {field: direction}, "limit": 1 + self.random.below(4)}),
            2 => {
                json!({"sort": {field: direction}, "offset": self.random.below(3), "limit": 3, "fields": ["id", "mark"]})
            }
            3 => json!({"aggregate": {"function": "count", "groupBy": self.random.pick(&["mark", "owner", "id"])}}),
            4 => json!({"aggregate": {"function": self.random.pick(&["sum", "min", "max"]), "field": "n"}}),
            _ => json!({"fields": ["mark"], "limit": 5}),
        }
    }

    fn subscribe_params(&mut self, participant: usize, bucket: &str) -> Json {
        let mut params = match self.random.below(6) {
            0 => json!({"query": format!("all-{bucket}")}),
            1 => json!({"query": format!("top-{bucket}")}),
            2 => json!({"query": format!("q{}", self.random.below(3))}),
            3 => return json!({"query": "hosted", "params": {"key": self.key()}}),
            _ => {
                let mut config = self.query();
                config["bucket"] = json!(bucket);
                json!({"config": config})
            }
        };
        match self.random.below(4) {
            0 => {}
            1 => params["pos"] = json!(true),
            _ => params["mode"] = json!("delta"),
        }
        if self.random.one_in(3) && !self.participants[participant].positions.is_empty() {
            params["since"] = self.random.pick(&self.participants[participant].positions);
        }
        params
    }
}

impl Participant {
    fn new(client: Client) -> Self {
        Self {
            client,
            person: None,
            expires_at: None,
            previous: Vec::new(),
            subscriptions: HashSet::new(),
            deltas: HashSet::new(),
            positions: Vec::new(),
            keys: HashSet::new(),
        }
    }
}

/// Returns all words with this prefix, six digits and this suffix.
fn find_words(text: &str, prefix: &str, end: char) -> Vec<String> {
    let starts = text.match_indices(prefix).map(|(start, _)| start);
    let words = starts.filter_map(|start| text.get(start..start + prefix.len() + 7));
    let is_one =
        |word: &&str| word.ends_with(end) && word[prefix.len()..word.len() - 1].bytes().all(|b| b.is_ascii_digit());
    words.filter(is_one).map(str::to_owned).collect()
}

fn number(key: &str) -> usize {
    key[3..9].parse().unwrap()
}
