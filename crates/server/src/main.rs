//! The `tidewire` binary: parses the command line, loads the configuration and runs one command (serve, check, backup, restore,
//! revoke).

mod descriptors;
mod offline;
mod remote;

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tidewire::Server;
use tidewire::config::{self, Command, Config, ConfigErrors, DefinitionError, Engine};
use tidewire_store::engine::{Durability, EmbeddedOptions, Recovery, TornTail};
use tidewire_store::system::SystemBuckets;
use tidewire_store::{Limits, Store, StoreOptions};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code for invalid arguments or settings.
const EXIT_USAGE: u8 = 2;
/// Exit code after a second stop signal: 128 + SIGINT, as in shells.
const EXIT_INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    let command = match Command::load(std::env::args_os(), |name| std::env::var_os(name)) {
        Ok(command) => command,
        Err(ConfigErrors::Help(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Err(errors) => {
            eprintln!("{}", errors.to_string().trim_end());
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let result = match command {
        Command::Serve(mut config) => {
            start_logging();
            descriptors::limit_connections(&mut config);
            config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            run(&config)
        }
        Command::Check(mut config) => {
            descriptors::limit_connections(&mut config);
            config.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
            print(&format!("the configuration is valid\n\n{}", config.access_report()));
            Ok(())
        }
        Command::CheckAccess(explanation) => {
            print(&explanation.to_string());
            return if explanation.is_allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        Command::Backup { data_dir, to } => offline::backup(&data_dir, &to).map(|summary| print(&summary)),
        Command::Restore { from, data_dir } => offline::restore(&from, &data_dir).map(|summary| print(&summary)),
        Command::Revoke(command) => remote::revoke(&command).map(|summary| print(&summary)),
        command => Err(anyhow::anyhow!("unsupported command: {command:?}")),
    };
    match result {
        Ok(()) => return ExitCode::SUCCESS,
        // The message already starts with a file location, like configuration errors.
        Err(error) if error.is::<DefinitionError>() => eprintln!("{error}"),
        Err(error) => eprintln!("tidewire: {error:#}"),
    }
    ExitCode::FAILURE
}

/// Writes to standard output. A failed write is reported on standard error but does not change the exit code, because the command
/// itself succeeded.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        eprintln!("tidewire: cannot write to standard output: {error}");
    }
}

/// Logs to standard error: as text on a terminal, otherwise as JSON lines. `RUST_LOG` sets the level; the default is `info`.
fn start_logging() {
    let filter = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|filter| !filter.is_empty());
    let filter = filter.map_or_else(|| Ok(EnvFilter::new("info")), |filter| EnvFilter::try_new(&filter));
    let (filter, invalid) = filter.map_or_else(|error| (EnvFilter::new("info"), Some(error)), |filter| (filter, None));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        log.init();
    } else {
        log.json().flatten_event(true).init();
    }
    if let Some(error) = invalid {
        tracing::warn!(%error, "invalid RUST_LOG, using info");
    }
}

fn run(config: &Config) -> anyhow::Result<()> {
    let store = open(config)?;
    let served = serve_store(&store, config);
    // The store is closed after a failed start as well, so that the next recovery is short.
    let closed = store.close().context("cannot close the data directory; the next start recovers it");
    served.and(closed)
}

