//! The buckets and queries of the file, brought into a store.
//!
//! All of it is one commit, or nothing: whatever is wrong with any definition is found before the commit is made, with the records
//! that are there, and nothing is changed then.

mod compare;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value as Json;
use tidewire_store::{BucketDefinition, Draft, Store, StoreError, WriteError};

use self::compare::Change;
pub use self::compare::Difference;
use super::place::Place;

/// A bucket or query that is to be there.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Definition {
    /// What it is called.
    pub name: String,
    /// What it is, as the store takes it.
    pub config: Json,
    /// Where it was given.
    pub place: Option<Place>,
}

impl Definition {
    /// A bucket or query that is to be there, and where that is said.
    pub fn new(name: impl Into<String>, config: Json, place: Option<Place>) -> Self {
        Self { name: name.into(), config, place }
    }
}

/// What a definition defines.
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

/// What has become of a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Applied {
    /// What it defines.
    pub kind: DefinitionKind,
    /// What it is called.
    pub name: String,
    /// What was done.
    pub outcome: Outcome,
}

/// What was done about a definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It was not there, and is now.
    Created,
    /// It was there as it is to be.
    Unchanged,
    /// It was there, and is now as it is to be.
    Updated,
}

/// Why definitions were not applied. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// Some cannot be; at least one.
    #[error("{}", lines(_0))]
    Refused(Vec<RefusedDefinition>),
    /// The store does not write.
    #[error("the definitions could not be written: {0}")]
    Store(#[from] WriteError),
}

/// A definition that cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RefusedDefinition {
    /// What it defines.
    pub kind: DefinitionKind,
    /// Which one it is.
    pub definition: Definition,
    /// Why.
    pub reason: Reason,
}

/// Why a definition cannot be applied.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// It is wrong, or does not fit what is stored.
    Wrong(StoreError),
    /// What is stored cannot become it.
    Incompatible(Vec<Difference>),
}

impl fmt::Display for RefusedDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, definition, reason } = self;
        if let Some(place) = &definition.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{kind} \"{}\": ", definition.name)?;
        match reason {
            Reason::Wrong(error) => error.fmt(f),
            Reason::Incompatible(differences) => {
                f.write_str(
                    "it is stored with another definition, and only fields and indexes can be added and the ttl changed. \
                     Make the file agree with it, or drop the bucket",
                )?;
                differences.iter().try_for_each(|difference| write!(f, "\n  {difference}"))
            }
        }
    }
}

fn lines(refused: &[RefusedDefinition]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Creates what is not there, leaves what is as it is to be, and updates what can become so, all at once. If any of them cannot be
/// applied, nothing is changed. It waits on this thread until that is kept.
pub fn apply(store: &Store, buckets: &[Definition], queries: &[Definition]) -> Result<Vec<Applied>, DefinitionError> {
    let all = buckets.iter().map(|bucket| (DefinitionKind::Bucket, bucket.clone()));
    let all: Vec<_> = all.chain(queries.iter().map(|query| (DefinitionKind::Query, query.clone()))).collect();
    let refused = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&refused);
    let written = store.write(move |draft| {
        let (mut applied, mut refused) = (Vec::new(), Vec::new());
        // What is refused gives its whole write back: the first reason stands for all of them, which are told aside.
        let mut first = None;
        for (kind, definition) in all {
            match apply_one(draft, kind, &definition) {
                Ok(outcome) => applied.push(Applied { kind, name: definition.name, outcome }),
                Err(reason) => {
                    first.get_or_insert_with(|| match &reason {
                        Reason::Wrong(error) => error.clone(),
                        Reason::Incompatible(_) => StoreError::BucketExists { bucket: definition.name.clone() },
                    });
                    refused.push(RefusedDefinition { kind, definition, reason });
                }
            }
        }
        *told.lock().unwrap_or_else(PoisonError::into_inner) = refused;
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
                return draft.define_bucket(name, config).map(|()| Outcome::Created).map_err(Reason::Wrong);
            };
            let wanted = BucketDefinition::parse(config).map_err(|error| Reason::Wrong(error.into()))?;
            match compare::buckets(bucket.definition(), &wanted) {
                Change::None => Ok(Outcome::Unchanged),
                Change::Update(updates) => {
                    draft.update_bucket(name, &updates).map(|()| Outcome::Updated).map_err(Reason::Wrong)
                }
                Change::Impossible(differences) => Err(Reason::Incompatible(differences)),
            }
        }
        DefinitionKind::Query => {
            let outcome = match draft.state().query_config(name) {
                Ok(stored) if compare::are_same_queries(&stored, config) => return Ok(Outcome::Unchanged),
                Ok(_) => {
                    draft.undefine_query(name).map_err(Reason::Wrong)?;
                    Outcome::Updated
                }
                Err(_) => Outcome::Created,
            };
            draft.define_query(name, config).map(|()| outcome).map_err(Reason::Wrong)
        }
    }
}
