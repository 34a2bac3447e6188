//! A real Redis or Valkey server for one test.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;

use tempfile::TempDir;

use crate::certificates::Certificates;
use crate::port::Port;
use crate::process::{Process, spawn_tied};
use crate::program::ServerProgram;
use crate::wait::{PATIENCE, wait_until};

/// The settings of a [`RedisServer`]. Made by [`RedisServer::options`].
#[derive(Debug, Clone)]
#[non_exhaustive]
#[must_use = "nothing runs before `start`"]
pub struct RedisOptions {
    /// The program of the server. Default: [`ServerProgram::from_env`], so that the same tests run with Redis and with Valkey.
    pub program: ServerProgram,
    /// The password of the default user. Default: none.
    pub password: Option<String>,
    /// ACL users and their rules, such as `on >secret ~* +@all`. Default: none.
    pub users: Vec<(String, String)>,
    /// Whether the server also listens for TLS, on [`RedisServer::tls_addr`]. A certificate of the client is optional; the config
    /// line `tls-auth-clients yes` requires it. The program must have been [built with TLS](RedisServer::supports_tls). Default:
    /// false.
    pub tls: bool,
    /// Lines of redis.conf, which override ours. Default: none.
    pub config: Vec<String>,
}

impl Default for RedisOptions {
    #[track_caller]
    fn default() -> Self {
        Self { program: ServerProgram::from_env(), password: None, users: Vec::new(), tls: false, config: Vec::new() }
    }
}

impl RedisOptions {
    /// Sets [`program`](#structfield.program).
    pub fn program(mut self, program: ServerProgram) -> Self {
        self.program = program;
        self
    }

    /// Sets [`password`](#structfield.password).
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Adds one of the [`users`](#structfield.users).
    pub fn user(mut self, name: impl Into<String>, rules: impl Into<String>) -> Self {
        self.users.push((name.into(), rules.into()));
        self
    }

    /// Sets [`tls`](#structfield.tls).
    pub fn tls(mut self, tls: bool) -> Self {
        self.tls = tls;
        self
    }

    /// Adds a line to [`config`](#structfield.config).
    pub fn config(mut self, line: impl Into<String>) -> Self {
        self.config.push(line.into());
        self
    }

    /// Starts the server. Returns when it answers.
    ///
    /// # Panics
    ///
    /// If the program is missing or does not start, with its output.
    #[track_caller]
    pub fn start(self) -> RedisServer {
        let dir = tempfile::Builder::new().prefix("tidewire-redis-").tempdir().expect("a temporary directory");
        let tls = self.tls.then(|| (Port::reserve(), Certificates::generate(dir.path())));
        let mut server = RedisServer {
            program: self.program.clone(),
            port: Port::reserve(),
            tls,
            password: self.password.clone(),
            dir,
            process: None,
        };
        fs::write(server.dir.path().join("redis.conf"), self.redis_conf(&server)).expect("redis.conf can be written");
        server.launch();
        server
    }

    fn redis_conf(&self, server: &RedisServer) -> String {
        let mut conf = format!(
            "bind 127.0.0.1\nport {port}\nunixsocket {socket}\ndir {dir}\ndaemonize no\nlogfile \"\"\nsave \"\"\n",
            port = server.port.number(),
            socket = quoted(&server.unix_socket().display().to_string()),
            dir = quoted(&server.dir.path().display().to_string()),
        );
        let mut line =
            |text: std::fmt::Arguments<'_>| writeln!(conf, "{text}").expect("writing to a string cannot fail");
        if let Some(password) = &self.password {
            line(format_args!("requirepass {}", quoted(password)));
        }
        for (name, rules) in &self.users {
            line(format_args!("user {name} {rules}"));
        }
        if let Some((port, certificates)) = &server.tls {
            line(format_args!("tls-port {}", port.number()));
            line(format_args!("tls-ca-cert-file {}", quoted(&certificates.authority.display().to_string())));
            line(format_args!("tls-cert-file {}", quoted(&certificates.server.display().to_string())));
            line(format_args!("tls-key-file {}", quoted(&certificates.server_key.display().to_string())));
            line(format_args!("tls-auth-clients optional"));
        }
        for own in &self.config {
            line(format_args!("{own}"));
        }
        conf
    }
}

/// A Redis or Valkey process with its own loopback ports, Unix socket and directory.
///
/// It runs redis-server, or the program that the environment variable `TIDEWIRE_TEST_SERVER` or [`RedisOptions::program`] chooses.
///
/// Ports, socket and directory stay the same through restarts. Nothing is saved to disk without a config line such as
/// `appendonly yes`.
#[derive(Debug)]
pub struct RedisServer {
    // Dropped first, before the directory it works in.
    process: Option<Process>,
    program: ServerProgram,
    port: Port,
    tls: Option<(Port, Certificates)>,
    password: Option<String>,
    dir: TempDir,
}

impl RedisServer {
    /// Starts a server without password, ACL or TLS.
    ///
    /// # Panics
    ///
    /// As [`ServerProgram::from_env`] and [`RedisOptions::start`].
    #[track_caller]
    pub fn start() -> Self {
        Self::options().start()
    }

