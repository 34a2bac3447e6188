//! Random requests of several clients at once, and what comes of them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use tidewire::{ProgrammaticQuery, RequestError, View};
use tidewire_store::Answer;

use super::laws::{BEAT, BUCKETS, Laws, May};
use super::random::Random;
use crate::client::{Client, options};
use crate::house::{House, object};

const CLIENTS: usize = 4;
const ROUNDS: usize = 60;
/// How long a user who is revoked is out.
const OUT: u64 = 3000;

/// One case.
pub(super) async fn run(seed: u64) {
    println!("seed {seed}");
    let mut world = World::new(seed).await;
    for round in 0..ROUNDS {
        world.round().await;
        match round % 10 {
            3 => {
                world.settle().await;
                world.compare().await;
            }
            6 => {
                world.settle().await;
                world.pass_time().await;
            }
            9 => {
                world.settle().await;
                world.revoke().await;
            }
            _ => {}
        }
    }
    assert!(world.seen > 100, "too little was seen to mean anything: {}", world.seen);
}

struct World {
    seed: u64,
    random: Random,
    laws: Laws,
    house: House,
    guests: Vec<Guest>,
    /// Every version of every record, by its mark: where it was, and what.
    versions: HashMap<String, (String, Json)>,
    /// The marks of the versions that a key has had.
    of_key: HashMap<String, Vec<String>>,
    count: usize,
    beats: u64,
    /// The time since the beginning.
    now: u64,
    /// Writes that may be sent again.
    repeatable: Vec<(&'static str, Json)>,
    /// How many marks were seen.
    seen: usize,
}

/// A client, and what is known of it.
struct Guest {
    client: Client,
    who: Option<usize>,
    expires_at: Option<u64>,
    /// Who it was since all was last settled: deltas that were on their way come late.
    was: Vec<Option<usize>>,
    /// Its subscriptions.
    follows: HashSet<String>,
    /// Those that are or were told in deltas: some may come when they have ended.
    deltas: HashSet<String>,
    positions: Vec<Json>,
    /// Keys that it has sent or was shown.
    keys: HashSet<String>,
}

/// A request that was sent.
struct Sent {
    id: u64,
    operation: &'static str,
    params: Json,
}

/// Something that a client was told.
struct Heard {
    guest: usize,
    message: Json,
    /// By what it was told: a reply to this, or else a push.
    sent: Option<(&'static str, Json)>,
    /// Who it may have been for.
    eyes: Vec<Option<usize>>,
}

/// All records of the first bucket, and one.
#[derive(Debug)]
struct Hosted;

impl ProgrammaticQuery for Hosted {
    fn buckets(&self) -> Vec<String> {
        vec![BUCKETS[0].to_owned()]
    }

    fn answer(&self, view: &View<'_>, params: &Map<String, Json>) -> Result<Json, RequestError> {
        let one = view.get(BUCKETS[0], params.get("key").unwrap_or(&Json::Null))?;
        records(view, BUCKETS[0]).map(|all| json!([one, all]))
    }
}

#[derive(Debug)]
struct HostedBeat;

impl ProgrammaticQuery for HostedBeat {
    fn buckets(&self) -> Vec<String> {
        vec![BEAT.to_owned()]
    }

    fn answer(&self, view: &View<'_>, _: &Map<String, Json>) -> Result<Json, RequestError> {
        records(view, BEAT)
    }
}

fn records(view: &View<'_>, bucket: &str) -> Result<Json, RequestError> {
    match view.query(&json!({"bucket": bucket}))? {
        Answer::Records(records) => Ok(records.into()),
        Answer::Value(other) => panic!("records were expected, not {other:?}"),
    }
}

impl World {
    async fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let laws = Laws::random(&mut random);
        let options = options()
            .auth(laws.auth())
            .query("hosted", Hosted)
            .query("hosted-beat", HostedBeat)
            .revocation_ttl(Duration::from_millis(OUT));
        let house = House::open_with(options).await;
        let mut guests = Vec::new();
        for _ in 0..CLIENTS {
            guests.push(Guest::new(house.stranger().await));
        }
        let mut world = Self {
            seed,
            random,
            laws,
            house,
            guests,
            versions: HashMap::new(),
            of_key: HashMap::new(),
            count: 0,
            beats: 0,
            now: 0,
            repeatable: Vec::new(),
            seen: 0,
        };
        world.furnish().await;
        world
    }

