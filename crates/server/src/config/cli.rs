//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value as Json};

const AFTER_HELP: &str = "\
Flags take precedence over environment variables, and these over the configuration file. Every flag has an environment variable, \
for example TIDEWIRE_DATA_DIR for --data-dir; the variables of switches are true or false (1 or 0). The configuration file has more \
settings than there are flags, and can also define buckets, queries, tokens and permissions.

Examples:
  tidewire                                  serve ws://127.0.0.1:8080/, data in ./data
  tidewire --port 0 --engine memory         serve on a free port, data in memory only
  tidewire --config tidewire.json --check   check a configuration file, and print the access of clients
  TIDEWIRE_PORT=9000 tidewire -c app.toml -H 0.0.0.0
  tidewire check-access --help              explain why a client may or may not use an operation
  tidewire backup /backup/monday            copy the data of a stopped server
  TIDEWIRE_TOKEN=... tidewire revoke mara   close the connections of a user, and reject its logins";

const BACKUP_HELP: &str = "\
The server must not be running. To back up a running server, use the operation `server.backup`.

Example:
  tidewire backup /backup/monday --data-dir /var/lib/tidewire";

const RESTORE_HELP: &str = "\
The restored data has a new epoch: clients that reconnect receive snapshots instead of resuming from positions that the backup may \
not contain.

Example:
  tidewire restore /backup/monday --data-dir /var/lib/tidewire";

const REVOKE_HELP: &str = "\
Closes the connections of the user and rejects its logins for `revocationTtlMs`, even after a restart of the server. \
TIDEWIRE_TOKEN is the token of a user with the tier admin, and TIDEWIRE_URL the default of --url. If the system does not trust the \
certificate of the server, set SSL_CERT_FILE to a PEM file with its certificate authority.

Example:
  TIDEWIRE_TOKEN=$(cat /etc/tidewire/admin-token) tidewire revoke mara --url wss://tide.example/

Exit codes: 0 if the user is revoked, 1 if the server cannot be reached or returns an error, 2 for invalid arguments.";

const CHECK_ACCESS_HELP: &str = "\
Without --role, --user and --metadata, explains the access of a client that has not logged in. The exit code is 0 if the operation \
is allowed, 1 if it is denied, and 2 for invalid arguments or settings. For a user or connection of a running server, use the \
operation `auth.explain`.

Examples:
  tidewire check-access --config tidewire.json --role member --user ann store.insert boats
  tidewire check-access --config tidewire.json store.stats";

/// A realtime backend: buckets of JSON records, and live queries over WebSocket.
#[derive(Debug, Parser)]
#[command(name = "tidewire", version, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub(super) struct CommandLine {
    #[command(flatten)]
    pub(super) flags: Flags,
    #[command(subcommand)]
    pub(super) command: Option<Subcommands>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Subcommands {
    /// Run the server (the default command)
    #[command(after_help = AFTER_HELP)]
    Serve(Box<Flags>),
    /// Explain whether a client may use an operation
    #[command(after_help = CHECK_ACCESS_HELP)]
    CheckAccess(CheckAccessArgs),
    /// Copy the data directory of a stopped server
    #[command(after_help = BACKUP_HELP)]
    Backup {
        /// The directory to create; an existing directory must be empty
        #[arg(value_name = "DIR")]
        to: PathBuf,
        #[command(flatten)]
        storage: StorageFlags,
    },
    /// Create a data directory from a backup
    #[command(after_help = RESTORE_HELP)]
    Restore {
        /// The directory of the backup
        #[arg(value_name = "BACKUP")]
        from: PathBuf,
        #[command(flatten)]
        storage: StorageFlags,
    },
    /// Revoke a user on a running server: close its connections and reject its logins
    #[command(after_help = REVOKE_HELP)]
    Revoke {
        /// The id of the user
        #[arg(value_name = "USER", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        user_id: String,
        /// The reason, for the log of the server
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
        #[command(flatten)]
        remote: RemoteFlags,
    },
}

/// The flags of commands that connect to a running server.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct RemoteFlags {
    #[arg(long, value_name = "URL", help = "The URL of the server [default: ws://127.0.0.1:8080/]")]
    pub(super) url: Option<String>,
}

/// The arguments of `check-access`.
#[derive(Debug, Args)]
pub(super) struct CheckAccessArgs {
    /// The operation, such as store.get
    #[arg(value_name = "OPERATION")]
    pub(super) operation: String,
    /// The bucket, or the topic of a rules.* operation [default: a bucket that no rule names]
    #[arg(value_name = "BUCKET")]
    pub(super) bucket: Option<String>,
    /// The configuration file, .json or .toml
    #[arg(short, long, value_name = "FILE")]
    pub(super) config: Option<String>,
    /// A role of the session; can be repeated
    #[arg(long = "role", value_name = "ROLE")]
    pub(super) roles: Vec<String>,
    /// The user id of the session
    #[arg(long, value_name = "USER")]
    pub(super) user: Option<String>,
    /// The metadata of the session, a JSON object
    #[arg(long, value_name = "JSON", value_parser = metadata)]
    pub(super) metadata: Option<Map<String, Json>>,
}

fn metadata(text: &str) -> Result<Map<String, Json>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object, such as {{\"team\":\"red\"}}: {error}"))
}

