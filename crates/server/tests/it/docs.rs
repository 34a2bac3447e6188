//! Checks the documentation: links are valid, and examples run.
//!
//! The language of a fenced block determines how it is checked:
//!
//! - `session`: a WebSocket session. Lines that begin with `> ` are sent, lines that begin with `< ` must be received, in this order.
//!   `…` in a received line matches any text. `"name":"…"` in a sent line takes the value that was received last for that member
//!   ([`Session::fill_in`]). `# client 2` continues on another connection, and `# closed 4002 session_revoked` expects the close of
//!   the current one. Other lines that begin with `#` are comments. All sessions of a page share one server with a store in memory.
//! - `toml`: a configuration file, or a part of one. The loader of the server must accept it. If the first line is
//!   `# tidewire.toml`, the server of the page runs with it.
//! - `sh`: if every command is `tidewire`, the commands run in a directory that has the page's `tidewire.toml`. A command that would
//!   start a server runs with `--check`. A comment `# exits with 1` after a command states its exit code.
//! - `rust`: a doctest. The page must be included in the documentation of a crate.
//!
//! Blocks in any other language are not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::Value as Json;
use tempfile::TempDir;
use tidewire::config;
use tidewire_testkit::{Certificates, PATIENCE, Process};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

/// A Markdown file of the repository.
struct Page {
    /// The path from the root of the repository.
    path: PathBuf,
    text: String,
}

/// A fenced block.
struct Block<'a> {
    language: &'a str,
    /// The number of the line after the opening fence, from 1.
    first_line: usize,
    lines: Vec<&'a str>,
}

fn root() -> PathBuf {
    fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap()
}

fn pages() -> Vec<Page> {
    let root = root();
    let mut paths: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(PathBuf::from).into();
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).unwrap().map(Result::unwrap) {
            let path = folder.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                paths.push(path);
            }
        }
    }
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().file_name());
    paths.extend(crates.map(|name| Path::new("crates").join(name).join("README.md")));
    paths.sort();
    let read = |path: PathBuf| fs::read_to_string(root.join(&path)).ok().map(|text| Page { path, text });
    paths.into_iter().filter_map(read).collect()
}

impl Page {
    fn blocks(&self) -> Vec<Block<'_>> {
        let mut blocks = Vec::new();
        let mut open: Option<(Block<'_>, &str)> = None;
        for (index, line) in self.text.lines().enumerate() {
            let fence = fence(line);
            match (&mut open, fence) {
                (None, Some((marks, language))) => {
                    open = Some((Block { language, first_line: index + 2, lines: Vec::new() }, marks));
                }
                (Some((_, opening)), Some((marks, ""))) if marks.starts_with(*opening) => {
                    blocks.extend(open.take().map(|(block, _)| block));
                }
                (Some((block, _)), _) => block.lines.push(line),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a fenced block is not closed", self.path.display());
        blocks
    }

    /// Returns the lines outside of fenced blocks, with their numbers from 1.
    fn prose(&self) -> Vec<(usize, &str)> {
        let blocks = self.blocks();
        let fenced: BTreeSet<usize> =
            blocks.iter().flat_map(|block| block.first_line - 1..=block.first_line + block.lines.len()).collect();
        let lines = self.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        lines.filter(|(number, _)| !fenced.contains(number)).collect()
    }

    /// Returns the configuration file of the page.
    fn config(&self) -> Option<String> {
        let mut blocks = self.blocks().into_iter().filter(|block| {
            block.language == "toml" && block.lines.first().is_some_and(|line| line.trim() == "# tidewire.toml")
        });
        let first = blocks.next()?;
        assert!(blocks.next().is_none(), "{}: there are two tidewire.toml", self.path.display());
        Some(first.lines.join("\n"))
    }

    /// Returns the anchors that GitHub makes of the headings, and those of `<a id="…">`.
    fn anchors(&self) -> BTreeSet<String> {
        let mut anchors = BTreeSet::new();
        for (_, line) in self.prose() {
            for quoted in line.split("<a id=\"").skip(1) {
                anchors.extend(quoted.split('"').next().map(str::to_owned));
            }
            let heading = line.trim_start_matches('#');
            if heading.len() == line.len() || !heading.starts_with(' ') {
                continue;
            }
            let slug = slug(heading.trim());
            let numbered = (1..).map(|number| format!("{slug}-{number}"));
            let free = std::iter::once(slug.clone()).chain(numbered).find(|anchor| !anchors.contains(anchor));
            anchors.extend(free);
        }
        anchors
    }

    /// Returns the targets of links, with the numbers of their lines.
    fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (number, line) in self.prose() {
            let line = without_code(line);
            for rest in line.split("](").skip(1) {
                links.extend(rest.split(')').next().map(|target| (number, target.to_owned())));
            }
            let definition = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
            links.extend(definition.map(|(_, target)| (number, target.trim().to_owned())));
        }
        links
    }
}

/// Returns the marks and the language of a line that opens or closes a fenced block.
fn fence(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let marks = line.len() - line.trim_start_matches('`').len();
    (marks >= 3).then(|| (&line[..marks], line[marks..].trim()))
}

/// Returns the line without inline code, where brackets are not links.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("code")
}

