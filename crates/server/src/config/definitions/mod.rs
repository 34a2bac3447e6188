//! Applies the bucket and query definitions of the configuration file to a store.
//!
//! All definitions are applied in one commit. If one of them is invalid or incompatible with the stored definitions or records,
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
    /// The configuration, as in `store.defineBucket` and `store.defineQuery`.
    pub config: Json,
    /// The location of the definition.
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
pub struct AppliedDefinition {
    /// The kind of the definition.
    pub kind: DefinitionKind,
    /// The name of the bucket or query.
    pub name: String,
    /// How the definition was applied.
    pub outcome: DefinitionOutcome,
}

/// How a definition was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DefinitionOutcome {
    /// The definition was new.
    Created,
    /// The stored definition was equal.
    Unchanged,
    /// The stored definition differed and was updated.
    Updated,
}

/// Why definitions were not applied. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// At least one definition cannot be applied.
    #[error("{}", lines(_0))]
    Rejected(Vec<RejectedDefinition>),
    /// The write failed.
    #[error("cannot write the definitions: {0}")]
    Store(#[from] WriteError),
}

/// A definition that cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RejectedDefinition {
    /// The kind of the definition.
    pub kind: DefinitionKind,
    /// The definition.
    pub definition: Definition,
    /// The reason.
    pub reason: RejectReason,
}

/// Why a definition cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The definition is invalid, or conflicts with stored records.
    Invalid(StoreError),
    /// The stored definition differs in keys that cannot be changed.
    Incompatible(Vec<Difference>),
}

impl fmt::Display for RejectedDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, definition, reason } = self;
        if let Some(location) = &definition.location {
            write!(f, "{location}: ")?;
        }
        write!(f, "{kind} \"{}\": ", definition.name)?;
        match reason {
            RejectReason::Invalid(error) => error.fmt(f),
            RejectReason::Incompatible(differences) => {
                f.write_str(
                    "the stored definition differs in keys that cannot be changed; only fields and indexes can be added, and \
                     `ttl` can be changed. Change the file, or drop the bucket",
                )?;
                differences.iter().try_for_each(|difference| write!(f, "\n  {difference}"))
            }
        }
    }
}

fn lines(rejected: &[RejectedDefinition]) -> String {
    rejected.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Applies definitions in one commit: creates new ones, updates those that differ, and leaves the others unchanged. Blocks until the
/// commit is durable.
///
/// # Errors
///
/// Returns all definitions that are invalid or incompatible with the store. Then nothing is changed.
pub fn apply(
    store: &Store,
    buckets: &[Definition],
    queries: &[Definition],
) -> Result<Vec<AppliedDefinition>, DefinitionError> {
    let all = buckets.iter().map(|bucket| (DefinitionKind::Bucket, bucket.clone()));
    let all: Vec<_> = all.chain(queries.iter().map(|query| (DefinitionKind::Query, query.clone()))).collect();
    let rejected = Arc::new(Mutex::new(Vec::new()));
    let rejected_in_write = Arc::clone(&rejected);
    let written = store.write(move |draft| {
        let (mut applied, mut rejected) = (Vec::new(), Vec::new());
        // Returning an error rolls back the whole write. It has only one error, so all rejections are passed through the mutex.
        let mut first = None;
        for (kind, definition) in all {
            match apply_one(draft, kind, &definition) {
                Ok(outcome) => applied.push(AppliedDefinition { kind, name: definition.name, outcome }),
                Err(reason) => {
                    first.get_or_insert_with(|| match &reason {
                        RejectReason::Invalid(error) => error.clone(),
                        RejectReason::Incompatible(_) => StoreError::BucketExists { bucket: definition.name.clone() },
                    });
                    rejected.push(RejectedDefinition { kind, definition, reason });
                }
            }
        }
        *rejected_in_write.lock().unwrap_or_else(PoisonError::into_inner) = rejected;
        first.map_or(Ok(applied), Err)
    });
    written.wait().map_err(|error| {
        let rejected = std::mem::take(&mut *rejected.lock().unwrap_or_else(PoisonError::into_inner));
        if rejected.is_empty() { DefinitionError::Store(error) } else { DefinitionError::Rejected(rejected) }
    })
}

fn apply_one(
    draft: &mut Draft,
    kind: DefinitionKind,
    definition: &Definition,
) -> Result<DefinitionOutcome, RejectReason> {
    let Definition { name, config, .. } = definition;
    match kind {
        DefinitionKind::Bucket => {
            let Ok(bucket) = draft.state().bucket(name) else {
                return draft
                    .define_bucket(name, config)
                    .map(|()| DefinitionOutcome::Created)
                    .map_err(RejectReason::Invalid);
            };
            let wanted = BucketDefinition::parse(config).map_err(|error| RejectReason::Invalid(error.into()))?;
            match compare::compare_buckets(bucket.definition(), &wanted) {
                Change::None => Ok(DefinitionOutcome::Unchanged),
                Change::Update(updates) => draft
                    .update_bucket(name, &updates)
                    .map(|()| DefinitionOutcome::Updated)
                    .map_err(RejectReason::Invalid),
                Change::Impossible(differences) => Err(RejectReason::Incompatible(differences)),
            }
        }
        DefinitionKind::Query => {
            let outcome = match draft.state().query_config(name) {
                Ok(stored) if compare::are_same_queries(&stored, config) => return Ok(DefinitionOutcome::Unchanged),
                Ok(_) => {
                    draft.undefine_query(name).map_err(RejectReason::Invalid)?;
                    DefinitionOutcome::Updated
                }
                Err(_) => DefinitionOutcome::Created,
            };
            draft.define_query(name, config).map(|()| outcome).map_err(RejectReason::Invalid)
        }
    }
}
