//! An entry that is delivered to a handler.

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::commands::StreamId;
use crate::convert::{FromValue, Serde};
use crate::error::ConversionError;
use crate::resp::Value;

/// An entry of a stream that a handler is called with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// The stream.
    pub stream: Bytes,
    /// The ID of the entry.
    pub id: StreamId,
    /// The fields, in the order in which they were written.
    pub fields: Vec<(Bytes, Bytes)>,
    /// How often the entry was delivered to any consumer, this time included.
    pub deliveries: u64,
}

impl Delivery {
    /// Returns the value of the first field with this name.
    pub fn field(&self, name: impl AsRef<[u8]>) -> Option<&Bytes> {
        self.fields.iter().find(|(field, _)| field == name.as_ref()).map(|(_, value)| value)
    }

    /// Deserializes the fields to a struct, as [`Serde`] does.
    ///
    /// # Errors
    ///
    /// If a field is missing or has another type. The error names the field.
    pub fn deserialize<T: DeserializeOwned>(&self) -> Result<T, ConversionError> {
        let pairs = self.fields.iter().map(|(name, value)| (Value::Bulk(name.clone()), Value::Bulk(value.clone())));
        Serde::from_value(Value::Map(pairs.collect())).map(|Serde(value)| value)
    }
}
