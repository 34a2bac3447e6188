//! System buckets: buckets of the program that embeds the store.
//!
//! The program declares them when it opens the store. Requests of clients cannot reach them: [`State::bucket`] does not find
//! them, and a [`Draft`] writes to them only inside [`Draft::system`]. Otherwise they are buckets like any others, with a schema,
//! indexes, references to other system buckets and a time to live; they are logged, checkpointed, copied, exported and followed.
//!
//! A declaration is stored as a row of [`BUCKETS`] that is marked as such. A system bucket that the program no longer declares
//! stays stored and hidden.

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
    /// The row of [`BUCKETS`] that stores it.
    row: Row,
}

/// Why a system bucket was not declared, or a store not opened with its declaration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SystemBucketError {
    /// The name is not one of a system bucket.
    #[error(
        "\"{name}\" cannot be the name of a system bucket: expected 2 to {max} bytes that begin with `$` or `_`, \
         and not $buckets, $queries or $replies"
    )]
    Name {
        /// The name, or its beginning.
        name: String,
        /// Limit of its length in bytes.
        max: usize,
    },
    /// The bucket has been declared before.
    #[error("system bucket \"{name}\" is declared twice")]
    Duplicate {
        /// The bucket.
        name: String,
    },
    /// The definition is wrong.
    #[error("system bucket \"{name}\": {source}")]
    Definition {
        /// The bucket.
        name: String,
        /// The problem.
        source: DefinitionError,
    },
    /// The definition cannot be stored, such as one that is nested too deeply.
    #[error("the definition of system bucket \"{name}\" cannot be stored: {source}")]
    NotStored {
        /// The bucket.
        name: String,
        /// Why not.
        source: Box<StoreError>,
    },
    /// A field refers to something other than a system bucket.
    #[error(
        "system bucket \"{name}\": field {field} refers to \"{target}\"; expected a system bucket that is declared before it"
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
    /// The stored records do not fit the declaration.
    #[error(
        "system bucket \"{name}\" is stored with another definition, and its records do not fit this one: {problem}"
    )]
    Incompatible {
        /// The bucket.
        name: String,
        /// What does not fit.
        #[source]
        problem: Incompatibility,
    },
}

/// In what way stored records do not fit a declaration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatibility {
    /// The key is another field.
    #[error("the key is `{stored}`, and was declared as `{declared}`")]
    Key {
        /// The field that is the key of the stored records.
        stored: String,
        /// The field that was declared.
        declared: String,
    },
    /// The bucket is declared with `persistent: false`, and has stored records.
    #[error("`persistent` cannot become false while records are stored")]
    Persistent,
    /// A record does not pass the schema.
    #[error(transparent)]
    Record(#[from] ValidationError),
    /// Two records have the same value in a unique field.
    #[error(transparent)]
    NotUnique(#[from] NotUnique),
}

impl SystemBuckets {
    const MAX_NAME_BYTES: usize = 255;

    /// Declares a system bucket. Its fields may refer to itself and to system buckets that were declared before.
    ///
    /// If the store has the bucket with another definition, the declaration replaces it, provided that the stored records fit:
    /// the key is the same field, every record passes the schema, and unique fields are unique. An empty bucket takes any.
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

/// Whether a bucket of this name can be a system bucket.
pub(crate) fn is_system_name(name: &str) -> bool {
    let is_own = catalog::internal_buckets().any(|(own, _)| own == name);
    name.len() > 1 && name.starts_with(['$', '_']) && !is_own
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
    /// A state that has these system buckets and nothing else.
    pub(crate) fn with_system_buckets(system: &SystemBuckets) -> Self {
        let mut state = Self::new();
        for Declaration { name, definition, .. } in &system.declared {
            state.install_system(name, Bucket::new(Arc::clone(definition)), true);
        }
        state
    }
}

impl Draft {
    /// Makes these system buckets reachable, and defines or redefines those that are not stored in this way.
    pub(crate) fn declare(&mut self, system: &SystemBuckets) -> Result<(), SystemBucketError> {
        for declaration in &system.declared {
            let Declaration { name, definition, row } = declaration;
            if self.state().bucket(name).is_ok() {
                return Err(SystemBucketError::Taken { name: name.clone() });
            }
            let stored = self.state().any(name).map(|(_, bucket)| bucket);
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
    /// Returns the bucket with its records under this definition.
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
