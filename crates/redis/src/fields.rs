//! Structs as fields of hashes, through serde.

use std::borrow::Cow;
use std::fmt::{self, Debug, Display, Formatter};
use std::vec;

use serde::Serialize;
use serde::ser::{Impossible, SerializeMap, SerializeSeq, SerializeStruct, SerializeTuple, Serializer};

use crate::command::{CommandError, ToArgument};
use crate::error::shown;

/// The fields of a struct or map, for a hash or an entry of a stream. [`Serde`](crate::Serde) reads them back.
///
/// ```
/// use serde::Serialize;
/// use tidewire_redis::{Fields, commands};
///
/// #[derive(Serialize)]
/// struct Boat {
///     name: String,
///     crew: u8,
///     port: Option<String>,
/// }
///
/// let boat = Boat { name: "Tern".into(), crew: 3, port: None };
/// let hset = commands::hset("boat:1", Fields::of(&boat)?);
/// assert_eq!(hset.command().as_bytes(), commands::hset("boat:1", [("name", "Tern"), ("crew", "3")]).command().as_bytes());
/// # Ok::<(), tidewire_redis::CommandError>(())
/// ```
///
/// Numbers are written in digits, booleans as 0 and 1, enums as the name of their variant. `None` is not written, so `HSET` leaves
/// a field that exists as it is; delete it with `HDEL`. Hashes are flat: a value with fields or elements of its own is an error,
/// except bytes.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Fields(Vec<Field>);

/// A name and a value.
type Field = (Cow<'static, [u8]>, Vec<u8>);

impl Fields {
    /// Returns the fields of a struct or map.
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, CommandError> {
        match value.serialize(Writer)? {
            Written::Fields(fields) => Ok(fields),
            _ => problem("it is not a struct or map; use its value as an argument instead"),
        }
    }

    /// Returns the number of fields.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no fields. Servers reject an `HSET` without fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl IntoIterator for Fields {
    type Item = Field;
    type IntoIter = vec::IntoIter<Field>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Does not show the values, which may be secret.
impl Debug for Fields {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| String::from_utf8_lossy(name))).finish()
    }
}

impl serde::ser::Error for CommandError {
    fn custom<T: Display>(message: T) -> Self {
        Self::Fields { field: None, problem: message.to_string().into() }
    }
}

fn problem<T>(problem: &str) -> Result<T, CommandError> {
    Err(serde::ser::Error::custom(problem))
}

/// A serialized value.
enum Written {
    Nothing,
    /// A number, or a byte if it is an element of a sequence.
    Byte(u8),
    Simple(Vec<u8>),
    Fields(Fields),
}

impl Written {
    fn simple(argument: impl ToArgument) -> Self {
        Self::Simple(argument.with_bytes(<[u8]>::to_vec))
    }

    /// Returns the value of a field, if it is not `None`.
    fn into_value(self) -> Result<Option<Vec<u8>>, CommandError> {
        match self {
            Self::Nothing => Ok(None),
            Self::Byte(byte) => Ok(Some(byte.with_bytes(<[u8]>::to_vec))),
            Self::Simple(value) => Ok(Some(value)),
            Self::Fields(_) => problem(NESTED),
        }
    }
}

struct Writer;

macro_rules! simple {
    ($($method:ident $type:ty),* $(,)?) => {$(
        fn $method(self, value: $type) -> Result<Written, CommandError> {
            Ok(Written::simple(value))
        }
    )*};
}

impl Serializer for Writer {
    type Ok = Written;
    type Error = CommandError;
    type SerializeSeq = Sequence;
    type SerializeTuple = Sequence;
    type SerializeTupleStruct = Impossible<Written, CommandError>;
    type SerializeTupleVariant = Impossible<Written, CommandError>;
    type SerializeMap = Flat;
    type SerializeStruct = Flat;
    type SerializeStructVariant = Impossible<Written, CommandError>;

    simple! {
        serialize_i8 i8,
        serialize_i16 i16,
        serialize_i32 i32,
        serialize_i64 i64,
        serialize_i128 i128,
        serialize_u16 u16,
        serialize_u32 u32,
        serialize_u64 u64,
        serialize_u128 u128,
        serialize_f32 f32,
        serialize_f64 f64,
        serialize_str &str,
        serialize_bytes &[u8],
    }