/// The flags of commands that use the data directory.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct StorageFlags {
    /// The configuration file, .json or .toml
    #[arg(short, long, value_name = "FILE", help_heading = "Data")]
    pub(super) config: Option<String>,
    /// The data directory of the embedded engine [default: ./data]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(super) data_dir: Option<String>,
}

/// The flags of the server. Values are strings here; they are checked together with those of the environment and the file.
#[derive(Debug, Default, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(super) struct Flags {
    #[command(flatten)]
    pub(super) storage: StorageFlags,

    /// Check the settings, print all errors, or warnings and the access of clients, and exit
    #[arg(long, help_heading = "Running")]
    pub(super) check: bool,
    /// The name of the server in server.stats and store.stats [default: tidewire]
    #[arg(long, value_name = "NAME", help_heading = "Running")]
    pub(super) name: Option<String>,
    /// The grace period of a shutdown, in milliseconds [default: 5000]
    #[arg(long, value_name = "MS", help_heading = "Running", allow_negative_numbers = true)]
    pub(super) grace: Option<String>,
    /// Log requests that take at least this many milliseconds [default: 1000]
    #[arg(long, value_name = "MS", help_heading = "Running", allow_negative_numbers = true)]
    pub(super) slow_request_ms: Option<String>,

    /// The port; 0 picks a free port [default: 8080]
    #[arg(short, long, value_name = "PORT", help_heading = "Listening", allow_negative_numbers = true)]
    pub(super) port: Option<String>,
    /// The address to listen on; 0.0.0.0 for all interfaces [default: 127.0.0.1]
    #[arg(short = 'H', long, value_name = "ADDRESS", help_heading = "Listening")]
    pub(super) host: Option<String>,
    /// The path of the WebSocket endpoint [default: /]
    #[arg(long, value_name = "PATH", help_heading = "Listening")]
    pub(super) path: Option<String>,
    /// The certificate chain in PEM; requires --tls-key [default: no TLS]
    #[arg(long, value_name = "FILE", help_heading = "Listening")]
    pub(super) tls_cert: Option<String>,
    /// The private key of the certificate in PEM
    #[arg(long, value_name = "FILE", help_heading = "Listening")]
    pub(super) tls_key: Option<String>,

    /// The address of a separate listener for /metrics and the details of /health [default: none]
    #[arg(long, value_name = "ADDRESS:PORT", help_heading = "Listening")]
    pub(super) admin_listen: Option<String>,
    /// The proxies whose Forwarded and X-Forwarded-* headers are trusted: addresses or networks, separated by commas
    /// [default: none]
    #[arg(long, value_name = "NETWORKS", help_heading = "Listening")]
    pub(super) trusted_proxies: Option<String>,

    /// The storage engine: memory, or embedded with a data directory [default: embedded]
    #[arg(long, value_name = "ENGINE", help_heading = "Data")]
    pub(super) engine: Option<String>,
    /// When a write is acknowledged: always (after fsync), interval:MS or none [default: always]
    #[arg(long, value_name = "WHEN", help_heading = "Data")]
    pub(super) durability: Option<String>,
    /// The directory for backups of the running server [default: none]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(super) backup_dir: Option<String>,

    /// The maximum size of a client message, in bytes [default: 1048576]
    #[arg(long, value_name = "BYTES", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) max_payload_bytes: Option<String>,
    /// The maximum size of a record, in bytes [default: --max-payload-bytes, at least 1048576]
    #[arg(long, value_name = "BYTES", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) max_record_bytes: Option<String>,
    /// The memory limit of all connections, in bytes [default: a quarter of the memory]
    #[arg(long, value_name = "BYTES", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) memory_max_bytes: Option<String>,
    /// The memory limit of all records, in bytes [default: half of the memory]
    #[arg(long, value_name = "BYTES", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) memory_max_store_bytes: Option<String>,
    /// The maximum number of connections [default: 100000]
    #[arg(long, value_name = "N", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) max_connections: Option<String>,
    /// The maximum number of sockets from one IP address (for IPv6, from a /64) [default: no limit]
    #[arg(long, value_name = "N", help_heading = "Limits", allow_negative_numbers = true)]
    pub(super) max_connections_per_ip: Option<String>,

    /// Built-in users and passwords; not supported in this version
    #[arg(long, help_heading = "Access")]
    pub(super) auth: bool,
    /// The secret of the first administrator, with --auth
    #[arg(long, value_name = "SECRET", help_heading = "Access")]
    pub(super) admin_secret: Option<String>,
    /// The allowed origins of browser pages, separated by commas [default: any if clients must log in, otherwise localhost and
    /// the server's own host]
    #[arg(long, value_name = "ORIGINS", help_heading = "Access")]
    pub(super) allowed_origins: Option<String>,
    /// The host names under which browser pages may reach the server if no login is required, separated by commas
    /// [default: none]
    #[arg(long, value_name = "HOSTS", help_heading = "Access")]
    pub(super) allowed_hosts: Option<String>,
    /// Omit details from errors
    #[arg(long, help_heading = "Access")]
    pub(super) no_error_details: bool,

    /// Disable rules; not supported in this version
    #[arg(long, help_heading = "Features")]
    pub(super) no_rules: bool,
    /// Keep an audit log; not supported in this version
    #[arg(long, help_heading = "Features")]
    pub(super) audit: bool,
}
