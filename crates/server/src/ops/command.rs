//! Commands: what a request asks for, with parameters that are as they have to be. One type from here to whoever does it.

use std::borrow::Cow;
use std::fmt::Display;

use serde_json::{Map, Value as Json, json};
use tidewire_live::Mode;
use tidewire_store::{Filter, Operation as Step, Parameters, Query};

use crate::ops::table::Operation;
use crate::protocol::request::Params;
use crate::{Code, RequestError};

/// What a request asks for.
#[derive(Debug)]
pub(crate) enum Command<'a> {
    Read(Read<'a>),
    Write(Box<Write>),
    Subscribe(Box<Subscribe>),
    Unsubscribe {
        subscription: String,
    },
    Login {
        token: String,
    },
    Logout,
    Whoami,
    ServerStats,
    ServerConnections,
    /// What this server has no part for.
    Rules {
        topic: Cow<'a, str>,
    },
}

/// What looks at the store and is answered at once.
#[derive(Debug)]
pub(crate) enum Read<'a> {
    Get {
        bucket: Cow<'a, str>,
        key: Json,
    },
    /// The records that a filter means, or the first of them.
    Find {
        bucket: Cow<'a, str>,
        filter: Filter,
        is_one: bool,
    },
    Count {
        bucket: Cow<'a, str>,
        filter: Filter,
    },
    /// From the beginning or the end.
    Some {
        bucket: Cow<'a, str>,
        count: usize,
        is_last: bool,
    },
    Page {
        bucket: Cow<'a, str>,
        limit: usize,
        after: Option<Json>,
    },
    /// What is computed of a field; null if that is nothing.
    Aggregate(Box<Query>),
    Query(Box<Query>),
    Buckets,
    Stats,
    Schema {
        name: Cow<'a, str>,
    },
    Queries,
}

/// What changes the store.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) change: Change,
    /// By what it is known if it is sent again.
    pub(crate) once: Option<Once>,
}

/// A write that may be sent again.
#[derive(Debug)]
pub(crate) struct Once {
    pub(crate) key: String,
    /// What tells it from other requests.
    pub(crate) request: String,
}

/// A change of the store.
#[derive(Debug)]
pub(crate) enum Change {
    Insert { bucket: String, data: Map<String, Json> },
    InsertMany { bucket: String, data: Vec<Map<String, Json>> },
    Upsert { bucket: String, data: Map<String, Json> },
    Update { bucket: String, key: Json, data: Map<String, Json>, version: Option<u64> },
    Delete { bucket: String, key: Json, version: Option<u64> },
    Clear { bucket: String },
    Transaction(Vec<Step>),
    DefineBucket { name: String, config: Json },
    DropBucket { name: String },
    UpdateBucket { name: String, updates: Json },
    DefineQuery { name: String, config: Json },
    UndefineQuery { name: String },
}

/// A wish to follow a query.
#[derive(Debug)]
pub(crate) struct Subscribe {
    pub(crate) query: Followed,
    pub(crate) mode: Mode,
    /// Where an earlier subscription was, as it was told.
    pub(crate) since: Option<String>,
    /// Whether it wants to know where it is, and when and why it ends.
    pub(crate) is_told: bool,
}

/// The query to follow.
#[derive(Debug)]
pub(crate) enum Followed {
    Named { name: String, params: Map<String, Json> },
    Inline(Box<Query>),
}

