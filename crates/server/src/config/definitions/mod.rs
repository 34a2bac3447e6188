//! Applies the buckets and queries of the file to a store.
//!
//! All definitions are applied in one commit. If any of them is invalid, or incompatible with the stored definitions or records,
//! nothing is changed.

mod compare;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value as Json;
use tidewire_store::schema::BucketDefinition;
use tidewire_store::{Draft, Store, StoreError, WriteError};

use self::compare::Change;
pub use self::compare::Difference;
use super::location::Location;

/// The definition of a bucket or query.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Definition {
    /// The name of the bucket or query.
    pub name: String,
    /// The configuration, as `store.defineBucket` and `store.defineQuery` take it.
    pub config: Json,
    /// Where the definition was given.
    pub location: Option<Location>,
}

impl Definition {
    /// Creates a definition.
    pub fn new(name: impl Into<String>, config: Json, location: Option<Location>) -> Self {
        Self { name: name.into(), config, location }
    }
}

/// The kind of a definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DefinitionKind {
    /// A bucket.
    Bucket,
    /// A named query.
    Query,
}

impl fmt::Display for DefinitionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bucket => "bucket",
            Self::Query => "query",
        })
    }
}

/// The result of applying a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Applied {
    /// The kind of the definition.
    pub kind: DefinitionKind,
    /// The name of the bucket or query.
    pub name: String,
    /// What was done.
    pub outcome: Outcome,
}

/// What was done with a definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It was new.
    Created,
    /// The stored definition was the same.
    Unchanged,
    /// The stored definition differed and was updated.
    Updated,
}

/// Why definitions were not applied. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// Some definitions cannot be applied; at least one.
    #[error("{}", lines(_0))]
    Refused(Vec<RefusedDefinition>),
    /// The write failed.
    #[error("cannot write the definitions: {0}")]
    Store(#[from] WriteError),
}

/// A definition that cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RefusedDefinition {
    /// The kind of the definition.
    pub kind: DefinitionKind,
    /// The definition.
    pub definition: Definition,
    /// Why it cannot be applied.
    pub reason: Reason,
}

/// Why a definition cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// The definition is invalid, or conflicts with stored records.
    Invalid(StoreError),
    /// The stored definition cannot be changed to it. These parts differ.
    Incompatible(Vec<Difference>),
}

impl fmt::Display for RefusedDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, definition, reason } = self;
        if let Some(location) = &definition.location {
            write!(f, "{location}: ")?;
        }
        write!(f, "{kind} \"{}\": ", definition.name)?;
        match reason {
            Reason::Invalid(error) => error.fmt(f),
            Reason::Incompatible(differences) => {
                f.write_str(
                    "the stored definition differs in parts that cannot be changed; only new fields, new indexes and \
                     another `ttl` are possible. Change the file, or drop the bucket",
                )?;
                differences.iter().try_for_each(|difference| write!(f, "\n  {difference}"))
            }
        }
    }
}

fn lines(refused: &[RefusedDefinition]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Applies definitions in one commit: creates those that are new, updates those that differ, and leaves the others alone. Blocks
/// until the commit is durable.
///
/// # Errors
///
/// If a definition is invalid or incompatible with the store, all such definitions are returned and nothing is changed.
pub fn apply(store: &Store, buckets: &[Definition], queries: &[Definition]) -> Result<Vec<Applied>, DefinitionError> {
    let all = buckets.iter().map(|bucket| (DefinitionKind::Bucket, bucket.clone()));
    let all: Vec<_> = all.chain(queries.iter().map(|query| (DefinitionKind::Query, query.clone()))).collect();
    let refused = Arc::new(Mutex::new(Vec::new()));
    let refused_in_write = Arc::clone(&refused);
    let written = store.write(move |draft| {
        let (mut applied, mut refused) = (Vec::new(), Vec::new());
        // Returning an error rolls the whole write back. It carries one error only, so all refusals are passed beside it.
        let mut first = None;
        for (kind, definition) in all {
            match apply_one(draft, kind, &definition) {
                Ok(outcome) => applied.push(Applied { kind, name: definition.name, outcome }),
                Err(reason) => {
                    first.get_or_insert_with(|| match &reason {
                        Reason::Invalid(error) => error.clone(),
                        Reason::Incompatible(_) => StoreError::BucketExists { bucket: definition.name.clone() },
                    });
                    refused.push(RefusedDefinition { kind, definition, reason });
                }
            }
        }
        *refused_in_write.lock().unwrap_or_else(PoisonError::into_inner) = refused;
        first.map_or(Ok(applied), Err)
    });
    written.wait().map_err(|error| {
        let refused = std::mem::take(&mut *refused.lock().unwrap_or_else(PoisonError::into_inner));
        if refused.is_empty() { DefinitionError::Store(error) } else { DefinitionError::Refused(refused) }
    })
}

fn apply_one(draft: &mut Draft, kind: DefinitionKind, definition: &Definition) -> Result<Outcome, Reason> {
    let Definition { name, config, .. } = definition;
    match kind {
        DefinitionKind::Bucket => {
            let Ok(bucket) = draft.state().bucket(name) else {
                return draft.define_bucket(name, config).map(|()| Outcome::Created).map_err(Reason::Invalid);
            };
            let wanted = BucketDefinition::parse(config).map_err(|error| Reason::Invalid(error.into()))?;
            match compare::buckets(bucket.definition(), &wanted) {
                Change::None => Ok(Outcome::Unchanged),
                Change::Update(updates) => {
                    draft.update_bucket(name, &updates).map(|()| Outcome::Updated).map_err(Reason::Invalid)
                }
                Change::Impossible(differences) => Err(Reason::Incompatible(differences)),
            }
        }
        DefinitionKind::Query => {
            let outcome = match draft.state().query_config(name) {
                Ok(stored) if compare::are_same_queries(&stored, config) => return Ok(Outcome::Unchanged),
                Ok(_) => {
                    draft.undefine_query(name).map_err(Reason::Invalid)?;
                    Outcome::Updated
                }
                Err(_) => Outcome::Created,
            };
            draft.define_query(name, config).map(|()| outcome).map_err(Reason::Invalid)
        }
    }
}
