//! The table of all operations.
//!
//! To add an operation, add a line here and a function in the file of its family.

use std::ops::Deref;
use std::sync::LazyLock;

use super::{Call, HandlerResult, auth, explain, server, store_admin, store_reads, store_writes, subscribe};
use crate::auth::Tier;

/// An operation of the wire protocol.
#[derive(Debug)]
pub(crate) struct Operation {
    /// The `type` of a request.
    pub(crate) name: &'static str,
    /// The required tier; `None` for operations that need no login.
    pub(crate) tier: Option<Tier>,
    pub(crate) effect: Effect,
    pub(crate) scope: Scope,
    /// The capabilities of the server that it needs.
    pub(crate) needs: Capabilities,
    /// Checks the parameters and the permission, and runs the operation; `None` if it is not implemented.
    pub(super) handler: Option<Handler>,
    /// The first sentence of its documentation.
    #[cfg_attr(not(test), expect(dead_code, reason = "compared with the manual by a test"))]
    pub(crate) summary: &'static str,
}

impl Operation {
    /// Returns whether it changes the login or the subscriptions of a connection. A connection runs these one at a time, because a
    /// login reviews the subscriptions and must not miss one that is being opened.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.scope == Scope::Connection || self.is_subscribe()
    }

    /// Returns whether it is implemented.
    pub(crate) fn is_implemented(&self) -> bool {
        self.handler.is_some()
    }

    /// Returns whether pushes caused by it may be ready before its reply.
    pub(crate) fn causes_pushes(&self) -> bool {
        self.effect == Effect::Write || self.is_subscribe()
    }

    fn is_subscribe(&self) -> bool {
        self.name == OperationId::subscribe().name
    }
}

/// Runs an operation.
pub(super) type Handler = fn(&Call<'_>) -> HandlerResult;

/// Whether an operation changes the store. Writes of a connection may be in flight together; any other request waits for the
/// requests before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Read,
    Write,
}

/// The kind of target against which permissions are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Rows of one bucket. A row filter restricts them.
    Rows,
    /// A whole bucket, or a definition that all its readers share. A session with a row filter may not use it.
    Bucket,
    /// The buckets of the steps of a transaction.
    Steps,
    /// A query, and the bucket that it reads.
    Query,
    /// The names of buckets and queries.
    Catalog,
    /// The server as a whole. A session with a row filter may not use it.
    Server,
    /// A topic, fact or pattern of the rule engine.
    Topic,
    /// The connection itself: no permission is needed.
    Connection,
}

impl Scope {
    /// Returns whether an operation affects all rows, so that a session with a row filter may not use it.
    pub(crate) fn affects_all_rows(self) -> bool {
        matches!(self, Self::Bucket | Self::Server)
    }

    /// Returns whether an operation names a bucket.
    pub(crate) fn names_bucket(self) -> bool {
        matches!(self, Self::Rows | Self::Bucket | Self::Steps | Self::Query)
    }
}

/// Optional parts of a server, as a bit set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Capabilities(u8);

impl Capabilities {
    pub(crate) const AUTH: Self = Self(1);
    pub(crate) const RULES: Self = Self(2);
    pub(crate) const AUDIT: Self = Self(4);
    pub(crate) const PROCEDURES: Self = Self(8);
    pub(crate) const BACKUP: Self = Self(16);
    const NONE: Self = Self(0);

    pub(crate) const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Returns a suggestion such as `; did you mean "store.get"?` for a misspelled name, or an empty string if no name is similar.
///
/// `name` must be short, because the edit distance takes quadratic time.
pub(crate) fn suggestion<'a>(name: &str, operations: impl Iterator<Item = &'a Operation>) -> String {
    let distance = |known: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &known.to_lowercase());
    let distances = operations.map(|operation| (distance(operation.name), operation.name));
    match distances.min_by_key(|(distance, _)| *distance) {
        Some((distance, known)) if distance <= known.len() / 3 => format!("; did you mean \"{known}\"?"),
        _ => String::new(),
    }
}

/// An operation, by its index in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId(u8);

