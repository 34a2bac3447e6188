//! The catalog: definitions of buckets and named queries.
//!
//! Definitions are rows of the internal buckets `$buckets` and `$queries`, with the members `name` and `config`. They are stored,
//! backed up and followed like other rows. Dropping a bucket deletes its row, which is one logged write regardless of the number of
//! records. System buckets are defined by rows of `$buckets` with a flag: see [`system`](crate::system).

use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value as Json, json};

use crate::query::Parameters;
use crate::schema::{BucketDefinition, FieldRule, Referrer};
use crate::{Draft, Field, Limits, Query, Row, RowError, State, StoreError, Value};

/// The name of the internal bucket of bucket definitions, whose changes followers see. Its records have the fields `name` and `config`.
pub const BUCKETS: &str = "$buckets";
/// The name of the internal bucket of named queries, whose changes followers see. Its records have the fields `name` and `config`.
pub const QUERIES: &str = "$queries";
/// The name of the internal bucket of replies to writes with an idempotency key.
pub(crate) const REPLIES: &str = "$replies";

static NAME: LazyLock<Field> = LazyLock::new(|| Field::new("name"));
static CONFIG: LazyLock<Field> = LazyLock::new(|| Field::new("config"));
static SYSTEM: LazyLock<Field> = LazyLock::new(|| Field::new("system"));

/// Returns whether the name is reserved for internal buckets.
pub(crate) fn is_internal(name: &str) -> bool {
    name.starts_with('$')
}

/// Returns the internal buckets and their definitions.
pub(crate) fn internal_buckets() -> impl Iterator<Item = (&'static str, Arc<BucketDefinition>)> {
    static INTERNAL: LazyLock<[(&str, Arc<BucketDefinition>); 3]> = LazyLock::new(|| {
        let defined = json!({"key": "name", "schema": {"name": {"type": "string", "required": true}}});
        let replies = json!({"key": "id", "schema": {"id": {"type": "string"}}, "ttl": "24h"});
        [(BUCKETS, &defined), (QUERIES, &defined), (REPLIES, &replies)].map(|(name, config)| {
            let definition = BucketDefinition::parse(config).expect("the built-in definitions are valid");
            (name, Arc::new(definition))
        })
    });
    INTERNAL.iter().map(|(name, definition)| (*name, Arc::clone(definition)))
}

/// Returns the name and the definition of the bucket that a row of [`BUCKETS`] defines. Returns `None` if the row is malformed.
pub(crate) fn bucket_of(row: &Row) -> Option<Result<(String, BucketDefinition), StoreError>> {
    let (name, config) = definition_of(row)?;
    Some(BucketDefinition::parse(&config).map(|definition| (name, definition)).map_err(StoreError::from))
}

/// Returns whether a row of [`BUCKETS`] defines a system bucket.
pub(crate) fn is_system(row: &Row) -> bool {
    row.get(&SYSTEM) == Some(Value::Bool(true))
}

/// Returns the name in a row of [`BUCKETS`] or [`QUERIES`].
pub(crate) fn name_of(row: &Row) -> Option<String> {
    let Some(Value::String(name)) = row.get(&NAME) else { return None };
    Some(name.into_owned())
}

fn definition_of(row: &Row) -> Option<(String, Json)> {
    Some((name_of(row)?, serde_json::from_str(row.text_of(&CONFIG)?).ok()?))
}

impl State {
    /// Returns a named query with the given parameters.
    pub fn query(&self, name: &str, params: &Map<String, Json>) -> Result<Query, StoreError> {
        let config = self.query_config(name)?;
        Ok(Query::parse_with(&config, &Parameters::from(params))?)
    }

    /// Returns the definition of a named query.
    pub fn query_config(&self, name: &str) -> Result<Json, StoreError> {
        let config = definition_of(self.query_record(name)?).map(|(_, config)| config);
        config.ok_or_else(|| StoreError::QueryNotDefined { query: name.to_owned() })
    }

    /// Returns the record of [`QUERIES`] that defines a named query.
    pub fn query_record(&self, name: &str) -> Result<&Row, StoreError> {
        let row = self.any_bucket(QUERIES)?.1.get(&Value::String(name.into()));
        row.ok_or_else(|| StoreError::QueryNotDefined { query: name.to_owned() })
    }

    pub(crate) fn query_count(&self) -> usize {
        self.any_bucket(QUERIES).map_or(0, |(_, bucket)| bucket.len())
    }

    /// Returns all named queries and their definitions, in the order of definition.
    pub fn queries(&self) -> impl Iterator<Item = (String, Json)> {
        self.any_bucket(QUERIES).into_iter().flat_map(|(_, bucket)| bucket.rows()).filter_map(definition_of)
    }
}