/// Returns the anchor of a heading: lower case, without punctuation, hyphens for spaces.
fn slug(heading: &str) -> String {
    // GitHub uses only the text of a link.
    let mut text = String::new();
    for (index, part) in heading.split("](").enumerate() {
        text.push_str(if index == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) });
    }
    let kept = text.chars().filter(|one| one.is_alphanumeric() || matches!(one, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|one| if one == ' ' { '-' } else { one }).collect()
}

/// Removes `.` and resolves `..` without accessing the file system.
fn normalize(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(normal.pop()),
            other => normal.push(other),
        }
    }
    normal
}

/// Panics with all problems, so that one run shows them all.
#[track_caller]
fn expect_none(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems\n\n{}\n", problems.len(), problems.join("\n\n"));
}

#[test]
fn links_point_to_existing_files_and_headings() {
    let (root, pages) = (root(), pages());
    let anchors: BTreeMap<PathBuf, BTreeSet<String>> =
        pages.iter().map(|page| (page.path.clone(), page.anchors())).collect();
    let mut problems = Vec::new();
    let mut count = 0;
    for page in &pages {
        for (line, target) in page.links() {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = page.path.parent().unwrap();
            let file = if file.is_empty() { page.path.clone() } else { normalize(&folder.join(file)) };
            let problem = if !root.join(&file).exists() {
                format!("there is no {}", file.display())
            } else if anchor.is_empty() || anchors.get(&file).is_none_or(|known| known.contains(anchor)) {
                continue;
            } else {
                let known: Vec<&str> = anchors[&file].iter().map(String::as_str).collect();
                format!("{} has no heading #{anchor}; it has {}", file.display(), known.join(", "))
            };
            problems.push(format!("{}:{line}: broken link {target}\n  {problem}", page.path.display()));
        }
    }
    assert!(count > 50, "only {count} links were found");
    expect_none(&problems);
}

#[test]
fn rust_examples_are_doctests() {
    let root = root();
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let included: String = crates.filter_map(|folder| fs::read_to_string(folder.join("src/lib.rs")).ok()).collect();
    // `make package` runs the examples of the READMEs.
    let is_checked = |page: &&Page| page.path.starts_with("docs");
    let mut problems = Vec::new();
    for page in pages().iter().filter(is_checked) {
        let path = page.path.display().to_string();
        for block in page.blocks().iter().filter(|block| block.language.split(',').next() == Some("rust")) {
            if !included.contains(&path) {
                problems.push(format!(
                    "{path}:{}: this example is not compiled\n  add to crates/server/src/lib.rs:\n  \
                     #[cfg(doctest)] #[doc = include_str!(\"../../../{path}\")] mod {} {{}}",
                    block.first_line,
                    page.path.file_stem().unwrap().to_string_lossy().replace('-', "_"),
                ));
            }
        }
    }
    expect_none(&problems);
}