fn serve_store(store: &Store, config: &Config) -> anyhow::Result<()> {
    for applied in config::apply(store, &config.buckets, &config.queries)? {
        tracing::info!(kind = %applied.kind, name = applied.name, outcome = ?applied.outcome, "definition applied");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")?;
    let served = runtime.block_on(serve(config, store.clone()));
    // Connection tasks may still use the store. They must end before it is closed.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

fn open(config: &Config) -> anyhow::Result<Store> {
    let options = store_options(config)?;
    let Engine::Embedded { dir, .. } = &config.engine else { return Ok(Store::memory(options)) };
    let opened = Store::open(dir, options);
    let (store, recovery) = opened.with_context(|| format!("cannot open the data directory {}", dir.display()))?;
    log_recovery(dir, &recovery);
    Ok(store)
}

fn store_options(config: &Config) -> anyhow::Result<StoreOptions> {
    /// Upper bound of the size of a segment's headers.
    const SEGMENT_OVERHEAD_BYTES: usize = 64 << 10;

    let limits = Limits::default()
        .max_record_bytes(config.max_record_bytes)
        .max_store_bytes(config.max_store_bytes)
        .max_result_bytes(config.server.max_result_bytes);
    let mut embedded = EmbeddedOptions::default();
    if let Engine::Embedded { durability, .. } = config.engine {
        embedded = embedded.durability(durability);
    }
    // A commit may fill half of a commit group, so with four times the record limit it can contain two of the largest records. A group must
    // fit in a segment.
    let group_bytes = config.max_record_bytes.saturating_mul(4).max(embedded.max_group_bytes);
    let segment_bytes = embedded.segment_bytes.max(group_bytes.saturating_add(SEGMENT_OVERHEAD_BYTES) as u64);
    let embedded = embedded.max_group_bytes(group_bytes).segment_bytes(segment_bytes);
    let mut system_buckets = SystemBuckets::default();
    // The only system bucket stores revoked users, so it is needed only with auth.
    if config.server.auth.is_some() {
        system_buckets =
            Server::declare_buckets(system_buckets).context("cannot declare the system buckets of the server")?;
    }
    Ok(StoreOptions::default().limits(limits).embedded(embedded).system_buckets(system_buckets))
}

fn log_recovery(dir: &Path, recovery: &Recovery) {
    let Recovery { position, is_new_epoch, was_closed, rows, commits, torn_tail, .. } = recovery;
    tracing::info!(
        dir = %dir.display(), %position, is_new_epoch, was_closed, snapshot_rows = rows, log_commits = commits,
        "data directory opened"
    );
    if let Some(TornTail { file, offset, .. }) = torn_tail {
        let file = file.display();
        tracing::warn!(%file, offset, "truncated an incomplete record at the end of the log");
    }
}

async fn serve(config: &Config, store: Store) -> anyhow::Result<()> {
    let listen = |kind| signal(kind).context("cannot install signal handlers");
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut hangup = listen(SignalKind::hangup())?;
    let server = Server::start(store, config.server.clone()).await?;
    if let Some(address) = server.admin_address() {
        tracing::info!(%address, "admin listener started");
    }
    let url = server.url();
    if let Err(error) = greet(&url, config) {
        // Not fatal: a parent process may close the pipe after the first line.
        tracing::warn!(%error, url, "cannot write to standard output");
    }
    let mut stop_signal = async || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    loop {
        tokio::select! {
            () = stop_signal() => break,
            _ = hangup.recv() => reload(&server, config),
        }
    }
    let grace_ms = u64::try_from(config.shutdown_grace.as_millis()).unwrap_or(u64::MAX);
    tracing::info!(grace_ms, connections = server.connection_count(), "shutting down");
    tokio::select! {
        () = server.stop(config.shutdown_grace) => Ok(()),
        // A second signal skips the grace period.
        () = stop_signal() => std::process::exit(EXIT_INTERRUPTED),
    }
}

/// Reloads the configuration: applies its tokens, keys and certificates, and logs the changed settings that need a restart. If the
/// configuration is invalid, nothing changes.
///
/// Reads files on the main thread, which serves no connections.
fn reload(server: &Server, config: &Config) {
    const FAILED: &str = "reload failed, keeping the previous configuration";
    let newer = match Command::load(std::env::args_os(), |name| std::env::var_os(name)) {
        Ok(Command::Serve(newer)) => newer,
        Ok(command) => return tracing::error!(?command, "{FAILED}"),
        Err(ConfigErrors::Settings(errors)) => {
            return errors.iter().for_each(|error| tracing::error!(%error, "{FAILED}"));
        }
        Err(error) => return tracing::error!(%error, "{FAILED}"),
    };
    newer.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    for key in config.restart_keys(&newer) {
        tracing::warn!(key, "setting changed, restart the server to apply it");
    }
    match server.reload(&newer.server) {
        Ok(closed) => tracing::info!(closed_connections = closed, "tokens and certificate reloaded"),
        Err(error) => tracing::error!(error = &error as &dyn std::error::Error, "{FAILED}"),
    }
}

/// Prints the URL on a line of its own, for programs, followed by a short introduction for users.
fn greet(url: &str, config: &Config) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{url}")?;
    match &config.engine {
        Engine::Embedded { dir, durability } => {
            writeln!(out, "Data directory: {} ({}).", dir.display(), guarantee(*durability))?;
        }
        _ => writeln!(out, "The data is in memory only and is lost on exit.")?,
    }
    if config.server.auth.is_none() {
        writeln!(out, "Auth is off: every client has full access.")?;
    }
    writeln!(out, "Connect, for example with `npx wscat -c {url}`, and paste:")?;
    if config.server.auth.as_ref().is_some_and(|auth| auth.required) {
        writeln!(out, r#"  {{"id":0,"type":"auth.login","token":"YOUR TOKEN"}}"#)?;
    }
    writeln!(
        out,
        r#"  {{"id":1,"type":"store.defineBucket","name":"notes","config":{{"key":"id","schema":{{"id":{{"type":"string","generated":"uuid"}}}}}}}}"#
    )?;
    writeln!(out, r#"  {{"id":2,"type":"store.insert","bucket":"notes","data":{{"text":"high tide at noon"}}}}"#)?;
    out.flush()
}

/// Describes what survives a crash of the machine.
fn guarantee(durability: Durability) -> String {
    match durability {
        Durability::Always => "acknowledged writes survive a crash".to_owned(),
        Durability::Interval(interval) => format!("a crash may lose the last {} ms", interval.as_millis()),
        _ => "a crash may lose recent writes".to_owned(),
    }
}