impl<'a> Command<'a> {
    pub(crate) fn parse(operation: Operation, params: &Params<'a>) -> Result<Self, RequestError> {
        let bucket = || params.text("bucket");
        let find = |filter, is_one| Ok(Self::Read(Read::Find { bucket: bucket()?, filter, is_one }));
        let some = |is_last| Ok(Self::Read(Read::Some { bucket: bucket()?, count: params.count("n")?, is_last }));
        let aggregate = |function| aggregate(params, function).map(Box::new).map(Read::Aggregate).map(Self::Read);
        match operation {
            Operation::StoreGet => Ok(Self::Read(Read::Get { bucket: bucket()?, key: params.value("key")? })),
            Operation::StoreAll => find(Filter::everything(), false),
            Operation::StoreWhere => find(filter(params)?, false),
            Operation::StoreFindOne => find(filter(params)?, true),
            Operation::StoreCount => {
                Ok(Self::Read(Read::Count { bucket: bucket()?, filter: optional_filter(params)? }))
            }
            Operation::StoreFirst => some(false),
            Operation::StoreLast => some(true),
            Operation::StorePaginate => {
                // A null is a cursor that is nowhere, not none at all.
                let after = params.raw("after").map(|_| params.value("after").unwrap_or_default());
                Ok(Self::Read(Read::Page { bucket: bucket()?, limit: params.count("limit")?, after }))
            }
            Operation::StoreSum => aggregate("sum"),
            Operation::StoreAvg => aggregate("avg"),
            Operation::StoreMin => aggregate("min"),
            Operation::StoreMax => aggregate("max"),
            Operation::StoreBuckets => Ok(Self::Read(Read::Buckets)),
            Operation::StoreStats => Ok(Self::Read(Read::Stats)),
            Operation::StoreGetBucketSchema => Ok(Self::Read(Read::Schema { name: params.text("name")? })),
            Operation::StoreListQueries => Ok(Self::Read(Read::Queries)),
            Operation::StoreQuery => Ok(Self::Read(Read::Query(Box::new(inline_query(params)?)))),
            Operation::StoreSubscribe => Subscribe::parse(params).map(Box::new).map(Self::Subscribe),
            Operation::StoreUnsubscribe => {
                Ok(Self::Unsubscribe { subscription: params.text("subscriptionId")?.into_owned() })
            }
            Operation::StoreInsert
            | Operation::StoreInsertMany
            | Operation::StoreUpsert
            | Operation::StoreUpdate
            | Operation::StoreDelete
            | Operation::StoreClear
            | Operation::StoreTransaction
            | Operation::StoreDefineBucket
            | Operation::StoreDropBucket
            | Operation::StoreUpdateBucket
            | Operation::StoreDefineQuery
            | Operation::StoreUndefineQuery => Write::parse(operation, params).map(Box::new).map(Self::Write),
            Operation::AuthLogin => Ok(Self::Login { token: params.text("token")?.into_owned() }),
            Operation::AuthLogout => Ok(Self::Logout),
            Operation::AuthWhoami => Ok(Self::Whoami),
            Operation::ServerStats => Ok(Self::ServerStats),
            Operation::ServerConnections => Ok(Self::ServerConnections),
            _ => {
                // What it is about is asked for by permissions also where nothing can be done with it.
                let topic = ["topic", "key", "pattern"].iter().find_map(|name| params.text(name).ok());
                Ok(Self::Rules { topic: topic.unwrap_or(Cow::Borrowed("*")) })
            }
        }
    }
}

impl Operation {
    /// Whether it changes the store, so that it may wait for the disk together with others of its connection.
    pub(crate) const fn is_write(self) -> bool {
        matches!(
            self,
            Self::StoreInsert
                | Self::StoreInsertMany
                | Self::StoreUpsert
                | Self::StoreUpdate
                | Self::StoreDelete
                | Self::StoreClear
                | Self::StoreTransaction
                | Self::StoreDefineBucket
                | Self::StoreDropBucket
                | Self::StoreUpdateBucket
                | Self::StoreDefineQuery
                | Self::StoreUndefineQuery
        )
    }
}

impl Read<'_> {
    /// The bucket that it looks at, if it is one.
    pub(crate) fn bucket(&self) -> Option<&str> {
        match self {
            Self::Get { bucket, .. }
            | Self::Find { bucket, .. }
            | Self::Count { bucket, .. }
            | Self::Some { bucket, .. }
            | Self::Page { bucket, .. } => Some(bucket),
            Self::Schema { name } => Some(name),
            Self::Aggregate(query) | Self::Query(query) => Some(&query.bucket),
            Self::Buckets | Self::Stats | Self::Queries => None,
        }
    }
}

impl Write {
    fn parse(operation: Operation, params: &Params<'_>) -> Result<Self, RequestError> {
        let bucket = || params.text("bucket").map(Cow::into_owned);
        let name = || params.text("name").map(Cow::into_owned);
        let config = || params.object("config").map(Json::Object);
        let change = match operation {
            Operation::StoreInsert => Change::Insert { bucket: bucket()?, data: params.object("data")? },
            Operation::StoreInsertMany => Change::InsertMany { bucket: bucket()?, data: records(params)? },
            Operation::StoreUpsert => Change::Upsert { bucket: bucket()?, data: params.object("data")? },
            Operation::StoreUpdate => Change::Update {
                bucket: bucket()?,
                key: params.value("key")?,
                data: params.object("data")?,
                version: params.version("version")?,
            },
            Operation::StoreDelete => {
                Change::Delete { bucket: bucket()?, key: params.value("key")?, version: params.version("version")? }
            }
            Operation::StoreClear => Change::Clear { bucket: bucket()? },
            Operation::StoreTransaction => Change::Transaction(steps(params)?),
            Operation::StoreDefineBucket => Change::DefineBucket { name: name()?, config: config()? },
            Operation::StoreDropBucket => Change::DropBucket { name: name()? },
            Operation::StoreUpdateBucket => {
                Change::UpdateBucket { name: name()?, updates: params.object("updates").map(Json::Object)? }
            }
            Operation::StoreDefineQuery => Change::DefineQuery { name: name()?, config: config()? },
            _ => Change::UndefineQuery { name: name()? },
        };
        let once = params.optional_text("idempotencyKey")?.map(|key| {
            let request = ["bucket", "name", "key", "data", "version", "operations", "config", "updates"]
                .iter()
                .fold(operation.name().to_owned(), |text, name| text + "\n" + &params.compact(name));
            Once { key: key.into_owned(), request }
        });
        Ok(Self { change, once })
    }
}

