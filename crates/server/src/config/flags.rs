//! The command line.

use clap::{Args, Parser, Subcommand};

const AFTER_HELP: &str = "\
Flags win over the environment, and that wins over the file. Every flag has a variable: --data-dir is TIDEWIRE_DATA_DIR; \
those of switches are true or false (1 or 0). A file has more settings than there are flags, and may hold the application \
as well: buckets, queries, tokens and permissions.

Examples:
  tidewire                                  ws://127.0.0.1:8080/, data in ./data
  tidewire --port 0 --engine memory         a free port, and nothing is kept
  tidewire --config tidewire.json --check   say what is wrong with a file, and where
  TIDEWIRE_PORT=9000 tidewire -c app.toml -H 0.0.0.0";

/// A realtime backend: buckets of JSON records, and live queries over WebSocket.
#[derive(Debug, Parser)]
#[command(name = "tidewire", version, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub(super) struct CommandLine {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the server. This is what happens without a command, too.
    #[command(after_help = AFTER_HELP)]
    Serve(Flags),
}

impl CommandLine {
    pub(super) fn into_flags(self) -> Flags {
        match self.command {
            Some(Command::Serve(flags)) => flags,
            None => self.flags,
        }
    }
}

/// The flags of the server. Their values are texts here: they are checked together with those of the environment and the file.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(super) struct Flags {
    /// A file of settings, .json or .toml
    #[arg(short, long, value_name = "FILE", help_heading = "Running")]
    pub(super) config: Option<String>,
    /// Say all that is wrong with the settings, and where, and end
    #[arg(long, help_heading = "Running")]
    pub(super) check: bool,
    /// What the server calls itself [default: tidewire]
    #[arg(long, value_name = "NAME", help_heading = "Running")]
    pub(super) name: Option<String>,
    /// How long clients have to leave when the server is to end, in milliseconds [default: 5000]
    #[arg(long, value_name = "MS", help_heading = "Running", allow_negative_numbers = true)]
    pub(super) grace: Option<String>,

    /// The port; 0 picks a free one [default: 8080]
    #[arg(short, long, value_name = "PORT", help_heading = "Listening", allow_negative_numbers = true)]
    pub(super) port: Option<String>,
    /// The address; 0.0.0.0 for all of this machine [default: 127.0.0.1]
    #[arg(short = 'H', long, value_name = "ADDRESS", help_heading = "Listening")]
    pub(super) host: Option<String>,
    /// The path of the WebSocket [default: /]
    #[arg(long, value_name = "PATH", help_heading = "Listening")]
    pub(super) path: Option<String>,
    /// The certificate and those that lead to an authority, in PEM; needs --tls-key [default: no TLS]
    #[arg(long, value_name = "FILE", help_heading = "Listening")]
    pub(super) tls_cert: Option<String>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", help_heading = "Listening")]
    pub(super) tls_key: Option<String>,

    /// What keeps the data: memory, or embedded in a directory [default: embedded]
    #[arg(long, value_name = "ENGINE", help_heading = "Data")]
    pub(super) engine: Option<String>,
    /// The directory of the embedded engine [default: ./data]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(super) data_dir: Option<String>,
    /// When a write is answered: always (it is on the disk), interval:MS (it will be so much later) or none [default: always]
    #[arg(long, value_name = "WHEN", help_heading = "Data")]
    pub(super) durability: Option<String>,

    /// Built-in users and passwords; this version has none
    #[arg(long, help_heading = "Access")]
    pub(super) auth: bool,
    /// The secret of the first administrator, with --auth
    #[arg(long, value_name = "SECRET", help_heading = "Access")]
    pub(super) admin_secret: Option<String>,
    /// The origins that pages in browsers may have, with commas between them [default: any]
    #[arg(long, value_name = "ORIGINS", help_heading = "Access")]
    pub(super) allowed_origins: Option<String>,
    /// How many connections one address may have [default: any number]
    #[arg(long, value_name = "N", help_heading = "Access", allow_negative_numbers = true)]
    pub(super) max_connections_per_ip: Option<String>,
    /// Errors have no details
    #[arg(long, help_heading = "Access")]
    pub(super) no_error_details: bool,

    /// No rules; this version has none
    #[arg(long, help_heading = "Features")]
    pub(super) no_rules: bool,
    /// Keep a log of who changed what; this version keeps none
    #[arg(long, help_heading = "Features")]
    pub(super) audit: bool,
}
