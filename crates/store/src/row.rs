//! Rows: the JSON text of a record with a table of the offsets of its top-level members.
//!
//! A parsed record of 276 bytes takes two kilobytes of memory; a row takes its text and a few bytes per member. Filters and indexes
//! read slices of the text, and replies copy it. A row is immutable and shared by all states that have it.
//!
//! The table has hashes of the names instead of interned ids. An interner per bucket would grow with the names that clients send,
//! and all states would have to share it. A lookup by hash is as fast. It also compares the name, which precedes the value in the
//! text.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json};

use crate::Value;

/// A stored record.
#[derive(Clone, PartialEq, Eq)]
pub struct Row {
    /// The number of members (2 bytes), a [`MemberEntry`] for each, and the text.
    bytes: Arc<[u8]>,
}

/// The name of a top-level member, with its hash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Field {
    name: String,
    hash: u16,
}

impl Field {
    /// Creates a field.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        let hash = hash(&name);
        Self { name, hash }
    }

    /// Returns the name of the field.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The location of a member. Its value ends before the next member.
struct MemberEntry {
    /// The offset of the value in the text, after `"name":`.
    start: u32,
    /// The length of the name in the text, including escapes.
    name_len: u16,
    hash: u16,
}

impl MemberEntry {
    const SIZE: usize = 8;

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.start.to_le_bytes());
        bytes.extend(self.name_len.to_le_bytes());
        bytes.extend(self.hash.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let start = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Self { start, name_len: number(4), hash: number(6) }
    }

    /// Returns the offset of the name in the text, after its quote.
    fn name_start(&self) -> usize {
        self.start as usize - 2 - usize::from(self.name_len)
    }
}

