//! `tidewire`: reads its configuration, opens its data, and serves until it is told to end.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tidewire::Server;
use tidewire::config::{self, Config, ConfigErrors, DefinitionError, Engine};
use tidewire_store::{Cut, Durability, Recovery, Store, StoreOptions};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a program says that was not asked properly.
const USAGE: u8 = 2;
/// What a program says that was interrupted twice.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    let config = match Config::load(std::env::args_os(), |name| std::env::var_os(name)) {
        Ok(config) => config,
        Err(ConfigErrors::Asked(text)) => {
            // Whoever has read enough may have closed it.
            let _ = std::io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(errors) => {
            eprintln!("{}", errors.to_string().trim_end());
            return ExitCode::from(USAGE);
        }
    };
    if config.check {
        config.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        println!("the configuration is good");
        return ExitCode::SUCCESS;
    }
    start_logging();
    config.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    match run(&config) {
        Ok(()) => return ExitCode::SUCCESS,
        // It begins with a place, as what is wrong with a file does.
        Err(error) if error.is::<DefinitionError>() => eprintln!("{error}"),
        Err(error) => eprintln!("tidewire: {error:#}"),
    }
    ExitCode::FAILURE
}

/// For people on a terminal, and as JSON for programs. `RUST_LOG` says what is logged.
fn start_logging() {
    let asked = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|asked| !asked.is_empty());
    let filter = asked.map_or_else(|| Ok(EnvFilter::new("info")), |asked| EnvFilter::try_new(&asked));
    let (filter, wrong) = filter.map_or_else(|error| (EnvFilter::new("info"), Some(error)), |filter| (filter, None));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        log.init();
    } else {
        log.json().flatten_event(true).init();
    }
    if let Some(error) = wrong {
        tracing::warn!(%error, "RUST_LOG cannot be used, and everything from info on is logged");
    }
}

fn run(config: &Config) -> anyhow::Result<()> {
    let store = open(config)?;
    let ran = run_over(&store, config);
    // Also if it did not start: the next start has less to look through.
    let closed = store.close().context("the data could not be closed in order: it is looked through at the next start");
    ran.and(closed)
}

fn run_over(store: &Store, config: &Config) -> anyhow::Result<()> {
    for applied in config::apply(store, &config.buckets, &config.queries)? {
        tracing::info!(kind = %applied.kind, name = applied.name, outcome = ?applied.outcome, "a definition of the file");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")?;
    let served = runtime.block_on(serve(config, store.clone()));
    // What is left of connections goes before the data does.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

fn open(config: &Config) -> anyhow::Result<Store> {
    let mut options = StoreOptions::default();
    options.limits.max_result_bytes = config.server.max_result_bytes;
    match &config.engine {
        Engine::Embedded { dir, durability } => {
            options.embedded.durability = *durability;
            let opened =
                Store::open(dir, options).with_context(|| format!("cannot open the data in {}", dir.display()));
            let (store, recovery) = opened?;
            let Recovery { rows, commits, was_closed, cut, .. } = recovery;
            tracing::info!(dir = %dir.display(), rows, commits, was_closed, "the data is open");
            if let Some(Cut { file, offset, .. }) = cut {
                let file = file.display();
                tracing::warn!(%file, offset, "a write that a crash had cut short, and nobody was told of, is cut off");
            }
            Ok(store)
        }
        _ => Ok(Store::memory(options)),
    }
}

async fn serve(config: &Config, store: Store) -> anyhow::Result<()> {
    let listen = |kind| signal(kind).context("cannot listen to signals");
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let server = Server::start(store, config.server.clone()).await?;
    if let Err(error) = introduce(&server.url(), config) {
        // Whoever wanted to know has read the first line and left, or does not read at all.
        tracing::warn!(%error, url = server.url(), "the standard output is closed");
    }
    let mut told = async || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    told().await;
    tracing::info!(grace = ?config.shutdown_grace, connections = server.connection_count(), "stopping");
    tokio::select! {
        () = server.stop(config.shutdown_grace) => Ok(()),
        // Whoever asks twice does not want to wait.
        () = told() => std::process::exit(INTERRUPTED),
    }
}

/// The first line is for programs, the rest for people.
fn introduce(url: &str, config: &Config) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{url}")?;
    match &config.engine {
        Engine::Embedded { dir, durability } => {
            writeln!(out, "The data is in {} ({}).", dir.display(), promise(*durability))?;
        }
        _ => writeln!(out, "The data is in memory, and gone when this ends.")?,
    }
    if config.server.auth.is_none() {
        writeln!(out, "Auth is off: whoever can reach this address may do everything.")?;
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

/// What a reply to a write stands for.
fn promise(durability: Durability) -> String {
    match durability {
        Durability::Always => "a write is on the disk when it is answered".to_owned(),
        Durability::Interval(interval) => format!("a crash may cost the last {} ms", interval.as_millis()),
        _ => "a crash may cost what the system has not written".to_owned(),
    }
}