impl OperationId {
    /// Returns the operation `store.subscribe`. Its permission is also required for existing subscriptions after a login.
    pub(crate) fn subscribe() -> Self {
        static SUBSCRIBE: LazyLock<OperationId> =
            LazyLock::new(|| OperationId::named("store.subscribe").expect("it is in the table"));
        *SUBSCRIBE
    }

    /// Returns the operation `store.get`. Its permission also decides which records a write may refer to.
    pub(crate) fn get() -> Self {
        static GET: LazyLock<OperationId> =
            LazyLock::new(|| OperationId::named("store.get").expect("it is in the table"));
        *GET
    }

    /// Returns the operation with this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        /// A hash table with linear probing.
        static BY_HASH: LazyLock<Box<[Option<OperationId>; HASH_SLOTS]>> = LazyLock::new(|| {
            let mut slots = Box::new([None; HASH_SLOTS]);
            for operation in OperationId::all() {
                let mut slot = hash(operation.name);
                while slots[slot].is_some() {
                    slot = (slot + 1) % HASH_SLOTS;
                }
                slots[slot] = Some(operation);
            }
            slots
        });
        let mut slot = hash(name);
        loop {
            let operation = BY_HASH[slot]?;
            if operation.name == name {
                return Some(operation);
            }
            slot = (slot + 1) % HASH_SLOTS;
        }
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self).take(OPERATIONS.len())
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Size of the hash table of names: about seven times the number of operations, so that collisions are rare.
const HASH_SLOTS: usize = 512;

/// Returns the slot of a name: a fast FNV hash. It need not resist attacks, because the names in the table are fixed.
fn hash(name: &str) -> usize {
    let hash = name.bytes().fold(0xcbf2_9ce4_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash ^ hash >> 16) as usize % HASH_SLOTS
}

impl Deref for OperationId {
    type Target = Operation;

    fn deref(&self) -> &Operation {
        &OPERATIONS[self.index()]
    }
}

macro_rules! operations {
    ($($name:literal $tier:ident $effect:ident $scope:ident [$($needs:ident)?] $($handler:ident)?$(::$function:ident)? $summary:literal;)*) => {
        &[$(Operation {
            name: $name,
            tier: operations!(@tier $tier),
            effect: Effect::$effect,
            scope: Scope::$scope,
            needs: operations!(@needs $($needs)?),
            handler: operations!(@handler $($handler)?$(::$function)?),
            summary: $summary,
        }),*]
    };
    (@tier Open) => { None };
    (@tier $tier:ident) => { Some(Tier::$tier) };
    (@needs) => { Capabilities::NONE };
    (@needs $needs:ident) => { Capabilities::$needs };
    (@handler) => { None };
    (@handler $module:ident::$function:ident) => { Some($module::$function) };
}