/// An error of the conversion of a record into a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// The record has too many members.
    #[error("the record has {members} fields, more than the limit of {max}")]
    TooManyMembers {
        /// The number of members.
        members: usize,
        /// The limit.
        max: usize,
    },
    /// The name of a field is too long.
    #[error("a field name has {len} bytes, more than the limit of {max}")]
    LongName {
        /// The length of the name in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The record is too large.
    #[error("the record has {len} bytes, more than the limit of {max}")]
    TooLarge {
        /// The length of the record in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The record is nested too deeply.
    #[error("the record is nested more than {max} levels deep")]
    TooDeep {
        /// The limit.
        max: usize,
    },
    /// The stored text is not a record.
    #[error("the stored text is not a valid record")]
    Malformed,
}

impl Row {
    /// Limit of the number of members.
    const MAX_MEMBERS: usize = u16::MAX as usize;
    /// Limit of the length of a name in the text.
    const MAX_NAME_BYTES: usize = u16::MAX as usize;

    /// Creates the row of a record. The order of the members is preserved.
    pub fn new(record: &Map<String, Json>) -> Result<Self, RowError> {
        let count = u16::try_from(record.len())
            .map_err(|_| RowError::TooManyMembers { members: record.len(), max: Self::MAX_MEMBERS })?;
        let mut text = vec![b'{'];
        let mut entries = Vec::with_capacity(record.len());
        for (name, value) in record {
            if text.len() > 1 {
                text.push(b',');
            }
            let name_start = text.len();
            push_json(&mut text, name);
            // Without the quotes.
            let name_len = text.len() - name_start - 2;
            text.push(b':');
            let start = text.len();
            push_json(&mut text, value);
            let too_large = |len: usize| RowError::TooLarge { len, max: u32::MAX as usize };
            entries.push(MemberEntry {
                hash: hash(name),
                start: u32::try_from(start).map_err(|_| too_large(text.len()))?,
                name_len: u16::try_from(name_len)
                    .map_err(|_| RowError::LongName { len: name_len, max: Self::MAX_NAME_BYTES })?,
            });
        }
        text.push(b'}');
        Ok(Self::assemble(count, &entries, &text))
    }

    /// Creates a row from its stored [`text`](Self::text).
    pub(crate) fn of_text(text: &str) -> Result<Self, RowError> {
        let mut entries = Vec::with_capacity(16);
        let mut reader = serde_json::Deserializer::from_str(text);
        reader.deserialize_map(Members { text, entries: &mut entries }).map_err(|_| RowError::Malformed)?;
        reader.end().map_err(|_| RowError::Malformed)?;
        let count = u16::try_from(entries.len())
            .map_err(|_| RowError::TooManyMembers { members: entries.len(), max: Self::MAX_MEMBERS })?;
        Ok(Self::assemble(count, &entries, text.as_bytes()))
    }

    fn assemble(count: u16, entries: &[MemberEntry], text: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(2 + entries.len() * MemberEntry::SIZE + text.len());
        bytes.extend(count.to_le_bytes());
        for entry in entries {
            entry.write(&mut bytes);
        }
        bytes.extend_from_slice(text);
        Self { bytes: bytes.into() }
    }

    pub(crate) fn member_count(&self) -> usize {
        usize::from(u16::from_le_bytes([self.bytes[0], self.bytes[1]]))
    }

    /// Returns the members, each with the end of its value.
    fn entries(&self) -> impl Iterator<Item = (MemberEntry, usize)> {
        let (table, text) = self.bytes[2..].split_at(self.member_count() * MemberEntry::SIZE);
        let end = text.len() - 1;
        (0..self.member_count()).map(move |index| {
            let entry = |index: usize| {
                table.get(index * MemberEntry::SIZE..).filter(|rest| !rest.is_empty()).map(MemberEntry::read)
            };
            // A value is followed by a comma and the quote of the next name, or by the end.
            let end = entry(index + 1).map_or(end, |next| next.name_start() - 2);
            (MemberEntry::read(&table[index * MemberEntry::SIZE..]), end)
        })
    }

    /// Returns the record as compact JSON text, in bytes. Unlike [`text`](Self::text), this does not validate UTF-8 again.
    pub fn text_bytes(&self) -> &[u8] {
        &self.bytes[2 + self.member_count() * MemberEntry::SIZE..]
    }

    /// Returns the record as compact JSON text.
    pub fn text(&self) -> &str {
        as_text(self.text_bytes())
    }

    /// Returns the members in order: the escaped name and the text of the value.
    pub fn members(&self) -> impl Iterator<Item = (&str, &str)> {
        let text = self.text_bytes();
        self.entries().map(move |(entry, end)| (name_of(text, &entry), as_text(&text[entry.start as usize..end])))
    }

    /// Returns the text of a member's value, if the member is present.
    pub fn text_of(&self, field: &Field) -> Option<&str> {
        let text = self.text_bytes();
        let is_field =
            |(entry, _): &(MemberEntry, usize)| entry.hash == field.hash && is_name(name_of(text, entry), &field.name);
        self.entries().find(is_field).map(|(entry, end)| as_text(&text[entry.start as usize..end]))
    }

    /// Returns the value of a member, if it is present.
    pub fn get(&self, field: &Field) -> Option<Value<'_>> {
        self.text_of(field).map(Value::of_text)
    }

    /// Parses the record.
    pub fn to_record(&self) -> Map<String, Json> {
        // The text is an object by construction.
        serde_json::from_str(self.text()).unwrap_or_default()
    }

    /// Returns the memory of the row in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }
}

/// Collects the locations of the members of a compact text.
struct Members<'a, 'e> {
    text: &'a str,
    entries: &'e mut Vec<MemberEntry>,
}

impl<'a> Visitor<'a> for Members<'a, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the text of a record")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<(), M::Error> {
        let malformed = || M::Error::custom(RowError::Malformed);
        // The offset after `{` or `,`.
        let mut end = 1;
        while let Some((NameHash(hash), value)) = map.next_entry::<NameHash, &RawValue>()? {
            let value = value.get();
            let start = value.as_ptr() as usize - self.text.as_ptr() as usize;
            // Exactly `"name":` precedes the value.
            let name_len = start.checked_sub(end + 3).ok_or_else(malformed)?;
            if self.text.as_bytes()[end] != b'"' || &self.text.as_bytes()[start - 2..start] != b"\":" {
                return Err(malformed());
            }
            self.entries.push(MemberEntry {
                hash,
                start: u32::try_from(start).map_err(|_| malformed())?,
                name_len: u16::try_from(name_len).map_err(|_| malformed())?,
            });
            end = start + value.len() + 1;
        }
        if end.max(2) == self.text.len() { Ok(()) } else { Err(malformed()) }
    }
}

