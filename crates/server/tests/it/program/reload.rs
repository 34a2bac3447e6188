//! SIGHUP reloads tokens, keys and certificates.

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value as Json, json};
use tidewire_conn::client::{Connect as _, TcpConnector};
use tidewire_conn::tls::{Authorities, TlsClientOptions, TlsConnector};
use tidewire_testkit::{Certificates, PATIENCE, Process, wait_until};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use super::{ServerProcess, WorkDir, log};
use crate::client::Client;

const RELOADED: &str = "tokens and certificate reloaded";
const FAILED: &str = "reload failed, keeping the previous configuration";

/// Sends SIGHUP. Returns the log lines added until one has this message.
fn reload(process: &Process, last: &str) -> Vec<Json> {
    let before = log(process).len();
    process.hangup();
    let added = || log(process).split_off(before);
    wait_until("the reload is logged", PATIENCE, || added().iter().any(|line| line["message"] == last));
    added()
}

/// Returns a strong token for a user.
fn token(user_id: &str) -> String {
    format!("{user_id}-0123456789abcdefghijklmnopqrstuvwxyz")
}

fn settings(tokens: &Json) -> Json {
    let auth = json!({"tokens": tokens, "permissions": {"default": "allow"}});
    json!({"engine": "memory", "rateLimit": {"maxRequests": 1000, "windowMs": 1000}, "auth": auth})
}

