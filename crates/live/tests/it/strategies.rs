//! Strategies for buckets, records, queries and commits. There are few distinct values, so that records often match.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use tidewire_store::{Change, Draft, Position, Query, State};

const ROWS: u8 = 8;
const FIELDS: [&str; 5] = ["a", "b", "c", "n", "id"];

/// A step of a commit.
#[derive(Debug, Clone)]
pub(crate) enum CommitStep {
    Insert(u8, Map<String, Json>),
    Update(u8, Map<String, Json>),
    Delete(u8),
    Clear,
    Sweep,
}

/// The state of a store, without threads.
pub(crate) struct TestStore {
    pub(crate) state: State,
    pub(crate) now: u64,
    pub(crate) position: Position,
}

impl TestStore {
    pub(crate) fn new(definition: &Json) -> Self {
        let mut draft = Draft::new(State::new(), 1000);
        draft.define_bucket("b", definition).unwrap();
        Self { state: draft.finish().0, now: 1000, position: Position { epoch: 7, sequence: 0 } }
    }

    /// Applies several steps as one commit.
    pub(crate) fn commit(&mut self, steps: &[CommitStep]) -> Vec<Change> {
        let mut draft = Draft::new(self.state.clone(), self.now);
        apply_steps(&mut draft, steps);
        let (state, changes) = draft.finish();
        self.state = state;
        self.position.sequence += 1;
        changes
    }
}

/// Applies steps to a draft. Rejected steps are skipped.
pub(crate) fn apply_steps(draft: &mut Draft, steps: &[CommitStep]) {
    for step in steps {
        match step.clone() {
            CommitStep::Insert(id, mut record) => {
                record.insert("id".to_owned(), json!(id));
                draft.insert("b", record).unwrap();
            }
            CommitStep::Update(id, patch) => _ = draft.update("b", &json!(id), patch, None),
            CommitStep::Delete(id) => _ = draft.delete("b", &json!(id), None).unwrap(),
            CommitStep::Clear => draft.clear("b").unwrap(),
            CommitStep::Sweep => _ = draft.sweep(3),
        }
    }
}

pub(crate) fn definition() -> impl Strategy<Value = Json> {
    let limits = prop_oneof![3 => Just(json!({})), 2 => Just(json!({"ttl": 20})), 1 => Just(json!({"maxSize": 5}))];
    limits.prop_map(|mut definition| {
        definition["key"] = json!("id");
        definition["schema"] = json!({"id": {"type": "number"}});
        definition
    })
}

/// Values of a field. Each field has one type, except `c`, which has any.
fn value(field: &'static str) -> BoxedStrategy<Json> {
    let integer = || (0..3_u8).prop_map(Json::from);
    let number =
        || prop::sample::select(vec![json!(0.1), json!(0.2), json!(0.7), json!(1.0), json!(-0.0), json!(1e300)]);
    let text = || "[ab]{0,2}".prop_map(Json::from);
    let long = || prop::sample::select(vec![json!("a long string that is cut"), json!("a long string that is cut, b")]);
    let object = || prop::sample::select(vec![json!([1]), json!({"x": 1, "y": 2}), json!({"y": 2, "x": 1})]);
    let nothing = || Just(Json::Null);
    match field {
        "id" => (0..ROWS).prop_map(Json::from).boxed(),
        "a" => prop_oneof![9 => integer(), 1 => nothing()].boxed(),
        "b" => prop_oneof![5 => text(), 4 => long(), 1 => nothing()].boxed(),
        "n" => prop_oneof![4 => integer(), 5 => number(), 1 => nothing()].boxed(),
        _ => prop_oneof![3 => integer(), 1 => text(), 2 => any::<bool>().prop_map(Json::from), 3 => object(), 2 => nothing()]
            .boxed(),
    }
}

fn member(fields: &'static [&'static str]) -> impl Strategy<Value = (&'static str, Json)> {
    prop::sample::select(fields).prop_flat_map(|field| (Just(field), value(field)))
}

fn record(members: std::ops::Range<usize>) -> impl Strategy<Value = Map<String, Json>> {
    (vec(member(&FIELDS[..4]), members), prop::option::weighted(0.1, 0..60_u64)).prop_map(|(members, expiry)| {
        let mut record: Map<String, Json> = members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        if let Some(expiry) = expiry {
            record.insert("_expiresAt".to_owned(), json!(990 + expiry));
        }
        record
    })
}

