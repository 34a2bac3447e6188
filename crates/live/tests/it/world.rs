//! Buckets, records, queries and commits to choose from. Values are few, so that they meet.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};
use tidewire_store::{BucketDefinition, Change, Draft, Position, Query, State};

pub(crate) const FIELDS: [&str; 5] = ["a", "b", "c", "n", "id"];

/// A step of a commit.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Insert(u8, Map<String, Json>),
    Update(u8, Map<String, Json>),
    Delete(u8),
    Clear,
    Sweep,
}

/// A state that is changed, commit by commit.
pub(crate) struct World {
    pub(crate) state: State,
    pub(crate) now: u64,
    pub(crate) position: Position,
}

impl World {
    pub(crate) fn new(definition: &Json) -> Self {
        let mut state = State::new();
        state.define("b", BucketDefinition::parse(definition).unwrap()).unwrap();
        Self { state, now: 1000, position: Position { epoch: 7, sequence: 0 } }
    }

    /// One commit of several steps. What is refused is left out.
    pub(crate) fn commit(&mut self, steps: &[Step]) -> Vec<Change> {
        let mut draft = Draft::new(self.state.clone(), self.now);
        for step in steps {
            match step.clone() {
                Step::Insert(id, mut record) => {
                    record.insert("id".to_owned(), json!(id));
                    draft.insert("b", record).unwrap();
                }
                Step::Update(id, patch) => _ = draft.update("b", &json!(id), patch, None),
                Step::Delete(id) => _ = draft.delete("b", &json!(id), None).unwrap(),
                Step::Clear => draft.clear("b").unwrap(),
                Step::Sweep => _ = draft.sweep(3),
            }
        }
        let (state, changes) = draft.finish();
        self.state = state;
        self.position.sequence += 1;
        changes
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

pub(crate) fn scalar() -> impl Strategy<Value = Json> {
    prop_oneof![
        6 => (0..5_u8).prop_map(Json::from),
        3 => prop::sample::select(vec![json!(0.1), json!(0.2), json!(0.7), json!(-1.5), json!(1.0), json!(-0.0), json!(1e300)]),
        3 => "[ab]{0,2}".prop_map(Json::from),
        1 => Just(json!("a long string that is cut")),
        1 => Just(json!("a long string that is cut, b")),
        2 => Just(Json::Null),
        1 => any::<bool>().prop_map(Json::from),
        1 => Just(json!([1])),
        1 => Just(json!({"x": 1, "y": 2})),
        1 => Just(json!({"y": 2, "x": 1})),
    ]
}

fn record() -> impl Strategy<Value = Map<String, Json>> {
    (vec((prop::sample::select(&FIELDS[..4]), scalar()), 0..4), prop::option::weighted(0.1, 0..60_u64)).prop_map(
        |(members, expiry)| {
            let mut record: Map<String, Json> =
                members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            if let Some(expiry) = expiry {
                record.insert("_expiresAt".to_owned(), json!(990 + expiry));
            }
            record
        },
    )
}

/// The steps of a commit, and the time that passes before it.
pub(crate) fn commit() -> impl Strategy<Value = (Vec<Step>, u64)> {
    let step = prop_oneof![
        8 => (0..8_u8, record()).prop_map(|(id, record)| Step::Insert(id, record)),
        8 => (0..8_u8, record()).prop_map(|(id, patch)| Step::Update(id, patch)),
        5 => (0..8_u8).prop_map(Step::Delete),
        1 => Just(Step::Clear),
        4 => Just(Step::Sweep),
    ];
    (vec(step, 0..6), prop_oneof![2 => Just(0), 1 => 0..15_u64])
}

fn filter() -> impl Strategy<Value = Json> {
    let operators = prop_oneof![
        (prop::sample::select(vec!["$eq", "$neq", "$gt", "$gte", "$lt", "$lte"]), scalar())
            .prop_map(|(operator, value)| json!({operator: value})),
        (prop::sample::select(vec!["$in", "$nin"]), vec(scalar(), 0..4))
            .prop_map(|(operator, values)| json!({operator: values})),
        (scalar(), scalar()).prop_map(|(low, high)| json!({"$between": [low, high]})),
        (scalar(), scalar()).prop_map(|(low, high)| json!({"$gte": low, "$lt": high})),
        (prop::sample::select(vec!["$startsWith", "$endsWith", "$contains"]), "[ab]{0,2}")
            .prop_map(|(operator, text)| json!({operator: text})),
        any::<bool>().prop_map(|wanted| json!({"$exists": wanted})),
        scalar(),
    ];
    let leaf = vec((prop::sample::select(&FIELDS[..]), operators), 0..3)
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
        Query::parse(&query, &Map::new()).unwrap()
    })
}
