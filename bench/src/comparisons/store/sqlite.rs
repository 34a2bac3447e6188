//! `SQLite` in WAL mode: rows in a table with an index.

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
        // FULL syncs the log at every commit. The cache of 256 MiB (default 2 MiB) and the memory map of 1 GiB (default none) hold all
        // rows. A checkpoint at 64 MiB of log instead of the default of 4 MiB makes inserts faster.
        let settings = "
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = FULL;
            PRAGMA cache_size = -262144;
            PRAGMA mmap_size = 1073741824;
            PRAGMA wal_autocheckpoint = 16384;
        ";
        connection.execute_batch(settings).expect("the pragmas are valid");
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
        this.connect().execute_batch(tables).expect("the table can be created");
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
                .expect("the statement is valid");
            for NewRow { id, group, text } in rows {
                insert.execute((id.cast_signed(), group, text)).expect("the row is inserted");
            }
        }
        transaction.commit().expect("SQLite commits");
    }

    fn reader(&self) -> SqliteReader {
        SqliteReader(self.connect())
    }
}

/// A connection with a cached prepared statement.
pub(super) struct SqliteReader(Connection);

impl Reader for SqliteReader {
    fn read(&mut self, id: u64) {
        let mut statement =
            self.0.prepare_cached("SELECT json FROM rows WHERE id = ?1").expect("the statement is valid");
        let mut rows = statement.query([id.cast_signed()]).expect("SQLite reads");
        let row = rows.next().expect("SQLite reads").expect("the row exists");
        let text = row.get_ref(0).and_then(|value| Ok(value.as_str()?)).expect("the column is text");
        check(id, text);
    }

    fn count(&mut self) -> u64 {
        let count = self.0.query_row("SELECT count(*) FROM rows", [], |row| row.get::<_, i64>(0));
        count.expect("SQLite counts").cast_unsigned()
    }
}