impl Draft {
    /// Defines a bucket.
    pub fn define_bucket(&mut self, name: &str, config: &Json) -> Result<(), StoreError> {
        self.check_name(name)?;
        if self.state().bucket(name).is_ok() {
            return Err(StoreError::BucketExists { bucket: name.to_owned() });
        }
        let definition = BucketDefinition::parse(config)?;
        self.atomically(|draft| {
            draft.write_definition(BUCKETS, name, config)?;
            draft.restructure(|state| state.install_new(name, definition));
            Ok(())
        })
    }

    /// Adds fields and indexes to a bucket, or changes its time to live for new records: see [`BucketDefinition::updated`]. Indexes
    /// are built before this returns.
    pub fn update_bucket(&mut self, name: &str, updates: &Json) -> Result<(), StoreError> {
        let bucket = self.state().bucket(name)?;
        let definition = bucket.definition().updated(updates)?;
        let config = definition.config.clone();
        let bucket = bucket
            .redefine(Arc::new(definition))
            .map_err(|source| StoreError::NotUnique { bucket: name.to_owned(), source })?;
        self.atomically(|draft| {
            draft.write_definition(BUCKETS, name, &config)?;
            draft.restructure(|state| state.install(name, bucket));
            Ok(())
        })
    }

    /// Drops a bucket with its records, and the named queries on it. Fails if a field of another bucket refers to it.
    pub fn drop_bucket(&mut self, name: &str) -> Result<(), StoreError> {
        self.state().bucket(name)?;
        let mut by = self.referrers(name);
        if !by.is_empty() {
            let others = by.len().saturating_sub(Referrer::MAX_REFERRERS);
            by.truncate(Referrer::MAX_REFERRERS);
            return Err(StoreError::BucketReferenced { bucket: name.to_owned(), by, others });
        }
        self.atomically(|draft| {
            let is_on_bucket = |(_, config): &(String, Json)| config["bucket"] == name;
            let queries: Vec<(String, Json)> = draft.state().queries().filter(is_on_bucket).collect();
            for (query, _) in queries {
                draft.undefine_query(&query)?;
            }
            draft.remove_row(BUCKETS, &Value::String(name.into()))?;
            draft.restructure(|state| state.uninstall(name));
            Ok(())
        })
    }

    /// Defines a named query.
    pub fn define_query(&mut self, name: &str, config: &Json) -> Result<(), StoreError> {
        self.check_name(name)?;
        if self.state().query_config(name).is_ok() {
            return Err(StoreError::QueryExists { query: name.to_owned() });
        }
        Query::template(config)?;
        self.state().bucket(config["bucket"].as_str().unwrap_or_default())?;
        self.atomically(|draft| draft.write_definition(QUERIES, name, config))
    }

    /// Removes the definition of a named query.
    pub fn undefine_query(&mut self, name: &str) -> Result<(), StoreError> {
        self.state().query_config(name)?;
        self.remove_row(QUERIES, &Value::String(name.into())).map(drop)
    }

    /// Returns the fields of other buckets that refer to this one.
    fn referrers(&self, name: &str) -> Vec<Referrer> {
        let others = self.state().referring(name).filter(|(other, _)| *other != name);
        let fields =
            others.flat_map(|(other, bucket)| bucket.definition().fields.iter().map(move |field| (other, field)));
        let refers = |rule: &FieldRule| rule.reference.as_ref().is_some_and(|reference| reference.bucket == name);
        let referring = fields.filter(|(_, (_, rule))| refers(rule));
        referring.map(|(other, (field, _))| Referrer { bucket: other.to_owned(), field: field.clone() }).collect()
    }

    fn check_name(&self, name: &str) -> Result<(), StoreError> {
        let max = self.limits().max_name_bytes.min(usize::from(u16::MAX));
        if name.is_empty() || name.len() > max || self.state().is_hidden(name) {
            return Err(StoreError::Name { name: name.chars().take(64).collect(), max });
        }
        Ok(())
    }

    fn write_definition(&mut self, bucket: &'static str, name: &str, config: &Json) -> Result<(), StoreError> {
        let record: Map<String, Json> =
            [("name".to_owned(), json!(name)), ("config".to_owned(), config.clone())].into_iter().collect();
        Limits::check_depth(&record)?;
        let row = Row::new(&record)?;
        let limits = self.limits();
        let (len, max) = (row.text().len(), limits.max_record_bytes);
        if len > max {
            return Err(RowError::TooLarge { len, max }.into());
        }
        let (_, own) = self.state().any_bucket(bucket)?;
        // System buckets are not counted, because clients cannot define them.
        let count = if bucket == BUCKETS { self.state().names().len() } else { own.len() };
        if count >= limits.max_definitions && own.get(&Value::String(name.into())).is_none() {
            return Err(StoreError::TooManyDefinitions { max: limits.max_definitions });
        }
        self.put_row(bucket, row).map(drop)
    }
}
