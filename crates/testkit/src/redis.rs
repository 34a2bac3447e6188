//! A real redis-server for one test.

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
use crate::wait::{PATIENCE, wait_until};

/// How a [`RedisServer`] is to be started. Made by [`RedisServer::options`].
#[derive(Debug, Default)]
#[must_use = "nothing runs before `start`"]
pub struct RedisOptions {
    password: Option<String>,
    users: Vec<(String, String)>,
    tls: bool,
    config: Vec<String>,
}

impl RedisOptions {
    /// The password of the default user.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.into());
        self
    }

    /// An ACL user and its rules, such as `on >secret ~* +@all`.
    pub fn user(mut self, name: &str, rules: &str) -> Self {
        self.users.push((name.into(), rules.into()));
        self
    }

    /// Listens for TLS too, on [`RedisServer::tls_addr`]. Clients may show a certificate; `tls-auth-clients yes` as a
    /// [config line](Self::config) makes them.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// A line of redis.conf, after ours and so stronger than they are.
    pub fn config(mut self, line: &str) -> Self {
        self.config.push(line.into());
        self
    }

    /// Starts the server; returns when it answers.
    ///
    /// # Panics
    ///
    /// When redis-server is missing or refuses to start, with what it said.
    #[track_caller]
    pub fn start(self) -> RedisServer {
        let dir = tempfile::Builder::new().prefix("tidewire-redis-").tempdir().expect("a temporary directory");
        let tls = self.tls.then(|| (Port::reserve(), Certificates::generate(dir.path())));
        let mut server =
            RedisServer { port: Port::reserve(), tls, password: self.password.clone(), dir, process: None };
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
        let mut line = |text: std::fmt::Arguments<'_>| writeln!(conf, "{text}").expect("a String takes everything");
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

/// A redis-server process on loopback ports and a unix socket of its own, with its own directory.
///
/// Ports, socket and directory stay the same from start to drop, through any number of restarts. Nothing is saved to
/// disk unless a config line such as `appendonly yes` asks for it.
#[derive(Debug)]
pub struct RedisServer {
    // Dropped first, before the directory it works in.
    process: Option<Process>,
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
    /// As [`RedisOptions::start`].
    #[track_caller]
    pub fn start() -> Self {
        Self::options().start()
    }

    /// Chooses how to start it.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Where it listens for plain TCP.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The port of [`addr`](Self::addr).
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Where it listens for TLS.
    ///
    /// # Panics
    ///
    /// When it was started without [`RedisOptions::tls`].
    #[track_caller]
    pub fn tls_addr(&self) -> SocketAddr {
        self.tls().0.addr()
    }

    /// The certificates of its TLS side, and one for a client.
    ///
    /// # Panics
    ///
    /// When it was started without [`RedisOptions::tls`].
    #[track_caller]
    pub fn certificates(&self) -> &Certificates {
        &self.tls().1
    }

    #[track_caller]
    fn tls(&self) -> &(Port, Certificates) {
        self.tls.as_ref().expect("the server was started without TLS: use RedisServer::options().tls()")
    }

    /// Its unix socket.
    pub fn unix_socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }

    /// The id of its process.
    ///
    /// # Panics
    ///
    /// When it is stopped.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.running().pid()
    }

    /// What it has logged since it was last started.
    ///
    /// # Panics
    ///
    /// When it is stopped.
    #[track_caller]
    pub fn log(&self) -> String {
        self.running().output()
    }

    #[track_caller]
    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server is stopped: restart() it first")
    }

    /// Runs one command as the default user, with redis-cli, and returns what that prints.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached or does not answer within a minute. An error reply is returned as text.
    #[track_caller]
    pub fn cli<I: IntoIterator<Item: AsRef<OsStr>>>(&self, command: I) -> String {
        let mut cli = Command::new("redis-cli");
        cli.arg("-s").arg(self.unix_socket()).args(command);
        if let Some(password) = &self.password {
            cli.env("REDISCLI_AUTH", password);
        }
        cli.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn_tied(cli).unwrap_or_else(|error| panic!("cannot run redis-cli: {error}. {HOW_TO_GET_IT}"));
        let (done, output) = sync_channel(1);
        // Ends with the server at the latest, because then redis-cli does.
        thread::spawn(move || done.send(child.wait_with_output()));
        let output = output.recv_timeout(PATIENCE).expect("redis-server answers redis-cli within a minute");
        let output = output.expect("redis-cli can be waited for");
        assert!(output.status.success(), "redis-cli: {}", String::from_utf8_lossy(&output.stderr).trim_end());
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Ends it as an operator would (SIGTERM); returns when it has ended.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.terminate();
            // A paused process takes the signal only once it goes on.
            process.resume();
            process.wait();
        }
    }

    /// Ends it with no warning (SIGKILL).
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Stops it in its tracks: its sockets stay open, connecting succeeds, nothing is answered.
    ///
    /// # Panics
    ///
    /// When it is stopped.
    #[track_caller]
    pub fn pause(&self) {
        self.running().pause();
    }

    /// Lets it go on after [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// When it is stopped.
    #[track_caller]
    pub fn resume(&self) {
        self.running().resume();
    }

    /// Starts it again on the same ports and directory, after stopping it if it runs; returns when it answers.
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
        let mut command = Command::new("redis-server");
        command.arg(self.dir.path().join("redis.conf"));
        let mut process = Process::try_spawn(command)
            .unwrap_or_else(|error| panic!("cannot start redis-server: {error}. {HOW_TO_GET_IT}"));
        wait_until("redis-server answers", PATIENCE, || {
            if process.exited().is_some() {
                let status = process.wait();
                panic!("redis-server ended with {status} instead of starting:\n{}", process.output());
            }
            self.answers().unwrap_or(false)
        });
        self.process = Some(process);
    }

    /// Whether commands are served. All listeners are bound before the first command is, so the unix socket speaks for
    /// the others; an error such as NOAUTH is as good an answer as PONG, unless data is still being loaded.
    fn answers(&self) -> io::Result<bool> {
        let mut socket = UnixStream::connect(self.unix_socket())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.write_all(b"PING\r\n")?;
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer)?;
        Ok(answer.starts_with('+') || answer.starts_with('-') && !answer.starts_with("-LOADING"))
    }
}

const HOW_TO_GET_IT: &str = "It comes with the Debian package redis-server, which `make test` installs; \
     on another system install Redis so that it is on the PATH";

/// As redis.conf wants a value that may hold anything.
fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
}