    fn serialize_u8(self, value: u8) -> Result<Written, CommandError> {
        Ok(Written::Byte(value))
    }

    fn serialize_bool(self, value: bool) -> Result<Written, CommandError> {
        Ok(Written::simple(u8::from(value)))
    }

    fn serialize_char(self, value: char) -> Result<Written, CommandError> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_none(self) -> Result<Written, CommandError> {
        Ok(Written::Nothing)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Written, CommandError> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<Written, CommandError> {
        Ok(Written::Nothing)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Written, CommandError> {
        Ok(Written::Nothing)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<Written, CommandError> {
        Ok(Written::simple(variant))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<Written, CommandError> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<Written, CommandError> {
        problem(VARIANT)
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Sequence, CommandError> {
        Ok(Sequence(Vec::new()))
    }

    fn serialize_tuple(self, _: usize) -> Result<Sequence, CommandError> {
        Ok(Sequence(Vec::new()))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self::SerializeTupleStruct, CommandError> {
        problem(SEQUENCE)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, CommandError> {
        problem(VARIANT)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Flat, CommandError> {
        Ok(Flat::default())
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Flat, CommandError> {
        Ok(Flat::default())
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, CommandError> {
        problem(VARIANT)
    }
}

const NESTED: &str = "it has fields of its own, and hashes are flat; store it as JSON or in a hash of its own";
const VARIANT: &str = "it is a variant with fields, and hashes are flat; store it as JSON";
const SEQUENCE: &str = "it is a sequence, and hashes are flat; store it as JSON or in a list";

/// Serializes bytes, because serde serializes `Vec<u8>` as a sequence. Other sequences are errors.
struct Sequence(Vec<u8>);

impl SerializeSeq for Sequence {
    type Ok = Written;
    type Error = CommandError;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CommandError> {
        match value.serialize(Writer)? {
            Written::Byte(byte) => self.0.push(byte),
            _ => return problem(SEQUENCE),
        }
        Ok(())
    }

    fn end(self) -> Result<Written, CommandError> {
        Ok(Written::Simple(self.0))
    }
}

impl SerializeTuple for Sequence {
    type Ok = Written;
    type Error = CommandError;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CommandError> {
        SerializeSeq::serialize_element(self, value)
    }

    fn end(self) -> Result<Written, CommandError> {
        SerializeSeq::end(self)
    }
}

/// Serializes fields with simple values.
#[derive(Default)]
struct Flat {
    fields: Fields,
    /// The key of the next value.
    key: Vec<u8>,
}

impl Flat {
    fn add(&mut self, name: Cow<'static, [u8]>, value: &(impl Serialize + ?Sized)) -> Result<(), CommandError> {
        let value = value.serialize(Writer).and_then(Written::into_value).map_err(|error| match error {
            CommandError::Fields { field, problem } => {
                let within = field.map_or_else(String::new, |field| format!(".{field}"));
                CommandError::Fields { field: Some(format!("{}{within}", shown(&name)).into()), problem }
            }
            other => other,
        })?;
        self.fields.0.extend(value.map(|value| (name, value)));
        Ok(())
    }
}

impl SerializeStruct for Flat {
    type Ok = Written;
    type Error = CommandError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), CommandError> {
        self.add(Cow::Borrowed(name.as_bytes()), value)
    }

    fn end(self) -> Result<Written, CommandError> {
        Ok(Written::Fields(self.fields))
    }
}

impl SerializeMap for Flat {
    type Ok = Written;
    type Error = CommandError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), CommandError> {
        let Ok(Some(key)) = key.serialize(Writer)?.into_value() else {
            return problem("a key of the map is not a string or number");
        };
        self.key = key;
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CommandError> {
        let key = std::mem::take(&mut self.key);
        self.add(Cow::Owned(key), value)
    }

    fn end(self) -> Result<Written, CommandError> {
        Ok(Written::Fields(self.fields))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Serialize)]
    struct Boat<T> {
        name: &'static str,
        more: T,
    }

    #[derive(Serialize)]
    enum Kind {
        #[serde(rename = "two masts")]
        Ketch,
        Other(u8),
        Named {
            name: u8,
        },
    }

    #[derive(Serialize)]
    struct Unit;

    #[derive(Serialize)]
    struct Pair(u8, u8);

    /// Returns the field after the name.
    fn more<T: Serialize>(more: T) -> Result<Option<String>, String> {
        let fields = Fields::of(&Boat { name: "Tern", more }).map_err(|error| error.to_string())?;
        let mut fields = fields.into_iter().map(|(name, value)| {
            (String::from_utf8_lossy(&name).into_owned(), String::from_utf8_lossy(&value).into_owned())
        });
        assert_eq!(fields.next(), Some(("name".into(), "Tern".into())));
        Ok(fields.next().map(|(name, value)| {
            assert_eq!(name, "more");
            value
        }))
    }

    #[track_caller]
    fn is<T: Serialize>(value: T, expected: &str) {
        assert_eq!(more(value), Ok(Some(expected.to_owned())));
    }

    #[test]
    fn simple_values_are_serialized() {
        is(7_u8, "7");
        is(u64::MAX, "18446744073709551615");
        is(i128::MIN, "-170141183460469231731687303715884105728");
        is(0.1_f32, "0.1");
        is(1e21, "1000000000000000000000");
        is(true, "1");
        is('ß', "ß");
        is("text", "text");
        is(Some("text"), "text");
        is(b"abc", "abc");
        is(b"abc".to_vec(), "abc");
        is("", "");
        is(Vec::<u8>::new(), "");
        is(Kind::Ketch, "two masts");
        is(std::num::Wrapping(5_u8), "5");
        assert_eq!((more(None::<u8>), more(()), more(Unit)), (Ok(None), Ok(None), Ok(None)));
    }

    #[test]
    fn nested_values_are_errors_that_name_the_field() {
        fn rejected<T: Serialize>(value: T) -> String {
            more(value).expect_err("a nested value")
        }
        let inner = || Boat { name: "Inner", more: 1 };
        let expected = format!("`more` cannot be written as a field of a hash: {NESTED}");
        assert_eq!(rejected(inner()), expected);
        assert_eq!(rejected(Some(inner())), expected);
        assert_eq!(rejected(BTreeMap::from([("a", 1)])), expected);
        let expected = format!("`more` cannot be written as a field of a hash: {SEQUENCE}");
        for said in [
            rejected(vec![1_u16]),
            rejected(["a"]),
            rejected((1_u8, "a")),
            rejected(vec![inner()]),
            rejected(Pair(1, 2)),
        ] {
            assert_eq!(said, expected);
        }
        let expected = format!("`more.more` cannot be written as a field of a hash: {SEQUENCE}");
        assert_eq!(rejected(Boat { name: "Inner", more: [1_i8] }), expected);
        let expected = format!("`more` cannot be written as a field of a hash: {VARIANT}");
        assert_eq!([rejected(Kind::Other(1)), rejected(Kind::Named { name: 1 })], [expected.clone(), expected]);
    }

    #[test]
    fn only_structs_and_maps_have_fields() {
        let written = Fields::of(&BTreeMap::from([(1, "a"), (2, "b")])).map(|fields| fields.into_iter().collect());
        let expected: Vec<Field> = vec![(b"1".into(), b"a".into()), (b"2".into(), b"b".into())];
        assert_eq!(written, Ok(expected));
        assert_eq!(Fields::of(&Some(Boat { name: "Tern", more: 1 })).map(|fields| fields.len()), Ok(2));
        let said = |error: Result<Fields, CommandError>| error.map_err(|error| error.to_string());
        let problem = "it is not a struct or map; use its value as an argument instead";
        let expected = Err(format!("the value cannot be written as a field of a hash: {problem}"));
        assert_eq!(said(Fields::of("text")), expected);
        assert_eq!(said(Fields::of(&None::<Boat<u8>>)), expected);
        let problem = "a key of the map is not a string or number";
        let expected = Err(format!("the value cannot be written as a field of a hash: {problem}"));
        assert_eq!(said(Fields::of(&BTreeMap::from([(None::<u8>, 1)]))), expected);
    }

    #[test]
    fn debug_does_not_show_values() {
        let fields = Fields::of(&BTreeMap::from([("password", "hunter2")]));
        assert_eq!(format!("{fields:?}"), "Ok([\"password\"])");
    }
}