/// Every operation, in the order of the manual.
pub(crate) static OPERATIONS: &[Operation] = operations! {
    // name                   tier  effect scope      needs        handler                     documentation
    "store.get"               Read  Read   Rows       []           store_reads::get            "Returns the record with a key, or null.";
    "store.all"               Read  Read   Rows       []           store_reads::all            "Returns all records of a bucket, in insertion order.";
    "store.where"             Read  Read   Rows       []           store_reads::find           "Returns the records that match a filter.";
    "store.findOne"           Read  Read   Rows       []           store_reads::find_one       "Returns the first record that matches a filter, or null.";
    "store.count"             Read  Read   Rows       []           store_reads::count          "Counts the records that match a filter.";
    "store.first"             Read  Read   Rows       []           store_reads::first          "Returns the first n records.";
    "store.last"              Read  Read   Rows       []           store_reads::last           "Returns the last n records, in ascending order.";
    "store.paginate"          Read  Read   Rows       []           store_reads::paginate       "Returns one page of records and the cursor of the next.";
    "store.sum"               Read  Read   Rows       []           store_reads::sum            "Adds up the numbers in a field.";
    "store.avg"               Read  Read   Rows       []           store_reads::avg            "Averages the numbers in a field.";
    "store.min"               Read  Read   Rows       []           store_reads::min            "Returns the smallest number in a field, or null.";
    "store.max"               Read  Read   Rows       []           store_reads::max            "Returns the largest number in a field, or null.";
    "store.query"             Read  Read   Rows       []           store_reads::query          "Runs a query.";
    "store.insert"            Write Write  Rows       []           store_writes::insert        "Inserts a record, or replaces the one with its key.";
    "store.insertMany"        Write Write  Rows       []           store_writes::insert_many   "Inserts several records, all or none.";
    "store.update"            Write Write  Rows       []           store_writes::update        "Merges fields into a record.";
    "store.upsert"            Write Write  Rows       []           store_writes::upsert        "Updates the record with the same key, or inserts it.";
    "store.delete"            Write Write  Rows       []           store_writes::delete        "Deletes a record.";
    "store.clear"             Write Write  Rows       []           store_writes::clear         "Deletes all records of a bucket.";
    "store.transaction"       Write Write  Steps      []           store_writes::transaction   "Runs several operations, all or none.";
    "store.subscribe"         Read  Read   Query      []           subscribe::subscribe        "Returns the result of a query and pushes its changes.";
    "store.unsubscribe"       Read  Read   Connection []           subscribe::unsubscribe      "Ends a subscription of this connection.";
    "store.defineBucket"      Admin Write  Bucket     []           store_admin::define_bucket  "Defines a bucket.";
    "store.updateBucket"      Admin Write  Bucket     []           store_admin::update_bucket  "Adds fields and indexes to a bucket, or changes its ttl.";
    "store.dropBucket"        Admin Write  Bucket     []           store_admin::drop_bucket    "Drops a bucket with its records and queries.";
    "store.getBucketSchema"   Admin Read   Rows       []           store_admin::bucket_schema  "Returns the definition of a bucket.";
    "store.defineQuery"       Admin Write  Query      []           store_admin::define_query   "Defines a named query.";
    "store.undefineQuery"     Admin Write  Bucket     []           store_admin::undefine_query "Removes a named query and ends its subscriptions.";
    "store.listQueries"       Admin Read   Catalog    []           store_admin::list_queries   "Lists the named queries.";
    "store.buckets"           Read  Read   Catalog    []           store_admin::buckets        "Lists the buckets, in the order of definition.";
    "store.stats"             Read  Read   Server     []           store_admin::stats          "Returns the number of records, indexes, queries and subscriptions.";
    "server.stats"            Admin Read   Server     []           server::stats               "Returns the state of the server and of its store.";
    "server.connections"      Admin Read   Server     []           server::connections         "Lists the connections.";
    "server.revoke"           Admin Write  Server     [AUTH]       server::revoke              "Revokes a user: closes its connections and rejects its logins.";
    "server.backup"           Admin Read   Server     [BACKUP]     server::backup              "Copies the data into a new directory under backupDir.";
    "auth.login"              Open  Read   Connection [AUTH]       auth::login                 "Logs in with a token.";
    "auth.logout"             Open  Read   Connection [AUTH]       auth::logout                "Logs out.";
    "auth.whoami"             Open  Read   Connection [AUTH]       auth::whoami                "Returns the session of the connection.";
    "auth.explain"            Admin Read   Server     [AUTH]       explain::explain            "Explains whether a client may use an operation.";
    "rules.emit"              Write Write  Topic      [RULES]                                  "Emits an event.";
    "rules.setFact"           Write Write  Topic      [RULES]                                  "Sets a fact.";
    "rules.getFact"           Read  Read   Topic      [RULES]                                  "Returns the value of a fact, or null.";
    "rules.deleteFact"        Write Write  Topic      [RULES]                                  "Deletes a fact.";
    "rules.queryFacts"        Read  Read   Topic      [RULES]                                  "Returns the facts that match a pattern.";
    "rules.getAllFacts"       Read  Read   Topic      [RULES]                                  "Returns all facts.";
    "rules.subscribe"         Read  Read   Topic      [RULES]                                  "Pushes the events that match a pattern.";
    "rules.unsubscribe"       Read  Read   Topic      [RULES]                                  "Ends a subscription to events.";
    "rules.stats"             Read  Read   Topic      [RULES]                                  "Returns the state of the rule engine.";
    "rules.registerRule"      Admin Write  Topic      [RULES]                                  "Registers a rule.";
    "rules.unregisterRule"    Admin Write  Topic      [RULES]                                  "Removes a rule.";
    "rules.updateRule"        Admin Write  Topic      [RULES]                                  "Updates a rule.";
    "rules.enableRule"        Admin Write  Topic      [RULES]                                  "Enables a rule.";
    "rules.disableRule"       Admin Write  Topic      [RULES]                                  "Disables a rule.";
    "rules.getRule"           Admin Read   Topic      [RULES]                                  "Returns a rule.";
    "rules.getRules"          Admin Read   Topic      [RULES]                                  "Lists the rules.";
    "rules.validateRule"      Admin Read   Topic      [RULES]                                  "Checks a rule without registering it.";
    "audit.query"             Admin Read   Server     [AUDIT]                                  "Returns entries of the audit log.";
    "procedures.register"     Admin Write  Server     [PROCEDURES]                             "Registers a procedure.";
    "procedures.unregister"   Admin Write  Server     [PROCEDURES]                             "Removes a procedure.";
    "procedures.update"       Admin Write  Server     [PROCEDURES]                             "Updates a procedure.";
    "procedures.get"          Read  Read   Server     [PROCEDURES]                             "Returns a procedure.";
    "procedures.list"         Admin Read   Server     [PROCEDURES]                             "Lists the procedures.";
    "procedures.call"         Write Write  Server     [PROCEDURES]                             "Calls a procedure.";
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_found_by_name() {
        for operation in OperationId::all() {
            assert_eq!(OperationId::named(operation.name), Some(operation));
        }
        assert_eq!(OperationId::named("store.nothing"), None);
        assert!(OPERATIONS.len() < usize::from(u8::MAX) && OPERATIONS.len() < HASH_SLOTS / 4);
    }

    #[test]
    fn only_similar_names_are_suggested() {
        for (name, expected) in [
            ("store.gett", "; did you mean \"store.get\"?"),
            ("Store.Insert", "; did you mean \"store.insert\"?"),
            ("server.stat", "; did you mean \"server.stats\"?"),
            ("foo", ""),
            ("", ""),
            ("something.else", ""),
        ] {
            assert_eq!(suggestion(name, OPERATIONS.iter()), expected, "{name}");
        }
    }

    /// Returns the rows of the manual's tables of operations: name, other cells, tier.
    fn documented() -> Vec<(String, Vec<String>, String)> {
        let manual = include_str!("../../../../docs/reference/protocol.md");
        let rows = manual.lines().filter(|line| line.starts_with("| `") && line.contains('.'));
        let mut found = Vec::new();
        for row in rows {
            let cells: Vec<String> = row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
            for name in cells[0].split(", ").map(|name| name.trim_matches('`')) {
                if name.contains('.') && !name.contains(' ') && !name.starts_with('{') {
                    let tier = cells.last().cloned().unwrap_or_default();
                    found.push((name.to_owned(), cells[1..].to_vec(), tier));
                }
            }
        }
        found
    }

    #[test]
    fn manual_documents_every_implemented_operation() {
        let documented = documented();
        let served = OPERATIONS.iter().filter(|operation| operation.handler.is_some());
        for operation in served {
            let row = documented.iter().find(|(name, ..)| name == operation.name);
            let (_, cells, tier) = row.unwrap_or_else(|| panic!("the manual lacks {}", operation.name));
            let expected = operation.tier.map_or("none", Tier::name);
            assert_eq!(tier, expected, "the tier of {}", operation.name);
            assert!(
                cells.iter().any(|cell| cell.starts_with(operation.summary)),
                "the manual does not have the summary of {}: {:?}",
                operation.name,
                operation.summary
            );
        }
        for (name, ..) in &documented {
            let operation =
                OperationId::named(name).unwrap_or_else(|| panic!("the manual has the unknown operation {name}"));
            assert!(operation.handler.is_some(), "{name} is documented but not implemented");
        }
    }
}