    async fn furnish(&mut self) {
        self.house.bucket(BEAT, []).await;
        for (place, bucket) in BUCKETS.into_iter().enumerate() {
            let config = json!({"key": "id", "schema": {
                "id": {"type": "string", "generated": "uuid"},
                "n": {"type": "number"},
                "name": {"type": "string", "unique": place == 1},
            }, "indexes": ["n"], "etsType": if place == 2 { "ordered_set" } else { "set" }});
            let mut rows = Vec::new();
            for _ in 0..12 {
                let mut record = self.record();
                record["name"] = Json::Null;
                rows.push(object(record));
            }
            let written = self.house.write(move |draft| {
                draft.define_bucket(bucket, &config)?;
                draft.insert_many(bucket, rows)
            });
            for row in written.await {
                self.register(bucket, &Json::Object(row.to_record()));
            }
            self.house.query(&format!("all-{bucket}"), json!({"bucket": bucket})).await;
            let top =
                json!({"bucket": bucket, "sort": {"n": "desc", "mark": "asc"}, "limit": 3, "fields": ["id", "mark"]});
            self.house.query(&format!("top-{bucket}"), top).await;
        }
    }

    /// A record with a mark and a key that no other has.
    fn record(&mut self) -> Json {
        let mut record = self.laws.record(&mut self.random);
        record["mark"] = json!(self.mark());
        self.count += 1;
        record["id"] = json!(format!("key{:06}y", self.count));
        record
    }

    fn mark(&mut self) -> String {
        self.count += 1;
        format!("mk{:06}x", self.count)
    }

    /// A key of a record that there is or was.
    fn key(&mut self) -> Json {
        let count = self.random.below(self.count + 1);
        let keys: Vec<&String> = self.of_key.keys().collect();
        let nearest = keys.iter().min_by_key(|key| (number(key).abs_diff(count), (**key).clone()));
        json!(nearest.expect("there are some"))
    }

    fn register(&mut self, bucket: &str, record: &Json) {
        let (Some(mark), Some(key)) = (record["mark"].as_str(), record["id"].as_str()) else { return };
        self.of_key.entry(key.to_owned()).or_default().push(mark.to_owned());
        self.versions.insert(mark.to_owned(), (bucket.to_owned(), record.clone()));
    }

    /// All send something, and are answered.
    async fn round(&mut self) {
        let mut sent: Vec<Vec<Sent>> = Vec::new();
        for guest in 0..self.guests.len() {
            let mut own = Vec::new();
            for _ in 0..=self.random.below(3) {
                let (operation, params) = self.request(guest);
                own.push(self.send(guest, operation, params).await);
            }
            sent.push(own);
        }
        let mut heard = Vec::new();
        for (guest, sent) in sent.into_iter().enumerate() {
            self.hear(guest, sent, &mut heard).await;
        }
        self.judge(heard);
    }

    async fn send(&mut self, guest: usize, operation: &'static str, params: Json) -> Sent {
        let guest = &mut self.guests[guest];
        guest.keys.extend(found(&params.to_string(), "key", 'y'));
        let id = guest.client.send(operation, params.clone()).await;
        Sent { id, operation, params }
    }

    /// Takes in the replies to all that was sent, and what was pushed before them.
    async fn hear(&mut self, place: usize, sent: Vec<Sent>, heard: &mut Vec<Heard>) {
        for Sent { id, operation, params } in sent {
            let reply = self.guests[place].client.reply(id).await;
            let before = self.guests[place].who;
            let login = match operation {
                "auth.login" if reply["type"] == "result" => Some(self.person(&params)),
                "auth.login" if reply["code"] == "SESSION_REVOKED" => Some(None),
                "auth.logout" => Some(None),
                _ => None,
            };
            // What comes before the reply to a login may be for whoever was there before, or for who is there now.
            self.take_pushes(place, &[before, login.unwrap_or(before)], heard);
            let guest = &mut self.guests[place];
            if let Some(who) = login {
                guest.was.push(guest.who);
                guest.who = who;
                guest.expires_at = reply["data"]["expiresAt"].as_u64();
            }
            let data = &reply["data"];
            if operation == "store.subscribe" && reply["type"] == "result" {
                let is_delta = params.get("mode").is_some_and(|mode| mode == "delta");
                let id = data["subscriptionId"].as_str().unwrap().to_owned();
                guest.deltas.extend(is_delta.then(|| id.clone()));
                guest.follows.insert(id);
                guest.positions.extend(data.get("pos").cloned());
            }
            if operation == "store.unsubscribe" && reply["type"] == "result" {
                guest.follows.remove(params["subscriptionId"].as_str().unwrap());
            }
            self.learn(operation, &params, data);
            heard.push(Heard { guest: place, message: reply, sent: Some((operation, params)), eyes: vec![before] });
        }
    }