#[test]
fn configuration_examples_are_accepted() {
    let mut problems = Vec::new();
    for page in pages() {
        for block in page.blocks().iter().filter(|block| block.language == "toml") {
            let dir = WorkDir::new();
            let file = dir.config(&block.lines.join("\n"));
            let variable = |name: &str| (!name.starts_with("TIDEWIRE_")).then(|| OsString::from(SECRET));
            let args = ["tidewire".into(), "--config".into(), file.into_os_string(), "--check".into()];
            if let Err(errors) = config::Command::load(args, variable) {
                let text = errors.to_string().replace(&format!("{}/", dir.0.path().display()), "");
                problems.push(format!(
                    "{}:{}: the server does not accept this file\n  {}",
                    page.path.display(),
                    block.first_line,
                    text.trim_end().replace('\n', "\n  ")
                ));
            }
        }
    }
    expect_none(&problems);
}

/// The value of every environment variable that a file names.
const SECRET: &str = "a secret of more than thirty-two bytes";

/// The working directory of a page.
struct WorkDir(TempDir);

impl WorkDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Writes `tidewire.toml`. Paths of certificates and keys are replaced by those of generated files.
    fn config(&self, text: &str) -> PathBuf {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/auth/jwt/fixtures");
        let mut certificates = None;
        let mut lines = Vec::new();
        for line in text.lines() {
            let mut line = line.to_owned();
            for key in ["cert", "key", "publicKeyFile", "jwksFile"] {
                let Some(path) = value_of(&line, key).filter(|path| path.contains('.')) else { continue };
                let file = match key {
                    "publicKeyFile" => {
                        let algorithm = text.lines().find_map(|line| value_of(line, "algorithm")).unwrap_or_default();
                        fixtures.join(algorithm.to_lowercase()).with_extension("pem")
                    }
                    "jwksFile" => {
                        let file = self.0.path().join("keys.json");
                        fs::write(&file, JWKS).unwrap();
                        file
                    }
                    key => {
                        let made = certificates.get_or_insert_with(|| Certificates::generate(self.0.path()));
                        if key == "cert" { made.server.clone() } else { made.server_key.clone() }
                    }
                };
                line = line.replace(&format!("\"{path}\""), &format!("\"{}\"", file.display()));
            }
            lines.push(line);
        }
        let file = self.0.path().join("tidewire.toml");
        fs::write(&file, lines.join("\n")).unwrap();
        file
    }

    /// Returns a command that runs in this directory, without `TIDEWIRE_` variables of this process.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).env_remove("RUST_LOG");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TIDEWIRE_")) {
            command.env_remove(name);
        }
        command.env("TIDEWIRE_MAX_CONNECTIONS", "1000");
        command
    }
}

/// A key set with one Ed25519 key.
const JWKS: &str =
    r#"{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"one","x":"vC_skYWoMmNpjjOrV0yHOJAiagTDnxVI2D2EdUlaITU"}]}"#;

/// Returns the string value of a key in a line of TOML.
fn value_of(line: &str, key: &str) -> Option<String> {
    let (_, value) = line.split_once(&format!("{key} = \""))?;
    value.split('"').next().map(str::to_owned)
}

/// The server of a page, and its connections by the number in `# client N`.
struct Session {
    process: Process,
    url: String,
    clients: BTreeMap<u32, Socket>,
    current: u32,
    /// The last received value of each member.
    received: BTreeMap<String, Json>,
}

struct Socket {
    stream: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// The welcome message, until the page shows another message.
    welcome: Option<String>,
    is_closed: bool,
}

impl Socket {
    async fn connect(url: &str) -> Self {
        let (stream, _) = connect_async(url).await.unwrap_or_else(|error| panic!("{url}: {error}"));
        Self { stream, welcome: None, is_closed: false }
    }

