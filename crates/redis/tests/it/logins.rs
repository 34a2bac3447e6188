//! Logins that change.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidewire_redis::credentials::{Credentials, LoginError, LoginFuture};
use tidewire_redis::{Client, ConnectionError, ConnectionState, Error, Login, Options, Value, WhileDown};
use tidewire_testkit::{PATIENCE, RedisServer};

use crate::servers::command;

fn options(port: u16) -> Options {
    Options::default()
        .address(("127.0.0.1", port))
        .min_backoff(Duration::from_millis(1))
        .max_backoff(Duration::from_millis(5))
        .timeout(PATIENCE)
        .while_down(WhileDown::Queue)
}

async fn whoami(client: &Client) -> Result<Value, Error> {
    client.send(command(&["ACL", "WHOAMI"])).await
}

/// A provider whose password can be changed. Without one it fails.
#[derive(Default)]
struct Vault {
    password: Mutex<Option<String>>,
    calls: AtomicUsize,
}

impl Vault {
    fn set_password(&self, password: &str) {
        *self.password.lock().unwrap() = Some(password.to_owned());
    }

    /// Waits until it has been called this many more times.
    async fn wait_for_calls(&self, times: usize) {
        let until = self.calls.load(SeqCst) + times;
        tidewire_testkit::wait_until_async("the provider is called", PATIENCE, async || {
            self.calls.load(SeqCst) >= until
        })
        .await;
    }
}

impl Credentials for Vault {
    fn login(&self) -> LoginFuture<'_> {
        Box::pin(async {
            self.calls.fetch_add(1, SeqCst);
            let password = self.password.lock().unwrap().clone();
            let password =
                password.ok_or_else(|| Arc::new(std::io::Error::other("the vault is empty")) as LoginError)?;
            Ok(Login::new(password).user("app"))
        })
    }
}

#[tokio::test]
async fn provider_is_called_for_every_attempt() {
    let server = RedisServer::options().user("app", "on >first ~* +@all").start();
    let vault = Arc::new(Vault::default());
    // The provider replaces the login.
    let options = options(server.port()).credentials(Arc::clone(&vault)).login(Login::new("ignored"));
    assert!(format!("{options:?}").contains("Credentials"));
    let client = Client::start(options);

    vault.wait_for_calls(3).await;
    let mut status = client.status();
    let failed = status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap().clone();
    assert!(matches!(failed.last_error.as_deref(), Some(ConnectionError::Credentials(_))), "{failed:?}");

    vault.set_password("wrong");
    vault.wait_for_calls(3).await;
    let failed = status.wait_for(|status| status.state == ConnectionState::Failed).await.unwrap().clone();
    assert!(matches!(failed.last_error.as_deref(), Some(ConnectionError::Refused(_))), "{failed:?}");

    vault.set_password("first");
    assert_eq!(whoami(&client).await.unwrap(), Value::Bulk("app".into()));

    // The password changes, and the next connection is refused until it is known.
    server.cli(["ACL", "SETUSER", "app", "resetpass", ">second"]);
    server.cli(["CLIENT", "KILL", "USER", "app"]);
    vault.wait_for_calls(3).await;
    vault.set_password("second");
    assert_eq!(whoami(&client).await.unwrap(), Value::Bulk("app".into()));
    assert_eq!(client.status().borrow().generation, 2);
}

#[tokio::test]
async fn without_a_provider_a_login_refused_on_reconnect_is_final() {
    let server = RedisServer::options().user("app", "on >first ~* +@all").start();
    let options = options(server.port()).login(Login::new("first").user("app"));
    let client = Client::start(options);
    assert_eq!(whoami(&client).await.unwrap(), Value::Bulk("app".into()));
    server.cli(["ACL", "SETUSER", "app", "resetpass", ">second"]);
    server.cli(["CLIENT", "KILL", "USER", "app"]);
    let mut status = client.status();
    let status = status.wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
    assert!(matches!(status.last_error.as_deref(), Some(ConnectionError::Refused(_))), "{status:?}");
}

#[tokio::test]
async fn with_a_provider_other_refusals_are_final() {
    let server = RedisServer::options().user("app", "on >first ~* +@all").start();
    let vault = Arc::new(Vault::default());
    vault.set_password("first");
    let options = options(server.port()).credentials(vault).database(1_000_000);
    let client = Client::start(options);
    assert!(whoami(&client).await.is_err());
    client.status().wait_for(|status| status.state == ConnectionState::Closed).await.unwrap();
}

/// A provider that hangs or panics at the first call.
struct Unreliable {
    calls: AtomicUsize,
    hangs: bool,
}

impl Credentials for Unreliable {
    fn login(&self) -> LoginFuture<'_> {
        let is_first = self.calls.fetch_add(1, SeqCst) == 0;
        assert!(!is_first || self.hangs, "the first login panics");
        Box::pin(async move {
            if is_first {
                std::future::pending::<()>().await;
            }
            Ok(Login::new("first").user("app"))
        })
    }
}

#[tokio::test]
async fn provider_that_hangs_or_panics_is_called_again() {
    let server = RedisServer::options().user("app", "on >first ~* +@all").start();
    for hangs in [true, false] {
        let connect_timeout = if hangs { Duration::from_millis(50) } else { PATIENCE };
        let provider = Unreliable { calls: AtomicUsize::new(0), hangs };
        let options = options(server.port()).connect_timeout(connect_timeout).credentials(provider);
        let client = Client::start(options);
        let mut states = client.states();
        let who = tokio::time::timeout(PATIENCE, whoami(&client)).await.expect("it ends");
        assert!(matches!(&who, Ok(Value::Bulk(name)) if name == "app"), "{hangs} {who:?}");
        let failed = loop {
            let status = states.next().await.unwrap();
            if status.state == ConnectionState::Failed {
                break status;
            }
        };
        let error = failed.last_error.unwrap();
        let is_reported = if hangs {
            matches!(&*error, ConnectionError::ConnectTimedOut)
        } else {
            matches!(&*error, ConnectionError::Credentials(source) if source.to_string().contains("panicked"))
        };
        assert!(is_reported, "{hangs} {error:?}");
    }
}
