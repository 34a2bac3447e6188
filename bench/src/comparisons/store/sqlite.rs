//! `SQLite`: rows in a table with an index, written ahead.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, TransactionBehavior};

use super::contender::Reader;
use super::group::Peer;
use super::row::{NewRow, check};

/// A database file.
pub(super) struct Sqlite(PathBuf);

impl Sqlite {
    fn connect(&self) -> Connection {
        let connection = Connection::open(&self.0).expect("SQLite opens");
        // FULL waits for the disk at every commit. The cache of 256 MiB and the map of 1 GiB hold all rows; by default there are
        // 2 MiB and none. The log is written back when it has 64 MiB; by default at 4 MiB, which takes rows more slowly.
        let settings = "
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = FULL;
            PRAGMA cache_size = -262144;
            PRAGMA mmap_size = 1073741824;
            PRAGMA wal_autocheckpoint = 16384;
        ";
        connection.execute_batch(settings).expect("SQLite takes settings");
        connection
    }
}

impl Peer for Sqlite {
    type Writer = Connection;
    type Reader = SqliteReader;

    fn open(folder: &Path) -> Self {
        let this = Self(folder.join("rows.sqlite"));
        let tables = "
            CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, grp TEXT NOT NULL, json TEXT NOT NULL);
            CREATE INDEX IF NOT EXISTS groups ON rows (grp);
        ";
        this.connect().execute_batch(tables).expect("SQLite makes a table");
        this
    }

    fn writer(&self) -> Connection {
        self.connect()
    }

    fn commit<'a>(connection: &mut Connection, rows: impl Iterator<Item = &'a NewRow>) {
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("there is one writer");
        {
            let mut insert = transaction
                .prepare_cached("INSERT INTO rows (id, grp, json) VALUES (?1, ?2, ?3)")
                .expect("the statement is right");
            for NewRow { id, group, text } in rows {
                insert.execute((id.cast_signed(), group, text)).expect("SQLite takes a row");
            }
        }
        transaction.commit().expect("SQLite commits");
    }

    fn reader(&self) -> SqliteReader {
        SqliteReader(self.connect())
    }
}

/// A connection of its own, and a statement that is prepared once.
pub(super) struct SqliteReader(Connection);

impl Reader for SqliteReader {
    fn read(&mut self, id: u64) {
        let mut statement =
            self.0.prepare_cached("SELECT json FROM rows WHERE id = ?1").expect("the statement is right");
        let mut rows = statement.query([id.cast_signed()]).expect("SQLite reads");
        let row = rows.next().expect("SQLite reads").expect("the row is there");
        let text = row.get_ref(0).and_then(|value| Ok(value.as_str()?)).expect("it is text");
        check(id, text);
    }

    fn count(&mut self) -> u64 {
        let count = self.0.query_row("SELECT count(*) FROM rows", [], |row| row.get::<_, i64>(0));
        count.expect("SQLite counts").cast_unsigned()
    }
}