/// The commit with the initial records.
pub(crate) fn initial_records() -> impl Strategy<Value = Vec<CommitStep>> {
    vec((0..ROWS, record(2..5)).prop_map(|(id, record)| CommitStep::Insert(id, record)), 0..12)
}

/// The steps of a commit, and the milliseconds since the last one.
pub(crate) fn commit() -> impl Strategy<Value = (Vec<CommitStep>, u64)> {
    let step = prop_oneof![
        5 => (0..ROWS, record(0..5)).prop_map(|(id, record)| CommitStep::Insert(id, record)),
        9 => (0..ROWS, record(1..3)).prop_map(|(id, patch)| CommitStep::Update(id, patch)),
        4 => (0..ROWS).prop_map(CommitStep::Delete),
        2 => Just(CommitStep::Sweep),
    ];
    let steps = prop_oneof![3 => vec(step.clone(), 1..2), 3 => vec(step, 2..7), 1 => Just(vec![CommitStep::Clear])];
    (steps, prop_oneof![2 => Just(0), 1 => 0..15_u64])
}

fn filter() -> impl Strategy<Value = Json> {
    let test = |field: &'static str| {
        let value = || value(field);
        prop_oneof![
            4 => value(),
            4 => (prop::sample::select(vec!["$eq", "$neq", "$gt", "$gte", "$lt", "$lte"]), value())
                .prop_map(|(operator, value)| json!({operator: value})),
            2 => (prop::sample::select(vec!["$in", "$nin"]), vec(value(), 0..4))
                .prop_map(|(operator, values)| json!({operator: values})),
            2 => (value(), value()).prop_map(|(low, high)| json!({"$between": [low, high]})),
            2 => (value(), value()).prop_map(|(low, high)| json!({"$gte": low, "$lt": high})),
            1 => (prop::sample::select(vec!["$startsWith", "$endsWith", "$contains"]), "[ab]{0,2}")
                .prop_map(|(operator, text)| json!({operator: text})),
            1 => any::<bool>().prop_map(|wanted| json!({"$exists": wanted})),
        ]
    };
    let tests = prop::sample::select(&FIELDS[..]).prop_flat_map(move |field| (Just(field), test(field)));
    let leaf = vec(tests, 0..3)
        .prop_map(|tests| Json::Object(tests.into_iter().map(|(name, test)| (name.to_owned(), test)).collect()));
    leaf.prop_recursive(2, 6, 3, |inner| {
        (prop::sample::select(vec!["$or", "$and"]), vec(inner.clone(), 0..3), inner).prop_map(
            |(operator, filters, mut rest)| {
                rest[operator] = json!(filters);
                rest
            },
        )
    })
}

pub(crate) fn query() -> impl Strategy<Value = Query> {
    let name = || prop::sample::select(&FIELDS[..]);
    let sort = vec((name(), prop::sample::select(vec!["asc", "desc"])), 0..3);
    let sort = sort.prop_map(|fields| {
        Json::Object(fields.into_iter().map(|(name, direction)| (name.to_owned(), json!(direction))).collect())
    });
    let fields = prop::option::weighted(0.4, vec(name(), 0..3));
    let records = (sort, prop_oneof![2 => Just(0), 1 => 0..4_usize], prop::option::of(0..5_usize), fields).prop_map(
        |(sort, offset, limit, fields)| json!({"sort": sort, "offset": offset, "limit": limit, "fields": fields}),
    );
    let function = prop::sample::select(vec!["count", "sum", "avg", "min", "max"]);
    let aggregate = (function, name(), any::<bool>(), prop_oneof![vec(name(), 0..1), vec(name(), 0..3)]).prop_map(
        |(function, field, is_of_rows, group_by)| {
            let field = if function == "count" && is_of_rows { Json::Null } else { json!(field) };
            json!({"aggregate": {"function": function, "field": field, "groupBy": group_by}})
        },
    );
    let any_filter = prop_oneof![1 => Just(json!({})), 4 => filter()];
    (prop_oneof![2 => records.boxed(), 1 => aggregate.boxed()], any_filter).prop_map(|(mut query, filter)| {
        query["bucket"] = json!("b");
        query["filter"] = filter;
        Query::parse(&query).unwrap()
    })
}