    /// Returns the next text message, or why the connection has no more. Answers heartbeats.
    async fn next(&mut self) -> Result<String, String> {
        loop {
            let Ok(message) = tokio::time::timeout(PATIENCE, self.stream.next()).await else {
                return Err(format!("nothing within {PATIENCE:?}"));
            };
            match message {
                Some(Ok(Message::Text(text))) if text.starts_with("{\"type\":\"ping\"") => {
                    let pong = text.replacen("ping", "pong", 1);
                    self.stream.send(Message::text(pong)).await.map_err(|error| error.to_string())?;
                }
                Some(Ok(Message::Text(text))) => return Ok(text.to_string()),
                Some(Ok(Message::Close(close))) => {
                    self.is_closed = true;
                    let close = close.map_or_else(String::new, |close| format!("{} {}", close.code, close.reason));
                    return Err(format!("closed {close}"));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.to_string()),
                None => return Err("the connection ended".to_owned()),
            }
        }
    }
}

impl Session {
    fn start(dir: &WorkDir, config: Option<&str>) -> Self {
        let mut command = dir.command(env!("CARGO_BIN_EXE_tidewire"));
        command.args(["--engine", "memory", "--host", "127.0.0.1", "--port", "0"]);
        if let Some(text) = config {
            command.arg("--config").arg(dir.config(text));
            for name in text.lines().filter_map(|line| value_of(line, "secretEnv")) {
                command.env(name, SECRET);
            }
            if text.contains("adminListen") {
                command.args(["--admin-listen", "127.0.0.1:0"]);
            }
        }
        let process = Process::spawn(command);
        let url = format!("ws://{}", process.wait_for_line("ws://"));
        Self { process, url, clients: BTreeMap::new(), current: 1, received: BTreeMap::new() }
    }

    async fn client(&mut self) -> &mut Socket {
        if !self.clients.contains_key(&self.current) {
            let mut socket = Socket::connect(&self.url).await;
            socket.welcome = socket.next().await.ok();
            self.clients.insert(self.current, socket);
        }
        self.clients.get_mut(&self.current).unwrap()
    }