    fn take_pushes(&mut self, place: usize, eyes: &[Option<usize>], heard: &mut Vec<Heard>) {
        let guest = &mut self.guests[place];
        for message in guest.client.take_pushes() {
            let is_delta = message["subscriptionId"].as_str().is_some_and(|id| guest.deltas.contains(id));
            let late = guest.was.iter().copied().filter(|_| is_delta);
            let eyes = eyes.iter().copied().chain(late).collect();
            guest.positions.extend(message.get("pos").cloned());
            heard.push(Heard { guest: place, message, sent: None, eyes });
        }
    }

    fn person(&self, params: &Json) -> Option<usize> {
        self.laws.people.iter().position(|person| params["token"] == *person.token)
    }

    /// What a write has made.
    fn learn(&mut self, operation: &str, params: &Json, data: &Json) {
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

    /// Nothing was told that may not be known.
    fn judge(&mut self, heard: Vec<Heard>) {
        for Heard { guest, message, sent, eyes } in heard {
            let text = message.to_string();
            let operation = sent.as_ref().map_or("store.subscribe", |(operation, _)| operation);
            let what = || format!("seed {}: client {guest} as {eyes:?}: {sent:?}\n{text}", self.seed);
            if let Some((operation, params)) = &sent {
                self.judge_code(operation, params, &message, eyes[0], &what);
                if *operation == "store.transaction" {
                    self.judge_steps(params, &message, eyes[0], &what);
                }
            }
            let is_error = message["type"] == "error";
            let own = sent.as_ref().map(|(_, params)| params.to_string()).unwrap_or_default();
            let mut shown = Vec::new();
            for mark in found(&text, "mk", 'x') {
                if is_error && own.contains(&mark) {
                    continue;
                }
                let (bucket, record) =
                    self.versions.get(&mark).unwrap_or_else(|| panic!("{mark} was never written: {}", what()));
                let may_see = |who: &Option<usize>| self.laws.may_see(*who, operation, bucket, record);
                assert!(eyes.iter().any(may_see), "{mark} is not for them: {record} in {bucket}: {}", what());
                shown.push(record["id"].as_str().unwrap().to_owned());
            }
            // The definitions of queries are no records, whatever keys are written in them.
            let keys = if operation == "store.listQueries" { Vec::new() } else { found(&text, "key", 'y') };
            for key in keys {
                let marks = self.of_key.get(&key).into_iter().flatten();
                let mut versions = marks.filter_map(|mark| self.versions.get(mark));
                let is_known = self.guests[guest].keys.contains(&key)
                    || versions.any(|(bucket, record)| {
                        eyes.iter().any(|who| self.laws.may_see(*who, operation, bucket, record))
                    });
                assert!(is_known, "{key} is not for them: {}", what());
                shown.push(key);
            }
            self.seen += shown.len();
            self.guests[guest].keys.extend(shown);
        }
    }

    /// Each step of a transaction is bound like the operation that does the same.
    fn judge_steps(&self, params: &Json, reply: &Json, who: Option<usize>, what: &impl Fn() -> String) {
        let steps = params["operations"].as_array().into_iter().flatten();
        for (place, step) in steps.enumerate() {
            let operation = format!("store.{}", step["op"].as_str().unwrap());
            let bucket = step["bucket"].as_str().unwrap();
            for needed in [&*operation, "store.transaction"] {
                if matches!(self.laws.may(who, needed, Some(bucket)), May::Nothing) {
                    let code = reply["code"].as_str().unwrap_or_default();
                    assert!(["FORBIDDEN", "UNAUTHORIZED"].contains(&code), "{needed} on {bucket}: {}", what());
                }
            }
            for mark in found(&reply["data"]["results"][place]["data"].to_string(), "mk", 'x') {
                let (bucket, record) = &self.versions[&mark];
                let may_see = self.laws.may_see_in_step(who, &operation, bucket, record);
                assert!(may_see, "{mark} is not for step {place}: {record} in {bucket}: {}", what());
            }
        }
    }

    /// Whether something is forbidden is as the laws say, where it can be told from the request alone.
    fn judge_code(&self, operation: &str, params: &Json, reply: &Json, who: Option<usize>, what: &impl Fn() -> String) {
        let is_read = [
            "get", "all", "where", "findOne", "count", "first", "last", "paginate", "sum", "avg", "min", "max", "query",
        ];
        let name = operation.strip_prefix("store.").unwrap_or_default();
        let Some(bucket) = params["bucket"].as_str() else { return };
        // What is wrong with a request is told to whoever may make it of some bucket.
        if reply["code"] == "VALIDATION_ERROR" && params["filter"]["mark"].get("$regex").is_some() {
            return;
        }
        // Who does not have to be anybody may be nobody, since a session that is over is told so once.
        if self.guests.iter().any(|guest| guest.who.is_none()) && reply["message"] == "Session expired" {
            return;
        }
        let may = self.laws.may(who, operation, Some(bucket));
        if matches!(may, May::Nothing) {
            assert_eq!(reply["type"], "error", "{}", what());
            let code = reply["code"].as_str().unwrap();
            assert!(["FORBIDDEN", "UNAUTHORIZED"].contains(&code), "{}", what());
        } else if is_read.contains(&name) {
            assert_ne!(reply["code"], "FORBIDDEN", "{}", what());
        }
    }

    /// Waits until all that was pushed has come.
    async fn settle(&mut self) {
        let mut heard = Vec::new();
        for guest in 0..self.guests.len() {
            if !self.can_follow(guest) {
                continue;
            }
            let mut sent = Vec::new();
            for params in [
                json!({"config": {"bucket": BEAT}}),
                json!({"config": {"bucket": BEAT}, "mode": "delta"}),
                json!({"query": "hosted-beat"}),
            ] {
                sent.push(self.send(guest, "store.subscribe", params).await);
            }
            self.hear(guest, sent, &mut heard).await;
        }
        // What is told together with the first comes before the second.
        for _ in 0..2 {
            self.beats += 1;
            let beat = format!("beat-{}-", self.beats);
            let record = object(json!({"id": beat}));
            self.house.write(move |draft| draft.insert(BEAT, record)).await;
            for place in 0..self.guests.len() {
                let mut left = if self.can_follow(place) { 3 } else { 0 };
                while left > 0 {
                    let push = self.guests[place].client.push().await;
                    left -= usize::from(push.to_string().contains(&beat));
                    self.guests[place].client.keep_push(push);
                    let eyes = [self.guests[place].who];
                    self.take_pushes(place, &eyes, &mut heard);
                }
            }
        }
        self.judge(heard);
        for place in 0..self.guests.len() {
            // Whoever follows nothing has not been waited for.
            if self.can_follow(place) {
                self.guests[place].was.clear();
                self.tidy(place).await;
            }
        }
    }

    fn can_follow(&self, place: usize) -> bool {
        self.guests[place].who.is_some() || !self.laws.is_required
    }

    /// Ends all but a few subscriptions.
    async fn tidy(&mut self, place: usize) {
        let mut ids: Vec<String> = self.guests[place].follows.iter().cloned().collect();
        ids.sort_by_key(|id| id["sub-".len()..].parse::<u64>().unwrap());
        let mut sent = Vec::new();
        for (order, id) in ids.into_iter().rev().enumerate() {
            // The last three are those of the beat.
            if !(3..=10).contains(&order) {
                sent.push(self.send(place, "store.unsubscribe", json!({"subscriptionId": id})).await);
                self.guests[place].follows.remove(&id);
            }
        }
        let mut heard = Vec::new();
        self.hear(place, sent, &mut heard).await;
        self.judge(heard);
    }

    /// While nobody writes, everybody sees exactly what is theirs.
    async fn compare(&mut self) {
        for place in 0..self.guests.len() {
            let who = self.guests[place].who;
            for bucket in BUCKETS {
                let snapshot = self.house.store.snapshot();
                let all: Vec<Json> =
                    snapshot.state.bucket(bucket).unwrap().rows().map(|row| Json::Object(row.to_record())).collect();
                let own = |operation: &str| -> Vec<&Json> {
                    all.iter().filter(|record| self.laws.may_see(who, operation, bucket, record)).collect()
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
                    if matches!(self.laws.may(who, operation, Some(bucket)), May::Nothing) {
                        continue;
                    }
                    let mut params = params;
                    params["bucket"] = json!(bucket);
                    let data = self.guests[place].client.ask(operation, params).await;
                    let is_same = match (data.as_f64(), expected.as_f64()) {
                        (Some(data), Some(expected)) => (data - expected).abs() < 0.001,
                        _ => data == expected,
                    };
                    assert!(is_same, "seed {}: {who:?} {operation} {bucket}: {data} not {expected}", self.seed);
                }
            }
        }
    }

    /// Some sessions are over after that, and hear nothing of what happens then, though they ask for nothing.
    async fn pass_time(&mut self) {
        self.house.advance(2000);
        self.now += 2000;
        let now = crate::house::NOON + self.now;
        let mut expired = Vec::new();
        for (place, guest) in self.guests.iter_mut().enumerate() {
            if guest.expires_at.is_some_and(|expires_at| expires_at <= now) {
                (guest.who, guest.expires_at) = (None, None);
                expired.push(place);
            }
        }
        if !self.laws.is_required {
            // They go on as nobody, when they have been told.
            for place in expired {
                assert_eq!(self.guests[place].client.fail("store.buckets", json!({})).await.0, "UNAUTHORIZED");
            }
            return;
        }
        for bucket in BUCKETS {
            let mut record = self.record();
            record["name"] = Json::Null;
            let row = self.house.write(move |draft| draft.insert(bucket, object(record))).await;
            self.register(bucket, &Json::Object(row.to_record()));
        }
        self.settle().await;
        let mut heard = Vec::new();
        for place in expired {
            let sent = self.send(place, "auth.whoami", json!({})).await;
            self.hear(place, vec![sent], &mut heard).await;
        }
        self.judge(heard);
    }

    /// Somebody is out, on all their connections.
    async fn revoke(&mut self) {
        let user = format!("user-{}", self.random.below(4));
        let is_theirs = |guest: &Guest| guest.who.is_some_and(|who| self.laws.people[who].user == user);
        let theirs: Vec<bool> = self.guests.iter().map(is_theirs).collect();
        self.house.server.revoke_user(&user);
        for (place, is_theirs) in theirs.into_iter().enumerate() {
            if is_theirs {
                assert_eq!(self.guests[place].client.closed().await.0, 4002);
                self.guests[place] = Guest::new(self.house.stranger().await);
            }
        }
    }

    /// What somebody asks for next.
    fn request(&mut self, guest: usize) -> (&'static str, Json) {
        let is_stranger = self.guests[guest].who.is_none();
        if self.random.one_in(if is_stranger && self.laws.is_required { 2 } else { 14 }) {
            return self.account();
        }
        if self.random.one_in(10) && !self.repeatable.is_empty() {
            let place = self.random.below(self.repeatable.len());
            return self.repeatable[place].clone();
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
            16..=20 => ("store.subscribe", self.follow(guest, bucket)),
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
            1 => ("auth.login", json!({"token": "nobody"})),
            _ => {
                let place = self.random.below(self.laws.people.len());
                ("auth.login", json!({"token": self.laws.people[place].token}))
            }
        }
    }

    fn write(&mut self, bucket: &'static str) -> (&'static str, Json) {
        let mut patch = json!({"mark": self.mark()});
        let record = self.laws.record(&mut self.random);
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

    /// A step of a transaction, of any kind.
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
                    patch["owner"] = self.laws.record(&mut self.random)["owner"].clone();
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

    /// The fields of a query, but for its bucket.
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

    fn follow(&mut self, guest: usize, bucket: &str) -> Json {
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
        if self.random.one_in(3) && !self.guests[guest].positions.is_empty() {
            params["since"] = self.random.pick(&self.guests[guest].positions);
        }
        params
    }
}

impl Guest {
    fn new(client: Client) -> Self {
        Self {
            client,
            who: None,
            expires_at: None,
            was: Vec::new(),
            follows: HashSet::new(),
            deltas: HashSet::new(),
            positions: Vec::new(),
            keys: HashSet::new(),
        }
    }
}

/// All that has this prefix, six digits and this end.
fn found(text: &str, prefix: &str, end: char) -> Vec<String> {
    let starts = text.match_indices(prefix).map(|(start, _)| start);
    let words = starts.filter_map(|start| text.get(start..start + prefix.len() + 7));
    let is_one =
        |word: &&str| word.ends_with(end) && word[prefix.len()..word.len() - 1].bytes().all(|b| b.is_ascii_digit());
    words.filter(is_one).map(str::to_owned).collect()
}

fn number(key: &str) -> usize {
    key[3..9].parse().unwrap()
}
