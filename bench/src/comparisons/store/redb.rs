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
/// It takes rows faster than a table whose keys are pairs.
const GROUPS: MultimapTableDefinition<&str, u64> = MultimapTableDefinition::new("groups");

/// A database with its default cache of 1 GiB, which all rows fit into. Its readers do so many reads in a transaction: with one
/// they see what is stored by then, with more they are faster.
pub(super) struct Redb<const READS: u32>(Arc<Database>);

impl<const READS: u32> Peer for Redb<READS> {
    type Writer = Arc<Database>;
    type Reader = RedbReader<READS>;

    fn open(folder: &Path) -> Self {
        let database = Arc::new(Database::create(folder.join("rows.redb")).expect("redb opens"));
        // So that readers find the tables.
        Self::commit(&mut Arc::clone(&database), [].iter());
        Self(database)
    }

    fn writer(&self) -> Arc<Database> {
        Arc::clone(&self.0)
    }

    fn commit<'a>(database: &mut Arc<Database>, rows: impl Iterator<Item = &'a NewRow>) {
        let mut transaction = database.begin_write().expect("there is one writer");
        transaction.set_durability(Durability::Immediate).expect("no savepoint is in the way");
        {
            let mut table = transaction.open_table(ROWS).expect("a table of rows");
            let mut groups = transaction.open_multimap_table(GROUPS).expect("a table of groups");
            for NewRow { id, group, text } in rows {
                let before = table.insert(id, text.as_str()).expect("redb takes a row");
                assert!(before.is_none(), "the key {id} is new");
                groups.insert(group.as_str(), id).expect("redb takes a group");
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
    /// The table as one transaction sees it, and how many reads that one has left.
    current: Option<(ReadOnlyTable<u64, &'static str>, u32)>,
}

impl<const READS: u32> Reader for RedbReader<READS> {
    fn read(&mut self, id: u64) {
        let (table, left) = self.current.get_or_insert_with(|| {
            let transaction = self.database.begin_read().expect("redb lets read");
            (transaction.open_table(ROWS).expect("there is a table"), READS)
        });
        check(id, table.get(id).expect("redb reads").expect("the row is there").value());
        *left -= 1;
        if *left == 0 {
            self.current = None;
        }
    }

    fn count(&mut self) -> u64 {
        let transaction = self.database.begin_read().expect("redb lets read");
        let count = transaction.open_table(ROWS).expect("there is a table").len().expect("redb counts");
        let indexed = transaction.open_multimap_table(GROUPS).expect("there is a table").len().expect("redb counts");
        assert!(count == indexed, "every row is in the index");
        count
    }
}