    /// Returns the default options, to be changed and [started](RedisOptions::start).
    ///
    /// # Panics
    ///
    /// As [`ServerProgram::from_env`].
    #[track_caller]
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Returns whether the program of servers was built with TLS. A test of TLS uses Redis if it was not:
    ///
    /// ```
    /// use tidewire_testkit::{RedisServer, ServerProgram};
    ///
    /// let program = if RedisServer::supports_tls() { ServerProgram::from_env() } else { ServerProgram::Redis };
    /// let redis = RedisServer::options().program(program).tls(true).start();
    /// assert_ne!(redis.tls_addr(), redis.addr());
    /// ```
    ///
    /// # Panics
    ///
    /// As [`ServerProgram::from_env`] and [`ServerProgram::supports_tls`].
    #[track_caller]
    pub fn supports_tls() -> bool {
        ServerProgram::from_env().supports_tls()
    }

    /// Returns the address for plain TCP.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns the port of [`addr`](Self::addr).
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Returns the address for TLS.
    ///
    /// # Panics
    ///
    /// If it was started without [`RedisOptions::tls`].
    #[track_caller]
    pub fn tls_addr(&self) -> SocketAddr {
        self.tls().0.addr()
    }

    /// Returns the certificates for TLS, including one for a client.
    ///
    /// # Panics
    ///
    /// If it was started without [`RedisOptions::tls`].
    #[track_caller]
    pub fn certificates(&self) -> &Certificates {
        &self.tls().1
    }

    #[track_caller]
    fn tls(&self) -> &(Port, Certificates) {
        self.tls.as_ref().expect("the server was started without TLS: use RedisServer::options().tls(true)")
    }

    /// Returns the path of the Unix socket.
    pub fn unix_socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }

    /// Returns the ID of the process.
    ///
    /// # Panics
    ///
    /// If it is stopped.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.running().pid()
    }

    /// Returns the log since the last start.
    ///
    /// # Panics
    ///
    /// If it is stopped.
    #[track_caller]
    pub fn log(&self) -> String {
        self.running().output()
    }

    #[track_caller]
    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server is stopped: restart() it first")
    }

    /// Runs one command as the default user with redis-cli, and returns its output. An error reply is returned as text.
    ///
    /// # Panics
    ///
    /// If the server cannot be reached or does not answer within a minute.
    #[track_caller]
    pub fn cli<I: IntoIterator<Item: AsRef<OsStr>>>(&self, command: I) -> String {
        let mut cli = Command::new("redis-cli");
        cli.arg("-s").arg(self.unix_socket()).args(command);
        if let Some(password) = &self.password {
            cli.env("REDISCLI_AUTH", password);
        }
        cli.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn_tied(cli).unwrap_or_else(|error| panic!("cannot run redis-cli: {error}. {INSTALL_CLI}"));
        let (done, output) = sync_channel(1);
        // The thread ends at the latest when the server does, because redis-cli exits then.
        thread::spawn(move || done.send(child.wait_with_output()));
        let output = output.recv_timeout(PATIENCE).expect("the server answers redis-cli within a minute");
        let output = output.expect("redis-cli can be waited for");
        assert!(output.status.success(), "redis-cli: {}", String::from_utf8_lossy(&output.stderr).trim_end());
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Stops the server with SIGTERM. Returns when it has ended.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.terminate();
            // A paused process handles the signal only when it continues.
            process.resume();
            process.wait();
        }
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Pauses the process: its sockets stay open, connecting succeeds, and nothing is answered.
    ///
    /// # Panics
    ///
    /// If it is stopped.
    #[track_caller]
    pub fn pause(&self) {
        self.running().pause();
    }

    /// Continues after [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// If it is stopped.
    #[track_caller]
    pub fn resume(&self) {
        self.running().resume();
    }

    /// Stops the server if it runs, and starts it again on the same ports and directory. Returns when it answers.
    ///
    /// # Panics
    ///
    /// As [`RedisOptions::start`].
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        self.launch();
    }

    #[track_caller]
    fn launch(&mut self) {
        let mut command = self.program.command();
        command.arg(self.dir.path().join("redis.conf"));
        let mut process = self.program.spawn(command);
        wait_until("the server answers", PATIENCE, || {
            if process.try_wait().is_some() {
                let status = process.wait();
                panic!("{} ended with {status} instead of starting:\n{}", self.program, process.output());
            }
            self.answers().unwrap_or(false)
        });
        self.process = Some(process);
    }

    /// Whether commands are served. All listeners are bound before the first command is served, so it is enough to ask on the Unix
    /// socket. An error such as NOAUTH counts as an answer, unless data is still being loaded.
    fn answers(&self) -> io::Result<bool> {
        let mut socket = UnixStream::connect(self.unix_socket())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.write_all(b"PING\r\n")?;
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer)?;
        Ok(answer.starts_with('+') || answer.starts_with('-') && !answer.starts_with("-LOADING"))
    }
}

const INSTALL_CLI: &str = "It comes with the Debian package redis-tools, which `make test` installs; \
     on another system install Redis so that it is on the PATH";

/// Quotes a value for redis.conf.
fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
}