    /// Runs one line. The error has what was expected, and what happened.
    async fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(number) = line.strip_prefix("# client ") {
            let number = number.split_whitespace().next().unwrap_or_default();
            self.current = number.parse().map_err(|_| format!("no number of a client: {line}"))?;
        } else if let Some(close) = line.strip_prefix("# closed ") {
            let end = self.client().await.next().await;
            let expected = format!("closed {close}");
            if end != Err(expected.clone()) {
                return Err(format!("expected: {expected}\n  received: {}", end.unwrap_or_else(|end| end)));
            }
        } else if line.starts_with('#') || line.trim().is_empty() {
        } else if let Some(request) = line.strip_prefix("> ") {
            let request = self.fill_in(request)?;
            let client = self.client().await;
            client.welcome = None;
            client.stream.send(Message::text(request)).await.map_err(|error| format!("cannot send: {error}"))?;
        } else if let Some(expected) = line.strip_prefix("< ") {
            let client = self.client().await;
            let received = match client.welcome.take() {
                Some(welcome) if expected.contains("\"type\":\"welcome\"") => Ok(welcome),
                _ => client.next().await,
            };
            let received = received.map_err(|end| format!("expected: {expected}\n  received: {end}"))?;
            if let Ok(message) = serde_json::from_str(&received) {
                record_values(&mut self.received, &message);
            }
            if !matches(expected, &received) {
                return Err(format!("expected: {expected}\n  received: {received}"));
            }
        } else {
            return Err(format!("a line of a session begins with \"> \", \"< \" or \"#\": {line}"));
        }
        Ok(())
    }

    /// Replaces `"name":"…"` by the last received value of that member. `since` uses the value of `pos`, `after` that of
    /// `nextCursor`, and `key` that of `id`.
    fn fill_in(&self, request: &str) -> Result<String, String> {
        let mut filled = String::new();
        let mut parts = request.split("\":\"…\"").peekable();
        while let Some(part) = parts.next() {
            filled.push_str(part);
            if parts.peek().is_some() {
                let name = part.rsplit('"').next().unwrap();
                let source = match name {
                    "since" => "pos",
                    "after" => "nextCursor",
                    "key" => "id",
                    name => name,
                };
                let value = self.received.get(source).ok_or_else(|| format!("no {source} was received for {name}"))?;
                write!(filled, "\":{value}").unwrap();
            }
        }
        Ok(filled)
    }

    /// Checks that no connection has messages that the page does not show: the next message must reply to one more request.
    async fn expect_no_more_messages(&mut self) -> Result<(), String> {
        for (number, client) in self.clients.iter_mut().filter(|(_, client)| !client.is_closed) {
            let _ = client.stream.send(Message::text(r#"{"id":-1,"type":"end.ofPage"}"#)).await;
            match client.next().await {
                Ok(text) if text.starts_with("{\"id\":-1,") => {}
                Ok(text) | Err(text) => {
                    return Err(format!("client {number} received what the page does not show:\n  {text}"));
                }
            }
        }
        Ok(())
    }
}

/// Records the newest value of every member that is not an object or array.
fn record_values(values: &mut BTreeMap<String, Json>, json: &Json) {
    match json {
        Json::Object(members) => {
            for (name, value) in members {
                if value.is_object() || value.is_array() {
                    record_values(values, value);
                } else {
                    values.insert(name.clone(), value.clone());
                }
            }
        }
        Json::Array(elements) => elements.iter().for_each(|element| record_values(values, element)),
        _ => {}
    }
}

/// Returns whether `expected` matches the whole text, where `…` matches any text.
fn matches(expected: &str, text: &str) -> bool {
    let parts: Vec<&str> = expected.split('…').collect();
    let [first, middle @ .., last] = &parts[..] else { return expected == text };
    let Some(mut rest) = text.strip_prefix(first).and_then(|rest| rest.strip_suffix(last)) else { return false };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_run_as_documented() {
    let mut problems = Vec::new();
    for page in pages() {
        let blocks = page.blocks();
        let sessions: Vec<&Block<'_>> = blocks.iter().filter(|block| block.language == "session").collect();
        if sessions.is_empty() {
            continue;
        }
        let dir = WorkDir::new();
        let mut session = Session::start(&dir, page.config().as_deref());
        let problem = 'page: {
            for block in sessions {
                for (index, line) in block.lines.iter().enumerate() {
                    if let Err(problem) = session.line(line).await {
                        break 'page Some((block.first_line + index, problem));
                    }
                }
            }
            session.expect_no_more_messages().await.err().map(|problem| (page.text.lines().count(), problem))
        };
        // Only the first problem of a page is reported, because later ones usually follow from it.
        problems.extend(problem.map(|(line, problem)| format!("{}:{line}:\n  {problem}", page.path.display())));
        session.process.kill();
    }
    expect_none(&problems);
}

/// Returns the commands of a block, each with its line number. A backslash at the end of a line continues the command.
fn commands(block: &Block<'_>) -> Vec<(usize, String)> {
    let mut commands = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in block.lines.iter().enumerate() {
        let (number, mut command) = open.take().unwrap_or((block.first_line + index, String::new()));
        if let Some(part) = line.strip_suffix('\\') {
            command.push_str(part);
            open = Some((number, command));
        } else {
            command.push_str(line);
            commands.push((number, command));
        }
    }
    commands.retain(|(_, command)| !command.trim().is_empty() && !command.trim_start().starts_with('#'));
    commands
}

/// Returns the words of a command, without leading variables and a trailing comment.
fn words(command: &str) -> Vec<&str> {
    let command = command.split(" #").next().unwrap();
    let is_variable = |word: &&str| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|one| one.is_ascii_uppercase() || one == '_'))
    };
    command.split_whitespace().skip_while(is_variable).collect()
}

/// Returns whether the test can run the command: it needs no running server, and no file outside its directory.
fn can_run(words: &[&str]) -> bool {
    let is_outside = |word: &&str| word.matches('/').count() > 1 && word.starts_with('/');
    words[1..].first() != Some(&"revoke")
        && !words.iter().any(is_outside)
        && !words.iter().any(|word| word.contains('$'))
}

