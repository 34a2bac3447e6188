//! System buckets: buckets of the program that embeds the store.
//!
//! The program declares them when it opens the store. Clients cannot access them: [`State::bucket`] does not find them, and a
//! [`Draft`] accesses them only inside [`Draft::system`]. Otherwise they are like ordinary buckets, with a schema, indexes,
//! references to other system buckets and a time to live. They are logged, checkpointed, backed up, exported and followed.
//!
//! A declaration is stored as a row of [`BUCKETS`] with a flag. A system bucket that the program no longer declares remains stored
//! and hidden.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

pub use crate::catalog::{BUCKETS, QUERIES};

use crate::catalog;
use crate::schema::{BucketDefinition, DefinitionError, NotUnique, ValidationError};
use crate::{Bucket, Draft, Limits, Row, RowError, State, StoreError};

/// The system buckets that a program declares: names and definitions.
///
/// ```
/// use serde_json::json;
/// use tidewire_store::{Store, StoreOptions};
/// use tidewire_store::system::SystemBuckets;
///
/// let audit = json!({"key": "id", "schema": {"id": {"type": "number"}}});
/// let buckets = SystemBuckets::default().declare("$audit", &audit)?;
/// let store = Store::memory(StoreOptions::default().system_buckets(buckets));
/// let record = json!({"id": 1, "event": "login"});
/// store.write(|draft| draft.system(|draft| draft.insert("$audit", record))).wait()?;
/// let snapshot = store.snapshot();
/// assert_eq!(snapshot.state.system_bucket("$audit")?.len(), 1);
/// assert!(snapshot.state.bucket("$audit").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct SystemBuckets {
    declared: Vec<Declaration>,
}

#[derive(Debug, Clone)]
struct Declaration {
    name: String,
    definition: Arc<BucketDefinition>,
    /// The row of [`BUCKETS`] that stores the declaration.
    row: Row,
}

/// An error of the declaration of a system bucket, or of opening a store with it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SystemBucketError {
    /// The name is invalid.
    #[error(
        "invalid name \"{name}\" of a system bucket: expected 2 to {max} bytes that begin with `$` or `_`, \
        and not $buckets, $queries or $replies"
    )]
    Name {
        /// The first characters of the name.
        name: String,
        /// Limit of the length of a name in bytes.
        max: usize,
    },
    /// The bucket is declared twice.
    #[error("system bucket \"{name}\" is declared twice")]
    Duplicate {
        /// The bucket.
        name: String,
    },
    /// The definition is invalid.
    #[error("system bucket \"{name}\": {source}")]
    Definition {
        /// The bucket.
        name: String,
        /// The problem.
        source: DefinitionError,
    },
    /// The definition cannot be stored, for example because it is nested too deeply.
    #[error("the definition of system bucket \"{name}\" cannot be stored: {source}")]
    NotStored {
        /// The bucket.
        name: String,
        /// The error.
        source: Box<StoreError>,
    },
    /// A field refers to a bucket that is not a declared system bucket.
    #[error(
        "system bucket \"{name}\": field {field} references \"{target}\"; expected a system bucket that is declared before it"
    )]
    Reference {
        /// The bucket.
        name: String,
        /// The field.
        field: String,
        /// The bucket that it refers to.
        target: String,
    },
    /// The directory has an ordinary bucket of that name.
    #[error("system bucket \"{name}\" has the name of an ordinary bucket in this directory; choose another name")]
    Taken {
        /// The bucket.
        name: String,
    },
    /// The stored records are incompatible with the declaration.
    #[error("system bucket \"{name}\": the stored records are incompatible with the new definition: {problem}")]
    Incompatible {
        /// The bucket.
        name: String,
        /// The incompatibility.
        #[source]
        problem: Incompatibility,
    },
}