/// The hash of an unescaped name.
struct NameHash(u16);

impl<'de> serde::Deserialize<'de> for NameHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = NameHash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<NameHash, E> {
        Ok(NameHash(hash(name)))
    }
}

fn name_of<'a>(text: &'a [u8], entry: &MemberEntry) -> &'a str {
    as_text(&text[entry.name_start()..entry.start as usize - 2])
}

/// Returns a slice of a row's text, which must begin and end at character boundaries, as a string.
fn as_text(bytes: &[u8]) -> &str {
    // Rows are created from valid UTF-8 and are immutable.
    std::str::from_utf8(bytes).unwrap_or_default()
}

/// Returns whether an escaped name equals this name.
fn is_name(written: &str, name: &str) -> bool {
    if !written.contains('\\') {
        return written == name;
    }
    serde_json::from_str::<String>(&format!("\"{written}\"")).is_ok_and(|unescaped| unescaped == name)
}

fn push_json(text: &mut Vec<u8>, json: &impl Serialize) {
    // Neither the writer nor the serialization of a value or name can fail.
    let _ = serde_json::to_writer(text, json);
}

/// Returns the FNV-1a hash, folded to 16 bits. A collision costs only a comparison.
fn hash(name: &str) -> u16 {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let [one, two, three, four] = hash.to_le_bytes();
    u16::from_le_bytes([one ^ three, two ^ four])
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            any::<f64>().prop_filter_map("finite", |number| number.is_finite().then(|| Json::from(number))),
            any::<String>().prop_map(Json::from),
        ];
        leaf.prop_recursive(3, 20, 5, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..5).prop_map(Json::from),
                vec((any::<String>(), inner), 0..5).prop_map(|members| Json::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn row_survives_a_round_trip(members in vec((any::<String>(), json()), 0..10), other in any::<String>()) {
            let record: Map<String, Json> = members.into_iter().collect();
            let row = Row::new(&record).unwrap();
            prop_assert_eq!(&row.to_record(), &record);
            prop_assert_eq!(Row::of_text(row.text()), Ok(row.clone()));
            prop_assert_eq!(row.members().count(), record.len());
            for (name, value) in &record {
                let text = row.text_of(&Field::new(name)).unwrap();
                prop_assert_eq!(&serde_json::from_str::<Json>(text).unwrap(), value);
            }
            prop_assert_eq!(row.text_of(&Field::new(&other)).is_some(), record.contains_key(&other));
        }
    }

    #[test]
    fn invalid_or_non_compact_text_is_rejected() {
        for text in [
            "",
            "1",
            "[]",
            "{",
            "{} ",
            " {}",
            "{ }",
            r#"{"a": 1}"#,
            r#"{"a":1 }"#,
            r#"{"a":1, "b":2}"#,
            r#"{ "a":1}"#,
            r#"{"a" :1}"#,
            r#"{"a":}"#,
            r#"{"a":1}}"#,
            r#"{"a":[1}"#,
        ] {
            assert_eq!(Row::of_text(text), Err(RowError::Malformed), "{text}");
        }
    }

    #[test]
    fn memory_overhead_is_small() {
        let record = serde_json::json!({
            "id": "0123456789", "name": "a name", "count": 12, "tags": ["a", "b"], "text": "x".repeat(180),
        });
        let row = Row::new(record.as_object().unwrap()).unwrap();
        assert!(row.size() < row.text().len() * 4 / 3, "{} bytes for {}", row.size(), row.text().len());
    }
}
