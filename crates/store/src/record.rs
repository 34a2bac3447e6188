//! Conversion of JSON values into records.

use serde_json::{Map, Value as Json};

use crate::StoreError;
use crate::check::Issue;
use crate::schema::ValidationError;

/// A JSON object that can be written as a record.
///
/// Implemented for [`serde_json::Map`] and [`serde_json::Value`]. A `Value` that is not an object fails the write with
/// [`StoreError::Validation`]. A type of your own becomes a `Value` by [`serde_json::to_value`].
///
/// ```
/// use serde::Serialize;
/// use serde_json::json;
/// use tidewire_store::{Store, StoreOptions};
///
/// #[derive(Serialize)]
/// struct Harbour {
///     id: u64,
///     tide: &'static str,
/// }
///
/// let store = Store::memory(StoreOptions::default());
/// store.define_bucket("harbours", json!({"key": "id", "schema": {"id": {"type": "number"}}})).wait()?;
/// store.insert("harbours", json!({"id": 1, "tide": "high"})).wait()?;
/// store.insert("harbours", serde_json::to_value(Harbour { id: 2, tide: "low" })?).wait()?;
/// let error = store.insert("harbours", json!([3, "low"])).wait().unwrap_err();
/// assert_eq!(error.to_string(), "Validation failed for bucket \"harbours\": a record must be an object");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait IntoRecord: sealed::IntoMap + Send + 'static {}

impl IntoRecord for Map<String, Json> {}

impl IntoRecord for Json {}

mod sealed {
    use super::{Json, Map};

    pub trait IntoMap {
        /// Returns the members, or `None` if the value is not an object.
        fn into_map(self) -> Option<Map<String, Json>>;
    }

    impl IntoMap for Map<String, Json> {
        fn into_map(self) -> Option<Map<String, Json>> {
            Some(self)
        }
    }

    impl IntoMap for Json {
        fn into_map(self) -> Option<Map<String, Json>> {
            if let Json::Object(members) = self { Some(members) } else { None }
        }
    }
}

/// Returns the members of a record that is written to this bucket.
pub(crate) fn members(record: impl IntoRecord, bucket: &str) -> Result<Map<String, Json>, StoreError> {
    record.into_map().ok_or_else(|| {
        let issue = Issue { field: String::new(), message: "a record must be an object".to_owned(), code: "type" };
        ValidationError { bucket: bucket.to_owned(), issues: vec![issue] }.into()
    })
}
