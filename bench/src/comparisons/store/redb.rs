//! redb: rows in one table, the index in another.

use std::path::Path;
use std::sync::Arc;

use ::redb::{
    Database, Durability, MultimapTableDefinition, ReadOnlyTable, ReadableDatabase as _, ReadableTableMetadata as _,
    TableDefinition,
};

use super::contender::Reader;
use super::group::Peer;
use super::row::{NewRow, check};

const ROWS: TableDefinition<u64, &str> = TableDefinition::new("rows");
/// A multimap table, because inserting is faster than into a table whose keys are pairs.
const GROUPS: MultimapTableDefinition<&str, u64> = MultimapTableDefinition::new("groups");

/// A database with the default cache of 1 GiB, which all rows fit into. Readers do `READS` reads per transaction: with one they see
/// all committed rows, with more they are faster.
pub(super) struct Redb<const READS: u32>(Arc<Database>);

impl<const READS: u32> Peer for Redb<READS> {
    type Writer = Arc<Database>;
    type Reader = RedbReader<READS>;

    fn open(folder: &Path) -> Self {
        let database = Arc::new(Database::create(folder.join("rows.redb")).expect("redb opens"));
        // Creates the tables, so that readers can open them.
        Self::commit(&mut Arc::clone(&database), [].iter());
        Self(database)
    }

    fn writer(&self) -> Arc<Database> {
        Arc::clone(&self.0)
    }

    fn commit<'a>(database: &mut Arc<Database>, rows: impl Iterator<Item = &'a NewRow>) {
        let mut transaction = database.begin_write().expect("there is one writer");
        transaction.set_durability(Durability::Immediate).expect("there is no savepoint");
        {
            let mut table = transaction.open_table(ROWS).expect("the table of rows opens");
            let mut groups = transaction.open_multimap_table(GROUPS).expect("the table of groups opens");
            for NewRow { id, group, text } in rows {
                let before = table.insert(id, text.as_str()).expect("the row is inserted");
                assert!(before.is_none(), "the key {id} is new");
                groups.insert(group.as_str(), id).expect("the index entry is inserted");
            }
        }
        transaction.commit().expect("redb commits");
    }

    fn reader(&self) -> RedbReader<READS> {
        RedbReader { database: Arc::clone(&self.0), current: None }
    }
}

pub(super) struct RedbReader<const READS: u32> {
    database: Arc<Database>,
    /// The table in the current transaction, and the number of reads before the next transaction.
    current: Option<(ReadOnlyTable<u64, &'static str>, u32)>,
}

impl<const READS: u32> Reader for RedbReader<READS> {
    fn read(&mut self, id: u64) {
        let (table, left) = self.current.get_or_insert_with(|| {
            let transaction = self.database.begin_read().expect("a read transaction begins");
            (transaction.open_table(ROWS).expect("the table exists"), READS)
        });
        check(id, table.get(id).expect("redb reads").expect("the row exists").value());
        *left -= 1;
        if *left == 0 {
            self.current = None;
        }
    }

    fn count(&mut self) -> u64 {
        let transaction = self.database.begin_read().expect("a read transaction begins");
        let count = transaction.open_table(ROWS).expect("the table exists").len().expect("redb counts");
        let indexed = transaction.open_multimap_table(GROUPS).expect("the table exists").len().expect("redb counts");
        assert!(count == indexed, "every row is in the index");
        count
    }
}