async fn log_in(server: &ServerProcess, token: &str) -> Result<Client, String> {
    let mut client = server.client().await;
    let id = client.send("auth.login", json!({"token": token})).await;
    let reply = client.reply(id).await;
    if reply["type"] == "result" { Ok(client) } else { Err(reply["code"].as_str().unwrap().to_owned()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_token_ends_its_sessions_at_once() {
    let dir = WorkDir::new();
    let users = |names: &[&str]| -> Json {
        names
            .iter()
            .map(|name| (token(name), json!({"userId": name, "roles": ["admin"]})))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    dir.file("c.json", settings(&users(&["ann", "bob"])).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let (mut ann, mut bob) =
        (log_in(&server, &token("ann")).await.unwrap(), log_in(&server, &token("bob")).await.unwrap());
    let mut anonymous = server.client().await;
    assert_eq!(log_in(&server, &token("eve")).await.err().unwrap(), "UNAUTHORIZED");

    // A new token of the same user does not keep the sessions of the old one.
    let mut tokens = users(&["bob", "eve"]);
    tokens["ann-zyxwvutsrqponmlkjihgfedcba9876543210"] = json!({"userId": "ann", "roles": ["admin"]});
    dir.file("c.json", settings(&tokens).to_string());
    let lines = reload(&server.process, RELOADED);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!((&lines[0]["level"], &lines[0]["closed_connections"]), (&json!("INFO"), &json!(1)));
    assert_eq!(ann.push().await["event"], "session_revoked");
    assert_eq!(ann.closed().await, (4002, "session_revoked".to_owned()));
    assert_eq!(log_in(&server, &token("ann")).await.err().unwrap(), "UNAUTHORIZED");
    let mut again = log_in(&server, "ann-zyxwvutsrqponmlkjihgfedcba9876543210").await.unwrap();
    log_in(&server, &token("eve")).await.unwrap();
    for client in [&mut again, &mut bob] {
        client.call("store.buckets", json!({})).await;
    }
    assert_eq!(anonymous.call("auth.whoami", json!({})).await, json!({"authenticated": false}));

    // Changed roles end a session too.
    let mut tokens = users(&["bob", "eve"]);
    tokens[&*token("bob")]["roles"] = json!(["reader"]);
    dir.file("c.json", settings(&tokens).to_string());
    let lines = reload(&server.process, RELOADED);
    assert_eq!(lines[0]["closed_connections"], 2);
    assert_eq!(bob.closed().await.0, 4002);
    let mut bob = log_in(&server, &token("bob")).await.unwrap();
    assert_eq!(bob.call_err("server.stats", json!({})).await.0, "FORBIDDEN");
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_file_changes_nothing_and_is_logged_with_its_location() {
    let dir = WorkDir::new();
    let valid = settings(&json!({token("ann"): {"userId": "ann"}}));
    dir.file("c.json", valid.to_string());
    let server = dir.start(&["--config", "c.json"]);
    let mut ann = log_in(&server, &token("ann")).await.unwrap();
    dir.file(
        "c.json",
        "{\"auth\": {\"tokens\": {\n  \"t\": {\"userId\": 7},\n  \"sha256:77\": {\"userId\": \"bob\"}}}}",
    );
    let lines = reload(&server.process, FAILED);
    wait_until("both errors are logged", PATIENCE, || {
        log(&server.process).iter().filter(|line| line["message"] == FAILED).count() == 2
    });
    assert!(lines[0]["error"].as_str().unwrap().starts_with("c.json:2:19: expected a user id"), "{lines:?}");
    let second = log(&server.process).into_iter().filter(|line| line["message"] == FAILED).nth(1).unwrap();
    assert!(
        second["error"]
            .as_str()
            .unwrap()
            .starts_with("c.json:3:16: `auth.tokens.*`: invalid SHA-256 for the token of \"bob\""),
        "{second}"
    );
    assert_eq!(second["level"], "ERROR");
    ann.call("store.buckets", json!({})).await;
    log_in(&server, &token("ann")).await.unwrap();

    // Auth cannot be removed.
    dir.file("c.json", json!({"engine": "memory"}).to_string());
    let before = log(&server.process).len();
    server.process.hangup();
    let failed = || log(&server.process).split_off(before).into_iter().find(|line| line["message"] == FAILED);
    wait_until("the third error is logged", PATIENCE, || failed().is_some());
    assert_eq!(failed().unwrap()["error"], "auth cannot be enabled or disabled by a reload; restart the server");
    assert_eq!(server.client().await.welcome["requiresAuth"], true);
    ann.call("store.buckets", json!({})).await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_settings_that_need_a_restart_are_logged() {
    let dir = WorkDir::new();
    let ann = json!({token("ann"): {"userId": "ann"}});
    let mut file = settings(&ann);
    file["comment"] = json!("one");
    file["maxConnections"] = json!(50);
    file["auth"]["permissions"] = json!({"default": "deny", "rules": []});
    dir.file("c.json", file.to_string());
    let server = dir.start(&["--config", "c.json"]);
    file["comment"] = json!("two");
    file["maxConnections"] = json!(60);
    file["slowRequestMs"] = json!(5);
    file["auth"]["permissions"] = json!({"default": "allow", "rules": []});
    file["auth"]["tokens"][token("bob")] = json!({"userId": "bob"});
    dir.file("c.json", file.to_string());
    let lines = reload(&server.process, RELOADED);
    let keys: Vec<&Json> = lines.iter().filter(|line| line["level"] == "WARN").map(|line| &line["key"]).collect();
    assert_eq!(keys, ["auth.permissions", "maxConnections", "slowRequestMs"], "{lines:?}");
    // The new token is valid, but the new permissions are not applied.
    let mut bob = log_in(&server, &token("bob")).await.unwrap();
    assert_eq!(bob.call_err("store.buckets", json!({})).await.0, "FORBIDDEN");
    server.stop();
}

type Socket = WebSocketStream<<TlsConnector<TcpConnector> as tidewire_conn::client::Connect>::Socket>;

/// Connects, trusting only the authority of these certificates, and reads the welcome message.
async fn connect(address: &str, certificates: &Certificates) -> Result<Socket, String> {
    let authorities = Authorities::from_pem(&std::fs::read(&certificates.authority).unwrap()).unwrap();
    let options = TlsClientOptions::default().authorities(authorities);
    let connector = TlsConnector::new(TcpConnector::new(address), "localhost", options).unwrap();
    let socket = connector.connect().await.map_err(|error| error.to_string())?.socket;
    let (mut socket, _) = tokio_tungstenite::client_async("wss://localhost/", socket).await.unwrap();
    let welcome: Json = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    assert_eq!(welcome["type"], "welcome");
    Ok(socket)
}

async fn is_served(socket: &mut Socket) -> bool {
    socket.send(Message::text(r#"{"id":1,"type":"store.buckets"}"#)).await.unwrap();
    let reply = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap().unwrap().unwrap();
    reply.to_text().unwrap().contains("\"result\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_certificate_is_used_for_new_connections() {
    let dir = WorkDir::new();
    let generate = |name: &str| {
        let path = dir.0.path().join(name);
        std::fs::create_dir(&path).unwrap();
        Certificates::generate(&path)
    };
    let (old, new) = (generate("old"), generate("new"));
    let install = |certificates: &Certificates| {
        dir.file("cert.pem", std::fs::read(&certificates.server).unwrap());
        dir.file("key.pem", std::fs::read(&certificates.server_key).unwrap());
    };
    install(&old);
    let flags = ["--port", "0", "--engine", "memory", "--tls-cert", "cert.pem", "--tls-key", "key.pem"];
    let process = Process::spawn(dir.command(&flags));
    let address = process.wait_for_line("wss://").trim_end_matches('/').to_owned();
    let mut before = connect(&address, &old).await.unwrap();

    // A certificate that does not match the key is rejected.
    dir.file("cert.pem", std::fs::read(&new.server).unwrap());
    let lines = reload(&process, FAILED);
    assert!(
        lines[0]["error"].as_str().unwrap().starts_with("--tls-cert: invalid TLS certificate or private key"),
        "{lines:?}"
    );
    connect(&address, &old).await.unwrap();

    install(&new);
    reload(&process, RELOADED);
    let mut after = connect(&address, &new).await.unwrap();
    assert!(connect(&address, &old).await.unwrap_err().contains("certificate"));
    assert!(is_served(&mut before).await && is_served(&mut after).await);
    drop((before, after));
    ServerProcess { process, url: String::new() }.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn key_removed_from_the_key_set_ends_its_sessions() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/src/auth/jwt/fixtures");
    let read = |name: &str| std::fs::read_to_string(format!("{fixtures}/{name}")).unwrap();
    let mut set: Json = serde_json::from_str(&read("jwks.json")).unwrap();
    let dir = WorkDir::new();
    dir.file("jwks.json", set.to_string());
    let auth = json!({"jwt": {"jwksFile": "jwks.json"}, "permissions": {"default": "allow"}});
    dir.file("c.json", json!({"engine": "memory", "auth": auth}).to_string());
    let server = dir.start(&["--config", "c.json"]);
    let mut clients = Vec::new();
    for name in ["rs256.jwt", "es256.jwt", "eddsa.jwt"] {
        clients.push(log_in(&server, &read(name)).await.unwrap());
    }
    set["keys"].as_array_mut().unwrap().remove(1);
    dir.file("jwks.json", set.to_string());
    assert_eq!(reload(&server.process, RELOADED)[0]["closed_connections"], 1);
    assert_eq!(clients[1].closed().await.0, 4002);
    assert_eq!(log_in(&server, &read("es256.jwt")).await.err().unwrap(), "UNAUTHORIZED");
    for index in [0, 2] {
        clients[index].call("auth.whoami", json!({})).await;
        clients[index].call("store.buckets", json!({})).await;
    }
    drop(clients);
    server.stop();
}