/// An incompatibility of stored records with a declaration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatibility {
    /// The key field differs.
    #[error("the stored key is `{stored}`, the declared key is `{declared}`")]
    Key {
        /// The key field of the stored records.
        stored: String,
        /// The declared key field.
        declared: String,
    },
    /// The bucket is declared with `persistent: false`, and has stored records.
    #[error("`persistent` cannot become false while records are stored")]
    Persistent,
    /// A record does not match the schema.
    #[error(transparent)]
    Record(#[from] ValidationError),
    /// Two records have the same value in a unique field.
    #[error(transparent)]
    NotUnique(#[from] NotUnique),
}

impl SystemBuckets {
    const MAX_NAME_BYTES: usize = 255;

    /// Declares a system bucket. Its fields may refer to the bucket itself and to system buckets that were declared before it.
    ///
    /// If the bucket is stored with another definition, the declaration replaces it, provided that the stored records are compatible:
    /// the key field is the same, every record matches the schema, and unique fields are unique. An empty bucket is always
    /// compatible.
    pub fn declare(mut self, name: &str, config: &Json) -> Result<Self, SystemBucketError> {
        let name_error =
            || SystemBucketError::Name { name: name.chars().take(64).collect(), max: Self::MAX_NAME_BYTES };
        if !is_system_name(name) || name.len() > Self::MAX_NAME_BYTES {
            return Err(name_error());
        }
        let name = name.to_owned();
        if self.declared.iter().any(|declared| declared.name == name) {
            return Err(SystemBucketError::Duplicate { name });
        }
        let definition = BucketDefinition::parse(config)
            .map_err(|source| SystemBucketError::Definition { name: name.clone(), source })?;
        let references = definition.fields.iter().filter_map(|(field, rule)| Some((field, rule.reference.as_ref()?)));
        for (field, reference) in references {
            let target = &reference.bucket;
            if *target != name && !self.declared.iter().any(|declared| declared.name == *target) {
                return Err(SystemBucketError::Reference { name, field: field.clone(), target: target.clone() });
            }
        }
        let row = catalog_row(&name, config).map_err(not_stored(&name))?;
        self.declared.push(Declaration { name, definition: Arc::new(definition), row });
        Ok(self)
    }
}

/// Returns whether the name is valid for a system bucket.
pub(crate) fn is_system_name(name: &str) -> bool {
    let is_internal = catalog::internal_buckets().any(|(internal, _)| internal == name);
    name.len() > 1 && name.starts_with(['$', '_']) && !is_internal
}

fn not_stored<E: Into<StoreError>>(name: &str) -> impl FnOnce(E) -> SystemBucketError {
    move |source| SystemBucketError::NotStored { name: name.to_owned(), source: Box::new(source.into()) }
}

fn catalog_row(name: &str, config: &Json) -> Result<Row, RowError> {
    let members = [("name", json!(name)), ("config", config.clone()), ("system", json!(true))];
    let record: Map<String, Json> = members.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    Limits::check_depth(&record)?;
    Row::new(&record)
}

impl State {
    /// Creates a state with these system buckets.
    pub(crate) fn with_system_buckets(system: &SystemBuckets) -> Self {
        let mut state = Self::new();
        for Declaration { name, definition, .. } in &system.declared {
            state.install_system(name, Bucket::new(Arc::clone(definition)), true);
        }
        state
    }
}

impl Draft {
    /// Declares system buckets, and stores new and changed definitions.
    pub(crate) fn declare(&mut self, system: &SystemBuckets) -> Result<(), SystemBucketError> {
        for declaration in &system.declared {
            let Declaration { name, definition, row } = declaration;
            if self.state().bucket(name).is_ok() {
                return Err(SystemBucketError::Taken { name: name.clone() });
            }
            let stored = self.state().any_bucket(name).map(|(_, bucket)| bucket);
            let is_new = stored.as_ref().map_or(true, |bucket| bucket.definition().config != definition.config);
            let bucket = match stored {
                Err(_) => Bucket::new(Arc::clone(definition)),
                Ok(bucket) if !is_new => bucket.clone(),
                Ok(bucket) => declaration
                    .redefine(bucket)
                    .map_err(|problem| SystemBucketError::Incompatible { name: name.clone(), problem })?,
            };
            self.restructure(|state| state.install_system(name, bucket, true));
            if is_new {
                self.put_row(BUCKETS, row.clone()).map_err(not_stored(name))?;
            }
        }
        Ok(())
    }
}

impl Declaration {
    /// Returns the stored bucket with this definition.
    fn redefine(&self, stored: &Bucket) -> Result<Bucket, Incompatibility> {
        let (old, new) = (stored.definition(), &self.definition);
        if !stored.is_empty() {
            if old.key != new.key {
                return Err(Incompatibility::Key { stored: old.key.clone(), declared: new.key.clone() });
            }
            if old.persistent && !new.persistent {
                return Err(Incompatibility::Persistent);
            }
        }
        for row in stored.rows() {
            new.validate(&self.name, &row.to_record())?;
        }
        Ok(stored.redefine(Arc::clone(new))?)
    }
}