#[test]
fn commands_succeed() {
    let program = Path::new(env!("CARGO_BIN_EXE_tidewire"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    let mut problems = Vec::new();
    for page in pages() {
        let blocks = page.blocks();
        let commands: Vec<Vec<(usize, String)>> =
            blocks.iter().filter(|block| block.language == "sh").map(commands).collect();
        let is_ours = |command: &(usize, String)| words(&command.1).first() == Some(&"tidewire");
        let ours: Vec<&(usize, String)> = commands.iter().filter(|block| block.iter().all(is_ours)).flatten().collect();
        let dir = WorkDir::new();
        if let Some(text) = page.config() {
            dir.config(&text);
        }
        Certificates::generate(dir.0.path());
        for (from, to) in [("server.pem", "cert.pem"), ("server.key", "key.pem")] {
            fs::rename(dir.0.path().join(from), dir.0.path().join(to)).unwrap();
        }
        if ours.iter().any(|(_, command)| words(command).get(1) == Some(&"backup")) {
            create_data(&dir);
        }
        for (line, command) in ours {
            let words = words(command);
            if !can_run(&words) {
                continue;
            }
            let (text, comment) = command.split_once(" #").unwrap_or((command, ""));
            let is_server = words[1..].iter().all(|word| {
                !["check-access", "backup", "restore", "help", "--help", "-h", "--version", "-V", "--check"]
                    .contains(word)
            });
            let check = if is_server { " --check" } else { "" };
            let mut shell = dir.command("sh");
            shell.arg("-c").arg(format!("{text}{check}")).env("PATH", &path);
            let output = shell.output().unwrap();
            let expected = comment.split("exits with ").nth(1).and_then(|code| code.trim().parse().ok()).unwrap_or(0);
            if output.status.code() != Some(expected) {
                problems.push(format!(
                    "{}:{line}: {}{check}\n  expected the exit code {expected}, got {}\n  {}{}",
                    page.path.display(),
                    text.trim(),
                    output.status,
                    String::from_utf8_lossy(&output.stdout),
                    String::from_utf8_lossy(&output.stderr)
                ));
            }
        }
    }
    expect_none(&problems);
}

/// Creates the default data directory, as a server that has run once.
fn create_data(dir: &WorkDir) {
    let mut command = dir.command(env!("CARGO_BIN_EXE_tidewire"));
    command.args(["--port", "0"]);
    let mut process = Process::spawn(command);
    process.wait_for_line("ws://");
    process.terminate();
    assert!(process.wait().success(), "{}", process.output());
}

#[test]
fn anchors_match_those_of_github() {
    for (heading, anchor) in [
        ("Cursor pagination", "cursor-pagination"),
        ("`store.insert` and friends", "storeinsert-and-friends"),
        ("Signed tokens (JWT)", "signed-tokens-jwt"),
        ("At-least-once, once more", "at-least-once-once-more"),
        ("A [link](x.md#y) in it", "a-link-in-it"),
        ("TLS & proxies", "tls--proxies"),
    ] {
        assert_eq!(slug(heading), anchor);
    }
    let page = Page { path: "a.md".into(), text: "# One\n## One\n```\n# no\n```\n<a id=\"two\"></a>\n".into() };
    assert_eq!(page.anchors().into_iter().collect::<Vec<_>>(), ["one", "one-1", "two"]);
}

#[test]
fn ellipsis_matches_any_text() {
    for (expected, text, is_match) in [
        ("{\"a\":1}", "{\"a\":1}", true),
        ("{\"a\":1}", "{\"a\":12}", false),
        ("{\"a\":…}", "{\"a\":12}", true),
        ("{…,\"b\":…,\"c\":3}", "{\"a\":1,\"b\":2,\"c\":3}", true),
        ("{…,\"c\":…,\"b\":3}", "{\"a\":1,\"b\":2,\"c\":3}", false),
        ("{\"a\":…}", "{\"b\":1}", false),
    ] {
        assert_eq!(matches(expected, text), is_match, "{expected} {text}");
    }
}