impl Change {
    /// The bucket that it touches, if it is one. Those of a transaction are asked for step by step.
    pub(crate) fn bucket(&self) -> Option<&str> {
        match self {
            Self::Insert { bucket, .. }
            | Self::InsertMany { bucket, .. }
            | Self::Upsert { bucket, .. }
            | Self::Update { bucket, .. }
            | Self::Delete { bucket, .. }
            | Self::Clear { bucket }
            | Self::DefineBucket { name: bucket, .. }
            | Self::DropBucket { name: bucket }
            | Self::UpdateBucket { name: bucket, .. } => Some(bucket),
            Self::DefineQuery { config, .. } => config.get("bucket").and_then(Json::as_str),
            Self::Transaction(_) | Self::UndefineQuery { .. } => None,
        }
    }
}

impl Subscribe {
    fn parse(params: &Params<'_>) -> Result<Self, RequestError> {
        let query = match params.given("config") {
            None => Followed::Named { name: params.text("query")?.into_owned(), params: query_params(params)? },
            Some(_) if params.given("query").is_some() => {
                let message = "\"query\" and \"config\" cannot both be given: one names a query, the other is one";
                return Err(RequestError::new(Code::ValidationError, message));
            }
            Some(_) => {
                let config = Json::Object(params.object("config")?);
                Followed::Inline(Box::new(
                    Query::parse(&config, &query_params(params)?).map_err(|error| wrong(&error))?,
                ))
            }
        };
        let mode = match params.optional_text("mode")?.as_deref() {
            None | Some("whole" | "full") => Mode::Whole,
            Some("delta") => Mode::Delta,
            Some(other) => {
                let message = format!("\"mode\" must be \"whole\" or \"delta\", and is {other:?}");
                return Err(RequestError::new(Code::ValidationError, message));
            }
        };
        let since = params.optional_text("since")?.map(Cow::into_owned);
        let is_told = params.flag("pos")? || since.is_some() || params.given("mode").is_some();
        Ok(Self { query, mode, since, is_told })
    }
}

/// The parameters of a query. Whatever else is there has no names that a query could ask for.
fn query_params(params: &Params<'_>) -> Result<Map<String, Json>, RequestError> {
    match params.given("params") {
        Some(text) if text.starts_with('{') => params.object("params"),
        _ => Ok(Map::new()),
    }
}

/// A query whose fields are those of the request.
fn inline_query(params: &Params<'_>) -> Result<Query, RequestError> {
    let mut config = Map::new();
    for name in ["bucket", "filter", "sort", "offset", "limit", "fields", "aggregate"] {
        if params.given(name).is_some() {
            config.insert(name.to_owned(), params.value(name)?);
        }
    }
    params.text("bucket")?;
    Query::parse(&Json::Object(config), &query_params(params)?).map_err(|error| wrong(&error))
}

/// What is computed of one field of the records that a filter means.
fn aggregate(params: &Params<'_>, function: &str) -> Result<Query, RequestError> {
    let (bucket, field, filter) = (params.text("bucket")?, params.text("field")?, optional_filter(params)?);
    let config = json!({"bucket": bucket, "aggregate": {"function": function, "field": field}});
    let mut query = Query::parse(&config, &Map::new()).map_err(|error| wrong(&error))?;
    query.filter = filter;
    Ok(query)
}

fn filter(params: &Params<'_>) -> Result<Filter, RequestError> {
    let json = Json::Object(params.object("filter")?);
    // What looks like a parameter is text here.
    Filter::parse_with(&json, &Parameters::new()).map_err(|error| wrong(&error))
}

fn optional_filter(params: &Params<'_>) -> Result<Filter, RequestError> {
    if params.given("filter").is_some() { filter(params) } else { Ok(Filter::everything()) }
}

fn wrong(error: &dyn Display) -> RequestError {
    RequestError::new(Code::ValidationError, error.to_string())
}

/// The records of an array.
fn records(params: &Params<'_>) -> Result<Vec<Map<String, Json>>, RequestError> {
    let no_record = |place| {
        RequestError::new(Code::ValidationError, format!("\"data[{place}]\" must be an object: each is a record"))
    };
    let record = |(place, record)| match record {
        Json::Object(record) => Ok(record),
        _ => Err(no_record(place)),
    };
    params.array("data")?.into_iter().enumerate().map(record).collect()
}

/// The operations of a transaction.
fn steps(params: &Params<'_>) -> Result<Vec<Step>, RequestError> {
    let expected = "an array of at least one operation";
    if !params.raw("operations").is_some_and(|text| text.starts_with('[')) {
        return Err(params.wrong("operations", expected));
    }
    let operations = params.array("operations")?;
    if operations.is_empty() {
        let message = format!("\"operations\" must be {expected}, and is empty");
        return Err(RequestError::new(Code::ValidationError, message));
    }
    Step::parse_all(&Json::Array(operations)).map_err(|error| wrong(&error))
}
